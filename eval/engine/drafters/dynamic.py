"""Dynamic trees grown from any head that drafts token by token (EAGLE-2, arXiv 2406.16858).

Children are the head's top-k at every temperature, never drawn: only then may a tree be re-ranked
and pruned and stay lossless (scheme b). The head's confidence is its distribution at temperature 1.
Shapes: B rows, M nodes expanded at a level, K children of a node, C candidates of a level,
W draft vocabulary.
"""

import math

import torch
from torch import Tensor

from headstart.eval.engine.drafters.base import FULL, DraftLimit
from headstart.eval.engine.drafters.head import HeadBacked, top_ids
from headstart.eval.engine.dynamic_tree import Candidates, DynamicShape, best_first, best_tree
from headstart.eval.engine.tree import DraftTree
from headstart.heads.base import DraftHead, family_of
from headstart.heads.parts import TargetParts


class DynamicHeadDrafter(HeadBacked):
    """Grows another tree every round, of a fixed number of nodes.

    Raises ValueError for a head that gives several depths at once, and for a tree that is deeper
    than the head or wider than its vocabulary.
    """

    def __init__(self, head: DraftHead, parts: TargetParts, shape: DynamicShape) -> None:
        _check(head, shape)
        # The head holds every expanded node of a draft, or the pairs of the longest verified path.
        stepped = shape.top_k * (shape.levels - 1)
        super().__init__(head, parts, max_pending=max(stepped, shape.levels + 1))
        self.shape, self.num_nodes, self.max_depth = shape, shape.total, shape.levels
        self.scheme = "a1" if shape.is_chain else "b"
        self.draft_calls = shape.levels - 1

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Grow the candidates level by level, below the best of each, and keep the best of all."""
        return self.propose_within(root_B, positions_B, keys_B, FULL)

    def propose_within(
        self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor, limit: DraftLimit
    ) -> DraftTree:
        """Grow the levels that the limit allows; of the nodes, keep those that survive."""
        levels = self._levels(len(root_B), limit)
        found = Candidates.joined(levels)
        if limit.survival > 0:
            lost_BC = found.log_values_BC < math.log(limit.survival)
            found.tokens_BC = found.tokens_BC.masked_fill(lost_BC, -1)
        return best_tree(root_B, found, self.shape.cut(len(levels)))

    def grow(self, B: int) -> Candidates:
        """Return the candidates of the first B rows, grown below the best of each level."""
        return Candidates.joined(self._levels(B, FULL))

    def _levels(self, B: int, limit: DraftLimit) -> list[Candidates]:
        """Grow level by level as far as the limit allows."""
        k = self.shape.top_k
        wanted = self.shape.levels if limit.depth is None else min(limit.depth, self.shape.levels)
        least = math.log(limit.survival) if limit.survival > 0 else -math.inf
        first_B1W = self._logits_BKW[:B, :1]
        none_B1 = torch.full((B, 1), -1, device=first_B1W.device)
        worth_B1 = torch.zeros(B, 1, device=first_B1W.device)
        levels = [self._children(first_B1W, worth_B1, none_B1)]
        created = stepped = 0  # candidates and state slots that came before the last level's
        while len(levels) < wanted:
            last = levels[-1]
            if limit.survival > 0 and bool((last.log_values_BC < least).all()):
                break
            best_BM = best_first(last.log_values_BC, k)
            logits_BMW = self.head.step(
                self._state,
                last.tokens_BC.gather(1, best_BM),
                stepped + best_BM // k,  # k children a slot, in the order of the slots
                self.parts,
            )
            worth_BM = last.log_values_BC.gather(1, best_BM)
            levels.append(self._children(logits_BMW, worth_BM, created + best_BM))
            created += last.tokens_BC.shape[1]
            stepped += last.tokens_BC.shape[1] // k
        return levels

    def _children(self, logits_BMW: Tensor, worth_BM: Tensor, parents_BM: Tensor) -> Candidates:
        """Return the top-k children of expanded nodes, whose log values are worth_BM."""
        ids_BMK = top_ids(logits_BMW, self.shape.top_k)
        logits_BMW = logits_BMW.float()
        log_q_BMK = logits_BMW.gather(-1, ids_BMK) - logits_BMW.logsumexp(-1, keepdim=True)
        # Rounding may not lift a child above its parent: it would be kept without it.
        log_values_BMK = worth_BM[..., None] + log_q_BMK.clamp(max=0)
        return Candidates(
            self._to_target(ids_BMK).flatten(1),
            log_values_BMK.flatten(1),
            parents_BM[..., None].expand_as(ids_BMK).flatten(1),
        )


def _check(head: DraftHead, shape: DynamicShape) -> None:
    if head.depths_at_once > 1:
        raise ValueError(
            f"tree.levels={shape.levels}: a dynamic tree needs an autoregressive head, but "
            f"{family_of(head.config)} drafts {head.depths_at_once} depths at once; use a static "
            "tree or a chain"
        )
    if head.max_depth is not None and shape.levels > head.max_depth:
        raise ValueError(
            f"tree.levels={shape.levels} but head.num_heads={head.max_depth}: the tree is deeper "
            "than the head can draft; lower tree.levels"
        )
    if shape.top_k > head.num_draft_tokens:
        raise ValueError(
            f"tree.top_k={shape.top_k} but the head drafts over {head.num_draft_tokens} tokens: "
            "lower tree.top_k"
        )
