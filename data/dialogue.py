"""One conversation being answered turn by turn: asks out, answers in, rows at the end.

Every prompt is rendered anew from the text of the earlier answers, as a server does that is sent
the conversation. Where it begins with exactly the tokens so far, the row goes on; where it does not
(a template that strips reasoning, an answer that its text tokenises otherwise) a new row starts, so
that each row holds what the target really saw.
"""

from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass

from headstart.data.answering import Answer, Ask
from headstart.data.conversations import Conversation, Message
from headstart.data.template import (
    LEFT_OUT_TOOLS,
    Audit,
    ChatTemplate,
    TemplateRefusal,
    TokenRow,
)

SPLIT = "split where a later prompt does not repeat the tokens of an earlier answer"
AFTER_A_CUT = "after an answer cut by length"
TOKENISED = "tokenised already: only text can be answered turn by turn"
AFTER_A_TOOL = "that follows a tool's, whose call the target did not make"


@dataclass
class _Span:
    """One row in the making."""

    token_ids: list[int]
    loss_mask: list[int]
    stop_reason: str


class Dialogue:
    """The state of one conversation: `ask` is the turn to be answered, None when it is over.

    It is over after its last user turn, or before a turn that cannot be answered: one that leaves
    no room in `longest` tokens, that the template refuses, or that follows a cut answer (what came
    next would answer something else; a benchmark asks on, `after_cuts`). What was answered until
    then is kept. `taken` are the names that no part of this conversation may have.
    """

    def __init__(
        self,
        conversation: Conversation,
        template: ChatTemplate,
        *,
        longest: int,
        max_new_tokens: int,
        temperature: float,
        only_first: bool = False,
        after_cuts: bool = False,
        taken: Container[str] = (),
    ) -> None:
        self.conversation, self.temperature = conversation, temperature
        self._template = template.offering(conversation.tools)
        self._longest, self._max_new_tokens = longest, max_new_tokens
        self._after_cuts, self._taken = after_cuts, taken
        turns = _user_turns(conversation.messages)
        self._waiting = deque(turns[:1] if only_first else turns)
        self._messages: list[Message] = []
        self._spans: list[_Span] = []
        self.turn = 0
        """Number of the turn that `ask` stands for, from 1."""
        self.ended = "" if turns else TOKENISED if conversation.tokens else "without a user turn"
        """Why a turn was left unanswered; empty when all were answered."""
        self.ask: Ask | None = None
        self._advance()

    @property
    def turns_left(self) -> int:
        """Turns that may still be answered, the one asked included."""
        return len(self._waiting) + (self.ask is not None)

    def take(self, answer: Answer) -> None:
        """Take the answer to `ask` and make the next one."""
        assert self.ask is not None, "nothing was asked"
        if answer.unusable:
            self._end(answer.unusable)
            return
        self._extend(list(self.ask.token_ids), answer)
        if answer.stop_reason != "stop" and self._waiting and not self._after_cuts:
            self._end(AFTER_A_CUT)
            return
        self._messages.append({"role": "assistant", "content": self._text(answer)})
        self._advance()

    def rows(self) -> list[TokenRow]:
        """Return the rows; those of a conversation in several parts are named ID-1, ID-2, ..."""
        category = self.conversation.category
        return [
            TokenRow(name, category, span.token_ids, span.loss_mask, span.stop_reason)
            for name, span in zip(self._names(), self._spans, strict=True)
        ]

    def _names(self) -> list[str]:
        own = self.conversation.prompt_id
        if len(self._spans) < 2:
            return [own] * len(self._spans)
        names = [f"{own}-{number}" for number in range(1, len(self._spans) + 1)]
        return [self._free(name) for name in names]

    def _free(self, name: str) -> str:
        while name in self._taken:  # ID-1 may be the name of another conversation
            name += "-again"
        return name

    def account(self, audit: Audit) -> None:
        """Count the conversation and its rows."""
        audit.see(self._messages, self.conversation.prompt_id)
        if not self._spans:
            audit.drop(self.ended)
        elif self.ended:
            audit.note(f"ended before a turn {self.ended}")
        if len(self._spans) > 1:
            audit.note(SPLIT)
        if self._template.drops_tools:
            audit.note(LEFT_OUT_TOOLS)
        for row in self.rows():
            audit.keep(row)

    def _advance(self) -> None:
        """Ask the next turn, or end the dialogue."""
        self.ask = None
        if not self._waiting:
            return
        turn = self._waiting.popleft()
        if any(message["role"] not in ("system", "user") for message in turn):
            self._end(AFTER_A_TOOL)
            return
        self._messages += turn
        try:
            ids = self._template.prompt_ids(self._messages)
        except TemplateRefusal as refusal:
            self._end(str(refusal))
            return
        room = self._longest - len(ids)
        if room < 1:
            self._end(f"with a prompt of {self._longest} tokens or more (data.max_length)")
            return
        self.turn += 1
        # Another id for every turn: where a template shortens earlier turns, the same position
        # would else be drawn with the same randomness twice.
        name = self.conversation.prompt_id + (f"#turn-{self.turn}" if self.turn > 1 else "")
        limit = min(self._max_new_tokens, room)
        self.ask = Ask(name, tuple(ids), limit, self.temperature)

    def _end(self, reason: str) -> None:
        self.ask, self.ended = None, reason
        self._waiting.clear()

    def _extend(self, prompt: list[int], answer: Answer) -> None:
        """Add a prompt and its answer to the last row, or to a new one.

        Answers are supervised as the target emitted them. A cut one gets no end of turn, and the
        one that a template writes after it is part of a prompt, which nothing supervises.
        """
        last = self._spans[-1] if self._spans else None
        if last is None or prompt[: len(last.token_ids)] != last.token_ids:
            last = _Span([], [], "")
            self._spans.append(last)
        last.loss_mask += [0] * (len(prompt) - len(last.loss_mask)) + [1] * len(answer.token_ids)
        last.token_ids = prompt + answer.token_ids
        last.stop_reason = answer.stop_reason

    def _text(self, answer: Answer) -> str:
        stopped = answer.stop_reason == "stop"
        ids = answer.token_ids[:-1] if stopped else answer.token_ids
        return self._template.tokenizer.decode(ids, skip_special_tokens=False)


def _user_turns(messages: Sequence[Message]) -> list[list[Message]]:
    """Split the messages after every user turn; what follows the last one is left out."""
    turns: list[list[Message]] = [[]]
    for message in messages:
        turns[-1].append(message)
        if message["role"] == "user":
            turns.append([])
    return turns[:-1]
