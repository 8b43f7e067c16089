import json
from pathlib import Path

import pytest

from headstart.data.source import read_conversations


def write(path: Path, *rows: object) -> Path:
    """Write rows as JSON Lines; a string row is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def turns(*pairs: tuple[str, str | None]) -> list[dict[str, str | None]]:
    return [{"role": role, "content": content} for role, content in pairs]


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
    assert account.repaired == [
        (3, "by removing what came before the first user turn"),
        (4, "by joining turns of one role running"),
    ]
    assert account.dropped == [
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


def test_a_prompt_with_its_completion_is_a_conversation(tmp_path):
    path = write(tmp_path / "a", {"prompt": "hello", "completion": "hi", "category": "chat"})
    (conversation,), _ = read_conversations(path, need_answers=True)
    assert conversation.messages == tuple(HELLO)
    assert conversation.category == "chat"


def test_a_bare_prompt_is_enough_where_no_answers_are_needed(tmp_path):
    path = write(tmp_path / "a", {"prompt": "hello"})
    (conversation,), _ = read_conversations(path, need_answers=False)
    assert conversation.messages == tuple(turns(("user", "hello")))


def test_a_suite_keeps_its_user_turns_apart(tmp_path):
    row = {"question_id": 81, "category": "writing", "turns": ["one", "two"]}
    (conversation,), account = read_conversations(write(tmp_path / "a", row), need_answers=False)
    assert conversation.messages == tuple(turns(("user", "one"), ("user", "two")))
    assert (conversation.prompt_id, conversation.category) == ("81", "writing")
    assert account.repaired == []


def test_answers_are_left_out_where_the_target_will_write_them(tmp_path):
    chat = turns(("system", "be brief"), *[("user", "a"), ("assistant", "b"), ("user", "c")])
    path = write(tmp_path / "a", {"messages": chat})
    (conversation,), _ = read_conversations(path, need_answers=False)
    assert [message["role"] for message in conversation.messages] == ["system", "user", "user"]


def test_a_repeated_id_is_made_unique_and_counted(tmp_path):
    path = write(tmp_path / "a", {"id": "x", "prompt": "a"}, {"id": "x", "prompt": "b"})
    kept, account = read_conversations(path, need_answers=False)
    assert [conversation.prompt_id for conversation in kept] == ["x", "x-line2"]
    assert account.repaired == [(2, "with a repeated id")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([1, 2], "not a JSON object"),
        ({"text": "hello"}, "without any of messages, conversations, prompt, turns"),
        ({"messages": "hello"}, "with turns that are not a list"),
        ({"messages": ["hello"]}, "with a turn that is not an object"),
        ({"messages": turns(("tool", "x"))}, "with the unknown role 'tool'"),
        ({"messages": [*HELLO, *turns(("system", "x"))]}, "with a system turn after the start"),
        ({"prompt": "  "}, "with a turn that has no text"),
    ],
)
def test_every_unusable_row_has_its_reason(tmp_path, row, reason):
    path = write(tmp_path / "a", {"prompt": "hello"}, row)
    _, account = read_conversations(path, need_answers=False)
    assert account.dropped == [(2, reason)]


def test_a_badly_encoded_line_costs_one_row(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b'{"prompt": "\xff"}\n\n{"prompt": "hello"}\n')
    kept, account = read_conversations(path, need_answers=False)
    assert (len(kept), account.dropped) == (1, [(1, "not valid JSON")])


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl: no such file"):
        read_conversations(tmp_path / "nowhere.jsonl", need_answers=True)
