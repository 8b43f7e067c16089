"""Render conversations with the target's chat template and mark the answer tokens.

The loss mask comes from token boundaries: an answer starts where the generation prompt ends and
ends with the end-of-turn token, so nothing is ever found by searching the rendered text. A row
begins with exactly the ids that generation sees, for every answer that it supervises.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from headstart.data.conversations import Message

SPLIT = "split where a later prompt renders an earlier answer differently"
CUT = "cut to max_length"
TRUNCATED = "truncated away"
PROBE = {"role": "user", "content": "a"}


@dataclass
class TokenRow:
    """One training row: token ids and, for each, 1 where it is supervised (part of an answer)."""

    row_id: str
    category: str
    token_ids: list[int]
    loss_mask: list[int]
    stop_reason: str | None
    """How the last answer ended: the generator's word, "length" where it was cut (here or in
    generation), None for a whole answer that came with the data."""

    @property
    def supervised(self) -> int:
        """Number of supervised tokens."""
        return sum(self.loss_mask)

    @property
    def coverage(self) -> float:
        """Supervised fraction of the row, between 0 and 1."""
        return self.supervised / len(self.token_ids)


@dataclass
class Audit:
    """Sums over the conversations that were rendered; every field adds over files and ranks."""

    prompts: None = None
    conversations: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that are gone, by reason; a conversation that was never split is one row."""
    noted: Counter[str] = field(default_factory=Counter)
    """Rows kept but cut, and conversations that were split, by reason."""

    def see(self, messages: Sequence[Message], row_id: str) -> None:
        """Count one conversation, whatever becomes of it."""
        self.conversations += 1

    def merge(self, other: "Audit") -> None:
        """Add the account of another worker."""
        for name in ("conversations", "rows", "tokens", "supervised"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dropped.update(other.dropped)
        self.noted.update(other.noted)

    def empty(self) -> "Audit":
        """Return an audit of nothing: what a worker starts with."""
        return Audit()

    def keep(self, row: TokenRow) -> None:
        self.rows += 1
        self.tokens += len(row.token_ids)
        self.supervised += row.supervised

    def summary(self) -> str:
        """Return one line: rows, supervised tokens, and every reason with its count."""
        share = 100 * self.supervised / max(self.tokens, 1)
        text = f"{self.rows} rows from {self.conversations} conversations, "
        text += f"{self.supervised} of {self.tokens} tokens supervised ({share:.0f} %)"
        for title, counts in (("dropped", self.dropped), ("noted", self.noted)):
            if counts:
                reasons = (f"{count} {reason}" for reason, count in counts.most_common())
                text += f"; {title}: {', '.join(reasons)}"
        return text


class TemplateRefusal(ValueError):
    """A conversation that this template cannot render safely; the message is the drop reason."""


class ChatTemplate:
    """A tokenizer's chat template: prompts for generation, and rows with their loss mask.

    Raises ValueError when the tokenizer has no chat template, or one that closes an answer with
    no token of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise ValueError(
                f"{name}: the tokenizer has no chat template; use the instruct version of the "
                "model or set tokenizer.chat_template"
            )
        self.tokenizer = tokenizer
        yes = self._ids([PROBE, {"role": "assistant", "content": "yes"}], generation=False)
        no = self._ids([PROBE, {"role": "assistant", "content": "no"}], generation=False)
        added = tokenizer.added_tokens_decoder
        end_of_turn = next((token for token in _common_tail(yes, no) if token in added), None)
        if end_of_turn is None:
            raise ValueError(
                f"{name}: the chat template closes an answer with no special token; "
                "add the end-of-sequence token to the template"
            )
        self.end_of_turn_id = end_of_turn
        self._end_of_turn = str(added[end_of_turn])
        written = {str(added[token]) for token in yes if token in added and added[token].special}
        self._markers = {self._end_of_turn, *written, *tokenizer.all_special_tokens}

    @property
    def hash(self) -> str:
        """The 16 hex digits that identify the template text and the special ids."""
        special = sorted({*self.tokenizer.all_special_ids, self.end_of_turn_id})
        what = [self.tokenizer.get_chat_template(), special, self.tokenizer.bos_token_id]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]

    def stop_ids(self, model_eos: Sequence[int]) -> list[int]:
        """Return the ids that end an answer: the model's own and the end of turn, ascending."""
        return sorted({*model_eos, self.end_of_turn_id})

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids that generation starts from, the generation prompt included.

        BOS is there exactly as often as the template writes it; the tokenizer adds none. Raises
        TemplateRefusal when the template refuses the turns or one holds a special token's text.
        """
        self._refuse_markers(messages)
        return self._ids(messages, generation=True)

    def rows(
        self,
        messages: Sequence[Message],
        *,
        row_id: str,
        category: str,
        max_length: int,
        audit: Audit,
    ) -> list[TokenRow]:
        """Return the rows of one conversation, counted in `audit`: one, or none when dropped.

        For every supervised answer, prompt_ids(the turns before it) is a prefix of its row. Where
        a later prompt renders an earlier answer differently (a template that strips reasoning, a
        tokenizer that merges header and answer) no single row can hold both, so a new row starts
        there, and the ids become row_id-1, row_id-2. Turns after the last answer are left out.
        """
        audit.conversations += 1
        try:
            spans = self._spans(messages)
        except TemplateRefusal as refusal:
            audit.dropped[str(refusal)] += 1
            return []
        names = [row_id]
        if len(spans) > 1:
            audit.noted[SPLIT] += 1
            names = [f"{row_id}-{number}" for number in range(1, len(spans) + 1)]
        rows = []
        for name, (ids, mask) in zip(names, spans, strict=True):
            row = _cut_row(TokenRow(name, category, ids, mask, None), max_length, audit)
            rows += [row] if row else []
        return rows

    def row_from_answer(
        self,
        messages: Sequence[Message],
        answer_ids: Sequence[int],
        *,
        stop_reason: str,
        row_id: str,
        category: str,
        max_length: int,
        audit: Audit,
    ) -> TokenRow | None:
        """Return the row of a generated answer, or None when it is dropped (counted in `audit`).

        `answer_ids` are what the model emitted after prompt_ids(messages), its stop token
        included if it emitted one. They are supervised as they are: nothing is tokenised again
        and no end of turn is added, so an answer cut by length never teaches one.
        """
        audit.conversations += 1
        try:
            prompt = self.prompt_ids(messages)
        except TemplateRefusal as refusal:
            audit.dropped[str(refusal)] += 1
            return None
        mask = [0] * len(prompt) + [1] * len(answer_ids)
        row = TokenRow(row_id, category, prompt + list(answer_ids), mask, stop_reason)
        return _cut_row(row, max_length, audit)

    def _spans(self, messages: Sequence[Message]) -> list[tuple[list[int], list[int]]]:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise TemplateRefusal("without an assistant turn")
        self._refuse_markers(messages[: answers[-1] + 1])
        spans: list[tuple[list[int], list[int]]] = []
        ids: list[int] = []
        mask: list[int] = []
        for at in answers:
            prompt, inserted, answer = self._answer(messages[: at + 1])
            if prompt[: len(ids)] != ids:
                spans.append((ids, mask))
                mask = []
            mask = mask + [0] * (len(prompt) + len(inserted) - len(mask)) + [1] * len(answer)
            ids = prompt + inserted + answer
        return [*spans, (ids, mask)]

    def _answer(self, messages: Sequence[Message]) -> tuple[list[int], list[int], list[int]]:
        """Return the prompt of the last answer, what the template inserts, and the answer.

        The answer ends with the end of turn. Inserted is what precedes the content without being
        part of it, such as an empty reasoning block.
        """
        prompt = self._ids(messages[:-1], generation=True)
        prompt_text = self._text(messages[:-1], generation=True)
        text = self._text(messages, generation=False)
        if not text.startswith(prompt_text):
            raise TemplateRefusal("with an answer that does not follow the generation prompt")
        rest_text = text[len(prompt_text) :]
        rest = self._continuation(prompt, self._ids(messages, generation=False), rest_text)
        if self.end_of_turn_id not in rest:
            raise TemplateRefusal("with an answer that the template does not close")
        answer = rest[: rest.index(self.end_of_turn_id) + 1]
        lead = self._lead(rest_text, messages[-1]["content"])
        if answer[: len(lead)] != lead:
            raise TemplateRefusal("with an answer that merges with what the template inserts")
        return prompt, lead, answer[len(lead) :]

    def _continuation(self, prompt: list[int], full: list[int], rest_text: str) -> list[int]:
        """Return the ids after the prompt, as a model that was given the prompt would emit them."""
        if full[: len(prompt)] == prompt:
            return full[len(prompt) :]
        # The tokenizer merges across the boundary (a newline with the first letter, say), which
        # generation never sees: it starts from the prompt's ids. Tokenise the answer by itself.
        rest = self.tokenizer.encode(rest_text, add_special_tokens=False)
        if self.tokenizer.decode(prompt + rest) != self.tokenizer.decode(full):
            raise TemplateRefusal("with an answer that cannot be tokenised apart from its prompt")
        return rest

    def _lead(self, rest_text: str, content: str) -> list[int]:
        # No content holds the end of turn (see _refuse_markers): the first one is the template's.
        rendered = rest_text[: rest_text.index(self._end_of_turn)].rstrip()
        content = content.strip()
        if not content or not rendered.endswith(content):
            raise TemplateRefusal("with an answer that the template rewrites")
        lead = rendered[: len(rendered) - len(content)]
        return self.tokenizer.encode(lead, add_special_tokens=False) if lead.strip() else []

    def _refuse_markers(self, messages: Sequence[Message]) -> None:
        # The tokenizer would read the text of a marker as the marker itself: a false turn.
        for message in messages:
            found = sorted(marker for marker in self._markers if marker in message["content"])
            if found:
                raise TemplateRefusal(f"with the special token {found[0]} inside a turn")

    def _ids(self, messages: Sequence[Message], *, generation: bool) -> list[int]:
        return self._apply(messages, generation, tokenize=True, return_dict=False)

    def _text(self, messages: Sequence[Message], *, generation: bool) -> str:
        return self._apply(messages, generation, tokenize=False)

    def _apply(self, messages: Sequence[Message], generation: bool, **how: bool) -> list[int] | str:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=generation, **how
            )
        except TemplateError as error:
            raise TemplateRefusal(f"refused by the chat template ({error})") from error


def _common_tail(left: list[int], right: list[int]) -> list[int]:
    pairs = zip(reversed(left), reversed(right), strict=False)
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)][::-1]


def _cut_row(row: TokenRow, max_length: int, audit: Audit) -> TokenRow | None:
    """Return the row cut to `max_length` tokens, or None when no supervised token is left."""
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: need at least one token")
    cut = len(row.token_ids) > max_length
    if cut:
        row.token_ids = row.token_ids[:max_length]
        row.loss_mask = row.loss_mask[:max_length]
        row.stop_reason = "length"
    if not any(row.loss_mask):
        audit.dropped[TRUNCATED if cut else "with an empty answer"] += 1
        return None
    if cut:
        audit.noted[CUT] += 1
    audit.keep(row)
    return row
