"""Plots: scales, ticks, legends and trees, and SVG that a parser takes."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest
from reporting import DRAFTERS, comparison, made_result

from headstart.eval.branches import branches
from headstart.eval.compare import name_results
from headstart.eval.engine.records import Completion, Round
from headstart.eval.report_charts import Bar, Point, Series, bars, lines, scatter, stacked
from headstart.eval.report_content import content
from headstart.eval.report_figures import pareto, shown, speed_figure, tree_figure
from headstart.eval.report_html import plot_style
from headstart.eval.report_svg import LETTER, WIDTH, Figure, Scale, cut, legend
from headstart.eval.report_tree import by_depth, edges
from headstart.eval.result import Branch, Category, Counts

SVG = "{http://www.w3.org/2000/svg}"


def parsed(drawn: tuple[str, float]) -> ElementTree.Element:
    return ElementTree.fromstring(Figure("a", "A", "b", "c", WIDTH, drawn[1], drawn[0]).svg())


def texts(drawn: tuple[str, float]) -> list[str]:
    return [node.text for node in parsed(drawn).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 2.3, [0, 0.5, 1.0, 1.5, 2.0]),
        (0.0, 100.0, [0, 20, 40, 60, 80, 100]),
        (1.9, 3.1, [2.0, 2.25, 2.5, 2.75, 3.0]),
    ],
)
def test_ticks_are_round_and_inside_the_scale(low, high, expected):
    assert Scale(low, high, 0, 100).ticks() == pytest.approx(expected)


def test_long_labels_lose_their_middle():
    assert cut("eagle3-chain4", 200) == "eagle3-chain4"
    assert cut("eagle3-a-very-long-name-dynamic60", 100) == "eagle3\u2026namic60"


def test_a_legend_wraps_inside_the_plot():
    shapes, bottom = legend([("", "x" * 20)] * 6, 0)
    spots = ElementTree.fromstring(f"<g>{shapes}</g>").findall("text")
    assert all(float(t.get("x")) + LETTER * len(t.text) <= WIDTH for t in spots)
    assert bottom > 40


def test_bars_show_name_value_interval_and_what_was_not_measured():
    drawn = bars(
        [("", [Bar("a", 1.5, (1.2, 1.8)), Bar("b", None)])],
        x_name="speedup",
        marks=[("plain", 1.0)],
    )
    assert {"a", "1.50", "b", "not measured", "speedup", "plain"} <= set(texts(drawn))
    titles = [node.text for node in parsed(drawn).iter(f"{SVG}title")]
    assert titles == ["a: 1.50 [1.20, 1.80]"]


def test_names_of_marks_stay_inside_and_apart():
    marks = [("plain", 0.9), ("prompt lookup", 1.0)]
    drawn = bars([("", [Bar("x" * 30, 1.0)])], x_name="speedup", marks=marks)
    names = {t.text: t for t in parsed(drawn).iter(f"{SVG}text") if t.text in dict(marks)}
    assert [t.get("text-anchor") for t in names.values()] == ["start", "end"]
    assert float(names["plain"].get("y")) <= float(names["prompt lookup"].get("y")) - 11
    assert float(names["prompt lookup"].get("x")) < WIDTH
    left = bars([("", [Bar("a", 5.0)])], x_name="speedup", marks=marks)
    anchors = {t.text: t.get("text-anchor") for t in parsed(left).iter(f"{SVG}text")}
    assert anchors["prompt lookup"] == "start"


def test_a_gap_in_a_line_is_not_drawn_over():
    drawn = lines([Series("a", [0.9, None, 0.5, 0.4])], "0123", x_name="d", y_name="share")
    assert len([p for p in parsed(drawn).iter(f"{SVG}path") if p.get("class") == "line0"]) == 1


def test_stacked_parts_are_as_long_as_their_values():
    drawn = stacked([("a", [10.0, 30.0])], ["draft", "target"], x_name="ms")
    boxes = [float(b.get("width")) for b in parsed(drawn).iter(f"{SVG}rect")][:2]
    assert boxes[1] == pytest.approx(3 * boxes[0], abs=0.3)


def test_scatter_takes_a_single_point():
    drawn = scatter([Point(0.3, 2.0, "1", "a")], x_name="cost", y_name="tau", front=[(0.3, 2.0)])
    assert "nan" not in drawn[0]


def test_labels_of_crowded_points_keep_apart():
    crowd = [Point(1 + i / 500, 2 + i / 700, str(i), "") for i in range(6)] + [Point(2, 3, "9", "")]
    svg = parsed(scatter(crowd, x_name="cost", y_name="tau"))
    labels = [t for t in svg.iter(f"{SVG}text") if t.get("class") == "value"]
    places = [(float(t.get("x")), float(t.get("y"))) for t in labels]
    for i, (x, y) in enumerate(places):
        assert all(abs(x - a) > 14 or abs(y - b) > 11 for a, b in places[:i])


def test_pareto_keeps_what_nothing_cheaper_or_equal_reaches():
    points = [(0.3, 2.5), (0.1, 1.5), (0.2, 1.4), (0.5, 2.5), (0.1, 1.2), (0.6, 3.0)]
    assert pareto(points) == [(0.1, 1.5), (0.3, 2.5), (0.6, 3.0)]


BRANCHES = [Branch([], [10, 10], [6, 1]), Branch([0], [6, 5], [3, 2]), Branch([0, 1], [2], [2])]


def test_edges_come_most_accepted_first_and_parents_before_children():
    assert [(e.path, e.offered, e.accepted) for e in edges(BRANCHES)] == [
        ((0,), 10, 6),
        ((0, 0), 6, 3),
        ((0, 1), 5, 2),
        ((0, 1, 0), 2, 2),
        ((1,), 10, 1),
    ]


def test_depth_and_place_add_up_over_paths():
    found = by_depth([*BRANCHES, Branch([1], [1], [1])])
    counts = [[(e.offered, e.accepted) for e in level] for level in found]
    assert counts == [[(10, 6), (10, 1)], [(7, 4), (5, 2)], [(2, 2)]]


def test_a_tree_shows_the_acceptance_of_every_edge():
    result = made_result(DRAFTERS[0])
    result.branches = BRANCHES
    figure = tree_figure("a", result, "tree")
    words = [node.text for node in ElementTree.fromstring(figure.svg()).iter(f"{SVG}text")]
    assert sorted(w for w in words if w.endswith("%")) == ["10 %", "100 %", "40 %", "50 %", "60 %"]
    assert "path 0 1: 2 of 5" in figure.summary


def test_a_wide_tree_leaves_out_what_was_accepted_least():
    rounds = [Round(0, 1, 60, 1, 61, "rejected", offered=[60])]
    result = made_result(DRAFTERS[0])
    result.branches = branches([Completion("p", [1, 2], "stop", rounds=rounds)])
    assert "The 28 nodes accepted least are left out." in tree_figure("a", result, "t").caption


def test_lookup_is_among_the_few_rows_that_plots_tell_apart():
    group = name_results(comparison())
    names = [name for name, _ in shown(group, 2)]
    assert names == ["eagle3-dynamic16", "lookup"]


def test_rows_no_faster_than_lookup_have_a_colour_of_their_own():
    svg = ElementTree.fromstring(speed_figure(name_results(comparison()), "s").svg())
    titles = {g.find(f"{SVG}title").text.split(":")[0]: g for g in svg.iter(f"{SVG}g")}
    assert titles["medusa-chain4"].find(f"{SVG}rect").get("class") == "behind"
    assert titles["eagle3-chain4"].find(f"{SVG}rect").get("class") == "s0"
    assert titles["medusa-typical"].find(f"{SVG}rect").get("class") == "lossy"


def test_rows_behind_lookup_on_some_suite_have_an_outline():
    group = name_results(comparison())
    for _, result in group:
        part = Category(Counts(20, 90, 90), result.figures)
        slow = result.figures | {"speedup_ratio_of_sums_decode": 0.9}
        head = result.drafter.name == "eagle3-chain4"
        result.suites = {"chat": part, "code": replace(part, figures=slow) if head else part}
    svg = ElementTree.fromstring(speed_figure(group, "s").svg())
    titles = {g.find(f"{SVG}title").text.split(":")[0]: g for g in svg.iter(f"{SVG}g")}
    assert titles["eagle3-chain4"].find(f"{SVG}rect").get("class") == "partly"
    assert titles["eagle3-dynamic16"].find(f"{SVG}rect").get("class") == "s0"


def test_every_plot_is_well_formed_named_and_told_in_words():
    report = content(comparison(["mt_bench", "gsm8k"]))
    slugs = [figure.slug for figure in report.figures]
    assert len(set(slugs)) == len(slugs) > 20
    for figure in report.figures:
        root = ElementTree.fromstring(figure.svg(plot_style()))
        assert root.get("role") == "img"
        assert len(root.get("aria-label")) > len(figure.title) + 20
        assert figure.caption
        assert "nan" not in figure.body
