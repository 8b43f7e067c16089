"""The jobs of a sweep: what became of each, kept beside it, so that one bad job ends nothing else.

A job leaves OUTCOME in its directory. Started again, the same sweep runs the jobs that have not
finished, and ends with a status that tells whether all have.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from headstart.files import read_json, write_json

log = logging.getLogger(__name__)
OUTCOME = "outcome.json"
ROWS = "sweep.jsonl"
RUNNING = ".running"
HOW = ("launch", "logging", "train.resume")
"""Options that say how a job runs or is watched, not what it makes."""
USER_ERRORS = (ValueError, OSError, ImportError, RuntimeError)
"""What a message explains without a traceback."""


@dataclass
class Outcome:
    """One row of a sweep."""

    job: str
    """Directory of the job, below the sweep's."""
    overrides: list[str]
    status: str
    """finished or failed."""
    reason: str | None
    """What failed."""
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)
    """The job's options, but for those that say how it runs."""


def run_job(
    directory: Path, overrides: Sequence[str], settings: dict[str, Any], work: Callable[[], Any]
) -> Any:
    """Run one job unless it has finished, and write down what becomes of it.

    A failure is logged and kept, not raised; Ctrl-C and SystemExit end the sweep. Raises SystemExit
    for a directory that holds a job with other options.
    """
    settings = _without(settings, HOW)
    if _finished(directory, settings):
        log.info("%s: finished already; remove its %s to run it again", directory, OUTCOME)
        return None
    started, result, reason = time.perf_counter(), None, None
    try:
        result = work()
    except Exception as error:
        told = isinstance(error, USER_ERRORS)
        log.error("%s failed: %s", directory, error, exc_info=not told)
        reason = str(error) if told else f"{type(error).__name__}: {error}"
    seconds = round(time.perf_counter() - started, 1)
    status = "finished" if reason is None else "failed"
    outcome = Outcome(directory.name, list(overrides), status, reason, seconds, settings)
    write_json(directory / OUTCOME, asdict(outcome))
    return result


def _finished(directory: Path, settings: dict[str, Any]) -> bool:
    """Tell whether a directory holds this very job, finished; refuse one that holds another."""
    if not (directory / OUTCOME).is_file():
        return False
    there = Outcome(**read_json(directory / OUTCOME))
    if there.status != "finished":
        return False
    changed = _changed(there.settings, json.loads(json.dumps(settings)))
    if changed:
        raise SystemExit(
            f"error: {directory}: holds a finished job with another {changed[0]}; choose another "
            "out for this sweep"
        )
    return True


def end_sweep(directory: Path) -> str | None:
    """Write a sweep's rows to ROWS, tell them, and return a sentence on the failed ones, if any."""
    paths = sorted(directory.rglob(OUTCOME), key=_in_order)
    rows = [Outcome(**read_json(path)) for path in paths]
    lines = [json.dumps({k: v for k, v in asdict(row).items() if k != "settings"}) for row in rows]
    if not rows:
        return None
    (directory / ROWS).write_text("\n".join(lines) + "\n", encoding="utf-8")
    common = set.intersection(*(set(row.overrides) for row in rows)) if len(rows) > 1 else set()
    for row in rows:
        own = " ".join(override for override in row.overrides if override not in common)
        told = f"failed: {row.reason}" if row.reason else f"finished in {row.seconds:.0f} s"
        log.info("%s (%s): %s", row.job, own, told)
    failed = [row for row in rows if row.status == "failed"]
    if not failed:
        return None
    jobs = "; ".join(f"{row.job} ({row.reason})" for row in failed)
    return f"{len(failed)} of {len(rows)} jobs failed: {jobs}"


@contextmanager
def claim(directory: Path) -> Iterator[None]:
    """Hold a directory until the block, or this process, ends.

    Raises ValueError when another run holds it: two of the same second would write over each other.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = FileLock(directory / RUNNING, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"out={directory}: another run is writing there; choose another directory"
        ) from None
    try:
        yield
    finally:
        (directory / RUNNING).unlink(missing_ok=True)
        lock.release()


def _in_order(path: Path) -> tuple[int, str]:
    name = path.parent.name
    return (int(name) if name.isdigit() else 0, name)


def _without(settings: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return nested settings without some, given by dotted names."""
    kept = {}
    for name, value in settings.items():
        below = [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]
        if name not in keys:
            kept[name] = _without(value, below) if isinstance(value, dict) else value
    return kept


def _changed(old: Any, new: Any, name: str = "") -> list[str]:
    """Return the dotted names of what differs between two settings."""
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = [(f"{name}.{k}".lstrip("."), old.get(k), new.get(k)) for k in {**old, **new}]
        return [found for key, one, other in pairs for found in _changed(one, other, key)]
    return [] if old == new else [name]
