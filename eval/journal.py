"""The journal of a benchmark: every session as it was measured, one JSON line each.

A run of the same settings takes its sessions from there and goes on; a kill loses at most the
session it falls into. The first line holds every setting that changes what is measured. Where one
differs the journal starts anew, and an unfinished one is kept beside it.
"""

import json
import logging
import os
from collections import UserDict
from collections.abc import Mapping
from dataclasses import asdict, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from headstart.eval.engine.decode import Request
from headstart.eval.engine.records import Completion, Round
from headstart.eval.sessions import Place, Session, Turn
from headstart.files import cut_torn_line

log = logging.getLogger(__name__)
JOURNAL = "journal.jsonl"
FORMAT = 1
ABSENT = "nothing"


class Journal(UserDict[Place, Session]):
    """The sessions measured so far, by repeat and group; a new one is written as it is added.

    Use it as a context manager: it is closed, and free for another process, at the end. Raises
    ValueError for a damaged line, and where another process is measuring into the same directory.
    """

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], *, resume: bool = True
    ) -> None:
        super().__init__()
        self.path = directory / JOURNAL
        self.runs: list[str] = []
        """When each run that measured any of it began, ISO 8601, UTC."""
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(directory / ".journal.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"{directory}: another process is measuring there; wait for it or choose another "
                "out"
            ) from None
        try:
            self._open(json.loads(json.dumps(settings)), resume)
        except BaseException:
            self._lock.release()
            raise

    def __setitem__(self, place: Place, session: Session) -> None:
        if self._began not in self.runs:
            self.runs.append(self._began)
        self._write({"place": place, "run": self._began, **_to_json(session)})
        super().__setitem__(place, session)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        self._lock.release()
        if kind is not None and self.data:
            log.warning(
                "%s keeps the %d sessions measured so far; the same command again goes on from "
                "there",
                *(self.path, len(self)),
            )

    def finish(self) -> None:
        """Note that everything asked for was measured."""
        if not self._finished:
            self._write({"finished": True})

    def notes(self) -> list[str]:
        """Return what a reader must know of a benchmark that was not measured in one go."""
        if len(self.runs) < 2:
            return []
        return [
            f"measured in {len(self.runs)} runs, begun {', '.join(self.runs)}; the arms of each "
            "prompt were measured in one of them"
        ]

    def _open(self, settings: dict[str, Any], resume: bool) -> None:
        self._began = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._finished, self._lines, header = False, 0, None
        if self.path.exists():
            cut_torn_line(self.path)
            header = self._read()
        why = "eval.resume=false" if not resume else _difference(header, settings)
        if header is not None and why:
            self._start_afresh(why)
            header = None
        self._file = self.path.open("a", encoding="utf-8")
        if header is None:
            self._write({"format": FORMAT, "settings": settings})
        elif self.data:
            log.info("%s: %d sessions were measured earlier and are kept", self.path, len(self))

    def _read(self) -> dict[str, Any] | None:
        """Read every line; return the settings, or None for a journal that never began."""
        header = None
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                try:
                    entry, self._lines = json.loads(line), number
                    self._finished = "finished" in entry
                    if number == 1:
                        header = entry["settings"] if entry["format"] == FORMAT else {}
                    elif not self._finished and header:
                        self.data[tuple(entry["place"])] = _from_json(entry)
                        if entry["run"] not in self.runs:
                            self.runs.append(entry["run"])
                except (ValueError, TypeError, LookupError) as error:
                    raise ValueError(
                        f"{self.path}: line {number} is not a session ({error}); delete the file "
                        "and measure again"
                    ) from error
        return header

    def _start_afresh(self, why: str) -> None:
        """Leave the earlier sessions: replaced where they were all there, else kept beside."""
        if self._finished or self._lines < 2:
            self.path.unlink()
            log.info("%s: measured again from the start: %s", self.path, why)
        else:
            number = 1
            while (aside := self.path.with_name(f"journal.earlier-{number}.jsonl")).exists():
                number += 1
            self.path.rename(aside)
            log.warning(
                "%s: not taken up but measured from the start: %s; its %d sessions are now in %s",
                *(self.path, why, self._lines - 1, aside),
            )
        self._finished, self.runs = False, []
        self.data.clear()

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._finished = "finished" in entry


def _difference(have: Mapping[str, Any] | None, want: Mapping[str, Any]) -> str:
    """Return the first setting that differs, as a clause; empty when none does."""
    if have is None:
        return ""
    if not have:
        return "written by another version of headstart"
    for name in [*want, *have]:
        old, new = have.get(name, ABSENT), want.get(name, ABSENT)
        if old != new:
            return f"{name} was {old}, now {new}"
    return ""


def _to_json(session: Session) -> dict[str, Any]:
    return {
        "asked": [[asdict(turn) for turn in turns] for turns in session.asked],
        "done": [[[_completion(c) for c in turn] for turn in turns] for turns in session.done],
        "unasked": session.unasked,
    }


def _completion(completion: Completion) -> dict[str, Any]:
    """Lay a completion out, its rounds column by column."""
    names = [f.name for f in fields(Round)]
    rounds = {name: [getattr(r, name) for r in completion.rounds] for name in names}
    return vars(completion) | {"rounds": rounds}


def _from_json(entry: Mapping[str, Any]) -> Session:
    return Session(
        [[_turn(turn) for turn in turns] for turns in entry["asked"]],
        [[[_read_completion(c) for c in turn] for turn in turns] for turns in entry["done"]],
        entry["unasked"],
    )


def _turn(values: Mapping[str, Any]) -> Turn:
    request = values["request"]
    return Turn(
        values["owner"],
        Request(request["prompt_id"], tuple(request["token_ids"]), request["max_new_tokens"]),
    )


def _read_completion(values: dict[str, Any]) -> Completion:
    columns = values["rounds"]
    rounds = [
        Round(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)
    ]
    return Completion(**values | {"rounds": rounds})
