"""Turns as text: what a message says, and whether a rendered answer is the message's own.

Pure functions under the chat template; the one that marks tokens is in `template`.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from headstart.data.conversations import Message

WORD = "headstart-probe"
PROBE: Message = {"role": "user", "content": WORD}
_CALL = {"type": "function", "function": {"name": "probe", "arguments": {}}, "id": "probe0000"}
ROLE_PROBES = {
    "system": [{"role": "system", "content": WORD}, {"role": "user", "content": "a"}],
    "tool": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": WORD, "name": "probe", "tool_call_id": "probe0000"},
    ],
}
"""A conversation with WORD in a turn of the role that a template may not know."""
TOOL_PROBE = {
    "type": "function",
    "function": {
        "name": WORD,
        "description": "a",
        "parameters": {"type": "object", "properties": {}, "required": []},
    },
}
"""A definition that a template which writes tools writes with WORD in it."""
_OPENED = re.compile(r"(<\w+>)\s*\Z")


class TemplateRefusal(ValueError):
    """A conversation that this template cannot render safely; the message is the drop reason."""


def answer_of(text: str) -> Message:
    """Return an assistant turn."""
    return {"role": "assistant", "content": text}


def content_of(message: Message) -> str:
    """Return the text of a turn, empty where it is null or missing."""
    return message.get("content") or ""


def says_something(message: Message) -> bool:
    """Say whether a turn holds a text or a tool call."""
    return bool(content_of(message).strip() or message.get("tool_calls"))


def texts_in(value: object) -> Iterator[str]:
    """Yield every text inside a message, tool calls and their arguments included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (*texts_in(key), *texts_in(item))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


def with_text_arguments(message: Message) -> Message:
    """Return a turn with the arguments of its tool calls written as JSON."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function", call)
        if not isinstance(function.get("arguments", ""), str):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            function = function | {"arguments": text}
        calls.append(call | {"function": function} if "function" in call else function)
    return message | {"tool_calls": calls}


def holds(body: str, message: Message) -> bool:
    """Say whether a rendered answer is what the message says, white space aside.

    Tool calls have as many forms as there are templates: their names must be there. Reasoning and
    text must be there as they are.
    """
    shown, said = _squeeze(body), _squeeze(content_of(message))
    calls, reasoning = message.get("tool_calls") or [], message.get("reasoning_content") or ""
    if not calls and not reasoning:
        return shown == said
    names = [str(call.get("function", call).get("name", "")) for call in calls]
    return all(part in shown for part in (said, _squeeze(reasoning), *map(_squeeze, names)))


def opened_by(prompt_text: str) -> str:
    """Return the tag of a block that a prompt opens at its end, such as <think>; else nothing."""
    opened = _OPENED.search(prompt_text)
    return opened[1] if opened else ""


def continued(prompt_text: str, message: Message) -> str:
    """Return an answer as it goes on after a prompt that opens its reasoning block already.

    Such a template shows past answers without their reasoning, so the answer's text is taken as
    written: a model that is given the prompt emits what follows the opening. Raises
    TemplateRefusal when the prompt opens nothing, or the answer does not begin with it.
    """
    opened = _OPENED.search(prompt_text)
    text = content_of(message).lstrip()
    if opened is None or not text.startswith(opened[1]) or message.get("tool_calls"):
        raise TemplateRefusal("with an answer that does not follow the generation prompt")
    rest = text[len(opened[1]) :]
    return rest.lstrip() if opened[0] != opened[1] else rest


def common_tail(left: Sequence[int], right: Sequence[int]) -> list[int]:
    """Return the longest end that two lists share."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)][::-1]


def mask_of_rest(mask: list[int], full: list[int], rest: list[int]) -> list[int]:
    """Return the part of a mask over `full` that belongs to its end, tokenised as `rest`.

    Where the first tokens of the rest are merged with the prompt in `full`, they take the mask of
    the token that holds them.
    """
    same = len(common_tail(full, rest))
    first = [mask[len(full) - same - 1]] * (len(rest) - same)
    return first + mask[len(full) - same :]


def _squeeze(text: str) -> str:
    return "".join(text.split())
