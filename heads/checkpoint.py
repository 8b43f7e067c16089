"""Our own head checkpoint: a directory with config.json (plain fields) and model.safetensors.

Strict in both directions: missing, unexpected, misshapen or non-finite tensors are errors that name
them, and so are unknown keys. Nothing in a checkpoint is imported, instantiated or unpickled. A
draft vocabulary lies beside the weights as d2t and t2d, and config.json holds its hash.
"""

import dataclasses
import json
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart import __version__
from headstart.files import atomic_directory, read_json, write_json
from headstart.heads.base import DraftHead, build_head, families, family_of
from headstart.heads.target import AUX_CONVENTION, Target, TargetShape
from headstart.heads.vocab import DraftVocab

FORMAT_VERSION = 2


@dataclass
class HeadInfo:
    """What a checkpoint says about itself beside its weights."""

    family: str
    target_name: str
    target_fingerprint: str
    template_hash: str = ""
    step: int = 0
    tokens_seen: int = 0
    trained_on: dict[str, Any] = field(default_factory=dict)
    """Rows, tokens and hashes of the training data, and the head it started from; plain JSON."""
    headstart_version: str = __version__


def save_head(directory: Path, head: DraftHead, info: HeadInfo) -> None:
    """Write config.json and model.safetensors, atomically, replacing an earlier checkpoint.

    Raises ValueError when a tensor is not finite.
    """
    tensors = {name: t.detach().cpu().contiguous() for name, t in head.state_dict().items()}
    _refuse_non_finite(directory, tensors)
    if head.vocab is not None:
        tensors |= {"d2t": head.vocab.d2t.cpu(), "t2d": head.vocab.t2d.cpu()}
    config = {
        "format": "headstart",
        "format_version": FORMAT_VERSION,
        "info": asdict(info),
        # A path means nothing on another machine; where a run started from is in trained_on.
        "head": asdict(head.config) | {"init_from": None},
        "draft_vocab": None if head.vocab is None else head.vocab.hash,
        "target_shape": asdict(head.shape),
        "aux_convention": AUX_CONVENTION,
        "aux_features": list(head.aux_features),
    }
    with atomic_directory(directory) as temporary:
        write_json(temporary / "config.json", config)
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "headstart"})


def load_head(directory: Path) -> tuple[DraftHead, HeadInfo]:
    """Read a checkpoint in fp32, frozen.

    Raises FileNotFoundError, or a ValueError naming what is wrong with it.
    """
    directory = Path(directory)
    config = _read_config(directory)
    info = _plain(HeadInfo, config["info"], f"{directory}/config.json: info")
    shape = _plain(TargetShape, config["target_shape"], f"{directory}/config.json: target_shape")
    if info.family not in families():
        raise ValueError(
            f"{directory}: head family {info.family!r} is not one of {', '.join(families())}"
        )
    head_config = _plain(
        families()[info.family][0], config["head"], f"{directory}/config.json: head"
    )
    tensors = _read_tensors(directory)
    vocab = _vocab(directory, tensors, head_config.draft_vocab_size, shape)
    _check_vocab_hash(directory, vocab, config["draft_vocab"])
    head = build_head(head_config, shape, vocab)
    if config["aux_convention"] != AUX_CONVENTION or config["aux_features"] != list(
        head.aux_features
    ):
        raise ValueError(
            f"{directory}: aux features {config['aux_features']} in the convention "
            f"{config['aux_convention']!r} do not fit this head; expected "
            f"{list(head.aux_features)} in {AUX_CONVENTION!r}"
        )
    _check_tensors(directory, tensors, head.state_dict())
    head.load_state_dict(tensors, strict=True)
    return head.float().eval().requires_grad_(False), info


def check_pairing(
    directory: Path, info: HeadInfo, head: DraftHead, target: Target, *, force: bool
) -> str:
    """Refuse a head on a target it was not trained for; return a note when `force` overrides.

    A vocabulary or width that differs is always an error; another fingerprint is one unless forced.
    """
    have, want = target.shape, head.shape
    for name in ("vocab_size", "hidden_size", "num_layers"):
        if getattr(have, name) != getattr(want, name):
            raise ValueError(
                f"{directory}: trained for a target with {name}={getattr(want, name)}, "
                f"but {target.name} has {getattr(have, name)}; choose the head's own target"
            )
    if info.target_fingerprint == target.fingerprint:
        return ""
    note = (
        f"{directory}: trained for target {info.target_name} (fingerprint "
        f"{info.target_fingerprint}), paired with {target.name} ({target.fingerprint})"
    )
    if not force:
        raise ValueError(f"{note}; set eval.force_pairing=true to measure it all the same")
    warnings.warn(note, stacklevel=2)
    return note


def info_for(head: DraftHead, target_name: str, fingerprint: str, **extra: Any) -> HeadInfo:
    """Return the info of a head trained for this target."""
    return HeadInfo(family_of(head.config), target_name, fingerprint, **extra)


def _read_config(directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such head checkpoint")
    config = read_json(directory / "config.json")
    keys = {
        "format",
        "format_version",
        "info",
        "head",
        "draft_vocab",
        "target_shape",
        "aux_convention",
        "aux_features",
    }
    if not isinstance(config, dict) or set(config) != keys:
        have = set(config) if isinstance(config, dict) else set()
        raise ValueError(
            f"{directory}/config.json: unknown keys {sorted(have - keys)}, missing keys "
            f"{sorted(keys - have)}; is this a headstart checkpoint?"
        )
    if "${" in json.dumps(config):
        raise ValueError(
            f"{directory}/config.json: a value holds '${{', which would be filled in from this "
            "machine; write the value itself"
        )
    if config["format"] != "headstart" or config["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"{directory}/config.json: format {config['format']!r} version "
            f"{config['format_version']!r}, expected headstart version {FORMAT_VERSION}"
        )
    return config


def _plain(kind: type, values: Any, where: str) -> Any:
    """Build a dataclass from JSON fields, refusing unknown, missing and mistyped ones."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    have = set(values) if isinstance(values, dict) else set()
    required = {
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if have - set(fields) or required - have:
        raise ValueError(
            f"{where}: unknown keys {sorted(have - set(fields))}, "
            f"missing keys {sorted(required - have)}"
        )
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), values))
    except OmegaConfBaseException as error:
        raise ValueError(f"{where}: {str(error).splitlines()[0]}") from error


def _read_tensors(directory: Path) -> dict[str, Tensor]:
    path = directory / "model.safetensors"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; heads are stored as safetensors only")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path}: not a whole safetensors file ({error}); copy it again"
        ) from error


def _vocab(
    directory: Path, tensors: dict[str, Tensor], size: int | None, shape: TargetShape
) -> DraftVocab | None:
    """Take d2t and t2d out of the tensors and read them."""
    stored = {name: tensors.pop(name, None) for name in ("d2t", "t2d")}
    want = {"d2t": size, "t2d": None if size is None else shape.vocab_size}
    for name, tensor in stored.items():
        length = None if tensor is None else tensor.numel()
        if length != want[name]:
            have = f"no {name}" if tensor is None else f"{name} of {length}"
            raise ValueError(
                f"{directory}: {have} but draft_vocab_size is {size} of {shape.vocab_size}; "
                "save the head again"
            )
    if size is None:
        return None
    try:
        return DraftVocab.from_d2t(stored["d2t"], stored["t2d"])
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error


def _check_vocab_hash(directory: Path, vocab: DraftVocab | None, named: str | None) -> None:
    have = None if vocab is None else vocab.hash
    if have != named:
        raise ValueError(
            f"{directory}: the draft vocabulary in model.safetensors is {have}, the one that "
            f"config.json names is {named}; the weights belong to another one, copy both files "
            "from one checkpoint"
        )


def _check_tensors(directory: Path, have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    missing, unexpected = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
    if missing or unexpected:
        raise ValueError(
            f"{directory}: missing {_some(missing)}; unexpected {_some(unexpected)} "
            f"({len(missing)} missing, {len(unexpected)} unexpected); save the head again"
        )
    for name in sorted(want):
        if have[name].shape != want[name].shape:
            raise ValueError(
                f"{directory}: {name} has shape {tuple(have[name].shape)}, "
                f"expected {tuple(want[name].shape)}"
            )
    _refuse_non_finite(directory, have)


def _refuse_non_finite(directory: Path, tensors: dict[str, Tensor]) -> None:
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if bad:
        raise ValueError(f"{directory}: not finite: {_some(bad)}")


def _some(names: list[str], count: int = 4) -> str:
    shown = ", ".join(names[:count]) or "nothing"
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
