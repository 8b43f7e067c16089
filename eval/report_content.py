"""What a report says about results: its sections in order, for any kind of page."""

import json
from collections.abc import Sequence
from dataclasses import fields

from headstart.eval.checks import FEW_PROMPTS
from headstart.eval.leaderboard import (
    ALL,
    COLUMNS,
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
    standing,
    with_interval,
)
from headstart.eval.metrics import DEFINITIONS
from headstart.eval.report_figures import (
    batch_figure,
    pareto_figure,
    settings_figure,
    speed_figure,
)
from headstart.eval.report_parts import (
    Block,
    Card,
    Code,
    Figures,
    Paragraphs,
    Report,
    Section,
    Table,
    Terms,
    Warnings,
)
from headstart.eval.report_sections import (
    acceptance,
    batches,
    equalities,
    figures_of,
    grouped,
    histogram,
    loops,
    matrix,
    predicted,
    samples,
    stages,
    trees,
)
from headstart.eval.report_warnings import warnings
from headstart.eval.result import Result

HEADLINES = 3
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
    lookups = lookup_speeds(group)
    if standing(result, lookups) == "behind":
        remarks.append("no faster than prompt lookup")
    over = f", {speed / lookups[ALL]:.2f} times prompt lookup" if ALL in lookups else ""
    return Card(
        label,
        "-" if speed is None else f"{speed:.2f}x",
        "" if interval is None else f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}",
        f"{name}, {tau} tokens per round, {result.counts.prompts} prompts{over}",
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
    return Section("Across suites and settings", "across", [Figures([figure]), matrix(columns)])


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
        ("Speed and cost of drafting", [figures_of(speed), batches(group)]),
        ("By suite", grouped(group, slug, "suite", lambda r: r.suites)),
        ("Acceptance by depth", acceptance(group, slug)),
        ("Accepted drafted tokens per round (share of rounds)", histogram(group, slug)),
        ("Time by stage", stages(group, slug)),
        ("By category", grouped(group, slug, "category", lambda r: r.categories)),
        ("By context length", grouped(group, slug, "prompt tokens", lambda r: r.context_lengths)),
        ("Predicted and measured", predicted(group, slug)),
        ("Draft trees", trees(group, slug)),
        ("Samples", samples(group)),
        ("Equality with plain decoding", equalities(group)),
        ("Looping prompts", loops(group)),
    ]
    sections = [Section(label, slug)]
    for title, blocks in parts:
        if any(blocks):
            anchor = f"{slug}-{title.split(' (')[0].lower().replace(' ', '-')}"
            sections.append(Section(title, anchor, [b for b in blocks if b], level=3))
    return sections


def _provenance(groups: Groups) -> list[Section]:
    sections = [Section("Provenance", "provenance")]
    for place, (label, group) in enumerate(groups, 1):
        told = {name: _fields(result) for name, result in group}
        first = next(iter(told.values()))
        same = {k for k in first if len({row[k] for row in told.values()}) == 1}
        other = [key for key in first if key not in same and key != "name"]
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
    made = result.compilation
    found |= {"run compiled": "nothing" if made is None else ", ".join(made.networks)}
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
