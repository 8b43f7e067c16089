"""Read a user's conversations: several JSON Lines schemas in, one `Conversation` type out.

Every row that is dropped or repaired is recorded with its line number and the reason, so that
kept + dropped always equals the rows read. Schemas: `messages` (role, content), `conversations`
(from, value), `prompt` with an optional `completion`, and `turns` (the user's side only).
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

Message = dict[str, str]
"""One turn: {"role": "system" | "user" | "assistant", "content": text}."""

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
ID_FIELDS = ("prompt_id", "question_id", "id")
LINES_SHOWN = 3


@dataclass(frozen=True)
class Conversation:
    """One chat: an optional system turn, then user turns, each followed by at most one answer."""

    prompt_id: str
    """Unique within one file; the row's own id where it has one, else its line."""
    category: str
    """The row's `category`, else "other"."""
    messages: tuple[Message, ...]


class RowNote(NamedTuple):
    """What happened to one row, by the line it came from (from 1)."""

    line: int
    reason: str


@dataclass
class Dropped:
    """The account of one read: `kept + len(dropped)` is the number of rows.

    `repaired` rows are among the kept ones; a row repaired twice has two notes.
    """

    kept: int = 0
    dropped: list[RowNote] = field(default_factory=list)
    repaired: list[RowNote] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.kept + len(self.dropped)

    def summary(self) -> str:
        """Return one line with the number of rows and the first line numbers of every reason."""
        text = f"kept {self.kept} of {self.total} rows"
        if self.dropped:
            text += f": {_by_reason(self.dropped)}"
        if self.repaired:
            text += f"; repaired {_by_reason(self.repaired)}"
        return text


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason that `Dropped` counts."""


def read_conversations(
    path: str | Path, *, need_answers: bool, option: str = "data.path"
) -> tuple[list[Conversation], Dropped]:
    """Read the conversations of a JSON Lines file and account for every row.

    See `conversations_from` for what `need_answers` changes. Blank lines are not rows. Raises
    FileNotFoundError when there is no such file and ValueError when no row is usable; both name
    `option`, the setting that gave the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"{option}={path}: no such file; give a JSON Lines file of conversations"
        )
    source = f"{option}={path}"
    return conversations_from(_json_lines(path), source=source, need_answers=need_answers)


def conversations_from(
    rows: Iterable[tuple[int, object]], *, source: str, need_answers: bool
) -> tuple[list[Conversation], Dropped]:
    """Turn numbered rows (a line number and a decoded row) into conversations.

    With `need_answers` (training) a conversation must hold an assistant turn. Without it
    (generation, evaluation) only the system and user turns are returned, each user turn to be
    answered by the target in order. Raises ValueError, naming `source`, when no row is usable.
    """
    account = Dropped()
    conversations: list[Conversation] = []
    taken: set[str] = set()
    for line, row in rows:
        try:
            conversation, repairs = _parse(row, line, need_answers)
        except BadRow as bad:
            account.dropped.append(RowNote(line, str(bad)))
            continue
        if conversation.prompt_id in taken:
            repairs.append("with a repeated id")
            unique = f"{conversation.prompt_id}-line{line}"
            conversation = Conversation(unique, conversation.category, conversation.messages)
        taken.add(conversation.prompt_id)
        conversations.append(conversation)
        account.kept += 1
        account.repaired += [RowNote(line, repair) for repair in repairs]
    if not conversations:
        raise ValueError(f"{source}: no usable row, {account.summary()}; fix or replace the file")
    return conversations, account


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    # Bytes, not text: one badly encoded line is then one dropped row, not the end of the read.
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                yield line, json.loads(raw)
            except (json.JSONDecodeError, UnicodeDecodeError):
                yield line, BadRow("not valid JSON")


def _parse(row: object, line: int, need_answers: bool) -> tuple[Conversation, list[str]]:
    if isinstance(row, BadRow):
        raise row
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    messages, repairs = _turns(row)
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("without a user turn")
    if not need_answers:
        messages = [message for message in messages if message["role"] != "assistant"]
    elif not any(message["role"] == "assistant" for message in messages):
        raise BadRow("without an assistant turn")
    ids = [str(row[name]) for name in ID_FIELDS if row.get(name) is not None]
    category = str(row.get("category") or "other")
    prompt_id = ids[0] if ids else f"line-{line}"
    return Conversation(prompt_id, category, tuple(messages)), repairs


def _turns(row: dict[str, object]) -> tuple[list[Message], list[str]]:
    """Return the turns of a row, whatever its schema, and the repairs that were made."""
    if "turns" in row:
        # Several user turns running are meant here: the answers in between are not written yet.
        return [_message("user", turn) for turn in _list(row["turns"])], []
    if "messages" in row or "conversations" in row:
        turns = _list(row["messages"] if "messages" in row else row["conversations"])
        return _repaired([_tagged_message(turn) for turn in turns])
    if "prompt" in row:
        messages = [_message("user", row["prompt"])]
        if "completion" in row:
            messages.append(_message("assistant", row["completion"]))
        return messages, []
    raise BadRow("without any of messages, conversations, prompt, turns")


def _list(turns: object) -> list[object]:
    if not isinstance(turns, list):
        raise BadRow("with turns that are not a list")
    if not turns:
        raise BadRow("without turns")
    return turns


def _tagged_message(turn: object) -> Message:
    if not isinstance(turn, dict):
        raise BadRow("with a turn that is not an object")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"with the unknown role {role!r}")
    return _message(ROLES[role], turn.get("content", turn.get("value")))


def _message(role: str, content: object) -> Message:
    if not isinstance(content, str) or not content.strip():
        raise BadRow("with a turn that has no text")
    return {"role": role, "content": content}


def _repaired(messages: list[Message]) -> tuple[list[Message], list[str]]:
    """Return turns in which user and assistant alternate, user first, and what was changed."""
    system = messages[:1] if messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    if any(turn["role"] == "system" for turn in turns):
        raise BadRow("with a system turn after the start")
    repairs = []
    first_user = next((i for i, turn in enumerate(turns) if turn["role"] == "user"), 0)
    if first_user:
        turns = turns[first_user:]
        repairs.append("by removing what came before the first user turn")
    joined: list[Message] = []
    for turn in turns:
        if joined and joined[-1]["role"] == turn["role"]:
            content = f"{joined[-1]['content']}\n\n{turn['content']}"
            joined[-1] = {"role": turn["role"], "content": content}
        else:
            joined.append(turn)
    if len(joined) < len(turns):
        repairs.append("by joining turns of one role running")
    return system + joined, repairs


def _by_reason(notes: list[RowNote]) -> str:
    parts = []
    for reason, count in Counter(note.reason for note in notes).most_common():
        lines = [str(note.line) for note in notes if note.reason == reason]
        more = ", ..." if count > LINES_SHOWN else ""
        plural = "lines" if count > 1 else "line"
        parts.append(f"{count} {reason} ({plural} {', '.join(lines[:LINES_SHOWN])}{more})")
    return ", ".join(parts)
