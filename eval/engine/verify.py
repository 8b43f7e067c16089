"""Lossless verification of drafted trees: the target's law is emitted, whatever was drafted.

One chosen token at every node decides greedy decoding and undrawn children; children drawn from q
are tried one by one against the ratio p / q (arXiv 2211.17192, 2302.01318; several children as in
2305.09781 and 2402.12374). The rules use only arithmetic, so exact fractions run through them too.
Shapes: B rows, N tree nodes, C most children of a node, K deepest node + 1, V target vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from headstart.eval.engine.sampling import draw
from headstart.eval.engine.tree import DraftTree

Numbers = TypeVar("Numbers", Tensor, np.ndarray)
"""Laws over the vocabulary, [..., V]: a tensor, or an object array of fractions."""


class Scheme(NamedTuple):
    """How children are made, and the acceptance rule that keeps the target's law for them."""

    lossless: bool
    children: str
    doc: str


SCHEMES = {
    "a": Scheme(True, "drawn", "one child drawn from q; accept min(1, p/q)"),
    "a1": Scheme(True, "fixed", "one child not drawn; accept it when the target draws it"),
    "b": Scheme(True, "fixed", "top-k children; descend where the target's draw is a child"),
    "c": Scheme(True, "drawn without replacement", "try in order drawn, q given earlier siblings"),
    "c1": Scheme(True, "fixed", "any children chosen apart from verification's randomness, as b"),
    "d": Scheme(True, "drawn with replacement", "try in order drawn, repeats again, q unchanged"),
}
"""Verification schemes: verify_draw serves fixed children, verify_ratio drawn ones."""


@dataclass
class Verdict:
    """What one round decided, a row each."""

    path_BK: Tensor
    """Node ids kept, the root first, padded with -1."""
    accepted_B: Tensor
    """Drafted tokens accepted; the root is not counted."""
    next_B: Tensor
    """The token the target adds: bonus or correction; -1 where its law is NaN."""
    stopped_at_leaf_B: Tensor
    """True where the last kept node had no child to try; False where all were rejected."""


def accept_ratio(p: Numbers, q: Numbers) -> Numbers:
    """Return the ratio that accepts when a uniform in [0, 1) lies below it; never one where p = 0.

    Ratios above 1 always accept. A NaN (0 / 0, where there is no child) never does.
    """
    return p / q


def residual(p: Numbers, q: Numbers) -> Numbers:
    """Return the law after a rejection, norm(relu(p - q)); all 0 where p <= q everywhere."""
    return _normalised((p - q).clip(0))


def condition(q: Numbers, tried: Numbers) -> Numbers:
    """Return q given that no token of the bool mask `tried` is drawn; all 0 when none is left."""
    return _normalised(q * ~tried)


def _normalised(weights: Numbers) -> Numbers:
    mass = weights.sum(-1, keepdims=True)
    return weights / (mass + (mass == 0))


def verify_greedy(tree: DraftTree, best_BN: Tensor) -> Verdict:
    """Accept the children that carry their parent's best_BN, the target's argmax at each node.

    Ties must go to the lowest id, as in plain decoding, whose tokens are then emitted exactly.
    """
    child_tokens_BNC = tree.child_tokens_BNC
    hit_BNC = (child_tokens_BNC == best_BN[..., None]) & (child_tokens_BNC >= 0)
    first_BN1 = hit_BNC.byte().argmax(-1, keepdim=True)
    child_BN = tree.children_BNC.gather(-1, first_BN1)[..., 0].masked_fill(~hit_BNC.any(-1), -1)

    node_B = torch.zeros_like(best_BN[:, 0])
    path = [node_B]
    for _ in range(tree.max_depth):
        child_B = _at(child_BN, node_B)
        path.append(child_B)
        node_B = torch.where(child_B >= 0, child_B, node_B)
    return _verdict(tree, path, node_B, _at(best_BN, node_B))


def verify_draw(tree: DraftTree, probs_BNV: Tensor, uniform_BN: Tensor) -> Verdict:
    """Draw the target's token at every node and accept the child that carries it (a1, b, c1).

    probs_BNV are processed target laws. uniform_BN[b, n] belongs to the absolute position of the
    token drawn at node n, one past the node's own; nodes of one depth share it, so plain decoding
    with the same uniforms emits the same tokens.
    """
    return verify_greedy(tree, draw(probs_BNV, uniform_BN))


def verify_ratio(
    tree: DraftTree,
    probs_BNV: Tensor,
    accept_uniform_BNC: Tensor,
    final_uniform_BN: Tensor,
    *,
    replacement: bool,
) -> Verdict:
    """Try the drawn children of each node in order by the ratio rule (a, c; d with replacement).

    probs_BNV are processed target laws, tree.draft_probs_BNV the laws children were drawn from.
    accept_uniform_BNC[b, n, c] decides the c-th try at node n; final_uniform_BN[b, n] draws the
    token the target adds where the walk ends at n. All uniforms lie in [0, 1).
    """
    node_B = torch.zeros_like(tree.tokens_BN[:, 0])
    path = [node_B]
    # A row that has stopped repeats its last node with the same uniforms, so nothing changes; the
    # round beyond the deepest node leaves every row with the law at the node where it stopped.
    for _ in range(tree.max_depth + 1):
        child_B, law_BV = _try_children(
            tree, node_B, _at(probs_BNV, node_B), _at(accept_uniform_BNC, node_B), replacement
        )
        path.append(child_B)
        node_B = torch.where(child_B >= 0, child_B, node_B)
    return _verdict(tree, path[:-1], node_B, draw(law_BV, _at(final_uniform_BN, node_B)))


def _try_children(
    tree: DraftTree, node_B: Tensor, probs_BV: Tensor, uniform_BC: Tensor, replacement: bool
) -> tuple[Tensor, Tensor]:
    """Return the accepted child of each row's node, -1 for none, and the law then left."""
    assert tree.draft_probs_BNV is not None, "the ratio rule needs the law children were drawn from"
    law_BV, q_BV = probs_BV.double(), _at(tree.draft_probs_BNV, node_B).double()
    children_BC, tokens_BC = _at(tree.children_BNC, node_B), _at(tree.child_tokens_BNC, node_B)
    tried_BV = torch.zeros_like(law_BV, dtype=torch.bool)
    accepted_B = torch.full_like(node_B, -1)
    for child_B, token_B, uniform_B in zip(
        children_BC.unbind(1), tokens_BC.unbind(1), uniform_BC.unbind(1), strict=True
    ):
        trying_B = (token_B >= 0) & (accepted_B < 0)
        index_B = token_B.clamp(min=0)
        try_q_BV = q_BV if replacement else condition(q_BV, tried_BV)
        left_BV = residual(law_BV, try_q_BV)
        p_B = _at(law_BV, index_B)
        # Nothing is left only where the ratio is 1, rounding apart: that counts as accepted.
        nothing_left_B = left_BV.sum(-1) == 0
        passed_B = uniform_B < accept_ratio(p_B, _at(try_q_BV, index_B))
        taken_B = trying_B & (passed_B | (nothing_left_B & (p_B > 0)))
        rejected_B = trying_B & ~taken_B & ~nothing_left_B
        law_BV = torch.where(rejected_B[:, None], left_BV, law_BV)
        tried_BV.scatter_(1, index_B[:, None], (trying_B | _at(tried_BV, index_B))[:, None])
        accepted_B = torch.where(taken_B, child_B, accepted_B)
    return accepted_B, law_BV


def _verdict(tree: DraftTree, path: list[Tensor], last_B: Tensor, next_B: Tensor) -> Verdict:
    path_BK = torch.stack(path, 1)
    has_child_BN = (tree.child_tokens_BNC >= 0).any(-1)
    return Verdict(path_BK, (path_BK >= 0).sum(-1) - 1, next_B, ~_at(has_child_BN, last_B))


def _at(values_BX: Tensor, index_B: Tensor) -> Tensor:
    """Return values_BX[b, index_B[b]] for every row."""
    return values_BX[torch.arange(len(index_B), device=index_B.device), index_B]
