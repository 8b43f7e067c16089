"""What a report says about results: its sections in order, for any kind of page."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from statistics import median

from headstart.eval.checks import FEW_PROMPTS
from headstart.eval.leaderboard import (
    ALL,
    COLUMNS,
    LOOKUP,
    SPEED,
    TAU,
    Named,
    by_setting,
    by_speed,
    leaderboard,
    lookup_speeds,
    name_results,
    number,
    setting_labels,
    with_interval,
)
from headstart.eval.metrics import DEFINITIONS
from headstart.eval.report_figures import (
    acceptance_figures,
    batch_figure,
    grouped_figure,
    histogram_figure,
    pareto_figure,
    prediction_figure,
    settings_figure,
    shown,
    speed_figure,
    stage_figure,
    tree_figure,
)
from headstart.eval.report_parts import (
    Block,
    Card,
    Code,
    Figures,
    Paragraphs,
    Report,
    Samples,
    Section,
    Table,
    Terms,
    Warnings,
)
from headstart.eval.report_tree import by_depth
from headstart.eval.report_warnings import warnings
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
HEADLINES = 3
TREES = 3
Groups = list[tuple[str, list[Named]]]
"""Results by setting, each setting under its short label."""


def content(results: Sequence[Result]) -> Report:
    """Return the report of any number of results. Raises ValueError without results."""
    if not results:
        raise ValueError("results=[]: a report needs at least one result")
    by = by_setting(name_results(results))
    groups: Groups = list(zip(setting_labels(list(by.values())), by.values(), strict=True))
    sections = [Section("Warnings", "warnings", [Warnings(warnings(groups))])]
    if len(groups) > 1:
        sections.append(_across(groups))
    for place, ((label, group), setting) in enumerate(zip(groups, by, strict=True), 1):
        sections += _setting(label, setting, group, f"s{place}")
    sections += [*_provenance(groups), Section("Definitions", "definitions", [Terms(_terms())])]
    return Report(
        "What each drafter buys",
        _subtitle(results),
        [_card(label, group, f"s{i}") for i, (label, group) in enumerate(groups, 1)],
        [_headline(n, r) for _, group in groups for n, r in by_speed(group)[:HEADLINES]],
        sections,
    )


def _subtitle(results: Sequence[Result]) -> str:
    targets, devices, dates = (
        sorted({getattr(r.provenance, name) for r in results})
        for name in ("target", "device", "date")
    )
    days = sorted({date[:10] for date in dates})
    span = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return f"{', '.join(targets)} on {', '.join(devices)}; {len(results)} results, {span}"


def _remarks(result: Result) -> list[str]:
    speed, interval = result.figures[SPEED], result.intervals.get(SPEED)
    remarks = []
    if speed is not None and interval is not None and interval[0] <= 1 <= interval[1]:
        remarks.append("no speedup is shown: the interval contains 1")
    if result.counts.prompts < FEW_PROMPTS:
        remarks.append(f"fewer than {FEW_PROMPTS} prompts: a rough interval")
    return remarks


def _headline(name: str, result: Result) -> str:
    speed, interval = result.figures[SPEED], result.intervals.get(SPEED)
    parts = [f"**{name}** ({result.drafter.tree})"]
    if speed is None:
        parts.append("speed not measured;")
    else:
        parts.append(f"decodes {with_interval(speed, interval, 'x')} as fast as the target alone,")
    tau = with_interval(result.figures[TAU], result.intervals.get(TAU))
    parts.append(f"at {tau} tokens per round over {result.counts.prompts} prompts")
    parts += [f"({remark})" for remark in _remarks(result)]
    if not result.drafter.lossless:
        parts.append("and is **lossy**: its outputs do not follow the target's distribution")
    return " ".join(parts) + "."


def _card(label: str, group: Sequence[Named], anchor: str) -> Card:
    name, result = by_speed(group)[0]
    speed, interval = result.figures[SPEED], result.intervals.get(SPEED)
    tau = number(result.figures[TAU])
    remarks = _remarks(result)
    if not result.drafter.lossless:
        remarks.append("lossy: its outputs do not follow the target's distribution")
    return Card(
        label,
        "-" if speed is None else f"{speed:.2f}x",
        "" if interval is None else f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}",
        f"{name}, {tau} tokens per round, {result.counts.prompts} prompts",
        remarks,
        anchor,
    )


def _across(groups: Groups) -> Section:
    """Put every drafter beside itself on other prompts or settings."""
    columns = {
        label: ({name: r.figures[SPEED] for name, r in group}, lookup_speeds(group).get(ALL))
        for label, group in groups
    }
    figure = settings_figure(groups, "across-speedup")
    return Section("Across suites and settings", "across", [Figures([figure]), _matrix(columns)])


def _matrix(
    columns: Mapping[str, tuple[Mapping[str, float | None], float | None]], what: str = "setting"
) -> Table:
    """Lay decode speedups out by drafter and column, best first.

    A column has the speedups of its drafters, and that of its fastest prompt lookup.
    """
    names = dict.fromkeys(name for found, _ in columns.values() for name in found)
    rows = {name: [found.get(name) for found, _ in columns.values()] for name in names}
    lookups = [lookup for _, lookup in columns.values()]
    ordered = sorted(rows.items(), key=lambda row: -_mean(row[1]))
    top = max([1.5, *(v for values in rows.values() for v in values if v is not None)])
    told = "; BELOW: slower than prompt lookup there" if any(lookups) else ""
    return Table(
        ["drafter", *columns],
        [[name, *map(_against, values, lookups)] for name, values in ordered],
        f"Decode speedup by {what}; darker is faster{told}.",
        shades=[
            [None if v is None else max(v - 1, 0) / (top - 1) for v in values]
            for _, values in ordered
        ],
        sortable=True,
    )


def _against(speed: float | None, lookup: float | None) -> str:
    below = speed is not None and lookup is not None and speed < lookup
    return number(speed) + (" BELOW" if below else "")


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else 0.0


def _setting(label: str, setting: str, group: Sequence[Named], slug: str) -> list[Section]:
    """Return the sections of results that compare: same target, machine, prompts, sampling."""
    rows = leaderboard(group)
    kinds = [" ".join(filter(None, (row.kind, row.standing))) for row in rows]
    told = [f"{setting}."]
    if any(row.kind == "lossy" for row in rows):
        told.append("Rows marked lossy change the output distribution and hold no rank.")
    board = Table(list(COLUMNS), [row.cells for row in rows], kinds=kinds, sortable=True)
    speed = [speed_figure(group, slug), pareto_figure(group, slug), batch_figure(group, slug)]
    parts: list[tuple[str, list[Block]]] = [
        ("Leaderboard", [Paragraphs(told), board]),
        ("Speed and cost of drafting", [_figures(speed)]),
        ("By suite", _grouped(group, slug, "suite", lambda r: r.suites)),
        ("Acceptance by depth", _acceptance(group, slug)),
        ("Accepted drafted tokens per round (share of rounds)", _histogram(group, slug)),
        ("Time by stage", _stages(group, slug)),
        ("By category", _grouped(group, slug, "category", lambda r: r.categories)),
        ("By context length", _grouped(group, slug, "prompt tokens", lambda r: r.context_lengths)),
        ("Predicted and measured", _predicted(group, slug)),
        ("Draft trees", _trees(group, slug)),
        ("Samples", _samples(group)),
        ("Equality with plain decoding", [Paragraphs(_equalities(group), bullets=True)]),
        ("Looping prompts", _loops(group)),
    ]
    sections = [Section(label[:1].upper() + label[1:], slug)]
    for title, blocks in parts:
        if any(blocks):
            anchor = f"{slug}-{title.split(' (')[0].lower().replace(' ', '-')}"
            sections.append(Section(title, anchor, [b for b in blocks if b], level=3))
    return sections


def _figures(figures: Sequence[object]) -> Figures | None:
    found = [figure for figure in figures if figure is not None]
    return Figures(found) if found else None


def _acceptance(group: Sequence[Named], slug: str) -> list[Block]:
    blocks: list[Block] = [_figures(acceptance_figures(group, slug))]
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


def _histogram(group: Sequence[Named], slug: str) -> list[Block]:
    width = max(len(r.figures["accept_histogram"]) for _, r in group)
    rows = []
    for name, result in by_speed(group):
        counts = result.figures["accept_histogram"]
        total = max(sum(counts), 1)
        cells = [f"{100 * count / total:.1f} %" for count in counts]
        rows.append([name, f"{sum(counts):.0f}", *cells, *["-"] * (width - len(cells))])
    table = Table(["drafter", "rounds", *map(str, range(width))], rows, folded="table of shares")
    return [_figures([histogram_figure(group, slug)]), table]


def _stages(group: Sequence[Named], slug: str) -> list[Block]:
    rows = [[n, *(number(r.figures[stage]) for stage in STAGES)] for n, r in by_speed(group)]
    table = Table(["drafter", *STAGES], rows, folded="table of stages", sortable=True)
    return [_figures([stage_figure(group, slug)]), table]


def _grouped(
    group: Sequence[Named], slug: str, column: str, of: Callable[[Result], dict[str, Category]]
) -> list[Block]:
    """Give each drafter's prompts apart by what `column` names."""
    rows = [
        [name, label, str(category.counts.prompts), str(category.counts.rounds)]
        + [number(category.figures[figure]) for figure in (TAU, SPEED)]
        + [number(category.figures["tokens_per_s_decode"], 1)]
        for name, result in by_speed(group)
        for label, category in of(result).items()
    ]
    if not rows:
        return []
    columns = {}
    for label in dict.fromkeys(label for _, r in group for label in of(r)):
        found = {name: _speed_of(of(r).get(label)) for name, r in group}
        rivals = [found[name] for name, r in group if r.drafter.family == LOOKUP]
        columns[label] = found, max((v for v in rivals if v is not None), default=None)
    header = ["drafter", column, "prompts", "rounds", "tau", "decode speedup", "tokens/s"]
    caption = f"Decode speedup of the fastest drafters by {column}."
    title = f"Decode speedup by {column}"
    figure = grouped_figure(group, f"{slug}-by-{column.replace(' ', '-')}", title, caption, of)
    return [
        _figures([figure]),
        _matrix(columns, column),
        Table(header, rows, folded=f"table of every drafter and {column}", sortable=True),
    ]


def _speed_of(category: Category | None) -> float | None:
    return None if category is None else category.figures[SPEED]


def _predicted(group: Sequence[Named], slug: str) -> list[Block]:
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
    figure = _figures([prediction_figure(group, slug)])
    return [Paragraphs(told) if told else None, figure, table]


def _trees(group: Sequence[Named], slug: str) -> list[Block]:
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
    return [_figures(drawn), whole]


def _samples(group: Sequence[Named]) -> list[Block]:
    found = [(name, r.samples) for name, r in shown(group) if r.samples]
    return [Samples(found)] if found else []


def _equalities(group: Sequence[Named]) -> list[str]:
    return [f"{name}: {_equality(r.equality)}" for name, r in by_speed(group)]


def _equality(equality: Equality | None) -> str:
    if equality is None:
        return "not compared (sampled outputs of the two arms differ rightly)"
    line = f"{100 * equality.fraction_identical:.1f} % of greedy outputs identical"
    told = [
        f"{d.prompt_id} at token {d.position} (plain top-2 margin {d.margin:.3g})"
        for d in equality.divergences[:5]
    ]
    hidden = len(equality.divergences) - len(told)
    more = f" and {hidden} more" if hidden else ""
    return line + (f"; first divergences: {', '.join(told)}{more}" if told else "")


def _loops(group: Sequence[Named]) -> list[Block]:
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


def _provenance(groups: Groups) -> list[Section]:
    sections = [Section("Provenance", "provenance")]
    for place, (label, group) in enumerate(groups, 1):
        told = {name: _fields(result) for name, result in group}
        first = next(iter(told.values()))
        same = {k for k in first if len({row[k] for row in told.values()}) == 1}
        other = [key for key in first if key not in same]
        blocks: list[Block] = [
            Table(["field", "value"], [[k, first[k]] for k in first if k in same])
        ]
        if other:
            rows = [[name, *(row[key] for key in other)] for name, row in told.items()]
            blocks.append(Table(["drafter", *other], rows))
        sections.append(Section(label, f"provenance-{place}", [*blocks, *_configs(group)], level=3))
    return sections


def _fields(result: Result) -> dict[str, str]:
    found: dict[str, object] = {}
    for part in (result.drafter, result.sampling, result.counts, result.provenance):
        found |= {f.name: getattr(part, f.name) for f in fields(part) if f.name != "config"}
    found |= {"repeats (median)": result.repeats, "bootstrap resamples": result.resamples}
    return {key: "-" if value is None else str(value) for key, value in found.items()}


def _configs(group: Sequence[Named]) -> list[Code]:
    """Show each configuration once, with the rows that it made."""
    made: dict[str, list[str]] = {}
    for name, result in group:
        made.setdefault(json.dumps(result.provenance.config, indent=1), []).append(name)
    return [Code(f"configuration of {', '.join(names)}", text) for text, names in made.items()]


def _terms() -> list[tuple[str, str]]:
    return [*COLUMNS.items(), *DEFINITIONS.items()]
