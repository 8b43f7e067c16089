"""A report as Markdown; plots are files beside it."""

from collections.abc import Sequence
from html import escape

from headstart.eval.report_parts import (
    Block,
    Code,
    Figures,
    Paragraphs,
    Report,
    Samples,
    Table,
    Terms,
    Warnings,
)
from headstart.eval.result import Sample


def markdown(report: Report, *, figures: str = "") -> str:
    """Return the whole report; plots are shown from the directory `figures`, or left out."""
    parts = [f"# {report.title}", report.subtitle + ".", _cell(report.verdict)]
    parts.append(_bullets(map(_cell, report.headlines)))
    for section in report.sections:
        parts.append(f"{'#' * section.level} {_cell(section.title)}")
        parts += [text for block in section.blocks for text in _block(block, figures)]
    return "\n\n".join(parts) + "\n"


def _block(block: Block, figures: str) -> list[str]:
    match block:
        case Paragraphs(lines, bullets):
            cells = [_cell(line) for line in lines]
            return [_bullets(cells)] if bullets else cells
        case Table():
            return [*([block.caption] if block.caption else []), _table(block)]
        case Figures(found):
            return [f"![{_cell(f.title)}]({figures}/{f.slug}.svg)" for f in found if figures]
        case Samples(of):
            return [text for name, samples in of for text in _samples(name, samples)]
        case Warnings(found):
            return [_bullets(f"{_cell(rows)}: {text}" for _, text, rows in found) or "None."]
        case Terms(terms):
            return [_bullets(f"`{name}`: {text}" for name, text in terms)]
        case Code(title, text):
            summary = f"<summary>{escape(title)}</summary>"
            return [f"<details>{summary}\n\n```json\n{text}\n```\n\n</details>"]


def _bullets(lines: object) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _table(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _samples(name: str, samples: Sequence[Sample]) -> list[str]:
    """Show answers with their accepted runs in bold."""
    parts = []
    for sample in samples:
        runs = [_run(run.origin, run.text) for run in sample.runs]
        parts.append(f"{_cell(name)}, {_cell(sample.prompt_id)}; accepted drafts are bold:")
        parts.append(f"<pre>{''.join(runs).replace(chr(10), '&#10;')}</pre>")
    return parts


def _run(origin: str, text: str) -> str:
    return f"<b>{escape(text)}</b>" if origin == "drafted" else escape(text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
