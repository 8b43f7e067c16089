"""What a reader of a report must know before trusting a row."""

from collections.abc import Iterator, Mapping, Sequence

from headstart.eval.compare import Named
from headstart.eval.leaderboard import plain_speeds
from headstart.eval.result import Result
from headstart.eval.standing import HALF, behind_on, fault, lookup_speeds, standing

NAMES = 4
DRIFT = 0.05
"""Relative difference of two plain arms that is told."""
SEEDS = 3
"""Seeds of a sampled figure that may be published (metrics.md, section 6)."""
SERIOUS = {
    "the losslessness gate failed": "not lossless: its greedy outputs differ from plain decoding",
    "bug suspect:": "a bug is suspected: see the warnings",
    "contamination:": "it was trained on prompts of this suite",
    ", paired with ": "it was trained for another target",
}
"""Signs of the warnings of results that cost a row its standing, and what is then said of it."""
FAULTS = {
    "": [],
    "lossy": ["lossy: its outputs do not follow the target's distribution"],
    "unequal": [SERIOUS["the losslessness gate failed"]],
}


def serious(result: Result) -> list[str]:
    """Return what costs a row its standing, in a few words each, for cards and headlines."""
    found = [
        words for sign, words in SERIOUS.items() if any(sign in text for text in result.warnings)
    ]
    return list(dict.fromkeys([*FAULTS[fault(result)], *found]))


def warnings(groups: Sequence[tuple[str, Sequence[Named]]]) -> list[tuple[str, str, str]]:
    """Return (severity, text, which rows) of every warning once, the serious ones first.

    Severities are 'serious' (the row may not be compared) and 'caution'.
    """
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for label, group in groups:
        lookups, seeds = lookup_speeds(group), _seeds(group)
        of_group: dict[tuple[str, str], list[str]] = {}
        for warning in _of_group(group):
            of_group[warning] = [name for name, _ in group]
        for name, result in group:
            told = [*_of(result, lookups), *_few_seeds(result, seeds[result.drafter.name])]
            for warning in told:
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


def _seeds(group: Sequence[Named]) -> dict[str, int]:
    """Count the seeds that each drafter was sampled with."""
    found: dict[str, set[int]] = {}
    for _, result in group:
        found.setdefault(result.drafter.name, set()).add(result.sampling.seed)
    return {name: len(seeds) for name, seeds in found.items()}


def _few_seeds(result: Result, seeds: int) -> Iterator[tuple[str, str]]:
    if result.sampling.temperature > 0 and seeds < SEEDS:
        count = "one seed" if seeds == 1 else f"{seeds} seeds"
        yield (
            "caution",
            f"sampled with {count}: other draws give other texts, and a figure to be published "
            f"needs {SEEDS} (sampling.seed)",
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
        yield "serious" if any(sign in warning for sign in SERIOUS) else "caution", warning


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
