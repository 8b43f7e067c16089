"""Start the ranks of a command: `headstart train parallel=ddp launch.num_processes=8`.

The Hydra process resolves the options, owns the output directory and sweeps; torchrun, called in
that process, starts ranks with the same overrides and that very directory, and the ranks do the
work. The jobs of a sweep get processes of their own even where one is enough: device memory comes
back, and a crash is a failed job. The process that starts ranks never computes.
"""

import logging
import os
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args
from torch.distributed.run import run as torchrun

from headstart import ranks
from headstart.signals import STOPPING, Stopped

log = logging.getLogger(__name__)
PORT = 29500


@dataclass
class LaunchConfig:
    """Where the ranks of a job run; torchrun or accelerate launch may start them instead."""

    num_processes: int = 1
    """Processes on each machine, one a GPU."""
    nodes: int = 1
    """Machines; the same command runs once on each."""
    node_rank: int | None = None
    """This machine's number, from 0; null takes Slurm's."""
    master_address: str | None = None
    """Address of machine 0; null takes the first of Slurm's, or this one where it is alone."""
    master_port: int | None = None
    """Port at which several machines meet; null takes one by Slurm's job number, else 29500. One
    machine alone takes any free port."""
    omp_threads: int | None = None
    """CPU threads a process; null shares the cores out (OMP_NUM_THREADS wins where it is set)."""
    timeout_seconds: int = 1800
    """Seconds that ranks wait for one another before the job fails: an evaluation must fit in."""
    grace_seconds: int = 120
    """Seconds after Ctrl-C or SIGTERM in which ranks save; then they are killed."""

    def __post_init__(self) -> None:
        for name in ("num_processes", "nodes", "omp_threads", "timeout_seconds", "grace_seconds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"launch.{name}={value}: need at least 1")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nodes:
            raise ValueError(
                f"launch.node_rank={self.node_rank}: expected 0 to {self.nodes - 1}, below "
                f"launch.nodes={self.nodes}"
            )
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise ValueError(f"launch.master_port={self.master_port}: expected 1 to 65535")

    @property
    def world(self) -> int:
        """Count the ranks of the job."""
        return self.nodes * self.num_processes

    def node(self) -> int:
        """Return this machine's number. Raises ValueError where nothing tells it."""
        if self.nodes == 1:
            return 0
        found = os.environ.get("SLURM_NNODES", str(self.nodes))
        if found != str(self.nodes):
            raise ValueError(f"launch.nodes={self.nodes}, but Slurm gave {found}; set it to that")
        if self.node_rank is not None:
            return self.node_rank
        if "SLURM_NODEID" not in os.environ:
            raise ValueError(
                f"launch.nodes={self.nodes} needs launch.node_rank: this machine's number, from 0"
            )
        return int(os.environ["SLURM_NODEID"])

    def meeting_point(self) -> tuple[str, int]:
        """Return where machine 0 listens. Raises ValueError where nothing tells its address."""
        job = os.environ.get("SLURM_JOB_ID")
        address, port = self.master_address, self.master_port
        if address is None and self.nodes > 1:
            if job is None:
                raise ValueError(
                    f"launch.nodes={self.nodes} needs launch.master_address: that of machine 0"
                )
            names = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
            told = subprocess.run(names, capture_output=True, text=True, check=True).stdout
            address = told.split()[0]
        if port is None:  # two jobs that share a machine must not meet each other
            port = PORT if job is None else 20000 + int(job) % 40000
        return address or "localhost", port


def check(config: LaunchConfig, kind: str | None, gpus: int | None) -> None:
    """Refuse a launch that does not fit the `parallel` option or the machine.

    `kind` is parallel.kind, None for a command that shares nothing but files; `gpus` counts those
    of this machine, None where the target runs on the CPU. Raises ValueError.
    """
    if ranks.in_rank():
        _check_started(config)
        return
    if kind not in (None, "single") and "ACCELERATE_MIXED_PRECISION" in os.environ:
        raise ValueError(
            f"parallel={kind}: accelerate launch started one process that is no rank, as it does "
            "with --cpu; use torchrun, or launch.num_processes=N without a launcher"
        )
    if kind == "single" and config.world > 1:
        raise ValueError(
            f"parallel=single trains in one process, launch asks for {config.world}; "
            "use parallel=ddp, or another that spreads a head over processes"
        )
    if gpus is not None and config.num_processes > gpus:
        raise ValueError(
            f"launch.num_processes={config.num_processes}: this machine has {gpus} "
            f"GPU{'s' * (gpus != 1)}, and each takes one process; use {gpus} or fewer"
        )
    config.node()
    config.meeting_point()


def _check_started(config: LaunchConfig) -> None:
    _, world = ranks.place()
    if config.world not in (1, world):
        raise ValueError(
            f"launch.num_processes={config.num_processes} (launch.nodes={config.nodes}), but "
            f"{world} processes were started; leave launch.* out under torchrun or accelerate"
        )


def count_gpus(device: str) -> int | None:
    """Return how many GPUs ranks may share out, None on the CPU, for a `target.device`."""
    if not torch.cuda.is_available() or device == "cpu":
        return None
    return torch.cuda.device_count() if device in ("auto", "cuda") else 1


def starts_ranks(config: LaunchConfig, kind: str | None, *, sweeping: bool) -> bool:
    """Tell whether this process is to start ranks rather than to work itself.

    Backends other than `single` need the process group that torchrun sets up, of one rank too.
    """
    if ranks.in_rank():
        return False
    return sweeping or config.world > 1 or kind not in (None, "single")


def start_ranks(config: LaunchConfig, command: str, out: str, more: Sequence[str] = ()) -> None:
    """Run a command in ranks of its own, and return when all of them are done.

    They get this run's overrides, more of them, and its output directory. Raises RuntimeError when
    one fails, its traceback logged, and Stopped after Ctrl-C or SIGTERM, which are passed on.
    """
    alone = " (launch.num_processes=N starts N)" if config.world == 1 else ""
    log.info("starting %d of %d ranks here%s", config.num_processes, config.world, alone)
    with tempfile.TemporaryDirectory(prefix="headstart-ranks-") as logs, _Signals() as signals:
        arguments = [
            *_places(config),
            f"--nproc-per-node={config.num_processes}",
            f"--log-dir={logs}",
            f"--shutdown-timeout={config.grace_seconds}",
            "--signals-to-handle=SIGHUP,SIGQUIT",  # the others are ours
            *("-m", "headstart", command, *_overrides(out), *more),
        ]
        with _environment(OMP_NUM_THREADS=str(_threads(config)), **{ranks.LAUNCHED: "1"}):
            try:
                torchrun(parse_args(arguments))
            except ChildFailedError as error:
                _explain(error, config)
            except SignalException:
                raise Stopped(signals.number or signal.SIGTERM) from None


def _places(config: LaunchConfig) -> list[str]:
    if config.nodes == 1:
        return ["--standalone"]
    address, port = config.meeting_point()
    return [
        f"--nnodes={config.nodes}",
        f"--node-rank={config.node()}",
        f"--master-addr={address}",
        f"--master-port={port}",
    ]


def _overrides(out: str) -> list[str]:
    """Return this run's arguments, to be given again: its overrides, and its directory."""
    hydra = HydraConfig.get()
    sources = hydra.runtime.config_sources
    directories = [source.path for source in sources if source.provider == "command-line"]
    kept = ("hydra.searchpath=", "hydra.verbose=", "hydra.job_logging", "hydra/job_logging=")
    mine = ("out=", "+out=")
    return [
        *(f"--config-dir={directory}" for directory in directories),
        f"--config-name={hydra.job.config_name}",
        *(o for o in hydra.overrides.task if not o.startswith(mine)),
        *(o for o in hydra.overrides.hydra if o.startswith(kept)),
        f"out={quoted(out)}",
        f"hydra.run.dir={quoted(hydra.runtime.output_dir)}",
        "hydra.output_subdir=null",
        "hydra.sweeper.params=null",  # what an experiment sweeps over is in the overrides
    ]


def quoted(value: str) -> str:
    """Return a string as a value that Hydra's override grammar reads back."""
    # A backslash is one of the grammar's own only where a quote follows.
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + m[2].replace("'", "\\'"), value)
    return f"'{escaped}'"


def _threads(config: LaunchConfig) -> int:
    if config.omp_threads is not None:
        return config.omp_threads
    shared = max(1, (os.cpu_count() or 1) // config.num_processes)
    return int(os.environ.get("OMP_NUM_THREADS", shared))


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set variables for the processes started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Signals:
    """Passes the first SIGINT or SIGTERM to the ranks; a second Ctrl-C kills them and ends."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.number is None:
            self.number = number
            # What torchrun's own handler raises: it passes the signal on, and waits.
            raise SignalException("asked to stop", sigval=signal.Signals(number))
        if number == signal.SIGINT:
            for process in psutil.Process().children(recursive=True):
                process.kill()
            os._exit(128 + number)


def _explain(error: ChildFailedError, config: LaunchConfig) -> None:
    """Raise what ended the ranks: a signal that all of them took, or the first failure."""
    rank, failure = min(error.failures.items(), key=lambda item: _moment(item[1]))
    told = failure.error_file_data.get("message")
    if isinstance(told, dict):
        log.error("rank %d failed:\n%s", rank, told["extraInfo"]["py_callstack"].rstrip())
        raise RuntimeError(f"rank {rank}: {told['message']}") from None
    for number in STOPPING:
        if failure.exitcode == 128 + number:
            raise Stopped(number) from None
    how = f"by signal {failure.signal_name()}" if failure.exitcode < 0 else "without a word"
    cure = "; was memory short?" if failure.exitcode == -signal.SIGKILL else ""
    where = "" if config.nodes == 1 else " (look at the other machines' output, too)"
    raise RuntimeError(
        f"rank {rank} ended {how}, exit status {failure.exitcode}{cure}{where}"
    ) from None


def _moment(failure: ProcessFailure) -> float:
    """Return when a rank failed, as a time to compare with that of the others."""
    told = failure.error_file_data.get("message")
    if isinstance(told, dict):
        return float(told["extraInfo"].get("exact", failure.timestamp))
    if failure.exitcode == -signal.SIGTERM:
        return float("inf")  # torchrun ended it for another's failure
    # Killed: seen at most a second late, and the others failed for want of it.
    return failure.timestamp - 1 if failure.exitcode < 0 else failure.timestamp
