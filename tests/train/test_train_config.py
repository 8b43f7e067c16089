"""The training options and the learning-rate schedule."""

import pytest

from headstart.train.config import TrainConfig, rate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": 0.0}, r"train\.lr=0\.0: need more than 0"),
        ({"clip": -1.0}, r"train\.clip=-1\.0: need more than 0"),
        ({"batch_rows": 0}, r"train\.batch_rows=0: need more than 0"),
        ({"accumulation": 0}, r"train\.accumulation=0: need more than 0"),
        ({"log_every": 0}, r"train\.log_every=0: need more than 0"),
        ({"eval_rows": 0}, r"train\.eval_rows=0: need more than 0"),
        ({"eval_new_tokens": 0}, r"train\.eval_new_tokens=0: need more than 0"),
        ({"weight_decay": -0.1}, r"train\.weight_decay=-0\.1: need 0 or more"),
        ({"eval_every": -1}, r"train\.eval_every=-1: need 0 or more"),
        ({"save_every": -1}, r"train\.save_every=-1: need 0 or more"),
        ({"warmup": -0.1}, r"train\.warmup=-0\.1: need 0 or more"),
        ({"warmup": 0.8, "decay": 0.3}, r"train\.warmup=0\.8 and train\.decay=0\.3 add up to more"),
        ({"max_steps": 0}, r"train\.max_steps=0: need more than 0"),
        ({"max_seconds": 0.0}, r"train\.max_seconds=0\.0: need more than 0"),
        ({"max_steps": None}, r"train\.max_steps=null and train\.max_seconds=null: set one"),
        ({"precision": "fp16"}, r"train\.precision=fp16: expected bf16 or fp32"),
        ({"features": "disk"}, r"train\.features=disk: expected captured or online"),
        ({"betas": [0.9]}, r"train\.betas=\[0\.9\]: expected two numbers in \[0, 1\)"),
        ({"betas": [0.9, 1.0]}, r"train\.betas=\[0\.9, 1\.0\]: expected two numbers"),
        ({"lr": float("nan")}, r"train\.lr=nan: need more than 0"),
    ],
)
def test_a_bad_value_is_one_sentence_that_names_field_and_value(options, message):
    with pytest.raises(ValueError, match=message) as raised:
        TrainConfig(**options)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("progress", "share"),
    [
        (0.0, 0.0),
        (0.05, 0.5),
        (0.1, 1.0),
        (0.4, 1.0),
        (0.7, 1.0),
        (0.85, 0.5),
        (0.97, 0.1),
        (1.0, 0.0),
    ],
)
def test_the_rate_rises_stays_and_falls_linearly_to_zero(progress, share):
    config = TrainConfig(lr=2e-3, warmup=0.1, decay=0.3)
    assert rate(progress, config) == pytest.approx(share * 2e-3, abs=1e-12)


def test_without_warmup_and_decay_the_rate_is_constant():
    config = TrainConfig(lr=2e-3, warmup=0.0, decay=0.0)
    assert {rate(progress / 10, config) for progress in range(11)} == {2e-3}


def test_time_alone_may_bound_a_run():
    assert TrainConfig(max_steps=None, max_seconds=3.0).max_seconds == 3.0
