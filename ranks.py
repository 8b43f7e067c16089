"""What a process knows of the job it is a rank of, before and after there is a process group.

torchrun, accelerate launch and Slurm scripts name a rank in the environment. The ranks of a job
agree through the store at which they will meet: on one output directory, on one log, and on who
tells a warning that all of them have.
"""

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import DistError, Store, rendezvous

LAUNCHED = "HEADSTART_LAUNCHED"  # set for ranks that `headstart` started itself
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for a rank's error
MEET_SECONDS = 600  # a rank may load its modules from a slow disk
PR_SET_PDEATHSIG = 1  # linux/prctl.h
FORMAT = "[%(asctime)s][rank {rank}][%(name)s][%(levelname)s] - %(message)s"

log = logging.getLogger(__name__)


def place() -> tuple[int, int]:
    """Return this process's rank and the number of processes, as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def in_rank() -> bool:
    """Tell whether a launcher started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def started_by_us() -> bool:
    """Tell whether `headstart` itself started this process as a rank."""
    return in_rank() and LAUNCHED in os.environ


def quiet_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the Hydra arguments of a process that owns neither directory nor log file."""
    ours = ("hydra.run.dir=", "hydra.output_subdir=", "hydra/job_logging=", "hydra.job_logging")
    kept = [a for a in arguments if not a.startswith(ours)]
    logs = ["hydra/job_logging=stdout", "hydra.job_logging.root.level=WARNING"]
    return [*kept, "hydra.run.dir=.", "hydra.output_subdir=null", *logs]


def end_with_parent() -> None:
    """Have this rank asked to stop when the process that started it dies, however it dies."""
    if started_by_us() and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def take_device() -> None:
    """Make this rank's own GPU the current one, before anything is put on `cuda`.

    Raises RuntimeError where the launcher started more processes than there are GPUs.
    """
    if "LOCAL_RANK" not in os.environ or not torch.cuda.is_available():
        return
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= gpus:
        raise RuntimeError(
            f"rank {place()[0]} has no GPU: {local + 1} or more processes were started on a "
            f"machine with {gpus}; start {gpus}"
        )
    torch.cuda.set_device(local)


def agree(out: str) -> str:
    """Return rank 0's output directory, and join its log; every rank calls it once.

    Each rank would resolve a time stamp in `out` itself. Ranks that no launcher lets meet keep
    their own.
    """
    rank, world = place()
    if world == 1 or "MASTER_ADDR" not in os.environ:
        return out
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEET_SECONDS))))
    if rank == 0:
        store.set("headstart/agreed", json.dumps({"out": out, "log": _log_file()}))
    agreed = json.loads(store.get("headstart/agreed"))
    _join_log(agreed["log"], store)
    return agreed["out"]


def _log_file() -> str | None:
    """Return the file that Hydra logs to, if it does."""
    handlers = logging.getLogger().handlers
    files = [h.baseFilename for h in handlers if isinstance(h, logging.FileHandler)]
    return files[0] if files else None


def _join_log(file: str | None, store: Store) -> None:
    """Write to rank 0's log file too; every line names its rank, and a warning comes once."""
    rank, root = place()[0], logging.getLogger()
    if rank > 0 and file is not None:
        root.addHandler(logging.FileHandler(file, encoding="utf-8"))
    for handler in root.handlers:
        handler.setFormatter(logging.Formatter(FORMAT.format(rank=rank)))
        kind = "file" if isinstance(handler, logging.FileHandler) else "console"
        handler.addFilter(_OncePerJob(store, rank, kind))


class _OncePerJob(logging.Filter):
    """Lets one rank tell what all ranks would warn of; rank 0 may repeat itself."""

    def __init__(self, store: Store, rank: int, kind: str) -> None:
        super().__init__()
        self.store, self.rank, self.kind = store, rank, kind
        self.told: dict[str, bool] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING or record.exc_info:
            return True
        digest = hashlib.sha256(record.getMessage().encode()).hexdigest()
        if digest in self.told:
            return self.rank == 0 and self.told[digest]
        try:
            first = self.store.add(f"headstart/told/{self.kind}/{digest}", 1) == 1
        except DistError:  # the job is coming down: better twice than not at all
            return True
        self.told[digest] = first
        return first


def leave_group() -> None:
    """End the process group, if there is one, once every rank is here; collective.

    A rank that outlives the others' connections may abort at its exit, and the job with it.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def fail(error: BaseException) -> None:
    """End this rank for an error, at once, leaving its traceback to whoever started it.

    Not by way of the interpreter's own end: threads and communicators that wait for other ranks
    would hold it up.
    """
    if not started_by_us():
        log.error("failed", exc_info=error)
    _write_error(error)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by whoever read it
            stream.flush()
    os._exit(1)


def _write_error(error: BaseException) -> None:
    """Write an error as torchrun reads it: of several ranks it shows the earliest."""
    file = os.environ.get(ERROR_FILE)
    if file is None:
        return
    now = time.time()
    told = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": "".join(traceback.format_exception(error)),
            "timestamp": str(int(now)),
            "exact": now,  # which of the ranks failed first is decided within a second
        },
    }
    Path(file).write_text(json.dumps({"message": told}), encoding="utf-8")
