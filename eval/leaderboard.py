"""The leaderboard: in which order results that may be compared stand.

Rows are ranked by decode speedup and never by an acceptance rate, which falls with the length of a
draft by arithmetic alone. They are ranked only within one setting (target, machine, prompts,
sampling). A lossy row holds no rank, nor does one that is unequal to plain decoding in full
precision. A head that is no faster than prompt lookup is told so.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headstart.eval.compare import Named, Setting, settings_of
from headstart.eval.intervals import Interval
from headstart.eval.metrics import DEFINITIONS, SPEED, TAU, Value
from headstart.eval.result import Result
from headstart.eval.standing import ALL, behind_on, fault, lookup_speeds, standing

COLUMNS = {
    "rank": "place by decode speedup among the rows of one setting that are neither lossy nor "
    "unequal to plain decoding in full precision",
    "drafter": "what drafted; plain is the target alone, through the same loop",
    "decode speedup": f"{SPEED}: {DEFINITIONS[SPEED]}; 95 % interval over prompts",
    "over lookup": "decode speedup over that of the fastest prompt lookup on the same prompts; "
    "BELOW: no head is needed for as much; unclear: the interval of the difference (of separate "
    "runs, the row's own) reaches lookup's speed; with suites of 20 prompts or more named, BELOW "
    "there",
    "tau": f"{TAU}: {DEFINITIONS[TAU]}; 95 % interval over prompts",
    "draft cost": "milliseconds of a round outside the target's pass (draft and commit) over those "
    "of a plain step",
    "tokens/s": f"tokens_per_s_decode: {DEFINITIONS['tokens_per_s_decode']}",
    "identical": "share of greedy outputs that equal plain decoding token for token",
    "tree": "shape of the draft",
    "scheme": "rule by which drafted tokens are accepted",
    "e2e speedup": f"speedup_ratio_of_sums_e2e: {DEFINITIONS['speedup_ratio_of_sums_e2e']}",
    "tau, full rounds": f"tau_full_rounds: {DEFINITIONS['tau_full_rounds']}",
    "cut": f"cut_rounds: {DEFINITIONS['cut_rounds']}",
    "repeats": "times that every prompt was timed; the median counts",
}


def print_leaderboard(results: Sequence[Result]) -> None:
    """Print the leaderboards; a log file has no width of its own, a table needs about 220."""
    console = Console(width=None if sys.stdout.isatty() else 220)
    for setting in settings_of(results):
        console.print(leaderboard_table(setting))


def leaderboard_table(setting: Setting) -> Table:
    """Return the leaderboard of one setting for a terminal, ranked like the report."""
    title = f"{setting.label}: decode speedup over the target alone, 95 % interval"
    table = Table(title=escape(title), caption=escape(" ".join(setting.again)) or None)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("drafter", "tree") else "right")
    for row in leaderboard_rows(setting.rows):
        table.add_row(*map(escape, row))
    return table


def by_speed(named: Sequence[Named]) -> list[Named]:
    """Sort by decode speedup, fastest first: what may hold a rank, unmeasured, then the others."""

    def key(row: Named) -> tuple[bool, bool, float]:
        speed = row[1].figures[SPEED]
        return (fault(row[1]) != "", speed is None, -(speed or 0.0))

    return sorted(named, key=key)


@dataclass(frozen=True)
class Row:
    """One row of a leaderboard: a drafter, or plain decoding where `result` is null."""

    kind: str
    """'ranked', 'plain', 'unranked' (no plain arm to compare with), 'lossy' or 'unequal'."""
    cells: list[str]
    """Under COLUMNS."""
    result: Result | None = None
    standing: str = ""
    """Against prompt lookup on the same prompts, as `standing` says."""


def leaderboard(group: Sequence[Named]) -> list[Row]:
    """Return the rows of one setting: ranked ones with plain at its place, then all others."""
    lookups = lookup_speeds(group)
    rows = [_row(name, result, lookups) for name, result in by_speed(group)]
    ranked = [row for row in rows if row.kind == "ranked"]
    faster = [row for row in ranked if row.result.figures[SPEED] > 1]
    ranked[len(faster) : len(faster)] = _plain_rows(group, lookups)
    ranked = [replace(row, cells=[str(i), *row.cells[1:]]) for i, row in enumerate(ranked, 1)]
    return ranked + [row for row in rows if row.kind != "ranked"]


def leaderboard_rows(group: Sequence[Named]) -> list[list[str]]:
    """Return the cells of one setting under COLUMNS; plain decoding is ranked at speedup 1.00."""
    return [row.cells for row in leaderboard(group)]


def draft_cost(result: Result) -> float | None:
    """Return the time of a round outside the target's pass, in plain steps; None if untimed."""
    figures = result.figures
    plain = figures["ms_plain_per_token"]
    parts = [figures["ms_draft_per_round"], figures["ms_commit_per_round"]]
    return sum(parts) / plain if plain and None not in parts else None


def _row(name: str, result: Result, lookups: Mapping[str, float]) -> Row:
    f, intervals, equality = result.figures, result.intervals, result.equality
    kind = fault(result) or ("unranked" if f[SPEED] is None else "ranked")
    cells = [
        {"ranked": "", "unranked": "-"}.get(kind, kind),
        name,
        with_interval(f[SPEED], intervals.get(SPEED)),
        _over_lookup(result, lookups),
        with_interval(f[TAU], intervals.get(TAU)),
        number(draft_cost(result)),
        number(f["tokens_per_s_decode"], 1),
        "-" if equality is None else f"{100 * equality.fraction_identical:.1f} %",
        result.drafter.tree,
        result.drafter.verify_scheme,
        number(f["speedup_ratio_of_sums_e2e"]),
        number(f["tau_full_rounds"]),
        number(f["cut_rounds"], 0),
        str(result.repeats),
    ]
    return Row(kind, cells, result, standing(result, lookups))


def _over_lookup(result: Result, lookups: Mapping[str, float]) -> str:
    """Print a speedup over that of prompt lookup, and in words where it is not clearly more."""
    speed = result.figures[SPEED]
    if speed is None or ALL not in lookups:
        return "-"
    told = {
        "behind": " BELOW",
        "partly": f" BELOW on {', '.join(behind_on(result, lookups))}",
        "unclear": " unclear",
    }
    return number(speed / lookups[ALL]) + told.get(standing(result, lookups), "")


def _plain_rows(group: Sequence[Named], lookups: Mapping[str, float]) -> list[Row]:
    """Return the row of plain decoding, with the range of runs that were each timed against it."""
    speeds = sorted(plain_speeds(group))
    if not speeds:
        return []
    label = "plain" if len(speeds) == 1 else f"plain ({len(speeds)} runs)"
    speed = " to ".join(number(v, 1) for v in dict.fromkeys((speeds[0], speeds[-1])))
    over = number(1 / lookups[ALL]) if ALL in lookups else "-"
    figures = ["1.00", over, "1.00", "0.00", speed, "-", "-", "-", "1.00", "1.00", "0", "-"]
    return [Row("plain", ["", label, *figures])]


def plain_speeds(group: Sequence[Named]) -> set[float]:
    """Return the distinct speeds of plain decoding, in tokens/s: one a run."""
    speeds = {result.figures["tokens_per_s_plain_decode"] for _, result in group}
    return {round(speed, 1) for speed in speeds if speed is not None}


def number(value: Value, digits: int = 2) -> str:
    """Print a figure, '-' where it is null."""
    if value is None:
        return "-"
    return f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0: never print -0.00


def with_interval(value: Value, interval: Interval, unit: str = "") -> str:
    """Print a figure with its interval where there is one."""
    if value is None:
        return "-"
    bounds = "" if interval is None else f" [{interval[0]:.2f}, {interval[1]:.2f}]"
    return f"{value:.2f}{unit}{bounds}"
