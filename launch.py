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
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import psutil
from hydra.core.hydra_config import HydraConfig
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.run import parse_args
from torch.distributed.run import run as torchrun

from headstart import ranks
from headstart.launch_config import LaunchConfig
from headstart.signals import STOPPING, Stopped, handling

log = logging.getLogger(__name__)


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
    signals = _Signals()
    with tempfile.TemporaryDirectory(prefix="headstart-ranks-") as logs, handling(signals.take):
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

    def take(self, number: int, _: FrameType | None) -> None:
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
