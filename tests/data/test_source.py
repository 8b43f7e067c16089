"""Several sources: limits, weights, and what identifies them."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from training import command

from headstart import cli
from headstart.data.conversations import Account, Conversation
from headstart.data.ids import IdSet
from headstart.data.source import (
    DataConfig,
    SourceConfig,
    expected_rows,
    iter_conversations,
    load_conversations,
    mixed,
    source_settings,
)

cli.register()


def chats(path: Path, count: int, **extra: object) -> str:
    """Write rows whose prompts name their file; return the path."""
    rows = ({"prompt": f"{path.stem} {n}", "completion": "x"} | extra for n in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def taken(sources: list[SourceConfig], **how: object) -> list[Conversation]:
    config = DataConfig(sources=sources, **({"num_prompts": None, "split": "all"} | how))
    return load_conversations(config, need_answers=True)[0]


def names(conversations: list[Conversation]) -> list[str]:
    return [c.messages[0]["content"].split()[0] for c in conversations]


@pytest.fixture
def two(tmp_path) -> list[str]:
    return [chats(tmp_path / "many.jsonl", 900), chats(tmp_path / "few.jsonl", 100)]


def test_without_weights_every_row_of_every_source_is_taken(two):
    kept = taken([SourceConfig(path) for path in two])
    assert Counter(names(kept)) == {"many": 900, "few": 100}
    assert len({c.prompt_id for c in kept}) == 1000


def test_without_weights_a_limit_on_all_takes_from_each_in_turn(two):
    assert names(taken([SourceConfig(path) for path in two], num_prompts=4)) == ["many", "few"] * 2


def test_a_source_gives_no_more_than_its_limit(two):
    kept = taken([SourceConfig(two[0], limit=7), SourceConfig(two[1])])
    assert Counter(names(kept)) == {"many": 7, "few": 100}


def test_weights_give_the_proportions_until_a_source_runs_out(two):
    sources = [SourceConfig(two[0], weight=3), SourceConfig(two[1], weight=1)]
    counts = Counter(names(taken(sources)))
    assert counts["few"] == 100
    assert 200 < counts["many"] < 400  # 300 on average, standard deviation 20
    config = DataConfig(sources=sources, num_prompts=None, split="all")
    assert (
        f"the weighted mixture ended where {two[1]} did"
        in load_conversations(config, need_answers=True)[1]
    )


def test_the_mixture_is_the_same_for_a_seed_and_another_for_another(two):
    sources = [SourceConfig(two[0], weight=1), SourceConfig(two[1], weight=1)]
    orders = [names(taken(sources, seed=seed, num_prompts=50)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_unusable_rows_do_not_count_against_a_weight(tmp_path):
    bad = chats(tmp_path / "half.jsonl", 400)
    with Path(bad).open("a") as file:
        file.write("junk\n" * 400)
    good = chats(tmp_path / "good.jsonl", 400)
    sources = [SourceConfig(bad, weight=1), SourceConfig(good, weight=1)]
    counts = Counter(names(taken(sources, num_prompts=300)))
    assert abs(counts["half"] - 150) < 45


def test_mixing_is_lazy():
    drawn = []

    def stream(name):
        for n in range(10**9):
            drawn.append(name)
            yield n

    account = Account()
    mixture = mixed([stream(0), stream(1)], [1, 1], seed=0, names=["a", "b"], account=account)
    for _ in range(10):
        next(mixture)
    assert len(drawn) == 10


def test_the_summary_tells_how_much_came_from_where(two):
    sources = [SourceConfig(two[0], limit=7), SourceConfig(two[1], limit=5)]
    config = DataConfig(sources=sources, num_prompts=None, split="all")
    summary = load_conversations(config, need_answers=True)[1]
    assert f"taken 7 from {two[0]}, 5 from {two[1]}" in summary


def test_two_sources_of_one_path_are_told_apart(two):
    sources = [SourceConfig(two[0], limit=7), SourceConfig(two[0], limit=5)]
    config = DataConfig(sources=sources, num_prompts=None, split="all")
    summary = load_conversations(config, need_answers=True)[1]
    assert f"taken 7 from {two[0]} (data.sources[0]), 5 from {two[0]} (data.sources[1])" in summary


def test_a_source_of_a_mixture_without_a_usable_row_is_named(tmp_path, two):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("junk\n")
    sources = [SourceConfig(str(bad), weight=1e9), SourceConfig(two[0], weight=1e-9)]
    with pytest.raises(ValueError, match=r"ended at once, as .*/bad\.jsonl has no usable row in"):
        taken(sources)


def test_tokenised_rows_fall_into_both_splits_by_their_prompts(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"input_ids": [n, 5, 6], "loss_mask": [0, 0, 1]} for n in range(200)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    halves = [
        {c.prompt_id for c in taken([SourceConfig(str(path))], split=split)}
        for split in ("train", "heldout")
    ]
    assert all(halves)
    assert not halves[0] & halves[1]
    assert len(halves[0] | halves[1]) == 200


def test_reading_keeps_no_row_in_memory(tmp_path):
    path = chats(tmp_path / "a.jsonl", 5000, id=None)
    with Path(path).open("a") as file:
        file.write("junk\n" * 5000)
    config = DataConfig(path=path, num_prompts=None, split="all")
    tracemalloc.start()
    try:
        for _ in iter_conversations(config, need_answers=True, account=Account()):
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1.5e6  # a list of the 5,000 conversations takes 4 MB


def test_an_id_set_knows_every_id_and_no_other():
    ids = IdSet()
    assert all(ids.add(f"row {n}") for n in range(5000))
    assert not any(ids.add(f"row {n}") for n in range(5000))
    assert len(ids) == 5000


def test_the_number_of_rows_is_known_when_all_of_them_are_read(two):
    sources = [SourceConfig(path) for path in two]
    whole = {"num_prompts": None, "split": "all"}
    assert expected_rows(DataConfig(sources=sources, **whole)) == 1000
    assert expected_rows(DataConfig(path=two[0], **whole)) == 900
    assert expected_rows(DataConfig(path=two[0])) is None
    assert expected_rows(DataConfig(sources=[SourceConfig(two[0], limit=3)], **whole)) is None


# What identifies the data


def test_the_settings_hold_each_source_and_its_content(two):
    config = DataConfig(sources=[SourceConfig(path) for path in two])
    before = source_settings(config)
    assert [source["path"] for source in before["data.sources"]] == two
    json.dumps(before)
    chats(Path(two[1]), 101)
    assert source_settings(config)["data.file_hash"] != before["data.file_hash"]


def test_one_file_is_named_as_it_always_was(two):
    settings = source_settings(DataConfig(path=two[0]))
    assert "data.sources" not in settings
    assert len(settings["data.file_hash"]) == 16
    assert source_settings(DataConfig())["data.file_hash"] is None


# Options


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([{}], r"data\.sources\[0\]\.path is not set: give every source a path"),
        ([{"path": "a", "weight": 0}], r"data\.sources\[0\]\.weight=0: need more than 0, or null"),
        ([{"path": "a", "limit": 0}], r"data\.sources\[0\]\.limit=0: need at least one, or null"),
        ([{"path": "a", "format": "csv"}], r"format=csv: expected one of auto, jsonl, parquet, d"),
        (
            [{"path": "a", "weight": 1}, {"path": "b"}],
            r"data\.sources\[1\]\.weight=null: other sources have weights; give one to each",
        ),
    ],
)
def test_a_source_that_makes_no_sense_is_named(sources, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(sources=[SourceConfig(**source) for source in sources])


def test_a_path_and_sources_together_are_refused():
    with pytest.raises(ValueError, match=r"data\.path=a: data\.sources is given too; keep one"):
        DataConfig(path="a", sources=[SourceConfig("b")])


def test_the_weight_of_a_single_source_is_told_to_do_nothing():
    with pytest.warns(UserWarning, match="weight has no effect: there is no other source"):
        DataConfig(sources=[SourceConfig("a", weight=2)])


def test_sources_are_given_on_the_command_line():
    given = "data.sources=[{path:a.jsonl,weight:3},{path:b/*.parquet,weight:1,limit:5}]"
    config = cli.load_config("prepare", [given])
    assert config.data.sources == [
        SourceConfig("a.jsonl", weight=3),
        SourceConfig("b/*.parquet", weight=1, limit=5),
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{pth:a.jsonl}", r"pth"),
        ("{path:a.jsonl,weight:much}", r"weight.*much|much.*Float"),
        ("{path:a.jsonl,weight:-1}", r"data\.sources\[0\]\.weight=-1\.0: need more than 0"),
    ],
)
def test_p59_a_mistyped_field_of_a_source_is_one_sentence(source, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message) as ended:
        command("prepare", f"data.sources=[{source}]")
    assert "\n" not in ended.value.code
    assert list(tmp_path.iterdir()) == []
