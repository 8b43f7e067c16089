"""What drafters that read nothing but text share: a record a row, drafts as lists, trees of them.

They work on the host, and so does what they are shown: on a GPU that is a second synchronisation.
A round in which no row finds a draft is a plain step. Shapes: B rows, N tree nodes of the round.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from headstart.eval.engine.tree import DraftTree


class Draft(NamedTuple):
    """One row's drafted tokens, in an order in which siblings are tried."""

    tokens: list[int]
    parents: list[int]
    """Place in `tokens` of each token's parent, below its own; -1 stands for the root."""

    @classmethod
    def chain(cls, tokens: list[int]) -> "Draft":
        """Make a draft of tokens that follow one another."""
        return cls(tokens, list(range(-1, len(tokens) - 1)))


class RowText(Protocol):
    """What a text drafter remembers of one row."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Read the tokens that follow."""


Row = TypeVar("Row", bound=RowText)


class TextDrafter(Generic[Row]):
    """Drafts from the text so far; a subclass says what it keeps of a row and what it drafts."""

    name: str
    scheme: str
    num_nodes: int
    taps: tuple[int, ...] = ()
    draft_calls = 0
    remembers = False
    """Whether drafts depend on answers that finished before, and so on the order of prompts."""

    def new_row(self) -> Row:
        """Return the record of a row that holds no token yet."""
        raise NotImplementedError

    def draft(self, row: Row) -> Draft:
        """Return what is drafted after a row's text; no tokens where nothing is found."""
        raise NotImplementedError

    def start(self, batch: int, max_len: int) -> None:
        """Make room for `batch` rows."""
        self._rows = [self.new_row() for _ in range(batch)]

    def begin(self, row: int, first_token: int) -> None:
        """Start a row over."""
        self._rows[row] = self.new_row()
        self._rows[row].extend([first_token])

    def observe(
        self,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Read the tokens; features say nothing here."""
        places = range(len(counts)) if rows is None else rows
        for row, tokens, count in zip(places, tokens_RM.tolist(), counts, strict=True):
            self._rows[row].extend(tokens[:count])

    def drafts(self, count: int) -> list[Draft]:
        """Return the drafts of the first `count` rows."""
        return [self.draft(row) for row in self._rows[:count]]

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Draft below the roots, which are the last tokens observed."""
        return tree_of(root_B, self.drafts(len(root_B)), self.num_nodes)

    def move_row(self, source: int, destination: int) -> None:
        """Hand a row's record over."""
        self._rows[destination] = self._rows[source]

    def finish(self, row: int, token_ids: Sequence[int]) -> None:
        """Learn nothing from a whole answer."""

    def clear(self) -> None:
        """Hold nothing of earlier answers."""


def tree_of(root_B: Tensor, drafts: Sequence[Draft], num_nodes: int) -> DraftTree:
    """Lay drafts, one a row, out as a tree of the narrowest width that holds them all.

    Widths are the powers of two below num_nodes, and num_nodes: a pass costs by its width, but
    every other width is another shape to compile.
    """
    longest = 1 + max(len(draft.tokens) for draft in drafts)
    width = min(num_nodes, 1 << (longest - 1).bit_length())
    tokens, parents = [], []
    for root, draft in zip(root_B.tolist(), drafts, strict=True):
        spare = width - 1 - len(draft.tokens)
        tokens.append([root, *draft.tokens, *[-1] * spare])
        parents.append([-1, *(parent + 1 for parent in draft.parents), *[0] * spare])
    device = root_B.device
    return DraftTree.from_parents(
        torch.tensor(tokens, device=device),
        torch.tensor(parents, device=device),
        max_depth=max(map(_depth, drafts)),
        max_children=max(map(_most_children, drafts)),
    )


def _depth(draft: Draft) -> int:
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def _most_children(draft: Draft) -> int:
    return max(Counter(draft.parents).values(), default=1)
