"""What a report says first: its best rows in a sentence or a card each, and the equality gate."""

from collections.abc import Mapping, Sequence

from headstart.eval.checks import FEW_PROMPTS
from headstart.eval.compare import Named, Setting
from headstart.eval.leaderboard import by_speed, number, with_interval
from headstart.eval.metrics import SPEED, TAU
from headstart.eval.report_parts import Card
from headstart.eval.report_warnings import serious
from headstart.eval.result import Result
from headstart.eval.standing import (
    ALL,
    HALF,
    LOOKUP,
    behind_on,
    lookup_speeds,
    no_head_faster,
    standing,
)

HEADLINES = 3
NO_HEAD = "no head beats prompt lookup"


def headlines(setting: Setting) -> list[str]:
    """Return the fastest rows of one setting as Markdown sentences that name it."""
    lookups, rows = lookup_speeds(setting.rows), by_speed(setting.rows)[:HEADLINES]
    found = [f"{setting.label}: {_headline(name, result, lookups)}" for name, result in rows]
    if no_head_faster(setting.rows, lookups):
        found.insert(0, f"{setting.label}: **{NO_HEAD}**.")
    return found


def _headline(name: str, result: Result, lookups: Mapping[str, float]) -> str:
    speed, interval = result.figures[SPEED], result.intervals.get(SPEED)
    parts = [f"**{name}** ({result.drafter.tree})"]
    if speed is None:
        parts.append("speed not measured;")
    else:
        parts.append(f"decodes {with_interval(speed, interval, 'x')} as fast as the target alone,")
    over = _over(result, lookups)
    if over:
        parts.append(f"{over},")
    tau = with_interval(result.figures[TAU], result.intervals.get(TAU))
    parts.append(f"at {tau} tokens per round over {result.counts.prompts} prompts")
    parts += [f"(**{words}**)" for words in serious(result)]
    parts += [f"({remark})" for remark in _remarks(result, lookups)]
    return " ".join(parts) + "."


def card(setting: Setting, anchor: str) -> Card:
    """Return the fastest row of one setting in a few large words."""
    lookups = lookup_speeds(setting.rows)
    name, result = by_speed(setting.rows)[0]
    speed, interval = result.figures[SPEED], result.intervals.get(SPEED)
    told = [name, f"{number(result.figures[TAU])} tokens per round"]
    told += [f"{result.counts.prompts} prompts", _over(result, lookups)]
    remarks = [NO_HEAD] if no_head_faster(setting.rows, lookups) else []
    return Card(
        setting.label,
        "-" if speed is None else f"{speed:.2f}x",
        "" if interval is None else f"95 % interval {interval[0]:.2f} to {interval[1]:.2f}",
        ", ".join(filter(None, told)),
        [*remarks, *serious(result), *_remarks(result, lookups)],
        anchor,
    )


def _over(result: Result, lookups: Mapping[str, float]) -> str:
    """Say how fast a row is beside prompt lookup; nothing of lookup itself."""
    speed = result.figures[SPEED]
    if speed is None or ALL not in lookups or result.drafter.family == LOOKUP:
        return ""
    return f"{speed / lookups[ALL]:.2f} times prompt lookup"


def _remarks(result: Result, lookups: Mapping[str, float]) -> list[str]:
    """Say what makes a figure worth less than it looks."""
    speed, interval = result.figures[SPEED], result.intervals.get(SPEED)
    remarks = []
    if speed is not None and interval is not None and interval[0] <= 1 <= interval[1]:
        remarks.append("no speedup is shown: the interval contains 1")
    against = {
        "behind": "no faster than prompt lookup",
        "partly": f"no faster than prompt lookup on {', '.join(behind_on(result, lookups))}",
        "unclear": "not clearly faster than prompt lookup",
    }
    found = against.get(standing(result, lookups))
    if found:
        remarks.append(found)
    if result.counts.prompts < FEW_PROMPTS:
        remarks.append(f"fewer than {FEW_PROMPTS} prompts: a rough interval")
    return remarks


def verdict(settings: Sequence[Setting]) -> str:
    """Say in a sentence whether greedy outputs in full precision equal those of plain decoding."""
    rows = [row for setting in settings for row in setting.rows if _gated(row[1])]
    if not rows:
        return (
            "Equality with plain decoding was not put to the test here: that takes greedy rows in "
            "full precision (target.dtype=float32)."
        )
    dtypes = ", ".join(sorted({result.provenance.dtype for _, result in rows}))
    same = [result for _, result in rows if result.equality.fraction_identical == 1]
    told = (
        f"{dtypes}: {len(same)} of {len(rows)} rows identical to plain decoding on all "
        f"{_prompts(rows)} prompts"
    )
    other = [name for name, result in rows if result.equality.fraction_identical < 1]
    return told + (f"; NOT identical: {', '.join(other)}." if other else ".")


def _gated(result: Result) -> bool:
    full = result.provenance.dtype not in HALF
    return full and result.drafter.lossless and result.equality is not None


def _prompts(rows: Sequence[Named]) -> str:
    counts = sorted({result.counts.prompts for _, result in rows})
    return " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
