"""Which backend a config names, made and checked against the processes that were started.

A missing launcher, or a backend that accelerate would ignore on this machine, is an error: N
processes that each train alone look like N that train together.
"""

import os
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin, DistributedType, InitProcessGroupKwargs
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.parallel import Parallel
from headstart.train.sharded import Sharded
from headstart.train.zero import Zero

DDP = {DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}


def make_parallel(
    config: ParallelConfig, train: TrainConfig, device: torch.device, *, timeout: float = 1800
) -> Parallel:
    """Return the backend of a config, for a target that is loaded already, on this kind of device.

    Ranks wait `timeout` seconds for one another, then fail. One process may make several in turn.
    Raises RuntimeError when the processes that were started are not those that the backend needs or
    sees, and ImportError without deepspeed.
    """
    kind = config.kind
    world = _launched(kind, device)
    zero = kind.startswith("zero") or (kind == "from_env" and _asked("ACCELERATE_USE_DEEPSPEED"))
    # Else the first accelerator made binds all later ones of the process.
    AcceleratorState._reset_state()
    if zero:
        accelerator = Accelerator(mixed_precision="no", **_deepspeed(kind, train, device, timeout))
        # Else every model that transformers loads from here on is split over the ranks.
        unset_hf_deepspeed_config()
    else:
        on_cpu = device.type == "cpu" and kind != "from_env"
        waiting = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
        accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, kwargs_handlers=[waiting])
    _check(kind, accelerator, world, device)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        _settle(accelerator.state.deepspeed_plugin.deepspeed_config, train)
    backend = Zero if zero else Sharded if kind == "fsdp2" else Parallel
    return backend(accelerator, train.precision)


def _launched(kind: str, device: torch.device) -> int:
    """Return the number of processes that were started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "single" and world != 1:
        raise RuntimeError(
            f"parallel=single in one of {world} processes: each would train alone; use parallel=ddp"
        )
    if kind != "single" and not {"RANK", "LOCAL_RANK", "WORLD_SIZE"} <= os.environ.keys():
        raise RuntimeError(
            f"parallel={kind}: not started by a launcher (no RANK, LOCAL_RANK and WORLD_SIZE); set "
            "launch.num_processes, or start with torchrun or accelerate launch"
        )
    rank, found = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if device.type == "cuda" and rank >= found:
        raise RuntimeError(
            f"parallel={kind}: process {rank} of this machine has no GPU of its own ({found} "
            "found); start fewer processes"
        )
    return world


def _deepspeed(
    kind: str, train: TrainConfig, device: torch.device, timeout: float
) -> dict[str, Any]:
    """Return what tells accelerate to use DeepSpeed, on CPUs too."""
    if find_spec("deepspeed") is None:
        raise ImportError(f"parallel={kind} needs the extra: pip install headstart[deepspeed]")
    waiting = InitProcessGroupKwargs(timeout=timedelta(seconds=timeout))
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        waiting.backend = "gloo"
    options: dict[str, Any] = {
        "kwargs_handlers": [waiting],
        "gradient_accumulation_steps": train.accumulation,
    }
    if kind != "from_env":
        stage = {"stage": int(kind[-1]), "stage3_param_persistence_threshold": 0}
        plugin = DeepSpeedPlugin(
            hf_ds_config={
                "zero_optimization": stage,
                "gradient_accumulation_steps": train.accumulation,
                "gradient_clipping": train.clip,
            },
            zero3_init_flag=False,
        )
        options["deepspeed_plugin"] = plugin
    return options


def _settle(config: dict[str, Any], train: TrainConfig) -> None:
    """Put our accumulation and clipping into DeepSpeed's config, which must not say otherwise."""
    if config.get("fp16", {}).get("enabled") is True:
        raise ValueError("parallel=from_env: DeepSpeed's fp16 is not supported; use its bf16")
    ours = {"gradient_accumulation_steps": train.accumulation, "gradient_clipping": train.clip}
    for name, value in ours.items():
        if config.get(name) not in (None, "auto", 1, value):
            raise ValueError(
                f"parallel=from_env: DeepSpeed's {name}={config[name]}, training has {value}; "
                "set it to auto"
            )
        config[name] = value
    config["train_micro_batch_size_per_gpu"] = 1  # of no consequence: a micro-batch is one call


def _check(kind: str, accelerator: Accelerator, world: int, device: torch.device) -> None:
    """Raise RuntimeError when accelerate does something other than what was asked for."""
    if accelerator.num_processes != world:
        cure = "set ACCELERATE_USE_CPU=true" if device.type == "cpu" else "use another parallel"
        raise RuntimeError(
            f"parallel={kind}: {world} processes were started, accelerate sees "
            f"{accelerator.num_processes}; {cure}"
        )
    if accelerator.device.type != device.type:
        raise RuntimeError(
            f"parallel={kind}: the target is on {device.type}, training would be on "
            f"{accelerator.device.type}; set target.device, or hide GPUs by CUDA_VISIBLE_DEVICES="
        )
    allowed = DDP if world > 1 else DDP | {DistributedType.NO}
    if kind == "from_env":
        allowed = allowed | {DistributedType.DEEPSPEED}
    elif kind.startswith("zero"):
        allowed = {DistributedType.DEEPSPEED}
    if accelerator.distributed_type not in allowed:
        raise RuntimeError(
            f"parallel={kind}: accelerate is configured for {accelerator.distributed_type.value}; "
            "use one of ddp, fsdp2, zero1, zero2 and zero3, without accelerate's own options"
        )


def _asked(flag: str) -> bool:
    return os.environ.get(flag, "false").lower() == "true"
