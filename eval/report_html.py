"""A report as one self-contained HTML page: no network, one small script that sorts tables."""

import re
from collections.abc import Sequence
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined

from headstart.eval.report_parts import Report, Section, Table
from headstart.eval.result import Sample

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?( %|x)?( (BELOW.*|unclear|to [\d.]+|\[.*\]))?$")
NO_RANK = ("lossy", "unequal")
"""Kinds of rows that hold no rank."""
Row = tuple[list[str], str, list[float | None] | None]
"""Cells, kind and shades of a table's row."""


def html(report: Report) -> str:
    """Return the page; whatever came from results is escaped."""
    top = [section for section in report.sections if section.level == 2]
    page = _environment().get_template("report.html.jinja")
    return page.render(report=report, top=top, below=below(report.sections))


def below(sections: Sequence[Section]) -> dict[str, list[Section]]:
    """Return the sections of level 3 under each of level 2, by the anchor of the latter."""
    found: dict[str, list[Section]] = {}
    for section in sections:
        if section.level == 2:
            parts = found[section.anchor] = []
        else:
            parts.append(section)
    return found


def plot_style() -> str:
    """Return the style of plots, for those that stand alone in a file."""
    return _environment().get_template("plots.css").render()


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("headstart.eval", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": lambda block: type(block).__name__.lower(),
        "column_classes": column_classes,
        "bodies": bodies,
        "drafted_share": drafted_share,
    }
    return environment


def column_classes(table: Table) -> list[str]:
    """Say of each column whether it holds numbers or long text."""
    return [_class([row[i] for row in table.rows]) for i in range(len(table.header))]


def _class(cells: list[str]) -> str:
    known = [cell for cell in cells if cell not in ("-", *NO_RANK)]
    if known and all(NUMBER.match(cell) for cell in known):
        return "num"
    return "text" if any(len(cell) > 40 for cell in known) else ""


def bodies(table: Table) -> list[list[Row]]:
    """Split the rows of a table so that sorting keeps those without a rank apart."""
    kinds = table.kinds or [""] * len(table.rows)
    shades = table.shades or [None] * len(table.rows)
    rows = zip(table.rows, kinds, shades, strict=True)
    return [list(part) for _, part in groupby(rows, key=lambda row: row[1].startswith(NO_RANK))]


def drafted_share(sample: Sample) -> str:
    """Say how much of what is shown of an answer was drafted."""
    drafted = sum(run.tokens for run in sample.runs if run.origin == "drafted")
    total = sum(run.tokens for run in sample.runs)
    return f"{drafted} of the {total} tokens shown were drafted"
