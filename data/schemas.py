"""One decoded row of a user's data in, one `Conversation` out, whatever the row's schema.

| schema | fields |
|---|---|
| messages | `messages` (or `conversation`): role, content |
| ShareGPT | `conversations`: from, value |
| completion | `prompt` and `completion`: texts, or lists of messages |
| prompt | `prompt` |
| suite | `turns`: the user's side only |
| tokenised | `input_ids` and `loss_mask` of equal length |

Beside them `id`, `prompt_id` or `question_id`, `category`, `system`, `tools` (definitions), and
`stop_reason` or `finish_reason` (how the last answer ended) are read. A field that is null is a
field that is not there, as columns of a table have it.
"""

import json
from typing import Any

from headstart.data.conversations import Conversation, Message
from headstart.data.token_row import TokenRow

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
ID_FIELDS = ("prompt_id", "question_id", "id")
CHATS = ("messages", "conversations", "conversation")
FIELDS = (*CHATS, "prompt", "completion", "turns", "input_ids", "loss_mask")
"""The fields that hold what is trained on."""
STOP_FIELDS = ("stop_reason", "finish_reason")
BESIDE = (*ID_FIELDS, *STOP_FIELDS, "category", "system", "tools")
EXTRAS = ("name", "tool_calls", "tool_call_id")
"""What a template may read of a message beside role, content and reasoning."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""What an answer's reasoning is called; a template is given it by the first of these names."""
ROLE_SHOWN = 20
LEFT_OUT_SYSTEM = "by leaving out its system field, as its turns begin with another"
LEFT_OUT_RESULTS = "by leaving out tool turns, which follow answers"
DECODED = "by decoding the arguments of tool calls"


class BadRow(ValueError):
    """A row that cannot be used; the message is the reason that the account counts."""


def parse_row(
    row: object, *, default_id: str, need_answers: bool
) -> tuple[Conversation, list[str]]:
    """Return the conversation of a row, and what was repaired in it.

    With `need_answers` (training) it must hold an assistant turn. Without it (generation,
    evaluation) only the system and user turns are returned, each user turn to be answered by the
    target in order. Raises BadRow with the reason for a row that is not usable.
    """
    if not isinstance(row, dict):
        raise BadRow("not a JSON object")
    row = _without_nulls(row)
    prompt_id = _valid(next((str(row[name]) for name in ID_FIELDS if name in row), default_id))
    category = _valid(str(row.get("category") or "other"))
    if "input_ids" in row:
        if not need_answers:
            raise BadRow("with token ids, which hold no turn to answer")
        return Conversation(prompt_id, category, (), _tokens(row, prompt_id, category)), []
    messages, repairs = _turns(row)
    if not any(message["role"] == "user" for message in messages):
        raise BadRow("without a user turn")
    if not need_answers:
        if any(message["role"] == "tool" for message in messages):
            repairs.append(LEFT_OUT_RESULTS)
        messages = [message for message in messages if message["role"] in ("system", "user")]
    elif not any(message["role"] == "assistant" for message in messages):
        raise BadRow("without an assistant turn")
    rest = {"stop_reason": _stop_reason(row), "tools": _tools(row)}
    return Conversation(prompt_id, category, tuple(messages), **rest), repairs


def _tokens(row: dict[str, Any], row_id: str, category: str) -> TokenRow:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise BadRow("with input_ids that are not a list of token ids")
    if mask is None:
        raise BadRow("with input_ids but no loss_mask")
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise BadRow("with a loss_mask that is not as long as its input_ids")
    if not all(value in (0, 1) for value in mask):
        raise BadRow("with a loss_mask that holds other values than 0 and 1")
    if not any(mask):
        raise BadRow("without a supervised token")
    return TokenRow(row_id, category, ids, [int(value) for value in mask], _stop_reason(row))


def _tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the definitions of a row's tools; a table may keep them as JSON text."""
    tools = row.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or []
        except ValueError:
            raise BadRow("with tool definitions that are not valid JSON") from None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("with tool definitions that are not a list of objects")
    return tuple(tools)


def _stop_reason(row: dict[str, Any]) -> str | None:
    return next((_valid(str(row[name])) for name in STOP_FIELDS if row.get(name)), None)


def _turns(row: dict[str, Any]) -> tuple[list[Message], list[str]]:
    """Return the turns of a row, whatever its schema, and the repairs that were made."""
    chat = next((name for name in CHATS if name in row), None)
    if chat is not None:
        turns = [_tagged_message(turn) for turn in _list(row[chat])]
    elif "turns" in row:
        # Several user turns running are meant here: the answers in between are not written yet.
        return _system(row) + [_message("user", turn) for turn in _list(row["turns"])], []
    elif "prompt" in row:
        turns = _side("user", row["prompt"])
        turns += _side("assistant", row["completion"]) if "completion" in row else []
    else:
        raise BadRow("without any of messages, conversations, prompt, turns, input_ids")
    decoded = [_with_decoded_calls(turn) for turn in turns]
    repairs = [DECODED] if any(changed for _, changed in decoded) else []
    turns = [turn for turn, _ in decoded]
    system = _system(row)
    if turns[0]["role"] != "system":
        turns = system + turns
    elif system and system != turns[:1]:
        repairs.append(LEFT_OUT_SYSTEM)
    turns, changes = _alternating(turns)
    return turns, repairs + changes


def _system(row: dict[str, Any]) -> list[Message]:
    text = row.get("system", "")
    if not isinstance(text, str):
        raise BadRow("with a system field that is not text")
    return [_message("system", text)] if text.strip() else []


def _side(role: str, turns: object) -> list[Message]:
    if isinstance(turns, list):
        return [_tagged_message(turn) for turn in _list(turns)]
    return [_message(role, turns)]


def _list(turns: object) -> list[object]:
    if not isinstance(turns, list):
        raise BadRow("with turns that are not a list")
    if not turns:
        raise BadRow("without turns")
    return turns


def _tagged_message(turn: object) -> Message:
    if not isinstance(turn, dict):
        raise BadRow("with a turn that is not an object")
    turn = _without_nulls(turn)
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"with the unknown role {str(role)[:ROLE_SHOWN]!r}")
    if turn.get("function_call"):
        raise BadRow("with a function_call, which no template reads; give tool_calls")
    extras = {name: turn[name] for name in EXTRAS if turn.get(name)} | _reasoning(turn)
    return _message(ROLES[role], turn.get("content", turn.get("value")), extras)


def _reasoning(turn: dict[str, Any]) -> dict[str, str]:
    text = next((turn[name] for name in REASONING if turn.get(name)), "")
    if not isinstance(text, str):
        raise BadRow("with reasoning that is not text")
    return {REASONING[0]: _valid(text)} if text else {}


def _message(role: str, content: object, extras: dict[str, Any] | None = None) -> Message:
    extras = extras or {}
    if isinstance(content, list):
        content = _joined_parts(content)
    if content is None and "tool_calls" in extras:
        content = ""
    may_be_empty = role == "tool" or "tool_calls" in extras
    if not isinstance(content, str) or not (content.strip() or may_be_empty):
        raise BadRow("with a turn that has no text")
    if "tool_calls" in extras and role != "assistant":
        raise BadRow("with tool calls outside an assistant turn")
    return {"role": role, "content": _valid(content)} | extras


def _joined_parts(parts: list[object]) -> str:
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadRow("with a turn that is not text alone")
    return "".join(texts)


def _with_decoded_calls(message: Message) -> tuple[Message, bool]:
    """Turn arguments given as JSON text into objects, which is what templates print; say if."""
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise BadRow("with tool calls that are not a list")
    if not calls:
        return message, False
    decoded = [_decoded_call(call) for call in calls]
    changed = any(was_text for _, was_text in decoded)
    return message | {"tool_calls": [call for call, _ in decoded]}, changed


def _decoded_call(call: object) -> tuple[dict[str, Any], bool]:
    call = _without_nulls(call) if isinstance(call, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("with a tool call that has no name")
    function = _without_nulls(function)
    was_text = isinstance(function.get("arguments"), str)
    if was_text:
        try:
            function["arguments"] = json.loads(function["arguments"])
        except ValueError:
            raise BadRow("with arguments of a tool call that are not valid JSON") from None
    return (call | {"function": function} if "function" in call else function), was_text


def _alternating(messages: list[Message]) -> tuple[list[Message], list[str]]:
    """Return turns in which user and answers alternate, user first, and what was changed."""
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
        before = joined[-1]["role"] if joined else None
        if turn["role"] == "tool" and before not in ("assistant", "tool"):
            raise BadRow("with a tool turn that follows no assistant turn")
        if turn["role"] == before != "tool":  # the results of several calls stay apart
            joined[-1] = _joined(joined[-1], turn)
        else:
            joined.append(turn)
    if len(joined) < len(turns):
        repairs.append("by joining turns of one role running")
    return system + joined, repairs


def _joined(first: Message, second: Message) -> Message:
    if first.keys() | second.keys() > {"role", "content"}:
        raise BadRow("with turns of one role running, one of them with tool calls or reasoning")
    return {"role": first["role"], "content": f"{first['content']}\n\n{second['content']}"}


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    """Leave out the null fields that a table gives to every struct which lacks them."""
    return {name: value for name, value in fields.items() if value is not None}


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise BadRow("with text that is not valid Unicode") from None
    return text
