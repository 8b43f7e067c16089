"""The leaderboard: which results may be compared, and in which order they stand.

Rows are ranked by decode speedup and never by an acceptance rate, which falls with the length of a
draft by arithmetic alone. They are ranked only within one setting (target, machine, prompts,
sampling), and a lossy row holds no rank. A head that is no faster than prompt lookup is told so.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headstart.eval.intervals import Interval
from headstart.eval.metrics import DEFINITIONS, Value
from headstart.eval.result import Result

Named = tuple[str, Result]
"""A result with the name that its rows carry."""

SPEED = "speedup_ratio_of_sums_decode"
TAU = "tau_with_bonus_micro"
LOOKUP = "lookup"
"""Family that drafts what followed the same words in the prompt: what a head must beat."""
ALL = ""
"""Stands for the prompts of all suites together."""
COLUMNS = {
    "rank": "place by decode speedup among the lossless rows of one setting",
    "drafter": "what drafted; plain is the target alone, through the same loop",
    "decode speedup": f"{SPEED}: {DEFINITIONS[SPEED]}; 95 % interval over prompts",
    "over lookup": "decode speedup over that of the fastest prompt lookup on the same prompts; "
    "BELOW: no head is needed for as much; unclear: the row's interval reaches lookup's speed; "
    "with suites named, BELOW there",
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
}


def print_leaderboard(results: Sequence[Result]) -> None:
    """Print the leaderboard; a log file has no width of its own, the table needs about 200."""
    Console(width=None if sys.stdout.isatty() else 200).print(leaderboard_table(results))


def leaderboard_table(results: Sequence[Result]) -> Table:
    """Return the leaderboard for a terminal, one section a setting, ranked like the report."""
    table = Table(title="Leaderboard: decode speedup over the target alone, 95 % interval")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("drafter", "tree") else "right")
    for group in by_setting(name_results(results)).values():
        for row in leaderboard_rows(group):
            table.add_row(*map(escape, row))
        table.add_section()
    return table


def name_results(results: Sequence[Result]) -> list[Named]:
    """Pair each result with its drafter's name, numbered where one setting has it several times."""
    keys = [(_setting(r), r.drafter.name) for r in results]
    unique = [
        f"{name} #{keys[: i + 1].count((setting, name))}"
        if keys.count((setting, name)) > 1
        else name
        for i, (setting, name) in enumerate(keys)
    ]
    return list(zip(unique, results, strict=True))


def by_setting(named: Sequence[Named]) -> dict[str, list[Named]]:
    """Group results that may be compared: same target, machine, prompts, sampling and limits."""
    groups: dict[str, list[Named]] = {}
    for name, result in named:
        groups.setdefault(_setting(result), []).append((name, result))
    return groups


def setting_labels(groups: Sequence[Sequence[Named]]) -> list[str]:
    """Name each setting by its prompts, its temperature and whatever else tells it apart."""
    parts = [_parts(group[0][1]) for group in groups]
    told = {key for key in parts[0] if key in _ALWAYS or len({part[key] for part in parts}) > 1}
    return [", ".join(part[key] for key in part if key in told) for part in parts]


_ALWAYS = ("prompts", "temperature")


def _setting(result: Result) -> str:
    p = _parts(result)
    return (
        f"{p['target']} on {p['device']}, {p['threads']}, {p['dtype']}, {p['runtime']}, "
        f"{p['batch']}; prompts "
        f"{p['prompts']} ({p['suite']}), {p['template']}; {p['temperature']}, {p['top_p']}, "
        f"{p['top_k']}, {p['limit']}, {p['eos_policy']}"
    )


def _parts(result: Result) -> dict[str, str]:
    """Return what must agree between results that are compared, the prompts first."""
    p, s, made = result.provenance, result.sampling, result.compilation
    return {
        "prompts": p.prompt_suite,
        "temperature": f"temperature {s.temperature:g}",
        "target": f"{p.target} (fingerprint {p.target_fingerprint[:8]})",
        "device": p.device,
        "threads": f"{p.threads} threads",
        "dtype": p.dtype,
        "runtime": f"runtime {'eager' if made is None else 'compiled ' + '+'.join(made.parts)}",
        "batch": f"batch {s.batch}",
        "suite": p.prompt_suite_hash[:8],
        "template": f"template {p.template_hash[:8]}",
        "top_p": f"top_p {s.top_p:g}",
        "top_k": f"top_k {s.top_k}",
        "limit": f"at most {s.max_new_tokens} new tokens",
        "eos_policy": f"eos_policy {s.eos_policy}",
    }


def by_speed(named: Sequence[Named]) -> list[Named]:
    """Sort by decode speedup, fastest first: lossless, then unmeasured, then lossy results."""

    def key(row: Named) -> tuple[bool, bool, float]:
        speed = row[1].figures[SPEED]
        return (not row[1].drafter.lossless, speed is None, -(speed or 0.0))

    return sorted(named, key=key)


@dataclass(frozen=True)
class Row:
    """One row of a leaderboard: a drafter, or plain decoding where `result` is null."""

    kind: str
    """'ranked', 'plain', 'unranked' (no plain arm to compare with) or 'lossy'."""
    cells: list[str]
    """Under COLUMNS."""
    result: Result | None = None
    standing: str = ""
    """Against prompt lookup on the same prompts, as `standing` says."""


def leaderboard(group: Sequence[Named]) -> list[Row]:
    """Return the rows of one setting: ranked ones with plain at its place, unranked, then lossy."""
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


def lookup_speeds(group: Sequence[Named]) -> dict[str, float]:
    """Return the decode speedup of the fastest lossless prompt lookup: on ALL, and by suite.

    Empty where none was run.
    """
    found: dict[str, float] = {}
    for _, result in group:
        if result.drafter.family == LOOKUP and result.drafter.lossless:
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
    'ahead' when its whole interval lies above lookup's speedup, 'unclear' when only its value does.
    """
    own = speeds(result)
    if result.drafter.family == LOOKUP or ALL not in own or ALL not in lookups:
        return ""
    if own[ALL] <= lookups[ALL]:
        return "behind"
    if behind_on(result, lookups):
        return "partly"
    interval = result.intervals.get(SPEED)
    return "ahead" if interval is not None and interval[0] > lookups[ALL] else "unclear"


def behind_on(result: Result, lookups: Mapping[str, float]) -> list[str]:
    """Return the suites on which a drafter is no faster than prompt lookup."""
    own = speeds(result)
    return [suite for suite in own if suite in lookups and suite and own[suite] <= lookups[suite]]


def draft_cost(result: Result) -> float | None:
    """Return the time of a round outside the target's pass, in plain steps; None if untimed."""
    figures = result.figures
    plain = figures["ms_plain_per_token"]
    parts = [figures["ms_draft_per_round"], figures["ms_commit_per_round"]]
    return sum(parts) / plain if plain and None not in parts else None


def _row(name: str, result: Result, lookups: Mapping[str, float]) -> Row:
    f, intervals, equality = result.figures, result.intervals, result.equality
    kind = "ranked" if f[SPEED] is not None else "unranked"
    kind = kind if result.drafter.lossless else "lossy"
    cells = [
        {"ranked": "", "unranked": "-", "lossy": "lossy"}[kind],
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
    figures = ["1.00", over, "1.00", "0.00", speed, "-", "-", "-", "1.00", "1.00", "0"]
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
