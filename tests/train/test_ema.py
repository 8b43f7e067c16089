"""Averages of the weights: their values, where they are used, and that a resumed run has them."""

import json
from pathlib import Path

import pytest
import torch
import train_job
from torch import nn
from training import chat_target

from headstart.heads.checkpoint import load_head
from headstart.train.checkpoint import Checkpoints
from headstart.train.config import TrainConfig
from headstart.train.ema import Ema, decay_at
from headstart.train.run import train


class One(nn.Module):
    """A model of one weight."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(value))


def moved(model: One, value: float) -> One:
    with torch.no_grad():
        model.w.fill_(value)
    return model


@pytest.mark.parametrize(
    ("step", "decay", "right"), [(1, 0.9, 2 / 11), (8, 0.9, 0.5), (80, 0.9, 0.9), (80, 0.95, 0.9)]
)
def test_the_decay_rises_to_the_one_asked_for(step, decay, right):
    assert decay_at(step, decay) == pytest.approx(right, rel=1e-12)


def test_two_steps_give_the_average_worked_out_by_hand():
    model = One(1.0)
    ema = Ema(model, 0.2)  # below the ramp from the second step on: 2/11, then 0.2
    ema.update(moved(model, 12.0), 1)
    with ema.applied(model):
        assert model.w.item() == pytest.approx(1.0 * 2 / 11 + 12.0 * 9 / 11, rel=1e-6)  # 10
    ema.update(moved(model, 20.0), 2)
    with ema.applied(model):
        assert model.w.item() == pytest.approx(10.0 * 0.2 + 20.0 * 0.8, rel=1e-6)


def test_weights_come_back_when_the_averages_are_taken_away():
    model = One(1.0)
    ema = Ema(model, 0.5)
    moved(model, 3.0)
    with ema.applied(model):
        assert model.w.item() == 1.0
    assert model.w.item() == 3.0


def test_a_decay_outside_of_0_to_1_is_refused():
    for decay in (0.0, 1.0, 2.0):
        with pytest.raises(ValueError, match=rf"train\.ema={decay}: expected a decay in \(0, 1\)"):
            TrainConfig(ema=decay)


def job(directory: Path, **options: object) -> dict[str, torch.Tensor]:
    """Train by options and return the head that was saved."""
    run = train_job.job(directory, **options)
    train(chat_target(), run)
    return dict(load_head(Path(run.out) / "head")[0].named_parameters())


def test_the_averages_are_saved_and_the_weights_trained_are_those_without(tmp_path):
    train_job.write_rows(tmp_path)
    plain = job(tmp_path, max_steps=6)
    (tmp_path / "out").rename(tmp_path / "plain")
    averaged = job(tmp_path, max_steps=6, ema=0.9)
    snapshot = Checkpoints(tmp_path / "out" / "checkpoints", 1).read_newest()[1]
    assert all(torch.equal(snapshot.weights[name], value) for name, value in plain.items())
    assert all(torch.equal(snapshot.ema[name], value) for name, value in averaged.items())
    assert not any(torch.equal(averaged[name], value) for name, value in plain.items())


def test_a_resumed_run_has_the_averages_of_one_that_was_not_stopped(tmp_path):
    train_job.write_rows(tmp_path)
    whole = job(tmp_path, max_steps=8, ema=0.9)
    (tmp_path / "out").rename(tmp_path / "whole")
    # Eight steps planned, stopped after the fifth as by Ctrl-C: its schedule is that of eight.
    train_job.stopped(train_job.job(tmp_path, max_steps=8, ema=0.9), 5)
    resumed = job(tmp_path, max_steps=8, ema=0.9)
    assert all(torch.equal(whole[name], value) for name, value in resumed.items())
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if "train/loss" in line]
    assert steps == list(range(1, 9))
