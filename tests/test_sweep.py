"""One bad job does not end a sweep, and the same sweep started again runs what is missing."""

import json
import signal
from pathlib import Path

import pytest
from launching import finish, lines, prepare, start, wait_until
from training import command

from headstart import sweep
from headstart.files import read_json
from headstart.heads.checkpoint import load_head

TWO = ["parallel=ddp", "launch.num_processes=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def training(root) -> list[str]:
    return prepare(root)


def rows(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / sweep.ROWS).read_text().splitlines()]


def times(directory: Path) -> dict[str, int]:
    """Return when the outcome of each job was written."""
    return {path.parent.name: path.stat().st_mtime_ns for path in directory.rglob(sweep.OUTCOME)}


@pytest.mark.slow
def test_p58_one_bad_job_ends_nothing_and_the_second_start_runs_what_is_missing(root, training):
    """The rates 1e-3, one at which training diverges, and 1e-4, with two processes a job."""
    place = root / "p58"
    arguments = [*training, "-m", *TWO, "train.lr=1e-3,1e+38,1e-4", f"out={place}"]
    said = finish(start(root, arguments), 1)
    first, bad, last = rows(place)
    assert [row["status"] for row in (first, bad, last)] == ["finished", "failed", "finished"]
    assert "loss" in bad["reason"]
    assert "lower train.lr" in bad["reason"]
    assert "headstart train: 1 of 3 jobs failed: 1 (" in said
    for job in ("0", "2"):
        assert load_head(place / job / "head")[1].step == 3
    before = times(place)
    again = finish(start(root, arguments), 1)
    assert [row["status"] for row in rows(place)] == ["finished", "failed", "finished"]
    changed = {job for job, moment in times(place).items() if moment != before[job]}
    assert changed == {"1"}
    assert again.count("finished already") == 2


def test_a_sweep_that_cannot_be_composed_starts_nothing(root, training):
    place = root / "mistyped"
    arguments = [*training, "-m", "train.lr=1e-3,diverges,1e-4", f"out={place}"]
    said = finish(start(root, arguments), 1)
    assert "train.lr=diverges" in said
    assert "HYDRA_FULL_ERROR" not in said  # one sentence, as of a single run
    assert not place.exists()


@pytest.mark.slow
def test_ctrl_c_ends_a_sweep_and_its_job_saves(root, training):
    place = root / "stopped"
    arguments = [*training, "-m", "train.lr=1e-3,1e-4", "train.max_steps=1000000", f"out={place}"]
    process = start(root, arguments)
    wait_until(lambda: lines(place / "0/metrics.jsonl") >= 2, process)
    process.send_signal(signal.SIGINT)
    finish(process, 130)
    assert (place / "0/head").is_dir()
    assert not (place / "1").exists()
    assert times(place) == {}


def test_p57_a_directory_belongs_to_one_run_at_a_time(root, training):
    """As of two sweeps that are started in the same second, with that second in their directory."""
    with sweep.claim(root / "second"):
        for extra in ([], ["-m", "train.lr=1e-3,1e-4"]):
            with pytest.raises(SystemExit) as ended:
                command(*training, *extra, f"out={root}/second")
            assert "another run is writing there; choose another" in ended.value.code
    assert list((root / "second").iterdir()) == []
    with sweep.claim(root / "second"):
        pass


@pytest.mark.slow
def test_jobs_that_a_launcher_runs_elsewhere_are_accounted_for_too(root, training):
    pytest.importorskip("submitit", reason="needs headstart[slurm]")
    place = root / "elsewhere"
    there = ["hydra/launcher=local", "train.lr=1e-3,1e+38", f"out={place}"]
    said = finish(start(root, [*training, "-m", *there]), 1)
    assert [row["status"] for row in rows(place)] == ["finished", "failed"]
    assert "headstart train: 1 of 2 jobs failed: 1 (" in said


# The account of a job


def job(place: Path, settings: dict, work=lambda: 1.0) -> object:
    return sweep.run_job(place, ["lr=1"], settings, work)


def fail() -> None:
    raise RuntimeError("no luck")


def test_a_failed_job_is_a_row_with_its_reason_and_is_run_again(tmp_path):
    assert job(tmp_path / "0", {"lr": 1}, fail) is None
    assert "1 of 1 jobs failed: 0 (no luck)" in sweep.end_sweep(tmp_path)
    assert job(tmp_path / "0", {"lr": 1}) == 1.0
    assert sweep.end_sweep(tmp_path) is None
    (row,) = rows(tmp_path)
    assert (row["job"], row["status"], row["reason"]) == ("0", "finished", None)


def test_how_a_job_runs_does_not_make_it_another_one(tmp_path):
    settings = {"train": {"lr": 1, "resume": "never"}, "launch": {"num_processes": 1}}
    job(tmp_path / "0", settings)
    changed = {"train": {"lr": 1, "resume": "auto"}, "launch": {"num_processes": 2}}
    assert job(tmp_path / "0", changed, fail) is None
    assert read_json(tmp_path / "0" / sweep.OUTCOME)["status"] == "finished"


def test_a_directory_with_a_finished_job_of_other_options_ends_the_sweep(tmp_path):
    job(tmp_path / "0", {"train": {"lr": 1}})
    with pytest.raises(SystemExit, match=r"holds a finished job with another train\.lr"):
        job(tmp_path / "0", {"train": {"lr": 2}})


def test_rows_stand_in_the_order_of_the_jobs(tmp_path):
    for number in (10, 2, 0):
        job(tmp_path / str(number), {})
    sweep.end_sweep(tmp_path)
    assert [row["job"] for row in rows(tmp_path)] == ["0", "2", "10"]


def test_interrupts_are_no_outcome(tmp_path):
    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job(tmp_path / "0", {}, stop)
    assert not (tmp_path / "0" / sweep.OUTCOME).exists()
