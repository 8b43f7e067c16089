"""The plots of results that may be compared, as figures of a report."""

from collections.abc import Callable, Mapping, Sequence

from headstart.eval.compare import Named, Setting
from headstart.eval.leaderboard import by_speed, draft_cost, leaderboard
from headstart.eval.metrics import DEFINITIONS, SPEED, TAU
from headstart.eval.report_charts import (
    Bar,
    Drawn,
    Pair,
    Point,
    Series,
    bars,
    lines,
    scatter,
    stacked,
)
from headstart.eval.report_svg import WIDTH, Figure
from headstart.eval.report_tree import NODES, edges, tree
from headstart.eval.result import Category, Result
from headstart.eval.standing import ALL, LOOKUP, fault, lookup_speeds, standing

SERIES = 6
"""Most drafters told apart in one plot; tables have all of them."""
GROUPED = 4
PREDICTED = 0.05
"""Relative gap of predicted and measured speedup that is shown as agreement."""
_BEHIND = (
    "Rows no faster than prompt lookup are drawn in the warning colour, those no faster on some "
    "suite have an outline in it."
)


def shown(group: Sequence[Named], count: int = SERIES) -> list[Named]:
    """Return the fastest rows that may hold a rank, prompt lookup always among them."""
    rows = [row for row in by_speed(group) if not fault(row[1])]
    lookup = [row for row in rows if row[1].drafter.family == LOOKUP][:1]
    best = [row for row in rows if row not in lookup][: count - len(lookup)]
    return [row for row in rows if row in best + lookup]


def speed_figure(group: Sequence[Named], slug: str) -> Figure:
    """Draw every row's decode speedup, beside plain decoding and prompt lookup."""
    lookups = lookup_speeds(group)
    rows = [_bar(name, result, _style(result, lookups)) for name, result in by_speed(group)]
    marks = [("plain", 1.0)] + ([("prompt lookup", lookups[ALL])] if ALL in lookups else [])
    caption = "Decode speedup over the target alone, with the 95 % interval over prompts."
    if ALL in lookups:
        caption += f" {_BEHIND}"
    if any(fault(r) for _, r in group):
        caption += " Rows with a dashed outline are lossy, or unequal to plain decoding in full "
        caption += "precision, and hold no rank."
    drawn = bars(
        [("", rows)], x_name="decode speedup (times plain decoding)", unit="x", marks=marks
    )
    return _figure(f"{slug}-speedup", "Decode speedup", caption, _told(rows), drawn)


def _bar(name: str, result: Result, style: str) -> Bar:
    return Bar(name, result.figures[SPEED], pair(result.intervals.get(SPEED)), style)


def _style(result: Result, lookups: Mapping[str, float]) -> str:
    if fault(result):
        return "lossy"
    found = standing(result, lookups)
    return found if found in ("behind", "partly") else "s0"


def pareto_figure(group: Sequence[Named], slug: str) -> Figure | None:
    """Draw tau against the cost of drafting; points carry the rank of their row."""
    found = [
        (row.kind, row.cells, draft_cost(row.result), row.result.figures[TAU])
        for row in leaderboard(group)
        if row.kind in ("ranked", "lossy", "unequal")
    ]
    found = [one for one in found if None not in one]
    front = pareto([(cost, tau) for kind, _, cost, tau in found if kind == "ranked"])
    if not front:
        return None
    points = [
        Point(
            cost,
            tau,
            cells[0] if kind == "ranked" else kind[0].upper(),
            f"{cells[1]}: tau {tau:.2f} at {cost:.2f} plain steps",
            "lossy" if kind != "ranked" else "s0" if (cost, tau) in front else "off",
        )
        for kind, cells, cost, tau in found
    ]
    caption = (
        "Tokens per round against what a round costs outside the target's pass. Numbers are ranks "
        "of the leaderboard; L is a lossy row, U one unequal to plain decoding in full precision. "
        "No ranked row lies above and left of the line."
    )
    drawn = scatter(
        points,
        x_name="draft cost (plain steps a round)",
        y_name="tau (tokens a round)",
        front=front,
    )
    told = "; ".join(p.words for p in points)
    return _figure(f"{slug}-pareto", "Tau and draft cost", caption, told, drawn)


def pareto(points: Sequence[Pair]) -> list[Pair]:
    """Return the points that no other beats in both ways, cheap ones first: x low, y high."""
    front: list[Pair] = []
    for x, y in sorted(points, key=lambda p: (p[0], -p[1])):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front


def acceptance_figures(group: Sequence[Named], slug: str) -> list[Figure]:
    """Draw conditional and prefix acceptance by depth."""
    titles = {
        "alpha_cond": "Conditional acceptance by depth",
        "alpha_prefix": "Prefix acceptance by depth",
    }
    rows = shown(group)
    figures = []
    for name, title in titles.items():
        series = [Series(n, r.figures[name]) for n, r in rows]
        depth = max((len(s.values) for s in series), default=0)
        if depth:
            drawn = lines(
                series,
                [str(d) for d in range(depth)],
                x_name="depth d (0 is the first drafted token)",
                y_name=f"{name} (share of rounds)",
                y_range=(0.0, 1.0),
            )
            caption = f"{name}, {DEFINITIONS[name]}."
            figures.append(_figure(f"{slug}-{name}", title, caption, _said(series), drawn))
    return figures


def histogram_figure(group: Sequence[Named], slug: str) -> Figure | None:
    """Draw how many drafted tokens rounds accepted."""
    rows = [(n, r.figures["accept_histogram"]) for n, r in by_speed(group) if r.counts.rounds]
    if not rows:
        return None
    shares = [(n, [100 * count / sum(counts) for count in counts]) for n, counts in rows]
    width = max(len(counts) for _, counts in shares)
    drawn = stacked(
        shares,
        [str(i) for i in range(width)],
        x_name="share of rounds (%), by drafted tokens accepted",
        ramp=True,
    )
    caption = "Drafted tokens that a round accepted; the bonus token is not counted."
    told = "; ".join(f"{n}: {', '.join(f'{v:.0f} %' for v in values)}" for n, values in shares)
    return _figure(f"{slug}-histogram", "Accepted tokens per round", caption, told, drawn)


def stage_figure(group: Sequence[Named], slug: str) -> Figure | None:
    """Draw where the time of a round goes, beside the time of a plain step."""
    stages = ("ms_draft_per_round", "ms_verify_per_round", "ms_commit_per_round")
    rows = [(n, [r.figures[s] for s in stages]) for n, r in by_speed(group) if r.counts.rounds]
    if not rows:
        return None
    plain = [r.figures["ms_plain_per_token"] for _, r in group]
    steps = sorted(p for p in plain if p is not None)
    baseline = [("plain, a token", [0.0, steps[len(steps) // 2], 0.0])] if steps else []
    parts = ("draft", "target pass", "commit")
    drawn = stacked([*baseline, *rows], parts, x_name="milliseconds a round")
    caption = (
        "Time of a round by stage; commit is acceptance, cache moves and the drafter's refresh. A "
        "round pays when it takes less time than tau plain tokens. In a batch, both are one row's "
        "share."
    )
    told = "; ".join(
        f"{n}: {', '.join(f'{part} {v:.1f} ms' for part, v in zip(parts, values, strict=True))}"
        for n, values in [*baseline, *rows]
    )
    return _figure(f"{slug}-stages", "Time by stage", caption, told, drawn)


def batch_figure(group: Sequence[Named], slug: str) -> Figure | None:
    """Draw decode speedup over batch size, where results hold it."""
    rows = [(n, r) for n, r in by_speed(group) if r.batch_points][:SERIES]
    if not rows:
        return None
    sizes = sorted({p.batch for _, r in rows for p in r.batch_points})
    series = []
    for name, result in rows:
        points = {p.batch: p for p in result.batch_points}
        values = [points[b].speedup if b in points else None for b in sizes]
        bounds = [pair(points[b].speedup_interval) if b in points else None for b in sizes]
        series.append(Series(name, values, bounds))
    drawn = lines(
        series,
        [str(b) for b in sizes],
        x_name="batch size (rows in lockstep)",
        y_name="decode speedup (times plain decoding at that batch)",
        marks=[1.0],
    )
    caption = "Decode speedup over plain decoding at the same batch size, 95 % interval."
    return _figure(f"{slug}-batch", "Speedup over batch size", caption, _said(series), drawn)


def grouped_figure(
    group: Sequence[Named],
    slug: str,
    title: str,
    caption: str,
    of: Callable[[Result], dict[str, Category]],
) -> Figure | None:
    """Draw the decode speedup of a few rows for every category (or other group of prompts)."""
    rows = shown(group, GROUPED)
    sizes: dict[str, int] = {}
    for _, result in rows:
        for label, part in of(result).items():
            sizes[label] = max(part.counts.prompts, sizes.get(label, 0))
    groups = [
        (
            f"{label} (n={size})",
            [
                Bar(
                    name,
                    of(result)[label].figures[SPEED],
                    pair(of(result)[label].intervals.get(SPEED)),
                    f"s{i}",
                )
                for i, (name, result) in enumerate(rows)
                if label in of(result)
            ],
        )
        for label, size in sizes.items()
    ]
    if len(groups) < 2:
        return None
    axis = "decode speedup (times plain decoding)"
    drawn = bars(groups, x_name=axis, unit="x", marks=[("plain", 1.0)])
    told = "; ".join(f"{label}: {_told(made)}" for label, made in groups)
    return _figure(slug, title, caption, told, drawn)


def settings_figure(settings: Sequence[Setting], slug: str) -> Figure:
    """Draw the fastest rows of every setting."""
    made = []
    for setting in settings:
        lookups, rows = lookup_speeds(setting.rows), shown(setting.rows, GROUPED + 1)
        made.append((setting.label, [_bar(name, r, _style(r, lookups)) for name, r in rows]))
    axis = "decode speedup (times plain decoding)"
    drawn = bars(made, x_name=axis, unit="x", marks=[("plain", 1.0)])
    told = "; ".join(f"{label}: {_told(rows)}" for label, rows in made)
    caption = (
        "The fastest drafters of every setting that may hold a rank, and prompt lookup, with 95 % "
        f"intervals. {_BEHIND}"
    )
    return _figure(slug, "Decode speedup by suite and setting", caption, told, drawn)


def prediction_figure(group: Sequence[Named], slug: str) -> Figure | None:
    """Draw measured against predicted decode speedup."""
    points = [
        Point(
            row.result.figures["speedup_predicted"],
            row.result.figures[SPEED],
            row.cells[0],
            f"{row.cells[1]}: predicted {row.result.figures['speedup_predicted']:.2f}x, "
            f"measured {row.result.figures[SPEED]:.2f}x",
        )
        for row in leaderboard(group)
        if row.kind == "ranked" and row.result.figures["speedup_predicted"] is not None
    ]
    if not points:
        return None
    drawn = scatter(
        points,
        x_name="predicted speedup (tau x plain step / round)",
        y_name="measured decode speedup",
        diagonal=PREDICTED,
    )
    caption = (
        f"{DEFINITIONS['speedup_predicted'].capitalize()}. Inside the band both agree within "
        f"{100 * PREDICTED:.0f} %; numbers are ranks."
    )
    told = "; ".join(p.words for p in points)
    return _figure(f"{slug}-predicted", "Predicted and measured speedup", caption, told, drawn)


def tree_figure(name: str, result: Result, slug: str) -> Figure | None:
    """Draw one row's tree with the acceptance on its edges."""
    if not result.branches:
        return None
    drawn, width = tree(result.branches, result.counts.rounds)
    found = edges(result.branches)
    hidden = len(found) - NODES
    caption = (
        "On an edge: accepted, of the rounds that came to the node on its left and tried this "
        "child. Thickness: share of all rounds. In a node: its place among its siblings, 0 is the "
        "first tried."
    )
    if hidden > 0:
        caption += f" The {hidden} nodes accepted least are left out."
    told = "; ".join(
        f"path {' '.join(map(str, e.path))}: {e.accepted} of {e.offered}" for e in found[:NODES]
    )
    title = f"Draft tree of {name} ({result.drafter.tree})"
    return _figure(slug, title, caption, told, drawn, max(width, WIDTH))


def pair(interval: object) -> Pair | None:
    """Return an interval of one number as a pair."""
    return None if interval is None else (interval[0], interval[1])


def _figure(
    slug: str, title: str, caption: str, told: str, drawn: Drawn, width: float = WIDTH
) -> Figure:
    return Figure(slug, title, caption, told, width, drawn[1], drawn[0])


def _told(rows: Sequence[Bar]) -> str:
    return ", ".join(
        f"{bar.label} {'not measured' if bar.value is None else f'{bar.value:.2f}x'}"
        for bar in rows
    )


def _said(series: Sequence[Series]) -> str:
    return "; ".join(
        f"{s.name}: {', '.join('-' if v is None else f'{v:.2f}' for v in s.values)}" for s in series
    )
