"""Token rows on disk: rows.arrow, what made them (meta.json), and a journal while they are made.

A new row goes to journal.jsonl at once; a few hundred of them become one record batch at the end of
rows.arrow, and the journal starts anew. A kill loses at most the row being written: the rows of a
torn batch are still in the journal. rows.arrow is an Arrow stream as `datasets.Dataset.from_file`
reads it. Rows are read through a memory map, in order of their ids: the order of writing, which
depends on what finished first, changes nothing.
"""

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock, Timeout

from headstart import __version__
from headstart.data.template import TokenRow
from headstart.files import read_json, write_json

log = logging.getLogger(__name__)
ROWS, META, JOURNAL = "rows.arrow", "meta.json", "journal.jsonl"
ROW_FORMAT = 3
"""Raised whenever the same settings would give other rows, or the same rows another file."""
BATCH_ROWS = 512  # rows of a record batch: some 2 MB of typical chats
SCHEMA = pa.schema(
    {
        "row_id": pa.string(),
        "category": pa.string(),
        "token_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.int8()),
        "stop_reason": pa.string(),
    }
)


@dataclass
class RowsMeta:
    """What made a set of rows. Rows made under other settings are refused, not mixed in."""

    target_fingerprint: str
    template_hash: str
    settings: dict[str, Any]
    """Every option that changes the rows."""
    headstart_version: str = __version__
    row_format: int = ROW_FORMAT
    complete: bool = False
    num_rows: int = 0
    """Rows of a complete set."""
    summary: str = ""
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """16 hex digits of all that changes the rows: the same key, the same rows."""
        what = [self.row_format, self.target_fingerprint, self.template_hash, self.settings]
        return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


class RowsWriter:
    """Appends rows to a directory, taking up where an earlier run of the same settings stopped.

    Raises ValueError naming the first setting that differs from what the directory holds, and when
    another process is writing there.
    """

    def __init__(self, directory: Path, meta: RowsMeta) -> None:
        self.directory, self.meta = Path(directory), meta
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.directory)
        try:
            self._take_up()
        except BaseException:
            self._lock.release()
            raise

    def _take_up(self) -> None:
        if (self.directory / META).exists():
            _refuse_other_settings(self.directory, read_meta(self.directory), self.meta)
        _write_meta(self.directory, self.meta)
        _cut_torn_batch(self.directory / ROWS)
        self.done_ids = set(_ids(_batches(self.directory / ROWS)).to_pylist())
        """Ids of the rows that were there when the writer was made."""
        journal = _whole_lines(self.directory / JOURNAL)
        self._pending = [row for row in journal if row.row_id not in self.done_ids]
        self.done_ids |= {row.row_id for row in self._pending}
        self._journal = (self.directory / JOURNAL).open("a", encoding="utf-8")

    @property
    def rows(self) -> Iterator[TokenRow]:
        """The rows written so far, in the order of writing."""
        for batch in _batches(self.directory / ROWS):
            yield from (_row(batch, place) for place in range(batch.num_rows))
        yield from list(self._pending)

    def add(self, row: TokenRow) -> None:
        """Append one row and hand it to the operating system."""
        self._journal.write(json.dumps(vars(row)) + "\n")
        self._journal.flush()
        self._pending.append(row)
        if len(self._pending) >= BATCH_ROWS:
            self._commit()

    def finish(self, summary: str, counts: dict[str, int]) -> None:
        """Mark the rows complete and close. Raises ValueError for two rows of one id."""
        lock = _lock(self.directory)
        try:
            self.close()
            self._commit()
            ids = _ids(_batches(self.directory / ROWS))
            _refuse_repeats(self.directory, ids)
            self.meta.complete, self.meta.num_rows = True, len(ids)
            self.meta.summary, self.meta.counts = summary, counts
            _write_meta(self.directory, self.meta)
            (self.directory / JOURNAL).unlink(missing_ok=True)
        finally:
            lock.release()

    def close(self) -> None:
        """Close the files; rows that are not finished can be taken up again."""
        if not self._journal.closed:
            self._journal.close()
            self._lock.release()

    def _commit(self) -> None:
        """Move the journal's rows to rows.arrow; the batch is on disk before the journal goes."""
        path = self.directory / ROWS
        with path.open("ab") as file:
            if file.tell() == 0:
                file.write(SCHEMA.serialize())
            if self._pending:
                columns = {name: [getattr(r, name) for r in self._pending] for name in SCHEMA.names}
                file.write(pa.RecordBatch.from_pydict(columns, SCHEMA).serialize())
            file.flush()
            os.fsync(file.fileno())
        if self._pending:
            os.truncate(self.directory / JOURNAL, 0)
            self._pending = []


class Rows(Sequence[TokenRow]):
    """The rows of a file in order of their ids; each is read when it is asked for.

    Memory holds an index and a length a row, whatever the size of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._batches = _batches(path)
        self._order = pc.sort_indices(_ids(self._batches)).to_numpy()
        self._starts, sizes = [0], []
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
            sizes.append(pc.list_value_length(batch["token_ids"]))
        lengths = pa.chunked_array(sizes, pa.int32()).to_numpy()
        self.lengths: list[int] = lengths[self._order].tolist()
        """Tokens of each row."""
        self.hash: str | None = None
        """What `rows_hash` found."""

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = int(self._order[index])
        number = bisect_right(self._starts, place) - 1
        return _row(self._batches[number], place - self._starts[number])

    def __eq__(self, other: object) -> bool:
        """Compare with any sequence of rows."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return Rows, (self.path,)


def read_meta(directory: Path) -> RowsMeta:
    """Read meta.json. Raises FileNotFoundError or a ValueError that names the file."""
    path = Path(directory) / META
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory}: no rows there (no {META}); run headstart generate or prepare"
        )
    fields = read_json(path)
    fields.pop("key", None)
    try:
        meta = RowsMeta(**fields)
    except TypeError as error:
        raise ValueError(f"{path}: not what headstart writes ({error})") from error
    if fields.get("row_format", 1) != ROW_FORMAT:
        raise ValueError(
            f"{path}: rows of format {fields.get('row_format', 1)}, this headstart reads format "
            f"{ROW_FORMAT}; delete {directory} and make the rows again"
        )
    return meta


def read_rows(directory: Path) -> tuple[Rows, RowsMeta]:
    """Return the rows in order of their ids, read as they are asked for, and their meta.

    Raises ValueError for rows that are incomplete (their making was interrupted), damaged, or none
    at all.
    """
    directory = Path(directory)
    meta = read_meta(directory)
    if not meta.complete:
        raise ValueError(f"{directory}: not complete; run the command that makes it again")
    rows = Rows(directory / ROWS)
    if len(rows) != meta.num_rows:
        raise ValueError(
            f"{directory / ROWS}: {len(rows)} rows, {META} says {meta.num_rows} (key {meta.key}); "
            f"delete {directory} and make the rows again"
        )
    if not rows:
        raise ValueError(f"{directory}: no rows; {meta.summary}")
    return rows, meta


def rows_hash(rows: Iterable[TokenRow]) -> str:
    """Return 16 hex digits that name the content of the rows, read one by one."""
    if isinstance(rows, Rows) and rows.hash is not None:
        return rows.hash
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.row_id, row.token_ids, row.loss_mask]).encode())
    found = digest.hexdigest()[:16]
    if isinstance(rows, Rows):
        rows.hash = found
    return found


def check_rows(rows: Iterable[TokenRow], vocab_size: int) -> None:
    """Raise ValueError naming the first row with a token id outside the target's vocabulary."""
    for row in rows:
        if row.token_ids and min(row.token_ids) >= 0 and max(row.token_ids) < vocab_size:
            continue
        bad = next((token for token in row.token_ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ValueError(
                f"row {row.row_id}: token id {bad} outside the target's vocabulary of "
                f"{vocab_size}; make the rows with this target's tokenizer"
            )


def _row(batch: pa.RecordBatch, place: int) -> TokenRow:
    def numbers(name: str) -> list[int]:
        return batch[name][place].values.to_numpy().tolist()

    return TokenRow(
        batch["row_id"][place].as_py(),
        batch["category"][place].as_py(),
        numbers("token_ids"),
        numbers("loss_mask"),
        batch["stop_reason"][place].as_py(),
    )


def _ids(batches: Sequence[pa.RecordBatch]) -> pa.ChunkedArray:
    return pa.chunked_array([batch["row_id"] for batch in batches], pa.string())


def _refuse_repeats(directory: Path, ids: pa.ChunkedArray) -> None:
    if pc.count_distinct(ids).as_py() < len(ids):
        counted = pc.value_counts(ids).to_pylist()
        twice = next(entry["values"] for entry in counted if entry["counts"] > 1)
        raise ValueError(f"{directory}: several rows have the id {twice}; make ids unique")


def _batches(path: Path) -> list[pa.RecordBatch]:
    """Map the record batches of a file; their values are read when they are used."""
    if not path.exists():
        return []
    try:
        with pa.ipc.open_stream(pa.memory_map(str(path))) as stream:
            batches = list(stream)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{path}: damaged ({error}); delete {path.parent} and make the rows again"
        ) from error
    if batches and batches[0].schema != SCHEMA:
        names = ", ".join(batches[0].schema.names)
        raise ValueError(f"{path}: not rows that headstart wrote, its columns are {names}")
    return batches


def _cut_torn_batch(path: Path) -> None:
    """Cut off what a kill left of a record batch: its rows are still in the journal."""
    if not path.exists():
        return
    whole, size = 0, path.stat().st_size
    with pa.OSFile(str(path)) as file:
        while whole < size:
            try:
                pa.ipc.read_message(file)
            except (EOFError, pa.ArrowInvalid, OSError):
                log.info("%s: %d bytes of a torn batch cut off", path, size - whole)
                break
            whole = file.tell()
    if whole < size:
        os.truncate(path, whole)


def _whole_lines(path: Path) -> list[TokenRow]:
    """Read the rows of a journal, cutting a torn last line off it."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            rows.append(TokenRow(**json.loads(line)))
        except (json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number} is not a row ({error}); delete the file and run again"
            ) from error
    return rows


def _lock(directory: Path) -> FileLock:
    """Keep other processes from writing here; the operating system lets go of it after a kill."""
    # One lock object a process and directory, so that it may open its own rows again.
    lock = FileLock(directory / ".lock", is_singleton=True, thread_local=False)
    try:
        return lock.acquire(timeout=0).lock
    except Timeout:
        raise ValueError(
            f"{directory}: another process is writing rows there; wait for it or choose another "
            "directory"
        ) from None


def _write_meta(directory: Path, meta: RowsMeta) -> None:
    write_json(directory / META, {"key": meta.key} | asdict(meta))


def _refuse_other_settings(directory: Path, have: RowsMeta, want: RowsMeta) -> None:
    pairs = {
        "target": (have.target_fingerprint, want.target_fingerprint),
        "chat template": (have.template_hash, want.template_hash),
    }
    keys = sorted(have.settings.keys() | want.settings.keys())
    pairs |= {key: (have.settings.get(key), want.settings.get(key)) for key in keys}
    for name, (old, new) in pairs.items():
        if old != new:
            raise ValueError(
                f"{directory}: holds rows {have.key} made with {name}={old}, this run has "
                f"{name}={new} ({want.key}); choose another directory or delete this one"
            )
