"""A training in a process of its own, to be killed and taken up: alone, or a rank of torchrun's.

`python -m train_job DIRECTORY OPTIONS`: OPTIONS are those of TrainConfig as JSON, and beside them
the head family, the parallel kind, seconds that every step takes longer, and a step in which the
process kills itself.
"""

import json
import logging
import os
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch
from training import chat_target, random_rows

from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.template import ChatTemplate
from headstart.eval.settings import TreeConfig
from headstart.heads.base import families
from headstart.heads.load import TargetConfig
from headstart.train import loop
from headstart.train import run as command
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.progress import Progress
from headstart.train.run import TrainRun, train

ROWS = 32
DEFAULTS = {
    "precision": "fp32",
    "max_steps": 20,
    "batch_rows": 2,
    "accumulation": 2,
    "log_every": 1,
    "eval_prompts": 0,
    "resume": "auto",
}
"""Eight steps an epoch."""
HEADS = {
    "medusa": {"draft_vocab_size": 64},
    "eagle": {"draft_vocab_size": 64, "feature_noise": 0.2},
    "eagle3": {"draft_vocab_size": 64, "aux": [1]},
}


def write_rows(directory: Path) -> None:
    """Write training rows and held-out rows, once."""
    template = ChatTemplate(chat_target().tokenizer).hash
    for name, rows in (("rows", random_rows(ROWS)), ("heldout", random_rows(3, seed=1))):
        writer = RowsWriter(directory / name, RowsMeta(chat_target().fingerprint, template, {}))
        for row in rows:
            writer.add(row)
        writer.finish("made for a test", {})


def job(
    directory: Path, *, head: str = "eagle", kind: str = "single", **options: object
) -> TrainRun:
    """Make the run of these options; its files are in `directory`."""
    return TrainRun(
        target=TargetConfig(path="in memory"),
        head=families()[head][0](**HEADS[head]),
        train=TrainConfig(**DEFAULTS | options),
        parallel=ParallelConfig(kind=kind),
        tree=TreeConfig(name="chain2", depth=2),
        rows=str(directory / "rows"),
        heldout_rows=str(directory / "heldout"),
        features=str(directory / "features"),
        out=str(directory / "out"),
    )


def run(
    directory: Path,
    *,
    die_in_step: int | None = None,
    die_in_evaluation: int | None = None,
    slow: float = 0.0,
    **options: object,
) -> Progress:
    """Train, every step `slow` seconds longer; kill -9 this very process in a step or evaluation.

    Both are counted from 1, from the start of this process.
    """
    steps, evaluations = count(1), count(1)
    take, evaluate = loop.train_step, command.heldout_figures

    def step(*arguments: object, **named: object) -> object:
        if next(steps) == die_in_step:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(slow)
        return take(*arguments, **named)

    def figures(*arguments: object) -> object:
        if next(evaluations) == die_in_evaluation:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(*arguments)

    loop.train_step, command.heldout_figures = step, figures
    try:
        return train(chat_target(), job(directory, **options))
    finally:
        loop.train_step, command.heldout_figures = take, evaluate


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    run(Path(sys.argv[1]), **json.loads(sys.argv[2]))
