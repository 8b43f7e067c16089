"""The leaderboard: which results may be compared, and in which order they stand.

Rows are ranked by decode speedup and never by an acceptance rate, which falls with the length of a
draft by arithmetic alone. They are ranked only within one setting (target, machine, prompts,
sampling), and a lossy row holds no rank.
"""

import sys
from collections.abc import Sequence

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
COLUMNS = {
    "rank": "place by decode speedup among the lossless rows of one setting",
    "drafter": "what drafted; plain is the target alone, through the same loop",
    "tree": "shape of the draft",
    "scheme": "rule by which drafted tokens are accepted",
    "decode speedup": f"{SPEED}: {DEFINITIONS[SPEED]}; 95 % interval over prompts",
    "e2e speedup": f"speedup_ratio_of_sums_e2e: {DEFINITIONS['speedup_ratio_of_sums_e2e']}",
    "tau": f"{TAU}: {DEFINITIONS[TAU]}; 95 % interval over prompts",
    "tau, full rounds": f"tau_full_rounds: {DEFINITIONS['tau_full_rounds']}",
    "cut": f"cut_rounds: {DEFINITIONS['cut_rounds']}",
    "tokens/s": f"tokens_per_s_decode: {DEFINITIONS['tokens_per_s_decode']}",
    "identical": "share of greedy outputs that equal plain decoding token for token",
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
    """Pair each result with its drafter's name, numbered where several carry the same one."""
    names = [r.drafter.name for r in results]
    unique = [
        f"{name} #{names[: i + 1].count(name)}" if names.count(name) > 1 else name
        for i, name in enumerate(names)
    ]
    return list(zip(unique, results, strict=True))


def by_setting(named: Sequence[Named]) -> dict[str, list[Named]]:
    """Group results that may be compared: same target, machine, prompts, sampling and limits."""
    groups: dict[str, list[Named]] = {}
    for name, result in named:
        groups.setdefault(_setting(result), []).append((name, result))
    return groups


def _setting(result: Result) -> str:
    p, s = result.provenance, result.sampling
    return (
        f"{p.target} (fingerprint {p.target_fingerprint[:8]}) on {p.device}, {p.threads} threads, "
        f"{p.dtype}, batch {s.batch}; prompts {p.prompt_suite} ({p.prompt_suite_hash[:8]}), "
        f"template {p.template_hash[:8]}; temperature {s.temperature:g}, top_p {s.top_p:g}, "
        f"top_k {s.top_k}, at most {s.max_new_tokens} new tokens, eos_policy {s.eos_policy}"
    )


def by_speed(named: Sequence[Named]) -> list[Named]:
    """Sort by decode speedup, fastest first: lossless, then unmeasured, then lossy results."""

    def key(row: Named) -> tuple[bool, bool, float]:
        speed = row[1].figures[SPEED]
        return (not row[1].drafter.lossless, speed is None, -(speed or 0.0))

    return sorted(named, key=key)


def leaderboard_rows(group: Sequence[Named]) -> list[list[str]]:
    """Return the cells of one setting under COLUMNS; plain decoding is ranked at speedup 1.00."""
    ordered = by_speed(group)
    ranked = [r for r in ordered if r[1].drafter.lossless and r[1].figures[SPEED] is not None]
    faster = [_cells(name, r) for name, r in ranked if r.figures[SPEED] > 1]
    slower = [_cells(name, r) for name, r in ranked if r.figures[SPEED] <= 1]
    rows = [*faster, *_plain_cells(group), *slower]
    rows = [[str(rank), *cells] for rank, cells in enumerate(rows, 1)]
    unranked = [(name, r) for name, r in ordered[len(ranked) :]]
    return rows + [["-" if r.drafter.lossless else "lossy", *_cells(n, r)] for n, r in unranked]


def _cells(name: str, result: Result) -> list[str]:
    f, intervals, equality = result.figures, result.intervals, result.equality
    return [
        name,
        result.drafter.tree,
        result.drafter.verify_scheme,
        with_interval(f[SPEED], intervals.get(SPEED)),
        number(f["speedup_ratio_of_sums_e2e"]),
        with_interval(f[TAU], intervals.get(TAU)),
        number(f["tau_full_rounds"]),
        number(f["cut_rounds"], 0),
        number(f["tokens_per_s_decode"], 1),
        "-" if equality is None else f"{100 * equality.fraction_identical:.1f} %",
    ]


def _plain_cells(group: Sequence[Named]) -> list[list[str]]:
    """One plain row a distinct baseline: runs made apart were each timed against their own."""
    plain: dict[str, str] = {}
    for name, result in group:
        speed = result.figures["tokens_per_s_plain_decode"]
        if speed is not None:
            plain.setdefault(number(speed, 1), name)
    return [
        ["plain" if len(plain) == 1 else f"plain (run of {name})", "-", "-"]
        + ["1.00", "1.00", "1.00", "1.00", "0", speed, "-"]
        for speed, name in plain.items()
    ]


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
