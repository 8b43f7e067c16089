"""What a run tells of itself: speed, time by stage, memory, alpha, alone and over two ranks."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import meter_job
import pytest
import torch
from meter_job import ROWS
from models import make_head, some_vocab
from parallel_job import new_head
from training import chat_target

from headstart.data.features import OnlineFeatures
from headstart.heads.base import DraftHead
from headstart.train.backends import make_parallel
from headstart.train.clock import STAGES, StageClock
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.flops import StepFlops
from headstart.train.heldout import heldout_figures
from headstart.train.meters import Meter, metric_figures, peak_memory, teacher_forced, time_shares
from headstart.train.parallel import Parallel
from headstart.train.progress import Progress

TESTS = Path(meter_job.__file__).parent
CPU = torch.device("cpu")


def progress(tokens: int, seconds: float, **by_stage: float) -> Progress:
    stages = dict.fromkeys(STAGES, 0.0) | by_stage
    return Progress(
        step=1, tokens=tokens, supervised_tokens=tokens // 4, seconds=seconds, by_stage=stages
    )


# Speed


def test_speeds_are_those_since_the_last_line_and_of_the_whole_run():
    meter = Meter()
    first = meter.figures(progress(1000, 10.0))
    assert first["train/tokens_per_s"] == first["train/run_tokens_per_s"] == 100.0
    second = meter.figures(progress(4000, 20.0))
    assert second["train/tokens_per_s"] == 300.0
    assert second["train/supervised_per_s"] == 75.0
    assert second["train/run_tokens_per_s"] == 200.0
    assert second["train/run_supervised_per_s"] == 50.0


def test_a_resumed_run_counts_what_was_done_before_in_the_run_and_not_since():
    meter = Meter()
    meter.start(progress(1000, 10.0))
    figures = meter.figures(progress(2000, 12.0))
    assert figures["train/tokens_per_s"] == 500.0
    assert figures["train/run_tokens_per_s"] == pytest.approx(2000 / 12)


def test_the_use_made_of_a_device_is_flops_over_seconds_over_its_peak():
    meter = Meter(StepFlops(per_token=3.0, per_supervised=8.0), peak=1000.0)
    figures = meter.figures(progress(400, 10.0))
    assert figures["train/mfu"] == pytest.approx((3.0 * 400 + 8.0 * 100) / 10.0 / 1000.0)
    assert meter.mfu_text(progress(400, 10.0)) == "20.0%"


def test_where_the_peak_is_not_known_nothing_is_made_up():
    meter = Meter(StepFlops(3.0, 8.0))
    assert "train/mfu" not in meter.figures(progress(400, 10.0))
    assert meter.mfu_text(progress(400, 10.0)) == "-"


def test_shares_of_time_are_of_the_seconds_since_the_last_line():
    meter = Meter()
    meter.figures(progress(100, 10.0, target=5.0, head=5.0))
    figures = meter.figures(progress(200, 20.0, target=5.0, head=13.0, optimizer=1.0, data=1.0))
    assert [figures[f"time/{stage}"] for stage in STAGES] == [0.1, 0.0, 0.8, 0.1, 0.0]
    shares = time_shares(progress(200, 20.0, target=5.0, head=13.0, optimizer=1.0, data=1.0))
    assert shares == "data 5.0%, target 25.0%, head 65.0%, optimizer 5.0%, other 0.0%"


# Time by stage


def test_a_second_belongs_to_the_stage_opened_last():
    """Sleeps are longer than asked for on a busy machine, never shorter."""
    start = time.perf_counter()
    clock = StageClock(CPU)
    with clock("data"):
        time.sleep(0.02)
        with clock("target"):
            time.sleep(0.2)
        time.sleep(0.01)
    time.sleep(0.03)
    seconds = clock.read()
    whole = time.perf_counter() - start
    assert seconds["target"] >= 0.2
    assert seconds["data"] >= 0.03
    assert seconds["other"] >= 0.03
    assert whole - 0.05 < sum(seconds.values()) <= whole
    assert clock.read()["target"] == 0.0


def test_a_stage_that_raises_is_closed():
    clock = StageClock(CPU)
    with pytest.raises(RuntimeError, match="stop"), clock("head"):
        raise RuntimeError("stop")
    clock.read()
    time.sleep(0.02)
    assert set(clock.read()) == {"other"}


def test_the_passes_of_an_online_target_are_a_stage_of_their_own():
    source, clock = OnlineFeatures(chat_target(), ROWS), StageClock(CPU)
    source.stage = clock
    with clock("data"):
        source.batch([0, 1])
    seconds = clock.read()
    assert seconds["target"] > seconds["data"] > 0


def test_evaluation_and_saving_are_no_part_of_training():
    told = progress(0, 0.0)
    told.count(0, [], {"data": 1.0, "head": 2.0, "evaluate": 50.0, "save": 7.0}, single())
    assert told.seconds == 3.0
    assert told.by_stage == dict.fromkeys(STAGES, 0.0) | {"data": 1.0, "head": 2.0}


# Alpha and tau, predicted


def single() -> Parallel:
    return make_parallel(ParallelConfig(), TrainConfig(precision="fp32"), CPU)


def head_of(family: str, **options: object) -> DraftHead:
    vocab = some_vocab(64, of=chat_target().shape.vocab_size)
    return make_head(family, chat_target(), vocab=vocab, **options).train()


@pytest.mark.parametrize(
    ("family", "options"),
    [("medusa", {}), ("eagle", {"feature_noise": 0.5}), ("eagle3", {"aux": [1]})],
)
def test_alpha_of_the_rows_of_a_step_is_that_of_the_same_rows_held_out(family, options):
    """Noise off, and positions outside the draft vocabulary counted as the misses they are."""
    parallel, head = single(), head_of(family, **options)
    source = OnlineFeatures(chat_target(), ROWS, head.aux_features)
    held_out = heldout_figures(head, source, 8, parallel)
    model, _ = parallel.prepare(head, lambda bare: torch.optim.SGD(bare.parameters(), lr=1.0))
    model.train()
    batches = [source.batch([0, 1, 2]), source.batch([3, 4, 5, 6, 7])]
    figures = teacher_forced(model, batches, source.parts, parallel)
    assert model.training
    assert {"train/alpha_overlap[0]", "train/tau_predicted"} <= figures.keys()
    for name, value in figures.items():
        assert value == pytest.approx(held_out[name.replace("train/", "heldout/")], rel=1e-4)


def test_looking_at_alpha_moves_no_random_number():
    parallel, head = single(), head_of("eagle", feature_noise=0.5)
    source = OnlineFeatures(chat_target(), ROWS, head.aux_features)
    model, _ = parallel.prepare(head, lambda bare: torch.optim.SGD(bare.parameters(), lr=1.0))
    before = torch.get_rng_state()
    teacher_forced(model, [source.batch([0])], source.parts, parallel)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in head.parameters())


def test_predicted_tau_is_one_more_than_the_sum_of_joint_agreement():
    sums = {"joint_agreement": (torch.tensor([6.0, 3.0, 0.0]), torch.tensor([8.0, 6.0, 0.0]))}
    figures = metric_figures(sums, "train")
    assert figures["train/tau_predicted"] == pytest.approx(1 + 6 / 8 + 3 / 6)
    assert figures["train/joint_agreement[1]"] == 0.5


# Memory


def test_peak_memory_is_that_of_the_process():
    (name, value), *_ = peak_memory(single()).items()
    assert name == "memory/peak_gb"
    assert 0.05 < value < 64


# Over two ranks


def started(kind: str, directory: Path) -> list[dict[str, Any]]:
    """Run the job and return what each rank found."""
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    launcher = [] if kind == "single" else torchrun
    command = [sys.executable, "-m", *launcher, "meter_job", kind, str(directory)]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stderr[-4000:]
    paths = sorted(directory.glob(f"{kind}-*.json"))
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, Any]:
    """What one process tells of the run."""
    (found,) = started("single", tmp_path_factory.mktemp("single"))
    return found


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    """What each of two ranks tells."""
    return started(request.param, tmp_path_factory.mktemp(request.param))


def test_p31_accuracy_over_ranks_is_a_quarter_and_never_a_mean_of_means(ranks):
    for found in ranks:
        assert found["accuracy"]["train/top1_agreement[0]"] == 0.25
        assert found["accuracy"]["train/tau_predicted"] == 1.25


def test_p30_a_rank_whose_rows_teach_nothing_adds_nothing_and_nobody_waits_for_it(ranks):
    batch = OnlineFeatures(chat_target(), ROWS[:1]).batch([0])
    parallel = single()
    model, _ = parallel.prepare(new_head("medusa"), meter_job.sgd)
    right = teacher_forced(model, [batch], chat_target().parts, parallel)
    assert right["train/alpha_overlap[0]"] > 0
    for found in ranks:
        assert found["masked_rank"] == pytest.approx(right, rel=1e-5)


def test_a_loss_that_is_no_number_stops_all_ranks_and_names_rank_and_rows(ranks):
    for found in ranks:
        assert found["infinite_loss"]["said"] == (
            "step 7: loss nan, gradient norm nan (rank 1: rows [20, 21]); lower train.lr"
        )
        assert not found["infinite_loss"]["moved"]


def test_a_gradient_that_is_no_number_stops_all_ranks_before_the_weights_are_spoilt(ranks):
    for found in ranks:
        assert found["infinite_gradient"]["said"] == (
            "step 7: loss 3.0, gradient norm nan (rank 0: rows [0]; rank 1: rows [1]); "
            "lower train.lr"
        )
        assert not found["infinite_gradient"]["moved"]


def test_two_ranks_tell_of_a_run_what_one_process_tells_of_it(ranks, alone):
    # Two rows a rank and step, or four a step: other steps, but the same counts in all of them.
    first, second = ranks
    assert second["run"]["lines"] == []
    lines = first["run"]["lines"]
    assert [line["step"] for line in lines] == [2, 4]
    assert all(line["train/tokens_per_s"] > 0 for line in lines)
    shares = [sum(line[f"time/{stage}"] for stage in STAGES) for line in lines]
    assert shares == pytest.approx([1.0, 1.0], abs=1e-6)
    assert [line.keys() for line in lines] == [line.keys() for line in alone["run"]["lines"]]
    assert first["memory"] == second["memory"]


def test_averages_are_kept_under_every_backend_that_takes_them(ranks):
    served = ranks[0]["run"]["served"]
    assert served
    assert ranks[1]["run"]["served"] == {}
