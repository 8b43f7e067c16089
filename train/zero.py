"""ZeRO 1 to 3: DeepSpeed's engine through accelerate's plugin, in fp32 over rank-wide gathers.

Stage 1 splits optimizer state over ranks, stage 2 gradients too, stage 3 weights too. The engine
clips, and counts micro-batches itself: it updates at the last one of a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from headstart.heads.base import DraftHead
from headstart.train.parallel import MakeOptimizer, OptimizerState, Parallel, flat_state


class Zero(Parallel):
    """DeepSpeed's engine; deepspeed is imported only where it is used, as that takes seconds."""

    def prepare(
        self, head: DraftHead, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Make the engine; the weights are rank 0's on every rank; collective."""
        model, optimizer = self._head_loss(head), make_optimizer(head)
        self._engine, optimizer = self._accelerator.prepare(model, optimizer)
        return self._engine, optimizer

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Count the micro-batch inside; the engine updates nothing before a step's last one."""
        yield
        model.step()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's share of the loss; the engine takes means over ranks."""
        self._engine.backward(loss * self.world, scale_wrt_gas=False)

    def clip_and_step(self, model: nn.Module, optimizer: Optimizer, clip: float) -> Tensor:
        """Let the engine clip, by the norm it was configured with, and update; return the norm.

        It updates whatever the norm is: one that is not finite ends the run after the fact.
        """
        model.step()
        return torch.as_tensor(model.get_global_grad_norm())

    # Whole tensors

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of the whole weights, fp32 on the CPU, on rank 0, else {}; collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        named = self.bare(model).named_parameters()
        return self._kept((name, safe_get_full_fp32_param(weight)) for name, weight in named)

    def load_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Set the weights to rank 0's, those of the passes and the optimizer's; collective."""
        from deepspeed import zero

        own = dict(self.bare(model).named_parameters())
        for name, value in self._spread(weights):
            with torch.no_grad(), zero.GatheredParameters([own[name]], modifier_rank=0):
                own[name].copy_(value)
            self._set(own[name], value)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return copies of the whole optimizer state on rank 0, else {}; collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        inner = model.optimizer.optimizer.state
        common = next(iter(inner.values()), {})
        state: OptimizerState = {}
        for name, weight in self.bare(model).named_parameters():
            state[name] = self._kept(
                (key, value if _is_count(value) else safe_get_full_optimizer_state(weight, key))
                for key, value in common.items()
            )
        return state if self.is_main else {}

    def load_optimizer_state(
        self, model: nn.Module, optimizer: Optimizer, state: OptimizerState
    ) -> None:
        """Set the optimizer's state to rank 0's; collective."""
        own = dict(self.bare(model).named_parameters())
        first = next(iter(state.values()), {})
        counts = {key: value for key, value in first.items() if _is_count(value)}
        keys = self.broadcast([key for key in first if key not in counts])
        self._make_state(model, keys, self.broadcast(counts))
        for (name, key), value in self._spread(flat_state(state)):
            if key in keys:
                self._set(own[name], value, key)

    def _make_state(self, model: nn.Module, keys: list[str], counts: dict[str, Tensor]) -> None:
        """Make the state that the first step would make; it lies in flat parts of many weights."""
        zero = model.optimizer
        stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
        parts = (
            zero.fp32_partitioned_groups_flat if stage3 else zero.single_partition_of_fp32_groups
        )
        for part in parts:
            made = {key: torch.zeros_like(part) for key in keys}
            zero.optimizer.state[part] = made | {
                key: value.to(part.device, copy=True) for key, value in counts.items()
            }
        if not stage3:
            zero._lazy_init_hp_params_optimizer_state()

    def _set(self, weight: nn.Parameter, value: Tensor, key: str | None = None) -> None:
        """Put this rank's part of a weight, or of its optimizer state, into the engine."""
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if hasattr(weight, "ds_id"):
            self._set_stage3(weight, value, key)
        elif key is None:
            safe_set_full_fp32_param(weight, value)
        else:
            safe_set_full_optimizer_state(weight, value, key)

    def _set_stage3(self, weight: nn.Parameter, value: Tensor, key: str | None) -> None:
        # Not its own setting of whole tensors: that fails where the ranks do not divide one.
        from deepspeed.utils import (
            safe_get_local_fp32_param,
            safe_get_local_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        if key is None:
            size = safe_get_local_fp32_param(weight).numel()
        else:
            size = safe_get_local_optimizer_state(weight, key).numel()
        padded = F.pad(value.flatten(), (0, size * self.world - value.numel()))
        part = padded[size * self.rank : size * (self.rank + 1)]
        if key is None:
            safe_set_local_fp32_param(weight, part)
        else:
            safe_set_local_optimizer_state(weight, part, key)


def _is_count(value: Tensor) -> bool:
    """Tell a count of steps, one for all weights, from what is as large as a weight."""
    return value.dim() == 0
