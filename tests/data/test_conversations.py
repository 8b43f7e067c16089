"""Rows of every schema and in any disorder, read from one file."""

import json
from pathlib import Path

import pytest

from headstart.data.conversations import MAX_REASONS, Account, Place
from headstart.data.source import read_conversations


def write(path: Path, *rows: object) -> Path:
    """Write rows as JSON Lines; a string row is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def turns(*pairs: tuple[str, str | None]) -> list[dict[str, str | None]]:
    return [{"role": role, "content": content} for role, content in pairs]


def told(account: Account, what: str) -> list[tuple[int, str]]:
    """Return line and reason of the first notes of every reason, by line."""
    places = getattr(account, what).places
    return sorted((place.number, reason) for reason in places for place in places[reason])


HELLO = turns(("user", "hello"), ("assistant", "hi"))
SHARED = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]
EIGHT_LINES = (
    {"messages": HELLO},
    {"conversations": SHARED},
    {"messages": turns(("assistant", "welcome"), *[("user", "hello"), ("assistant", "hi")])},
    {"messages": turns(("user", "one"), ("user", "two"), ("assistant", "three"))},
    {"messages": []},
    {"messages": turns(("user", "hello"), ("assistant", None))},
    {"messages": turns(("system", "be brief"))},
    '{"messages": [',
)


def test_eight_odd_lines_are_all_accounted_for_p06(tmp_path):
    kept, account = read_conversations(write(tmp_path / "a", *EIGHT_LINES), need_answers=True)
    assert account.kept == len(kept) == 4
    assert account.total == 8
    assert told(account, "repaired") == [
        (3, "by removing what came before the first user turn"),
        (4, "by joining turns of one role running"),
    ]
    assert told(account, "dropped") == [
        (5, "without turns"),
        (6, "with a turn that has no text"),
        (7, "without a user turn"),
        (8, "not valid JSON"),
    ]


def test_two_schemas_give_the_same_conversation_p06(tmp_path):
    kept, _ = read_conversations(write(tmp_path / "a", *EIGHT_LINES), need_answers=True)
    assert kept[0].messages == kept[1].messages == kept[2].messages == tuple(HELLO)


def test_user_turns_running_become_one_p06(tmp_path):
    kept, _ = read_conversations(write(tmp_path / "a", *EIGHT_LINES), need_answers=True)
    assert kept[3].messages == tuple(turns(("user", "one\n\ntwo"), ("assistant", "three")))


def test_no_usable_row_is_an_error_with_the_account_p06(tmp_path):
    path = write(tmp_path / "bad.jsonl", *EIGHT_LINES[4:])
    with pytest.raises(ValueError, match=r"bad\.jsonl: no usable row, kept 0 of 4 rows: 1 without"):
        read_conversations(path, need_answers=True)


def test_the_summary_names_counts_reasons_and_first_lines(tmp_path):
    silent = {"prompt": "hello"}
    path = write(tmp_path / "a", {"messages": HELLO}, *[silent] * 4, "{", *EIGHT_LINES[2:3])
    _, account = read_conversations(path, need_answers=True)
    assert account.summary() == (
        "kept 2 of 7 rows: 4 without an assistant turn (lines 2, 3, 4, ...), "
        "1 not valid JSON (line 6); "
        "repaired 1 by removing what came before the first user turn (line 7)"
    )


def test_an_account_keeps_a_few_places_a_reason_and_every_count():
    account = Account()
    for line in range(10_000):
        account.drop(Place("a", "line", line), f"with the unknown role {line % 300}")
    assert account.total == account.dropped.counts.total() == 10_000
    assert len(account.dropped.counts) == MAX_REASONS + 1
    assert max(map(len, account.dropped.places.values())) == 3


def test_every_note_reaches_the_listener(tmp_path):
    heard = []
    account = Account(listener=lambda what, place, reason: heard.append((what, place.number)))
    for line in range(5):
        account.drop(Place("a", "line", line), "not valid JSON")
    account.keep(Place("a", "line", 5), ["by joining turns of one role running"])
    assert heard == [*(("dropped", line) for line in range(5)), ("repaired", 5)]


def test_a_prompt_with_its_completion_is_a_conversation(tmp_path):
    path = write(tmp_path / "a", {"prompt": "hello", "completion": "hi", "category": "chat"})
    (conversation,), _ = read_conversations(path, need_answers=True)
    assert conversation.messages == tuple(HELLO)
    assert conversation.category == "chat"


def test_prompt_and_completion_may_be_lists_of_messages(tmp_path):
    path = write(tmp_path / "a", {"prompt": HELLO[:1], "completion": HELLO[1:]})
    (conversation,), _ = read_conversations(path, need_answers=True)
    assert conversation.messages == tuple(HELLO)


def test_a_bare_prompt_is_enough_where_no_answers_are_needed(tmp_path):
    path = write(tmp_path / "a", {"prompt": "hello"})
    (conversation,), _ = read_conversations(path, need_answers=False)
    assert conversation.messages == tuple(turns(("user", "hello")))


def test_a_suite_keeps_its_user_turns_apart(tmp_path):
    row = {"question_id": 81, "category": "writing", "turns": ["one", "two"]}
    (conversation,), account = read_conversations(write(tmp_path / "a", row), need_answers=False)
    assert conversation.messages == tuple(turns(("user", "one"), ("user", "two")))
    assert (conversation.prompt_id, conversation.category) == ("81", "writing")
    assert not account.repaired


def test_answers_are_left_out_where_the_target_will_write_them(tmp_path):
    chat = turns(("system", "be brief"), *[("user", "a"), ("assistant", "b"), ("user", "c")])
    path = write(tmp_path / "a", {"messages": chat})
    (conversation,), _ = read_conversations(path, need_answers=False)
    assert [message["role"] for message in conversation.messages] == ["system", "user", "user"]


def test_a_system_column_becomes_the_system_turn(tmp_path):
    path = write(tmp_path / "a", {"system": "be brief", "conversations": SHARED})
    (conversation,), _ = read_conversations(path, need_answers=True)
    assert conversation.messages == (*turns(("system", "be brief")), *HELLO)


def test_a_system_field_beside_another_system_turn_is_told(tmp_path):
    chat = [*turns(("system", "be brief")), *HELLO]
    rows = [{"system": text, "messages": chat} for text in ("be brief", "be long")]
    kept, account = read_conversations(write(tmp_path / "a", *rows), need_answers=True)
    assert kept[0].messages == kept[1].messages == tuple(chat)
    assert told(account, "repaired") == [
        (2, "by leaving out its system field, as its turns begin with another")
    ]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_kept_whatever_it_is_called(tmp_path, name):
    chat = [HELLO[0], HELLO[1] | {name: "a"}]
    (kept,), _ = read_conversations(write(tmp_path / "a", {"messages": chat}), need_answers=True)
    assert kept.messages[1] == HELLO[1] | {"reasoning_content": "a"}


def test_a_repeated_id_is_made_unique_and_counted(tmp_path):
    rows = [{"id": name, "prompt": "a"} for name in ("x", "x-line3", "x")]
    kept, account = read_conversations(write(tmp_path / "a", *rows), need_answers=False)
    assert [conversation.prompt_id for conversation in kept] == ["x", "x-line3", "x-line3-2"]
    assert told(account, "repaired") == [(3, "with a repeated id")]


def test_an_id_that_looks_like_a_line_does_not_meet_the_line(tmp_path):
    path = write(tmp_path / "a", {"id": "line-2", "prompt": "a"}, {"prompt": "b"})
    kept, _ = read_conversations(path, need_answers=False)
    assert len({conversation.prompt_id for conversation in kept}) == 2


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], "not a JSON object"),
        (
            {"text": "hello"},
            "without any of messages, conversations, prompt, turns, input_ids",
        ),
        ({"messages": "hello"}, "with turns that are not a list"),
        ({"messages": ["hello"]}, "with a turn that is not an object"),
        ({"messages": turns(("wizard", "x"))}, "with the unknown role 'wizard'"),
        ({"messages": [*HELLO, *turns(("system", "x"))]}, "with a system turn after the start"),
        ({"prompt": "  "}, "with a turn that has no text"),
        ({"prompt": "\ud800"}, "with text that is not valid Unicode"),
        ({"id": "\udfff", "prompt": "a"}, "with text that is not valid Unicode"),
        ("[" * 100_000, "not valid JSON"),
        ('{"prompt": ' + "9" * 5000 + "}", "not valid JSON"),
        (
            {"messages": turns(("user", "x"), ("tool", "y"))},
            "with a tool turn that follows no assistant turn",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "with a turn that is not text alone",
        ),
        (
            {"tools": ["f"], "messages": HELLO},
            "with tool definitions that are not a list of objects",
        ),
        ({"tools": "f(", "messages": HELLO}, "with tool definitions that are not valid JSON"),
        ({"system": ["a"], "messages": HELLO}, "with a system field that is not text"),
        (
            {"messages": [HELLO[0], HELLO[1] | {"reasoning": ["a"]}]},
            "with reasoning that is not text",
        ),
        (
            {"messages": [HELLO[0], HELLO[1] | {"function_call": {"name": "f"}}]},
            "with a function_call, which no template reads; give tool_calls",
        ),
        ({"input_ids": [5], "loss_mask": [1]}, "with token ids, which hold no turn to answer"),
    ],
)
def test_every_unusable_row_has_its_reason(tmp_path, row, reason):
    path = write(tmp_path / "a", {"prompt": "hello"}, row)
    _, account = read_conversations(path, need_answers=False)
    assert told(account, "dropped") == [(2, reason)]


def test_a_badly_encoded_line_costs_one_row(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b'{"prompt": "\xff"}\n\n{"prompt": "hello"}\n')
    kept, account = read_conversations(path, need_answers=False)
    assert (len(kept), told(account, "dropped")) == (1, [(1, "not valid JSON")])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: no such file"):
        read_conversations(tmp_path / "nowhere.jsonl", need_answers=True)


@pytest.mark.parametrize("name", ["stop_reason", "finish_reason"])
def test_how_the_last_answer_ended_is_kept_p08(tmp_path, name):
    given = write(tmp_path / "a", {"messages": HELLO, name: "length"}, {"messages": HELLO})
    kept, _ = read_conversations(given, need_answers=True)
    assert [c.stop_reason for c in kept] == ["length", None]


# Tools


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
TOOL_CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "name": "add"},
    {"role": "tool", "content": ""},
    {"role": "assistant", "content": "2"},
]


def test_calls_and_results_of_tools_are_kept_as_they_are(tmp_path):
    path = write(tmp_path / "a", {"messages": TOOL_CHAT})
    (conversation,), account = read_conversations(path, need_answers=True)
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["user", "assistant", "tool", "tool", "assistant"]
    assert conversation.messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert conversation.messages[2]["name"] == "add"
    assert not account.repaired


def test_arguments_given_as_text_become_the_object_they_spell(tmp_path):
    spelled = {"name": "add", "arguments": json.dumps(CALL["function"]["arguments"])}
    chat = [TOOL_CHAT[0], {**TOOL_CHAT[1], "tool_calls": [{**CALL, "function": spelled}]}]
    path = write(tmp_path / "a", {"messages": chat})
    (conversation,), account = read_conversations(path, need_answers=True)
    assert conversation.messages[1]["tool_calls"] == [CALL]
    assert told(account, "repaired") == [(1, "by decoding the arguments of tool calls")]


def test_what_is_left_out_of_a_row_is_told(tmp_path):
    path = write(tmp_path / "a", {"messages": TOOL_CHAT})
    (conversation,), account = read_conversations(path, need_answers=False)
    assert conversation.messages == (TOOL_CHAT[0],)
    assert told(account, "repaired") == [
        (1, "by leaving out tool turns, which follow answers"),
    ]


@pytest.mark.parametrize("need_answers", [True, False])
def test_tool_definitions_are_kept_also_where_a_table_keeps_them_as_text(tmp_path, need_answers):
    tools = [{"name": "add"}]
    rows = [{"messages": TOOL_CHAT, "tools": given} for given in (tools, json.dumps(tools), [])]
    kept, _ = read_conversations(write(tmp_path / "a", *rows), need_answers=need_answers)
    assert [c.tools for c in kept] == [tuple(tools), tuple(tools), ()]


def test_two_answers_running_are_not_joined_where_one_calls_a_tool(tmp_path):
    chat = [TOOL_CHAT[0], TOOL_CHAT[4], TOOL_CHAT[1]]
    path = write(tmp_path / "a", {"messages": HELLO}, {"messages": chat})
    _, account = read_conversations(path, need_answers=True)
    assert list(account.dropped.counts) == [
        "with turns of one role running, one of them with tool calls or reasoning"
    ]


# Rows that came tokenised


def test_a_tokenised_row_is_taken_as_it_is(tmp_path):
    row = {"id": "x", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "category": "chat"}
    (conversation,), _ = read_conversations(write(tmp_path / "a", row), need_answers=True)
    tokens = conversation.tokens
    assert (tokens.row_id, tokens.token_ids, tokens.loss_mask) == ("x", [5, 6, 7], [0, 1, 1])
    assert conversation.messages == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"loss_mask": None}, "with input_ids but no loss_mask"),
        ({"loss_mask": [0, 1]}, "with a loss_mask that is not as long as its input_ids"),
        ({"loss_mask": [0, 1, 2]}, "with a loss_mask that holds other values than 0 and 1"),
        ({"loss_mask": [0, 0, 0]}, "without a supervised token"),
        ({"input_ids": [5, -100, 7]}, "with input_ids that are not a list of token ids"),
        ({"input_ids": [5, 6.5, 7]}, "with input_ids that are not a list of token ids"),
    ],
)
def test_a_tokenised_row_that_does_not_fit_together_is_dropped(tmp_path, change, reason):
    good = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    _, account = read_conversations(write(tmp_path / "a", good, good | change), need_answers=True)
    assert told(account, "dropped") == [(2, reason)]
