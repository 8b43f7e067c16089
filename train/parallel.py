"""How a head trains on the ranks of a job: one interface, whatever the backend.

Only the head is wrapped; the target stays outside. Losses are this rank's sums over the counts of
all ranks, so gradients are added up: a backend that takes means has its loss multiplied by what
it divides by.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor, nn
from torch.optim import Optimizer

from headstart.heads.base import DraftHead
from headstart.train.config import PRECISIONS, ParallelConfig, TrainConfig

MakeOptimizer = Callable[[nn.Module], Optimizer]
OptimizerState = dict[str, dict[str, Tensor]]
"""Parameter name -> state name -> whole tensor, the same whatever the backend."""


class Parallel:
    """One process, or DDP over several: what accelerate does; other backends extend it.

    Methods named collective must be called on every rank.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.world: int = accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Tell whether this is rank 0, which writes files."""
        return self.rank == 0

    # One step

    def prepare(
        self, head: DraftHead, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Wrap the head for training and make the optimizer of its parameters; collective."""
        head = head.to(self.device)
        return self._accelerator.prepare(head, make_optimizer(head))

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass: low precision over fp32 weights, if configured."""
        return self._accelerator.autocast()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context of forward and backward passes whose gradients stay on this rank."""
        return model.no_sync() if self.world > 1 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's share of the loss; DDP takes the mean over ranks."""
        self._accelerator.backward(loss * self.world)

    def clip_and_step(self, model: nn.Module, optimizer: Optimizer, clip: float) -> Tensor:
        """Clip by the global norm, update, clear the gradients; return the norm before clipping.

        A norm that is not finite updates nothing: weights could not be had back.
        """
        norm = self._accelerator.clip_grad_norm_(model.parameters(), clip)
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    # Between ranks

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks; collective."""
        if self.world > 1:
            value = value.clone()
            dist.all_reduce(value)
        return value

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's object; collective."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in their order; collective."""
        values = [value]
        if self.world > 1:
            values = [None] * self.world
            dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every rank is here; collective."""
        if self.world > 1:
            dist.barrier()

    # Whole tensors

    def bare(self, model: nn.Module) -> DraftHead:
        """Return the head inside the wrapper."""
        return self._accelerator.unwrap_model(model)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of the whole weights, fp32 on the CPU, on rank 0, else {}; collective."""
        if not self.is_main:
            return {}
        return {name: _copy(value) for name, value in self.bare(model).state_dict().items()}

    def load_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Set the weights to rank 0's; collective."""
        own = self.bare(model).state_dict()
        for name, value in self._spread(weights):
            own[name].copy_(value)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return copies of the whole optimizer state on rank 0, else {}; collective."""
        if not self.is_main:
            return {}
        return {
            name: {key: _copy(value) for key, value in optimizer.state[weight].items()}
            for name, weight in self.bare(model).named_parameters()
        }

    def load_optimizer_state(
        self, model: nn.Module, optimizer: Optimizer, state: OptimizerState
    ) -> None:
        """Set the optimizer's state to rank 0's; collective."""
        flat = {f"{n}/{key}": value for n, one in state.items() for key, value in one.items()}
        whole: OptimizerState = {}
        for name, value in self._spread(flat):
            parameter, _, key = name.rpartition("/")
            whole.setdefault(parameter, {})[key] = value
        names = {weight: name for name, weight in self.bare(model).named_parameters()}
        held = [weight for group in optimizer.param_groups for weight in group["params"]]
        # Its own loading puts each tensor on the device and in the type that its step needs.
        optimizer.load_state_dict(
            {
                "state": {i: whole[names[weight]] for i, weight in enumerate(held)},
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        )

    def _spread(self, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield rank 0's tensors by name on every rank, one at a time; collective."""
        shapes = self.broadcast([(name, v.shape, v.dtype) for name, v in tensors.items()])
        for name, shape, dtype in shapes:
            empty = torch.empty(shape, dtype=dtype, device=self.device)
            value = tensors[name].to(self.device) if self.is_main else empty
            if self.world > 1:
                dist.broadcast(value, src=0)
            yield name, value


def _copy(value: Tensor) -> Tensor:
    dtype = torch.float32 if value.is_floating_point() else value.dtype
    return value.detach().to("cpu", dtype, copy=True)


def make_parallel(config: ParallelConfig, train: TrainConfig, device: torch.device) -> Parallel:
    """Return the backend of a config for a target on this device.

    One process may make several in turn, of different precisions. Raises RuntimeError when the
    processes that were started are not those the backend sees.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if config.kind == "single" and world != 1:
        raise RuntimeError(
            f"parallel=single in one of {world} processes: each would train alone; use parallel=ddp"
        )
    # Else the first one's precision binds the process, and a sweep over it fails at the second job.
    AcceleratorState._reset_state()
    accelerator = Accelerator(mixed_precision=PRECISIONS[train.precision], cpu=device.type == "cpu")
    if accelerator.num_processes != world:
        raise RuntimeError(
            f"parallel={config.kind}: {world} processes were started, accelerate sees "
            f"{accelerator.num_processes}"
        )
    return Parallel(accelerator)
