"""How a head trains on the ranks of a job: one interface, whatever the backend.

Only the head is wrapped; the target stays outside. Losses are this rank's sums over the counts of
all ranks, so gradients are added up: every backend takes means over ranks, so its loss is
multiplied by their number. Weights are fp32 everywhere, and low precision is autocast's; so all
backends compute the same.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim import Optimizer

from headstart.heads.base import DraftHead, FeatureBatch
from headstart.heads.parts import TargetParts

Key = TypeVar("Key")
MakeOptimizer = Callable[[DraftHead], Optimizer]
OptimizerState = dict[str, dict[str, Tensor]]
"""Parameter name -> state name -> whole tensor, the same whatever the backend."""


class HeadLoss(nn.Module):
    """What is wrapped: a head and its loss, a single tensor out that every backend's hooks see."""

    def __init__(self, head: DraftHead, autocast: Callable[[], AbstractContextManager]) -> None:
        super().__init__()
        self.head, self._autocast = head, autocast
        self.metrics: dict[str, tuple[Tensor, Tensor]] = {}

    def forward(
        self,
        batch: FeatureBatch,
        parts: TargetParts,
        generator: torch.Generator | None,
        denominators: dict[str, Tensor],
    ) -> Tensor:
        """Return this batch's share of the loss of a step with these global denominators."""
        with self._autocast():  # in here: DeepSpeed turns off what is outside of its engine
            # Not head(...): ZeRO 3 gathers again, for the backward pass, what a module reads of
            # others' weights (a read-out's rows), if it knows the module's output: not LossSums.
            sums = self.head.forward(batch, parts, generator, denominators)
        self.metrics = sums.metrics
        return sums.total(denominators)


class Parallel:
    """One process, or DDP over several, as accelerate has them; other backends extend it.

    Methods named collective must be called on every rank.
    """

    def __init__(self, accelerator: Accelerator, precision: str) -> None:
        self._accelerator, self._bf16 = accelerator, precision == "bf16"
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
        """Wrap the head for training and make the optimizer of its parameters; collective.

        What is returned is called as `HeadLoss`. The weights are rank 0's on every rank.
        """
        return self._accelerator.prepare_model(self._head_loss(head)), make_optimizer(head)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass: bf16 over fp32 weights, if configured."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context of forward and backward passes before the last one of a step."""
        return model.no_sync() if self.world > 1 else nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of this rank's share of the loss."""
        (loss * self.world).backward()

    def clip_and_step(self, model: nn.Module, optimizer: Optimizer, clip: float) -> Tensor:
        """Clip by the global norm, update, clear the gradients; return the norm before clipping.

        A norm that is not finite updates nothing: the weights could not be had back.
        """
        norm = self._whole(nn.utils.clip_grad_norm_(model.parameters(), clip))
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm

    def _head_loss(self, head: DraftHead) -> HeadLoss:
        self._loss = HeadLoss(head.to(self.device), self.autocast)
        return self._loss

    @property
    def metrics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The metric sums of this rank's last pass, which are there in eval mode only."""
        return self._loss.metrics

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
        return getattr(model, "module", model).head

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of the whole weights, fp32 on the CPU, on rank 0, else {}; collective."""
        named = self.bare(model).named_parameters()
        return self._kept((name, self._whole(weight)) for name, weight in named)

    def load_weights(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        """Set the weights to rank 0's; collective."""
        own = dict(self.bare(model).named_parameters())
        with torch.no_grad():
            for name, value in self._spread(weights):
                own[name].copy_(self._shard(value, own[name]))

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> OptimizerState:
        """Return copies of the whole optimizer state on rank 0, else {}; collective."""
        state: OptimizerState = {}
        for name, weight in self.bare(model).named_parameters():
            values = optimizer.state[weight].items()
            state[name] = self._kept((key, self._whole(value)) for key, value in values)
        return state if self.is_main else {}

    def load_optimizer_state(
        self, model: nn.Module, optimizer: Optimizer, state: OptimizerState
    ) -> None:
        """Set the optimizer's state to rank 0's; collective."""
        own = dict(self.bare(model).named_parameters())
        whole: dict[Tensor, dict[str, Tensor]] = {weight: {} for weight in own.values()}
        for (name, key), value in self._spread(flat_state(state)):
            whole[own[name]][key] = self._shard(value, own[name])
        held = [weight for group in optimizer.param_groups for weight in group["params"]]
        # Its own loading puts each tensor on the device and in the type that its step needs.
        optimizer.load_state_dict(
            {
                "state": {i: whole[weight] for i, weight in enumerate(held)},
                "param_groups": optimizer.state_dict()["param_groups"],
            }
        )

    def _whole(self, value: Tensor) -> Tensor:
        """Return the whole of what may be a part; collective."""
        return value

    def _shard(self, value: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor that is as large as the weight `like`."""
        return value

    def _kept(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Go through tensors on every rank, and return copies of them on rank 0."""
        kept = {}
        for name, value in tensors:
            if self.is_main:
                kept[name] = value.detach().to("cpu", torch.float32, copy=True)
        return kept

    def _spread(self, tensors: dict[Key, Tensor]) -> Iterator[tuple[Key, Tensor]]:
        """Yield rank 0's tensors by name on every rank, one at a time; collective."""
        shapes = self.broadcast([(name, v.shape, v.dtype) for name, v in tensors.items()])
        for name, shape, dtype in shapes:
            empty = torch.empty(shape, dtype=dtype, device=self.device)
            value = tensors[name].to(self.device) if self.is_main else empty
            if self.world > 1:
                dist.broadcast(value, src=0)
            yield name, value


def flat_state(state: OptimizerState) -> dict[tuple[str, str], Tensor]:
    """Return the tensors of an optimizer's state by (parameter name, state name)."""
    return {(name, key): value for name, one in state.items() for key, value in one.items()}
