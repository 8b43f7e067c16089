"""Write a feature store: shards planned up front, made by any number of ranks, index last.

Every rank plans the same shards from the same rows and makes each WORLD_SIZE-th of them; files are
all they share. A shard is encoded, hashed and written by a thread while the next pass runs.
Shapes: N tokens of some rows end to end.
"""

import hashlib
import json
import logging
import os
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from headstart import __version__
from headstart.data.codec import LAST, Codec, aux_name, is_state, unstorable
from headstart.data.rows import RowsMeta, check_rows
from headstart.data.shards import (
    FORMAT,
    INDEX,
    PARTS,
    PLAN,
    content_hash,
    key_there,
    read_header,
    write_shard,
)
from headstart.data.store_key import AUX, capture_key, refuse_other
from headstart.data.template import TokenRow
from headstart.files import check_free_space, write_json
from headstart.heads.parts import TargetParts
from headstart.heads.target import Target

log = logging.getLogger(__name__)
SHARD_ROWS, SHARD_BYTES = 256, 1 << 29  # a shard in the making is in memory
QUEUE = 4  # passes that wait for the writing thread
STALL_SECONDS = 1800  # without a new shard of another rank: it has died
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


def bytes_per_token(target: Target, taps: Sequence[int], dtype: str = "target") -> int:
    """Return what a store holds for one token: its states, and 13 bytes."""
    codec = Codec.of(dtype, target.dtype)
    names = [LAST, *(aux_name(s) for s in taps)]
    states = sum(codec.bytes_per_token(name, target.shape.hidden_size) for name in names)
    return states + sum(dtype.itemsize for dtype in COLUMNS.values())


def write_store(job: StoreJob, directory: Path) -> None:
    """Make the shards that are not there yet, and the index once all are there.

    Returns when the store is complete, the other ranks' shards included. Raises ValueError for a
    directory that holds another store, a disk that is too small, and states that cannot be stored;
    RuntimeError when another rank has stopped making shards.
    """
    there = key_there(directory)
    if there is not None:
        cure = "choose another directory or delete this one"
        refuse_other(there, job.key, what=str(directory), cure=cure)
    shards = plan_shards(job)
    rank, world = ranks()
    size = sum(_tokens(job, rows) for f, rows in shards.items() if not (directory / f).exists())
    size *= (each := bytes_per_token(job.target, job.key[AUX], job.codec.kind))
    _tell_size(job, directory, size, each)
    write_json(directory / PLAN, {"key": job.key})
    started = time.perf_counter()
    if rank == 0:
        job.target.parts.save(directory / PARTS)
    mine = {f: rows for i, (f, rows) in enumerate(shards.items()) if i % world == rank}
    made = _write_missing(job, directory, mine)
    _wait_for_all(directory, [PARTS, *shards])
    seconds = time.perf_counter() - started
    if made:
        log.info("%s: %d tokens in %.1f s, %.0f tokens/s", directory, made, seconds, made / seconds)
    _write_index(job, directory, shards, seconds)


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


def ranks() -> tuple[int, int]:
    """Return this process's rank and the number of processes, as torchrun sets them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _tell_size(job: StoreJob, directory: Path, size: int, each: int) -> None:
    """Print what will be written and raise ValueError when the disk has not got that room."""
    rows, tokens, states = len(job.lengths), sum(job.lengths), 1 + len(job.key[AUX])
    shape = (
        f"{rows} rows, {tokens} tokens x {states} states x {job.target.shape.hidden_size} "
        f"in {job.codec.kind}"
    )
    whole = tokens * each
    rest = "" if size == whole else f", {size / 1e9:.1f} GB of it still to be made"
    log.info("capture: %.1f GB (%s)%s in %s", whole / 1e9, shape, rest, directory)
    check_free_space(directory, size, f"capture ({shape})")


def _tokens(job: StoreJob, rows: Sequence[int]) -> int:
    return sum(job.lengths[row] for row in rows)


def _write_missing(job: StoreJob, directory: Path, shards: dict[str, list[int]]) -> int:
    """Write the shards that are not there, and return their number of tokens."""
    missing = {directory / f: rows for f, rows in shards.items() if not (directory / f).exists()}
    tokens = sum(_tokens(job, rows) for rows in missing.values())
    if not tokens:
        return 0
    pending: deque[Future[None]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="headstart-write")
    bar = tqdm(total=tokens, unit="token", unit_scale=True, desc="capture")

    def later(work: Callable[..., None], *arguments: Any) -> None:
        pending.append(pool.submit(work, *arguments))
        while len(pending) > QUEUE or (pending and pending[0].done()):
            pending.popleft().result()  # a shard that cannot be written ends the capture here

    try:
        for path, rows in missing.items():
            for torn in path.parent.glob(f".{path.name}.*"):  # a killed capture's
                torn.unlink(missing_ok=True)
            shard = _Shard(path, job, bar)
            for passed in job.make(rows):
                later(shard.add, *passed)
            later(shard.finish)
        while pending:
            pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        bar.close()
    return tokens


class _Shard:
    """A shard in the making; the writing thread alone touches it."""

    def __init__(self, path: Path, job: StoreJob, bar: tqdm) -> None:
        self.path, self.job, self.bar = path, job, bar
        self.rows: list[int] = []
        self.pieces: dict[str, list[Tensor]] = {}

    def add(self, rows: Sequence[int], columns: dict[str, Tensor]) -> None:
        """Encode what a pass made of some rows."""
        for name, made in columns.items():
            tensor = made.cpu()
            if is_state(name):
                self._check(name, tensor, rows)
                stored = self.job.codec.encode(name, tensor)
            else:
                stored = {name: tensor.to(COLUMNS[name])}
            for part, piece in stored.items():
                self.pieces.setdefault(part, []).append(piece)
        self.rows += rows
        self.bar.update(_tokens(self.job, rows))

    def finish(self) -> None:
        """Write the file."""
        tensors = {name: torch.cat(pieces) for name, pieces in self.pieces.items()}
        self.pieces.clear()
        write_shard(self.path, tensors, [self.job.row_ids[row] for row in self.rows])

    def _check(self, name: str, states_ND: Tensor, rows: Sequence[int]) -> None:
        found = unstorable(states_ND, self.job.codec.stored(name))
        if found is None:
            return
        token, why = found
        for row in rows:
            if token < self.job.lengths[row]:
                raise ValueError(
                    f"{self.path.name}: row {self.job.row_ids[row]}, token {token}: a value of "
                    f"{name} is not stored: {why}"
                )
            token -= self.job.lengths[row]
        raise AssertionError("a token beyond the rows of its pass")


def _wait_for_all(directory: Path, files: Sequence[str]) -> None:
    """Wait for the other ranks' files; whoever sees the last one writes the index."""
    missing, since, told = list(files), time.monotonic(), time.monotonic()
    while True:
        left = [file for file in missing if not (directory / file).exists()]
        if not left:
            return
        now = time.monotonic()
        if len(left) < len(missing):
            missing, since = left, now
        if now - since > STALL_SECONDS:
            raise RuntimeError(
                f"{directory}: {len(left)} shards of other ranks are missing ({left[0]}), none "
                f"came in {STALL_SECONDS} s; run the same command again to make the rest"
            )
        if now - told > 60:
            log.info("waiting for %d shards of other ranks (%s)", len(left), left[0])
            told = now
        time.sleep(0.2)


def _write_index(
    job: StoreJob, directory: Path, shards: dict[str, list[int]], seconds: float
) -> None:
    """Write the index. Ranks may do so at the same time: they write the same."""
    parts = TargetParts.load(directory / PARTS)
    write_json(
        directory / INDEX,
        {
            "format": FORMAT,
            "headstart_version": __version__,
            "key": job.key,
            "target_name": job.target.name,
            "tokens": sum(job.lengths),
            "seconds": round(seconds, 1),
            "parts_sha256": parts_hash(parts),
            "shards": [
                {
                    "file": file,
                    "sha256": read_header(directory / file)["sha256"],
                    "rows": rows,
                    "lengths": [job.lengths[row] for row in rows],
                }
                for file, rows in shards.items()
            ],
        },
    )


def parts_hash(parts: TargetParts) -> str:
    """Return the sha256 of the embedding and the read-out."""
    tensors = {"embedding": parts.embedding_VD, "readout": parts.readout.weight_WD}
    if parts.readout.bias_W is not None:
        tensors["bias"] = parts.readout.bias_W
    return content_hash(tensors)
