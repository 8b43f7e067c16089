"""FSDP2: torch's own `fully_shard` over all ranks, on CPU and GPU alike.

Weights, gradients and optimizer state lie in equal parts on all ranks. The head is one unit: a
head is about one layer, its passes call that layer several times and read some weights outside
of any module, so all of it is gathered for a pass and let go of after the backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from headstart.heads.base import DraftHead
from headstart.train.parallel import HeadLoss, MakeOptimizer, Parallel


class Sharded(Parallel):
    """FSDP2 over all ranks; accelerate, which ignores it on CPU, only forms the process group."""

    def prepare(
        self, head: DraftHead, make_optimizer: MakeOptimizer
    ) -> tuple[nn.Module, Optimizer]:
        """Give every rank the weights of rank 0, shard them, and make the optimizer; collective."""
        model = self._head_loss(head)
        for weight in head.parameters():
            dist.broadcast(weight.data, src=0)
        mesh = init_device_mesh(self.device.type, (self.world,))
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        return model, make_optimizer(head)

    def bare(self, model: HeadLoss) -> DraftHead:
        """Return the head, whose weights are sharded outside of a pass."""
        return model.head

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Keep the gradients of the passes inside whole and on this rank."""
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    def _whole(self, value: Tensor) -> Tensor:
        return value.full_tensor() if isinstance(value, DTensor) else value

    def _shard(self, value: Tensor, like: DTensor) -> Tensor:
        if value.shape != like.shape:
            return value
        # Every rank has the whole value: nothing is sent.
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
