"""Figures on disk and at W&B: real runs in offline mode, and servers that are not there."""

import json
import logging
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import train_job
import wandb
from training import chat_target, command, save_target, saved
from wandb_stream import Stream, streams

from headstart import cli
from headstart.train.run import train
from headstart.train.tracking import LoggingConfig, NoTracker, answers, make_tracker, tracked

CONFIG = {"train": {"lr": 0.001, "betas": [0.9, 0.95]}, "out": "runs/a"}
KEY = "0" * 40


@pytest.fixture(autouse=True)
def own_wandb(tmp_path, monkeypatch) -> Iterator[None]:
    """Give W&B a home without a key, and a process of its own: it reads its settings once."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
def nobody(monkeypatch) -> str:
    """A server's address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("WANDB_BASE_URL", address)
    return address


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


class NotFound(BaseHTTPRequestHandler):
    """Answers everything with an error."""

    def do_GET(self) -> None:
        """Say that there is nothing."""
        self.send_error(404)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing on the terminal."""


@pytest.fixture
def useless() -> Iterator[str]:
    """A server that answers, but is not W&B's."""
    server = HTTPServer(("127.0.0.1", 0), NotFound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def track(
    out: Path,
    steps: range,
    kind: str = "wandb_offline",
    config: dict[str, Any] = CONFIG,
    **options: object,
) -> None:
    """Log a loss at each of these steps, as a run that begins before the first of them."""
    out.mkdir(exist_ok=True)
    tracker = make_tracker(LoggingConfig(kind=kind, **options), out, ["eagle", "tiny"], main=True)
    with tracked(tracker, config, steps[0] - 1) as tracker:
        for step in steps:
            tracker.log(step, {"tokens": 10 * step, "train/loss": 1 / step})


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def only(out: Path) -> Stream:
    (stream,) = streams(out)
    return stream


# What is written


def test_an_offline_run_holds_project_group_tags_kind_and_the_resolved_configuration(tmp_path):
    track(tmp_path / "a", range(1, 3), project="heads", group="sweep-1", tags=["mine"])
    stream = only(tmp_path / "a")
    assert (stream.run.project, stream.run.run_group) == ("heads", "sweep-1")
    assert (stream.run.job_type, stream.run.display_name) == ("train", "a")
    assert list(stream.run.tags) == ["eagle", "mine", "tiny"]
    assert {name: stream.config[name] for name in CONFIG} == CONFIG


def test_the_x_axis_of_every_figure_is_our_own_step(tmp_path):
    track(tmp_path / "a", range(1, 4))
    stream = only(tmp_path / "a")
    assert stream.metrics["*"].step_metric == "train/step"
    assert stream.metrics["heldout/tau_with_bonus_micro"].step_metric == "train/step"
    assert stream.metrics["heldout/tau_with_bonus_micro"].summary.max
    assert stream.column("train/step") == [1, 2, 3]
    assert stream.column("train/loss") == [1, 1 / 2, 1 / 3]
    assert stream.column("train/tokens") == [10, 20, 30]


@pytest.mark.parametrize("kind", ["none", "wandb_offline"])
def test_the_same_figures_are_always_on_disk_as_json(tmp_path, kind):
    track(tmp_path / "a", range(1, 4), kind)
    assert lines(tmp_path / "a") == [
        {"step": step, "tokens": 10 * step, "train/loss": 1 / step} for step in (1, 2, 3)
    ]


def test_only_the_main_rank_tracks(tmp_path):
    tracker = make_tracker(LoggingConfig(kind="wandb_offline"), tmp_path, [], main=False)
    assert isinstance(tracker, NoTracker)
    with tracked(tracker, CONFIG, 0):
        tracker.log(1, {"train/loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_ends_as_failed(tmp_path):
    with pytest.raises(ValueError, match="broken"):
        with tracked(
            make_tracker(LoggingConfig(kind="wandb_offline"), tmp_path, [], main=True), CONFIG, 0
        ):
            raise ValueError("broken")
    assert only(tmp_path).exit_code == 1


def test_wandb_is_not_imported_unless_it_is_asked_for(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from headstart.train.tracking import *\n"
        "with tracked(make_tracker(LoggingConfig(), Path('.'), [], main=True), {}, 0) as tracker:\n"
        "    tracker.log(1, {'train/loss': 1.0})\n"
        "assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, env=paths())


def paths() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


# Parts of one run


def test_p61_ten_offline_steps_and_ten_more_are_one_axis_in_one_group(tmp_path):
    """The parts have ids of their own: synced under one, the second would replace the first."""
    out = tmp_path / "a"
    track(out, range(1, 11))
    track(out, range(11, 21))
    first, second = streams(out)
    assert first.column("train/step") + second.column("train/step") == list(range(1, 21))
    assert first.run.run_group == second.run.run_group != ""
    assert first.config["run_id"] == second.config["run_id"]
    assert first.run.run_id != second.run.run_id
    assert [line["step"] for line in lines(out)] == list(range(1, 21))


def test_p61_a_run_taken_up_from_its_checkpoint_goes_on_at_eleven(tmp_path):
    train_job.write_rows(tmp_path)
    job = train_job.job(tmp_path, max_steps=20, log_every=1)
    job.logging = LoggingConfig(kind="wandb_offline")
    train_job.stopped(job, 10)
    train(chat_target(), job)
    first, second = streams(Path(job.out))
    assert first.column("train/step") == list(range(1, 11))
    assert [step for step in second.column("train/step") if step <= 20][:10] == list(range(11, 21))
    assert first.run.run_group == second.run.run_group
    assert (first.exit_code, second.exit_code) == (1, 0)
    steps = [line["step"] for line in lines(Path(job.out)) if "train/loss" in line]
    assert steps == list(range(1, 21))


def test_two_runs_in_one_directory_one_after_the_other_are_two_runs(tmp_path):
    out = tmp_path / "a"
    track(out, range(1, 3))
    track(out, range(1, 3))
    first, second = streams(out)
    assert first.config["run_id"] != second.config["run_id"]
    assert first.run.run_group != second.run.run_group
    assert [first.exit_code, second.exit_code] == [0, 0]


# Jobs of one process


def test_p62_two_runs_in_one_process_are_two_finished_runs_with_their_own_configuration(tmp_path):
    track(tmp_path / "a", range(1, 3), group="sweep", config=CONFIG)
    assert wandb.run is None  # finished here: the next run, or the end of the process, does it too
    first = only(tmp_path / "a")
    track(tmp_path / "b", range(1, 3), group="sweep", config=CONFIG | {"out": "runs/b"})
    second = only(tmp_path / "b")
    assert [run.config["out"] for run in (first, second)] == ["runs/a", "runs/b"]
    assert [run.exit_code for run in (first, second)] == [0, 0]
    assert first.run.run_id != second.run.run_id
    assert first.run.run_group == second.run.run_group == "sweep"


def test_p62_two_jobs_of_a_sweep_are_two_finished_runs_in_the_group_of_their_sweep(tmp_path):
    target = saved(save_target(tmp_path / "target"))
    tiny = ["data.num_prompts=7", "data.max_length=300", "generate.max_new_tokens=4"]
    command("generate", *target, *tiny, f"out={tmp_path}/rows")
    fast = ["train.max_steps=2", "train.log_every=1", "head.draft_vocab_size=64"]
    swept = ["train.lr=1e-3,1e-4", "logging=wandb_offline"]
    command("train", "-m", *target, *fast, *swept, f"rows={tmp_path}/rows", f"out={tmp_path}/s")
    first, second = streams(tmp_path / "s")
    assert [run.config["train"]["lr"] for run in (first, second)] == [1e-3, 1e-4]
    assert [run.exit_code for run in (first, second)] == [0, 0]
    assert [run.column("train/step") for run in (first, second)] == [[1, 2], [1, 2]]
    assert first.run.run_id != second.run.run_id
    assert first.run.run_group == second.run.run_group == f"{tmp_path}/s"[-128:]


# Nobody there


def test_p62_no_key_and_no_network_is_told_within_ten_seconds_and_training_goes_on(
    tmp_path, nobody, caplog
):
    caplog.set_level(logging.WARNING, "headstart")
    started = time.perf_counter()
    track(tmp_path / "a", range(1, 4), "wandb")
    assert time.perf_counter() - started < 10
    (told,) = [record.getMessage() for record in caplog.records]
    assert f"{nobody} did not answer within 5 s; training goes on" in told
    assert [line["step"] for line in lines(tmp_path / "a")] == [1, 2, 3]
    stream = only(tmp_path / "a")
    assert told.endswith(f"wandb sync {stream.path.parent}")
    assert stream.column("train/step") == [1, 2, 3]


def test_a_server_that_never_answers_costs_the_timeout_and_no_more(tmp_path, silent, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", silent)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    started = time.perf_counter()
    track(tmp_path / "a", range(1, 4), "wandb", timeout=1.0)
    assert time.perf_counter() - started < 8
    assert only(tmp_path / "a").column("train/step") == [1, 2, 3]


def test_a_server_that_refuses_the_key_leaves_the_run_on_disk(
    tmp_path, useless, monkeypatch, caplog
):
    monkeypatch.setenv("WANDB_BASE_URL", useless)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    started = time.perf_counter()
    track(tmp_path / "a", range(1, 4), "wandb")
    assert time.perf_counter() - started < 30
    assert "training goes on, the run is kept on disk" in caplog.text
    # What the attempt left is there too.
    assert [1, 2, 3] in [run.column("train/step") for run in streams(tmp_path / "a")]


def test_p62_without_a_key_nobody_is_asked_for_one_at_a_terminal(tmp_path, useless, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", useless)
    code = (
        "from pathlib import Path; import logging; logging.basicConfig()\n"
        "from headstart.train.tracking import *\n"
        "tracker = make_tracker(LoggingConfig(kind='wandb'), Path('.'), [], main=True)\n"
        "with tracked(tracker, {}, 0) as tracker:\n"
        "    tracker.log(1, {'train/loss': 1.0})\n"
    )
    ours, theirs = pty.openpty()
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        stdin=theirs,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        env=paths(),
    )
    os.close(ours)
    os.close(theirs)
    assert told.returncode == 0
    assert f"no API key for {useless}: run wandb login, or set WANDB_API_KEY" in told.stderr
    assert only(tmp_path).column("train/step") == [1]


def test_a_machine_set_to_offline_is_left_offline(tmp_path, nobody, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    track(tmp_path / "a", range(1, 3), "wandb")
    assert "did not answer" not in caplog.text
    assert only(tmp_path / "a").exit_code == 0


def test_an_error_is_an_answer_and_silence_is_none(useless, silent, nobody):
    assert answers(useless, 5.0)
    assert not answers(nobody, 5.0)
    started = time.perf_counter()
    assert not answers(silent, 0.3)
    assert time.perf_counter() - started < 2


# Options


@pytest.mark.parametrize("option", ["none", "wandb", "wandb_offline"])
def test_every_option_of_the_group_is_its_kind(option):
    cli.register()
    for name in ("train", "pipeline"):
        given = ["rows=rows"] if name == "train" else []
        assert cli.load_config(name, [*given, f"logging={option}"]).logging.kind == option


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "wandbb"}, r"logging\.kind=wandbb: expected one of none, wandb, wandb_offline"),
        ({"timeout": 0.0}, r"logging\.timeout=0\.0: need more than 0 seconds"),
        ({"project": ""}, r"logging\.project is empty: give a name"),
    ],
)
def test_a_bad_value_names_its_field(options, message):
    with pytest.raises(ValueError, match=message):
        LoggingConfig(**options)


def test_a_setting_that_nobody_reads_is_told():
    with pytest.warns(UserWarning, match=r"logging\.name has no effect with logging=none"):
        LoggingConfig(name="mine")
