"""A training in a process of its own, to be killed and taken up: alone, or a rank of torchrun's.

`python -m train_job DIRECTORY OPTIONS`: OPTIONS are those of TrainConfig as JSON, and beside them
the head family, the parallel kind, seconds that every step takes longer, and a step in which the
process kills itself. Without arguments it is a Nursery, and forks such runs.
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from training import chat_target, random_rows

from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.template import ChatTemplate
from headstart.eval.settings import TreeConfig
from headstart.heads.base import families
from headstart.heads.load import TargetConfig
from headstart.train import evaluation, loop
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
    "best_metric": "loss",
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
    take, evaluate = loop.train_step, evaluation.heldout_figures

    def step(*arguments: object, **named: object) -> object:
        if next(steps) == die_in_step:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(slow)
        return take(*arguments, **named)

    def figures(*arguments: object) -> object:
        if next(evaluations) == die_in_evaluation:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(*arguments)

    loop.train_step, evaluation.heldout_figures = step, figures
    try:
        return train(chat_target(), job(directory, **options))
    finally:
        loop.train_step, evaluation.heldout_figures = take, evaluate


class Nursery:
    """A process that has loaded everything and trained nothing: forks a run in a moment.

    A test that forked itself could not: autograd does not survive it.
    """

    def __init__(self, log: Path) -> None:
        paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "train_job"],
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("a"),
            text=True,
        )
        self.log = log

    def start(self, directory: Path, *, ranks: int = 1, **options: object) -> list[int]:
        """Start a run of one process, or of ranks as torchrun starts them; return their ids."""
        places: list[dict[str, str]] = [{}]
        if ranks > 1:
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            shared = meeting | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            places = [shared | {"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(ranks)]
        print(json.dumps([str(directory), options, places]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def wait(self) -> list[int]:
        """Return the exit codes of what was started last; -9 is a kill."""
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process; what it started has ended."""
        self._process.communicate()


def serve() -> None:
    """Fork the runs that are asked for on standard input, one request after the other."""
    chat_target()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print
    for line in sys.stdin:
        directory, options, places = json.loads(line)
        children = [_child(Path(directory), options, place) for place in places]
        print(json.dumps(children), file=answers, flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), file=answers, flush=True)


def _child(directory: Path, options: dict[str, Any], place: dict[str, str]) -> int:
    """Fork a run; return its id."""
    child = os.fork()
    if child > 0:
        return child
    code = 1
    try:
        os.environ.update(place)
        run(directory, **options)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # not by the way that leads back to the parent's loop


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def stopped(job: TrainRun, step: int) -> None:
    """Train, and press Ctrl-C in a step, after which the run ends."""
    ours, taken = loop.train_step, 0

    def counted(*arguments: object, **named: object) -> object:
        nonlocal taken
        taken += 1
        if taken == step:
            signal.raise_signal(signal.SIGINT)
        return ours(*arguments, **named)

    loop.train_step = counted
    try:
        with pytest.raises(KeyboardInterrupt):
            train(chat_target(), job)
    finally:
        loop.train_step = ours


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO)
    if sys.argv[1:]:
        run(Path(sys.argv[1]), **json.loads(sys.argv[2]))
    else:
        serve()
