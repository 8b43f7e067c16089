"""Which results share a setting, what their rows are called, and what stands for what."""

from dataclasses import replace

import pytest
from traces import bench, make_result

from headstart.eval.compare import name_results, settings_of
from headstart.eval.leaderboard import COLUMNS, leaderboard_rows, print_leaderboard
from headstart.eval.report_content import content
from headstart.eval.report_markdown import markdown
from headstart.eval.report_parts import Table
from headstart.eval.report_warnings import warnings
from headstart.eval.result import Result


def result(name: str, *, seconds: float = 0.2, **changes: object) -> Result:
    return make_result(name, *bench(2, 4, seconds=seconds), **changes)


def sampled(name: str, seed: int, **changes: object) -> Result:
    made = result(name, equality=None, **changes)
    made.sampling = replace(made.sampling, temperature=1.0, seed=seed)
    return made


def names(results: list[Result]) -> list[str]:
    return [name for name, _ in name_results(results)]


def test_more_repeats_stand_in_place_of_fewer():
    (setting,) = settings_of([result("a", seconds=0.4, repeats=3), result("b"), result("a")])
    assert [(name, r.repeats) for name, r in setting.rows] == [("a", 3), ("b", 1)]
    assert setting.again == [
        "Measured again in a run of their own, with 3 repeats in place of 1: a."
    ]
    ranks = [row[:2] for row in leaderboard_rows(setting.rows)]
    assert ranks == [["1", "b"], ["2", "plain"], ["3", "a"]]


def test_the_report_and_the_terminal_name_the_rows_that_were_measured_again(capsys):
    results = [result("a", repeats=3), result("a"), result("b")]
    text = markdown(content(results))
    assert "with 3 repeats in place of 1: a." in text
    assert "a #1" not in text
    print_leaderboard(results)
    assert "with 3 repeats in place of 1: a." in capsys.readouterr().out


def test_a_column_says_how_often_rows_were_repeated():
    (setting,) = settings_of([result("a", repeats=3), result("b", seconds=0.25)])
    place = list(COLUMNS).index("repeats")
    found = {row[1]: row[place] for row in leaderboard_rows(setting.rows)}
    assert found == {"a": "3", "b": "1", "plain": "-"}


@pytest.mark.parametrize("change", [{"tree": "chain:3"}, {"checkpoint": "runs/other"}])
def test_another_tree_or_checkpoint_is_not_measured_again(change):
    one, other = result("a", repeats=3), result("a")
    other.drafter = replace(other.drafter, **change)
    (setting,) = settings_of([one, other])
    assert [name for name, _ in setting.rows] == ["a #1", "a #2"]
    assert setting.again == []


def test_rows_of_several_settings_line_up_by_name():
    full = result("a")
    full.provenance = replace(full.provenance, dtype="float32")
    full.equality.fraction_identical = 1.0
    report = content([result("a", repeats=3), result("a"), full])
    across = next(section for section in report.sections if section.anchor == "across")
    table = next(block for block in across.blocks if isinstance(block, Table))
    assert table.rows == [["a", "1.50", "1.50"]]


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({"limits": "64-128 (abcd0123)"}, "at most 64-128 (abcd0123) new tokens"),
        ({"max_pass_tokens": 64}, "passes of at most 64 tokens"),
    ],
)
def test_limits_of_prompts_and_passes_tell_settings_apart(change, label):
    one, other = result("a"), result("a")
    other.sampling = replace(other.sampling, **change)
    plain, told = settings_of([one, other])
    assert label in told.label
    assert label in told.told
    assert label not in plain.told


def test_sampled_rows_are_told_apart_by_their_seed():
    rows = [sampled("a", 0), sampled("a", 1), sampled("b", 0)]
    assert names(rows) == ["a (seed 0)", "a (seed 1)", "b"]
    assert len(settings_of(rows)) == 1


def test_a_seed_measured_again_leaves_the_other_seeds():
    (setting,) = settings_of([sampled("a", 0, repeats=3), sampled("a", 0), sampled("a", 1)])
    assert [(name, r.repeats) for name, r in setting.rows] == [("a (seed 0)", 3), ("a (seed 1)", 1)]


def test_fewer_than_three_seeds_are_a_caution():
    rows = [*(sampled("a", seed) for seed in range(3)), sampled("b", 0)]
    found = warnings([("x", name_results(rows))])
    (told,) = [(severity, who) for severity, text, who in found if "sampled with one seed" in text]
    assert told == ("caution", "b")
    greedy = warnings([("x", name_results([result("a")]))])
    assert not any("seed" in text for _, text, _ in greedy)
