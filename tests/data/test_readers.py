"""One set of rows, read from every kind of file and dataset."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from headstart.data.readers import RowFiles, open_rows
from headstart.data.source import read_conversations

ROWS = [
    {
        "id": f"row {n}",
        "messages": [
            {"role": "user", "content": f"{n}?"},
            {"role": "assistant", "content": f"{n}."},
        ],
    }
    for n in range(600)
]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def as_zst(path: Path, data: bytes = TEXT) -> None:
    with pyarrow.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(data)


def as_parquet(path: Path, rows: list[dict] = ROWS) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=100)


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(TEXT),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(TEXT)),
    "a.jsonl.zst": as_zst,
    "a.parquet": as_parquet,
}


def ids(path: Path | str) -> list[str]:
    kept, _ = read_conversations(path, need_answers=True)
    return [conversation.prompt_id for conversation in kept]


def opened(path: Path | str, **how: object) -> RowFiles:
    return open_rows(str(path), option="data.path", **how)


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_conversations(tmp_path, name):
    WRITERS[name](tmp_path / name)
    kept, account = read_conversations(tmp_path / name, need_answers=True)
    assert [c.prompt_id for c in kept] == [row["id"] for row in ROWS]
    assert [list(c.messages) for c in kept] == [row["messages"] for row in ROWS]
    assert account.total == 600


@pytest.mark.parametrize("name", WRITERS)
def test_the_number_of_rows_is_known_beforehand_where_it_is_cheap(tmp_path, name):
    WRITERS[name](tmp_path / name)
    cheap = not name.endswith((".gz", ".zst"))
    assert opened(tmp_path / name).count() == (600 if cheap else None)


def test_a_last_line_without_a_newline_counts(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "b"}')
    assert opened(tmp_path / "a.jsonl").count() == 2


def test_concatenated_archives_are_read_to_the_end(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:]))
    as_zst(tmp_path / "one.zst", TEXT[:1000])
    as_zst(tmp_path / "two.zst", TEXT[1000:])
    joined = (tmp_path / "one.zst").read_bytes() + (tmp_path / "two.zst").read_bytes()
    (tmp_path / "a.jsonl.zst").write_bytes(joined)
    assert ids(tmp_path / "a.jsonl.gz") == ids(tmp_path / "a.jsonl.zst") == [r["id"] for r in ROWS]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
@pytest.mark.parametrize("damage", ["cut", "junk"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, name, damage):
    path = tmp_path / name
    WRITERS[name](path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"no such thing\n" * 9)
    with pytest.raises(ValueError, match=rf"{name}: .*make (the file|it) again"):
        ids(path)


def test_a_damaged_page_of_a_table_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    as_parquet(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + b"\xff" * 60 + whole[260:])
    with pytest.raises(ValueError, match=r"a\.parquet: .*make it again"):
        ids(path)


def test_null_columns_of_a_table_are_fields_that_are_not_there(tmp_path):
    rows = [ROWS[0], {"id": "b", "prompt": "x", "completion": "y", "category": "chat"}]
    as_parquet(tmp_path / "a.parquet", rows)
    assert ids(tmp_path / "a.parquet") == ["row 0", "b"]


CALLS = [
    {
        "id": name,
        "messages": [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            },
        ],
    }
    for name, arguments in (("a", {"city": "Oslo"}), ("b", {"query": {"q": "x"}, "n": [1, 2]}))
]


@pytest.mark.parametrize("kind", ["table", "dataset"])
def test_arguments_in_a_table_hold_no_fields_of_other_rows(tmp_path, kind):
    from datasets import Dataset

    path = tmp_path / "a.parquet"
    as_parquet(path, CALLS)
    if kind == "dataset":
        path = tmp_path / "saved"
        Dataset.from_parquet(str(tmp_path / "a.parquet")).save_to_disk(path)
    kept, _ = read_conversations(path, need_answers=True)
    assert [c.messages[1]["tool_calls"] for c in kept] == [
        row["messages"][1]["tool_calls"] for row in CALLS
    ]


def test_a_null_argument_in_json_lines_stays(tmp_path):
    row = json.loads(json.dumps(CALLS[0]))
    row["messages"][1]["tool_calls"][0]["function"]["arguments"]["unit"] = None
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    (kept,), _ = read_conversations(tmp_path / "a.jsonl", need_answers=True)
    function = kept.messages[1]["tool_calls"][0]["function"]
    assert function["arguments"] == {"city": "Oslo", "unit": None}


def test_a_table_without_a_known_column_is_an_error_that_lists_its_columns(tmp_path):
    as_parquet(tmp_path / "a.parquet", [{"question": "a", "answer": "b"}])
    with pytest.raises(ValueError, match=r"a\.parquet: has the columns answer, question; need one"):
        ids(tmp_path / "a.parquet")


def test_tokens_in_a_table_are_taken_as_they_are(tmp_path):
    as_parquet(tmp_path / "a.parquet", [{"input_ids": [5, 6], "loss_mask": [False, True]}])
    (conversation,), _ = read_conversations(tmp_path / "a.parquet", need_answers=True)
    assert (conversation.tokens.token_ids, conversation.tokens.loss_mask) == ([5, 6], [0, 1])


def test_a_json_array_is_refused_with_the_cure(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(ROWS[:2], indent=2))
    with pytest.raises(ValueError, match=r"a\.json: one JSON array.*jq -c"):
        ids(tmp_path / "a.json")


# Directories and globs


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "all" / "deep").mkdir(parents=True)
    for number, name in enumerate(("b.jsonl", "deep/a.parquet", "a.jsonl.gz")):
        rows = [{"prompt": f"{number} {n}", "completion": "x"} for n in range(2)]
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path = tmp_path / "all" / name
        if path.suffix == ".parquet":
            as_parquet(path, rows)
        else:
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    (tmp_path / "all" / "README.md").write_text("about")
    (tmp_path / "all" / ".hidden.jsonl").write_text("junk")
    return tmp_path / "all"


def test_a_directory_is_read_in_order_of_its_files_names(folder):
    kept, account = read_conversations(folder, need_answers=True)
    assert [c.prompt_id for c in kept] == [
        "a.jsonl.gz-line-1",
        "a.jsonl.gz-line-2",
        "b.jsonl-line-1",
        "b.jsonl-line-2",
        "deep/a.parquet-row-1",
        "deep/a.parquet-row-2",
    ]
    assert not account.repaired


def test_a_glob_reads_what_it_matches(folder):
    assert len(ids(f"{folder}/*.jsonl*")) == 4
    assert len(ids(f"{folder}/**/*.parquet")) == 2


def test_a_glob_leaves_out_what_a_directory_would(folder):
    assert len(ids(f"{folder}/*")) == 4
    assert opened(f"{folder}/*").left_out == ("README.md",)


def test_a_glob_of_unknown_names_alone_is_read_as_json_lines(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(TEXT)
    assert len(ids(f"{tmp_path}/*.txt")) == 1200


def test_places_name_their_file_where_there_are_several(folder):
    with (folder / "b.jsonl").open("a") as file:
        file.write("junk\n")
    _, account = read_conversations(folder, need_answers=True)
    assert account.summary() == (f"kept 6 of 7 rows: 1 not valid JSON ({folder}/b.jsonl line 3)")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.jsonl", r"none\.jsonl: no such file; give a file, directory or glob"),
        ("*.csv", r"\*\.csv: no such file"),
        ("empty", r"empty: no \.jsonl or \.parquet file in this directory \(1 others\)"),
    ],
)
def test_a_path_that_gives_nothing_is_an_error_that_names_it(tmp_path, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").touch()
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        opened(tmp_path / path)


def test_settings_of_a_dataset_are_told_to_do_nothing_for_files(folder):
    with pytest.warns(UserWarning, match="streaming, dataset_split has no effect on files"):
        opened(folder, streaming=True, split="test")


# What names the content


def test_the_digest_of_one_file_is_the_hash_of_its_bytes(tmp_path):
    WRITERS["a.jsonl"](tmp_path / "a.jsonl")
    before = opened(tmp_path / "a.jsonl").digest()
    (tmp_path / "a.jsonl").rename(tmp_path / "b.jsonl")
    assert opened(tmp_path / "b.jsonl").digest() == before
    (tmp_path / "b.jsonl").write_bytes(TEXT.replace(b"7?", b"7!"))
    assert opened(tmp_path / "b.jsonl").digest() != before


def test_the_digest_of_several_sees_each_byte_and_which_file_it_is_in(folder):
    seen = [opened(folder).digest()]
    (folder / "b.jsonl").write_bytes((folder / "b.jsonl").read_bytes().replace(b"x", b"y", 1))
    seen.append(opened(folder).digest())
    (folder / "b.jsonl").rename(folder / "c.jsonl")
    seen.append(opened(folder).digest())
    moved = folder.rename(folder.parent / "moved")
    assert len(set(seen)) == 3
    assert opened(moved).digest() == seen[-1]


# Datasets


@pytest.fixture
def saved_dataset(tmp_path) -> Path:
    from datasets import Dataset, DatasetDict

    data = DatasetDict(
        {name: Dataset.from_list(ROWS[:n]) for name, n in (("train", 5), ("test", 2))}
    )
    data.save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("split", "count"), [("train", 5), ("test", 2)])
def test_a_saved_dataset_is_read_by_its_split(saved_dataset, split, count, streaming):
    rows = opened(saved_dataset, split=split, streaming=streaming)
    found = list(rows.rows())
    assert [row["id"] for _, _, row in found] == [row["id"] for row in ROWS[:count]]
    assert found[1][2]["messages"] == ROWS[1]["messages"]
    assert rows.count() == (None if streaming else count)


def test_a_split_that_is_not_there_is_named_with_those_that_are(saved_dataset):
    with pytest.raises(ValueError, match=r"data\.path=.*saved: .*no split dev; it has test, train"):
        list(opened(saved_dataset, split="dev").rows())


@pytest.mark.parametrize("streaming", [False, True])
def test_a_damaged_dataset_is_an_error_that_names_it(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "mine" / "train.parquet"
    path.parent.mkdir()
    as_parquet(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + b"\xff" * 60 + whole[260:])
    rows = opened(path.parent, format="dataset", streaming=streaming)
    with pytest.raises(ValueError, match=r"data\.path=.*mine: the dataset cannot be loaded \("):
        list(rows.rows())


def test_a_dataset_is_named_by_its_content_and_split(saved_dataset):
    digests = {opened(saved_dataset, split=split).digest() for split in ("train", "test")}
    assert len(digests) == 2
    assert opened(saved_dataset, streaming=True).digest() in digests


@pytest.mark.parametrize("streaming", [False, True])
def test_datasets_loads_a_directory_when_asked_to(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_bytes(TEXT)
    rows = opened(tmp_path / "mine", format="dataset", streaming=streaming)
    assert [row["id"] for _, _, row in rows.rows()] == [row["id"] for row in ROWS]


def test_a_name_that_no_dataset_has_is_one_sentence(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"data\.path=nobody/nothing: no such file, and not a"):
        list(opened("nobody/nothing").rows())
