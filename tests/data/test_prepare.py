"""`headstart prepare` at size, and whatever may befall it: kills, Ctrl-C, dying workers."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

import pytest
from fixtures_chat import CHATML, CHATML_STRIPS, chat_tokenizer
from training import CHAT_VOCAB, chat_target, command, save_target, saved

from headstart.data import render
from headstart.data.capture import capture
from headstart.data.conversations import Conversation
from headstart.data.notes import Note
from headstart.data.render import CHUNK, Renderer, render_all
from headstart.data.rows import TokenRow, read_rows
from headstart.data.template import Audit, ChatTemplate

ODD = 10
"""One row in so many is odd, in one of three ways."""


def write_chats(path: Path, rows: int) -> Path:
    """Write rows of which nine in ten are usable."""
    with path.open("w") as file:
        for n in range(rows):
            if n % ODD:
                user = {"role": "user", "content": f"question {n}"}
                answer = {"role": "assistant", "content": f"answer {n * 7919 % 1000}"}
                file.write(json.dumps({"messages": [user, answer]}) + "\n")
            else:
                odd = (
                    "junk",
                    '{"messages": []}',
                    '{"prompt": "a <|im_end|> b", "completion": "c"}',
                )
                file.write(odd[n // ODD % 3] + "\n")
    return path


def usable(rows: int) -> list[int]:
    return [n for n in range(rows) if n % ODD]


@pytest.fixture(scope="module")
def target_path(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    template = ChatTemplate(chat_target().tokenizer)
    return Renderer(template, max_length=200, vocab_size=CHAT_VOCAB, empty=Audit())


def conversations(numbers) -> list[Conversation]:
    for n in numbers:
        chat = ({"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}."})
        yield Conversation(f"chat-{n}", "other", chat)


# Rendering by several processes


@pytest.fixture
def few_alone(monkeypatch) -> None:
    """Start workers after two chunks, so that a test need not render thousands before."""
    monkeypatch.setattr(render, "ALONE", 2 * CHUNK)


@pytest.mark.parametrize("amount", [1, 3 * CHUNK, 12 * CHUNK + 1])
def test_workers_give_the_rows_of_one_process_in_the_same_order(renderer, few_alone, amount):
    alone, shared = (
        [
            row
            for part in render_all(conversations(range(amount)), renderer, workers=n)
            for row in part.rows
        ]
        for n in (1, 3)
    )
    assert [row.row_id for row in shared] == [f"chat-{n}" for n in range(amount)]
    assert shared == alone


def test_no_more_is_read_ahead_than_the_workers_hold(renderer, few_alone):
    read = []
    endless = conversations(read.append(n) or n for n in count())
    parts = render_all(endless, renderer, workers=2)
    for _ in range(20):
        next(parts)
    assert len(read) <= (20 + 3) * CHUNK
    parts.close()
    assert not multiprocessing.active_children()


def test_a_killed_worker_ends_the_run_with_one_sentence(renderer, few_alone):
    parts = render_all(conversations(count()), renderer, workers=2)
    for _ in range(10):
        next(parts)
    multiprocessing.active_children()[0].kill()
    with pytest.raises(RuntimeError, match=r"process ended by signal 9 \(SIGKILL\); run the same"):
        list(islice(parts, 10))
    assert not multiprocessing.active_children()


def test_an_error_in_a_worker_is_the_error_of_the_run(renderer, few_alone):
    bad = TokenRow("odd one", "other", [5, 999], [0, 1], None)
    given = [*conversations(range(4 * CHUNK)), Conversation("odd one", "other", (), bad)]
    with pytest.raises(ValueError, match="row odd one: token id 999 outside the target's vocab"):
        list(render_all(given, renderer, workers=2))
    assert not multiprocessing.active_children()


def test_an_error_of_the_reader_ends_the_workers(renderer, few_alone):
    def broken():
        yield from conversations(range(4 * CHUNK))
        raise ValueError("line 9 is torn")

    with pytest.raises(ValueError, match="line 9 is torn"):
        list(render_all(broken(), renderer, workers=2))
    assert not multiprocessing.active_children()


def test_a_tokenised_row_is_cut_and_counted_like_any_other(renderer):
    rows = [
        TokenRow("cut", "other", [5] * 300, [0] * 150 + [1] * 150, None),
        TokenRow("gone", "other", [5] * 300, [0] * 250 + [1] * 50, None),
    ]
    given = [Conversation(row.row_id, "other", (), row) for row in rows]
    (part,) = render_all(given, renderer, workers=1)
    assert [(len(row.token_ids), row.supervised) for row in part.rows] == [(200, 50)]
    assert part.audit.conversations == 2
    assert part.notes == [
        Note("repaired", "cut to max_length", None, "cut"),
        Note("dropped", "truncated away", None, "gone"),
    ]


# The command


def arguments(target_path: Path, chats: Path, out: Path, *more: str) -> list[str]:
    given = [*saved(target_path), f"data.path={chats}", "data.max_length=200", f"out={out}"]
    return ["prepare", *given, *more]


@pytest.fixture(scope="module")
def twenty_thousand(target_path, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("large")
    chats = write_chats(root / "chats.jsonl", 20_000)
    command(*arguments(target_path, chats, root / "rows", "workers=2"))
    return root


def test_twenty_thousand_rows_are_all_accounted_for(twenty_thousand):
    rows, meta = read_rows(twenty_thousand / "rows")
    assert len(rows) == meta.counts["rows"] == 18_000
    log = (twenty_thousand / "rows" / "cli.log").read_text()
    assert "kept 18666 of 20000 rows: 667 not valid JSON (lines 1, 31, 61, ...)" in log
    assert "667 without turns (lines 11, 41, 71, ...)" in log
    assert "666 with the special token <|im_end|> inside a turn" in meta.summary


def test_every_row_that_was_dropped_is_named_in_a_file(twenty_thousand):
    text = (twenty_thousand / "rows" / "row_notes.jsonl").read_text()
    notes = [json.loads(line) for line in text.splitlines()]
    assert len(notes) == 2000
    assert {note["file"] for note in notes} == {str(twenty_thousand / "chats.jsonl")}
    assert {note["line"] for note in notes} == set(range(1, 20_001, ODD))


@pytest.mark.parametrize("workers", [1, 2])
def test_every_note_has_place_and_id_of_its_row(target_path, few_alone, tmp_path, workers):
    rows = [
        {"id": "mine", "prompt": "a <|im_end|> b", "completion": "c"},
        {"id": "long", "prompt": "a", "completion": "b" * 300},
        {"id": "longer", "prompt": "a" * 300, "completion": "b"},
        {"id": "good", "prompt": "a", "completion": "b"},
        {"id": "bad"},
    ]
    good = [{"id": f"{n}", "prompt": "a", "completion": "b"} for n in range(3 * CHUNK)]
    chats = tmp_path / "a.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in good + rows))
    command(*arguments(target_path, chats, tmp_path / "rows", f"workers={workers}"))
    notes = [json.loads(x) for x in (tmp_path / "rows" / "row_notes.jsonl").open()]
    assert {note.pop("file") for note in notes} == {str(chats)}
    found = sorted((n["line"] - len(good), n.get("row_id"), n["what"], n["reason"]) for n in notes)
    assert found == [
        (1, "mine", "dropped", "with the special token <|im_end|> inside a turn"),
        (2, "long", "repaired", "cut to max_length"),
        (3, "longer", "dropped", "truncated away"),
        (
            5,
            None,
            "dropped",
            "without any of messages, conversations, prompt, turns, input_ids",
        ),
    ]


def test_a_row_holds_the_answer_of_its_line(twenty_thousand):
    rows, _ = read_rows(twenty_thousand / "rows")
    decode = chat_target().tokenizer.decode
    for row in random.Random(0).sample(list(rows), 100):
        n = int(row.row_id.removeprefix("line-")) - 1
        taught = [t for t, on in zip(row.token_ids, row.loss_mask, strict=True) if on]
        assert decode(taught) == f"answer {n * 7919 % 1000}<|im_end|>"


def test_a_row_whose_id_an_earlier_one_has_is_renamed_and_counted(target_path, tmp_path):
    """A template that strips reasoning splits x into x-1 and x-2; x-1 is another row's own id."""
    shutil.copytree(target_path, tmp_path / "target")
    chat_tokenizer(CHATML_STRIPS).save_pretrained(tmp_path / "target")
    turns = [("user", "a"), ("assistant", "<think>b</think>c")] * 2
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = [{"id": "x", "messages": messages}, {"id": "x-1", "messages": messages[:2]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command(*arguments(tmp_path / "target", tmp_path / "a.jsonl", tmp_path / "rows"))
    rows, meta = read_rows(tmp_path / "rows")
    assert [row.row_id for row in rows] == ["x-1", "x-1-again", "x-2"]
    assert "1 renamed, as an earlier row had their id" in meta.summary
    notes = [json.loads(x) for x in (tmp_path / "rows" / "row_notes.jsonl").open()]
    assert [(note["row_id"], note["reason"][:7]) for note in notes] == [
        ("x", "split w"),
        ("x-1-again", "renamed"),
    ]


def test_p18_rows_and_a_capture_of_another_template_text_are_refused(target_path, tmp_path):
    """The other text renders the same ids: nothing but the text tells the two apart."""
    chats = write_chats(tmp_path / "a.jsonl", 20)
    command(*arguments(target_path, chats, tmp_path / "rows"))
    shutil.copytree(target_path, tmp_path / "other")
    chat_tokenizer("{# edited #}" + CHATML).save_pretrained(tmp_path / "other")
    with pytest.raises(SystemExit, match=r"rows: holds rows .* made with chat template="):
        command(*arguments(tmp_path / "other", chats, tmp_path / "rows"))
    command(*arguments(tmp_path / "other", chats, tmp_path / "more"))
    (rows, meta), (more, other) = (read_rows(tmp_path / name) for name in ("rows", "more"))
    assert list(rows) == list(more)
    capture(chat_target(), rows, tmp_path / "features", meta=meta)
    with pytest.raises(ValueError, match=r"features: made with template_hash=.*choose another"):
        capture(chat_target(), more, tmp_path / "features", meta=other)


def test_no_row_is_longer_than_the_targets_context(target_path, tmp_path):
    row = {"prompt": "a", "completion": "b" * 3000}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    given = arguments(target_path, tmp_path / "a.jsonl", tmp_path / "rows", "data.max_length=9999")
    command(*given)
    ((row,), meta) = read_rows(tmp_path / "rows")
    assert len(row.token_ids) == 2048
    assert "1 cut to max_length" in meta.summary
    log = (tmp_path / "rows" / "cli.log").read_text()
    assert "data.max_length=9999 is more than the target's context of 2048 tokens" in log


@pytest.fixture
def start() -> Iterator[Callable[[list[str]], subprocess.Popen]]:
    """Give a function that starts `headstart ARGUMENTS` as the leader of a process group."""
    started = []

    def start_one(given: list[str]) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", "headstart", *given],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        with contextlib.suppress(ProcessLookupError):  # as it should be
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def wait_for_bytes(process: subprocess.Popen, directory: Path, wanted: int) -> None:
    """Wait until rows of so many bytes are on disk."""
    deadline = time.monotonic() + 300
    while sum(p.stat().st_size for p in directory.glob("[rj]o*") if "notes" not in p.name) < wanted:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_end_of_group(group: int) -> None:
    """Wait until no process of the group is left; fail when one stays."""
    deadline = time.monotonic() + 60
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        assert time.monotonic() < deadline, "a process outlives its parent"
        time.sleep(0.05)


ROWS = 4000
BYTES = 850_000
"""About what the rows of these take on disk."""


@pytest.fixture(scope="module")
def straight(target_path, tmp_path_factory) -> tuple[Path, list[TokenRow]]:
    root = tmp_path_factory.mktemp("straight")
    chats = write_chats(root / "chats.jsonl", ROWS)
    command(*arguments(target_path, chats, root / "rows", "workers=1"))
    rows, _ = read_rows(root / "rows")
    assert len(rows) == len(usable(ROWS))
    return chats, list(rows)


@pytest.mark.parametrize(
    "kills", [1, pytest.param(5, marks=pytest.mark.slow)], ids=["once", "five times"]
)
def test_a_killed_run_ends_with_the_rows_of_an_uninterrupted_one(
    start, straight, target_path, tmp_path, kills
):
    chats, expected = straight
    given = arguments(target_path, chats, tmp_path / "rows", "workers=2")
    moments = sorted(random.Random(0).sample(range(1, BYTES), kills))
    for wanted in moments:
        process = start(given)
        wait_for_bytes(process, tmp_path / "rows", wanted)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        wait_for_end_of_group(process.pid)
        with pytest.raises(ValueError, match="not complete"):
            read_rows(tmp_path / "rows")
    command(*given)
    resumed, meta = read_rows(tmp_path / "rows")
    assert list(resumed) == expected
    assert meta.counts["rows"] == len(expected)


def test_ctrl_c_ends_every_process_and_says_how_to_go_on(start, straight, target_path, tmp_path):
    chats, _ = straight
    process = start(arguments(target_path, chats, tmp_path / "rows", "workers=2"))
    wait_for_bytes(process, tmp_path / "rows", BYTES * 2 // 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: workers are told as well
    _, told = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "Traceback" not in told
    log = (tmp_path / "rows" / "cli.log").read_text()
    assert f"interrupted; run the same command again to complete {tmp_path}/rows" in log
    wait_for_end_of_group(process.pid)


@pytest.mark.parametrize("workers", ["0", "-1"])
def test_workers_below_one_are_refused(workers):
    with pytest.raises(SystemExit, match=rf"workers={workers}: need at least 1, or null"):
        command("prepare", "data.path=a.jsonl", f"workers={workers}")
