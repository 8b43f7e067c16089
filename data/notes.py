"""row_notes.jsonl beside the rows: each row that was dropped or repaired, where it came from, why.

Accounts and audits keep counts; this file keeps every note.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headstart.data.conversations import Conversation, Place

NOTES = "row_notes.jsonl"


class Note(NamedTuple):
    """What became of one row."""

    what: str
    """dropped or repaired."""
    reason: str
    place: Place | None
    """Null where the row came from our own generator."""
    row_id: str | None = None
    """Null where the row had not become a conversation."""

    @property
    def fields(self) -> dict[str, Any]:
        """What is written of it."""
        where = {"file": self.place.file, self.place.unit: self.place.number} if self.place else {}
        name = {} if self.row_id is None else {"row_id": self.row_id}
        return {"what": self.what, **where, **name, "reason": self.reason}


def about(
    conversation: Conversation, write: Callable[[Note], object]
) -> Callable[[str, str], None]:
    """Return a listener for an audit that notes what becomes of one conversation."""
    place, row_id = conversation.place, conversation.prompt_id

    def listen(what: str, reason: str) -> None:
        write(Note(what, reason, place, row_id))

    return listen


@contextmanager
def note_file(directory: Path) -> Iterator[Callable[[Note], None]]:
    """Give what writes a note to the directory's file, begun anew."""
    with (directory / NOTES).open("w", encoding="utf-8") as file:

        def write(note: Note) -> None:
            file.write(json.dumps(note.fields) + "\n")

        yield write
