"""An exponential moving average of a head's weights: smoother than the last step's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

RAMP = 10
"""Steps in which the average hardly remembers: its decay is (1 + n) / (RAMP + n) at most."""


def decay_at(step: int, decay: float) -> float:
    """Return the decay of step n = 1, 2, ...: it rises to `decay`, so that the start is forgotten.

    A constant decay would hold 0.999^1000 = 37 % of the first weights after 1000 steps.
    """
    return min(decay, (1 + step) / (RAMP + step))


class Ema:
    """Averages of a model's parameters, kept as the model keeps these: whole or in shards, fp32."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._averages = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after optimizer step `step`, counted from 1."""
        share = 1 - decay_at(step, self.decay)
        for average, weight in zip(self._averages, model.parameters(), strict=True):
            average.mul_(1 - share).add_(weight.detach(), alpha=share)

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Put the averages in the model's place of its weights, for as long as the block lasts."""
        own = [p.detach().clone() for p in model.parameters()]
        _set(model, self._averages)
        try:
            yield
        finally:
            _set(model, own)

    @torch.no_grad()
    def take(self, model: nn.Module) -> None:
        """Set the averages to the model's weights, as after loading them."""
        for average, weight in zip(self._averages, model.parameters(), strict=True):
            average.copy_(weight.detach())


@torch.no_grad()
def _set(model: nn.Module, values: list[Tensor]) -> None:
    for weight, value in zip(model.parameters(), values, strict=True):
        weight.copy_(value)
