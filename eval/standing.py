"""How a drafter stands: whether it may hold a rank, and whether it beats prompt lookup."""

from collections.abc import Mapping, Sequence

from headstart.eval.checks import FEW_PROMPTS
from headstart.eval.compare import Named
from headstart.eval.metrics import SPEED
from headstart.eval.result import Result

HALF = ("bfloat16", "float16")
LOOKUP = "lookup"
"""Family that drafts what followed the same words in the prompt: what a head must beat."""
ALL = ""
"""Stands for the prompts of all suites together."""


def fault(result: Result) -> str:
    """Say why a result holds no rank; '' where it may.

    'lossy' by its rule, or 'unequal': in full precision its greedy outputs are not those of plain
    decoding.
    """
    if not result.drafter.lossless:
        return "lossy"
    full, equality = result.provenance.dtype not in HALF, result.equality
    return "unequal" if full and equality and equality.fraction_identical < 1 else ""


def lookup_speeds(group: Sequence[Named]) -> dict[str, float]:
    """Return the decode speedup of the fastest lossless prompt lookup: on ALL, and by suite.

    Empty where none was run.
    """
    found: dict[str, float] = {}
    for _, result in group:
        if result.drafter.family == LOOKUP and not fault(result):
            for suite, speed in speeds(result).items():
                found[suite] = max(speed, found.get(suite, speed))
    return found


def speeds(result: Result) -> dict[str, float]:
    """Return the decode speedups that were measured: on ALL, and by suite."""
    figures = {ALL: result.figures} | {name: of.figures for name, of in result.suites.items()}
    return {name: f[SPEED] for name, f in figures.items() if f[SPEED] is not None}


def standing(result: Result, lookups: Mapping[str, float]) -> str:
    """Say whether a drafter is worth more than prompt lookup, which needs no training.

    'behind' when it is no faster on all prompts together, 'partly' when on those of some suite,
    'ahead' when it is clearly faster, 'unclear' when only its value is.
    """
    own = speeds(result)
    if result.drafter.family == LOOKUP or ALL not in own or ALL not in lookups:
        return ""
    if own[ALL] <= lookups[ALL]:
        return "behind"
    if behind_on(result, lookups):
        return "partly"
    return "ahead" if _clearly_faster(result, lookups[ALL]) else "unclear"


def _clearly_faster(result: Result, lookup: float) -> bool:
    """Whether the interval of the difference lies above 0; of separate runs there is none.

    Then the row's own interval has to lie above the value of lookup.
    """
    if result.over_lookup is not None:
        interval, least = result.over_lookup.interval, 0.0
    else:
        interval, least = result.intervals.get(SPEED), lookup
    return interval is not None and interval[0] > least


def behind_on(result: Result, lookups: Mapping[str, float]) -> list[str]:
    """Return the suites, of enough prompts to tell, on which it is no faster than prompt lookup."""
    if result.drafter.family == LOOKUP:
        return []
    own = speeds(result)
    return [
        suite
        for suite, group in result.suites.items()
        if group.counts.prompts >= FEW_PROMPTS
        and suite in own
        and suite in lookups
        and own[suite] <= lookups[suite]
    ]


def no_head_faster(group: Sequence[Named], lookups: Mapping[str, float]) -> bool:
    """Whether heads (or draft models) were measured beside prompt lookup, and none is faster."""
    found = {
        standing(result, lookups)
        for _, result in group
        if result.drafter.checkpoint is not None and not fault(result)
    }
    return found - {""} == {"behind"}
