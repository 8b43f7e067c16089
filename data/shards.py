"""The files of a feature store: shards, the target's parts, and the index that is written last.

plan.json             the key, before the first shard: a capture taken up must have the same
parts.safetensors     the target's embedding and read-out
NAME-00000.safetensors  rows end to end; its header holds row ids and a hash of its tensors
index.json            the key, and each shard's hash, rows and their lengths
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headstart.files import atomic_path, read_json
from headstart.heads.parts import TargetParts

INDEX, PLAN, PARTS = "index.json", "plan.json", "parts.safetensors"
HEADER = "headstart"
FORMAT = 2
"""Raised whenever an older store cannot be read any more."""
PIECE = 1 << 26  # bytes hashed at once, so that one shard is never in memory twice


def content_hash(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names, types, shapes and bytes of tensors, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        data = tensor.flatten().view(torch.uint8).numpy()
        for start in range(0, len(data), PIECE):
            digest.update(data[start : start + PIECE])
    return digest.hexdigest()


def write_shard(path: Path, tensors: dict[str, Tensor], row_ids: Sequence[str]) -> None:
    """Write a shard atomically, with what says whether it is whole."""
    header = {"sha256": content_hash(tensors), "row_ids": list(row_ids)}
    with atomic_path(path) as temporary:  # one field: safetensors writes several in any order
        save_file(tensors, temporary, metadata={HEADER: json.dumps(header)})


def read_shard(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a shard, memory-mapped, and the ids of its rows."""
    header = read_header(path)
    with _opened(path) as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}
    return tensors, header["row_ids"]


def read_header(path: Path) -> dict[str, Any]:
    """Return what `write_shard` noted. Raises an error naming a shard that is gone or damaged."""
    with _opened(path) as stored:
        header = (stored.metadata() or {}).get(HEADER)
    if header is None:
        raise ValueError(f"{path}: not a shard of this headstart; delete it and capture again")
    return json.loads(header)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a shard, with errors that name it and the cure."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such shard; capture again")
    try:
        with safe_open(path, framework="pt") as stored:
            yield stored
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged ({error}); delete it and capture again") from error


def read_parts(directory: Path) -> TargetParts:
    """Return the target's parts, memory-mapped. Raises an error naming the file when damaged."""
    path = directory / PARTS
    try:
        return TargetParts.load(path)
    except SafetensorError as error:
        raise ValueError(
            f"{path}: damaged ({error}); delete the store and capture again"
        ) from error


def parts_hash(parts: TargetParts) -> str:
    """Return the sha256 of the embedding and the read-out."""
    tensors = {"embedding": parts.embedding_VD, "readout": parts.readout.weight_WD}
    if parts.readout.bias_W is not None:
        tensors["bias"] = parts.readout.bias_W
    return content_hash(tensors)


def read_index(directory: Path) -> dict[str, Any]:
    """Return index.json.

    Raises FileNotFoundError for a store that was never finished, ValueError for an older one.
    """
    if not (directory / INDEX).is_file():
        raise FileNotFoundError(
            f"{directory / INDEX}: no such file; run headstart capture to its end there"
        )
    index = read_json(directory / INDEX)
    if index.get("format") != FORMAT:
        raise ValueError(
            f"{directory / INDEX}: format {index.get('format')}, this headstart reads {FORMAT}; "
            "delete the store and capture again"
        )
    return index


def key_there(directory: Path) -> dict[str, Any] | None:
    """Return the key of the store in a directory, finished or not; None when there is none."""
    if (directory / INDEX).is_file():
        return read_index(directory)["key"]
    plan = directory / PLAN
    return read_json(plan)["key"] if plan.is_file() else None


def shards_of(directory: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield each shard's path and what the index says of it."""
    for shard in read_index(directory)["shards"]:
        yield directory / shard["file"], shard
