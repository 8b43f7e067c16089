"""`python -m headstart.train.scaling_bench`: how well ddp scales with the number of processes.

Weak scaling: every process trains on as many rows as one alone does, with one thread each, on
random features. Arms alternate: one process, several under ddp, and as many that know nothing of
each other: what those lose is lost to the machine's shared memory and clock, not to ddp.
efficiency = tokens/s of all / (processes * tokens/s of one), the median over repeats.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from headstart.ranks import leave_group
from headstart.train.backends import make_parallel
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.optimizer import make_optimizer
from headstart.train.step import train_step
from headstart.train.step_bench import Sizes, make

ARMS = ("one", "ddp", "apart")
WAIT_SECONDS = 120  # for processes to be ready together


@dataclass(frozen=True)
class Run:
    """What every arm does."""

    processes: int = 2
    steps: int = 10
    warmup: int = 2
    tokens: int = 512
    """A process and step."""
    width: int = 640
    vocab: int = 8192
    precision: str = "bf16"

    @property
    def sizes(self) -> Sizes:
        """The head, and one process's rows of 256 tokens."""
        return Sizes(self.tokens, self.vocab, self.width, min(256, self.tokens), self.precision)


@dataclass(frozen=True)
class Figures:
    """Tokens a second by arm, all processes together, one number a repeat."""

    tokens_per_s: dict[str, list[float]]
    processes: int

    def efficiency(self, arm: str) -> float:
        """Return the median over repeats of an arm's speed over that of as many times one."""
        pairs = zip(self.tokens_per_s[arm], self.tokens_per_s["one"], strict=True)
        return statistics.median(many / (self.processes * one) for many, one in pairs)


def work(kind: str, run: Run, meeting: Path, place: int, of: int) -> None:
    """Train as one process of an arm, and write its seconds when all `of` have started together."""
    torch.set_num_threads(1)
    head, batch, parts = make("ours", run.sizes)
    config = TrainConfig(precision=run.precision)
    parallel = make_parallel(ParallelConfig(kind), config, torch.device("cpu"))
    model, optimizer = parallel.prepare(head, lambda bare: make_optimizer(bare, config))

    def steps(count: int) -> None:
        for _ in range(count):
            train_step(model, [batch], parts, optimizer, parallel, lr=config.lr, clip=config.clip)

    steps(run.warmup)
    meet(meeting, place, of)
    start = time.perf_counter()
    steps(run.steps)
    seconds = time.perf_counter() - start
    (meeting / f"seconds-{place}").write_text(json.dumps(seconds))
    leave_group()


def meet(meeting: Path, place: int, of: int) -> None:
    """Wait until `of` processes are here. Raises RuntimeError when one does not come."""
    (meeting / f"ready-{place}").touch()
    until = time.monotonic() + WAIT_SECONDS
    while len(list(meeting.glob("ready-*"))) < of:
        if time.monotonic() > until:
            raise RuntimeError(f"fewer than {of} processes were ready in {WAIT_SECONDS} s")
        time.sleep(0.005)


def measure(arm: str, run: Run) -> float:
    """Run an arm in processes of its own and return its tokens a second, all together."""
    kind, of = ("single", 1) if arm == "one" else ("ddp", run.processes)
    with tempfile.TemporaryDirectory() as directory:
        options = json.dumps({"run": asdict(run), "meeting": directory, "of": of})
        module = ["-m", "headstart.train.scaling_bench", "--work"]
        if arm == "ddp":
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={of}"]
            _finish([_start([*launcher, *module, "ddp", options])])
        else:
            count = 1 if arm == "one" else of
            _finish([_start([*module, "single", options], place) for place in range(count)])
        seconds = [json.loads(f.read_text()) for f in Path(directory).glob("seconds-*")]
    assert len(seconds) == of, f"{arm}: {len(seconds)} of {of} processes were timed"
    return of * run.steps * run.tokens / max(seconds)


def _start(arguments: Sequence[str], place: int = 0) -> subprocess.Popen:
    unwanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    environment |= {"OMP_NUM_THREADS": "1", "HEADSTART_BENCH_PLACE": str(place)}
    return subprocess.Popen([sys.executable, *arguments], env=environment)


def _finish(processes: Sequence[subprocess.Popen]) -> None:
    for process in processes:
        if process.wait() != 0:
            raise RuntimeError(f"a process of the bench ended with {process.returncode}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; `python -m headstart.train.scaling_bench --help`."""
    options = _parse(arguments)
    kind, said = options.pop("work") or (None, None)
    if kind is not None:
        given = json.loads(said)
        place = int(os.environ.get("RANK", os.environ["HEADSTART_BENCH_PLACE"]))
        work(kind, Run(**given["run"]), Path(given["meeting"]), place, given["of"])
        return
    repeats, run = options.pop("repeats"), Run(**options)
    found = Figures({arm: [] for arm in ARMS}, run.processes)
    for repeat in range(repeats):
        for arm in ARMS[repeat % 3 :] + ARMS[: repeat % 3]:
            found.tokens_per_s[arm].append(measure(arm, run))
            print(f"{repeat + 1}/{repeats} {arm}: {found.tokens_per_s[arm][-1]:.0f} tokens/s")
    print("\n".join(summary(found, run)))


def summary(found: Figures, run: Run) -> list[str]:
    """Return what is to be told of a bench."""
    lines = [f"{run}, one thread each; tokens/s of all processes, median of repeats:"]
    names = {"one": "one process", "ddp": f"{run.processes} under ddp", "apart": "as many apart"}
    for arm, name in names.items():
        speed = statistics.median(found.tokens_per_s[arm])
        efficiency = "" if arm == "one" else f", efficiency {found.efficiency(arm):.3f}"
        lines.append(f"  {name:<14} {speed:>8.0f}{efficiency}")
    return lines


def _parse(arguments: Sequence[str] | None) -> dict:
    parser = argparse.ArgumentParser(prog="python -m headstart.train.scaling_bench")
    parser.add_argument("--repeats", type=int, default=5)
    defaults = asdict(Run())
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    return vars(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
