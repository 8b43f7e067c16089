"""The kinds of plot that reports use: bars, stacked bars, lines and points.

Each returns what stands inside a plot and its height; a title of HEAD units goes above it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headstart.eval.report_svg import (
    HEAD,
    LETTER,
    WIDTH,
    Scale,
    colour,
    cut,
    legend,
    line,
    marker,
    number,
    tag,
    text,
    tooltip,
    x_axis,
    y_axis,
)

Pair = tuple[float, float]
Drawn = tuple[str, float]
"""SVG elements and the height that they and the title need."""
LABELS = 168
"""Most units that the labels left of bars may take."""
BAR = 14
STEP = 22
DOT = 5.5
PLOT = 210
"""Height of the field of a plot with two axes."""
MARK = 14
"""Height of the name of a vertical line."""


@dataclass(frozen=True)
class Bar:
    """One bar.

    `style` is 's' and a number for a series, or 'plain', 'lossy', 'behind' or 'partly'.
    """

    label: str
    value: float | None
    interval: Pair | None = None
    style: str = "s0"


@dataclass(frozen=True)
class Series:
    """One line; null where it has no value."""

    name: str
    values: Sequence[float | None]
    intervals: Sequence[Pair | None] = ()


@dataclass(frozen=True)
class Point:
    """One point, with a short label beside it and a long one under the pointer."""

    x: float
    y: float
    label: str
    words: str
    style: str = "s0"


def bars(
    groups: Sequence[tuple[str, Sequence[Bar]]],
    *,
    x_name: str,
    unit: str = "",
    marks: Sequence[tuple[str, float]] = (),
) -> Drawn:
    """Draw groups of horizontal bars from 0, with intervals; `marks` are named vertical lines."""
    left = _label_width([bar.label for _, group in groups for bar in group])
    ends = [v for _, group in groups for b in group for v in (b.value, *(b.interval or ())) if v]
    high = max([*ends, *(value for _, value in marks)], default=1.0) * 1.04
    scale, top = Scale(0, high, left, WIDTH - 44), HEAD + MARK * len(marks)
    parts, y = [], top
    for heading, group in groups:
        if heading:
            parts.append(text(cut(heading, WIDTH), 0, y + 13, "heading"))
            y += STEP
        for bar in group:
            parts.append(_bar(bar, scale, left, y, unit))
            y += STEP
        y += 6
    return "".join(_field(scale, top, y, x_name, unit, marks) + parts), y + 40


def _field(
    scale: Scale,
    top: float,
    bottom: float,
    x_name: str,
    unit: str,
    marks: Sequence[tuple[str, float]],
) -> list[str]:
    """Draw the axis and the marks, each named on a line of its own, to the right where it fits."""
    parts = [x_axis(scale, top, bottom, x_name, unit)]
    for place, (name, value) in enumerate(marks):
        x, y = scale(value), top - 6 - MARK * (len(marks) - 1 - place)
        fits = x + 4 + LETTER * len(name) <= WIDTH
        parts.append(line([(x, y + 2), (x, bottom)], f"mark{place}"))
        parts.append(text(name, x + 4 if fits else x - 4, y, "tick", "start" if fits else "end"))
    return parts


def _bar(bar: Bar, scale: Scale, left: float, y: float, unit: str) -> str:
    name = text(cut(bar.label, left - 8), left - 8, y + 12, "label", "end")
    if bar.value is None:
        return name + text("not measured", left + 4, y + 12, "tick")
    end, shown = scale(bar.value), f"{bar.value:.2f}{unit}"
    parts = [tag("rect", x=left, y=y + 1, width=max(end - left, 1), height=BAR, class_=bar.style)]
    if bar.interval:
        low, high = (scale(v) for v in bar.interval)
        middle = y + 1 + BAR / 2
        ends = [[(x, middle - 4), (x, middle + 4)] for x in (low, high)]
        parts += [line(points, "whisker") for points in ([(low, middle), (high, middle)], *ends)]
        end, words = max(end, high), f"{shown} [{bar.interval[0]:.2f}, {bar.interval[1]:.2f}]"
    else:
        words = shown
    parts.append(text(shown, end + 5, y + 12, "value"))
    return tooltip(f"{bar.label}: {words}", name, *parts)


def stacked(
    rows: Sequence[tuple[str, Sequence[float]]],
    parts_named: Sequence[str],
    *,
    x_name: str,
    unit: str = "",
    ramp: bool = False,
) -> Drawn:
    """Draw one bar a row, its parts one behind another; a ramp shades them in order."""
    left = _label_width([name for name, _ in rows])
    high = max((sum(values) for _, values in rows), default=0.0) or 1.0
    scale = Scale(0, high, left, WIDTH - 14)
    styles = [_part_style(i, len(parts_named), ramp) for i in range(len(parts_named))]
    drawn, y = [], float(HEAD)
    for name, values in rows:
        drawn.append(text(cut(name, left - 8), left - 8, y + 12, "label", "end"))
        start = 0.0
        for value, part, style in zip(values, parts_named, styles, strict=False):
            x, width = scale(start), scale(start + value) - scale(start)
            box = tag("rect", x=x, y=y, width=width, height=BAR + 3, **style)
            shown = f"{value:.3g}{unit}"
            inside = text(f"{value:.0f}", x + width / 2, y + 12.5, "inside", "middle")
            fits = width > LETTER * len(f"{value:.0f}") + 4
            drawn.append(tooltip(f"{name}, {part}: {shown}", box, inside if fits else ""))
            start += value
        y += STEP
    field = x_axis(scale, HEAD, y + 4, x_name, unit)
    items = [
        (tag("rect", x=-6, y=-6, width=12, height=12, **s), p)
        for s, p in zip(styles, parts_named, strict=True)
    ]
    shown, bottom = legend(items, y + 48)
    return field + "".join(drawn) + shown, bottom


def _part_style(index: int, count: int, ramp: bool) -> dict[str, str]:
    if not ramp:
        return {"class_": f"s{index}"}
    if index == 0:
        return {"class_": "none"}
    share = 0.25 + 0.75 * (index - 1) / max(count - 2, 1)
    return {"class_": "s0", "fill_opacity": f"{share:.2f}"}


def lines(
    series: Sequence[Series],
    labels: Sequence[str],
    *,
    x_name: str,
    y_name: str,
    y_range: Pair | None = None,
    marks: Sequence[float] = (),
) -> Drawn:
    """Draw lines over named places of the x axis; a null leaves a gap."""
    top, bottom = HEAD + 26, HEAD + 26 + PLOT
    y = Scale(*(y_range or _range(series, marks)), bottom, top)
    left = 44.0
    x = Scale(0, max(len(labels) - 1, 1), left + 16, WIDTH - 20)
    parts = [y_axis(y, left, WIDTH, y_name)]
    parts += [line([(left, y(value)), (WIDTH, y(value))], "mark0") for value in marks]
    step = max(1, -(-len(labels) * 44 // WIDTH))
    for place, label in list(enumerate(labels))[::step]:
        parts.append(text(label, x(place), bottom + 16, "tick", "middle"))
    parts.append(text(x_name, (left + WIDTH) / 2, bottom + 34, "axis", "middle"))
    parts += [_series(i, one, labels, x, y) for i, one in enumerate(series)]
    items = [(marker(i, 0, 0), one.name) for i, one in enumerate(series)]
    shown, end = legend(items, bottom + 44)
    return "".join(parts) + shown, end


def _series(index: int, series: Series, labels: Sequence[str], x: Scale, y: Scale) -> str:
    points = [(i, v) for i, v in enumerate(series.values) if v is not None]
    parts = []
    for i, pair in enumerate(series.intervals):
        if pair is not None:
            parts.append(line([(x(i), y(v)) for v in pair], f"whisker line{colour(index)}"))
    for (i, v), (j, w) in zip(points, points[1:], strict=False):
        if j == i + 1:
            parts.append(line([(x(i), y(v)), (x(j), y(w))], f"line{colour(index)}"))
    for i, v in points:
        words = f"{series.name}, {labels[i]}: {v:.2f}"
        parts.append(tooltip(words, marker(index, x(i), y(v))))
    return "".join(parts)


def scatter(
    points: Sequence[Point],
    *,
    x_name: str,
    y_name: str,
    front: Sequence[Pair] = (),
    diagonal: float | None = None,
) -> Drawn:
    """Draw labelled points; `front` is joined in steps, `diagonal` is a band's relative width."""
    top, bottom, left = HEAD + 26, HEAD + 26 + PLOT + 40, 44.0
    if diagonal is None:
        x_range, y_range = _spread([p.x for p in points], 0.0), _spread([p.y for p in points])
    else:
        x_range = y_range = _spread([v for p in points for v in (p.x, p.y)])
    x, y = Scale(*x_range, left, WIDTH - 8), Scale(*y_range, bottom, top)
    parts = [y_axis(y, left, WIDTH - 8, y_name), x_axis(x, top, bottom, x_name)]
    if diagonal is not None:
        parts.append(_band(x, y, diagonal))
    if front:
        parts.append(line([(x(a), y(b)) for a, b in _steps(front)], "front"))
    spots = [(x(p.x), y(p.y)) for p in points]
    for p, spot, place in zip(points, spots, _beside(spots), strict=True):
        dot = tag("circle", cx=spot[0], cy=spot[1], r=DOT, class_=f"dot {p.style}")
        name = text(p.label, place[0], place[1] + 4, "value", "middle")
        parts.append(tooltip(p.words, line([spot, place], "leader"), dot, name))
    return "".join(parts), bottom + 42


def _beside(spots: Sequence[Pair]) -> list[Pair]:
    """Place a label beside each point, as near as the other points and labels leave room."""
    taken = list(spots)
    places = []
    for x, y in spots:
        tries = [
            (x + reach * math.cos(turn), y - reach * math.sin(turn))
            for reach in (13, 20, 28, 38)
            for turn in (math.pi * (3 + 2 * eighth) / 8 for eighth in (0, 7, 2, 5, 1, 3, 4, 6))
        ]
        free = (
            p
            for p in tries
            if all(abs(p[0] - a) > 15 or abs(p[1] - b) > 12 for a, b in taken if (a, b) != (x, y))
        )
        places.append(next(free, tries[0]))
        taken.append(places[-1])
    return places


def _band(x: Scale, y: Scale, width: float) -> str:
    low, high = x.low, x.high
    corners = [(low, low * (1 + width)), (high, high * (1 + width))]
    corners += [(high, high * (1 - width)), (low, low * (1 - width))]
    inside = [(x(a), min(max(y(b), y.end), y.start)) for a, b in corners]
    shape = " ".join(f"{number(a)},{number(b)}" for a, b in inside)
    return tag("polygon", points=shape, class_="band") + line(
        [(x(low), y(low)), (x(high), y(high))], "mark0"
    )


def _steps(front: Sequence[Pair]) -> list[Pair]:
    """Go level from one point to the next's x, then up to it."""
    path = [front[0]]
    for x, y in front[1:]:
        path += [(x, path[-1][1]), (x, y)]
    return path


def _range(series: Sequence[Series], marks: Sequence[float]) -> Pair:
    found = [v for s in series for v in s.values if v is not None]
    found += [v for s in series for pair in s.intervals if pair for v in pair]
    return _spread([*found, *marks], 0.0)


def _spread(values: Sequence[float], least: float | None = None) -> Pair:
    """Return a range around values with room at its ends, down to `least` where it is given."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return (low - room if least is None else least), high + room


def _label_width(labels: Sequence[str]) -> float:
    return min(LABELS, 10 + LETTER * max(map(len, labels), default=0))
