"""The best checkpoint: by tau of the real verifier, the earlier of two alike."""

import json
import math
from pathlib import Path

import pytest
import train_job
from training import chat_target

from headstart.heads.checkpoint import load_head
from headstart.train.best import new_best
from headstart.train.config import TrainConfig
from headstart.train.run import train

TAU, LOSS = "heldout/tau_with_bonus_micro", "heldout/loss"


def best_of(values: list[float], metric: str = "tau", name: str = TAU) -> dict | None:
    best = None
    for step, value in enumerate(values, start=1):
        best = new_best(best, {name: value}, metric, step)
    return best


def test_the_best_is_the_highest_tau():
    assert best_of([1.5, 2.5, 2.0]) == {"name": TAU, "value": 2.5, "step": 2}


def test_of_two_alike_the_earlier_is_the_best():
    assert best_of([1.5, 2.5, 2.5])["step"] == 2


def test_the_best_by_loss_is_the_lowest():
    assert best_of([3.0, 1.0, 2.0], "loss", LOSS)["step"] == 2


def test_what_was_not_measured_or_is_no_number_is_never_the_best():
    assert best_of([1.0], name="heldout/other") is None
    assert best_of([math.nan, 1.0, math.nan])["step"] == 2


def test_an_unknown_metric_is_refused():
    with pytest.raises(ValueError, match=r"train\.best_metric=acc: expected one of tau, tau_pr"):
        TrainConfig(best_metric="acc")


@pytest.mark.parametrize("taus", [[1.2, 1.9, 1.4], [1.9, 1.9, 1.1], [1.1, 1.2, 1.9]])
def test_a_run_leaves_the_head_of_its_best_evaluation_beside_the_last(tmp_path, taus, monkeypatch):
    given = iter(taus)
    monkeypatch.setattr("headstart.train.evaluation.quick_tau", lambda *_, **__: next(given))
    train_job.write_rows(tmp_path)
    run = train_job.job(
        tmp_path, max_steps=6, eval_every=2, save_every=2, eval_prompts=2, best_metric="tau"
    )
    run.train.max_steps = 5  # evaluated after steps 2, 4 and, as the last, 5
    progress = train(chat_target(), run)
    step = [2, 4, 5][taus.index(max(taus))]
    assert progress.best == {"name": TAU, "value": max(taus), "step": step}
    assert load_head(Path(run.out) / "best")[1].step == step
    assert load_head(Path(run.out) / "head")[1].step == 5
    assert (
        json.loads((Path(run.out) / "summary.json").read_text())["progress"]["best"]
        == progress.best
    )


def test_without_held_out_rows_there_is_no_best(tmp_path):
    train_job.write_rows(tmp_path)
    run = train_job.job(tmp_path, max_steps=2)
    run.heldout_rows = None
    assert train(chat_target(), run).best is None
    assert not (Path(run.out) / "best").exists()
