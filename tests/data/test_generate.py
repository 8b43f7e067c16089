"""On-policy rows: whatever happens along the way, the same answers for the same prompts."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fixtures_chat import BOS, bos_chat_tokenizer
from models import target_of, tiny_model
from training import CHAT_VOCAB, chat_target, command, save_target, saved

from headstart.data.generate import GenerateConfig, generate
from headstart.data.prepare import PrepareRun
from headstart.data.prepare import run as prepare
from headstart.data.rows import read_rows
from headstart.data.source import DataConfig
from headstart.data.template import ChatTemplate, TokenRow
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.settings import EvalConfig
from headstart.eval.suites import load_suite
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
) -> list[TokenRow]:
    generate(
        target or chat_target(),
        data=data or DataConfig(num_prompts=14, max_length=600),
        sampling=sampling or SamplingConfig(),
        config=GenerateConfig(max_new_tokens=new, batch_size=batch),
        directory=directory,
    )
    return read_rows(directory)[0]


def prompts_file(path: Path, *rows: dict[str, object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def target_path(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def kill_while_generating(arguments: list[str], rows: Path, wanted: int) -> None:
    """Start `headstart generate` and send SIGKILL once `wanted` answers are on disk."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headstart", "generate", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not rows.exists() or rows.read_bytes().count(b"\n") < wanted:
        assert process.poll() is None, "finished or failed before the kill"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_a_killed_run_is_taken_up_without_loss_or_repeats(target_path, tmp_path):
    count = 50
    arguments = [*saved(target_path), *LENGTHS, f"data.num_prompts={count}", f"out={tmp_path}/rows"]
    path = tmp_path / "rows" / "journal.jsonl"
    kill_while_generating(arguments, path, wanted=6)
    with pytest.raises(ValueError, match="not complete"):
        read_rows(tmp_path / "rows")
    kept = path.read_bytes().splitlines(keepends=True)
    assert 5 < len(kept) < count
    path.write_bytes(b"".join(kept)[:-20])  # the kill falls into a line
    command("generate", *arguments)
    resumed, meta = read_rows(tmp_path / "rows")
    assert len({row.row_id for row in resumed}) == len(resumed) == meta.counts["rows"]
    data = DataConfig(num_prompts=count, max_length=600)
    assert resumed == answered(tmp_path / "straight", data=data)


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
    log = (tmp_path / "rows" / "cli.log").read_text()
    assert "kept 2 of 3 rows: 1 without a user turn (line 3); 2 taken (split all)" in log


def test_prompts_that_leave_no_room_are_counted_and_dropped(tmp_path):
    path = prompts_file(tmp_path / "a.jsonl", {"prompt": "hi"}, {"prompt": "x" * 100})
    data = DataConfig(path=str(path), num_prompts=None, split="all", max_length=80)
    rows = answered(tmp_path / "rows", data=data)
    assert [row.row_id for row in rows] == ["line-1"]
    assert "1 with a prompt of 80 tokens or more" in read_rows(tmp_path / "rows")[1].summary


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
    with pytest.raises(ValueError, match=r"holds rows made with data.file_hash="):
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
    prepare(PrepareRun(TargetConfig(path="in memory"), data, str(tmp_path / "given")))
    ((given,), _) = read_rows(tmp_path / "given")
    suite = load_suite(EvalConfig(suite=str(path), num_prompts=1), ChatTemplate(tokenizer))
    starts = [row.token_ids[: row.loss_mask.index(1)] for row in (made, given)]
    assert starts == [list(suite.requests[0].token_ids)] * 2
    assert starts[0].index(BOS) == 0
    assert starts[0].count(BOS) == 1
