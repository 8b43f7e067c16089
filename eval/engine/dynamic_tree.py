"""Dynamic trees: the shape is chosen anew every round, from the head's own confidence.

A node is worth the product of the head's probabilities along the path to it. Some levels of
candidates are grown, then the best of all of them are verified (EAGLE-2, arXiv 2406.16858, section
4). Values stay logarithms in fp32: in half precision a confident head's round to 0 and tie.
Shapes: B rows, C candidates, M kept candidates, N tree nodes (root included).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.engine.tree import DraftTree


@dataclass(frozen=True)
class DynamicShape:
    """How far candidates are grown and how many nodes of them a round verifies.

    Raises ValueError naming the field for a tree that cannot be filled.
    """

    top_k: int
    """Children of an expanded node, and nodes expanded a level."""
    levels: int
    """Depth of the deepest candidate; each level costs one call of the head."""
    total: int
    """N, nodes verified a round, the root included: whatever shape they take."""

    def __post_init__(self) -> None:
        for name, least in (("top_k", 1), ("levels", 1), ("total", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"tree.{name}={getattr(self, name)}: need at least {least}")
        if self.total > self.num_candidates + 1:
            raise ValueError(
                f"tree.total={self.total} but tree.top_k={self.top_k} and tree.levels="
                f"{self.levels} make {self.num_candidates} candidates: lower tree.total to "
                f"{self.num_candidates + 1} or raise another"
            )
        if self.levels > self.total - 1:
            raise ValueError(
                f"tree.levels={self.levels} but tree.total={self.total} keeps nothing deeper than "
                f"{self.total - 1}: lower tree.levels"
            )

    @property
    def num_candidates(self) -> int:
        """C, the root not counted: top_k at the first level, top_k squared at each later one."""
        return self.top_k + (self.levels - 1) * self.top_k**2

    def cut(self, levels: int) -> "DynamicShape":
        """Return the shape with fewer levels, and of their candidates no more than there are."""
        fewer = self.top_k + (levels - 1) * self.top_k**2
        return DynamicShape(self.top_k, levels, min(self.total, fewer + 1))

    @property
    def is_chain(self) -> bool:
        """True where no node can have a sibling: every draft then is the same chain."""
        return self.top_k == 1 or self.total == 2


@dataclass
class Candidates:
    """Drafted nodes in order of creation: level by level, the better parent's children first."""

    tokens_BC: Tensor
    """Target ids, children of one node most confident first."""
    log_values_BC: Tensor
    """fp32; no child's lies above its parent's."""
    parents_BC: Tensor
    """Creation index of each node's parent, -1 for the root."""

    @classmethod
    def joined(cls, levels: Sequence["Candidates"]) -> "Candidates":
        """Return the candidates of all levels, the first level first."""
        names = ("tokens_BC", "log_values_BC", "parents_BC")
        return cls(*(torch.cat([getattr(level, name) for level in levels], 1) for name in names))


def best_first(log_values_BC: Tensor, count: int) -> Tensor:
    """Return the `count` indices of highest value a row, best first, ties to the lowest index."""
    # Indices rise with depth, so a parent stands before a child of equal value.
    return log_values_BC.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def keep_best(log_values_BC: Tensor, parents_BC: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Keep the total - 1 best candidates; return their indices [B, M] and the tree's parents_BN.

    Ties go to the shallower, then the earlier created, so a kept node's parent is always kept.
    Node i > 0 is the i-th kept candidate in order of creation; node 0 the root. Raises RuntimeError
    for values that are NaN.
    """
    B, C = log_values_BC.shape
    _require(~log_values_BC.isnan().any(), "the head's logits are not finite: NaN among its values")
    kept_BM = best_first(log_values_BC, total - 1).sort(dim=-1).values
    nodes_M = torch.arange(1, total, device=kept_BM.device)
    node_BC = kept_BM.new_full((B, C + 1), -1)  # column 0 is the root, c + 1 candidate c
    node_BC[:, 0] = 0
    node_BC.scatter_(1, kept_BM + 1, nodes_M.expand(B, -1))
    parents_BM = node_BC.gather(1, parents_BC.gather(1, kept_BM) + 1)
    _require((parents_BM >= 0).all(), "a drafted node was kept without its parent")
    return kept_BM, torch.cat((torch.full_like(parents_BM[:, :1], -1), parents_BM), dim=1)


def _require(holds: Tensor, message: str) -> None:
    """Raise RuntimeError unless a tensor is true, without waiting for the device to know it."""
    torch._assert_async(holds, message)


def best_tree(root_B: Tensor, candidates: Candidates, shape: DynamicShape) -> DraftTree:
    """Return the tree of the best candidates below these root tokens."""
    kept_BM, parents_BN = keep_best(candidates.log_values_BC, candidates.parents_BC, shape.total)
    tokens_BM = candidates.tokens_BC.gather(1, kept_BM)
    return DraftTree.from_parents(
        torch.cat((root_B[:, None], tokens_BM), dim=1),
        parents_BN,
        max_depth=shape.levels,
        max_children=shape.top_k,
    )
