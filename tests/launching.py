"""Commands started as users start them, in processes of their own, on a tiny target.

BREAK makes a rank misbehave: the Python code in it runs in place of the rank's second step.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from training import chat_target, command, random_rows, save_target, saved

from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.template import ChatTemplate

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
LIMIT = 600  # seconds; far above what a free machine takes
SITE = """
import os
import sys
if os.environ.get("RANK") in os.environ.get("BREAK_RANKS", "").split(","):
    import importlib.abc
    import importlib.util

    class Breaking(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "headstart.train.loop":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module

            def broken(module):
                run(module)
                ours, steps = module.train_step, []

                def second(*arguments, **named):
                    steps.append(1)
                    if len(steps) == 2:
                        exec(os.environ["BREAK"], {"os": os})
                    return ours(*arguments, **named)

                module.train_step = second

            spec.loader.exec_module = broken
            return spec

    sys.meta_path.insert(0, Breaking())
"""


def prepare(root: Path) -> list[str]:
    """Write a target, rows and their features; return the arguments of a short, exact training."""
    target = save_target(root / "target")
    template = ChatTemplate(chat_target().tokenizer).hash
    writer = RowsWriter(root / "rows", RowsMeta(chat_target().fingerprint, template, {}))
    for row in random_rows(16):
        writer.add(row)
    writer.finish("made for a test", {})
    options = [*saved(target), f"rows={root}/rows"]
    command("capture", *options)
    (root / "site").mkdir()
    (root / "site" / "sitecustomize.py").write_text(SITE)
    small = ["head=medusa", "head.draft_vocab_size=64", "train.precision=fp32"]
    return ["train", *options, *small, "train.max_steps=3", "train.log_every=1"]


def environment(root: Path, **more: str) -> dict[str, str]:
    """Return the environment of a process that finds what this one does."""
    tests = Path(__file__).parent
    paths = os.pathsep.join([str(root / "site"), str(tests), *filter(None, sys.path)])
    return os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more


def start(
    root: Path, arguments: list[str], *, module: tuple[str, ...] = ("headstart",), **env: str
) -> subprocess.Popen:
    """Start `python -m MODULE ARGUMENTS`; what it says comes in one stream."""
    return subprocess.Popen(
        [sys.executable, "-m", *module, *arguments],
        env=environment(root, **env),
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, status: int = 0) -> str:
    """Wait for a process and return what it said, having seen its exit status."""
    try:
        said, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            one.kill()
        raise
    assert process.returncode == status, said
    return said


def wait_until(true: Callable[[], bool], process: subprocess.Popen) -> None:
    """Wait for something that a running process does."""
    end = time.monotonic() + LIMIT
    while not true():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.05)


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def lines(path: Path) -> int:
    """Count the lines of a file that may not be there yet."""
    return path.read_text().count("\n") if path.exists() else 0
