"""A report as one self-contained HTML page: no network, one small script that sorts tables."""

import re
from itertools import groupby

from jinja2 import Environment, PackageLoader, StrictUndefined

from headstart.eval.report_parts import Report, Table
from headstart.eval.result import Sample

NUMBER = re.compile(r"[-+]?\d+(\.\d+)?( %|x)?( (BELOW.*|unclear|to [\d.]+|\[.*\]))?$")
Row = tuple[list[str], str, list[float | None] | None]
"""Cells, kind and shades of a table's row."""


def html(report: Report) -> str:
    """Return the page; whatever came from results is escaped."""
    top = [section for section in report.sections if section.level == 2]
    return _environment().get_template("report.html.jinja").render(report=report, top=top)


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
    known = [cell for cell in cells if cell not in ("-", "lossy")]
    if known and all(NUMBER.match(cell) for cell in known):
        return "num"
    return "text" if any(len(cell) > 40 for cell in known) else ""


def bodies(table: Table) -> list[list[Row]]:
    """Split the rows of a table so that sorting keeps lossy ones apart."""
    kinds = table.kinds or [""] * len(table.rows)
    shades = table.shades or [None] * len(table.rows)
    rows = zip(table.rows, kinds, shades, strict=True)
    return [list(part) for _, part in groupby(rows, key=lambda row: row[1].startswith("lossy"))]


def drafted_share(sample: Sample) -> str:
    """Say how much of an answer was drafted."""
    drafted = sum(run.tokens for run in sample.runs if run.origin == "drafted")
    total = sum(run.tokens for run in sample.runs)
    return f"{drafted} of {total} tokens were drafted"
