"""What a report says about results: its sections in order, for any kind of page."""

import json
from collections.abc import Sequence
from dataclasses import fields

from headstart.eval.compare import Named, Setting, settings_of
from headstart.eval.leaderboard import COLUMNS, leaderboard
from headstart.eval.metrics import DEFINITIONS
from headstart.eval.report_figures import (
    batch_figure,
    pareto_figure,
    settings_figure,
    speed_figure,
)
from headstart.eval.report_headlines import card, headlines, verdict
from headstart.eval.report_matrix import columns_of_settings, matrix
from headstart.eval.report_parts import (
    Block,
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
    predicted,
    samples,
    stages,
    trees,
)
from headstart.eval.report_warnings import warnings
from headstart.eval.result import Result

FAULTY = {
    "lossy": "Rows marked lossy change the output distribution and hold no rank.",
    "unequal": "Rows marked unequal gave other greedy outputs than plain decoding, though in full "
    "precision, and hold no rank.",
}


def content(results: Sequence[Result]) -> Report:
    """Return the report of any number of results. Raises ValueError without results."""
    if not results:
        raise ValueError("results=[]: a report needs at least one result")
    settings = settings_of(results)
    told = warnings([(setting.label, setting.rows) for setting in settings])
    sections = [Section("Warnings", "warnings", [Warnings(told)])]
    if len(settings) > 1:
        sections.append(_across(settings))
    for place, setting in enumerate(settings, 1):
        sections += _setting(setting, f"s{place}")
    sections += [*_provenance(settings), Section("Definitions", "definitions", [Terms(_terms())])]
    return Report(
        "What each drafter buys",
        _subtitle(results),
        verdict(settings),
        [card(setting, f"s{place}") for place, setting in enumerate(settings, 1)],
        [line for setting in settings for line in headlines(setting)],
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


def _across(settings: Sequence[Setting]) -> Section:
    """Put every drafter beside itself on other prompts or settings."""
    figure = settings_figure(settings, "across-speedup")
    rows = [row for setting in settings for row in setting.rows]
    table = matrix(columns_of_settings(settings), rows, "setting")
    return Section("Across suites and settings", "across", [Figures([figure]), table])


def _setting(setting: Setting, slug: str) -> list[Section]:
    """Return the sections of results that compare."""
    group = setting.rows
    rows = leaderboard(group)
    kinds = [" ".join(filter(None, (row.kind, row.standing))) for row in rows]
    found = {row.kind for row in rows}
    told = [f"{setting.told}.", *setting.again]
    told += [words for kind, words in FAULTY.items() if kind in found]
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
    sections = [Section(setting.label, slug)]
    for title, blocks in parts:
        if any(blocks):
            anchor = f"{slug}-{title.split(' (')[0].lower().replace(' ', '-')}"
            sections.append(Section(title, anchor, [b for b in blocks if b], level=3))
    return sections


def _provenance(settings: Sequence[Setting]) -> list[Section]:
    sections = [Section("Provenance", "provenance")]
    for place, setting in enumerate(settings, 1):
        told = {name: _fields(result) for name, result in setting.rows}
        first = next(iter(told.values()))
        same = {k for k in first if len({row[k] for row in told.values()}) == 1}
        other = [key for key in first if key not in same and key != "name"]
        blocks: list[Block] = [
            Table(["field", "value"], [[k, first[k]] for k in first if k in same])
        ]
        if other:
            rows = [[name, *(row[key] for key in other)] for name, row in told.items()]
            blocks.append(Table(["drafter", *other], rows))
        blocks += _configs(setting.rows)
        sections.append(Section(setting.label, f"provenance-{place}", blocks, level=3))
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
