"""Rows on disk, and `prepare`, which makes them from conversations."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from training import chat_target, command, random_rows, save_target, saved, token_row

from headstart.data.rows import (
    RowsMeta,
    RowsWriter,
    check_rows,
    read_meta,
    read_rows,
    rows_hash,
)
from headstart.data.template import ChatTemplate, TokenRow

META = RowsMeta("target-a", "template-a", {"data.seed": 0, "data.split": "train"})
ROWS = random_rows(3)


def written(directory: Path, rows: list[TokenRow], *, finish: bool = True) -> Path:
    writer = RowsWriter(directory, replace(META))
    for row in rows:
        writer.add(row)
    if finish:
        writer.finish("made for a test", {"rows": len(rows)})
    writer.close()
    return directory


def test_rows_come_back_as_written_in_order_of_their_ids(tmp_path):
    rows, meta = read_rows(written(tmp_path, ROWS[::-1]))
    assert rows == ROWS
    assert meta.complete
    assert meta.counts == {"rows": 3}


def test_interrupted_rows_are_refused_until_finished(tmp_path):
    written(tmp_path, ROWS, finish=False)
    with pytest.raises(ValueError, match="not complete; run the command that makes it again"):
        read_rows(tmp_path)


def test_a_torn_last_line_is_cut_off_and_written_again(tmp_path):
    written(tmp_path, ROWS[:2], finish=False)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps(asdict(ROWS[2]))[:40])
    writer = RowsWriter(tmp_path, replace(META))
    assert writer.rows == ROWS[:2]
    writer.add(ROWS[2])
    writer.finish("made for a test", {"rows": 3})
    assert read_rows(tmp_path)[0] == ROWS


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = written(tmp_path, ROWS) / "rows.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:30], lines[2]]) + "\n")
    with pytest.raises(ValueError, match="line 2 is not a row"):
        read_rows(tmp_path)


def test_no_rows_at_all_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no rows; made for a test"):
        read_rows(written(tmp_path, []))


def test_a_directory_without_rows_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no rows there"):
        read_rows(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_fingerprint": "target-b"}, "target=target-a, this run has target=target-b"),
        ({"template_hash": "b"}, "chat template=template-a, this run has chat template=b"),
        (
            {"settings": {"data.seed": 1, "data.split": "train"}},
            "data.seed=0, this run has data.seed=1",
        ),
        ({"settings": {"data.seed": 0}}, "data.split=train, this run has data.split=None"),
    ],
)
def test_rows_of_other_settings_are_refused_by_the_field_that_differs(tmp_path, change, message):
    written(tmp_path, ROWS, finish=False)
    with pytest.raises(ValueError, match=message):
        RowsWriter(tmp_path, replace(META, **change))
    assert read_meta(tmp_path).settings == META.settings


def test_foreign_fields_in_meta_are_an_error_that_names_the_file(tmp_path):
    (tmp_path / "meta.json").write_text('{"rows": 1}')
    with pytest.raises(ValueError, match=r"meta.json: not what headstart writes"):
        read_meta(tmp_path)


def test_the_hash_of_rows_sees_tokens_and_masks():
    row = token_row("a", [5, 6, 7], 1)
    assert rows_hash([row]) != rows_hash([token_row("a", [5, 6, 8], 1)])
    assert rows_hash([row]) != rows_hash([token_row("a", [5, 6, 7], 2)])
    assert rows_hash([row]) == rows_hash([replace(row, category="else")])


@pytest.mark.parametrize("bad", [130, 128, -1])
def test_p13_an_id_outside_the_vocabulary_is_an_error_naming_the_row(bad):
    rows = [token_row("good", [5, 125], 1), token_row("bad", [5, bad], 1)]
    with pytest.raises(ValueError, match=f"row bad: token id {bad} outside .* of 128"):
        check_rows(rows, 128)


def test_p13_an_id_between_tokenizer_and_model_size_is_not_refused():
    check_rows([token_row("padded", [5, 125, 127], 1)], 128)


CHATS = [
    {"id": "one", "messages": [["user", "hello"], ["assistant", "hi"]]},
    {"id": "long", "messages": [["user", "x" * 300], ["assistant", "y"]]},
    {"id": "two", "messages": [["user", "hi"], ["assistant", "a"], ["user", "b"]]},
    {"id": "none", "messages": [["user", "nobody answers"]]},
    {"id": "odd", "messages": [["user", "say <|im_end|>"], ["assistant", "no"]]},
]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Run `headstart prepare` over five conversations, three of which leave no row."""
    root = tmp_path_factory.mktemp("prepare")
    with (root / "chats.jsonl").open("w") as file:
        for chat in CHATS:
            turns = [{"role": role, "content": text} for role, text in chat["messages"]]
            file.write(json.dumps(chat | {"messages": turns}) + "\n")
    command(
        "prepare",
        *saved(save_target(root / "target")),
        f"data.path={root}/chats.jsonl",
        "data.max_length=200",
        f"out={root}/rows",
    )
    return root


def test_prepare_supervises_the_answers_and_their_end(prepared):
    rows, _ = read_rows(prepared / "rows")
    decode = chat_target().tokenizer.decode
    answers = {
        row.row_id: decode(
            [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m],
        )
        for row in rows
    }
    assert answers == {"one": "hi<|im_end|>", "two": "a<|im_end|>"}


def test_prepare_accounts_for_every_conversation(prepared):
    _, meta = read_rows(prepared / "rows")
    assert meta.counts == {"rows": 2, "supervised_tokens": 5}
    assert "2 rows from 4 conversations" in meta.summary
    assert "1 truncated away" in meta.summary
    assert "1 with the special token <|im_end|> inside a turn" in meta.summary
    log = (prepared / "rows" / "cli.log").read_text()
    assert "kept 4 of 5 rows: 1 without an assistant turn (line 4)" in log


def test_p05_rows_start_with_the_ids_that_generation_sees(prepared):
    rows, _ = read_rows(prepared / "rows")
    prompt = ChatTemplate(chat_target().tokenizer).prompt_ids(
        [{"role": "user", "content": "hello"}]
    )
    first = next(row for row in rows if row.row_id == "one")
    assert first.token_ids[: len(prompt)] == prompt
    assert first.loss_mask.index(1) == len(prompt)


def test_preparing_again_adds_nothing(prepared):
    before = (prepared / "rows" / "rows.jsonl").read_bytes()
    command(
        "prepare",
        *saved(prepared / "target"),
        f"data.path={prepared}/chats.jsonl",
        "data.max_length=200",
        f"out={prepared}/rows",
    )
    assert (prepared / "rows" / "rows.jsonl").read_bytes() == before


def test_conversations_that_leave_no_row_are_an_error(prepared, tmp_path):
    with pytest.raises(SystemExit, match=r"no row is usable: .*truncated away"):
        command(
            "prepare",
            *saved(prepared / "target"),
            f"data.path={prepared}/chats.jsonl",
            "data.max_length=8",
            f"out={tmp_path}/rows",
        )
