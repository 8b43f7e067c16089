"""Reports: ranking, honesty about lossy and unequal rows, and the sections of the page."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from reporting import batch_point
from rich.console import Console
from traces import bench, chain_round, completion, make_result, timed

from headstart.eval.compare import by_setting, name_results, setting_labels, settings_of
from headstart.eval.leaderboard import (
    COLUMNS,
    draft_cost,
    leaderboard_rows,
    leaderboard_table,
)
from headstart.eval.metrics import DEFINITIONS, figures, prompt_sums
from headstart.eval.report import write_report
from headstart.eval.report_content import content
from headstart.eval.report_markdown import markdown
from headstart.eval.report_warnings import warnings
from headstart.eval.result import Category, Counts, DrafterInfo, Result, Run, Sample
from headstart.heads.runtime import Compilation


def result(name: str, *, accepted: int = 2, k: int = 4, seconds: float = 0.2, **changes) -> Result:
    return make_result(name, *bench(accepted, k, seconds=seconds), **changes)


def markdown_report(results: list[Result]) -> str:
    return markdown(content(results))


def lossy(name: str, **changes) -> Result:
    return result(
        name, drafter=DrafterInfo(name, "medusa", "static:a", "typical", False), **changes
    )


def order(results: list[Result]) -> list[tuple[str, str]]:
    return [(row[0], row[1]) for row in leaderboard_rows(name_results(results))]


def test_fastest_first_with_plain_at_its_place():
    ranked = order([result("slow", seconds=0.4), result("fast"), result("mid", seconds=0.25)])
    assert ranked == [("1", "fast"), ("2", "mid"), ("3", "plain"), ("4", "slow")]


def test_plain_row_has_tau_one_speedup_one_and_its_tokens_per_second():
    plain = leaderboard_rows(name_results([result("a")]))[1]
    found = dict(zip(COLUMNS, plain, strict=True))
    assert found["drafter"] == "plain"
    assert [found[c] for c in ("decode speedup", "e2e speedup", "tau", "tau, full rounds")] == [
        "1.00"
    ] * 4
    assert [found[c] for c in ("draft cost", "cut", "tokens/s")] == ["0.00", "0", "10.0"]


def test_p56_ranked_by_speed_never_by_acceptance_rate():
    deep = result("deep", k=8, seconds=0.2)
    short = result("short", k=3, seconds=0.25)
    rates = [r.figures["draft_token_acceptance"] for r in (deep, short)]
    taus = [r.figures["tau_with_bonus_micro"] for r in (deep, short)]
    assert rates == pytest.approx([2 / 8, 2 / 3])
    assert taus == [3.0, 3.0]
    assert order([short, deep])[:2] == [("1", "deep"), ("2", "short")]


def test_p56_a_null_draft_is_listed_with_speedup_one():
    rounds = [chain_round(0, 0, seconds=0.1) for _ in range(9)]
    arms = [completion(f"p{i}", rounds, seconds=0.9) for i in range(20)]
    sums = [prompt_sums(arm, timed(arm.prompt_id, 10, 0.9)) for arm in arms]
    row = leaderboard_rows(name_results([make_result("null", sums, arms)]))[1]
    assert row[1] == "null"
    assert row[2] == "1.00 [1.00, 1.00]"


def test_lossy_row_holds_no_rank_however_fast():
    assert order([lossy("typical", seconds=0.05), result("exact")]) == [
        ("1", "exact"),
        ("2", "plain"),
        ("lossy", "typical"),
    ]


def test_lossy_headline_says_so():
    assert "(**lossy: its outputs do not follow" in markdown_report([lossy("typical")])
    assert "**lossy" not in markdown_report([result("exact")])


def test_row_without_a_plain_arm_holds_no_rank():
    arms = [completion("p", [chain_round(2, 4)])]
    untimed = make_result("untimed", [prompt_sums(arms[0], None)], arms)
    assert order([untimed]) == [("-", "untimed")]
    assert "speed not measured; at 3.00" in markdown_report([untimed])


def test_results_of_different_machines_are_ranked_apart():
    one, other = result("one"), result("other", seconds=0.25)
    other.provenance = replace(other.provenance, device="another CPU")
    text = markdown_report([one, other])
    assert "on test CPU, 1 threads" in text
    assert "on another CPU, 1 threads" in text
    assert "| 1 | one |" in text
    assert "| 1 | other |" in text


def test_equal_names_are_numbered():
    names = [name for name, _ in name_results([result("a"), result("b"), result("a")])]
    assert names == ["a #1", "b", "a #2"]


def test_headline_gives_speed_tau_and_intervals():
    assert (
        "**a** (chain:4) decodes 1.50x [1.50, 1.50] as fast as the target alone, "
        "at 3.00 [3.00, 3.00] tokens per round over 20 prompts." in markdown_report([result("a")])
    )


def test_headline_says_when_the_interval_contains_one():
    text = markdown_report([result("a", intervals={"speedup_ratio_of_sums_decode": [0.9, 1.6]})])
    assert "no speedup is shown" in text


def test_headline_flags_few_prompts():
    text = markdown_report([make_result("a", *bench(2, 4, seconds=0.2, prompts=5))])
    assert "fewer than 20 prompts" in text


def test_report_has_every_section_and_no_empty_figure():
    text = markdown_report([result("a"), result("b", k=2)])
    for heading in ("Leaderboard", "Acceptance by depth", "Time by stage", "Provenance"):
        assert f"## {heading}" in text
    assert "| nan" not in text
    assert "None |" not in text


def test_shorter_chains_leave_deeper_cells_empty():
    text = markdown_report([result("a"), result("b", k=2)])
    assert "| b | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] | - | - |" in text


def test_report_shows_equality_with_first_divergence_and_margin():
    text = markdown_report([result("a")])
    assert "| a | 95.0 % | 1 | 0.002 | p3 at token 7 (margin 0.002) |" in text


def test_report_shows_categories_apart():
    sums, done = bench(2, 4, seconds=0.2)
    code = Category(Counts(12, 60, 192), figures(sums[:12]))
    text = markdown_report([make_result("a", sums, done, categories={"code": code})])
    assert "| a | code | 12 | 60 | 3.00 | 1.50 |" in text


def test_p55_report_gives_figures_with_and_without_looping_prompts():
    sums, done = bench(2, 4, seconds=0.2)
    without = figures(bench(1, 4, seconds=0.2)[0])
    text = markdown_report(
        [make_result("a", sums, done, loops={"p1": 0.99}, figures_without_loops=without)]
    )
    assert "| a | p1 (0.99) | 3.00 | 2.00 | 1.50 | 1.00 |" in text


def test_p52_every_figure_and_column_is_defined_in_the_report():
    text = markdown_report([result("a")])
    assert all(f"- `{name}`: {definition}" in text for name, definition in DEFINITIONS.items())


def test_pipes_in_names_do_not_break_tables():
    assert "| 1 | a\\|b |" in markdown_report([result("a|b")])


def test_write_report_writes_both_pages_and_the_plots_of_markdown(tmp_path: Path):
    path = write_report([result("a"), lossy("b")], tmp_path / "report")
    assert path.name == "report.html"
    assert sorted(p.name for p in path.parent.iterdir()) == ["figures", "report.html", "report.md"]
    text = (path.parent / "report.md").read_text()
    plots = sorted(p.name for p in (path.parent / "figures").iterdir())
    assert "s1-speedup.svg" in plots
    assert all(f"](figures/{plot})" in text for plot in plots)
    assert text.count("](figures/") == len(plots)


def test_a_rerun_leaves_no_plot_of_the_last_report(tmp_path: Path):
    other = result("b")
    other.provenance = replace(other.provenance, device="another CPU")
    write_report([result("a"), other], tmp_path)
    write_report([result("a")], tmp_path)
    assert not [p for p in (tmp_path / "figures").iterdir() if p.name.startswith(("s2", "across"))]


def test_terminal_table_has_the_rows_of_the_report():
    console = Console(width=300, record=True, file=io.StringIO())
    (setting,) = settings_of([result("[bold]a"), lossy("b")])
    console.print(leaderboard_table(setting))
    text = console.export_text()
    assert "hand, temperature 0: decode speedup" in text
    assert text.index(" [bold]a ") < text.index(" plain ") < text.index(" lossy ")


def test_a_report_without_results_is_an_error():
    with pytest.raises(ValueError, match="at least one result"):
        markdown_report([])


def lookup(seconds: float) -> Result:
    info = DrafterInfo("lookup", "lookup", "chain:4", "a1", True)
    return result("lookup", drafter=info, seconds=seconds)


def against(results: list[Result]) -> dict[str, str]:
    column = list(COLUMNS).index("over lookup")
    return {row[1]: row[column] for row in leaderboard_rows(name_results(results))}


def test_a_row_no_faster_than_prompt_lookup_says_so():
    found = against([result("fast"), result("equal", seconds=0.25), lookup(0.25)])
    assert found == {"fast": "1.25", "equal": "1.00 BELOW", "lookup": "1.00", "plain": "0.83"}


def test_a_row_whose_interval_reaches_lookup_is_not_called_faster():
    unclear = result("a", intervals={"speedup_ratio_of_sums_decode": [1.1, 1.9]})
    assert against([unclear, lookup(0.25)])["a"] == "1.25 unclear"


def test_a_row_behind_lookup_on_one_suite_names_it():
    def suites(row: Result, speeds: dict[str, float]) -> Result:
        values = {s: row.figures | {"speedup_ratio_of_sums_decode": v} for s, v in speeds.items()}
        row.suites = {s: Category(Counts(20, 90, 90), v) for s, v in values.items()}
        return row

    head = suites(result("head"), {"chat": 1.6, "code": 1.4})
    rival = suites(lookup(0.25), {"chat": 1.1, "code": 1.4})
    assert against([head, rival])["head"] == "1.25 BELOW on code"
    text = markdown_report([head, rival])
    assert "| drafter | chat (n=20) | code (n=20) |" in text
    assert "| head | 1.60 | 1.40 BELOW |" in text
    assert "| lookup | 1.10 | 1.40 |" in text


def test_a_lossy_lookup_is_no_rival():
    rival = lookup(0.1)
    rival.drafter = DrafterInfo("lookup", "lookup", "chain:4", "typical", False)
    assert against([result("a"), rival])["a"] == "-"


def test_without_prompt_lookup_nothing_is_compared_with_it():
    assert against([result("a")]) == {"a": "-", "plain": "-"}


def test_draft_cost_is_the_time_outside_the_targets_pass():
    # A round of 0.2 s spends two fifths outside the pass; a plain step takes 0.1 s.
    assert draft_cost(result("a")) == pytest.approx(0.8)


def test_equal_warnings_are_told_once_with_their_rows():
    found = warnings([("x", name_results([result("a"), result("b"), lossy("c")]))])
    lossy_row = "lossy (typical): outputs do not follow the target's distribution"
    assert ("serious", lossy_row, "c") in found
    assert [severity for severity, _, _ in found] == ["serious", "caution", "caution"]
    assert ("caution", "a made-up run", "all 3 rows") in found


def test_runs_of_unlike_speed_are_told_and_share_one_plain_row():
    one, other = result("a"), result("b")
    other.figures = other.figures | {"tokens_per_s_plain_decode": 11.0}
    rows = [row for row in leaderboard_rows(name_results([one, other])) if "plain" in row[1]]
    assert [(row[1], row[6]) for row in rows] == [("plain (2 runs)", "10.0 to 11.0")]
    told = [text for _, text, _ in warnings([("x", name_results([one, other]))])]
    assert any(text.startswith("runs apart: plain decoding made 10.0 tokens/s") for text in told)


@pytest.mark.parametrize(("dtype", "severity"), [("float32", "serious"), ("bfloat16", "caution")])
def test_p47_unequal_greedy_outputs_are_serious_in_full_precision(dtype, severity):
    row = result("a", warnings=[])
    row.provenance = replace(row.provenance, dtype=dtype)
    assert [(s, t[:14]) for s, t, _ in warnings([("x", [("a", row)])])] == [
        (severity, "greedy outputs")
    ]


def test_settings_are_named_by_what_tells_them_apart():
    one, other = result("a"), result("a")
    other.provenance = replace(other.provenance, prompt_suite="gsm8k", dtype="float32")
    groups = list(by_setting(name_results([one, other])).values())
    assert setting_labels(groups) == [
        "hand, temperature 0, bfloat16",
        "gsm8k, temperature 0, float32",
    ]


@pytest.mark.parametrize(
    ("other", "prompts", "labels"),
    [
        # Of the same suites, fewer prompts; as many others; and two suites of their own.
        ("a+b", 9, ["2 suites, temperature 0, 20 prompts", "2 suites, temperature 0, 9 prompts"]),
        ("a+b", 20, ["2 suites, temperature 0, 00000000", "2 suites, temperature 0, 11111111"]),
        ("c", 9, ["a+b, temperature 0", "c, temperature 0"]),
    ],
)
def test_prompts_are_told_apart_by_the_shortest_that_does(other, prompts, labels):
    made = result("a"), result("a")
    for one, name, digit in zip(made, ("a+b", other), "01", strict=True):
        one.provenance = replace(one.provenance, prompt_suite=name, prompt_suite_hash=digit * 16)
    made[1].counts = replace(made[1].counts, prompts=prompts)
    assert made[0].counts.prompts == 20
    assert [setting.label for setting in settings_of(made)] == labels


def test_a_compiled_run_is_a_setting_of_its_own_and_says_what_was_compiled():
    made = Compilation(["target", "drafter"], ["target", "draft model small"])
    rows = name_results([result("a"), result("a", compilation=made)])
    groups = list(by_setting(rows).values())
    assert setting_labels(groups) == [
        "hand, temperature 0, runtime eager",
        "hand, temperature 0, runtime compiled target+drafter",
    ]
    text = markdown_report([made_up for _, made_up in rows])
    assert "| run compiled | nothing |" in text
    assert "| run compiled | target, draft model small |" in text


def test_names_are_numbered_only_within_a_setting():
    one, other = result("a"), result("a")
    other.sampling = replace(other.sampling, temperature=1.0)
    assert [name for name, _ in name_results([one, other])] == ["a", "a"]


def test_batch_points_get_a_plot_where_results_hold_them():
    points = [batch_point(1, 1.9), batch_point(8, 1.1)]
    slugs = [f.slug for f in content([result("a", batch_points=points)]).figures]
    assert "s1-batch" in slugs
    assert "s1-batch" not in [f.slug for f in content([result("a")]).figures]


def test_predicted_and_measured_speedups_are_told_with_their_median_gap():
    assert "differ by 0.0 % (median over 1 rows)" in markdown_report([result("a")])


def test_samples_show_accepted_runs_and_escape_their_text():
    runs = [Run("prefill", "<a", 1), Run("drafted", " & b\n", 2), Run("added", " c", 1)]
    text = markdown_report([result("a", samples=[Sample("p0", "code", "hi", runs)])])
    assert "<pre>&lt;a<b> &amp; b&#10;</b> c</pre>" in text
