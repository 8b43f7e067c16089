"""Rows on disk, and `prepare`, which makes them from conversations."""

import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow as pa
import pytest
from training import chat_target, command, random_rows, save_target, saved, token_row

from headstart.data import rows as rows_module
from headstart.data.rows import (
    ROW_FORMAT,
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
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write(json.dumps(vars(ROWS[2]))[:40])
    writer = RowsWriter(tmp_path, replace(META))
    assert list(writer.rows) == ROWS[:2]
    writer.add(ROWS[2])
    writer.finish("made for a test", {"rows": 3})
    assert read_rows(tmp_path)[0] == ROWS


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = written(tmp_path, ROWS, finish=False) / "journal.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:30], lines[2]]) + "\n")
    with pytest.raises(ValueError, match="line 2 is not a row"):
        RowsWriter(tmp_path, replace(META))


@pytest.fixture
def two_rows_a_batch(monkeypatch):
    monkeypatch.setattr(rows_module, "BATCH_ROWS", 2)


@pytest.mark.parametrize("lost", [1, 8, 200, 400])
def test_a_torn_batch_is_cut_off_and_its_rows_are_made_again(tmp_path, two_rows_a_batch, lost):
    rows = random_rows(6)
    path = written(tmp_path, rows[:4], finish=False) / "rows.arrow"
    path.write_bytes(path.read_bytes()[:-lost])
    writer = RowsWriter(tmp_path, replace(META))
    assert writer.done_ids == {row.row_id for row in rows[:2]}
    for row in rows[2:]:
        writer.add(row)
    writer.finish("made for a test", {})
    assert read_rows(tmp_path)[0] == rows


def test_rows_in_both_file_and_journal_are_there_once(tmp_path, two_rows_a_batch):
    rows = random_rows(3)
    written(tmp_path, rows, finish=False)
    journal = tmp_path / "journal.jsonl"
    # The kill fell between the batch and the new journal.
    old = "".join(json.dumps(vars(row)) + "\n" for row in rows[:2])
    journal.write_text(old)
    writer = RowsWriter(tmp_path, replace(META))
    assert [row.row_id for row in writer.rows] == ["row-000", "row-001"]
    writer.add(rows[2])
    writer.finish("made for a test", {})
    assert read_rows(tmp_path)[0] == rows


def test_a_lost_batch_of_a_complete_set_is_noticed(tmp_path, two_rows_a_batch):
    path = written(tmp_path, random_rows(4)) / "rows.arrow"
    with pa.OSFile(str(path)) as file:
        for _ in range(2):  # the schema and a batch: a stream may end there
            pa.ipc.read_message(file)
        end = file.tell()
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(ValueError, match=f"2 rows, meta.json says 4 .key {META.key}"):
        read_rows(tmp_path)


def test_a_damaged_file_of_a_complete_set_is_named(tmp_path):
    path = written(tmp_path, ROWS) / "rows.arrow"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"rows.arrow: damaged .*make the rows again"):
        read_rows(tmp_path)


def test_two_rows_of_one_id_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="several rows have the id row-001"):
        written(tmp_path, [*ROWS, ROWS[1]])


ELSEWHERE = """
import sys
from pathlib import Path
from headstart.data.rows import RowsMeta, RowsWriter
RowsWriter(Path(sys.argv[1]), RowsMeta("a", "b", {}))
"""


def test_a_second_process_cannot_write_into_the_same_directory(tmp_path):
    writer = RowsWriter(tmp_path, replace(META))
    arguments = [sys.executable, "-c", ELSEWHERE, str(tmp_path)]
    other = subprocess.run(arguments, capture_output=True, text=True)
    assert "another process is writing rows there" in other.stderr
    writer.close()


def test_rows_are_a_lazy_sequence(tmp_path, two_rows_a_batch):
    rows = random_rows(5)
    have, _ = read_rows(written(tmp_path, rows[::-1]))
    assert len(have) == 5
    assert have[-1] == rows[4]
    assert have[1:4] == rows[1:4]
    assert have.lengths == [len(row.token_ids) for row in rows]
    assert pickle.loads(pickle.dumps(have)) == rows
    with pytest.raises(IndexError):
        have[5]


def test_datasets_reads_the_file(tmp_path, two_rows_a_batch):
    written(tmp_path, ROWS)
    found = datasets.Dataset.from_file(str(tmp_path / "rows.arrow"))
    assert list(found) == [vars(row) for row in ROWS]


def test_twenty_thousand_rows_come_back_in_order(tmp_path):
    rows = [token_row(f"row-{i * 7919 % 20_000:05d}", [i % 256, 7, 8], 1) for i in range(20_000)]
    have, meta = read_rows(written(tmp_path, rows))
    assert meta.num_rows == 20_000
    assert [have[i].row_id for i in (0, 1, 19_999)] == ["row-00000", "row-00001", "row-19999"]
    assert rows_hash(have) == rows_hash(sorted(rows, key=lambda row: row.row_id))


def test_no_rows_at_all_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no rows; made for a test"):
        read_rows(written(tmp_path, []))


def test_a_directory_without_rows_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no rows there"):
        read_rows(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target_fingerprint": "target-b"},
            r"target=target-a, this run has target=target-b \(",
        ),
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
    with pytest.raises(ValueError, match=f"holds rows {META.key} made with .*{message}"):
        RowsWriter(tmp_path, replace(META, **change))
    assert read_meta(tmp_path).settings == META.settings


def test_the_key_names_all_that_changes_the_rows():
    changes = [
        {"target_fingerprint": "target-b"},
        {"template_hash": "template-b"},
        {"settings": META.settings | {"data.max_length": 7}},
        {"row_format": ROW_FORMAT + 1},
    ]
    keys = {META.key, *(replace(META, **change).key for change in changes)}
    assert len(keys) == 5
    assert replace(META, complete=True, summary="s", num_rows=3).key == META.key


def test_the_key_is_in_meta(tmp_path):
    path = written(tmp_path, ROWS) / "meta.json"
    assert json.loads(path.read_text())["key"] == META.key


def test_rows_of_an_earlier_format_are_refused(tmp_path):
    path = written(tmp_path, ROWS) / "meta.json"
    fields = json.loads(path.read_text())
    del fields["row_format"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"rows of format 1, this headstart reads .* {ROW_FORMAT}"):
        read_rows(tmp_path)


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
    before = (prepared / "rows" / "rows.arrow").read_bytes()
    command(
        "prepare",
        *saved(prepared / "target"),
        f"data.path={prepared}/chats.jsonl",
        "data.max_length=200",
        f"out={prepared}/rows",
    )
    assert (prepared / "rows" / "rows.arrow").read_bytes() == before


def test_conversations_that_leave_no_row_are_an_error(prepared, tmp_path):
    with pytest.raises(SystemExit, match=r"no row is usable: .*truncated away"):
        command(
            "prepare",
            *saved(prepared / "target"),
            f"data.path={prepared}/chats.jsonl",
            "data.max_length=8",
            f"out={tmp_path}/rows",
        )
