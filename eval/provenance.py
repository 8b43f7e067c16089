"""Where the figures of a run come from: versions, machine, target, prompts and configuration."""

import platform
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from headstart import __version__
from headstart.eval.result import Provenance
from headstart.eval.suites import Suite
from headstart.heads.target import Target


def provenance(
    target: Target, suite: Suite, template_hash: str, config: dict[str, Any], seeds: Iterable[int]
) -> Provenance:
    """Return where the figures of this run come from."""
    return Provenance(
        headstart_version=__version__,
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
        device=_device_name(target.device),
        threads=torch.get_num_threads(),
        dtype=str(target.dtype).removeprefix("torch."),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        target=target.name,
        target_revision=getattr(target.model.config, "_commit_hash", None),
        target_fingerprint=target.fingerprint,
        template_hash=template_hash,
        prompt_suite=suite.name,
        prompt_suite_hash=suite.hash,
        seeds=list(seeds),
        config=config,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
