"""SIGKILL at random moments: taken up again, a command ends with what an uninterrupted run makes.

The commands run by their command line, each in a process of its own. These are forked from one that
has imported everything, so that the moments fall into the work and not into the imports.
"""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from training import command, save_target, saved

from headstart.data.prompts import generate_prompts
from headstart.data.rows import read_rows
from headstart.data.store import FeatureStore

KILLS = 5
LIMIT = 300  # seconds
PROCESSES = multiprocessing.get_context("forkserver")
IMPORTS = ["headstart.data.prepare", "headstart.train.run", "headstart.cli", "datasets"]
PROCESSES.set_forkserver_preload(IMPORTS)


def _run(arguments: list[str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    command(*arguments)


def start(arguments: list[str], root: Path) -> multiprocessing.Process:
    """Start `headstart ARGUMENTS`; what it prints goes to a file of `root`."""
    process = PROCESSES.Process(target=_run, args=(arguments, str(root / "output.txt")))
    process.start()
    return process


def finish(arguments: list[str], root: Path) -> float:
    """Run a command to its end and return its seconds."""
    begun = time.perf_counter()
    process = start(arguments, root)
    process.join(LIMIT)
    assert process.exitcode == 0, (root / "output.txt").read_text()[-2000:]
    return time.perf_counter() - begun


def kill(arguments: list[str], root: Path, seconds: float) -> None:
    """Start a command and kill it after some seconds; it may have finished by then."""
    process = start(arguments, root)
    process.join(seconds)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join(LIMIT)
    assert process.exitcode in (0, -signal.SIGKILL), (root / "output.txt").read_text()[-2000:]


def rows_at(directory: Path) -> list[dict[str, Any]]:
    """Return the rows, and that they are complete, as plain values."""
    return [asdict(row) for row in read_rows(directory)[0]]


def features_at(directory: Path) -> list[dict[str, Any]]:
    """Return everything that a store gives for each of its rows."""
    store = FeatureStore(directory)
    batches = [vars(store.batch([i])) for i in range(len(store.lengths))]
    return [
        {name: value.tolist() for name, value in batch.items() if name != "aux"}
        for batch in batches
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Hold a target, six hundred chats, and the rows that `capture` reads."""
    root = tmp_path_factory.mktemp("kill")
    save_target(root / "target")
    draw = random.Random(0)
    prompts = generate_prompts(600, seed=0, split="train")
    with (root / "chats.jsonl").open("w") as file:
        for number, prompt in enumerate(prompts):
            answer = "".join(draw.choices("abcdefgh ", k=draw.randint(5, 200))).strip() or "a"
            turns = [*prompt.messages, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"chat-{number:04d}", "messages": turns}) + "\n")
    finish([*arguments_of("prepare", root), f"out={root}/rows"], root)
    return root


def arguments_of(name: str, root: Path) -> list[str]:
    """Return the command line of a command, but for its `out`."""
    options = {
        "prepare": [
            f"data.path={root}/chats.jsonl",
            "data.num_prompts=null",
            "data.split=all",
            "data.max_length=700",
        ],
        "generate": [
            "data.num_prompts=60",
            "data.max_length=700",
            "generate.max_new_tokens=16",
            "generate.batch_size=8",
        ],
        "capture": [f"rows={root}/rows"],
    }
    return [name, *saved(root / "target"), *options[name]]


@pytest.mark.parametrize(
    ("name", "read"),
    [("prepare", rows_at), ("generate", rows_at), ("capture", features_at)],
)
def test_five_kills_at_random_moments_change_nothing(
    root: Path, tmp_path: Path, name: str, read: Callable[[Path], list[dict[str, Any]]]
) -> None:
    arguments = arguments_of(name, root)
    seconds = finish([*arguments, f"out={tmp_path}/straight"], tmp_path)
    want = read(tmp_path / "straight")
    assert len(want) > 50
    moments = random.Random(f"{name} 0")
    for number in range(KILLS):
        out = [f"out={tmp_path}/killed-{number}"]
        kill([*arguments, *out], tmp_path, moments.uniform(0.2, 1) * seconds)
        finish([*arguments, *out], tmp_path)
        assert read(tmp_path / f"killed-{number}") == want
