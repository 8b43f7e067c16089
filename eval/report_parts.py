"""What a report is made of, whether it is written as Markdown or as HTML."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headstart.eval.report_svg import Figure
from headstart.eval.result import Sample


@dataclass(frozen=True)
class Paragraphs:
    """Plain sentences, as a list where there are bullets."""

    lines: Sequence[str]
    bullets: bool = False


@dataclass(frozen=True)
class Table:
    """A table of printed cells; the first column names its rows."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    kinds: Sequence[str] = ()
    """One a row, or none: how HTML marks it (see templates/page.css)."""
    shades: Sequence[Sequence[float | None]] = ()
    """One a cell behind the first, 0 to 1, or none: how dark HTML paints it."""
    sortable: bool = False
    folded: str = ""
    """What HTML shows in place of the table until it is opened; empty shows the table."""


@dataclass(frozen=True)
class Figures:
    """Plots side by side."""

    figures: Sequence[Figure]


@dataclass(frozen=True)
class Samples:
    """Prompts and answers of some drafters."""

    of: Sequence[tuple[str, Sequence[Sample]]]


@dataclass(frozen=True)
class Warnings:
    """What a reader must know: ('serious' or 'caution', text, which rows)."""

    found: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Terms:
    """Names and what they mean."""

    terms: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Code:
    """Text to be shown as it is, folded under its title."""

    title: str
    text: str


Block = Paragraphs | Table | Figures | Samples | Warnings | Terms | Code


@dataclass(frozen=True)
class Section:
    """A heading of level 2 or 3 with what stands below it."""

    title: str
    anchor: str
    blocks: Sequence[Block] = ()
    level: int = 2


@dataclass(frozen=True)
class Card:
    """The best row of one setting, in a few large words."""

    label: str
    speed: str
    interval: str
    drafter: str
    remarks: Sequence[str] = ()
    """What takes away from the figure."""
    anchor: str = ""


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    subtitle: str
    verdict: str
    """Whether greedy outputs equal those of plain decoding, in a sentence."""
    cards: Sequence[Card]
    headlines: Sequence[str]
    """Markdown sentences, a row each."""
    sections: Sequence[Section] = field(default_factory=list)

    @property
    def figures(self) -> list[Figure]:
        """Return every plot."""
        blocks = [block for section in self.sections for block in section.blocks]
        return [f for block in blocks if isinstance(block, Figures) for f in block.figures]
