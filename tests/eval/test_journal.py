"""The journal of a benchmark: what was measured is kept, whole, and only for the same settings."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from scripted import Script, arm, cycle, suite, where

from headstart.eval import timing
from headstart.eval.arms import Arm
from headstart.eval.bench import benchmark
from headstart.eval.engine.decode import decode
from headstart.eval.engine.drafters.build import text_drafter
from headstart.eval.engine.drafters.config import SuffixConfig
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.journal import JOURNAL, Journal
from headstart.eval.result import PromptRow, Result
from headstart.eval.session_key import measured_settings
from headstart.eval.settings import EvalConfig

QUICK = EvalConfig(resamples=2_000, warmup_prompts=1)
PROMPTS = suite([0, 3, 5], max_new_tokens=9)
TARGET = cycle()
SETTINGS = {"sampling.temperature": 0.0}


def arms(on_propose: Callable[[], None] = int) -> list[Arm]:
    return [
        arm("two", Script([1, 2], on_propose=on_propose)),
        arm("three", Script([1, 2, 3])),
    ]


def run(
    directory: Path,
    measured: list[Arm],
    settings: Mapping[str, Any] = SETTINGS,
    **changes: object,
) -> list[tuple[Result, list[PromptRow]]]:
    config = replace(QUICK, **changes)
    with Journal(directory, settings, resume=config.resume) as journal:
        outcomes = benchmark(
            TARGET,
            measured,
            PROMPTS,
            sampling=SamplingConfig(),
            config=config,
            stop_ids=(),
            provenance=where(TARGET, PROMPTS),
            sessions=journal,
        )
        journal.finish()
    return outcomes


@pytest.fixture
def decoded(monkeypatch) -> list[tuple[int, str]]:
    """Record every decode: the drafter's nodes and the first prompt."""
    calls: list[tuple[int, str]] = []

    def spy(target, drafter, requests, **options):
        calls.append((drafter.num_nodes, requests[0].prompt_id))
        return decode(target, drafter, requests, **options)

    monkeypatch.setattr(timing, "decode", spy)
    return calls


def interrupted(directory: Path, after: int, error: type[BaseException], **changes: object) -> None:
    """Run until the arm `two` has proposed so often, warm-up included."""
    left = iter(range(after))

    def propose() -> None:
        if next(left, None) is None:
            raise error

    with pytest.raises(error):
        run(directory, arms(propose), **changes)


# Nine tokens by chains of two: one from prefill, then three rounds a prompt; one more to warm up.
ROUNDS = 3


def test_a_run_goes_on_from_the_sessions_that_were_measured(tmp_path, decoded):
    interrupted(tmp_path, 3 + ROUNDS + 1, KeyboardInterrupt)  # in the second prompt
    sessions = [json.loads(line) for line in (tmp_path / JOURNAL).read_text().splitlines()[1:]]
    assert [session["place"] for session in sessions] == [[0, 0]]
    decoded.clear()
    outcomes = run(tmp_path, arms())
    assert {prompt for _, prompt in decoded[3:]} == {"p1", "p2"}
    kept = sessions[0]["done"]
    for (_, rows), number in zip(outcomes, (1, 2), strict=True):
        assert rows[0].seconds == kept[number][0][0]["seconds"]
        assert rows[0].plain_seconds == kept[0][0][0]["seconds"]


def test_a_prompt_whose_arms_are_not_all_there_is_measured_again_by_all_of_them(tmp_path, decoded):
    interrupted(tmp_path, 3 + ROUNDS + 1, KeyboardInterrupt)
    begun = [nodes for nodes, prompt in decoded[3:] if prompt == "p1"]
    assert begun == [3]  # p1 had begun: its first arm was interrupted
    interrupted(tmp_path, 3 + 2, RuntimeError)
    decoded.clear()
    run(tmp_path, arms())
    assert sorted(nodes for nodes, prompt in decoded[3:] if prompt == "p1") == [1, 3, 4]


def test_a_resumed_run_has_the_rows_of_an_uninterrupted_one(tmp_path):
    whole = run(tmp_path / "whole", arms(), repeats=2)
    interrupted(tmp_path / "part", 3 + 2 * ROUNDS, KeyboardInterrupt, repeats=2)
    resumed = run(tmp_path / "part", arms(), repeats=2)
    timed = ("seconds", "prefill_seconds", "plain_seconds", "plain_prefill_seconds")
    timed += ("t_draft", "t_verify", "t_commit")

    def untimed(rows: list[PromptRow]) -> list[dict[str, object]]:
        return [{k: v for k, v in vars(row).items() if k not in timed} for row in rows]

    for (_, rows), (_, others) in zip(whole, resumed, strict=True):
        assert untimed(rows) == untimed(others)


def test_a_finished_run_is_reused_whole_and_exactly(tmp_path, decoded):
    first = run(tmp_path, arms())
    before = (tmp_path / JOURNAL).read_text()
    decoded.clear()
    again = run(tmp_path, arms())
    assert decoded == []  # no warm-up either
    assert [rows for _, rows in again] == [rows for _, rows in first]
    assert [r.figures for r, _ in again] == [r.figures for r, _ in first]
    assert (tmp_path / JOURNAL).read_text() == before


def test_more_repeats_go_on_from_the_earlier_ones(tmp_path, decoded):
    run(tmp_path, arms())
    decoded.clear()
    run(tmp_path, arms(), repeats=2)
    assert len(decoded[3:]) == 3 * 3
    decoded.clear()
    run(tmp_path, arms())  # and fewer leave them alone
    assert decoded == []


def test_resume_false_measures_everything_again(tmp_path, decoded):
    run(tmp_path, arms())
    decoded.clear()
    run(tmp_path, arms(), resume=False)
    assert len(decoded[3:]) == 9
    assert len((tmp_path / JOURNAL).read_text().splitlines()) == 1 + 3 + 1


def test_another_setting_starts_afresh_and_an_unfinished_journal_is_kept(tmp_path, decoded, caplog):
    interrupted(tmp_path, 3 + ROUNDS + 1, KeyboardInterrupt)
    old = (tmp_path / JOURNAL).read_text()
    decoded.clear()
    run(tmp_path, arms(), {"sampling.temperature": 0.7})
    assert len(decoded[3:]) == 9
    assert "sampling.temperature was 0.0, now 0.7; its 1 sessions are now in" in caplog.text
    assert (tmp_path / "journal.earlier-1.jsonl").read_text() == old


def test_a_finished_journal_of_other_settings_is_replaced(tmp_path, caplog):
    run(tmp_path, arms())
    with caplog.at_level("INFO"):
        run(tmp_path, arms(), {"runtime.threads": 2})
    assert "from the start: runtime.threads was nothing, now 2" in caplog.text
    assert not list(tmp_path.glob("journal.earlier*"))


def test_a_torn_last_line_is_cut_off_and_its_session_measured_again(tmp_path, decoded):
    run(tmp_path, arms())
    lines = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    (tmp_path / JOURNAL).write_text("".join(lines[:3]) + lines[3][: len(lines[3]) // 2])
    decoded.clear()
    run(tmp_path, arms())
    assert {prompt for _, prompt in decoded[3:]} == {"p2"}


def test_a_journal_cut_inside_its_first_line_is_begun_again(tmp_path, decoded):
    (tmp_path / JOURNAL).write_text('{"format": 1, "sett')
    run(tmp_path, arms())
    assert len(decoded[3:]) == 9
    assert json.loads((tmp_path / JOURNAL).read_text().splitlines()[0])["settings"] == SETTINGS


def test_a_damaged_line_is_named(tmp_path):
    run(tmp_path, arms())
    lines = (tmp_path / JOURNAL).read_text().splitlines(keepends=True)
    lines[2] = "\0" * 20 + "\n"
    (tmp_path / JOURNAL).write_text("".join(lines))
    with pytest.raises(ValueError, match=r"journal\.jsonl: line 3 is not a session .* delete"):
        run(tmp_path, arms())


def test_a_journal_of_another_format_is_kept_beside(tmp_path, caplog):
    run(tmp_path, arms())
    text = (tmp_path / JOURNAL).read_text().replace('{"finished": true}\n', "")
    (tmp_path / JOURNAL).write_text(text.replace('"format": 1', '"format": 0'))
    run(tmp_path, arms())
    assert "written by another version of headstart; its 3 sessions" in caplog.text


def test_two_processes_do_not_measure_into_one_directory(tmp_path):
    with Journal(tmp_path, SETTINGS):
        with pytest.raises(ValueError, match="another process is measuring there"):
            Journal(tmp_path, SETTINGS)
    with Journal(tmp_path, SETTINGS):
        pass


def test_an_interruption_tells_how_to_go_on(tmp_path, caplog):
    interrupted(tmp_path, 3 + ROUNDS + 1, KeyboardInterrupt)
    assert f"{tmp_path / JOURNAL} keeps the 1 sessions measured so far" in caplog.text
    assert "the same command again goes on from there" in caplog.text


def test_a_benchmark_measured_in_several_runs_says_so(tmp_path, monkeypatch):
    with Journal(tmp_path, SETTINGS) as journal:
        assert journal.notes() == []
    interrupted(tmp_path, 3 + ROUNDS + 1, KeyboardInterrupt)
    text = (tmp_path / JOURNAL).read_text()
    session = json.loads(text.splitlines()[1])
    (tmp_path / JOURNAL).write_text(text.replace(session["run"], "2020-01-01T00:00:00+00:00"))
    run(tmp_path, arms())
    with Journal(tmp_path, SETTINGS) as journal:
        (told,) = journal.notes()
    assert told.startswith("measured in 2 runs, begun 2020-01-01T00:00:00+00:00, ")


def test_a_drafter_that_remembers_answers_is_shown_those_of_the_earlier_run(tmp_path):
    def remembering(on_propose: Callable[[], None] = int) -> list[Arm]:
        suffix = text_drafter(SuffixConfig(tokens=3))
        return [arm("two", Script([1, 2], on_propose=on_propose)), arm("suffix", suffix)]

    def drafted(outcomes: list[tuple[Result, list[PromptRow]]]) -> list[list[int]]:
        return [row.drafted for row in outcomes[1][1]]

    whole = drafted(run(tmp_path / "whole", remembering()))
    assert sum(whole[1]) > sum(whole[0])  # the second prompt says what the first one said
    left = iter(range(3 + ROUNDS + 1))

    def interrupt() -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "part", remembering(interrupt))
    assert drafted(run(tmp_path / "part", remembering())) == whole


def settings_of(measured: list[Arm], **changes: object) -> dict[str, Any]:
    origin = replace(where(TARGET, PROMPTS), **changes)
    return measured_settings(origin, measured, {"eval": {"batch_size": 1, "repeats": 1}})


@pytest.mark.parametrize(
    "changes",
    [
        {"torch_version": "0"},
        {"threads": 99},
        {"dtype": "bfloat16"},
        {"device": "another"},
        {"target_fingerprint": "f" * 16},
        {"template_hash": "f" * 16},
        {"prompt_suite_hash": "f" * 16},
        {"config": {"tree": {"depth": 4}}},
    ],
)
def test_whatever_changes_a_session_changes_the_settings(changes):
    assert settings_of(arms()) != settings_of(arms(), **changes)


def test_the_order_of_the_arms_is_a_setting():
    assert settings_of(arms()) != settings_of(arms()[::-1])


def test_what_changes_no_session_is_no_setting():
    plain = settings_of(arms())
    assert plain == settings_of(arms(), date="another", config={"tree": {"depth": 3}, "out": "x"})
    assert plain["eval.batch_size"] == 1
    config = {"eval": asdict(EvalConfig())}
    left_out = {f"eval.{name}" for name in config["eval"]} - set(
        measured_settings(where(TARGET, PROMPTS), arms(), config)
    )
    assert left_out == {
        *("eval.repeats", "eval.resamples", "eval.resume", "eval.check_equality"),
        *("eval.force_pairing", "eval.only", "eval.skip_misfits", "eval.training_rows"),
        *("eval.warmup_prompts", "eval.batch_sizes"),
    }


def test_the_weights_of_a_head_are_a_setting(tmp_path):
    made = arms()[0]
    made = replace(made, info=replace(made.info, checkpoint=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = settings_of([made])
    assert before == settings_of([made])
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert before != settings_of([made])
