"""`headstart tree` on a tiny target: what it writes, that eval reads it, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from models import make_head, some_vocab
from scripted import suite
from traces import bench, make_result
from training import command, save_target, saved, talking_target

from headstart import cli
from headstart.eval.metrics import DEFINITIONS
from headstart.eval.result_files import read_result
from headstart.eval.settings import TreeConfig
from headstart.eval.tree_prompts import midway, split_suite
from headstart.eval.tree_report import TOLERANCE, Foretold, median_gap
from headstart.eval.tree_run import TreeSearchConfig
from headstart.eval.tree_search import Option
from headstart.heads.checkpoint import info_for, save_head

cli.register()
QUICK = [
    "search.num_prompts=4",
    "search.folds=2",
    "search.max_nodes=12",
    "search.max_depth=3",
    "search.top_k=[2,4]",
    "search.timing_repeats=1",
    "search.presets_measured=1",
    "eval.num_prompts=3",
    "eval.max_new_tokens=16",
    "eval.warmup_prompts=1",
    "eval.resamples=2000",
    "~tree@presets.dynamic60",
]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), target=talking_target())


def _checkpoint(directory: Path, family: str, **options: object) -> Path:
    target = talking_target()
    head = make_head(family, target, seed=None, **options)
    save_head(directory, head, info_for(head, target.name, target.fingerprint, step=3))
    return directory


@pytest.fixture(scope="module")
def searched(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one whole search, with an EAGLE head."""
    root = tmp_path_factory.mktemp("search")
    checkpoint = _checkpoint(root / "eagle", "eagle")
    command("tree", *saved(target_dir), f"checkpoint={checkpoint}", *QUICK, f"out={root}/tree")
    return root / "tree"


# What is written.


def test_the_tables_hold_acceptance_times_options_and_measurements(searched: Path) -> None:
    tables = json.loads((searched / "tree.json").read_text())
    assert tables["searched_on"]["places"] > 0
    assert len(tables["acceptance_by_depth_and_rank"]) == 5  # chain5 is the deepest preset
    assert set(tables["times"]["dynamic"]) == {"2", "4", "5"}
    kinds = {option["kind"] for option in tables["options"]}
    assert kinds == {"chain", "static", "dynamic"}
    assert max(option["nodes"] for option in tables["options"]) == 12
    assert "dynamic16" in tables["presets"]
    assert tables["chosen"]["tokens_per_s"] == max(o["tokens_per_s"] for o in tables["options"])
    provenance = tables["provenance"]
    assert {"device", "threads", "dtype"} <= set(provenance)
    assert provenance["config"]["runtime"]["threads"] is None
    names = [row["name"] for row in tables["measured"]]
    assert names[:3] == ["searched-chain", "searched-static", "searched-dynamic"]
    assert len(names) <= 4
    for row in tables["measured"]:
        assert row["difference"] == pytest.approx(
            row["measured_speedup"] / row["predicted_speedup"] - 1
        )


def test_every_measured_row_has_its_result_on_prompts_that_were_not_searched_on(
    searched: Path,
) -> None:
    tables = json.loads((searched / "tree.json").read_text())
    results = [read_result(path) for path in sorted(searched.rglob("result.json"))]
    assert len(results) == len(tables["measured"])
    for result in results:
        assert set(result.figures) == set(DEFINITIONS)
        assert result.counts.prompts == 3
        assert result.equality.fraction_identical == 1.0
        assert result.provenance.prompt_suite_hash != tables["searched_on"]["hash"]
    assert (searched / "report.md").is_file()
    assert (searched / "tree.png").stat().st_size > 10_000


def test_what_was_found_is_an_option_of_eval_by_its_search_path(
    searched: Path, target_dir: Path, tmp_path: Path
) -> None:
    tables = json.loads((searched / "tree.json").read_text())
    chosen = tables["chosen"]
    path = f"hydra.searchpath=[file://{searched}]"
    head = searched.parent / "eagle"
    for name in ("searched", f"searched-{chosen['kind']}"):
        given = [f"checkpoints=[{head}]", f"tree={name}", path]
        tree = cli.load_config("eval", given).tree
        assert isinstance(tree, TreeConfig)
        assert tree.name == name
        shape = {"chain": ["depth"], "static": ["choices"]}.get(chosen["kind"], ["total"])
        assert getattr(tree, shape[0]) is not None
    command(
        "eval",
        *saved(target_dir),
        f"checkpoints=[{head}]",
        "tree=searched-static",
        path,
        "eval.num_prompts=1",
        "eval.max_new_tokens=4",
        "eval.resamples=2000",
        f"out={tmp_path}/eval",
    )
    (result,) = (read_result(found) for found in tmp_path.rglob("result.json"))
    assert result.drafter.tree == "static:searched-static"


def test_the_option_says_where_it_comes_from(searched: Path) -> None:
    text = (searched / "tree" / "searched-static.yaml").read_text()
    told = r"# Found by headstart tree for .*eagle on .*, \d+ threads, float32, batch 1, temp"
    assert re.match(told, text)
    assert re.search(r"# Predicted: \d\.\d\d tokens a round, \d\.\d\d times plain", text)
    assert "defaults: [base_tree]\nname: searched-static\nchoices: [[" in text


# Other heads and settings.


def test_a_head_of_all_depths_at_once_has_no_dynamic_tree_and_says_so(
    target_dir: Path, tmp_path: Path
) -> None:
    checkpoint = _checkpoint(tmp_path / "medusa", "medusa", num_heads=2)
    command(
        "tree",
        *saved(target_dir),
        f"checkpoint={checkpoint}",
        *QUICK,
        "eval.batch_size=2",
        "sampling=sample",
        "name=mine",
        f"out={tmp_path}/tree",
    )
    tables = json.loads((tmp_path / "tree" / "tree.json").read_text())
    assert {option["kind"] for option in tables["options"]} == {"chain", "static"}
    assert max(option["levels"] for option in tables["options"]) == 2
    left_out = tables["presets_left_out"]
    assert set(left_out) == {"chain3", "chain5", "static11", "static15", "dynamic8", "dynamic16"}
    assert "a dynamic tree needs an autoregressive head" in left_out["dynamic8"]
    assert tables["times"]["batch"] == 2
    written = {path.name for path in (tmp_path / "tree" / "tree").iterdir()}
    assert written == {"mine.yaml", "mine-chain.yaml", "mine-static.yaml"}


# What is refused, before anything is decoded.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["checkpoint=none"], "checkpoint=none: no head checkpoint there"),
        (["eval.suite=none.jsonl"], "eval.suite=none.jsonl"),
        (["name='a b'"], "tree.name=a b: need letters"),
    ],
)
def test_what_is_missing_is_told_before_the_target_is_loaded(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").touch()
    target = ["target=hf", "target.path=/no/such/target"]
    with pytest.raises(SystemExit, match=message):
        command("tree", *target, f"checkpoint={tmp_path}", *given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["search.top_k=[2,99]"], "search.top_k=99 but the head drafts over 64 tokens"),
        (["search.max_rank=65"], "search.max_rank=65 but the head drafts over 64 tokens"),
        (
            ["presets.chain2.children=sampled"],
            "presets.chain2.children=sampled: only top_k trees can be foretold",
        ),
    ],
)
def test_a_search_that_does_not_fit_the_head_is_refused_by_option(
    given: list[str], message: str, target_dir: Path, tmp_path: Path
) -> None:
    vocab = some_vocab(64, talking_target().shape.vocab_size)
    checkpoint = _checkpoint(tmp_path / "head", "eagle", vocab=vocab)
    with pytest.raises(SystemExit, match=message):
        command(
            "tree",
            *saved(target_dir),
            f"checkpoint={checkpoint}",
            *QUICK,
            *given,
            f"out={tmp_path}/o",
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_nodes": 2}, "search.max_nodes=2: need at least 3"),
        ({"folds": 1}, "search.folds=1: need at least 2"),
        ({"folds": 9, "num_prompts": 8}, "search.folds=9 but search.num_prompts=8: every part"),
        ({"prior": 0.0}, "search.prior=0.0: need more than 0 places"),
        ({"top_k": [1, 4]}, r"search.top_k=\[1, 4\]: need at least 2; 1 is a chain"),
    ],
)
def test_a_bad_setting_names_its_field(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeSearchConfig(**values)


# Prompts.


def test_the_prompts_searched_on_and_those_measured_are_disjoint_and_spread() -> None:
    whole = suite(range(12), max_new_tokens=4)
    first, second = split_suite(whole, 4, 6)
    ids = [[r.prompt_id for r in part.requests] for part in (first, second)]
    assert ids == [["p0", "p3", "p6", "p9"], ["p1", "p2", "p4", "p5", "p7", "p8"]]
    assert set(first.categories) == set(ids[0])
    assert len({whole.hash, first.hash, second.hash}) == 3
    with pytest.raises(ValueError, match="hand: 12 prompts, but search.num_prompts=8 and"):
        split_suite(whole, 8, 5)


def test_texts_half_way_have_half_their_answers_and_room_for_a_draft() -> None:
    requests = suite([1, 2], max_new_tokens=4).requests
    answers = [[5, 6, 7, 8], [5] * 40]
    texts = midway(requests, answers, room=10)
    assert [t.token_ids for t in texts] == [(1, 5, 6)]
    with pytest.raises(ValueError, match="every prompt is longer than 2 tokens"):
        midway(requests, answers, room=2)


# Promises beside measurements.


def test_a_difference_above_the_tolerance_is_told_with_what_it_is_made_of() -> None:
    """Twenty prompts whose rounds emit 2 tokens in 100 ms, where a plain token takes 100 ms."""
    result = make_result("chain2", *bench(1, 2, seconds=0.1))
    option = Option("chain", 3, 2, tau=2.0, seconds=0.08, tokens_per_s=25.0, speedup=2.5)
    row = Foretold("chain2", option)
    assert row.gap is None
    assert row.warnings() == []
    far = replace(row, result=result)
    assert far.gap == pytest.approx(-0.2)
    assert far.warnings() == [
        "chain2: decode speedup 2.00 is -20.0 % off the 2.50 predicted: tau 2.00 against 2.00, a "
        "round 100.0 ms against 80.0 ms"
    ]
    near = replace(far, option=replace(option, speedup=2.0 * (1 + 0.9 * TOLERANCE)))
    assert near.warnings() == []
    assert median_gap([row, far]) == pytest.approx(0.2)
