"""How far a run is: counts and seconds over everything seen, the same on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headstart.heads.base import FeatureBatch
from headstart.train.clock import STAGES
from headstart.train.config import TrainConfig
from headstart.train.parallel import Parallel


@dataclass
class Progress:
    """How far a run is; sums over everything seen by all ranks, repeats included.

    Plain values, which training checkpoints hold: what a run must know of its past is here.
    """

    step: int = 0
    epoch: int = 0
    in_epoch: int = 0
    """Steps of this epoch."""
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    """Training only, by rank 0's clock."""
    by_stage: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    evaluated: int = 0
    """Step of the last evaluation."""
    best: dict[str, Any] | None = None
    """Figure, value and step of the best evaluation; None before the first."""

    def fraction(self, config: TrainConfig, ahead: float = 0.0) -> float:
        """Return how much of the budget is used, in [0, 1]: the larger of steps and seconds.

        `ahead` counts steps not taken yet: half of the coming one sets its learning rate.
        """
        parts = [0.0]
        if config.max_steps is not None:
            parts.append((self.step + ahead) / config.max_steps)
        if config.max_seconds is not None:
            parts.append(self.seconds / config.max_seconds)
        return min(1.0, max(parts))

    def count(
        self,
        epoch: int,
        batches: Sequence[FeatureBatch],
        by_stage: dict[str, float],
        parallel: Parallel,
    ) -> None:
        """Count one step: this rank's batches of every rank, and rank 0's seconds by stage.

        Stages that are not of training are left out. Every rank gets the same figures: they end
        the run, and set the learning rate.
        """
        counts = torch.zeros(3, dtype=torch.float64)
        for batch in batches:
            counts[0] += int((batch.document_BT.amax(1) + 1).sum())
            counts[1] += int((batch.document_BT >= 0).sum())
            counts[2] += int(batch.loss_mask_BT.sum())
        seconds = [by_stage.get(stage, 0.0) * parallel.is_main for stage in STAGES]
        seconds = torch.tensor(seconds, dtype=torch.float64)
        summed = parallel.sum(torch.cat((counts, seconds)).to(parallel.device)).tolist()
        self.step += 1
        self.in_epoch = self.in_epoch + 1 if epoch == self.epoch else 1
        self.epoch = epoch
        self.rows += int(summed[0])
        self.tokens += int(summed[1])
        self.supervised_tokens += int(summed[2])
        for stage, value in zip(STAGES, summed[3:], strict=True):
            self.by_stage[stage] += value
        self.seconds += sum(summed[3:])
