"""A round's draft, as deep as the policy and the token budget let it be; what the drafter is shown.

While nothing is drafted the drafter is not shown anything either: verified pairs wait with their
rows, and are read together before the next draft. What it then drafts is what it would have drafted
had it been shown every round, and a round without a draft costs what plain decoding costs.
Shapes: B rows, M verified pairs, N tree nodes, F features a position that the drafter reads.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headstart.eval.engine.drafters.base import Drafter, DraftLimit, LimitedDrafter
from headstart.eval.engine.policy import DraftPolicy, fair_shares
from headstart.eval.engine.rows import Row, padded
from headstart.eval.engine.tree import DraftTree, TreeShape

MOST_UNSEEN = 512
"""Pairs that a row may keep waiting: bounds the memory that they take."""


class Drafting:
    """Asks a drafter for drafts within limits, and shows it what was verified.

    max_pass_tokens bounds the tokens that a pass verifies, those of all rows together. Raises
    ValueError for a policy that the drafter cannot follow.
    """

    def __init__(
        self,
        drafter: Drafter,
        policy: DraftPolicy,
        clock: Callable[[], float],
        device: torch.device,
        max_pass_tokens: int | None,
    ) -> None:
        policy = policy if drafter.num_nodes > 1 else DraftPolicy()
        policy.check(drafter)
        self.drafter, self.policy, self.clock, self.device = drafter, policy, clock, device
        self.max_pass_tokens = max_pass_tokens
        self._nothing = TreeShape.root_only().to(device)
        self._limited = drafter if isinstance(drafter, LimitedDrafter) else None
        self._deepest_seen = 0 if self._limited is None else self._limited.max_depth
        self._asked = 0
        self._catch_up_seconds = 0.0

    @property
    def _deepest(self) -> int:
        """Levels of a whole draft, or a bound on them before there was one."""
        return self._deepest_seen or self.drafter.num_nodes - 1

    def draft(
        self, rows: Sequence[Row], root_B: Tensor, positions_B: Tensor, keys_B: Tensor
    ) -> DraftTree:
        """Return the trees to verify; none is deeper than its row has room."""
        limit = self.policy.limit(len(rows), self._deepest)
        spare = None if self.max_pass_tokens is None else self.max_pass_tokens - len(rows)
        room = [row.room for row in rows]
        bounds = (self._deepest, limit.depth, spare, max(room))
        asked = min(bound for bound in bounds if bound is not None)
        whole = limit.is_open and spare is None  # then every round has the same shape
        if asked == 0 and not whole:
            tree = self._nothing.fill(root_B[:, None])
        else:
            self._catch_up(rows)
            limit = DraftLimit(None if whole else asked, limit.survival)
            tree = self._propose(root_B, positions_B, keys_B, limit)
            asked = self._deepest if whole else min(asked, self._deepest)
        self._asked = asked
        tree = tree.limit_depth(torch.tensor([min(asked, r) for r in room], device=self.device))
        return tree if whole else self._fitted(tree, spare)

    def _propose(
        self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor, limit: DraftLimit
    ) -> DraftTree:
        if self._limited is not None and not limit.is_open:
            return self._limited.propose_within(root_B, positions_B, keys_B, limit)
        tree = self.drafter.propose(root_B, positions_B, keys_B)
        self._deepest_seen = max(self._deepest_seen, tree.max_depth)
        return tree

    def _fitted(self, tree: DraftTree, spare: int | None) -> DraftTree:
        """Share the tokens that the pass has to spare among the rows, and drop empty columns."""
        if spare is not None and self._asked > 0:
            shares = fair_shares(tree.num_drafted_B.tolist(), spare)
            tree = tree.limit_nodes(torch.tensor(shares, device=self.device))
        return tree.trimmed()

    def show(
        self,
        rows: Sequence[Row],
        features_BNF: Tensor,
        paths: Sequence[Sequence[int]],
        new_tokens: Sequence[Sequence[int]],
    ) -> None:
        """Show the drafter each row's verified nodes, with the tokens that follow them."""
        if self._asked == 0 and self.drafter.num_nodes > 1:
            for row, features_NF, tokens in zip(rows, features_BNF, new_tokens, strict=True):
                row.unseen.append((tokens[0], features_NF[0]))
            if max(len(row.unseen) for row in rows) >= MOST_UNSEEN:
                self._catch_up(rows)
            return
        path_BM = padded(paths, self.device)
        index_BMF = path_BM[..., None].expand(-1, -1, features_BNF.shape[2])
        tokens_BM = padded(new_tokens, self.device)
        self.drafter.observe(tokens_BM, features_BNF.gather(1, index_BMF), [len(p) for p in paths])

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Show the drafter the pairs that waited, rows of equally many together."""
        waiting: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            if row.unseen:
                waiting.setdefault(len(row.unseen), []).append(index)
        if not waiting:
            return
        start = self.clock()
        for count, indices in waiting.items():
            pairs = [rows[i].unseen for i in indices]
            tokens_RM = padded([[token for token, _ in row] for row in pairs], self.device)
            features_RMF = torch.stack([torch.stack([f for _, f in row]) for row in pairs])
            self.drafter.observe(tokens_RM, features_RMF, [count] * len(indices), rows=indices)
            for i in indices:
                rows[i].unseen = []
        self._catch_up_seconds += self.clock() - start

    def learn(self, rows: Sequence[Row], seconds: float) -> None:
        """Tell the policy how the round went; what catching up took is no cost of its depth."""
        rounds = [row.completion.rounds[-1] for row in rows]
        seconds -= self._catch_up_seconds
        self._catch_up_seconds = 0.0
        self.policy.learn(self._asked, rounds, seconds)
