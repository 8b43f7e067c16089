"""Conversations, and the account of the rows that became one, were repaired or were dropped.

The account keeps counts and the first few places of every reason, never a note a row, so that a
file of any length is read in bounded memory; whoever wants every note passes a `listener`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from headstart.data.token_row import TokenRow

Message = dict[str, Any]
"""One turn: {"role": "system" | "user" | "assistant" | "tool", "content": text}, and what the
template reads beside them where the row has it: name, tool_calls, tool_call_id,
reasoning_content."""

PLACES_SHOWN = 3
MAX_REASONS = 100
"""Reasons told apart; a reason may quote what it found, and a broken file finds much."""
OTHER_REASON = "for other reasons"


class Place(NamedTuple):
    """Where a row came from."""

    file: str
    unit: str
    """line or row."""
    number: int
    """From 1."""


@dataclass(frozen=True)
class Conversation:
    """One chat: an optional system turn, then user turns, each followed by at most one answer.

    An answer that calls tools is followed by their results and another answer. A row that came
    tokenised has `tokens` and no messages.
    """

    prompt_id: str
    """Unique within one run; the row's own id where it has one, else its place."""
    category: str
    """The row's `category`, else "other"."""
    messages: tuple[Message, ...]
    tokens: TokenRow | None = None
    """The row itself, where it came with token ids and their loss mask."""
    stop_reason: str | None = None
    """How the last answer ended, where the row says so."""
    tools: tuple[dict[str, Any], ...] = ()
    """Definitions of the tools that the answers may call, as the template takes them."""
    place: Place | None = None
    """Where it was read; null for what our own generator made."""


def told_apart(counts: Counter[str], reason: str) -> str:
    """Return the reason to count: itself, or the common one where there are too many already."""
    return reason if reason in counts or len(counts) < MAX_REASONS else OTHER_REASON


@dataclass
class Reasons:
    """How many rows met each reason, and the places of the first few."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[Place]] = field(default_factory=dict)

    def add(self, place: Place, reason: str) -> None:
        reason = told_apart(self.counts, reason)
        self.counts[reason] += 1
        places = self.places.setdefault(reason, [])
        if len(places) < PLACES_SHOWN:
            places.append(place)

    @property
    def total(self) -> int:
        return self.counts.total()

    def __bool__(self) -> bool:
        return bool(self.counts)

    def summary(self, *, name_files: bool) -> str:
        """Return the reasons, most frequent first, each with its count and first places."""
        reasons = self.counts.most_common()
        return ", ".join(f"{n} {why} ({self._places(why, name_files)})" for why, n in reasons)

    def _places(self, reason: str, name_files: bool) -> str:
        places = self.places[reason]
        more = ", ..." if self.counts[reason] > len(places) else ""
        if name_files:
            return ", ".join(f"{p.file} {p.unit} {p.number}" for p in places) + more
        plural = "s" if self.counts[reason] > 1 else ""
        return f"{places[0].unit}{plural} {', '.join(str(p.number) for p in places)}{more}"


Listener = Callable[[str, Place, str], None]
"""Called with "dropped" or "repaired", the place and the reason of every note."""


@dataclass
class Account:
    """The account of one read: `kept + dropped.total` is the number of rows read.

    Repaired rows are among the kept ones; a row repaired twice is counted under two reasons.
    """

    kept: int = 0
    dropped: Reasons = field(default_factory=Reasons)
    repaired: Reasons = field(default_factory=Reasons)
    taken: Counter[str] = field(default_factory=Counter)
    """Conversations passed on, by source: the kept ones in the split, within limits."""
    left_out: list[str] = field(default_factory=list)
    """Files of a directory or glob that hold no rows, by their names."""
    name_files: bool = False
    """Whether a place is told with its file: rows come from more than one."""
    ended_by: str | None = None
    """The source that ran out and so ended a weighted mixture."""
    listener: Listener | None = None

    @property
    def total(self) -> int:
        return self.kept + self.dropped.total

    def drop(self, place: Place, reason: str) -> None:
        """Count a row that is not used."""
        self.dropped.add(place, reason)
        self._tell("dropped", place, reason)

    def keep(self, place: Place, repairs: list[str]) -> None:
        """Count a usable row and what was changed in it."""
        self.kept += 1
        for repair in repairs:
            self.repaired.add(place, repair)
            self._tell("repaired", place, repair)

    def summary(self) -> str:
        """Return one line: rows, every reason with its count and first places, and sources."""
        text = f"kept {self.kept} of {self.total} rows"
        if self.dropped:
            text += f": {self.dropped.summary(name_files=self.name_files)}"
        if self.repaired:
            text += f"; repaired {self.repaired.summary(name_files=self.name_files)}"
        if len(self.taken) > 1:
            text += "; taken " + ", ".join(f"{n} from {name}" for name, n in self.taken.items())
        if self.left_out:
            more = ", ..." if len(self.left_out) > PLACES_SHOWN else ""
            names = ", ".join(self.left_out[:PLACES_SHOWN])
            text += f"; left out {len(self.left_out)} other files ({names}{more})"
        if self.ended_by is not None:
            text += f"; the weighted mixture ended where {self.ended_by} did"
        return text

    def _tell(self, what: str, place: Place, reason: str) -> None:
        if self.listener is not None:
            self.listener(what, place, reason)
