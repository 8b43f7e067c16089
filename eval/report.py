"""Reports over any number of results: one HTML page, the same as Markdown, and its plots."""

from collections.abc import Sequence
from pathlib import Path

from headstart.eval.report_content import content
from headstart.eval.report_html import html, plot_style
from headstart.eval.report_markdown import markdown
from headstart.eval.result import Result
from headstart.files import atomic_directory, write_text

FIGURES = "figures"


def write_report(results: Sequence[Result], directory: Path) -> Path:
    """Write report.html, report.md and figures/*.svg into `directory`; return report.html's path.

    The HTML page stands alone; the Markdown page shows the plots from their files. Raises
    ValueError without results.
    """
    report, style = content(results), plot_style()
    with atomic_directory(directory / FIGURES) as figures:
        for figure in report.figures:
            write_text(figures / f"{figure.slug}.svg", figure.svg(style) + "\n")
    write_text(directory / "report.md", markdown(report, figures=FIGURES))
    write_text(directory / "report.html", html(report))
    return directory / "report.html"
