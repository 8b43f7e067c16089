"""On-policy rows: whatever happens along the way, the same answers for the same prompts."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures_chat import BOS, IM_END, bos_chat_tokenizer
from models import make_head, target_of, tiny_model
from training import CHAT_VOCAB, chat_target, command, save_target, saved, talking_target

from headstart.data.generate import GenerateConfig, generate
from headstart.data.prepare import PrepareRun
from headstart.data.prepare import run as prepare
from headstart.data.rows import read_rows
from headstart.data.server import ServerConfig
from headstart.data.source import DataConfig
from headstart.data.template import ChatTemplate, TokenRow
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree_config import TreeConfig
from headstart.eval.settings import EvalConfig
from headstart.eval.suites import load_suite
from headstart.heads.checkpoint import info_for, save_head
from headstart.heads.load import TargetConfig
from headstart.heads.target import Target

LENGTHS = ["data.max_length=600", "generate.max_new_tokens=12", "generate.batch_size=4"]


def answered(
    directory: Path,
    *,
    target: Target | None = None,
    data: DataConfig | None = None,
    new: int = 12,
    batch: int = 8,
    sampling: SamplingConfig | None = None,
    tree: TreeConfig | None = None,
    **config: Any,
) -> list[TokenRow]:
    generate(
        target or chat_target(),
        data=data or DataConfig(num_prompts=14, max_length=600),
        sampling=sampling or SamplingConfig(),
        config=GenerateConfig(max_new_tokens=new, batch_size=batch, **config),
        directory=directory,
        tree=tree,
    )
    return list(read_rows(directory)[0])


def log_of(directory: Path) -> list[dict[str, Any]]:
    """Read every answer that a run wrote down, a torn last line left out."""
    path = directory / "answers.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def talks(path: Path, count: int = 12) -> DataConfig:
    """Write conversations of one, two and three questions."""
    rows = [
        {"id": f"c{n}", "turns": [f"question {n}.{t}" for t in range(n % 3 + 1)]}
        for n in range(count)
    ]
    prompts_file(path, *rows)
    return DataConfig(path=str(path), num_prompts=None, split="all", max_length=400)


def prompts_file(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def target_path(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def kill_while_generating(arguments: list[str], answers: Path, wanted: int) -> None:
    """Start `headstart generate` and send SIGKILL once `wanted` answers are on disk."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headstart", "generate", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not answers.exists() or answers.read_bytes().count(b"\n") < wanted:
        assert process.poll() is None, "finished or failed before the kill"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_killed_run_is_taken_up_without_loss_or_repeats(target_path, tmp_path):
    count = 120
    arguments = [*saved(target_path), *LENGTHS, f"data.num_prompts={count}", f"out={tmp_path}/rows"]
    path = tmp_path / "rows" / "answers.jsonl"
    kill_while_generating(arguments, path, wanted=6)
    with pytest.raises(ValueError, match="not complete"):
        read_rows(tmp_path / "rows")
    kept = path.read_bytes().splitlines(keepends=True)
    assert 5 < len(kept) < count
    path.write_bytes(b"".join(kept)[:-20])  # the kill falls into a line
    command("generate", *arguments)
    resumed, meta = read_rows(tmp_path / "rows")
    resumed = list(resumed)
    assert path.read_bytes().startswith(b"".join(kept[:-1]))
    assert len(log_of(tmp_path / "rows")) == len(resumed)  # some prompts are over 600 bytes long
    assert len({row.row_id for row in resumed}) == len(resumed) == meta.counts["rows"]
    data = DataConfig(num_prompts=count, max_length=600)
    assert resumed == answered(tmp_path / "straight", data=data)


@pytest.mark.slow
def test_a_run_killed_five_times_at_random_moments_ends_with_the_rows_of_one_that_was_not(tmp_path):
    target = save_target(tmp_path / "target", target=talking_target())
    talks(tmp_path / "a.jsonl", count=300)
    options = ["data.max_length=400", "generate.max_new_tokens=40", "generate.batch_size=4"]
    given = [f"data.path={tmp_path}/a.jsonl", "generate.temperatures=[0,0.8]", *options]
    arguments = ["data=jsonl", *saved(target), *given, f"out={tmp_path}/rows"]
    draws = random.Random(time.time_ns())
    for _ in range(5):
        wanted = len(log_of(tmp_path / "rows")) + draws.randint(1, 80)
        kill_while_generating(arguments, tmp_path / "rows" / "answers.jsonl", wanted)
    command("generate", *arguments)
    data = DataConfig(path=f"{tmp_path}/a.jsonl", num_prompts=None, split="all", max_length=400)
    whole = answered(
        tmp_path / "whole", target=talking_target(), data=data, new=40, temperatures=[0.0, 0.8]
    )
    assert list(read_rows(tmp_path / "rows")[0]) == whole
    turns = [(line["prompt_id"], line["turn"]) for line in log_of(tmp_path / "rows")]
    assert len(set(turns)) == len(turns) == len(log_of(tmp_path / "whole"))


@pytest.mark.parametrize("lost", [1, 7, 300, 2500])
@pytest.mark.parametrize("temperatures", [None, [0.0, 0.9]])
def test_a_run_killed_between_turns_ends_with_the_rows_of_one_that_was_not(
    tmp_path, lost, temperatures
):
    """Rows are behind the answers after a kill, or ahead of one whose line was torn."""
    data, options = talks(tmp_path / "a.jsonl"), {"temperatures": temperatures, "new": 40}
    whole = answered(tmp_path / "whole", target=talking_target(), data=data, **options)
    answered(tmp_path / "rows", target=talking_target(), data=data, **options)
    path = tmp_path / "rows" / "answers.jsonl"
    path.write_bytes(path.read_bytes()[:-lost])
    summary = read_rows(tmp_path / "whole")[1].summary
    assert answered(tmp_path / "rows", target=talking_target(), data=data, **options) == whole
    assert read_rows(tmp_path / "rows")[1].summary == summary
    turns = [(line["prompt_id"], line["turn"]) for line in log_of(tmp_path / "rows")]
    assert len(set(turns)) == len(turns) == len(log_of(tmp_path / "whole"))


def test_rows_that_a_kill_kept_from_the_disk_are_made_of_their_answers(tmp_path):
    data = talks(tmp_path / "a.jsonl")
    whole = answered(tmp_path / "rows", target=talking_target(), data=data)
    for path in (tmp_path / "rows").iterdir():
        if path.name not in ("answers.jsonl", "meta.json"):
            path.unlink()
    count = len(log_of(tmp_path / "rows"))
    assert answered(tmp_path / "rows", target=talking_target(), data=data) == whole
    assert len(log_of(tmp_path / "rows")) == count


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_do_not_depend_on_the_batch_size(tmp_path, temperature):
    sampling = SamplingConfig(temperature=temperature)
    one, three, many = (
        answered(tmp_path / str(batch), batch=batch, sampling=sampling) for batch in (1, 3, 32)
    )
    assert one == three == many


def test_a_finished_set_is_left_as_it_is(tmp_path):
    answered(tmp_path)
    before = (tmp_path / "rows.arrow").read_bytes()
    answered(tmp_path)
    assert (tmp_path / "rows.arrow").read_bytes() == before


def test_other_settings_are_refused_by_name(tmp_path):
    answered(tmp_path)
    with pytest.raises(
        ValueError, match=r"generate.max_new_tokens=12, this run has generate.max_new_tokens=13"
    ):
        answered(tmp_path, new=13)


def test_another_target_is_refused(tmp_path):
    answered(tmp_path)
    other = target_of(
        tiny_model(seed=1, layers=2, vocab=CHAT_VOCAB, max_position_embeddings=2048),
        chat_target().tokenizer,
    )
    with pytest.raises(ValueError, match=f"target={chat_target().fingerprint}, this run has"):
        answered(tmp_path, target=other)


def test_only_the_answer_is_supervised_and_a_cut_one_teaches_no_end_p08(tmp_path):
    stop_ids = ChatTemplate(chat_target().tokenizer).stop_ids(chat_target().stop_ids)
    for row in answered(tmp_path):
        first = row.loss_mask.index(1)
        answer = row.token_ids[first:]
        assert row.loss_mask == [0] * first + [1] * min(12, 600 - first)
        assert row.stop_reason == "length"
        assert not set(stop_ids) & set(answer)


def test_a_whole_answer_ends_with_its_stop_token_supervised(tmp_path):
    cut = answered(tmp_path / "cut")[0]
    first = cut.loss_mask.index(1)
    model = tiny_model(layers=2, vocab=CHAT_VOCAB, max_position_embeddings=2048)
    model.generation_config.eos_token_id = cut.token_ids[first + 2]
    target = target_of(model, chat_target().tokenizer)
    whole = answered(tmp_path / "whole", target=target)[0]
    assert whole.token_ids == cut.token_ids[: first + 3]
    assert whole.loss_mask[first:] == [1, 1, 1]
    assert whole.stop_reason == "stop"


def test_a_users_prompts_are_answered_through_the_command(target_path, tmp_path):
    path = prompts_file(
        tmp_path / "mine.jsonl",
        {"id": "a", "prompt": "hello", "category": "greeting"},
        {"id": "b", "turns": ["first", "second"]},
        {"id": "c", "messages": [{"role": "system", "content": "be brief"}]},
    )
    options = [f"data.path={path}", "generate.max_new_tokens=3", f"out={tmp_path}/rows"]
    command("generate", "data=jsonl", *saved(target_path), *options)
    rows, meta = read_rows(tmp_path / "rows")
    assert [(row.row_id, row.category) for row in rows] == [("a", "greeting"), ("b", "other")]
    template = ChatTemplate(chat_target().tokenizer)
    opening = template.prompt_ids([{"role": "user", "content": "first"}])
    assert rows[1].token_ids[:-3] == opening
    assert meta.counts == {"rows": 2, "supervised_tokens": 6}
    assert "noted: 1 ended before a turn after an answer cut by length" in meta.summary
    log = (tmp_path / "rows" / "cli.log").read_text()
    assert "kept 2 of 3 rows: 1 without a user turn (line 3); 2 taken (split all)" in log


def test_every_user_turn_is_answered_after_the_targets_own_answers(tmp_path):
    data = talks(tmp_path / "a.jsonl", count=24)
    target = talking_target()
    rows = {row.row_id: row for row in answered(tmp_path, target=target, data=data, new=60)}
    answers = log_of(tmp_path)
    template = ChatTemplate(target.tokenizer)
    whole = next(
        name
        for name in (f"c{n}" for n in range(2, 24, 3))
        if [a["stop_reason"] for a in answers if a["prompt_id"] == name] == ["stop"] * 3
    )
    chat, supervised = [], []
    for turn, said in enumerate(a for a in answers if a["prompt_id"] == whole):
        assert said["turn"] == turn + 1
        chat.append({"role": "user", "content": f"question {whole[1:]}.{turn}"})
        prompt = template.prompt_ids(chat)
        assert rows[whole].token_ids[: len(prompt)] == prompt
        text = target.tokenizer.decode(said["token_ids"][:-1])
        chat.append({"role": "assistant", "content": text})
        supervised += said["token_ids"]
    row = rows[whole]
    assert [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m] == supervised
    assert row.token_ids[-1] == IM_END


def test_only_first_turns_are_answered_where_that_is_asked_for(tmp_path):
    data = talks(tmp_path / "a.jsonl")
    answered(tmp_path, target=talking_target(), data=data, turns="first")
    assert {line["turn"] for line in log_of(tmp_path)} == {1}


def test_no_row_is_longer_than_asked_for_however_many_turns(tmp_path):
    data = replace(talks(tmp_path / "a.jsonl"), max_length=80)
    rows = answered(tmp_path, target=talking_target(), data=data, new=60)
    assert max(len(row.token_ids) for row in rows) <= 80
    told = (tmp_path / "audit.md").read_text(encoding="utf-8")
    assert "ended before a turn with a prompt of 80 tokens or more" in told


def test_each_prompt_of_a_mixture_keeps_its_temperature_in_all_turns_and_it_is_recorded(tmp_path):
    data = talks(tmp_path / "a.jsonl", count=30)
    options = {"target": talking_target(), "data": data, "new": 40}
    mixed = {"temperatures": [0.0, 1.0], "weights": [2.0, 1.0]}
    rows = answered(tmp_path / "mixed", **options, **mixed)
    drawn: dict[str, set[float]] = {}
    for line in log_of(tmp_path / "mixed"):
        drawn.setdefault(line["prompt_id"], set()).add(line["temperature"])
    assert all(len(temperatures) == 1 for temperatures in drawn.values())
    count = Counter(temperature for (temperature,) in drawn.values())
    assert count[0.0] > count[1.0] > 3
    cold = {name for name, temperatures in drawn.items() if temperatures == {0.0}}
    greedy = {row.row_id: row for row in answered(tmp_path / "greedy", **options)}
    made = {row.row_id: row for row in rows}
    assert {name for name in drawn if made.get(name) == greedy[name]} == cold


def test_a_head_makes_the_same_rows(tmp_path):
    target, data = talking_target(), talks(tmp_path / "a.jsonl")
    head = make_head("eagle", target, seed=None)
    save_head(tmp_path / "head", head, info_for(head, target.name, target.fingerprint))
    plain = answered(tmp_path / "plain", target=target, data=data)
    for tree in (TreeConfig("chain3", depth=3), TreeConfig("fork", choices=[[0], [1], [0, 0]])):
        options = {"head": str(tmp_path / "head"), "tree": tree}
        drafted = answered(tmp_path / tree.name, target=target, data=data, batch=2, **options)
        assert drafted == plain


def test_a_run_may_go_on_with_a_head_and_another_batch_size(tmp_path):
    target, data = talking_target(), talks(tmp_path / "a.jsonl")
    head = make_head("medusa", target)
    save_head(tmp_path / "head", head, info_for(head, target.name, target.fingerprint))
    plain = answered(tmp_path / "rows", target=target, data=data)
    path = tmp_path / "rows" / "answers.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:5]))
    options = {"head": str(tmp_path / "head"), "tree": TreeConfig("chain2", depth=2)}
    assert answered(tmp_path / "rows", target=target, data=data, batch=1, **options) == plain


def test_a_missing_head_is_told_before_the_target_is_loaded(tmp_path):
    gone = ["generate.head=nowhere", f"out={tmp_path}/rows", "target=hf", "target.path=/no/such"]
    with pytest.raises(SystemExit, match="generate.head=nowhere: no head checkpoint there"):
        command("generate", *gone)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"turns": "last"}, "generate.turns=last: expected first or all"),
        ({"weights": [1.0]}, "generate.weights=.1.0.: weights of what; set generate.temperatures"),
        ({"temperatures": []}, "generate.temperatures=..: need one or more, each once"),
        ({"temperatures": [1.0, 1.0]}, "need one or more, each once"),
        ({"temperatures": [-1.0]}, "need finite numbers >= 0; 0 is greedy"),
        ({"temperatures": [0.0, 1.0], "weights": [1.0]}, "one weight for each of the 2"),
        ({"temperatures": [0.0], "weights": [0.0]}, "need finite numbers above 0"),
        ({"head": "a", "server": ServerConfig("http://b")}, "generate.head=a has no effect with"),
        ({"batch_size": 0}, "generate.batch_size=0: need at least 1"),
    ],
)
def test_bad_settings_name_their_field(values, message):
    with pytest.raises(ValueError, match=message):
        GenerateConfig(**values)


def test_a_temperature_that_a_mixture_leaves_unused_is_told(tmp_path):
    sampling = SamplingConfig(temperature=0.8)
    with pytest.warns(UserWarning, match="sampling.temperature=0.8 has no effect with generate.te"):
        answered(tmp_path, sampling=sampling, temperatures=[0.5])


def test_prompts_that_leave_no_room_are_counted_and_dropped(tmp_path):
    path = prompts_file(tmp_path / "a.jsonl", {"prompt": "hi"}, {"prompt": "x" * 100})
    data = DataConfig(path=str(path), num_prompts=None, split="all", max_length=80)
    rows = answered(tmp_path / "rows", data=data)
    assert [row.row_id for row in rows] == ["line-1"]
    assert "1 with a prompt of 80 tokens or more" in read_rows(tmp_path / "rows")[1].summary


def test_every_note_has_the_place_of_its_prompt(tmp_path):
    rows = [
        {"id": "mine", "prompt": "a <|im_start|> b"},
        {"id": "good", "prompt": "hi"},
        {"prompt": ""},
        {"id": "two", "turns": ["hi", "a <|im_end|> b"]},
    ]
    path = prompts_file(tmp_path / "a.jsonl", *rows)
    data = DataConfig(path=str(path), num_prompts=None, split="all")
    notes = []
    for _ in range(2):  # taken up, it tells the same
        answered(tmp_path / "rows", data=data)
        notes.append((tmp_path / "rows" / "row_notes.jsonl").read_text())
    assert notes[0] == notes[1]
    found = [json.loads(line) for line in notes[0].splitlines()]
    assert {note.pop("file") for note in found} == {str(path)}
    assert sorted((n["line"], n.get("row_id"), n["what"]) for n in found) == [
        (1, "mine", "dropped"),
        (3, None, "dropped"),
        (4, "two", "repaired"),
    ]


def test_a_prompt_with_a_marker_in_it_is_dropped_with_the_reason(tmp_path):
    path = prompts_file(tmp_path / "a.jsonl", {"prompt": "hi"}, {"prompt": "<|im_start|>user"})
    data = DataConfig(path=str(path), num_prompts=None, split="all")
    answered(tmp_path / "rows", data=data)
    summary = read_rows(tmp_path / "rows")[1].summary
    assert "dropped: 1 with the special token <|im_start|> inside a turn" in summary


def test_no_usable_prompt_is_an_error_with_the_account(tmp_path):
    path = prompts_file(tmp_path / "a.jsonl", {"prompt": "x" * 100})
    data = DataConfig(path=str(path), num_prompts=None, split="all", max_length=80)
    with pytest.raises(ValueError, match=r"no answer is usable: .*with a prompt of 80 tokens"):
        answered(tmp_path / "rows", data=data)


def test_an_empty_split_is_an_error_that_says_what_to_do(tmp_path):
    path = prompts_file(tmp_path / "a.jsonl", {"prompt": "hi"})
    data = DataConfig(path=str(path), num_prompts=None, split="heldout")
    with pytest.raises(ValueError, match=r"data.split=heldout \(1 usable\); use data.split=all"):
        answered(tmp_path / "rows", data=data)


def test_a_changed_file_is_not_taken_for_the_one_before(tmp_path):
    path = prompts_file(tmp_path / "a.jsonl", {"prompt": "hi"})
    data = DataConfig(path=str(path), num_prompts=None, split="all")
    answered(tmp_path / "rows", data=data)
    prompts_file(path, {"prompt": "hi"}, {"prompt": "more"})
    with pytest.raises(ValueError, match=r"made with data.file_hash="):
        answered(tmp_path / "rows", data=data)


def test_p05_one_bos_and_the_same_ids_in_generation_preparation_and_evaluation(
    tmp_path, monkeypatch
):
    tokenizer = bos_chat_tokenizer()
    target = target_of(tiny_model(layers=2, vocab=CHAT_VOCAB), tokenizer)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    path = prompts_file(tmp_path / "a.jsonl", {"id": "a", "messages": chat})
    data = DataConfig(path=str(path), num_prompts=None, split="all")
    (made,) = answered(tmp_path / "made", target=target, data=data, new=2)
    monkeypatch.setattr("headstart.data.prepare.load_target", lambda config: target)
    prepare(PrepareRun(TargetConfig(path="in memory"), data, out=str(tmp_path / "given")))
    ((given,), _) = read_rows(tmp_path / "given")
    suite = load_suite(EvalConfig(suite=str(path), num_prompts=1), ChatTemplate(tokenizer))
    starts = [row.token_ids[: row.loss_mask.index(1)] for row in (made, given)]
    assert starts == [list(suite.requests[0].token_ids)] * 2
    assert starts[0].index(BOS) == 0
    assert starts[0].count(BOS) == 1
