"""What a feature store is to hold: its key, its rows cut into shards, and the room they take.

Every rank plans the same shards from the same rows.
Shapes: N tokens of some rows end to end.
"""

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.data.codec import LAST, Codec, aux_name
from headstart.data.rows import RowsMeta, check_rows
from headstart.data.shards import FORMAT, PARTS
from headstart.data.store_key import AUX, capture_key
from headstart.data.template import TokenRow
from headstart.files import check_free_space
from headstart.heads.target import Target

log = logging.getLogger(__name__)
SHARD_ROWS, SHARD_BYTES = 256, 1 << 29  # a shard in the making is in memory
COLUMNS = {
    "tokens": torch.int32,
    "loss_mask": torch.bool,
    "logsumexp": torch.float32,
    "argmax": torch.int32,
}
"""What a token has beside its states, and the type it is stored in."""

Pass = tuple[Sequence[int], dict[str, Tensor]]
"""Rows, and their columns and states [N, ..] end to end."""


@dataclass
class StoreJob:
    """What a store is made of: its key, the length and id of each row, and what makes features."""

    target: Target
    key: dict[str, Any]
    codec: Codec
    lengths: Sequence[int]
    row_ids: Sequence[str]
    make: Callable[[list[int]], Iterator[Pass]]
    """Yields the rows of a shard in the order given, a few at a time."""

    @classmethod
    def of(
        cls,
        target: Target,
        rows: Sequence[TokenRow],
        meta: RowsMeta,
        taps: Sequence[int],
        dtype: str,
        make: Callable[[list[int]], Iterator[Pass]],
    ) -> "StoreJob":
        """Plan a store of rows.

        Raises ValueError for token ids outside the vocabulary and taps outside the layers.
        """
        check_rows(rows, target.shape.vocab_size)
        target.check_taps(taps)
        codec = Codec.of(dtype, target.dtype)
        if dtype == "fp8" and not taps:
            warnings.warn(
                "dtype=fp8 has no effect without aux: the last state, the teacher, keeps 16 bits",
                stacklevel=3,
            )
        key = capture_key(target, rows, meta, taps, stored_as=codec.kind)
        lengths, row_ids = [], []
        for row in rows:
            lengths.append(len(row.token_ids))
            row_ids.append(row.row_id)
        return cls(target, key, codec, lengths, row_ids, make)

    def tokens(self, rows: Iterable[int]) -> int:
        """Count the tokens of rows."""
        return sum(self.lengths[row] for row in rows)


def bytes_per_token(target: Target, taps: Sequence[int], dtype: str = "target") -> int:
    """Return what a store holds for one token: its states, and 13 bytes."""
    return stored_bytes(Codec.of(dtype, target.dtype), target.shape.hidden_size, taps)


def stored_bytes(codec: Codec, width: int, taps: Sequence[int]) -> int:
    """Return the bytes of one token of a target of some width: its states, and 13 bytes."""
    names = [LAST, *(aux_name(s) for s in taps)]
    states = sum(codec.bytes_per_token(name, width) for name in names)
    return states + sum(dtype.itemsize for dtype in COLUMNS.values())


def plan_shards(job: StoreJob) -> dict[str, list[int]]:
    """Return file -> the rows that it holds, sorted by length: a pass wastes little on padding."""
    order = sorted(range(len(job.lengths)), key=lambda i: (job.lengths[i], job.row_ids[i]))
    each = bytes_per_token(job.target, job.key[AUX], job.codec.kind)
    parts: list[list[int]] = [[]]
    room = SHARD_BYTES
    for row in order:
        need = job.lengths[row] * each
        if parts[-1] and (len(parts[-1]) == SHARD_ROWS or need > room):
            parts.append([])
            room = SHARD_BYTES
        parts[-1].append(row)
        room -= need
    # The cut into shards is part of the name: what an older version cut otherwise is not taken up.
    made = json.dumps([FORMAT, job.key, [len(part) for part in parts]], sort_keys=True)
    name = hashlib.sha256(made.encode()).hexdigest()[:8]
    return {f"{name}-{number:05d}.safetensors": part for number, part in enumerate(parts)}


def tell_size(job: StoreJob, directory: Path, missing: Sequence[int]) -> None:
    """Print what a store takes, and raise ValueError when the missing rows do not fit the disk."""
    each = bytes_per_token(job.target, job.key[AUX], job.codec.kind)
    whole = job.tokens(range(len(job.lengths))) * each + job.target.parts.nbytes
    size = job.tokens(missing) * each
    size += 0 if (directory / PARTS).exists() else job.target.parts.nbytes
    rows, tokens, states = len(job.lengths), sum(job.lengths), 1 + len(job.key[AUX])
    shape = (
        f"{rows} rows, {tokens} tokens x {states} states x {job.target.shape.hidden_size} "
        f"in {job.codec.kind}"
    )
    rest = "" if size == whole else f", {size / 1e9:.1f} GB of it still to be made"
    log.info("capture: %.1f GB (%s)%s in %s", whole / 1e9, shape, rest, directory)
    check_free_space(directory, size, f"capture ({shape})")
