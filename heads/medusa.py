"""Medusa-1 heads (arXiv 2401.10774): K residual heads on the last state, all depths in one pass.

Head k (from 0) at position t predicts token t+2+k; its teacher is the target at t+1+k. Blocks start
at zero and the read-out at the target's, so an untrained head equals the target's next-token law.
Shapes: B rows, T tokens, D width, W draft vocabulary, K heads, M new pairs, R rows of a pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import DraftHead, FeatureBatch, HeadConfig, LossSums, register
from headstart.heads.losses import (
    Distillation,
    Selection,
    Teacher,
    distill,
    loss_terms,
    select,
    token_denominators,
)
from headstart.heads.parts import TargetParts
from headstart.heads.target import TargetShape
from headstart.heads.vocab import DraftVocab

READOUTS = ("tied", "own")


@dataclass
class MedusaConfig(HeadConfig):
    """Medusa-1: independent heads, each a stack of residual blocks and a read-out."""

    num_heads: int = 4
    """Future tokens predicted in one pass."""
    num_blocks: int = 1
    """Residual blocks a head."""
    readout: str = "tied"
    """tied: the target's frozen rows; own: a trainable copy a head."""
    depth_decay: float = 0.8
    """Weight of head k is depth_decay ** (k + 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "num_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"head.{name}={getattr(self, name)}: need at least one")
        if self.readout not in READOUTS:
            raise ValueError(f"head.readout={self.readout}: expected one of {', '.join(READOUTS)}")
        if not 0 < self.depth_decay <= 1:
            raise ValueError(f"head.depth_decay={self.depth_decay}: expected 0 < decay <= 1")


class ResidualBlock(nn.Module):
    """y + SiLU(W y + b), W and b zero at the start."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        return x + F.silu(self.linear(x))


def distilled_by_head(
    head: DraftHead,
    student_NKD: Tensor,
    picked: Selection,
    batch: FeatureBatch,
    parts: TargetParts,
) -> LossSums:
    """Return the token losses of K heads, head k read out by its own rows or by the target's.

    `head` has `lm_heads_KWD` and, in its config, `depth_decay`: Medusa's kind.
    """
    task = Distillation(
        Teacher.at(batch, picked), head.draft_readout(parts), head.config, head.vocab
    )
    numerators, metrics = distill(student_NKD, task, head.lm_heads_KWD, metrics=not head.training)
    depth_K = torch.arange(student_NKD.shape[1], device=student_NKD.device)
    decay_K = head.config.depth_decay ** (depth_K + 1.0)
    return LossSums(
        numerators,
        {name: weight * decay_K for name, weight in loss_terms(head.config).items()},
        metrics,
    )


@dataclass
class MedusaState:
    """The last verified state of each row: all that Medusa drafts from."""

    hidden_BD: Tensor

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row over another."""
        self.hidden_BD[destination] = self.hidden_BD[source]

    def reset(self, row: int) -> None:
        """Forget one row."""
        self.hidden_BD[row] = 0


@register("medusa", MedusaConfig)
class MedusaHead(DraftHead):
    """K heads over the post-norm state of the last verified position; nothing is fed back."""

    config: MedusaConfig

    def __init__(self, config: MedusaConfig, shape: TargetShape, vocab: DraftVocab | None) -> None:
        super().__init__(config, shape, vocab)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(shape.hidden_size) for _ in range(config.num_blocks)))
            for _ in range(config.num_heads)
        )
        own = (config.num_heads, self.num_draft_tokens, shape.hidden_size)
        self.lm_heads_KWD = nn.Parameter(torch.zeros(own)) if config.readout == "own" else None

    @property
    def max_depth(self) -> int:
        """One depth a head."""
        return self.config.num_heads

    @property
    def depths_at_once(self) -> int:
        """All of them."""
        return self.config.num_heads

    def initialise(self, parts: TargetParts) -> None:
        """Zero the blocks; copy the target's rows into own read-outs."""
        for head in self.heads:
            for block in head:
                nn.init.zeros_(block.linear.weight)
                nn.init.zeros_(block.linear.bias)
        if self.lm_heads_KWD is not None:
            self.copy_target_rows(self.lm_heads_KWD, parts, instead="tied")

    def denominators(self, batch: FeatureBatch) -> dict[str, Tensor]:
        """Count supervised positions a head."""
        picked = select(batch, self.config.num_heads, self.config, self.vocab)
        return token_denominators(picked, self.config)

    def forward(
        self,
        batch: FeatureBatch,
        parts: TargetParts,
        generator: torch.Generator | None = None,
        denominators: dict[str, Tensor] | None = None,
    ) -> LossSums:
        """Return the loss sums by head."""
        picked = select(
            batch,
            self.config.num_heads,
            self.config,
            self.vocab,
            all_supervised=not self.training,
        )
        hidden_BTD = batch.hidden_BTD.to(self.heads[0][0].linear.weight.dtype)
        states_BTKD = torch.stack([head(hidden_BTD) for head in self.heads], dim=2)
        depth_K = torch.arange(self.config.num_heads, device=hidden_BTD.device)
        student_NKD = states_BTKD[picked.row_N[:, None], picked.student_NK, depth_K]
        return distilled_by_head(self, student_NKD, picked, batch, parts)

    def new_state(
        self, batch: int, max_len: int, max_nodes: int, parts: TargetParts
    ) -> MedusaState:
        """Make an empty drafting state."""
        weight = parts.readout.weight_WD
        shape = (batch, self.shape.hidden_size)
        return MedusaState(torch.zeros(shape, dtype=weight.dtype, device=weight.device))

    def extend(
        self,
        state: MedusaState,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        parts: TargetParts,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Return logits [R, K, W] from each row's last verified state."""
        R = len(counts)
        last = torch.tensor(counts, device=hidden_RMD.device) - 1
        hidden_RD = hidden_RMD[torch.arange(R, device=last.device), last]
        state.hidden_BD[slice(0, R) if rows is None else list(rows)] = hidden_RD
        states_RKD = torch.stack([head(hidden_RD) for head in self.heads], dim=1)
        readout = self.draft_readout(parts)
        if self.lm_heads_KWD is None:
            return readout(states_RKD)
        return readout.post(torch.einsum("rkd,kwd->rkw", states_RKD, self.lm_heads_KWD))
