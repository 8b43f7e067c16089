"""The audit as files beside the rows: audit.json, audit.md, and audit.html with a few rows."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from transformers import PreTrainedTokenizerBase

from headstart.data.audit import Audit
from headstart.data.show import segments, title
from headstart.files import write_json, write_text

VOCABULARIES = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
BAR = 40
NAMED = 5
"""Evaluation prompts that are named, of those found."""


def write_audit(
    directory: Path, audit: Audit, tokenizer: PreTrainedTokenizerBase, *, source: str = ""
) -> str:
    """Write the audit of the rows in `directory` and return it in short, for printing.

    `source` is the reader's own account of what it dropped and repaired.
    """
    found = figures(audit, source)
    write_json(directory / "audit.json", found)
    write_text(directory / "audit.md", markdown(found))
    write_text(directory / "audit.html", html(found, audit, tokenizer))
    return short(found)


def figures(audit: Audit, source: str = "") -> dict[str, Any]:
    """Return every figure of the audit as plain data.

    Lengths are in tokens, shares are fractions; a quantile is the smallest value that so large a
    share of the rows does not exceed.
    """
    return {
        "source": source,
        "conversations": audit.conversations,
        "rows": audit.rows,
        "tokens": audit.tokens,
        "supervised_tokens": audit.supervised,
        "supervised_share": audit.supervised / max(audit.tokens, 1),
        "supervised_tokens_cut_away": audit.cut_away,
        "dropped": dict(audit.dropped.most_common()),
        "noted": dict(audit.noted.most_common()),
        "stop_reasons": dict(audit.stops.most_common()),
        "user_turns": {str(n): count for n, count in sorted(audit.turns.items())},
        "row_tokens": _quantiles(audit.lengths),
        "row_supervised_tokens": _quantiles(audit.answers),
        "row_supervised_percent": _quantiles(audit.shares),
        "row_tokens_histogram": histogram(audit.lengths),
        "distinct_supervised_tokens": len(audit.vocabulary),
        "draft_vocabulary_coverage": {str(size): audit.coverage(size) for size in _sizes(audit)},
        "duplicate_rows": audit.duplicate_rows,
        "duplicate_first_prompts": audit.duplicate_prompts,
        "evaluation_overlap": _overlap(audit),
    }


def histogram(counts: Counter[int]) -> dict[str, int]:
    """Return how many values fall in each range between powers of two, from 1-16 on."""
    if not counts:
        return {}
    edges = [16]
    while edges[-1] < max(counts):
        edges.append(2 * edges[-1])
    bins = {f"{edge // 2 + 1 if edge > 16 else 1}-{edge}": 0 for edge in edges}
    names = list(bins)
    for value, count in counts.items():
        bins[names[next(i for i, edge in enumerate(edges) if value <= edge)]] += count
    return bins


def markdown(found: dict[str, Any]) -> str:
    """Return the audit as one Markdown page."""
    sections = [
        "# Audit of the rows",
        *(f"- {_inline(line)}" for line in short(found).splitlines()),
    ]
    for name, counts in _tables(found).items():
        sections += ["", f"## {name}", "", *_table(counts)]
    bars = _bars(found["row_tokens_histogram"])
    sections += ["", "## Tokens of a row", "", "```", *bars, "```"]
    overlap = found["evaluation_overlap"]
    if overlap and overlap["conversations"]:
        sections += ["", "## Evaluation prompts found in training", ""]
        sections += [f"- {_inline(name)}" for name in overlap["prompts_named"]]
        sections += [f"- in training conversation {_inline(i)}" for i in overlap["examples"]]
    return "\n".join(sections) + "\n"


def html(found: dict[str, Any], audit: Audit, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the audit as one HTML page, a few rows with their supervised tokens coloured."""
    rows = [(title(row), segments(row, tokenizer)) for row in audit.samples]
    bars = _bars(found["row_tokens_histogram"])
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE)
    lines = short(found).splitlines()
    return page.render(lines=lines, tables=_tables(found), bars="\n".join(bars), rows=rows)


def short(found: dict[str, Any]) -> str:
    """Return the audit in a few lines."""
    row, answer = found["row_tokens"], found["row_supervised_tokens"]
    lines = [
        f"{found['rows']} rows from {found['conversations']} conversations, "
        f"{found['supervised_tokens']} of {found['tokens']} tokens supervised "
        f"({100 * found['supervised_share']:.0f} %)",
        f"row tokens {_spread(row)}; supervised {_spread(answer)}",
        f"dropped: {_reasons(found['dropped'])}; noted: {_reasons(found['noted'])}",
        f"supervised tokens cut away by the row length: {found['supervised_tokens_cut_away']}",
        f"duplicates: {found['duplicate_rows']} rows, "
        f"{found['duplicate_first_prompts']} first prompts",
    ]
    coverage = found["draft_vocabulary_coverage"].items()
    sizes = ", ".join(f"{size}: {100 * share:.1f} %" for size, share in coverage)
    lines += [f"supervised tokens covered by the most frequent ids: {sizes}"] if sizes else []
    overlap = found["evaluation_overlap"]
    if overlap:
        lines.append(
            f"evaluation prompts in training: {overlap['prompts_touched']} of {overlap['prompts']} "
            f"in part, {overlap['prompts_mostly_held']} by four fifths or more; "
            f"{overlap['conversations']} conversations"
        )
    return "\n".join([f"source: {found['source']}", *lines] if found["source"] else lines)


def _overlap(audit: Audit) -> dict[str, Any] | None:
    if audit.prompts is None:
        return None
    some, most = audit.overlap.prompts(audit.prompts)
    return {
        "prompts": len(audit.prompts.names),
        "prompts_touched": len(some),
        "prompts_mostly_held": len(most),
        "prompts_named": [*most, *(name for name in some if name not in most)][:NAMED],
        "conversations": audit.overlap.conversations,
        "examples": audit.overlap.examples,
    }


def _sizes(audit: Audit) -> list[int]:
    """Return the draft vocabularies worth a line: up to the first that covers everything."""
    if not audit.vocabulary:
        return []
    smaller = [size for size in VOCABULARIES if size < len(audit.vocabulary)]
    return [*smaller, *VOCABULARIES[len(smaller) : len(smaller) + 1]]


def _quantiles(counts: Counter[int]) -> dict[str, float]:
    if not counts:
        return {}
    total, names = counts.total(), {0.0: "min", 1.0: "max"}
    found: dict[str, float] = {"mean": sum(v * n for v, n in counts.items()) / total}
    for share in QUANTILES:
        below = 0
        for value in sorted(counts):
            below += counts[value]
            if below >= share * total:
                break
        found[names.get(share, f"p{100 * share:.0f}")] = value
    return found


def _tables(found: dict[str, Any]) -> dict[str, dict[str, int]]:
    named = {"Dropped": "dropped", "Noted": "noted", "User turns of a conversation": "user_turns"}
    named["How answers ended"] = "stop_reasons"
    return {name: found[key] for name, key in named.items() if found[key]}


def _table(counts: dict[str, int]) -> Iterable[str]:
    yield "| what | count |"
    yield "|---|---:|"
    yield from (f"| {_inline(name)} | {count} |" for name, count in counts.items())


def _bars(bins: dict[str, int]) -> list[str]:
    top, wide = max(bins.values(), default=1), max(map(len, bins), default=0)
    return [f"{name:>{wide}} {'#' * round(BAR * n / top):<{BAR}} {n}" for name, n in bins.items()]


def _spread(quantiles: dict[str, float]) -> str:
    if not quantiles:
        return "none"
    return "{min:.0f} to {max:.0f}, median {p50:.0f}, mean {mean:.1f}".format(**quantiles)


def _reasons(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.items()) or "none"


def _inline(text: str) -> str:
    # Reasons quote markers and ids are the user's own: neither may become Markdown or HTML.
    return "".join(f"&#{ord(c)};" if c in "|<>&`*_[]\n" else c for c in text)


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Audit of the rows</title>
<style>
body { font-family: sans-serif; max-width: 60rem; margin: 2rem auto; }
td { padding-right: 2rem; }
.row { white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; color: #666; }
.row mark { background: #9be39b; color: #000; }
</style>
<h1>Audit of the rows</h1>
<ul>
{% for line in lines %}<li>{{ line }}</li>
{% endfor %}</ul>
{% for name, counts in tables.items() %}<h2>{{ name }}</h2>
<table>
{% for what, count in counts.items() %}<tr><td>{{ what }}</td><td>{{ count }}</td></tr>
{% endfor %}</table>
{% endfor %}<h2>Tokens of a row</h2>
<pre>{{ bars }}</pre>
<h2>Some rows, their supervised tokens marked</h2>
{% for title, runs in rows %}<h3>{{ title }}</h3>
<div class="row">{% for text, on in runs %}\
{% if on %}<mark>{{ text }}</mark>{% else %}{{ text }}{% endif %}{% endfor %}</div>
{% endfor %}</html>
"""
