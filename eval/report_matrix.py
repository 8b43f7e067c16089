"""A table of decode speedups: drafters by groups of prompts, or by settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.eval.checks import FEW_PROMPTS
from headstart.eval.compare import Named, Setting
from headstart.eval.leaderboard import number
from headstart.eval.metrics import SPEED
from headstart.eval.report_parts import Table
from headstart.eval.result import Category, Result
from headstart.eval.standing import ALL, LOOKUP, fault, lookup_speeds


@dataclass(frozen=True)
class Column:
    """The decode speedups on one group of prompts."""

    label: str
    prompts: int
    speeds: dict[str, float | None]
    """By the name of the row."""
    lookup: float | None
    """That of the fastest lossless prompt lookup."""


@dataclass(frozen=True)
class _Line:
    name: str
    fault: str
    is_lookup: bool
    speeds: list[float | None]

    @property
    def order(self) -> tuple[bool, int, float]:
        """Rows that may hold a rank first; then the most known values, then the fastest."""
        known = [v for v in self.speeds if v is not None]
        return self.fault != "", -len(known), -sum(known) / max(len(known), 1)


def columns_of_settings(settings: Sequence[Setting]) -> list[Column]:
    """Return a column a setting."""
    return [
        Column(
            setting.label,
            max(result.counts.prompts for _, result in setting.rows),
            {name: result.figures[SPEED] for name, result in setting.rows},
            lookup_speeds(setting.rows).get(ALL),
        )
        for setting in settings
    ]


def columns_of_prompts(
    group: Sequence[Named], of: Callable[[Result], dict[str, Category]]
) -> list[Column]:
    """Return a column for each group of prompts that `of` takes from a result."""
    columns = []
    for label in dict.fromkeys(label for _, result in group for label in of(result)):
        parts = {name: of(result)[label] for name, result in group if label in of(result)}
        speeds = {name: part.figures[SPEED] for name, part in parts.items()}
        rivals = [
            speeds[name]
            for name, result in group
            if result.drafter.family == LOOKUP and not fault(result) and name in speeds
        ]
        lookup = max((v for v in rivals if v is not None), default=None)
        prompts = max(part.counts.prompts for part in parts.values())
        columns.append(Column(label, prompts, speeds, lookup))
    return columns


def matrix(columns: Sequence[Column], rows: Sequence[Named], what: str) -> Table:
    """Lay decode speedups out by drafter and column, best first; `rows` are all the results."""
    lines = sorted(_lines(columns, rows), key=lambda line: line.order)
    shown = [v for line in lines if not line.fault for v in line.speeds if v is not None]
    top = max([1.5, *shown])
    return Table(
        ["drafter", *(f"{column.label} (n={column.prompts})" for column in columns)],
        [[_name(line), *(_against(line, i, c) for i, c in enumerate(columns))] for line in lines],
        _caption(columns, what),
        kinds=[line.fault for line in lines],
        shades=[
            [None if v is None or line.fault else max(v - 1, 0) / (top - 1) for v in line.speeds]
            for line in lines
        ],
        sortable=True,
    )


def _lines(columns: Sequence[Column], rows: Sequence[Named]) -> list[_Line]:
    named: dict[str, list[Result]] = {}
    for name, result in rows:
        named.setdefault(name, []).append(result)
    return [
        _Line(
            name,
            next(filter(None, map(fault, results)), ""),
            results[0].drafter.family == LOOKUP,
            [column.speeds.get(name) for column in columns],
        )
        for name, results in named.items()
    ]


def _name(line: _Line) -> str:
    return f"{line.name} ({line.fault})" if line.fault else line.name


def _against(line: _Line, place: int, column: Column) -> str:
    speed, lookup = line.speeds[place], column.lookup
    told = column.prompts >= FEW_PROMPTS and not line.is_lookup
    below = told and speed is not None and lookup is not None and speed <= lookup
    return number(speed) + (" BELOW" if below else "")


def _caption(columns: Sequence[Column], what: str) -> str:
    told = f"Decode speedup by {what}, of n prompts; darker is faster"
    if any(column.lookup is not None for column in columns):
        told += (
            f"; BELOW: no faster than prompt lookup there, told of {FEW_PROMPTS} prompts or more, "
            "fewer tell too little"
        )
    return told + "."
