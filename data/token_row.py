"""The training row that everything after rendering speaks of: token ids and their loss mask."""

from collections.abc import Sequence
from dataclasses import dataclass

CUT_SHORT = ("length", "context", "max_tokens")
"""Stop reasons of an answer that did not end by itself: it must not be taught to end."""


@dataclass
class TokenRow:
    """One training row: token ids and, for each, 1 where it is supervised (part of an answer)."""

    row_id: str
    category: str
    token_ids: list[int]
    loss_mask: list[int]
    stop_reason: str | None
    """How the last answer ended: the generator's word or the data's, "length" where it was cut
    here, None where nobody says."""

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(self.loss_mask)

    @property
    def coverage(self) -> float:
        """Supervised fraction of the row, between 0 and 1."""
        return self.supervised / len(self.token_ids)


def row_lengths(rows: Sequence[TokenRow]) -> list[int]:
    """Return the tokens of each row; rows that lie on disk know them without being read."""
    known = getattr(rows, "lengths", None)
    return [len(row.token_ids) for row in rows] if known is None else known
