"""Write a feature store: shards planned up front, made by any number of ranks, index last.

Every rank plans the same shards from the same rows and makes each WORLD_SIZE-th of them; files are
all they share. A shard is encoded, hashed and written by a thread while the next pass runs.
Shapes: N tokens of some rows end to end.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from headstart import __version__
from headstart.data.codec import is_state, unstorable
from headstart.data.shards import (
    FORMAT,
    INDEX,
    PARTS,
    PLAN,
    key_there,
    parts_hash,
    read_header,
    read_parts,
    write_shard,
)
from headstart.data.store_job import COLUMNS, StoreJob, plan_shards, tell_size
from headstart.data.store_key import refuse_other
from headstart.files import locked, write_json
from headstart.ranks import place

log = logging.getLogger(__name__)
QUEUE = 4  # passes that wait for the writing thread
STALL_SECONDS = 1800  # without a new shard of another rank: it has died


def write_store(job: StoreJob, directory: Path) -> None:
    """Make the shards that are not there yet, and the index once all are there.

    Returns when the store is complete, the other ranks' shards included. Raises ValueError for a
    directory that holds another store, a disk that is too small, and states that cannot be stored;
    RuntimeError when another rank has stopped making shards.
    """
    _refuse_another(job, directory)
    shards = plan_shards(job)
    missing = [rows for f, rows in shards.items() if not (directory / f).exists()]
    tell_size(job, directory, [row for rows in missing for row in rows])
    # Two captures of the same rows must not remove each other's unfinished files: one waits.
    with locked(directory / f"rank-{place()[0]}"):
        _refuse_another(job, directory)
        _fill(job, directory, shards)


def _refuse_another(job: StoreJob, directory: Path) -> None:
    """Refuse a directory that holds, or is to hold, another store."""
    there = key_there(directory)
    if there is not None:
        cure = "choose another directory or delete this one"
        refuse_other(there, job.key, what=str(directory), cure=cure)


def _fill(job: StoreJob, directory: Path, shards: dict[str, list[int]]) -> None:
    """Make this rank's share of the shards, wait for the others' and write the index."""
    # Ranks that run the target together make one share, and the first of them is here.
    rank, world = (number // job.target.tensor_ranks for number in place())
    write_json(directory / PLAN, {"key": job.key})
    started = time.perf_counter()
    if rank == 0:
        _remove_torn(directory / PARTS)
        job.target.parts.save(directory / PARTS)
    mine = {f: rows for i, (f, rows) in enumerate(shards.items()) if i % world == rank}
    made = _write_missing(job, directory, mine)
    _wait_for_all(directory, [PARTS, *shards])
    seconds = time.perf_counter() - started
    if made:
        log.info("%s: %d tokens in %.1f s, %.0f tokens/s", directory, made, seconds, made / seconds)
    _write_index(job, directory, shards, seconds)


def _write_missing(job: StoreJob, directory: Path, shards: dict[str, list[int]]) -> int:
    """Write the shards that are not there, and return their number of tokens."""
    missing = {directory / f: rows for f, rows in shards.items() if not (directory / f).exists()}
    tokens = sum(job.tokens(rows) for rows in missing.values())
    if not tokens:
        return 0
    pending: deque[Future[None]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="headstart-write")
    bar = tqdm(total=tokens, unit="token", unit_scale=True, desc="capture", disable=place()[0] > 0)

    def later(work: Callable[..., None], *arguments: Any) -> None:
        pending.append(pool.submit(work, *arguments))
        while len(pending) > QUEUE or (pending and pending[0].done()):
            pending.popleft().result()  # a shard that cannot be written ends the capture here

    try:
        for path, rows in missing.items():
            _remove_torn(path)
            shard = _Shard(path, rows, job, bar)
            for passed in job.make(rows):
                later(shard.add, *passed)
            later(shard.finish)
        while pending:
            pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
        bar.close()
    return tokens


def _remove_torn(path: Path) -> None:
    """Remove what a killed capture left of a file that this process is to make."""
    for torn in path.parent.glob(f".{path.name}.*"):
        torn.unlink(missing_ok=True)


class _Shard:
    """A shard in the making; the writing thread alone touches it."""

    def __init__(self, path: Path, wanted: Sequence[int], job: StoreJob, bar: tqdm) -> None:
        self.path, self.wanted, self.job, self.bar = path, wanted, job, bar
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
        self.bar.update(self.job.tokens(rows))

    def finish(self) -> None:
        """Write the file, unless a pass of it was refused: that error is on its way."""
        if len(self.rows) < len(self.wanted):
            return
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
    write_json(
        directory / INDEX,
        {
            "format": FORMAT,
            "headstart_version": __version__,
            "key": job.key,
            "target_name": job.target.name,
            "tokens": sum(job.lengths),
            "seconds": round(seconds, 1),
            "parts_sha256": parts_hash(read_parts(directory)),
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
