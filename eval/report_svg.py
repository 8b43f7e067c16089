"""The parts of a plot as SVG text: tags, scales, axes, markers, legends. Colours are CSS classes.

Plots are drawn at WIDTH units and shown at that many pixels or a little less, on a phone to be
scrolled; templates/plots.css has the colours for light and dark surroundings. Series differ by the
shape of their marker too, not by colour alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 460
LETTER = 7.1
"""Width of a letter of the system's font at the size of labels; labels are cut by it."""
COLOURS = 8
HEAD = 40
"""Height that the title takes."""
LEAST = 10 / 11
"""Smallest share of its size at which a plot is shown: ticks of 11 pixels stay 10 high."""
MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.6 -3.6h7.2v7.2h-7.2z",
    "M0 -4.8L4.6 3.4H-4.6z",
    "M0 -5L5 0L0 5L-5 0z",
    "M-4.6 -3.4H4.6L0 4.8z",
    "M-1.4 -4.6h2.8v3.2h3.2v2.8h-3.2v3.2h-2.8v-3.2h-3.2v-2.8h3.2z",
)


@dataclass(frozen=True)
class Figure:
    """One plot: where it may be shown and what it says to those who cannot see it."""

    slug: str
    """Name of its file and of its anchor."""
    title: str
    caption: str
    """What is drawn, and how to read it."""
    summary: str
    """The values, in words."""
    width: float
    height: float
    body: str
    """SVG elements inside width x height."""

    def svg(self, style: str = "") -> str:
        """Return the whole element, with `style` inside it where it stands alone in a file."""
        label = f"{self.title}. {self.summary}"
        return tag(
            "svg",
            f"<style>{style}</style>" if style else "",
            text(self.title, 0, 18, "title"),
            self.body,
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {number(self.width)} {number(self.height)}",
            width=self.width,
            height=self.height,
            style=f"min-width: {math.ceil(self.width * LEAST)}px",
            role="img",
            aria_label=label,
            class_="plot",
        )


@dataclass(frozen=True)
class Scale:
    """Maps values from low..high to units from start..end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, count: int = 5) -> list[float]:
        """Return round values inside the scale, about `count` of them."""
        rough = (self.high - self.low) / count
        power = 10 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= 0.999 * rough)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [i * step for i in range(first, last + 1)]


def tag(name: str, *children: str, **attributes: object) -> str:
    """Return one element; a trailing _ and inner _ of attribute names become nothing and -."""
    shown = "".join(
        f' {key if key == "viewBox" else key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{shown}>{''.join(children)}</{name}>"


def _value(value: object) -> str:
    return number(value) if isinstance(value, int | float) else escape(str(value))


def number(value: float) -> str:
    """Print a coordinate to a tenth of a unit."""
    return f"{round(value, 1) + 0.0:.1f}".rstrip("0").rstrip(".")


def short(value: float) -> str:
    """Print a tick of an axis."""
    return f"{value + 0.0:.4g}"


def text(words: str, x: float, y: float, class_: str = "", anchor: str = "start") -> str:
    """Return a line of text."""
    return tag("text", escape(words), x=x, y=y, class_=class_, text_anchor=anchor)


def cut(words: str, width: float) -> str:
    """Cut the middle out of a label that is wider than `width`."""
    room = int(width / LETTER)
    if len(words) <= room:
        return words
    return f"{words[: room - room // 2 - 1]}\u2026{words[-(room // 2) :]}"


def marker(series: int, x: float, y: float) -> str:
    """Return the mark of one point of a series."""
    place = f"translate({number(x)} {number(y)})"
    return tag(
        "path", d=MARKERS[series % len(MARKERS)], transform=place, class_=f"fill{colour(series)}"
    )


def colour(series: int) -> int:
    """Return the number of a series' colour."""
    return series % COLOURS


def line(points: Sequence[tuple[float, float]], class_: str) -> str:
    """Return a line through points."""
    path = "L".join(f"{number(x)} {number(y)}" for x, y in points)
    return tag("path", d=f"M{path}", class_=class_)


def tooltip(words: str, *children: str) -> str:
    """Return the children with words that show under the pointer."""
    return tag("g", tag("title", escape(words)), *children)


def x_axis(scale: Scale, top: float, bottom: float, name: str, unit: str = "") -> str:
    """Return vertical grid lines with their values below, and the axis' name."""
    parts = []
    for tick in scale.ticks():
        parts.append(line([(scale(tick), top), (scale(tick), bottom)], "grid"))
        parts.append(text(short(tick) + unit, scale(tick), bottom + 16, "tick", "middle"))
    middle = (scale.start + scale.end) / 2
    return "".join([*parts, text(name, middle, bottom + 34, "axis", "middle")])


def y_axis(scale: Scale, left: float, right: float, name: str) -> str:
    """Return horizontal grid lines with their values at the left; the name stands above them."""
    parts = []
    for tick in scale.ticks():
        parts.append(line([(left, scale(tick)), (right, scale(tick))], "grid"))
        parts.append(text(short(tick), left - 6, scale(tick) + 4, "tick", "end"))
    return "".join([*parts, text(name, 0, scale.end - 10, "axis")])


def legend(items: Sequence[tuple[str, str]], top: float, width: float = WIDTH) -> tuple[str, float]:
    """Return the entries (mark at 0 0, label) in as many lines as they need, and their bottom."""
    parts, x, y = [], 0.0, top + 12
    for mark, label in items:
        label = cut(label, width - 24)
        needed = 20 + LETTER * len(label) + 14
        if x > 0 and x + needed > width + 14:
            x, y = 0.0, y + 20
        parts.append(tag("g", mark, transform=f"translate({number(x + 8)} {number(y - 4)})"))
        parts.append(text(label, x + 20, y, "label"))
        x += needed
    return "".join(parts), y + 8
