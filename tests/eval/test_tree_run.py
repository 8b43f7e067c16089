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
from headstart.eval.leaderboard import SPEED
from headstart.eval.metrics import DEFINITIONS
from headstart.eval.result_files import read_result
from headstart.eval.settings import EvalConfig, SuiteConfig, TreeConfig
from headstart.eval.tree_prompts import midway, split_suite, with_more
from headstart.eval.tree_report import TOLERANCE, Foretold, median_gap, overtaken, write_option
from headstart.eval.tree_search import Option
from headstart.eval.tree_settings import TreeRun, TreeSearchConfig
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


def test_the_option_says_where_it_comes_from_and_what_it_measured(searched: Path) -> None:
    text = (searched / "tree" / "searched-static.yaml").read_text()
    told = r"# Found by headstart tree for .*eagle on .*, \d+ threads, float32, batch 1, temp"
    assert re.match(told, text)
    assert re.search(r"# Predicted: \d\.\d\d tokens a round, \d\.\d\d times plain", text)
    measured = r"# Measured: \d\.\d\d tokens a round, \d\.\d\d \[\d\.\d\d, \d\.\d\d\] times plain "
    for name in ("searched", "searched-chain", "searched-static", "searched-dynamic"):
        written = (searched / "tree" / f"{name}.yaml").read_text()
        assert re.search(measured + r"decoding \(3 prompts not searched on\)\.\n", written)
    assert "defaults: [base_tree]\nname: searched-static\nchoices: [[" in text


def test_a_tree_that_measured_faster_than_the_chosen_one_is_in_the_results(searched: Path) -> None:
    tables = json.loads((searched / "tree.json").read_text())
    name = "searched-" + tables["chosen"]["kind"]
    speeds = {row["name"]: row["measured_speedup"] for row in tables["measured"]}
    results = [read_result(path) for path in searched.rglob("result.json")]
    (chosen,) = (result for result in results if result.drafter.name == f"eagle-{name}")
    told = [warning for warning in chosen.warnings if "was chosen by its prediction" in warning]
    assert len(told) == (max(speeds.values()) > speeds[name])


# Other heads and settings.


def test_several_suites_are_searched_on_and_measured_each_by_first_turns(
    target_dir: Path, tmp_path: Path
) -> None:
    checkpoint = _checkpoint(tmp_path / "eagle", "eagle")
    for name in ("a", "b"):
        rows = [{"id": i, "category": "x", "turns": [f"Say {i}", "Again"]} for i in range(8)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    suites = f"[{{path:{tmp_path}/a.jsonl}},{{path:{tmp_path}/b.jsonl,num_prompts:2}}]"
    command(
        "tree",
        *saved(target_dir),
        f"checkpoint={checkpoint}",
        *QUICK,
        "search.top_k=[2]",
        "search.presets_measured=0",
        f"eval.suites={suites}",
        f"out={tmp_path}/tree",
    )
    results = [read_result(path) for path in (tmp_path / "tree").rglob("result.json")]
    assert len(results) == 3
    for result in results:
        counts = {name: group.counts.prompts for name, group in result.suites.items()}
        assert counts == {"a": 3, "b": 2}
        assert any("(max_turns=1)" in warning for warning in result.warnings)
    rows = (tmp_path / "tree" / "eagle-searched-chain" / "prompts.jsonl").read_text().splitlines()
    assert [json.loads(row)["turns"] for row in rows] == [1] * 5


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
        (["eval.suites=[{path:none.jsonl}]"], r"eval\.suites\[0\]\.path=none\.jsonl"),
        (
            ["eval.max_turns=2"],
            "eval.max_turns=2 for generated-heldout: trees are searched on first",
        ),
        (["eval.suites=[{max_turns:3}]"], "eval.max_turns=3 for generated-heldout"),
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


def test_an_option_of_evaluations_that_a_search_does_not_read_is_told() -> None:
    with pytest.warns(UserWarning, match=r"eval\.only=\['x'\] has no effect in headstart tree"):
        TreeRun(eval=EvalConfig(max_turns=1, only=["x"]))


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
    first, second = split_suite(whole, 4, {"hand": 4})
    ids = [[r.prompt_id for r in part.requests] for part in (first, second)]
    assert ids == [["p0", "p3", "p6", "p9"], ["p1", "p4", "p7", "p10"]]
    assert set(first.categories) == set(ids[0])
    assert len({whole.hash, first.hash, second.hash}) == 3
    with pytest.raises(ValueError, match="suite hand: 12 prompts, but search.num_prompts=8 and"):
        split_suite(whole, 8, {"hand": 5})


def test_every_member_of_a_suite_is_parted_and_knows_its_prompts() -> None:
    one = suite(range(12), max_new_tokens=4)
    members = {r.prompt_id: "a" if i < 8 else "b" for i, r in enumerate(one.requests)}
    whole = replace(one, members=members, given=frozenset({"p0", "p1"}))
    first, second = split_suite(whole, 2, {"a": 3, "b": 1})
    assert first.members == {"p0": "a", "p4": "a", "p8": "b", "p10": "b"}
    assert second.members == {"p1": "a", "p3": "a", "p6": "a", "p9": "b"}
    assert [r.prompt_id for r in second.requests] == list(second.members)
    assert (first.given, second.given) == ({"p0"}, {"p1"})
    with pytest.raises(ValueError, match="suite b: 4 prompts, but search.num_prompts=2 and"):
        split_suite(whole, 2, {"a": 3, "b": 3})


def test_every_suite_is_loaded_with_more_prompts_than_are_measured() -> None:
    config = EvalConfig(num_prompts=5, suites=[SuiteConfig(name="a"), SuiteConfig(num_prompts=2)])
    assert [s.num_prompts for s in with_more(config, 40).chosen_suites] == [45, 42]
    assert with_more(EvalConfig(suite="a.jsonl"), 40).suite == "a.jsonl"


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


def _row(name: str, speed: float, interval: tuple[float, float]) -> Foretold:
    """A chain of 2 that promises 2.5 and measured as told, on twenty prompts."""
    option = Option("chain", 3, 2, tau=2.0, seconds=0.08, tokens_per_s=25.0, speedup=2.5)
    result = make_result(name, *bench(1, 2, seconds=0.2 / speed))
    result.intervals[SPEED] = list(interval)
    return Foretold(name, option, result)


def test_a_row_that_measured_faster_than_the_chosen_one_is_told_with_both_intervals() -> None:
    chosen = _row("mine", 2.0, (1.9, 2.1))
    assert overtaken(chosen, [chosen, _row("slower", 1.9, (1.8, 2.0))]) == []
    near = [chosen, _row("far", 2.25, (2.05, 2.4)), _row("second", 2.2, (2.15, 2.3))]
    assert overtaken(chosen, near) == [
        "mine was chosen by its prediction and measured 2.00 [1.90, 2.10] times plain decoding, "
        "but far measured 2.25 [2.05, 2.40]; the intervals overlap: measure more prompts "
        "(eval.num_prompts) to tell them apart"
    ]
    (told,) = overtaken(chosen, [chosen, _row("dynamic8", 2.5, (2.2, 2.6))])
    assert told.endswith(
        "2.50 [2.20, 2.60]; the intervals do not overlap: draft with tree=dynamic8"
    )
    unmeasured = replace(chosen, result=None)
    assert overtaken(unmeasured, [unmeasured]) == []


def test_an_option_is_written_before_and_after_it_is_measured(tmp_path: Path) -> None:
    row = _row("mine", 2.0, (1.9, 2.1))
    write_option(tmp_path, "mine", replace(row, result=None), "Found by hand.")
    lines = (tmp_path / "mine.yaml").read_text().splitlines()
    assert lines[:2] == [
        "# Found by hand.",
        "# Predicted: 2.00 tokens a round, 2.50 times plain decoding.",
    ]
    write_option(tmp_path, "mine", row, "Found by hand.")
    again = (tmp_path / "mine.yaml").read_text().splitlines()
    told = "# Measured: 2.00 tokens a round, 2.00 [1.90, 2.10] times plain decoding (20 prompts "
    assert again == [*lines[:2], told + "not searched on).", *lines[2:]]
