"""How the ranks of a job end together: by a failure, by a kill, by Ctrl-C, by SIGTERM."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from launching import TORCHRUN, finish, lines, prepare, start, wait_until

from headstart import cli
from headstart.eval import report_run
from headstart.heads.checkpoint import load_head

LONG = ["parallel=ddp", "launch.num_processes=2", "train.max_steps=1000000", "train.save_every=0"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("ends")


@pytest.fixture(scope="module")
def training(root) -> list[str]:
    return prepare(root)


def running(root: Path, training: list[str], out: str, **options: str) -> subprocess.Popen:
    """Start a training on two ranks that would go on for ever, and wait until it steps."""
    process = start(root, [*training, *LONG, f"out={out}"], **options)
    wait_until(lambda: lines(root / out / "metrics.jsonl") >= 2, process)
    return process


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the ranks that a command has started, rank 0 first."""
    children = psutil.Process(process.pid).children(recursive=True)
    found = [c for c in children if "RANK" in c.environ()]
    return sorted(found, key=lambda child: child.environ()["RANK"])


def assert_one_checkpoint(root: Path, out: str) -> int:
    """Return the step of the one checkpoint, which the head is of, too: ranks stopped as one."""
    (checkpoint,) = (root / out / "checkpoints").glob("step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    assert load_head(root / out / "head")[1].step == step
    return step


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_ctrl_c_and_sigterm_reach_all_ranks_which_save_the_same_step_and_end(
    root, training, number, status
):
    out = f"out-{status}"
    process = running(root, training, out)
    process.send_signal(number)
    said = finish(process, status)
    step = assert_one_checkpoint(root, out)
    assert f"{number.name}: stopping after this step, then saving" in said
    assert f"interrupted at step {step}: saving" in (root / out / "cli.log").read_text()
    assert "Traceback" not in said


@pytest.mark.slow
def test_sigterm_to_one_rank_ends_all_after_the_same_step(root, training):
    process = running(root, training, "one")
    ranks_of(process)[1].terminate()
    finish(process, 143)
    assert_one_checkpoint(root, "one")


@pytest.mark.slow
def test_sigterm_to_every_process_at_once_saves_too(root, training):
    """Slurm signals all processes of a step, so that ranks get the signal twice."""
    process = running(root, training, "all")
    for one in [*ranks_of(process), process]:
        one.send_signal(signal.SIGTERM)
    finish(process, 143)
    assert_one_checkpoint(root, "all")


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once_whatever_the_ranks_wait_for(root, training):
    hang = {"BREAK": "import time; print('hanging', flush=True); time.sleep(1e6)"}
    process = start(root, [*training, *LONG, "out=hang"], BREAK_RANKS="1", **hang)
    wait_until(lambda: lines(root / "hang/metrics.jsonl") >= 1, process)
    ranks = ranks_of(process)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None, "the ranks cannot stop: one hangs"
    begun = time.monotonic()
    process.send_signal(signal.SIGINT)
    finish(process, 130)
    assert time.monotonic() - begun < 5
    assert not [rank for rank in ranks if rank.is_running() and rank.status() != "zombie"]


def test_the_first_rank_to_fail_ends_the_job_with_its_traceback_shown_once(root, training):
    process = start(
        root,
        [*training, *LONG, "out=fails"],
        BREAK="raise ValueError('rank 1 cannot go on')",
        BREAK_RANKS="1",
    )
    said = finish(process, 1)
    told = (root / "fails/cli.log").read_text()
    for text in (said, told):
        assert text.count("Traceback (most recent call last)") == 1
        assert text.count("ValueError: rank 1 cannot go on\n") >= 1
        assert "rank 1 failed:" in text
        assert "train_head" in text  # where it was
    assert said.rstrip().endswith("error: rank 1: ValueError: rank 1 cannot go on")


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_job_and_is_named(root, training):
    process = running(root, training, "killed")
    ranks_of(process)[1].kill()
    said = finish(process, 1)
    assert "error: rank 1 ended by signal SIGKILL, exit status -9; was memory short?" in said


@pytest.mark.slow
def test_a_rank_that_hangs_is_waited_for_as_long_as_the_options_say(root, training):
    hang = {"BREAK": "import time; time.sleep(1e6)", "BREAK_RANKS": "1"}
    process = start(root, [*training, *LONG, "launch.timeout_seconds=5", "out=late"], **hang)
    said = finish(process, 1)
    assert "rank 0 failed:" in said
    assert "Timed out" in said or "timed out" in said


@pytest.mark.slow
def test_ranks_of_a_torchrun_of_the_user_stop_as_one_and_save(root, training):
    own = [*training, "parallel=ddp", "train.max_steps=1000000", "out=theirs"]
    process = start(root, own, module=(*TORCHRUN, "headstart"))
    wait_until(lambda: lines(root / "theirs/metrics.jsonl") >= 2, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode != 0  # torchrun's own
    assert_one_checkpoint(root, "theirs")


@pytest.mark.slow
def test_a_rank_that_fails_under_a_torchrun_of_the_user_leaves_it_the_traceback(root, training):
    own = [*training, "parallel=ddp", "out=theirs-fail"]
    broken = {"BREAK": "raise ValueError('rank 1 cannot go on')", "BREAK_RANKS": "1"}
    process = start(root, own, module=(*TORCHRUN, "headstart"), **broken)
    said = finish(process, 1)
    assert "ValueError: rank 1 cannot go on" in said
    assert "ValueError: rank 1 cannot go on" in (root / "theirs-fail/cli.log").read_text()


@pytest.mark.slow
def test_ctrl_c_in_a_single_process_saves_after_the_step(root, training):
    process = start(root, [*training, "train.max_steps=1000000", "out=alone"])
    wait_until(lambda: lines(root / "alone/metrics.jsonl") >= 2, process)
    process.send_signal(signal.SIGINT)
    said = finish(process, 130)
    step = assert_one_checkpoint(root, "alone")
    assert f"interrupted at step {step}: saving" in said


def test_any_command_leaves_the_process_group_that_it_made(tmp_path, monkeypatch):
    """A rank that outlives the others' connections may abort at its exit, and the job with it."""

    def grouped(config: object) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report_run, "run", grouped)
    monkeypatch.setattr(sys, "argv", ["headstart", "results=[any]", "out=there"])
    cli.run_command("report")
    assert not dist.is_initialized()
