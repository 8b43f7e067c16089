"""What two ranks tell of a run together; started by torchrun: `-m meter_job KIND DIRECTORY`.

Every rank writes what it found to DIRECTORY/RANK.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from parallel_job import Losses, backend, new_head
from torch import Tensor
from training import Line, chat_target, numbers_batch, random_rows, token_row

from headstart.data.features import OnlineFeatures
from headstart.heads.base import FeatureBatch, LossSums
from headstart.ranks import leave_group
from headstart.train.loop import Hooks, train_head
from headstart.train.meters import peak_memory, teacher_forced
from headstart.train.parallel import Parallel
from headstart.train.step import train_step

PARTS = chat_target().parts
ROWS = random_rows(8, seed=4)


class Scored(Line):
    """Line, whose draft is right where the id is 4."""

    def forward(self, batch: FeatureBatch, *arguments: Any) -> LossSums:
        """Return Line's sums and, in eval mode, how many ids are right."""
        sums = super().forward(batch, *arguments)
        if not self.training:
            right = (batch.tokens_BT == 4).sum()[None].float()
            counted = batch.loss_mask_BT.sum()[None].float()
            sums.metrics = {"top1_agreement": (right, counted), "joint_agreement": (right, counted)}
        return sums


class Spoilt(Line):
    """Line, whose gradient is not a number on the rank told, though its loss is one."""

    def __init__(self, spoils: bool) -> None:
        super().__init__()
        self.spoils = spoils

    def forward(self, *arguments: Any) -> LossSums:
        """Return Line's sums, and spoil what comes back through them."""
        sums = super().forward(*arguments)
        if self.spoils:
            sums.numerators["line"].register_hook(lambda gradient: gradient * float("nan"))
        return sums


def accuracy(kind: str) -> dict[str, float]:
    """P31: rank 0 has one supervised token, which is right, rank 1 three that are wrong."""
    parallel, _ = backend(kind)
    model, _ = parallel.prepare(Scored(), sgd)
    batch = [numbers_batch([4]), numbers_batch([1, 1, 1])][parallel.rank]
    return teacher_forced(model, [batch], PARTS, parallel)


def masked_rank(kind: str) -> dict[str, float]:
    """Rank 1 has a row that nobody learns from; a real head then has no metrics at all."""
    parallel, _ = backend(kind)
    head = new_head("medusa")
    model, _ = parallel.prepare(head, sgd)
    row = [ROWS[0], token_row("b", list(range(20, 33)), 13)][parallel.rank]
    batch = OnlineFeatures(chat_target(), [row]).batch([0])
    return teacher_forced(model, [batch], PARTS, parallel)


def sgd(head: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(head.parameters(), lr=1.0)


def infinite_loss(kind: str) -> dict[str, Any]:
    """Take a step in which rank 1 alone has a loss that is no number, in its second row."""
    parallel, _ = backend(kind)
    batch = numbers_batch([3], [5], row_id=10 * (1 + parallel.rank))
    if parallel.rank == 1:
        batch.tokens_BT = batch.tokens_BT * torch.tensor([[1.0], [float("nan")]])
    return refused(parallel, Line(), batch)


def infinite_gradient(kind: str) -> dict[str, Any]:
    """Take a step in which rank 1 alone has a gradient that is no number."""
    parallel, _ = backend(kind)
    return refused(parallel, Spoilt(parallel.rank == 1), numbers_batch([3], row_id=parallel.rank))


def refused(parallel: Parallel, head: Line, batch: FeatureBatch) -> dict[str, Any]:
    model, optimizer = parallel.prepare(head, sgd)
    before = parallel.weights(model)
    try:
        train_step(model, [batch], PARTS, optimizer, parallel, lr=1.0, clip=1.0, number=7)
    except ValueError as error:
        return {"said": str(error), "moved": not same(parallel.weights(model), before)}
    return {"said": ""}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, right[name]) for name, value in left.items())


def run(kind: str) -> dict[str, Any]:
    """Train with averages; return the figures of the last step and what would be served."""
    parallel, config = backend(kind, max_steps=4, log_every=2, ema=0.9, batch_rows=2)
    kept, losses = {}, Losses()
    head = new_head("eagle")
    train_head(
        head,
        OnlineFeatures(chat_target(), ROWS, head.aux_features),
        config,
        parallel=parallel,
        hooks=Hooks(lambda weights: {}, lambda weights, progress: kept.update(weights)),
        tracker=losses,
    )
    sums = {name: float(value.double().sum()) for name, value in sorted(kept.items())}
    return {"lines": losses.lines, "served": sums}


def main(kind: str, directory: Path) -> None:
    """Run everything and write what this rank found."""
    torch.set_num_threads(1)
    found = {"run": run(kind), "memory": peak_memory(backend(kind)[0])}
    if kind != "single":
        parts = (accuracy, masked_rank, infinite_loss, infinite_gradient)
        found |= {part.__name__: part(kind) for part in parts}
    rank = backend(kind)[0].rank
    (directory / f"{kind}-{rank}.json").write_text(json.dumps(found))
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
