"""The weak-scaling bench: what its figures mean, and one small run of every arm."""

import pytest

from headstart.train.scaling_bench import ARMS, Figures, Run, main, measure, meet, summary

SMALL = Run(steps=2, warmup=1, tokens=128, width=128, vocab=256, precision="fp32")


def test_efficiency_is_the_median_over_repeats_of_speeds_over_those_of_one_process():
    speeds = {"one": [100.0, 50.0, 200.0], "ddp": [180.0, 60.0, 400.0], "apart": [200.0] * 3}
    found = Figures(speeds, processes=2)
    assert found.efficiency("ddp") == pytest.approx(0.9)


def test_a_summary_names_every_arm_with_its_median_and_its_efficiency():
    found = Figures({"one": [100.0], "ddp": [150.0], "apart": [190.0]}, processes=2)
    lines = summary(found, Run())
    assert lines[1].split() == ["one", "process", "100"]
    assert lines[2].split()[-3:] == ["150,", "efficiency", "0.750"]
    assert lines[3].split()[-3:] == ["190,", "efficiency", "0.950"]


@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_runs(arm):
    assert measure(arm, SMALL) > 0


def test_a_process_that_nobody_joins_gives_up(tmp_path, monkeypatch):
    monkeypatch.setattr("headstart.train.scaling_bench.WAIT_SECONDS", 0.1)
    with pytest.raises(RuntimeError, match=r"fewer than 2 processes were ready in 0.1 s"):
        meet(tmp_path, 0, 2)


def test_a_process_that_fails_ends_the_bench():
    with pytest.raises(RuntimeError, match="a process of the bench ended with 1"):
        main(["--repeats", "1", "--tokens", "128", "--width", "100"])
