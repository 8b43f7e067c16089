"""What a drafter is to the decoding loop: something that proposes trees and is shown what was true.

Shapes: B rows in lockstep, R rows shown something, M verified pairs, N tree nodes, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from headstart.eval.engine.tree import DraftTree, TreeShape


class Drafter(Protocol):
    """Proposes a DraftTree a round and reads back the verified tokens and features."""

    name: str
    scheme: str
    """Verification scheme at temperature > 0: a, a1, b or c."""
    taps: tuple[int, ...]
    """hidden_states[s] it reads, ascending; none: the last state."""
    num_nodes: int
    """N, the most nodes of a tree; a round may have fewer, in one of a few widths."""
    draft_calls: int
    """Model calls that `propose` makes; a head's first depth comes from `observe`, timed as commit.
    """

    def start(self, batch: int, max_len: int) -> None:
        """Make room for `batch` rows of up to `max_len` tokens."""

    def begin(self, row: int, first_token: int) -> None:
        """Forget what a row held: a prompt starts there with this token.

        Every later token of prompt and answer comes through `observe`, once and in order.
        """

    def observe(
        self,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Read counts[r] verified pairs a row: the target's features at t and the token at t+1.

        hidden_RMD is the target's last state, or the tapped states side by side, [R, M, F*D].
        """

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Draft from the root tokens at these absolute positions; keys_B name the prompts."""

    def move_row(self, source: int, destination: int) -> None:
        """Move one row's state over another's; the source then stays unused until it begins."""

    def finish(self, row: int, token_ids: Sequence[int]) -> None:
        """Note a row's whole answer, cut where it ended; `observe` may not have shown its end."""

    def clear(self) -> None:
        """Forget what finished answers left behind: a repeat of the same prompts begins."""


@dataclass(frozen=True)
class DraftLimit:
    """How far the draft of one round may go."""

    depth: int | None = None
    """Deepest level drafted; 0 drafts nothing, null goes as deep as the shape."""
    survival: float = 0.0
    """Least product of the drafter's best probabilities, root to level, of a level drafted.

    A level's own factor is its best probability, not that of a token drawn there: whether a drawn
    token is verified may not depend on the token, or the output's law would change.
    """

    @property
    def is_open(self) -> bool:
        """True where nothing is limited."""
        return self.depth is None and self.survival == 0


FULL = DraftLimit()


@runtime_checkable
class LimitedDrafter(Protocol):
    """A drafter that stops early when told to, which saves the rest of the draft.

    Drafts of the others are cut after they were made, by depth alone.
    """

    max_depth: int
    """Deepest level it can draft."""

    def propose_within(
        self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor, limit: DraftLimit
    ) -> DraftTree:
        """Draft as `propose` does, within a limit that is the same for all rows."""


class NoDrafter:
    """Drafts nothing: plain decoding through the very same loop."""

    name = "plain"
    scheme = "a1"
    taps: tuple[int, ...] = ()
    num_nodes = 1
    draft_calls = 0

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._shape = TreeShape.root_only().to(device)

    def start(self, batch: int, max_len: int) -> None:
        """Need nothing."""

    def begin(self, row: int, first_token: int) -> None:
        """Hold nothing."""

    def observe(
        self,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Learn nothing."""

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Return the root alone."""
        return self._shape.fill(root_B[:, None])

    def move_row(self, source: int, destination: int) -> None:
        """Move nothing."""

    def finish(self, row: int, token_ids: Sequence[int]) -> None:
        """Learn nothing."""

    def clear(self) -> None:
        """Forget nothing."""
