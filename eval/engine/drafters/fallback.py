"""Several drafters in one: in every row and round, the first that has something to propose.

Drafters of text come first, for a head or a draft model always has something. All of them observe
every round, so that each goes on from the whole text. Shapes: B rows, N tree nodes, C most children
of a node, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headstart.eval.engine.drafters.base import Drafter
from headstart.eval.engine.drafters.text import Draft, TextDrafter, tree_of
from headstart.eval.engine.tree import DraftTree

SAMPLED = ("a", "c")


class FallbackDrafter:
    """Asks the text drafters in order, then the last drafter, if there is one.

    Where the last draws its children, rows drafted from text are verified by the same rule: a chain
    that was not drawn has the law that puts everything on its one child. Raises ValueError, beside
    drawn children, for drafted trees, which have no such law, and for a drafter that remembers
    earlier answers, with which a sampled text would depend on the order of the prompts.
    """

    draft_calls = 0  # differs from round to round, so that no cost a call is stated

    def __init__(self, first: Sequence[TextDrafter], last: Drafter, *, vocab_size: int) -> None:
        assert first, "nothing to fall back from"
        self.first, self.last, self.vocab_size = list(first), last, vocab_size
        self.sampled = last.scheme in SAMPLED
        if self.sampled:
            _refuse_beside_drawn(first, last)
        members = [*first, last] if last.num_nodes > 1 else first
        self.name = "+".join(member.name for member in members)
        self.num_nodes = max(member.num_nodes for member in members)
        self.taps = last.taps
        schemes = [member.scheme for member in members]
        self.scheme = last.scheme if self.sampled else "b" if "b" in schemes else "a1"

    @property
    def _members(self) -> list[Drafter]:
        return [*self.first, self.last]

    def start(self, batch: int, max_len: int) -> None:
        """Make room for `batch` rows in every drafter, and for what the others' drafts add."""
        for member in self._members:
            member.start(batch, max_len + self.num_nodes)

    def begin(self, row: int, first_token: int) -> None:
        """Start a row over in every drafter."""
        for member in self._members:
            member.begin(row, first_token)

    def observe(
        self,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Show every drafter what was true, whoever drafted."""
        for member in self._members:
            member.observe(tokens_RM, hidden_RMD, counts, rows)

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Draft from text where a text drafter finds something, elsewhere by the last drafter."""
        drafts = self._from_text(len(root_B))
        tree = tree_of(root_B, drafts, self.num_nodes)
        drafted = [bool(draft.tokens) for draft in drafts]
        if self.sampled:
            tree = self._with_laws(tree)
        if not all(drafted):
            drafted_B = torch.tensor(drafted, device=root_B.device)
            other = self.last.propose(root_B, positions_B, keys_B)
            tree = _by_row(drafted_B, tree, other) if any(drafted) else other
        return tree

    def _from_text(self, count: int) -> list[Draft]:
        """Return each row's first draft that has a token."""
        drafts = [Draft([], [])] * count
        for member in self.first:
            if not all(draft.tokens for draft in drafts):
                found = zip(drafts, member.drafts(count), strict=True)
                drafts = [have if have.tokens else new for have, new in found]
        return drafts

    def _with_laws(self, tree: DraftTree) -> DraftTree:
        """Give chains that were not drawn the law that each of their tokens is certain."""
        B, N = tree.tokens_BN.shape
        probs_BNV = torch.zeros(B, N, self.vocab_size, device=tree.tokens_BN.device)
        next_BN = tree.tokens_BN[:, 1:, None]
        probs_BNV[:, :-1].scatter_(2, next_BN.clamp(min=0), (next_BN >= 0).float())
        return replace(tree, draft_probs_BNV=probs_BNV)

    def move_row(self, source: int, destination: int) -> None:
        """Move a row in every drafter."""
        for member in self._members:
            member.move_row(source, destination)

    def finish(self, row: int, token_ids: Sequence[int]) -> None:
        """Tell every drafter of a whole answer."""
        for member in self._members:
            member.finish(row, token_ids)

    def clear(self) -> None:
        """Let every drafter forget finished answers."""
        for member in self._members:
            member.clear()


def _by_row(first_B: Tensor, first: DraftTree, other: DraftTree) -> DraftTree:
    """Return the tree whose rows are those of `first` where first_B is true, else of `other`."""
    width = max(first.tokens_BN.shape[1], other.tokens_BN.shape[1])

    def pick(name: str, fill: int) -> Tensor | None:
        pair = [getattr(tree, name) for tree in (first, other)]
        if pair[0] is None:
            return None
        padded = []
        for values in pair:
            spare = values.new_full((len(values), width - values.shape[1], *values.shape[2:]), fill)
            padded.append(torch.cat([values, spare], dim=1))
        return torch.where(first_B.view(-1, *[1] * (padded[0].ndim - 1)), *padded)

    return DraftTree.from_parents(
        pick("tokens_BN", -1),
        pick("parents_BN", 0),
        max_depth=max(first.max_depth, other.max_depth),
        max_children=max(first.children_BNC.shape[2], other.children_BNC.shape[2]),
        draft_probs_BNV=pick("draft_probs_BNV", 0),
    )


def _refuse_beside_drawn(first: Sequence[TextDrafter], last: Drafter) -> None:
    for member in first:
        if member.scheme == "b":
            raise ValueError(
                f"fallback: {member.name} drafts trees, {last.name} draws its children: the two "
                "are verified by different rules; draft chains, or take top_k children"
            )
        if member.remembers:
            raise ValueError(
                f"fallback: {member.name} remembers finished answers and {last.name} draws its "
                "children: a sampled text would depend on the order of the prompts; set "
                f"responses=0 for {member.name}, or take top_k children"
            )
