"""The sections of a report on results that may be compared: tables, and the plots beside them."""

from collections.abc import Callable, Sequence
from statistics import median

from headstart.eval.compare import Named
from headstart.eval.leaderboard import by_speed, number, with_interval
from headstart.eval.metrics import DEFINITIONS, SPEED, TAU
from headstart.eval.report_figures import (
    acceptance_figures,
    grouped_figure,
    histogram_figure,
    prediction_figure,
    shown,
    stage_figure,
    tree_figure,
)
from headstart.eval.report_matrix import columns_of_prompts, matrix
from headstart.eval.report_parts import Block, Figures, Paragraphs, Samples, Table
from headstart.eval.report_svg import Figure
from headstart.eval.report_tree import by_depth
from headstart.eval.result import Category, Equality, Result

STAGES = (
    "ms_draft_per_round",
    "ms_verify_per_round",
    "ms_commit_per_round",
    "ms_prefill_per_turn",
    "ms_plain_per_token",
    "cost_ratio_c",
    "verify_ratio",
    "speedup_predicted",
    "predicted_gap",
)
TREES = 3
"""Trees drawn, of the fastest rows."""
TOLD = 3
"""Divergences named, of each row."""


def figures_of(figures: Sequence[Figure | None]) -> Figures | None:
    """Return the plots that there are."""
    found = [figure for figure in figures if figure is not None]
    return Figures(found) if found else None


def batches(group: Sequence[Named]) -> Table | None:
    """Give every point of every batch sweep."""
    rows = [
        [name, str(p.batch), number(p.tokens_per_s_plain, 1), number(p.tokens_per_s, 1)]
        + [with_interval(p.speedup, p.speedup_interval), number(p.tau), number(p.mean_drafted)]
        + [number(p.latency_plain), number(p.latency), str(p.prompts)]
        for name, result in by_speed(group)
        for p in result.batch_points
    ]
    header = ["drafter", "batch", "plain tokens/s", "tokens/s", "decode speedup", "tau"]
    header += ["drafted a round", "plain latency (s)", "latency (s)", "prompts"]
    return Table(header, rows, folded="table of batch sizes", sortable=True) if rows else None


def acceptance(group: Sequence[Named], slug: str) -> list[Block]:
    """Give conditional and prefix acceptance by depth, with intervals."""
    blocks: list[Block] = [figures_of(acceptance_figures(group, slug))]
    for figure in ("alpha_cond", "alpha_prefix"):
        depth = max(len(r.figures[figure]) for _, r in group)
        rows, shades = [], []
        for name, result in by_speed(group):
            values = result.figures[figure]
            intervals = result.intervals.get(figure) or [None] * len(values)
            cells = [with_interval(v, i) for v, i in zip(values, intervals, strict=True)]
            rest = depth - len(cells)
            rows.append([name, *cells, *["-"] * rest])
            shades.append([*values, *[None] * rest])
        header = [figure, *(f"d = {d}" for d in range(depth))]
        caption = f"{figure}, {DEFINITIONS[figure]}:"
        blocks.append(Table(header, rows, caption, shades=shades, folded=f"table of {figure}"))
    return blocks


def histogram(group: Sequence[Named], slug: str) -> list[Block]:
    """Give the share of rounds by drafted tokens accepted."""
    width = max(len(r.figures["accept_histogram"]) for _, r in group)
    rows = []
    for name, result in by_speed(group):
        counts = result.figures["accept_histogram"]
        total = max(sum(counts), 1)
        cells = [f"{100 * count / total:.1f} %" for count in counts]
        rows.append([name, f"{sum(counts):.0f}", *cells, *["-"] * (width - len(cells))])
    table = Table(["drafter", "rounds", *map(str, range(width))], rows, sortable=True)
    return [figures_of([histogram_figure(group, slug)]), table]


def stages(group: Sequence[Named], slug: str) -> list[Block]:
    """Give the time of every stage."""
    rows = [[n, *(number(r.figures[stage]) for stage in STAGES)] for n, r in by_speed(group)]
    table = Table(["drafter", *STAGES], rows, sortable=True)
    return [figures_of([stage_figure(group, slug)]), table]


def grouped(
    group: Sequence[Named], slug: str, column: str, of: Callable[[Result], dict[str, Category]]
) -> list[Block]:
    """Give each drafter's prompts apart by what `column` names."""
    rows = [
        [name, label, str(category.counts.prompts), str(category.counts.rounds)]
        + [with_interval(category.figures[f], category.intervals.get(f)) for f in (TAU, SPEED)]
        + [number(category.figures["tokens_per_s_decode"], 1)]
        for name, result in by_speed(group)
        for label, category in of(result).items()
    ]
    if not rows:
        return []
    header = ["drafter", column, "prompts", "rounds", "tau", "decode speedup", "tokens/s"]
    caption = f"Decode speedup of the fastest drafters by {column}."
    title = f"Decode speedup by {column}"
    figure = grouped_figure(group, f"{slug}-by-{column.replace(' ', '-')}", title, caption, of)
    return [
        figures_of([figure]),
        matrix(columns_of_prompts(group, of), group, column),
        Table(header, rows, folded=f"table of every drafter and {column}", sortable=True),
    ]


def predicted(group: Sequence[Named], slug: str) -> list[Block]:
    """Set predictions of tau and of speedup beside what was measured."""
    rows = []
    for name, result in by_speed(group):
        measured = result.figures["tau_full_rounds"]
        if result.tau_predicted is not None and measured:
            gap = f"{100 * (result.tau_predicted / measured - 1):+.1f} %"
            rows.append([name, number(result.tau_predicted), number(measured), gap])
    text = "Chains, tau of full rounds: predicted by teacher-forced agreement on the target's own "
    header = ["drafter", "predicted", "measured", "gap"]
    gaps = [abs(g) for _, r in group if (g := r.figures["predicted_gap"]) is not None]
    told = []
    if gaps:
        told.append(
            f"Decode speedup and its prediction from tau and stage times differ by "
            f"{100 * median(gaps):.1f} % (median over {len(gaps)} rows), at most "
            f"{100 * max(gaps):.1f} %."
        )
    table = Table(header, rows, f"{text}answers, and measured:") if rows else None
    figure = figures_of([prediction_figure(group, slug)])
    return [Paragraphs(told) if told else None, figure, table]


def trees(group: Sequence[Named], slug: str) -> list[Block]:
    """Draw the fastest trees, and give acceptance by depth and place of every row."""
    rows = [(name, r) for name, r in shown(group, len(group)) if r.branches]
    wide = [row for row in rows if any(len(b.offered) > 1 for b in row[1].branches)]
    drawn = [tree_figure(n, r, f"{slug}-tree-{i}") for i, (n, r) in enumerate(wide[:TREES])]
    table = [
        [name, str(depth), str(edge.path[-1]), str(edge.offered), str(edge.accepted)]
        + [number(edge.share if edge.offered else None)]
        for name, result in rows
        for depth, level in enumerate(by_depth(result.branches))
        for edge in level
    ]
    header = ["drafter", "depth d", "place", "tried", "accepted", "share"]
    caption = "Acceptance by depth and place among siblings (0 is the first tried):"
    folded = "table of depth and place"
    whole = Table(header, table, caption, folded=folded, sortable=True) if table else None
    return [figures_of(drawn), whole]


def samples(group: Sequence[Named]) -> list[Block]:
    """Show the prompts and answers of the fastest rows."""
    found = [(name, r.samples) for name, r in shown(group) if r.samples]
    return [Samples(found)] if found else []


def equalities(group: Sequence[Named]) -> list[Block]:
    """Compare the greedy outputs of every row with plain decoding."""
    rows = [[name, *_equality(result.equality)] for name, result in by_speed(group)]
    header = ["drafter", "identical", "divergences", "largest margin", "first divergences"]
    caption = "Greedy outputs against plain decoding, token for token; the margin is plain's best "
    caption += "minus second-best logit at the first divergence, near 0 in a rounding tie."
    return [Table(header, rows, caption, sortable=True)]


def _equality(equality: Equality | None) -> list[str]:
    if equality is None:
        return ["-", "-", "-", "not compared (sampled outputs of the two arms differ rightly)"]
    found = equality.divergences
    told = [f"{d.prompt_id} at token {d.position} (margin {d.margin:.3g})" for d in found[:TOLD]]
    more = f" and {len(found) - TOLD} more" if len(found) > TOLD else ""
    return [
        f"{100 * equality.fraction_identical:.1f} %",
        str(len(found)),
        f"{max(d.margin for d in found):.3g}" if found else "-",
        (", ".join(told) or "none") + more,
    ]


def loops(group: Sequence[Named]) -> list[Block]:
    """Give the figures with and without the prompts that loop."""
    rows = []
    for name, result in by_speed(group):
        if result.loops:
            flagged = ", ".join(f"{p} ({share:.2f})" for p, share in sorted(result.loops.items()))
            without = result.figures_without_loops or dict.fromkeys(DEFINITIONS)
            pairs = [number(f[key]) for key in (TAU, SPEED) for f in (result.figures, without)]
            rows.append([name, flagged, *pairs])
    header = ["drafter", "prompts (share of repeated 8-grams)", "tau", "tau without them"]
    header += ["decode speedup", "decode speedup without them"]
    return [Table(header, rows)] if rows else []
