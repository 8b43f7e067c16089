"""A target that all ranks of a job run together: states, features and training steps for a test.

`torchrun --nproc-per-node 2 -m tensor_job DIRECTORY`, which holds a saved target; each rank writes
DIRECTORY/RANK.pt, and together they make DIRECTORY/store.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from models import make_head
from training import random_rows, token_row

from headstart.data.capture import capture
from headstart.data.features import OnlineFeatures
from headstart.data.rows import RowsMeta
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.target import Target
from headstart.ranks import leave_group
from headstart.train.backends import make_parallel
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.loop import Hooks, train_head

ROWS = [*random_rows(9, seed=2), token_row("row-zzz", list(range(20, 33)), 13)]
TAPS = (1, 2)


class Lines(list):
    """Keeps the losses that the loop reports."""

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Keep a loss."""
        self += [figures["train/loss"]] if "train/loss" in figures else []


def states(target: Target) -> dict[str, torch.Tensor]:
    """Return what a pass over fixed tokens gives, and the parts that heads are passed."""
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(target.shape.vocab_size, (2, 19), generator=generator)
    output = target.forward(tokens_BT, taps=TAPS)
    return {
        "hidden": output.hidden_BTD,
        "embedding": target.parts.embedding_VD,
        "readout": target.parts.readout.weight_WD,
    } | {str(s): states_BTD for s, states_BTD in output.aux.items()}


def losses(target: Target, kind: str) -> tuple[list[float], list[int]]:
    """Train five steps of two micro-batches with the target in the loop."""
    config = TrainConfig(
        batch_rows=2, accumulation=2, max_steps=5, precision="fp32", features="online", log_every=1
    )
    head, lines = make_head("eagle3", target, aux=[1, 2], ttt_steps=2), Lines()
    progress = train_head(
        head.train(),
        OnlineFeatures(target, ROWS, head.aux_features),
        config,
        parallel=make_parallel(ParallelConfig(kind), config, target.device),
        hooks=Hooks(lambda weights: {}, lambda weights, progress: None),
        tracker=lines,
    )
    return list(lines), [progress.rows, progress.tokens, progress.supervised_tokens]


def refusal(target: Target) -> str:
    """Return what decoding says."""
    try:
        target.new_cache(1, 64, 4)
    except ValueError as error:
        return str(error)
    return "decodes"


def main(directory: Path) -> None:
    """Load the target over all ranks and write what came of it."""
    torch.set_num_threads(1)
    target = load_target(TargetConfig(str(directory), dtype="float32", parallel="tensor"))
    local = target.layers[0].mlp.up_proj.weight.to_local()
    found = {
        "states": states(target),
        "fingerprint": target.fingerprint,
        "rows of up_proj": len(local),
        "refusal": refusal(target),
        "training": losses(target, "ddp"),
    }
    capture(target, ROWS, directory / "store", meta=RowsMeta("", "t", {}), taps=TAPS)
    torch.save(found, directory / f"{torch.distributed.get_rank()}.pt")
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
