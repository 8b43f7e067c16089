"""Every backend trains as one process does: two gloo processes started by torchrun."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import parallel_job
import pytest
import torch
from parallel_job import FAMILIES, ROWS, STEPS, TEN
from training import CHAT_VOCAB

from headstart.data.batching import Dealing, epoch_steps
from headstart.train.backends import make_parallel
from headstart.train.config import KINDS, ParallelConfig, TrainConfig

TESTS = Path(parallel_job.__file__).parent
ABSENT = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is absent")
BACKENDS = [
    "ddp",
    "fsdp2",
    pytest.param("zero1", marks=[ABSENT, pytest.mark.slow]),
    pytest.param("zero2", marks=[ABSENT, pytest.mark.slow]),
    pytest.param("zero3", marks=ABSENT),
]
SAME = 1e-5
"""Relative, in fp32: sums are taken in another order."""


def start(kind: str, directory: Path, *, processes: int = 2, **more: str) -> subprocess.Popen:
    """Start the job, under torchrun when it takes more than one process."""
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | more
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    launcher = torchrun if processes > 1 else []
    command = [sys.executable, "-m", *launcher, "parallel_job", kind, str(directory)]
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(job: subprocess.Popen) -> str:
    """Wait for a job and return what it said; a job that hangs is a failure, and is killed."""
    try:
        return job.communicate(timeout=300)[0]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)


def finished(job: subprocess.Popen) -> None:
    """Wait for a job that has to succeed."""
    said = ended(job)
    assert job.returncode == 0, said[-4000:]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs write; what the single process trained is there."""
    directory = tmp_path_factory.mktemp("jobs")
    finished(start("single", directory, processes=1))
    return directory


def read(directory: Path, kind: str) -> dict[str, Any]:
    return json.loads((directory / f"{kind}.json").read_text())


@pytest.fixture(scope="module")
def single(directory: Path) -> dict[str, Any]:
    """Return what one process found."""
    return read(directory, "single")


@pytest.fixture(scope="module", params=BACKENDS)
def several(request: pytest.FixtureRequest, directory: Path) -> dict[str, Any]:
    """Return what two processes of a backend found."""
    finished(start(request.param, directory))
    return read(directory, request.param) | {"kind": request.param}


@pytest.mark.parametrize("family", FAMILIES)
def test_p31_two_ranks_have_the_losses_norms_and_counts_of_one(single, several, family):
    assert several["world"] == 2
    have, want = several[family], single[family]
    assert len(set(want["losses"])) >= STEPS - 2
    assert have["losses"] == pytest.approx(want["losses"], rel=SAME)
    assert have["norms"] == pytest.approx(want["norms"], rel=1e-4)
    assert have["counts"] == want["counts"]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_and_moments_of_every_backend_are_those_of_one_process(
    directory, several, family
):
    have, want = (torch.load(directory / f"{kind}.pt") for kind in (several["kind"], "single"))
    for name, value in want[family]["weights"].items():
        torch.testing.assert_close(have[family]["weights"][name], value, rtol=1e-3, atol=1e-5)
    for name, moments in want[family]["moments"].items():
        assert have[family]["moments"][name].keys() == moments.keys()
        assert have[family]["moments"][name]["step"] == moments["step"] == STEPS
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                have[family]["moments"][name][key], moments[key], rtol=1e-3, atol=1e-6
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_one_process_trained_goes_on_under_every_backend(single, several, family):
    assert several[family]["taken up"] == pytest.approx(single[family]["taken up"], rel=SAME)


def test_p31_loss_gradient_and_norm_are_of_the_joined_batch(several):
    assert several["line"] == pytest.approx([1.75, 1.75, 1.75], rel=1e-6)


def test_p31_the_norm_that_is_clipped_is_the_global_one(several):
    assert several["line, clipped"] == pytest.approx([1.75, 1.75, 0.5], rel=1e-4)


def test_p30_a_rank_whose_only_row_is_masked_adds_nothing_to_loss_and_count(several):
    assert several["line, masked"] == pytest.approx([3.0, 3.0, 3.0], rel=1e-6)


def test_p26_ten_micro_batches_by_fours_are_three_steps_with_their_own_counts(single, several):
    assert len(several["ten rows"]) == 3
    assert several["ten rows"] == pytest.approx(single["ten rows"], rel=1e-6)
    windows = epoch_steps([len(row) for row in TEN], Dealing(1, 4), 0)
    tokens = [[token for (row,) in window for token in TEN[row]] for window in windows]
    assert sorted(len(window) for window in windows) == [2, 4, 4]
    assert several["ten rows"] == pytest.approx([sum(t) / len(t) for t in tokens], rel=1e-6)


def test_p28_weights_in_fp32_move_under_bf16_before_and_after_loading(several):
    *moved, dtype = several["line in bf16"]
    assert moved == pytest.approx([0.9, 0.8], abs=1e-5)
    assert dtype == "torch.bfloat16"


def test_p30_ranks_with_rows_of_8_and_2000_tokens_end_in_seconds_and_agree(single, several):
    *losses, seconds = several["uneven"]
    assert losses == pytest.approx(single["uneven"][:2], rel=SAME)
    assert seconds < 30


def test_ranks_draw_different_noise_and_rank_0_the_noise_of_one_process(single, several):
    first, second = several["noise"]
    assert first != second
    assert single["noise"] == [first]


def test_p32_the_targets_read_out_keeps_its_shape(several):
    assert several["target's read-out"] == [CHAT_VOCAB, 32]


def test_p30_every_rank_has_a_step_with_nothing_to_learn_from():
    """The tests above would say less if it were not so."""
    assert len(ROWS) % parallel_job.WINDOW == 1
    assert parallel_job.UNSUPERVISED.supervised == 0


# What would be ignored is refused


def make(kind: str) -> None:
    make_parallel(ParallelConfig(kind), TrainConfig(), torch.device("cpu"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "single"])
def test_a_backend_without_a_launcher_names_the_cure(kind, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(
        RuntimeError, match=rf"parallel={kind}: not started by a launcher .*torchrun"
    ):
        make(kind)


def test_p57_a_single_process_among_several_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"parallel=single in one of 2 processes.*parallel=ddp"):
        make("single")


def test_zero_without_deepspeed_names_the_extra(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("headstart.train.backends.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"parallel=zero2 needs the extra: pip install headstart"):
        make("zero2")


def test_a_kind_that_there_is_not_is_one_sentence():
    with pytest.raises(
        ValueError, match=r"parallel\.kind=fsdp: expected one of single, ddp, fsdp2"
    ):
        ParallelConfig("fsdp")


@pytest.mark.slow
def test_p57_accelerates_own_config_that_would_train_each_rank_alone_is_refused(directory):
    """On CPUs it does, unless told that they are what to use."""
    job = start("from_env", directory)
    said = ended(job)
    assert job.returncode != 0
    assert "2 processes were started, accelerate sees 1; set ACCELERATE_USE_CPU=true" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "environment",
    [
        {"ACCELERATE_USE_CPU": "true"},
        pytest.param(
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
            marks=ABSENT,
        ),
    ],
)
def test_what_accelerate_is_configured_for_trains_as_one_process_does(
    directory, single, environment
):
    finished(start("from_env", directory, **environment))
    have = read(directory, "from_env")
    for family in FAMILIES:
        assert have[family]["losses"] == pytest.approx(single[family]["losses"], rel=SAME)
