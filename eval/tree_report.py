"""What `headstart tree` hands over: options for conf, a table, tree.json and a plot.

The difference told is measured over predicted decode speedup, minus 1; what it is made of, tokens a
round and seconds a round, stands beside it.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas
from rich.table import Table

from headstart.eval.intervals import Interval
from headstart.eval.leaderboard import SPEED, TAU, number, with_interval
from headstart.eval.result import Result
from headstart.eval.step_time import StepTimes
from headstart.eval.tree_search import Option
from headstart.files import write_text

TOLERANCE = 0.05
"""Difference between predicted and measured speedup that is told as a warning."""
STAGES = ("ms_draft_per_round", "ms_verify_per_round", "ms_commit_per_round")


@dataclass(frozen=True)
class Foretold:
    """One tree: what it promises, and what it then did on held-out prompts."""

    name: str
    option: Option
    result: Result | None = None
    """None before it is measured."""

    @property
    def speed(self) -> float | None:
        """Measured decode speedup; None where nothing was measured."""
        return self._figure(SPEED)

    @property
    def gap(self) -> float | None:
        """Measured over predicted decode speedup, minus 1; None where nothing was measured."""
        return None if self.speed is None else self.speed / self.option.speedup - 1

    @property
    def round_ms(self) -> float | None:
        """Measured milliseconds a round and prompt."""
        stages = [self._figure(name) for name in STAGES]
        return None if None in stages else sum(stages)

    @property
    def predicted_ms(self) -> float:
        """Predicted milliseconds a round and prompt."""
        return 1e3 * self.option.tau / self.option.tokens_per_s

    def _figure(self, name: str) -> float | None:
        return None if self.result is None else self.result.figures[name]

    def interval(self, name: str) -> Interval:
        """Return the 95 % interval of a measured figure."""
        return None if self.result is None else self.result.intervals.get(name)

    def speed_told(self) -> str:
        """Return the measured decode speedup with its interval; '-' where there is none."""
        return with_interval(self.speed, self.interval(SPEED))

    def measured(self) -> list[str]:
        """Tell what was measured, in one line; nothing before."""
        if self.result is None:
            return []
        return [
            f"Measured: {number(self._figure(TAU))} tokens a round, {self.speed_told()} times "
            f"plain decoding ({self.result.counts.prompts} prompts not searched on)."
        ]

    def figures(self) -> dict[str, Any]:
        """Return the row as tree.json holds it."""
        return {
            "name": self.name,
            "kind": self.option.kind,
            "nodes": self.option.nodes,
            "predicted_tau": self.option.tau,
            "measured_tau": self._figure(TAU),
            "predicted_ms_per_round": self.predicted_ms,
            "measured_ms_per_round": self.round_ms,
            "predicted_speedup": self.option.speedup,
            "measured_speedup": self.speed,
            "interval": self.interval(SPEED),
            "difference": self.gap,
        }

    def warnings(self) -> list[str]:
        """Tell a difference above the tolerance, and what it is made of."""
        if self.gap is None or abs(self.gap) <= TOLERANCE:
            return []
        return [
            f"{self.name}: decode speedup {self.speed:.2f} is {100 * self.gap:+.1f} % off "
            f"the {self.option.speedup:.2f} predicted: tau {self._figure(TAU):.2f} against "
            f"{self.option.tau:.2f}, a round {self.round_ms:.1f} ms against "
            f"{self.predicted_ms:.1f} ms"
        ]


def median_gap(rows: Sequence[Foretold]) -> float | None:
    """Return the median size of the differences; None where nothing was measured."""
    gaps = [abs(row.gap) for row in rows if row.gap is not None]
    return statistics.median(gaps) if gaps else None


def overtaken(chosen: Foretold, rows: Sequence[Foretold]) -> list[str]:
    """Tell of a row that measured faster than the tree that was chosen, which was by prediction."""
    rivals = [row for row in rows if row.speed is not None]
    fastest = max(rivals, key=lambda row: row.speed, default=chosen)
    if chosen.speed is None or fastest.speed <= chosen.speed:
        return []
    apart = _apart(chosen.interval(SPEED), fastest.interval(SPEED))
    cure = (
        f"the intervals do not overlap: draft with tree={fastest.name}"
        if apart
        else "the intervals overlap: measure more prompts (eval.num_prompts) to tell them apart"
    )
    return [
        f"{chosen.name} was chosen by its prediction and measured {chosen.speed_told()} times "
        f"plain decoding, but {fastest.name} measured {fastest.speed_told()}; {cure}"
    ]


def _apart(slower: Interval, faster: Interval) -> bool:
    return slower is not None and faster is not None and slower[1] < faster[0]


def table(rows: Sequence[Foretold], chosen: Option) -> Table:
    """Return the rows for a terminal, the chosen tree marked."""
    shown = Table(title="Draft trees: predicted, then measured on prompts not searched on")
    for column in ("tree", "kind", "nodes", "levels", "tau predicted", "tau measured"):
        shown.add_column(column, justify="left" if column in ("tree", "kind") else "right")
    for column in ("ms predicted", "ms measured", "speedup predicted", "speedup measured", "gap"):
        shown.add_column(column, justify="right")
    for row in rows:
        option, result = row.option, row.result
        shown.add_row(
            f"{row.name} *" if option == chosen else row.name,
            option.kind,
            str(option.nodes),
            str(option.levels),
            number(option.tau),
            number(None if result is None else result.figures[TAU]),
            number(row.predicted_ms, 1),
            number(row.round_ms, 1),
            number(option.speedup),
            row.speed_told(),
            "-" if row.gap is None else f"{100 * row.gap:+.1f} %",
        )
    return shown


def write_option(directory: Path, name: str, row: Foretold, origin: str) -> Path:
    """Write the shape as an option of the group `tree`: a copy in conf/tree makes tree=NAME."""
    option = row.option
    values = {k: v for k, v in asdict(option.tree(name)).items() if v is not None}
    del values["children"]
    lines = [
        f"# {origin}",
        f"# Predicted: {option.tau:.2f} tokens a round, {option.speedup:.2f} times plain decoding.",
        *(f"# {line}" for line in row.measured()),
        "defaults: [base_tree]",
        *(f"{key}: {value}" for key, value in values.items()),
    ]
    path = directory / f"{name}.yaml"
    write_text(path, "\n".join(lines) + "\n")
    return path


def plot(
    options: Sequence[Option],
    rows: Sequence[Foretold],
    presets: Mapping[str, Option],
    times: StepTimes,
    path: Path,
) -> Path:
    """Draw tokens a second over nodes: the best of each kind and size, presets, measured trees."""
    canvas = Canvas(figsize=(9, 5), layout="constrained")
    axes = canvas.subplots()
    for kind, colour in (("chain", "C0"), ("static", "C1"), ("dynamic", "C2")):
        fastest = fastest_by_nodes([option for option in options if option.kind == kind])
        if fastest:
            axes.plot(
                list(fastest), list(fastest.values()), ".-", color=colour, label=f"best {kind}"
            )
    plain = times.batch / times.plain
    axes.axhline(plain, color="0.5", linestyle="--", label="plain decoding")
    for name, option in presets.items():
        axes.plot(option.nodes, option.tokens_per_s, "k^", markersize=5)
        axes.annotate(name, (option.nodes, option.tokens_per_s), fontsize=7)
    done = [(row.option.nodes, row.gap, row.option.tokens_per_s) for row in rows]
    points = [(nodes, speed * (1 + gap)) for nodes, gap, speed in done if gap is not None]
    if points:
        axes.plot(*zip(*points, strict=True), "rx", label="measured speedup x plain line")
    axes.set_xlabel("nodes verified a round, the root included")
    axes.set_ylabel("tokens a second")
    axes.set_title("Predicted decoding speed by draft tree (triangles: presets)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    canvas.savefig(path, dpi=150)
    return path


def fastest_by_nodes(options: Sequence[Option]) -> dict[int, float]:
    """Return the best tokens a second of each number of nodes, ascending."""
    found: dict[int, float] = {}
    for option in options:
        found[option.nodes] = max(option.tokens_per_s, found.get(option.nodes, 0.0))
    return dict(sorted(found.items()))
