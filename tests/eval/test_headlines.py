"""Cards, headlines and the verdict on equality: what a hurried reader takes away."""

from dataclasses import replace

import pytest
from traces import bench, make_result

from headstart.eval.compare import settings_of
from headstart.eval.leaderboard import leaderboard_rows
from headstart.eval.report_content import content
from headstart.eval.report_headlines import card, headlines, verdict
from headstart.eval.report_markdown import markdown
from headstart.eval.report_warnings import serious, warnings
from headstart.eval.result import Category, Counts, DrafterInfo, Equality, Result

SPEED = "speedup_ratio_of_sums_decode"


def result(name: str, *, seconds: float = 0.2, **changes: object) -> Result:
    return make_result(name, *bench(2, 4, seconds=seconds), **changes)


def lookup(seconds: float) -> Result:
    return result(
        "lookup", seconds=seconds, drafter=DrafterInfo("lookup", "lookup", "chain:4", "a1", True)
    )


def full(name: str, identical: float, **changes: object) -> Result:
    made = result(name, equality=Equality(identical), warnings=[], **changes)
    made.provenance = replace(made.provenance, dtype="float32")
    return made


def suites(row: Result, speeds: dict[str, float]) -> Result:
    row.suites = {
        name: Category(Counts(20, 90, 90), row.figures | {SPEED: speed})
        for name, speed in speeds.items()
    }
    return row


def first(results: list[Result]) -> tuple[list[str], list[str]]:
    """Remarks of the first setting's card, and its headlines."""
    setting = settings_of(results)[0]
    return list(card(setting, "s1").remarks), headlines(setting)


def test_every_headline_names_its_setting():
    full_row = full("a", 1.0)
    text = markdown(content([result("a"), full_row]))
    assert "- hand, temperature 0, bfloat16: **a** (chain:4) decodes" in text
    assert "- hand, temperature 0, float32: **a** (chain:4) decodes" in text


def test_a_report_in_which_no_head_beats_prompt_lookup_says_so_first():
    remarks, told = first([result("head", seconds=0.25), lookup(0.2)])
    assert remarks[0] == "no head beats prompt lookup"
    assert told[0] == "hand, temperature 0: **no head beats prompt lookup**."


def test_a_head_that_beats_prompt_lookup_is_set_beside_it_in_its_headline():
    remarks, told = first([result("head"), lookup(0.25)])
    assert remarks == []
    assert "as fast as the target alone, 1.25 times prompt lookup, at 3.00" in told[0]
    assert "no head" not in " ".join(told)


def test_a_head_behind_on_one_suite_says_so_on_card_and_headline():
    head = suites(result("head"), {"chat": 1.6, "code": 1.4})
    rival = suites(lookup(0.25), {"chat": 1.1, "code": 1.4})
    remarks, told = first([head, rival])
    assert remarks == ["no faster than prompt lookup on code"]
    assert "(no faster than prompt lookup on code)" in told[0]


def test_rows_unequal_in_full_precision_hold_no_rank():
    setting = settings_of([full("a", 0.95), full("b", 1.0, seconds=0.4)])[0]
    ranks = [(row[0], row[1]) for row in leaderboard_rows(setting.rows)]
    assert ranks == [("1", "plain"), ("2", "b"), ("unequal", "a")]
    assert "Rows marked unequal" in markdown(content([full("a", 0.95)]))


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ("bug suspect: prompt p0 leaves plain decoding at token 4", "a bug is suspected"),
        ("contamination: 3 of 20 prompts share a run of 13 words", "it was trained on prompts"),
        ("head: trained for target x (fingerprint 1), paired with y (2)", "for another target"),
    ],
)
def test_serious_notes_reach_card_headline_and_the_top_of_the_warnings(note, words):
    row = result("a", warnings=["a small thing", note])
    remarks, told = first([row])
    assert any(words in remark for remark in remarks)
    assert words in told[0]
    found = warnings([("x", [("a", row)])])
    assert found[0][:2] == ("serious", note)
    assert ("caution", "a small thing", "a") in found


def test_a_small_note_is_not_serious():
    assert serious(result("a")) == []
    assert serious(full("a", 0.5)) == [
        "not lossless: its greedy outputs differ from plain decoding"
    ]


def test_the_verdict_counts_the_rows_that_equal_plain_decoding_in_full_precision():
    rows = [full("a", 1.0), full("b", 1.0, seconds=0.3), result("c")]
    assert verdict(settings_of(rows)) == (
        "float32: 2 of 2 rows identical to plain decoding on all 20 prompts."
    )
    assert verdict(settings_of([*rows, full("d", 0.95)])) == (
        "float32: 2 of 3 rows identical to plain decoding on all 20 prompts; NOT identical: d."
    )


def test_without_full_precision_the_verdict_says_that_there_is_none():
    assert "not put to the test" in verdict(settings_of([result("a")]))


def test_the_verdict_stands_above_everything():
    text = markdown(content([full("a", 1.0), result("b")]))
    assert text.index("1 of 1 rows identical") < text.index("## Warnings")
    assert text.index("1 of 1 rows identical") < text.index("- hand")
