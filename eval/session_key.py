"""Everything that changes what a session holds: two runs share sessions where all of it agrees."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headstart.eval.arms import Arm
from headstart.eval.result import Provenance

BESIDE = (
    *("out", "eval.repeats", "eval.resamples", "eval.resume", "eval.check_equality"),
    *("eval.force_pairing", "eval.only", "eval.skip_misfits", "eval.training_rows"),
    *("eval.warmup_prompts", "eval.batch_sizes"),
)
"""Options that change no session."""


def measured_settings(
    provenance: Provenance, arms: Sequence[Arm], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return, by dotted name, everything that changes what a session of these arms would hold.

    Heads are in it by the hash of their files, prompts by the hash of the suite; `options` are
    those of the benchmark, the configuration of the whole run is in the provenance.
    """
    where = asdict(provenance)
    config = where.pop("config")
    del where["date"], where["seeds"]  # the seeds are in the options
    settings = where | _dotted(config) | _dotted(options) | {"arms": [arm.name for arm in arms]}
    for arm in arms:
        settings |= _dotted({f"arm {arm.name}": asdict(arm.info)})
        settings[f"arm {arm.name}.files"] = _files_hash(arm.info.checkpoint)
    return {name: value for name, value in settings.items() if name not in BESIDE}


def _dotted(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        nested = isinstance(value, dict) and value
        found |= _dotted(value, f"{path}{name}.") if nested else {f"{path}{name}": value}
    return found


def _files_hash(checkpoint: str | None) -> str | None:
    """Return 16 hex digits over the config and the weights in a directory; null without one."""
    if checkpoint is None or not Path(checkpoint).is_dir():
        return None
    digest = hashlib.sha256()
    directory = Path(checkpoint)
    for path in sorted([directory / "config.json", *directory.glob("*.safetensors")]):
        digest.update(path.name.encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()[:16]
