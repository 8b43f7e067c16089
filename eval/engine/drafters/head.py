"""Chains and static trees grown from any head: top-k children, or children drawn from the head.

A head that gives K depths at once is asked nothing more for a tree of depth K or less; a recurrent
head takes one step a level. Shapes: B rows, N tree nodes, M nodes expanded at a level, C candidates
a node, K depths known without a step, W draft vocabulary, V target vocabulary, D width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.eval.engine.drafters.base import FULL, DraftLimit
from headstart.eval.engine.sampling import (
    DRAFT,
    SamplingConfig,
    processed_probs,
    sample_without_replacement,
    uniforms,
)
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.heads.base import DraftHead, family_of
from headstart.heads.parts import TargetParts


@dataclass
class _Level:
    """The nodes expanded at one depth and where their children go."""

    expanded: list[int]
    slots: Tensor
    children: Tensor
    parent_index: Tensor
    ranks: Tensor
    candidates: int


class HeadBacked:
    """What drafters with a head share: the head's state and the logits it gives without a step.

    max_pending bounds, in tokens, the nodes stepped for one draft and the pairs one round verifies.
    """

    def __init__(self, head: DraftHead, parts: TargetParts, *, max_pending: int) -> None:
        self.head, self.parts, self._max_pending = head, parts, max_pending
        self.name, self.taps = family_of(head.config), head.aux_features
        self._logits_BKW = torch.empty(0)

    def start(self, batch: int, max_len: int) -> None:
        """Make room for `batch` rows."""
        self._state = None  # a new state may then lie where the old one lay
        self._state = self.head.new_state(batch, max_len, self._max_pending, self.parts)
        self._logits_BKW = torch.empty(0)
        self._batch = batch

    def begin(self, row: int, first_token: int) -> None:
        """Forget a row. No pair of target features and next token holds the first token."""
        self._state.reset(row)

    def observe(
        self,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Refresh the head's state with verified pairs; keep the first depths' logits."""
        logits_RKW = self.head.extend(
            self._state, tokens_RM, hidden_RMD, counts, self.parts, rows=rows
        )
        if self._logits_BKW.numel() == 0:
            self._logits_BKW = logits_RKW.new_zeros(self._batch, *logits_RKW.shape[1:])
        self._logits_BKW[slice(0, len(counts)) if rows is None else list(rows)] = logits_RKW

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row over another."""
        self._state.move_row(source, destination)
        self._logits_BKW[destination] = self._logits_BKW[source]

    def finish(self, row: int, token_ids: Sequence[int]) -> None:
        """Learn nothing from a whole answer."""

    def clear(self) -> None:
        """Hold nothing of earlier answers."""

    def _to_target(self, ids: Tensor) -> Tensor:
        if self.head.vocab is None:
            return ids
        table = self.head.vocab.to(ids.device).ids_W
        return torch.where(ids >= 0, table[ids.clamp(min=0)], ids)


class HeadDrafter(HeadBacked):
    """Grows one static tree a round from a head's logits.

    children="top_k" takes the head's best tokens (schemes a1 and b); "sampled" draws them without
    replacement from the head's processed distribution (schemes a and c).
    Raises ValueError for a tree deeper than the head.
    """

    def __init__(
        self,
        head: DraftHead,
        parts: TargetParts,
        shape: TreeShape,
        *,
        sampling: SamplingConfig,
        children: str = "top_k",
    ) -> None:
        max_depth = shape.max_depth if head.max_depth is None else head.max_depth
        shape.check(max_depth=max_depth, top_k=head.num_draft_tokens)
        device = parts.readout.weight_WD.device
        super().__init__(head, parts, max_pending=max(shape.num_nodes, 2))
        self.shape = shape.to(device)
        self.sampling, self.sampled = sampling, children == "sampled" and sampling.temperature > 0
        self.scheme = {(True, True): "a", (True, False): "c", (False, True): "a1"}.get(
            (self.sampled, shape.is_chain), "b"
        )
        self.num_nodes, self.max_depth = shape.num_nodes, shape.max_depth
        self._levels = _plan(self.shape)
        self._shapes = [self.shape.cut(depth) for depth in range(shape.max_depth)] + [self.shape]
        if self.sampled:
            _refuse_gaps(shape)
        self.draft_calls = len(self._levels[head.depths_at_once :])

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Grow the tree level by level."""
        return self.propose_within(root_B, positions_B, keys_B, FULL)

    def propose_within(
        self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor, limit: DraftLimit
    ) -> DraftTree:
        """Grow the levels that the limit allows; rows end apart by survival, all by depth."""
        B, K = len(root_B), self._logits_BKW.shape[1]
        levels, survival_B = self._levels[: limit.depth], root_B.new_zeros(B, dtype=torch.float32)
        grown = len(levels)
        tokens_BN = root_B.new_full((B, self.num_nodes), -1)
        tokens_BN[:, 0] = root_B
        probs_BNV = None
        if self.sampled:
            size = (B, self.num_nodes, self.head.shape.vocab_size)
            probs_BNV = torch.zeros(size, device=root_B.device)
        for depth, level in enumerate(levels):
            if depth < K:
                logits_BMW = self._logits_BKW[:B, depth, None]
            else:
                logits_BMW = self.head.step(
                    self._state,
                    tokens_BN[:, level.expanded].clamp(min=0),
                    level.slots.expand(B, -1),
                    self.parts,
                )
            require_finite(logits_BMW, "the head's")
            if limit.survival > 0:
                survival_B += best_log_prob(logits_BMW[:, 0])
                if bool((survival_B < math.log(limit.survival)).all()):
                    grown = depth
                    break
            if probs_BNV is None:
                ids_BMC = top_ids(logits_BMW, level.candidates)
            else:
                ids_BMC = self._sample(
                    logits_BMW, level, probs_BNV, positions_B + depth + 1, keys_B
                )
            if ids_BMC.shape[1] == 1:
                ids_BMC = ids_BMC.expand(-1, len(level.expanded), -1)
            tokens_BC = self._to_target(ids_BMC[:, level.parent_index, level.ranks])
            if limit.survival > 0:
                ended_B1 = (survival_B < math.log(limit.survival))[:, None]
                tokens_BC = tokens_BC.masked_fill(ended_B1, -1)
            tokens_BN[:, level.children] = tokens_BC
        shape = self._shapes[grown]
        N = shape.num_nodes
        return shape.fill(tokens_BN[:, :N], None if probs_BNV is None else probs_BNV[:, :N])

    def _sample(
        self,
        logits_BMW: Tensor,
        level: _Level,
        probs_BNV: Tensor,
        positions_B: Tensor,
        keys_B: Tensor,
    ) -> Tensor:
        """Draw each node's children without replacement; record the law they came from."""
        q_BMW = processed_probs(logits_BMW, self.sampling)
        q_BMW = q_BMW.expand(-1, len(level.expanded), -1)
        vocab = self.head.vocab
        probs_BNV[:, level.expanded] = q_BMW if vocab is None else vocab.spread(q_BMW)
        nodes_M = torch.tensor(level.expanded, device=q_BMW.device)
        noise_BMW = uniforms(
            self.sampling.seed,
            keys_B,
            positions_B[:, None, None],
            DRAFT,
            nodes_M[:, None],
            torch.arange(q_BMW.shape[-1], device=q_BMW.device),
        )
        return sample_without_replacement(q_BMW, noise_BMW, level.candidates)


def top_ids(logits: Tensor, k: int) -> Tensor:
    """Return the ids [.., k] of the k largest logits, best first, ties to the lowest id."""
    if k == 1:
        return logits.max(-1, keepdim=True).indices
    bits = logits.float().view(torch.int32)
    # The bits of a float, its magnitude flipped when negative, sort like the float itself.
    rising = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    width = logits.shape[-1]
    low_id_first = torch.arange(width - 1, -1, -1, device=logits.device)
    return width - 1 - (rising * width + low_id_first).topk(k, dim=-1).values.remainder(width)


def require_finite(logits: Tensor, whose: str) -> None:
    """Raise RuntimeError where the best logit of a row [.., W] is no number, or infinite.

    A device is not waited for: there the error comes with the round's synchronisation.
    """
    torch._assert_async(logits.amax(-1).isfinite().all(), f"{whose} logits are not finite")


def best_log_prob(logits_BW: Tensor) -> Tensor:
    """Return the log probability [B] of the likeliest token, at temperature 1, in fp32."""
    logits_BW = logits_BW.float()
    return logits_BW.amax(-1) - logits_BW.logsumexp(-1)


def _refuse_gaps(shape: TreeShape) -> None:
    """Refuse sampled children with a rank left out: dropping a drawn one is not lossless."""
    paths = set(shape.choices)
    for path in shape.choices:
        if path[-1] > 0 and (*path[:-1], path[-1] - 1) not in paths:
            raise ValueError(
                f"tree.choices: path {list(path)} without rank {path[-1] - 1} beside it; "
                "tree.children=sampled needs ranks without gaps"
            )


def _plan(shape: TreeShape) -> list[_Level]:
    """List, depth by depth, which nodes are expanded and where their children go.

    Slots are how a head knows drafted nodes: the root is 0, stepped nodes follow in step order.
    """
    parents, ranks, depths = (t.tolist() for t in (shape.parents_N, shape.ranks_N, shape.depth_N))
    slot_of, levels = {0: 0}, []
    device = shape.parents_N.device
    for depth in range(shape.max_depth):
        children = [n for n in range(shape.num_nodes) if depths[n] == depth + 1]
        expanded = sorted({parents[n] for n in children})
        slots = [slot_of[parents[n]] for n in expanded] if depth > 0 else [0]
        if depth > 0:
            slot_of |= {n: len(slot_of) + i for i, n in enumerate(expanded)}
        levels.append(
            _Level(
                expanded,
                torch.tensor(slots, device=device),
                torch.tensor(children, device=device),
                torch.tensor([expanded.index(parents[n]) for n in children], device=device),
                torch.tensor([ranks[n] for n in children], device=device),
                max(ranks[n] for n in children) + 1,
            )
        )
    return levels
