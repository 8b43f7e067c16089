"""Render conversations with the target's chat template and mark the answer tokens.

An answer is what follows the generation prompt, up to and with the end-of-turn token; nothing is
ever found by searching the rendered conversation. Where the template marks its answers with
`{% generation %}`, only what it marks is supervised. A row begins with exactly the ids that
generation sees, for every answer that it supervises, whatever the day (see `template_source`).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from copy import copy
from os.path import commonprefix
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from headstart.data.audit import Audit
from headstart.data.conversations import Message
from headstart.data.template_source import tokenizer_state, without_clock
from headstart.data.token_row import CUT_SHORT, TokenRow
from headstart.data.turns import (
    PROBE,
    ROLE_PROBES,
    TOOL_PROBE,
    WORD,
    TemplateRefusal,
    answer_of,
    common_tail,
    continued,
    holds,
    mask_of_rest,
    opened_by,
    says_something,
    texts_in,
    with_text_arguments,
)

__all__ = ["Audit", "ChatTemplate", "TemplateRefusal", "TokenRow"]

SPLIT = "split where a later prompt renders an earlier answer differently"
EMPTY = "with an empty answer"
UNTAUGHT = "with an empty answer, which is not supervised"
LEFT_OUT_TOOLS = "without tool definitions, which the template leaves out"
CUT = "cut to max_length"
TRUNCATED = "truncated away"
FROM_TEMPLATES = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
)
"""What a template raises: its own refusal, or what befalls an expression inside it."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


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
        self.source = str(tokenizer.get_chat_template())
        # A tokenizer may have a template of its own for conversations with tools.
        for_tools = str(tokenizer.get_chat_template(tools=[TOOL_PROBE]))
        self._tools: tuple[dict[str, Any], ...] = ()
        self._text_arguments = False
        """Whether the template takes a tool call's arguments as JSON text alone."""
        self._text_used = without_clock(self.source, name)
        self._text_for_tools = without_clock(for_tools, name)
        state = tokenizer_state(tokenizer)  # now: its use may change a tokenizer
        self.mask_mode = "markers" if GENERATION.search(self.source) else "boundaries"
        """Where the mask comes from: the template's markers, or rendering boundaries."""
        yes = self._ids([PROBE, answer_of("yes")], generation=False)
        no = self._ids([PROBE, answer_of("no")], generation=False)
        added = tokenizer.added_tokens_decoder
        end_of_turn = next((token for token in common_tail(yes, no) if token in added), None)
        if end_of_turn is None:
            raise ValueError(
                f"{name}: the chat template closes an answer with no special token; "
                "add the end-of-sequence token to the template"
            )
        if tokenizer.bos_token_id is not None and yes[:2] == [tokenizer.bos_token_id] * 2:
            raise ValueError(f"{name}: the chat template begins with two BOS tokens; remove one")
        self.end_of_turn_id = end_of_turn
        self._end_of_turn = str(added[end_of_turn])
        self.special = {i: str(token) for i, token in added.items() if token.special}
        probes = self._role_probes()
        if "tool" not in probes:  # perhaps it joins arguments to text as they are
            self._text_arguments = True
            probes = self._role_probes()
            self._text_arguments = "tool" in probes
        self._unheard = {role for role, text in probes.items() if WORD not in text}
        self._markers = self._marker_pattern(yes, probes.values())
        special = sorted({*tokenizer.all_special_ids, end_of_turn})
        self._hears_tools = self._writes_tools()
        what = [self.source, for_tools, special, tokenizer.bos_token_id, state]
        self.hash = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
        """The 16 hex digits that identify the template text, the tokenizer and special ids."""

    def offering(self, tools: Sequence[dict[str, Any]]) -> "ChatTemplate":
        """Return the template of conversations whose answers may call these tools."""
        other = copy(self)
        other._tools = tuple(tools)
        return other

    @property
    def drops_tools(self) -> bool:
        """Whether there are tools which the template does not write."""
        return bool(self._tools) and not self._hears_tools

    @property
    def has_clock(self) -> bool:
        """Whether the template writes today's date, which is held at one day here."""
        return self._text_used != self.source

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
        stop_reason: str | None = None,
    ) -> list[TokenRow]:
        """Return the rows of one conversation, counted in `audit`; none when it is dropped.

        For every supervised answer, prompt_ids(the turns before it) is a prefix of its row. Where
        a later prompt renders an earlier answer differently (a template that strips reasoning, a
        tokenizer that merges header and answer) no single row can hold both, so a new row starts
        there, and the ids become row_id-1, row_id-2. An empty answer is never supervised, turns
        after the last answer are left out, and a last answer that was cut short (`stop_reason`) is
        not taught to end.
        """
        audit.see(messages, row_id)
        if self.drops_tools:
            audit.note(LEFT_OUT_TOOLS)
        try:
            spans = self._spans(messages, audit)
        except TemplateRefusal as refusal:
            audit.drop(str(refusal))
            return []
        names = [row_id]
        if len(spans) > 1:
            audit.note(SPLIT)
            names = [f"{row_id}-{number}" for number in range(1, len(spans) + 1)]
        last = [message for message in messages if message["role"] == "assistant"][-1]
        ended = stop_reason if says_something(last) else None
        if ended in CUT_SHORT:
            spans[-1] = self._without_end(*spans[-1])
        rows = []
        for name, (ids, mask) in zip(names, spans, strict=True):
            why = ended if name == names[-1] else None
            row = cut_row(TokenRow(name, category, ids, mask, why), max_length, audit)
            rows += [row] if row else []
        return rows

    def _spans(
        self, messages: Sequence[Message], audit: Audit
    ) -> list[tuple[list[int], list[int]]]:
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise TemplateRefusal("without an assistant turn")
        self._refuse_markers(messages[: answers[-1] + 1])
        told = [at for at in answers if says_something(messages[at])]
        if not told:
            raise TemplateRefusal(EMPTY)
        spans: list[tuple[list[int], list[int]]] = []
        ids: list[int] = []
        mask: list[int] = []
        for at in told:
            prompt, answer, taught = self._answer(messages[: at + 1])
            if prompt[: len(ids)] != ids:
                spans.append((ids, mask))
                mask = []
            mask = mask + [0] * (len(prompt) - len(mask)) + taught
            ids = prompt + answer
        if len(told) < len(answers):
            audit.note(UNTAUGHT)
        return [*spans, (ids, mask)]

    def _without_end(self, ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
        """Leave out an answer's end of turn, and the white space that the template sets before."""
        end = len(ids) - 1
        while end and not self.tokenizer.decode(ids[end - 1 : end]).strip():
            end -= 1
        return ids[:end], mask[:end]

    def _answer(self, messages: Sequence[Message]) -> tuple[list[int], list[int], list[int]]:
        """Return the prompt of the last answer, the ids up to its end of turn, and their mask."""
        prompt_text = self._text(messages[:-1], generation=True)
        prompt = self._encode(prompt_text)
        text = self._text(messages, generation=False)
        if not text.startswith(prompt_text):
            answer = self._encode(continued(prompt_text, messages[-1]))
            return prompt, [*answer, self.end_of_turn_id], [1] * (len(answer) + 1)
        rest_text = text[len(prompt_text) :]
        if self._end_of_turn not in rest_text:
            raise TemplateRefusal("with an answer that the template does not close")
        full = self._encode(text)
        rest = self._continuation(prompt, full, rest_text)
        # No content holds the end of turn (see _refuse_markers): the first one is the template's.
        body = rest_text[: rest_text.index(self._end_of_turn)]
        inserted = self._inserted(messages, prompt_text, body)
        lead = self._encode(inserted)
        rest = lead + self._continuation(lead, rest, rest_text[len(inserted) :])
        answer = rest[: rest.index(self.end_of_turn_id) + 1]
        taught = [1] * len(answer)
        if self.mask_mode == "markers":
            taught = mask_of_rest(self._marked(messages), full, rest)[: len(answer)]
            if not any(taught[len(lead) :]):
                raise TemplateRefusal("with an answer that the template does not mark")
            taught[-1] = max(taught[-2:])  # an end of turn just outside the markers is taught too
        return prompt, answer, [0] * len(lead) + taught[len(lead) :]

    def _continuation(self, prompt: list[int], full: list[int], rest_text: str) -> list[int]:
        """Return the ids after the prompt, as a model that was given the prompt would emit them."""
        if full[: len(prompt)] == prompt:
            return full[len(prompt) :]
        # The tokenizer merges across the boundary (a newline with the first letter, say), which
        # generation never sees: it starts from the prompt's ids. Tokenise the answer by itself.
        rest = self._encode(rest_text)
        if self.tokenizer.decode(prompt + rest) != self.tokenizer.decode(full):
            raise TemplateRefusal("with an answer that cannot be tokenised apart from its prompt")
        return rest

    def _inserted(self, messages: Sequence[Message], prompt_text: str, body: str) -> str:
        """Return what the template writes before any answer here, an empty reasoning block say."""
        message = messages[-1]
        plain = not (message.get("tool_calls") or message.get("reasoning_content"))
        # What the prompt opens is part of what the message says.
        whole = holds(body, message) or holds(opened_by(prompt_text) + body, message)
        if plain and whole:
            return ""
        others = [
            self._text([*messages[:-1], answer_of(word)], generation=False)
            for word in ("yes", "no")
        ]
        lead = commonprefix(others)[len(prompt_text) :]
        if lead.strip() and body.startswith(lead) and holds(body[len(lead) :], message):
            return lead
        if not whole:
            what = "a tool call" if message.get("tool_calls") else "an answer"
            raise TemplateRefusal(f"with {what} that the template rewrites or leaves out")
        return ""

    def _refuse_markers(self, messages: Sequence[Message]) -> None:
        # The tokenizer would read the text of a marker as the marker itself: a false turn.
        for text in texts_in(self._tools):
            found = self._markers.search(text)
            if found:
                raise TemplateRefusal(f"with the special token {found[0]} inside a tool definition")
        for message in messages:
            if message["role"] in self._unheard:
                raise TemplateRefusal(f"with a {message['role']} turn that the template leaves out")
            for text in texts_in(message):
                found = self._markers.search(text)
                if found:
                    raise TemplateRefusal(f"with the special token {found[0]} inside a turn")

    def _writes_tools(self) -> bool:
        user = {"role": "user", "content": "a"}
        try:
            return WORD in self.offering([TOOL_PROBE])._text([user], generation=True)
        except TemplateRefusal:
            return True  # a refusal comes row by row

    def _role_probes(self) -> dict[str, str]:
        """Render a turn of every role that the template takes; a refusal comes row by row."""
        rendered = {}
        for role, messages in ROLE_PROBES.items():
            try:
                rendered[role] = self._text(messages, generation=True)
            except TemplateRefusal:
                continue
        return rendered

    def _marker_pattern(self, ids: list[int], probes: Iterable[str]) -> re.Pattern[str]:
        """Return what finds the special tokens that make turns: those that the template writes."""
        used = {token for text in probes for token in self._encode(text)} | set(ids)
        written = self._text_used + self._text_for_tools
        markers = {self._end_of_turn, *self.tokenizer.all_special_tokens} - {""}
        markers |= {text for i, text in self.special.items() if i in used or text in written}
        return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))

    def _marked(self, messages: Sequence[Message]) -> list[int]:
        encoding = self._apply(
            messages, False, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(encoding["assistant_masks"])

    def _ids(self, messages: Sequence[Message], *, generation: bool) -> list[int]:
        return self._encode(self._text(messages, generation=generation))

    def _encode(self, text: str) -> list[int]:
        # The template writes BOS itself where it wants one.
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def _text(self, messages: Sequence[Message], *, generation: bool) -> str:
        return self._apply(messages, generation, tokenize=False)

    def _apply(self, messages: Sequence[Message], generation: bool, **how: bool) -> Any:
        # A null would be written as the word None by many templates.
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        if self._text_arguments:
            given = [with_text_arguments(message) for message in given]
        try:
            return self.tokenizer.apply_chat_template(
                given,
                tools=list(self._tools) or None,
                chat_template=self._text_for_tools if self._tools else self._text_used,
                add_generation_prompt=generation,
                **how,
            )
        except FROM_TEMPLATES as error:
            raise TemplateRefusal(f"refused by the chat template ({error})") from error


def cut_row(row: TokenRow, max_length: int, audit: Audit) -> TokenRow | None:
    """Return the row cut to `max_length` tokens, or None when no supervised token is left."""
    if max_length < 1:
        raise ValueError(f"max_length={max_length}: need at least one token")
    cut = len(row.token_ids) > max_length
    if cut:
        audit.cut_away += sum(row.loss_mask[max_length:])
        row.token_ids = row.token_ids[:max_length]
        row.loss_mask = row.loss_mask[:max_length]
        row.stop_reason = "length"
    if not any(row.loss_mask):
        audit.drop(TRUNCATED if cut else EMPTY)
        return None
    if cut:
        audit.note(CUT)
    audit.keep(row)
    return row
