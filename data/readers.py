"""Numbered rows out of files and Hugging Face datasets, one after the other in bounded memory.

A path is a file (JSON Lines, plain, .gz or .zst, or Parquet), a directory or a glob of such files,
a dataset that `datasets` saved, or else the name of a dataset that `datasets` can load.
"""

import glob
import gzip
import hashlib
import io
import json
import os
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import IO, Any

import pyarrow
from pyarrow import parquet

from headstart.data.conversations import Place
from headstart.data.schemas import BESIDE, FIELDS, BadRow

FORMATS = ("auto", "jsonl", "parquet", "dataset")
JSON_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")
SAVED = ("state.json", "dataset_dict.json")
"""A directory with one of these is what `datasets` saved."""
BATCH = 256
"""Parquet rows decoded at a time."""
Row = tuple[Place, str, object]
"""Place, the id of a row that has none of its own, and the decoded row or why it is none."""


@dataclass(frozen=True)
class RowFiles:
    """The rows of some files, in order of their names."""

    label: str
    """What the user called them, for messages."""
    files: tuple[Path, ...]
    format: str
    left_out: tuple[str, ...] = ()
    """Names of files in the directory or glob that are of no known kind."""

    def rows(self) -> Iterator[Row]:
        """Yield every row that is not blank. Raises ValueError for a file that is damaged."""
        for file, name in zip(self.files, self._names, strict=True):
            parquet_file = self._is_parquet(file)
            unit, rows = ("row", _table) if parquet_file else ("line", _json_lines)
            prefix = f"{name}-{unit}" if len(self.files) > 1 else unit
            for number, row in rows(file):
                yield Place(str(file), unit, number), f"{prefix}-{number}", row

    def count(self) -> int | None:
        """Return how many rows there are (blank lines counted), or None: compressed files."""
        if any(file.suffix in COMPRESSED for file in self.files):
            return None
        return sum(
            _table_rows(file) if self._is_parquet(file) else _scan(file)[1] for file in self.files
        )

    def digest(self) -> str:
        """Return 16 hex digits over the content of every file and, of several, their names."""
        if len(self.files) == 1:
            return _scan(self.files[0])[0][:16]
        named = [(name, _scan(f)[0]) for name, f in zip(self._names, self.files, strict=True)]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]

    @property
    def _names(self) -> list[str]:
        """Names that tell the files apart wherever they are kept: below what they share."""
        root = os.path.commonpath([file.parent for file in self.files])
        return [file.relative_to(root).as_posix() for file in self.files]

    def _is_parquet(self, file: Path) -> bool:
        return self.format == "parquet" or (self.format == "auto" and file.suffix == ".parquet")


@dataclass
class RowDataset:
    """The rows of one split of a Hugging Face dataset: saved on disk, or by its name."""

    label: str
    option: str
    path: str
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False

    def rows(self) -> Iterator[Row]:
        """Yield every row. Raises ValueError for a dataset that is damaged."""
        data = self._data
        with self._explained():
            for number, row in enumerate(data, start=1):
                yield Place(self.label, "row", number), f"row-{number}", _without_nulls(row)

    def count(self) -> int | None:
        """Return how many rows there are, or None: a stream has no end before its end."""
        return None if self.streaming else len(self._data)

    def digest(self) -> str:
        """Return 16 hex digits over the content: of the files, or the revision on the Hub."""
        if Path(self.path).is_dir():
            files = (f for f in sorted(Path(self.path).rglob("*")) if f.is_file())
            ours = [f for f in files if not f.name.startswith((".", "cache-"))]
            named = [(f.relative_to(self.path).as_posix(), _scan(f)[0]) for f in ours]
        else:
            from datasets import load_dataset_builder

            with self._explained():
                named = [self.path, load_dataset_builder(self.path, **self._which).hash]
        what = json.dumps([named, self.subset, self.split])
        return hashlib.sha256(what.encode()).hexdigest()[:16]

    @property
    def _which(self) -> dict[str, Any]:
        return {"name": self.subset, "revision": self.revision}

    @cached_property
    def _data(self) -> Any:
        from datasets import load_dataset, load_from_disk  # a slow import

        with self._explained():
            if is_saved_dataset(Path(self.path)):
                data = self._chosen_split(load_from_disk(self.path))
                data = data.to_iterable_dataset() if self.streaming else data
            else:
                how = {"split": self.split, "streaming": self.streaming}
                data = load_dataset(self.path, **self._which, **how)
        names = data.column_names  # None for a stream that does not say
        known = _known_columns(names, self.label) if names else None
        return data.select_columns(known) if known else data

    def _chosen_split(self, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if self.split not in data:
            raise ValueError(f"no split {self.split}; it has {', '.join(sorted(data))}")
        return data[self.split]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say which option gave a dataset that cannot be loaded, in one sentence."""
        from datasets.exceptions import DatasetsError  # a slow import

        try:
            yield
        except (ValueError, OSError, ImportError, RuntimeError, DatasetsError) as error:
            told = " ".join(str(error).split())
            raise ValueError(
                f"{self.option}={self.path}: no such file, and not a dataset that can be loaded "
                f"({told}); give an existing file, directory, glob or the name of a dataset"
                if not Path(self.path).exists()
                else f"{self.option}={self.path}: the dataset cannot be loaded ({told})"
            ) from error


def open_rows(
    path: str,
    *,
    option: str,
    format: str = "auto",
    subset: str | None = None,
    split: str = "train",
    revision: str | None = None,
    streaming: bool = False,
) -> RowFiles | RowDataset:
    """Find the rows that a path means.

    subset, split, revision and streaming are a dataset's; a warning says when they change nothing.
    Raises FileNotFoundError for what is not there and ValueError for files of no known kind; both
    name `option`, the setting that gave the path.
    """
    where = Path(path).expanduser()
    if format == "dataset" or (format == "auto" and _looks_like_dataset(path, where)):
        found = str(where) if where.exists() else path
        return RowDataset(path, option, found, subset, split, revision, streaming)
    given = {"subset": subset, "revision": revision, "streaming": streaming}
    unused = sorted(name for name, value in given.items() if value)
    unused += ["dataset_split"] if split != "train" else []
    if unused:
        warnings.warn(f"{option}={path}: {', '.join(unused)} has no effect on files", stacklevel=2)
    files, left_out = _files(path, where, option)
    for file in files:
        _refuse_array(file, option)
    return RowFiles(path, tuple(files), format, tuple(left_out))


def is_saved_dataset(directory: Path) -> bool:
    """Return whether `datasets` saved this directory."""
    return any((directory / name).is_file() for name in SAVED)


def _looks_like_dataset(path: str, where: Path) -> bool:
    """Return whether a path is a saved dataset, or owner/name with nothing of that name here."""
    if where.exists():
        return is_saved_dataset(where)
    owner, slash, name = path.partition("/")
    plain = slash and owner and name and not set(path) & set("*?[~") and "/" not in name
    return bool(plain) and not owner.startswith(".") and not _kind(Path(name))


def _files(path: str, where: Path, option: str) -> tuple[list[Path], list[str]]:
    """Return the files of a path, in order, and the names of those that are of no known kind."""
    if where.is_file():
        return [where], []
    if where.is_dir():
        inside = [f for f in sorted(where.rglob("*")) if f.is_file() and not _hidden(f, where)]
        files, left_out = [f for f in inside if _kind(f)], [f.name for f in inside if not _kind(f)]
        if not files:
            raise ValueError(
                f"{option}={path}: no .jsonl or .parquet file in this directory "
                f"({len(inside)} others); give a file, or a glob of files"
            )
        return files, left_out
    files = [Path(f) for f in sorted(glob.glob(str(where), recursive=True))]
    files = [f for f in files if f.is_file()]
    known = [f for f in files if _kind(f)]
    if known:  # else a glob of names that we do not know, which hold JSON Lines
        return known, [f.name for f in files if not _kind(f)]
    if not files:
        raise FileNotFoundError(
            f"{option}={path}: no such file; give a file, directory or glob of conversations "
            "(JSON Lines or Parquet), or the name of a dataset"
        )
    return files, []


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _kind(file: Path) -> str | None:
    """Return the suffix by which we know a file, compression left out."""
    plain = file.with_suffix("") if file.suffix in COMPRESSED else file
    known = plain.suffix in JSON_LINES or file.suffix == ".parquet"
    return plain.suffix if known else None


def _refuse_array(file: Path, option: str) -> None:
    if file.suffix != ".json":
        return
    with file.open("rb") as stream:
        if stream.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            raise ValueError(
                f"{option}={file}: one JSON array, which cannot be read row by row; "
                "write one object a line, for instance with jq -c '.[]'"
            )


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    # Bytes, not text: one badly encoded line is then one dropped row, not the end of the read.
    for line, raw in _lines(path):
        if not raw.strip():
            continue
        try:
            yield line, json.loads(raw)
        except (ValueError, RecursionError):
            yield line, BadRow("not valid JSON")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    line = 0
    with _opened(path) as stream:
        try:
            for line, raw in enumerate(stream, start=1):
                yield line, raw
        except (EOFError, zlib.error, OSError) as error:
            raise ValueError(
                f"{path}: cannot be read past line {line} ({error}); fetch or make the file again"
            ) from error


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as stream:
            yield stream
    elif path.suffix == ".zst":
        with pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd") as compressed:
            yield io.BufferedReader(compressed, 1 << 20)
    else:
        with path.open("rb") as stream:
            yield stream


def _table(path: Path) -> Iterator[tuple[int, object]]:
    with _explained_parquet(path), parquet.ParquetFile(path) as file:
        columns = _known_columns(file.schema_arrow.names, str(path))
        batches = file.iter_batches(BATCH, columns=columns, use_threads=False)
        rows = (_without_nulls(row) for batch in batches for row in batch.to_pylist())
        yield from enumerate(rows, start=1)


def _without_nulls(value: Any) -> Any:
    """Leave out the nulls at every depth: a table gives each struct the fields of all others.

    So a tool's argument that was null is lost with those that were never there.
    """
    if isinstance(value, dict):
        return {name: _without_nulls(v) for name, v in value.items() if v is not None}
    if isinstance(value, list):
        first = next((item for item in value if item is not None), None)
        # Lists of token ids are long and hold nothing to look into.
        return [_without_nulls(v) for v in value] if isinstance(first, dict | list) else value
    return value


def _table_rows(path: Path) -> int:
    with _explained_parquet(path):
        return parquet.read_metadata(path).num_rows


@contextmanager
def _explained_parquet(path: Path) -> Iterator[None]:
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:  # OSError: a page that does not unpack
        told = " ".join(str(error).split())
        raise ValueError(
            f"{path}: not a Parquet file that can be read ({told}); fetch or make it again"
        ) from error


def _known_columns(names: list[str], label: str) -> list[str]:
    """Return the columns that we read, or raise ValueError when none of them holds turns."""
    if not set(names) & set(FIELDS):
        have, need = ", ".join(sorted(names)[:8]), ", ".join(FIELDS)
        raise ValueError(f"{label}: has the columns {have}; need one of {need}")
    return [name for name in names if name in (*FIELDS, *BESIDE)]


def _scan(path: Path) -> tuple[str, int]:
    """Return the SHA-256 of a file's bytes and its number of lines, read once while unchanged."""
    status = path.stat()
    return _scan_bytes(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _scan_bytes(path: Path, size: int, modified: int) -> tuple[str, int]:
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
            lines += block.count(b"\n")
            last = block
    return digest.hexdigest(), lines + (not last.endswith(b"\n"))
