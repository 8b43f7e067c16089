"""Where a target's weights lie: whole on every rank, split over all ranks, or over one's GPUs.

Tensor parallel is transformers' own plan for an architecture: every rank holds a slice of each
matrix, and all ranks make each pass together. A device map lays whole layers over the GPUs of one
process, which then work one after the other.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import AutoConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from headstart.heads.target import TargetShape
from headstart.ranks import place

KINDS = ("replicated", "tensor", "device_map")
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


def check_device_map(device_map: Any) -> None:
    """Raise ValueError for what is neither one of accelerate's ways nor a mapping."""
    if isinstance(device_map, Mapping) and device_map:
        return
    if device_map not in MAPS:
        raise ValueError(
            f"target.device_map={device_map}: expected {', '.join(MAPS)}, or a mapping of module "
            "names to devices such as {model.embed_tokens: 0, ...}"
        )


def placement(kind: str, device_map: Any, path: str, **where: Any) -> dict[str, Any]:
    """Return what tells `from_pretrained` to lay out a model so; nothing for a whole one.

    Raises RuntimeError where the processes that were started do not fit, and ValueError for a
    model that they cannot share.
    """
    _, world = place()
    if kind == "tensor":
        return _tensor(world, TargetShape.of(_config(path, where)))
    if kind == "device_map":
        if world > 1:
            raise RuntimeError(
                f"target.parallel=device_map in one of {world} processes: each would spread over "
                "all GPUs; use one process, target.parallel=tensor, or captured features"
            )
        plain = dict(device_map) if isinstance(device_map, Mapping) else device_map
        return {"device_map": plain}
    return {}


def _config(path: str, where: dict[str, Any]) -> Any:
    return AutoConfig.from_pretrained(path, **where).get_text_config()


def _tensor(world: int, shape: TargetShape) -> dict[str, Any]:
    if world == 1:
        raise RuntimeError(
            "target.parallel=tensor in one process: set launch.num_processes to the number of "
            "GPUs, or start with torchrun; target.parallel=device_map needs one process only"
        )
    if "tp_plan" not in {field.name for field in fields(DistributedConfig)}:
        raise RuntimeError(
            "target.parallel=tensor needs a transformers whose DistributedConfig has a tp_plan; "
            "upgrade it, or use target.parallel=device_map in one process"
        )
    heads = shape.num_kv_heads
    if heads % world:
        fitting = ", ".join(str(n) for n in range(2, heads + 1) if heads % n == 0) or "none"
        raise ValueError(
            f"target.parallel=tensor: {world} processes cannot share the target's {heads} "
            f"key/value heads evenly; numbers that can: {fitting}"
        )
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def refuse_offloaded(model: PreTrainedModel) -> None:
    """Raise RuntimeError when a device map left weights outside the GPUs beside some on them."""
    places = {name: str(where) for name, where in getattr(model, "hf_device_map", {}).items()}
    outside = sorted(name for name, where in places.items() if where in ("cpu", "disk"))
    if outside and ("disk" in places.values() or len(outside) < len(places)):
        raise RuntimeError(
            f"target.parallel=device_map: no room on the GPUs for {len(outside)} of {len(places)} "
            f"modules ({', '.join(outside[:3])}), which every pass would copy there; use more or "
            "larger GPUs, or captured features"
        )
