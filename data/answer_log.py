"""Every answer as it came, one JSON line each: what a killed run is taken up from.

An answer costs a model's time, a row made of it almost none. So answers are kept as they come, with
their temperature and how they ended, and rows are made of them again whenever a run is taken up:
the same rows, whatever happened between an answer and its row. A kill loses at most the line being
written.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from headstart.data.answering import Answer
from headstart.data.dialogue import Dialogue
from headstart.files import cut_torn_line

ANSWERS = "answers.jsonl"


class LoggedAnswer(NamedTuple):
    """An answer, and the turn of the conversation it belongs to, from 1."""

    prompt_id: str
    turn: int
    temperature: float
    stop_reason: str
    token_ids: list[int]
    unusable: str

    @property
    def answer(self) -> Answer:
        return Answer(self.prompt_id, self.token_ids, self.stop_reason, self.unusable)


class AnswerLog:
    """Appends answers to a file and reads them back; a torn last line is cut off first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            cut_torn_line(path)
        self._file = path.open("a", encoding="utf-8")

    def add(self, dialogue: Dialogue, answer: Answer) -> None:
        """Append the answer to a dialogue's ask and hand it to the operating system."""
        logged = LoggedAnswer(
            dialogue.conversation.prompt_id,
            dialogue.turn,
            dialogue.temperature,
            answer.stop_reason,
            answer.token_ids,
            answer.unusable,
        )
        self._file.write(json.dumps(logged._asdict()) + "\n")
        self._file.flush()

    def replay(self, dialogues: dict[str, Dialogue]) -> Iterator[Dialogue]:
        """Give the dialogues, by prompt id, their logged answers; yield each that took one.

        Raises ValueError naming the line of an answer to a turn that is not being asked.
        """
        with self.path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                logged = self._read(number, line)
                dialogue = dialogues.get(logged.prompt_id)
                asked = dialogue is not None and dialogue.ask is not None
                if not asked or dialogue.turn != logged.turn:
                    raise ValueError(
                        f"{self.path}: line {number} answers turn {logged.turn} of prompt "
                        f"{logged.prompt_id}, which this run does not ask; delete the directory "
                        "and generate again"
                    )
                dialogue.take(logged.answer)
                yield dialogue

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, number: int, line: str) -> LoggedAnswer:
        try:
            return LoggedAnswer(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as error:
            raise ValueError(
                f"{self.path}: line {number} is not an answer ({error}); delete the directory and "
                "generate again"
            ) from error
