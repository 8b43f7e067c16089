"""Training checkpoints on disk: whole or not there, checked when read, never the last one lost."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.files import read_json, write_json
from headstart.heads.checkpoint import load_head
from headstart.train import checkpoint
from headstart.train.checkpoint import Checkpoints, Snapshot, read_snapshot, write_snapshot
from headstart.train.progress import Progress
from headstart.train.randomness import derive_random, random_state, restore_random

SIZE = 64


def snapshot(step: int, *, best: int | None = None, size: int = SIZE) -> Snapshot:
    """Make a snapshot whose numbers all depend on the step."""
    w = torch.arange(size, dtype=torch.float32).view(2, -1) + step
    moments = {"exp_avg": w / 3, "exp_avg_sq": w / 7, "step": torch.tensor(float(step))}
    progress = Progress(step=step, epoch=step // 8, tokens=100 * step)
    progress.best = None if best is None else {"name": "tau", "value": 1.5, "step": best}
    return Snapshot(
        progress,
        {"fc.weight": w, "fc.bias": torch.full((3,), float(step))},
        {"fc.weight": moments},
        [random_state(torch.Generator().manual_seed(step + rank)) for rank in range(2)],
        identity={"config": {"train": {"lr": 1e-3}}, "device": "cpu"},
    )


def store(directory: Path, *steps: int, keep_last: int = 2, best: int | None = None) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep_last)
    for step in steps:
        checkpoints.save(snapshot(step, best=best))
    return checkpoints


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


# What is written is read


def test_a_snapshot_is_read_back_bit_for_bit(tmp_path):
    want = snapshot(7, best=5)
    want.ema = {"fc.weight": want.weights["fc.weight"] / 9}
    write_snapshot(tmp_path / "step-00000007", want)
    have = read_snapshot(tmp_path / "step-00000007")
    assert have.progress == want.progress
    assert have.identity == want.identity
    assert_same(have.weights, want.weights)
    assert_same(have.ema, want.ema)
    assert_same(have.optimizer["fc.weight"], want.optimizer["fc.weight"])
    for left, right in zip(have.random, want.random, strict=True):
        assert_same(left, right)


def draws(generator: torch.Generator) -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(),
        np.random.standard_normal(),
        torch.rand(()).item(),
        torch.rand((), generator=generator).item(),
    ]


def test_random_generators_go_on_where_they_were(tmp_path):
    generator = torch.Generator().manual_seed(3)
    draws(generator)  # one gauss each is now held back for the next call
    taken = snapshot(1)
    taken.random = [random_state(generator)]
    write_snapshot(tmp_path / "step-00000001", taken)
    want = [draws(generator) for _ in range(3)]
    other = torch.Generator().manual_seed(4)
    restore_random(read_snapshot(tmp_path / "step-00000001").random[0], other)
    assert [draws(other) for _ in range(3)] == want


def test_derived_generators_differ_by_rank_and_step_and_are_the_same_each_time():
    def drawn(seed: int, step: int, rank: int) -> list[float]:
        generator = torch.Generator()
        derive_random(seed, step, rank, generator)
        return draws(generator)

    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]
    assert [drawn(*place) for place in places] == [drawn(*place) for place in places]
    for numbers in zip(*[drawn(*place) for place in places], strict=True):
        assert len(set(numbers)) == 4


# What is torn or foreign is passed over


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def edited(path: Path, change: Callable[[dict], object]) -> None:
    values = read_json(path)
    change(values)
    write_json(path, values)


def resaved(directory: Path, kind: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change tensors and write the manifest anew: what only a look at the tensors can find."""
    path = directory / f"{kind}.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    measure(path)


def measure(path: Path) -> None:
    entry = {path.name: checkpoint._measured(path)}
    edited(path.parent / "manifest.json", lambda manifest: manifest["files"].update(entry))


def pickled(directory: Path) -> None:
    torch.save({"fc.weight": torch.zeros(3)}, directory / "weights.safetensors")
    measure(directory / "weights.safetensors")


def elsewhere(directory: Path) -> None:
    entry = {"../step-00000010/weights.safetensors": {"bytes": 1, "sha256": ""}}
    edited(directory / "manifest.json", lambda manifest: manifest["files"].update(entry))


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda d: (d / "manifest.json").unlink(), r"manifest\.json: no such file"),
    "manifest cut": (lambda d: cut(d / "manifest.json"), r"manifest\.json: not valid JSON"),
    "no weights": (lambda d: (d / "weights.safetensors").unlink(), r"copy the whole directory"),
    "one file more": (lambda d: (d / "more").touch(), r"files .*'more'.*copy the whole directory"),
    "optimizer cut": (
        lambda d: cut(d / "optimizer.safetensors"),
        r"optimizer\.safetensors has \d+ bytes of \d+",
    ),
    "one bit": (lambda d: flip(d / "weights.safetensors"), r"weights\.safetensors is not what was"),
    "state changed": (
        lambda d: edited(d / "state.json", lambda s: s["progress"].update(step=99)),
        r"state\.json is not what was written",
    ),
    "another format": (
        lambda d: edited(d / "manifest.json", lambda m: m.update(format="other")),
        r"format 'other' version 1, expected headstart-training version 1",
    ),
    "a path outside": (elsewhere, "copy the whole directory"),
    "a pickle": (pickled, "not a whole safetensors file"),
    "not finite": (
        lambda d: resaved(d, "weights", lambda t: t["fc.bias"].fill_(float("nan"))),
        "weights: not finite: fc.bias",
    ),
    "moments of another weight": (
        lambda d: resaved(d, "optimizer", lambda t: t.update({"fc.weight/exp_avg": torch.ones(5)})),
        r"optimizer fc.weight/exp_avg has shape \(5,\), the weight \(2, 32\)",
    ),
    "a weight is missing": (
        lambda d: resaved(d, "weights", lambda t: t.pop("fc.weight")),
        "optimizer fc.weight/exp_avg.* the weight is missing",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_p34_a_torn_or_foreign_checkpoint_is_passed_over_by_name(tmp_path, fault):
    checkpoints = store(tmp_path, 10, 20)
    break_it, message = FAULTS[fault]
    break_it(checkpoints.path(20))
    with pytest.warns(UserWarning, match=message) as told:
        path, have = Checkpoints(tmp_path, 2).read_newest()
    assert "step-00000020" in str(told[0].message)
    assert path == checkpoints.path(10)
    assert_same(have.weights, snapshot(10).weights)


def test_what_is_not_finite_is_not_written(tmp_path):
    bad = snapshot(20)
    bad.optimizer["fc.weight"]["exp_avg"][0, 0] = float("inf")
    checkpoints = store(tmp_path, 10)
    with pytest.raises(ValueError, match="step-00000020: optimizer: not finite: fc.weight/exp_avg"):
        checkpoints.save(bad)
    assert checkpoints.steps() == [10]


def test_nothing_there_is_no_checkpoint_and_no_warning(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Checkpoints(tmp_path / "checkpoints", 2).read_newest() is None
    assert Checkpoints(tmp_path / "checkpoints", 2).newest() is None


# Kills


def in_a_process(work: Callable[..., None], *arguments: object) -> multiprocessing.Process:
    """Start a real process that knows all modules already; a kill ends it and nothing else."""
    process = multiprocessing.get_context("fork").Process(target=_alone, args=(work, *arguments))
    process.start()
    return process


def _alone(work: Callable[..., None], *arguments: object) -> None:
    torch.set_num_threads(1)  # a fork has none of the parent's threads, and would wait for them
    work(*arguments)


def killed_between_weights_and_state(directory: Path) -> None:
    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.write_json = kill
    Checkpoints(directory, 2).save(snapshot(20))


def test_p34_a_save_killed_between_weights_and_state_leaves_the_one_before(tmp_path):
    checkpoints = store(tmp_path, 10)
    process = in_a_process(killed_between_weights_and_state, tmp_path)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = tmp_path.glob(".step-00000020.*")
    assert (left / "weights.safetensors").exists()
    # Nobody is offered step 20: it has no name.
    assert checkpoints.steps() == [10]
    path, have = checkpoints.read_newest()
    assert path == checkpoints.newest() == checkpoints.path(10)
    assert_same(have.weights, snapshot(10).weights)
    checkpoints.save(snapshot(20))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_p34_weights_without_state_are_no_head_and_resume_says_why_it_takes_step_10(tmp_path):
    """The same cut as another tool would leave it: under its final name."""
    checkpoints = store(tmp_path, 10, 20)
    for name in ("state.json", "manifest.json"):
        (checkpoints.path(20) / name).unlink()
    with pytest.warns(UserWarning, match=r"step-00000020/manifest\.json: no such file"):
        assert checkpoints.read_newest()[0] == checkpoints.path(10)
    assert checkpoints.newest() == checkpoints.path(10)
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load_head(checkpoints.path(20))


def save_for_ever(directory: Path, first: int, told: Path) -> None:
    """Save step after step, telling of each that is complete."""
    checkpoints = Checkpoints(directory, 2)
    step = first
    while True:
        checkpoints.save(snapshot(step, best=3, size=1 << 18))
        told.write_text(str(step))
        step += 1


def test_p34_ten_kills_at_random_moments_of_a_save_leave_the_last_told_checkpoint(tmp_path):
    moments, told = random.Random(0), tmp_path / "told"
    checkpoints, step, within = Checkpoints(tmp_path / "checkpoints", 2), 1, 0
    for _ in range(10):
        process = in_a_process(save_for_ever, checkpoints.directory, step, told)
        while not told.exists() or int(told.read_text() or 0) < step + 2:
            time.sleep(0.001)
        # A save lies beside until it is complete: wait for one, then for a random moment of it.
        while not list(checkpoints.directory.glob(".step-*")):
            pass
        time.sleep(moments.uniform(0, 0.02))
        process.kill()
        process.join()
        within += bool(list(checkpoints.directory.glob(".step-*")))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _, have = checkpoints.read_newest()
        assert have.progress.step >= int(told.read_text())
        want = snapshot(have.progress.step, size=1 << 18)
        assert_same(have.weights, want.weights)
        assert_same(have.optimizer["fc.weight"], want.optimizer["fc.weight"])
        step = have.progress.step + 1
    assert within >= 5, "hardly a kill met a save: the moments are wrong"


# What is kept


def test_the_last_two_are_kept_and_the_best_one(tmp_path):
    assert store(tmp_path, 1, 2, 3, 4, 5, best=2).steps() == [2, 4, 5]
    assert store(tmp_path / "a", 1, 2, 3, keep_last=1).steps() == [3]
    assert store(tmp_path / "b", 1, 2, 3, keep_last=1, best=3).steps() == [3]


def test_p34_torn_checkpoints_do_not_push_out_the_last_good_one(tmp_path):
    checkpoints = store(tmp_path, 10, 20)
    for step in (30, 40):
        shutil.copytree(checkpoints.path(20), checkpoints.path(step))
    cut(checkpoints.path(30) / "weights.safetensors")
    flip(checkpoints.path(40) / "weights.safetensors")  # of full size
    again = Checkpoints(tmp_path, 2)
    with pytest.warns(UserWarning, match="passed over"):
        assert again.read_newest()[0] == checkpoints.path(20)
    assert again.steps() == [10, 20, 30, 40]  # nothing is removed before something is saved
    again.save(snapshot(21))
    assert again.steps() == [20, 21]


def test_p34_a_save_that_fails_removes_nothing(tmp_path, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoints = store(tmp_path, 1, 2)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(snapshot(3))
    assert checkpoints.steps() == [1, 2]
    assert not list(tmp_path.glob(".step-*"))


def test_a_step_that_is_saved_again_replaces_what_was_there(tmp_path):
    checkpoints = store(tmp_path, 10, 20)
    cut(checkpoints.path(20) / "random.safetensors")
    Checkpoints(tmp_path, 2).save(snapshot(20))
    assert checkpoints.read_newest()[0] == checkpoints.path(20)


def test_other_names_are_left_alone(tmp_path):
    (tmp_path / "step-one").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    store(tmp_path, 1, 2, 3, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "step-00000003", "step-one"]


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 9))
    with pytest.raises(ValueError, match="a training checkpoint needs .* GB free"):
        store(tmp_path, 1)
    assert not list(tmp_path.iterdir())


def test_the_manifest_measures_every_other_file(tmp_path):
    path = store(tmp_path, 5).path(5)
    files = json.loads((path / "manifest.json").read_text())["files"]
    assert {p.name for p in path.iterdir()} == {*files, "manifest.json"}
