"""Where the ranks of a job run, and whether that fits the other options and the machine."""

import os
import subprocess
from dataclasses import dataclass

import torch

from headstart import ranks

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
    """CPU threads a process; null takes OMP_NUM_THREADS if set, else shares the cores out."""
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
