"""Token rows on disk: a directory with rows.jsonl and meta.json, which says what made them.

Rows are appended one line at a time, so a kill loses at most the line being written; a torn last
line is dropped when the file is read again. Reading sorts by row id: the order of writing, which
depends on what finished first, changes nothing.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headstart import __version__
from headstart.data.template import TokenRow
from headstart.files import read_json, write_json

ROWS, META = "rows.jsonl", "meta.json"


@dataclass
class RowsMeta:
    """What made a set of rows. Rows made under other settings are refused, not mixed in."""

    target_fingerprint: str
    template_hash: str
    settings: dict[str, Any]
    """Every option that changes the rows."""
    headstart_version: str = __version__
    complete: bool = False
    summary: str = ""
    counts: dict[str, int] = field(default_factory=dict)


class RowsWriter:
    """Appends rows to a directory, taking up where an earlier run of the same settings stopped.

    Raises ValueError naming the first setting that differs from what the directory holds.
    """

    def __init__(self, directory: Path, meta: RowsMeta) -> None:
        self.directory, self.meta = directory, meta
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / META).exists():
            _refuse_other_settings(directory, read_meta(directory), meta)
        write_json(directory / META, asdict(meta))
        self.rows = _whole_lines(directory / ROWS)
        self.done_ids = {row.row_id for row in self.rows}
        self._file = (directory / ROWS).open("a", encoding="utf-8")

    def add(self, row: TokenRow) -> None:
        """Append one row and hand it to the operating system."""
        self._file.write(json.dumps(asdict(row)) + "\n")
        self._file.flush()

    def finish(self, summary: str, counts: dict[str, int]) -> None:
        """Mark the rows complete."""
        self.close()
        self.meta.complete, self.meta.summary, self.meta.counts = True, summary, counts
        write_json(self.directory / META, asdict(self.meta))

    def close(self) -> None:
        """Close the file; the rows stay incomplete and can be taken up again."""
        self._file.close()


def read_meta(directory: Path) -> RowsMeta:
    """Read meta.json. Raises FileNotFoundError or a ValueError that names the file."""
    path = directory / META
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory}: no rows there (no {META}); run headstart generate or prepare"
        )
    fields = read_json(path)
    try:
        return RowsMeta(**fields)
    except TypeError as error:
        raise ValueError(f"{path}: not what headstart writes ({error})") from error


def read_rows(directory: Path) -> tuple[list[TokenRow], RowsMeta]:
    """Return the rows in order of their ids, and their meta.

    Raises ValueError for rows that are incomplete (their making was interrupted) or none at all.
    """
    directory = Path(directory)
    meta = read_meta(directory)
    if not meta.complete:
        raise ValueError(f"{directory}: not complete; run the command that makes it again")
    rows = sorted(_whole_lines(directory / ROWS), key=lambda row: row.row_id)
    if not rows:
        raise ValueError(f"{directory}: no rows; {meta.summary}")
    return rows, meta


def rows_hash(rows: Iterable[TokenRow]) -> str:
    """Return 16 hex digits that name the content of the rows."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.row_id, row.token_ids, row.loss_mask]).encode())
    return digest.hexdigest()[:16]


def check_rows(rows: Iterable[TokenRow], vocab_size: int) -> None:
    """Raise ValueError naming the first row with a token id outside the target's vocabulary."""
    for row in rows:
        bad = next((token for token in row.token_ids if not 0 <= token < vocab_size), None)
        if bad is not None:
            raise ValueError(
                f"row {row.row_id}: token id {bad} outside the target's vocabulary of "
                f"{vocab_size}; make the rows with this target's tokenizer"
            )


def _whole_lines(path: Path) -> list[TokenRow]:
    """Read the rows of a file, cutting a torn last line off it."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    rows = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            rows.append(TokenRow(**json.loads(line)))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(
                f"{path}: line {number} is not a row ({error}); delete the file and make it again"
            ) from error
    return rows


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
                f"{directory}: holds rows made with {name}={old}, this run has {name}={new}; "
                "choose another directory or delete this one"
            )
