"""One optimizer step over a window of micro-batches on every rank.

The loss of a step is a sum over all its micro-batches on all ranks divided by the count of
supervised tokens in all of them: never a mean of means. The last window of an epoch is filled up
with micro-batches whose loss does not count, and is divided by the count of the others.
"""

import math
from contextlib import nullcontext

import torch
from torch import Tensor

from headstart.heads.base import FeatureBatch
from headstart.heads.parts import TargetParts
from headstart.train.clock import StageClock
from headstart.train.guard import refuse_non_finite
from headstart.train.parallel import Parallel


def train_step(
    model: torch.nn.Module,
    batches: list[FeatureBatch],
    parts: TargetParts,
    optimizer: torch.optim.Optimizer,
    parallel: Parallel,
    *,
    lr: float,
    clip: float,
    generator: torch.Generator | None = None,
    clock: StageClock | None = None,
    number: int = 1,
) -> tuple[float, float]:
    """Take one optimizer step; return its loss over all ranks and its global gradient norm.

    Raises ValueError, on all ranks, when the loss or the gradient of one is not finite: the message
    names step `number`, the rank and its rows, and no weight has moved.
    """
    clock = clock or StageClock(parallel.device)
    with clock("head"):
        total = _forth_and_back(model, batches, parts, parallel, generator)
        # Asked for before the update: a weight that is not finite cannot be taken back.
        loss, own_loss = torch.stack((parallel.sum(total), total)).tolist()
    if not math.isfinite(loss):
        refuse_non_finite(number, loss, math.nan, own_loss, batches, parallel)
    for group in optimizer.param_groups:
        group["lr"] = lr
    with clock("optimizer"):
        norm = parallel.clip_and_step(model, optimizer, clip).item()
    if not math.isfinite(norm):
        refuse_non_finite(number, loss, norm, own_loss, batches, parallel)
    return loss, norm


def _forth_and_back(
    model: torch.nn.Module,
    batches: list[FeatureBatch],
    parts: TargetParts,
    parallel: Parallel,
    generator: torch.Generator | None,
) -> Tensor:
    """Leave the gradients of the whole window, and return this rank's share of the loss."""
    head = parallel.bare(model)
    denominators = global_sums([head.denominators(batch) for batch in batches], parallel)
    total = torch.zeros((), device=parallel.device)
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        # Gradients are summed over ranks once a step, in the last backward pass.
        with nullcontext() if last else parallel.no_sync(model):
            loss = model(batch, parts, generator, denominators)
            parallel.backward(loss)
        total += loss.detach()
    return total


def global_sums(counts: list[dict[str, Tensor]], parallel: Parallel) -> dict[str, Tensor]:
    """Return the sum of counts by name over a list of them and over all ranks."""
    total: dict[str, Tensor] = {}
    for one in counts:
        add(total, one)
    flat = parallel.sum(torch.cat([value.flatten() for value in total.values()]))  # in one go
    parts = flat.split([value.numel() for value in total.values()])
    return {name: part.view_as(total[name]) for name, part in zip(total, parts, strict=True)}


def add(total: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    """Add tensors by name to those of `total`, in place."""
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value
