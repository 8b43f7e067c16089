"""What a reader of a report must know before trusting a row."""

from collections.abc import Iterator, Mapping, Sequence

from headstart.eval.leaderboard import Named, behind_on, lookup_speeds, plain_speeds, standing
from headstart.eval.result import Result

HALF = ("bfloat16", "float16")
NAMES = 4
DRIFT = 0.05
"""Relative difference of two plain arms that is told."""


def warnings(groups: Sequence[tuple[str, Sequence[Named]]]) -> list[tuple[str, str, str]]:
    """Return (severity, text, which rows) of every warning once, the serious ones first.

    Severities are 'serious' (the row may not be compared) and 'caution'.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for label, group in groups:
        lookups = lookup_speeds(group)
        of_group: dict[tuple[str, str], list[str]] = {}
        for warning in _of_group(group):
            of_group[warning] = [name for name, _ in group]
        for name, result in group:
            for warning in _of(result, lookups):
                of_group.setdefault(warning, []).append(name)
        for warning, names in of_group.items():
            found.setdefault(warning, {}).setdefault(_names(names, len(group)), []).append(label)
    ordered = sorted(found.items(), key=lambda item: item[0][0] != "serious")
    return [(*warning, _where(rows, len(groups))) for warning, rows in ordered]


def _of_group(group: Sequence[Named]) -> Iterator[tuple[str, str]]:
    speeds = plain_speeds(group)
    if speeds and max(speeds) > (1 + DRIFT) * min(speeds):
        slow, fast = min(speeds), max(speeds)
        yield (
            "caution",
            (
                f"runs apart: plain decoding made {slow} tokens/s in one and {fast} in another, so "
                "their rows compare less well than rows of one run"
            ),
        )


def _where(rows: Mapping[str, Sequence[str]], settings: int) -> str:
    """Name the rows, and their settings where it is not all of them."""
    told = []
    for names, labels in rows.items():
        where = "" if len(labels) == settings else f" ({'; '.join(labels)})"
        told.append(names + where)
    return "; ".join(told)


def _of(result: Result, lookups: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    if not result.drafter.lossless:
        rule = result.drafter.verify_scheme
        yield "serious", f"lossy ({rule}): outputs do not follow the target's distribution"
    if result.equality is not None and result.equality.fraction_identical < 1:
        yield _unequal(result.provenance.dtype)
    if standing(result, lookups) == "behind":
        yield "caution", "no faster than prompt lookup, which needs no training"
    for suite in behind_on(result, lookups):
        yield "caution", f"no faster than prompt lookup on {suite}"
    for warning in result.warnings:
        yield "caution", warning


def _unequal(dtype: str) -> tuple[str, str]:
    if dtype in HALF:
        return "caution", (
            f"greedy outputs part from plain decoding: {dtype} rounds near ties either way; the "
            "margins stand under equality"
        )
    return "serious", f"greedy outputs differ from plain decoding in {dtype}: not lossless"


def _names(names: Sequence[str], rows: int) -> str:
    if len(names) == rows and rows > 1:
        return f"all {rows} rows"
    hidden = len(names) - NAMES
    return ", ".join(names[:NAMES]) + (f" and {hidden} more" if hidden > 0 else "")
