"""All steps from one config: made once, reused while nothing changed, never overwritten."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from training import chat_target, command, save_target, saved

from headstart import cli, pipeline
from headstart.data.rows import read_rows
from headstart.data.store import FeatureStore
from headstart.heads.checkpoint import load_head

EXPERIMENTS = ["demo", "smoke"]  # of the pipeline; test_conf.py holds them to the directory
STEPS = (
    "generate rows",
    "generate heldout",
    "capture features",
    "train medusa",
    "train eagle",
    "evaluate",
)
TINY = [
    "data.num_prompts=7",
    "data.max_length=400",
    "heldout_prompts=7",
    "generate.max_new_tokens=6",
    "heads.medusa.draft_vocab_size=64",
    "heads.eagle.draft_vocab_size=64",
    "train.max_steps=2",
    "train.max_seconds=null",
    "train.eval_prompts=1",
    "train.eval_new_tokens=4",
    "eval.num_prompts=2",
    "eval.max_new_tokens=4",
    "eval.warmup_prompts=1",
    "eval.resamples=2000",
]


def run(root: Path, *overrides: str, experiment: str = "smoke") -> str:
    """Run the pipeline in `root`/run and return what it logged."""
    log = root / "run" / "cli.log"
    before = log.read_text() if log.exists() else ""
    target = saved(root / "target")
    chosen = [f"experiment={experiment}", *target, *TINY, f"out={root}/run", *overrides]
    command("pipeline", *chosen)
    return log.read_text().removeprefix(before)


def reused(log: str) -> list[str]:
    return [step for step in STEPS if f"{step}: reused" in log]


def announced(capsys: pytest.CaptureFixture[str]) -> int:
    """Return how many lines of the table at the start say that a result is there already."""
    return len(re.findall(r"there already\W+/", capsys.readouterr().out))


@pytest.fixture(scope="module", params=EXPERIMENTS)
def experiment(request, tmp_path_factory) -> tuple[Path, str]:
    """Run one experiment for two steps of training."""
    root = tmp_path_factory.mktemp(request.param)
    save_target(root / "target")
    return root, run(root, experiment=request.param)


def test_every_experiment_runs_from_prompts_to_a_report(experiment):
    root, log = experiment
    assert [step for step in STEPS if f"{step}: done" in log] == list(STEPS)
    trees = [tree.name for tree in cli.load_config("pipeline", []).trees.values()]
    for name in ("medusa", "eagle"):
        assert load_head(root / "run" / name / "head")[1].step == 2
        for tree in trees:
            result = json.loads((root / "run/eval" / f"{name}-{tree}/result.json").read_text())
            assert result["equality"]["fraction_identical"] == 1.0
    assert f"medusa-{trees[0]}" in (root / "run/eval/report.md").read_text()


def test_held_out_prompts_are_not_training_prompts(experiment):
    root, _ = experiment
    (train, _), (heldout, _) = (read_rows(root / "run" / name) for name in ("rows", "heldout"))
    openings = [
        {tuple(row.token_ids[: row.loss_mask.index(1)]) for row in x} for x in (train, heldout)
    ]
    assert not openings[0] & openings[1]


@pytest.fixture
def finished(tmp_path) -> Path:
    save_target(tmp_path / "target")
    assert reused(run(tmp_path)) == []
    return tmp_path


def test_a_second_run_reuses_every_step_and_says_so(finished, capsys):
    heads = [finished / "run" / name / "head/model.safetensors" for name in ("medusa", "eagle")]
    before = [head.stat().st_mtime_ns for head in heads]
    capsys.readouterr()
    assert reused(run(finished)) == list(STEPS)
    assert announced(capsys) == len(STEPS)
    assert [head.stat().st_mtime_ns for head in heads] == before


def test_a_changed_option_redoes_what_depends_on_it_and_keeps_the_old_result(finished, capsys):
    old = (finished / "run/eagle/head/model.safetensors").read_bytes()
    capsys.readouterr()
    log = run(finished, "heads.eagle.num_layers=2")
    assert reused(log) == [*STEPS[:3], "train medusa"]
    assert announced(capsys) == 4
    aside = finished / "run/eagle.earlier-1"
    assert f"train eagle: head.num_layers changed; the earlier result is now {aside}" in log
    assert (aside / "head/model.safetensors").read_bytes() == old
    assert load_head(finished / "run/eagle/head")[0].config.num_layers == 2
    assert (finished / "run/eval.earlier-1/report.md").is_file()


def test_a_step_that_never_finished_is_made_again(finished):
    (finished / "run/eval/finished.json").unlink()
    assert reused(run(finished)) == list(STEPS[:5])


@pytest.fixture
def own_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("own_threads")
def test_another_number_of_threads_measures_again(finished):
    assert reused(run(finished, "runtime.threads=1")) == list(STEPS[:5])


def test_one_capture_holds_the_states_that_any_of_the_heads_taps(tmp_path):
    save_target(tmp_path / "target")
    eagle3 = [f"heads.eagle3.{x}" for x in ("aux=[1]", "draft_vocab_size=64")]
    log = run(tmp_path, "+head@heads.eagle3=eagle3", *eagle3, "~heads.medusa", "~trees.tree")
    assert FeatureStore(tmp_path / "run/features").key["aux_features"] == [1]
    assert "train eagle: done" in log
    assert load_head(tmp_path / "run/eagle3/head")[0].aux_features == (1,)


def test_training_online_captures_nothing(tmp_path):
    save_target(tmp_path / "target")
    log = run(tmp_path, "train.features=online", "~heads.medusa", "~trees.tree")
    assert "capture features" not in log
    assert not (tmp_path / "run/features").exists()
    assert load_head(tmp_path / "run/eagle/head")[1].step == 2


# What is refused, and estimated, before anything is made.

RATES = {"generate": 100.0, "decode": 10.0, "capture": 1000.0, "train": 500.0, "write": 1e6}


def planned(root: Path, *overrides: str) -> list[pipeline.Step]:
    """Plan the smoke experiment for the tiny chat target; nothing is run."""
    cli.register()
    chosen = ["experiment=smoke", *saved(root / "target"), *TINY, f"out={root}/run", *overrides]
    return pipeline.plan(chat_target(), cli.load_config("pipeline", chosen), RATES)


HYDRA = ("+head@heads.hydra=hydra_heads", "heads.hydra.draft_vocab_size=64")
EAGLE3 = ("+head@heads.eagle3=eagle3", "heads.eagle3.aux=[1]", "heads.eagle3.draft_vocab_size=64")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+tree@trees.grown=dynamic16"],
            "heads.medusa with trees.grown: tree.levels=4: .* needs an autoregressive head",
        ),
        (
            ["trees.chain.depth=9"],
            "heads.medusa with trees.chain: tree.depth=9 but head.num_heads=4",
        ),
        (
            [*HYDRA, "heads.hydra.num_heads=1", "~heads.medusa"],
            "heads.hydra with trees.chain: tree.depth=2 but head.num_heads=1",
        ),
        (
            [*EAGLE3, "heads.eagle3.draft_vocab_size=2"],
            "heads.eagle3 with trees.tree: .* asks for rank 2",
        ),
        (["heads.eagle.draft_vocab_size=300"], "head.draft_vocab_size=300: expected more than"),
        ([*EAGLE3, "heads.eagle3.aux=[2]"], r"head.aux=\[2\] taps \[2\] of a target of 2 layers"),
    ],
)
def test_a_head_that_cannot_draft_a_tree_is_refused_before_any_row_is_made(
    tmp_path, overrides, message
):
    with pytest.raises(ValueError, match=message):
        planned(tmp_path, *overrides)
    assert not (tmp_path / "run").exists()


def test_a_dynamic_tree_is_planned_for_heads_that_draft_step_by_step(tmp_path):
    heads = ("~heads.medusa", *EAGLE3, *HYDRA)
    steps = planned(tmp_path, *heads, "+tree@trees.grown=dynamic16")
    assert [s.name for s in steps][-4:] == [
        "train eagle",
        "train eagle3",
        "train hydra",
        "evaluate",
    ]


def test_tapped_states_count_in_the_estimate_of_capture(tmp_path):
    """7 rows of 6 tokens, 1.6 times for their prompts; a state is 32 numbers of fp32."""
    seconds = {}
    for name, heads in {"none": (), "one": EAGLE3}.items():
        (capture,) = [s for s in planned(tmp_path, *heads) if s.name == "capture features"]
        seconds[name] = capture.estimate
    tokens = 1.6 * 7 * 6
    assert seconds["none"] == pytest.approx(tokens * (1 / 1000 + (128 + 13) / 1e6))
    assert seconds["one"] == pytest.approx(tokens * (1 / 1000 + (2 * 128 + 13) / 1e6))


def test_rates_are_measured_and_leave_nothing_behind(tmp_path):
    rates = pipeline.measure_rates(chat_target(), 2, tmp_path)
    assert rates.keys() == RATES.keys()
    assert all(rate > 0 for rate in rates.values())
    assert list(tmp_path.iterdir()) == []
