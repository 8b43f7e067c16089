"""Atomic files, the cache directory and locks: the layer below everything else."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

BLOCK = 1 << 16


def home() -> Path:
    """Return the cache directory: `HEADSTART_HOME`, else `headstart` in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "headstart"
    return Path(os.environ.get("HEADSTART_HOME") or default).expanduser()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that replaces it when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(descriptor)
    temporary = Path(name)
    temporary.chmod(0o644)  # mkstemp makes files that only the owner may read
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; NaN and infinity are refused."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """Read JSON. Raises FileNotFoundError or a ValueError that names the file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error}); write the file again") from error


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that becomes `path` when the block ends without an error.

    An existing `path` is replaced: moved aside first, so that a kill leaves the old or the new one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.replace(path, old / path.name)
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file beside `path`, so that two processes do not make the same thing twice."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        yield


def check_free_space(path: Path, needed: int, what: str) -> None:
    """Raise ValueError when the disk that will hold `path` has less than `needed` bytes free."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise ValueError(
            f"{what} needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB free in {existing}; "
            "free some space or choose another directory"
        )


def cut_torn_line(path: Path) -> None:
    """Cut off what a kill left behind the last newline of a file of lines."""
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        while end > 0:
            start = max(0, end - BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)
