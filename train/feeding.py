"""What feeds the loop: this rank's micro-batches of every step, with their features."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from headstart.data.ahead import read_ahead
from headstart.data.batching import Dealing, MicroBatch, steps_forever
from headstart.data.features import (
    FeatureSource,
    OnlineFeatures,
    PackedFeatures,
    ranks_together,
)
from headstart.heads.base import FeatureBatch
from headstart.train.clock import StageClock
from headstart.train.config import TrainConfig
from headstart.train.parallel import Parallel
from headstart.train.progress import Progress

Fed = tuple[tuple[int, list[MicroBatch]], list[FeatureBatch]]
"""((epoch, micro-batches), their features) of one optimizer step."""


def loaded_steps(
    source: FeatureSource,
    config: TrainConfig,
    parallel: Parallel,
    progress: Progress,
    clock: StageClock,
) -> Iterator[Fed]:
    """Yield ((epoch, micro-batches), their features) of one optimizer step after the other.

    The first is the one after `progress`. Ranks that run the target together get the same rows,
    which count on the first of them alone. Closing the iterator ends its threads. The passes of an
    online target are a stage of their own to the clock.
    """
    together = ranks_together(source)
    online = source.source if isinstance(source, PackedFeatures) else source
    if isinstance(online, OnlineFeatures):
        online.stage = clock
    dealing = Dealing(
        config.batch_rows,
        config.accumulation,
        config.seed,
        config.pack_tokens,
        parallel.rank // together,
        parallel.world // together,
    )
    steps = steps_forever(source.lengths, dealing, progress.epoch, progress.in_epoch)
    if parallel.rank % together:
        steps = ((epoch, [replace(m, filler=True) for m in window]) for epoch, window in steps)
    # The target is not run beside the step: evaluation uses it too, and its taps are hooks.
    workers = config.workers if config.features == "captured" else 0
    pinned = workers > 0 and parallel.device.type == "cuda"  # by the thread that reads ahead

    def load(step: tuple[int, list[MicroBatch]]) -> list[FeatureBatch]:
        batches = [_features(source, micro) for micro in step[1]]
        return [batch.pinned() for batch in batches] if pinned else batches

    return read_ahead(steps, load, workers)


def _features(source: FeatureSource, micro: MicroBatch) -> FeatureBatch:
    batch = source.batch(micro.rows)
    if micro.filler:
        batch = replace(batch, loss_mask_BT=torch.zeros_like(batch.loss_mask_BT))
    return batch
