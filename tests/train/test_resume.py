"""A run killed and taken up again is the run; what would make it another one is refused."""

import copy
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import train_job
from safetensors.torch import load_file
from train_job import ROWS, Nursery, job, run, write_rows
from training import chat_target, random_rows

from headstart.data.batching import Dealing, steps_forever
from headstart.files import read_json
from headstart.heads.base import families
from headstart.heads.checkpoint import load_head
from headstart.pipeline import Step, run_step
from headstart.train.changes import changes, refuse_another_run
from headstart.train.checkpoint import looks_whole
from headstart.train.resume import cut_lines, refuse_misfit
from headstart.train.run import train

TESTS = Path(train_job.__file__).parent
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
TIMED = re.compile("seconds|_per_s$|^time/|^memory/")
FILES = ("weights.safetensors", "optimizer.safetensors", "random.safetensors")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Train here as the other processes do: sums are the same to the bit on as many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory) -> Iterator[Nursery]:
    started = Nursery(tmp_path_factory.mktemp("nursery") / "log.txt")
    yield started
    started.close()


def torchrun(directory: Path, **options: object) -> int:
    """Run two ranks by torchrun, and return its exit code."""
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "train_job"]
    command = [sys.executable, "-m", *launcher, str(directory), json.dumps(options)]
    return subprocess.run(command, env=environment).returncode


@pytest.fixture
def place(tmp_path) -> Path:
    write_rows(tmp_path)
    return tmp_path


def another(place: Path, name: str) -> Path:
    """Return a directory with the same rows and features, for another run on them."""
    shutil.copytree(place, place / name, ignore=shutil.ignore_patterns("out", name))
    return place / name


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (directory / "out/checkpoints").glob("step-*"))


def checkpoint(directory: Path, step: int) -> Path:
    return directory / "out/checkpoints" / f"step-{step:08d}"


def lines(directory: Path) -> list[dict[str, Any]]:
    """Return all that metrics.jsonl says but for the time and the memory it took."""
    texts = (directory / "out/metrics.jsonl").read_text().splitlines()
    return [{n: v for n, v in json.loads(text).items() if not TIMED.search(n)} for text in texts]


def assert_same_run(have: Path, want: Path, step: int = 20) -> None:
    averages = ["ema.safetensors"] if (checkpoint(want, step) / "ema.safetensors").exists() else []
    for name in [*FILES, *averages]:
        left, right = (load_file(checkpoint(place, step) / name) for place in (have, want))
        assert left.keys() == right.keys()
        for key in left:
            assert torch.equal(left[key], right[key]), f"{name}: {key}"
    for name in ("head", "best") if (want / "out/best").exists() else ("head",):
        left, right = (place / "out" / name / "model.safetensors" for place in (have, want))
        assert left.read_bytes() == right.read_bytes(), name
    assert lines(have) == lines(want)
    states = [read_json(checkpoint(place, step) / "state.json") for place in (have, want)]
    for state in states:
        del state["progress"]["seconds"], state["progress"]["by_stage"]
    assert states[0]["progress"] == states[1]["progress"]


# The run is the run


CASES = {
    "amid an epoch, with noise": {"head": "eagle", "save_every": 10, "eval_every": 5},
    "at an epoch's end": {"head": "medusa", "save_every": 8, "eval_every": 8},
    "packed rows": {"head": "eagle", "save_every": 10, "pack_tokens": 32},
    "averages, the best by tau": {
        "head": "eagle",
        "save_every": 10,
        "eval_every": 5,
        "ema": 0.9,
        "eval_prompts": 1,
        "eval_new_tokens": 8,
        "best_metric": "tau",
    },
    "muon": {"head": "eagle", "save_every": 10, "optimizer": "muon"},
    "an unrolled head": {"head": "eagle3", "save_every": 10, "batch_rows": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_p33_twenty_steps_are_ten_and_a_kill_and_ten_bit_for_bit(place, case, nursery):
    run(place, **CASES[case])
    killed = another(place, "killed")
    nursery.start(killed, die_in_step=14, **CASES[case])
    assert nursery.wait() == [-signal.SIGKILL]
    last = CASES[case]["save_every"]
    assert checkpoints(killed) == [last]
    assert lines(killed)[-1]["step"] == 13  # three steps or more that nobody saved
    run(killed, **CASES[case])
    assert_same_run(killed, place)
    best = read_json(checkpoint(killed, 20) / "state.json")["progress"]["best"]
    assert (best is not None) == ("eval_every" in CASES[case])


def test_p33_a_kill_between_a_save_and_its_evaluation_loses_neither(place, nursery):
    options = {"head": "medusa", "save_every": 5, "eval_every": 5, "max_steps": 10}
    run(place, **options)
    killed = another(place, "killed")
    nursery.start(killed, die_in_evaluation=1, **options)
    assert nursery.wait() == [-signal.SIGKILL]
    assert checkpoints(killed) == [5]
    assert not any("heldout/loss" in line for line in lines(killed))
    run(killed, **options)
    assert_same_run(killed, place, step=10)
    assert [line["step"] for line in lines(killed) if "heldout/loss" in line] == [5, 10, 10]


@pytest.mark.parametrize("launcher", ["forks", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_p33_two_processes_are_killed_and_taken_up_bit_for_bit(place, launcher, nursery):
    def ended(directory: Path, **more: object) -> bool:
        if launcher == "torchrun":
            return torchrun(directory, **options | more) == 0
        nursery.start(directory, ranks=2, **options | more)
        return nursery.wait() == [0, 0]

    options = {"head": "eagle", "kind": "ddp", "save_every": 10, "pack_tokens": 32, "batch_rows": 1}
    assert ended(place)
    killed = another(place, "killed")
    assert not ended(killed, die_in_step=14)
    assert checkpoints(killed) == [10]
    assert ended(killed)
    assert_same_run(killed, place)
    assert len({name.split("/")[0] for name in load_file(checkpoint(place, 20) / FILES[2])}) == 2


@pytest.mark.parametrize(
    "kind",
    [
        "ddp",
        "fsdp2",
        pytest.param("zero2", marks=[pytest.mark.slow, NEEDS_DEEPSPEED]),
        pytest.param("zero3", marks=[pytest.mark.slow, NEEDS_DEEPSPEED]),
    ],
)
def test_p33_another_number_of_processes_goes_on_with_the_same_rows_a_step_and_says_so(
    place, kind, nursery
):
    alone = {"head": "medusa", "save_every": 10}
    run(place, **alone)
    moved = another(place, "moved")
    shutil.copytree(place / "out", moved / "out")
    shutil.rmtree(checkpoint(moved, 20))
    (moved / "out/summary.json").unlink(missing_ok=True)
    before = len(nursery.log.read_text())
    nursery.start(moved, ranks=2, kind=kind, **alone | {"accumulation": 1})
    assert nursery.wait() == [0, 0]
    said = nursery.log.read_text()[before:]
    assert "processes was 1 and is 2" in said
    assert "each rank's random state starts anew" in said
    have, want = (load_file(checkpoint(at, 20) / FILES[0]) for at in (moved, place))
    for name in want:  # the same rows, the same order of steps, sums in another order
        torch.testing.assert_close(have[name], want[name], rtol=1e-4, atol=1e-6)
    assert [line["step"] for line in lines(moved)] == [line["step"] for line in lines(place)]


def test_the_rows_of_a_step_must_stay_as_many_whatever_the_processes(place):
    run(place, head="medusa", max_steps=2)
    old = read_json(checkpoint(place, 2) / "state.json")["identity"]
    new = copy.deepcopy(old)
    new["processes"] = 2
    with pytest.raises(ValueError, match="a step had 4 rows and has 8, use train.accumulation=1"):
        refuse_another_run(place, old, new)
    new["processes"] = 4
    with pytest.raises(
        ValueError, match="had 4 rows and has 16, use train.batch_rows=1 train.accumulation=1"
    ):
        refuse_another_run(place, old, new)
    new["processes"] = 3
    with pytest.raises(ValueError, match="use a number of processes that divides 4"):
        refuse_another_run(place, old, new)
    new["processes"], new["config"]["train"]["accumulation"] = 2, 1
    assert {c.name for c in refuse_another_run(place, old, new)} == {
        "processes",
        "train.accumulation",
    }


@pytest.mark.parametrize("pack", [None, 40])
def test_the_steps_go_on_where_they_stood_without_dealing_out_what_went_before(pack):
    lengths = [len(row.token_ids) for row in random_rows(30)]
    dealing = Dealing(2, 2, seed=3, pack_tokens=pack)
    whole = list(islice(steps_forever(lengths, dealing), 25))
    done = {}
    for number, (epoch, _) in enumerate(whole[:-1]):
        done[epoch] = done.get(epoch, 0) + 1
        going_on = steps_forever(lengths, dealing, epoch, done[epoch])
        assert next(going_on) == whole[number + 1]


# What has changed is told, or refused


def test_what_says_only_how_a_run_runs_may_change_and_is_told(place, caplog):
    run(place, head="medusa", save_every=5, max_steps=5)
    with caplog.at_level(logging.INFO):
        progress = run(place, head="medusa", save_every=3, max_steps=8, eval_rows=2, workers=0)
    assert progress.step == 8
    told = [r.message for r in caplog.records if "going on with a change" in r.message]
    assert told == [
        "going on with a change: train.eval_rows was 64 and is 2",
        "going on with a change: train.max_steps was 5 and is 8",
        "going on with a change: train.save_every was 5 and is 3",
        "going on with a change: train.workers was 1 and is 0",
    ]
    assert "train.max_steps: the learning rate schedule is stretched from here on" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 3e-4}, "train.lr was 0.001 and is 0.0003"),
        ({"warmup": 0.1}, "train.warmup was 0.05 and is 0.1"),
        ({"seed": 1}, "train.seed was 0 and is 1"),
        ({"batch_rows": 4}, "train.batch_rows was 2 and is 4.* use train.accumulation=1"),
        ({"accumulation": 1}, "train.accumulation was 2 and is 1.* use train.accumulation=2"),
        ({"precision": "bf16"}, "train.precision was fp32 and is bf16"),
        ({"pack_tokens": 64}, "train.pack_tokens was None and is 64"),
        ({"max_steps": 3}, "train.max_steps was 4 and is 3"),
        ({"lr": 3e-4, "seed": 1}, "train.lr was .*, train.seed was .*; set back what changed"),
        ({"head": "eagle"}, "family was medusa and is eagle"),
    ],
)
def test_p33_what_would_make_it_another_run_is_refused_by_name(place, options, message):
    run(place, head="medusa", max_steps=4)
    before = (place / "out/metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=message):
        run(place, **{"head": "medusa", "max_steps": 4} | options)
    assert (place / "out/metrics.jsonl").read_bytes() == before


def test_p33_other_rows_another_target_and_another_width_are_refused(place):
    config = job(place, head="medusa", max_steps=2)
    train(chat_target(), config)
    config.train.max_steps = 4
    config.rows, config.features = config.heldout_rows, f"{config.heldout_rows}-features"
    with pytest.raises(ValueError, match="data.rows_hash was .* and is"):
        train(chat_target(), config)
    config = job(place, head="medusa", max_steps=4)
    config.features = str(place / "three")
    with (
        pytest.warns(UserWarning, match="not this target's own"),
        pytest.raises(ValueError, match="data.target_fingerprint was .* and is"),
    ):
        train(chat_target(3), config)
    config = job(place, head="medusa", max_steps=4)
    config.head = families()["medusa"][0](draft_vocab_size=32)
    with pytest.raises(ValueError, match="head.draft_vocab_size was 64 and is 32"):
        train(chat_target(), config)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"weight": torch.zeros(2, 8), "bias": torch.zeros(2)}, r"holds \(2, 8\) for weight, this"),
        ({"weight": torch.zeros(2, 4)}, r"holds nothing for bias, this head \(2,\)"),
        (
            {"weight": torch.zeros(2, 4), "bias": torch.zeros(2), "more": torch.zeros(1)},
            r"holds \(1,\) for more, this head nothing",
        ),
    ],
)
def test_p33_weights_of_another_width_or_head_are_refused_by_name(weights, message):
    with pytest.raises(ValueError, match=message):
        refuse_misfit(Path("step-00000010"), weights, torch.nn.Linear(4, 2))


def test_options_that_only_one_version_knows_are_no_change():
    old = {"config": {"train": {"lr": 1.0, "gone": 1}}, "versions": {"headstart": "0"}}
    new = {"config": {"train": {"lr": 1.0, "new": 2}}, "versions": {"headstart": "1"}}
    assert [str(c) for c in changes(old, new)] == ["versions.headstart was 0 and is 1"]


# Where a run starts


def test_a_finished_run_says_so_and_returns_at_once(place, caplog):
    first = run(place, head="medusa", max_steps=4)
    before = {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*")}
    with caplog.at_level(logging.INFO):
        start = time.perf_counter()
        again = run(place, head="medusa", max_steps=4)
    assert "finished already at step 4" in caplog.text
    assert time.perf_counter() - start < 1
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*")} == before


def test_never_refuses_a_directory_that_holds_a_run(place):
    run(place, head="medusa", max_steps=2)
    with pytest.raises(ValueError, match="holds training checkpoints already; .*resume=auto"):
        run(place, head="medusa", max_steps=2, resume="never")


def test_auto_starts_where_nothing_is_and_refuses_a_head_without_a_checkpoint(place):
    run(place, head="medusa", max_steps=2)
    shutil.rmtree(place / "out/checkpoints")
    with pytest.raises(ValueError, match="holds a head already; choose another directory"):
        run(place, head="medusa", max_steps=2)


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "manifest.json"])
def test_p34_a_torn_newest_checkpoint_is_passed_over_and_the_run_is_the_run(place, name):
    options = {"head": "eagle", "save_every": 10}
    run(place, **options)
    torn = another(place, "torn")
    shutil.copytree(place / "out", torn / "out")
    os.truncate(checkpoint(torn, 20) / name, 100)
    with pytest.warns(UserWarning, match=f"step-00000020.*{name}"):
        run(torn, **options)
    assert_same_run(torn, place)
    assert checkpoints(torn) == [10, 20]


def test_a_changed_state_of_full_size_does_not_pass_for_a_finished_run(place):
    options = {"head": "medusa", "save_every": 2, "max_steps": 4}
    run(place, **options)
    state = checkpoint(place, 4) / "state.json"
    state.write_text(state.read_text().replace('"step": 4', '"step": 5'))
    with pytest.warns(UserWarning, match="state.json is not what was written"):
        assert run(place, **options).step == 4
    assert looks_whole(checkpoint(place, 4))


def test_a_directory_of_torn_checkpoints_only_is_refused(place):
    run(place, head="medusa", max_steps=2)
    (checkpoint(place, 2) / "random.safetensors").unlink()
    with (
        pytest.warns(UserWarning, match="passed over"),
        pytest.raises(ValueError, match="none of its training checkpoints can be read"),
    ):
        run(place, head="medusa", max_steps=4)


def test_a_named_checkpoint_is_continued_in_another_out_with_the_lines_before_it(place):
    options = {"head": "eagle", "save_every": 10}
    run(place, **options)
    branch = another(place, "branch")
    run(branch, resume=str(checkpoint(place, 10)), **options)
    assert_same_run(branch, place)


def test_going_back_over_a_later_checkpoint_is_refused(place):
    run(place, head="medusa", save_every=2, max_steps=4)
    with pytest.raises(ValueError, match="step-00000004 is later; remove it to go back"):
        run(place, head="medusa", save_every=2, max_steps=4, resume=str(checkpoint(place, 2)))


def test_a_named_checkpoint_that_is_not_there_is_an_error(place):
    with pytest.raises(FileNotFoundError, match="nowhere: no such training checkpoint; use auto"):
        run(place, head="medusa", resume=str(place / "nowhere"))


# What is left behind


def test_p61_no_step_stands_twice_in_the_metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    train_line, heldout = '{"step": %d, "train/loss": 1}\n', '{"step": %d, "heldout/loss": 1}\n'
    text = train_line % 9 + train_line % 10 + heldout % 10 + train_line % 11 + '{"step": 12, "tr'
    path.write_text(text)
    cut_lines(path, 10, heldout=False)
    assert path.read_text() == train_line % 9 + train_line % 10 + heldout % 10
    path.write_text(text)
    cut_lines(path, 10, heldout=True)  # the save came first: the evaluation is made again
    assert path.read_text() == train_line % 9 + train_line % 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_head_and_a_checkpoint_that_the_run_goes_on_from(place, number, nursery):
    options = {"head": "eagle", "save_every": 20, "workers": 0}
    run(place, **options)
    stopped = another(place, "stopped")
    (process,) = nursery.start(stopped, slow=0.1, **options)
    metrics = stopped / "out/metrics.jsonl"
    late = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert time.monotonic() < late, nursery.log.read_text()
        time.sleep(0.02)
    os.kill(process, number)
    assert nursery.wait() != [0]
    (step,) = checkpoints(stopped)
    assert 3 <= step < 20
    assert load_head(stopped / "out/head")[1].step == step
    run(stopped, **options)
    assert_same_run(stopped, place)


def test_a_pipeline_that_goes_on_leaves_an_interrupted_training_in_its_place(tmp_path):
    seen = []
    (tmp_path / "eagle/checkpoints").mkdir(parents=True)

    def step(*, goes_on: bool) -> Step:
        there = tmp_path / "eagle"
        work = lambda: seen.append((there / "checkpoints").exists())  # noqa: E731
        return Step("train eagle", there, {}, 1.0, work, goes_on)

    run_step(step(goes_on=True))
    (tmp_path / "eagle/finished.json").unlink()
    run_step(step(goes_on=False))
    assert seen == [True, False]


def test_every_epoch_has_eight_steps():
    """What the cases above take for granted."""
    lengths = [len(row.token_ids) for row in random_rows(ROWS)]
    epochs = [epoch for epoch, _ in islice(steps_forever(lengths, Dealing(2, 2)), 20)]
    assert epochs == [0] * 8 + [1] * 8 + [2] * 4
