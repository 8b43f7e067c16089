"""One command, N processes: whoever starts them, they share one directory, one log and one head."""

import re
from pathlib import Path

import pytest
from launching import TORCHRUN, finish, free_port, prepare, start
from training import command

from headstart import ranks
from headstart.files import read_json
from headstart.heads.checkpoint import load_head
from headstart.launch import quoted, starts_ranks
from headstart.launch_config import LaunchConfig, check

STAMPED = "out=runs/${now:%H-%M-%S}"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("launch")


@pytest.fixture(scope="module")
def training(root) -> list[str]:
    return prepare(root)


def processes(out: Path) -> int:
    """Return how many ranks trained, by the word of the trainer itself."""
    (checkpoint,) = (out / "checkpoints").glob("step-*")
    return read_json(checkpoint / "state.json")["identity"]["processes"]


def assert_one_run(runs: Path) -> Path:
    """Return the one directory that a run made, with one config, one log and one head."""
    (out,) = runs.iterdir()
    assert [path.name for path in out.rglob("*.log")] == ["cli.log"]
    assert len(list(out.rglob("config.yaml"))) == 1
    assert load_head(out / "head")[1].step == 3
    assert processes(out) == 2
    return out


def test_p57_one_command_trains_on_two_processes_in_one_directory_that_bears_a_time(root, training):
    said = finish(start(root, [*training, "parallel=ddp", "launch.num_processes=2", STAMPED]))
    out = assert_one_run(root / "runs")
    told = (out / "cli.log").read_text()
    assert "starting 2 of 2 ranks here" in told
    assert "[rank 0][headstart.train.run][INFO] - training" in told
    assert "rank 1" not in told
    assert said.count("training MedusaConfig") == 1


@pytest.mark.slow
def test_p57_ranks_of_torchrun_that_start_a_second_apart_share_directory_and_log(root, training):
    (root / "apart").mkdir()
    stamped = STAMPED.replace("runs", "apart")
    finish(start(root, [*training, "parallel=ddp", stamped], module=(*TORCHRUN, "launch_job")))
    assert_one_run(root / "apart")


@pytest.mark.slow
def test_p57_ranks_that_accelerate_launch_starts_train_as_one(root, training):
    """Its --multi_gpu is what makes it start ranks, of CPUs too; --cpu starts a single process."""
    launch = ("accelerate.commands.launch", "--num_machines=1", "--num_processes=2")
    plain = ("--mixed_precision=no", "--dynamo_backend=no", "--multi_gpu", "-m", "headstart")
    (root / "accelerated").mkdir()
    there = ["parallel=ddp", "out=accelerated/run"]
    finish(start(root, [*training, *there], module=(*launch, *plain)))
    assert_one_run(root / "accelerated")


@pytest.mark.slow
def test_two_machines_meet_at_the_first_and_share_its_directory(root, training):
    there = ["parallel=ddp", "launch.nodes=2", "launch.master_address=127.0.0.1", "out=two"]
    port = f"launch.master_port={free_port()}"
    second = start(root, [*training, *there, port, "launch.node_rank=1"])
    finish(start(root, [*training, *there, port, "launch.node_rank=0"]))
    finish(second)
    assert processes(root / "two") == 2
    assert load_head(root / "two/head")[1].step == 3


@pytest.mark.slow
def test_a_warning_of_all_ranks_stands_once_in_the_log_and_those_of_others_bear_their_rank(
    root, training
):
    meta = root / "rows/meta.json"
    before = meta.read_text()
    changed = re.sub(r'"target_fingerprint": "[^"]*"', '"target_fingerprint": "another"', before)
    assert changed != before
    try:
        meta.write_text(changed)
        options = ["parallel=ddp", "launch.num_processes=2", "out=warned", "train.features=online"]
        said = finish(
            start(
                root,
                [*training, *options],
                BREAK="import logging; logging.getLogger('here').warning('only rank 1 says this')",
                BREAK_RANKS="1",
            )
        )
    finally:
        meta.write_text(before)
    told = (root / "warned/cli.log").read_text()
    for text in (said, told):
        assert text.count("the answers are not this target's own") == 1
        assert text.count("[rank 1][here][WARNING] - only rank 1 says this") == 1


def test_a_capture_shards_over_the_processes_it_is_told_to_start(root, training):
    options = [a for a in training[1:] if a.startswith(("target", "rows="))]
    said = finish(start(root, ["capture", *options, "out=store", "launch.num_processes=2"]))
    assert "starting 2 of 2 ranks here" in said
    assert (root / "store/index.json").is_file()


# What does not go together is told before anything starts


def test_p57_a_launch_that_cannot_be_what_was_asked_for_is_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="parallel=single trains in one process, .* asks for 2"):
        check(LaunchConfig(num_processes=2), "single", None)
    with pytest.raises(ValueError, match="launch.num_processes=3: .* has 2 GPUs, .*use 2"):
        check(LaunchConfig(num_processes=3), "ddp", 2)
    check(LaunchConfig(num_processes=2), "ddp", 2)
    check(LaunchConfig(num_processes=3), "ddp", None)  # on the CPU there may be any number


def test_p57_processes_that_accelerate_starts_without_ranks_are_refused(monkeypatch):
    """`accelerate launch --cpu --num_processes 2` starts one process, and says nothing."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ValueError, match="parallel=ddp: accelerate launch started one process"):
        check(LaunchConfig(), "ddp", None)
    check(LaunchConfig(), "single", None)


def test_ranks_of_another_number_than_asked_for_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="launch.num_processes=4 .*2 processes were started"):
        check(LaunchConfig(num_processes=4), "ddp", None)
    check(LaunchConfig(), "ddp", None)
    check(LaunchConfig(num_processes=2), "ddp", None)


def test_backends_that_need_a_process_group_get_one_of_a_single_rank_too(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert starts_ranks(LaunchConfig(), "zero2", sweeping=False)
    assert starts_ranks(LaunchConfig(), "single", sweeping=True)
    assert not starts_ranks(LaunchConfig(), "single", sweeping=False)
    assert not starts_ranks(LaunchConfig(), None, sweeping=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_processes": 0}, "launch.num_processes=0: need at least 1"),
        (
            {"nodes": 2, "node_rank": 2},
            "launch.node_rank=2: expected 0 to 1, below",
        ),
        ({"master_port": 70000}, "launch.master_port=70000: expected 1 to 65535"),
        ({"timeout_seconds": 0}, "launch.timeout_seconds=0: need at least 1"),
    ],
)
def test_a_bad_launch_option_names_its_field(values, message):
    with pytest.raises(ValueError, match=message):
        LaunchConfig(**values)


def test_several_machines_need_a_number_and_an_address_or_slurm(monkeypatch, tmp_path):
    for name in ("RANK", "SLURM_NODEID", "SLURM_JOB_ID", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="launch.nodes=2 needs launch.node_rank"):
        check(LaunchConfig(nodes=2), "ddp", None)
    with pytest.raises(ValueError, match="launch.nodes=2 needs launch.master_address"):
        check(LaunchConfig(nodes=2, node_rank=1), "ddp", None)
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("SLURM_NNODES", "3")
    with pytest.raises(ValueError, match="launch.nodes=2, but Slurm gave 3"):
        check(LaunchConfig(nodes=2), "ddp", None)


def test_slurm_tells_the_machine_the_address_and_a_port_of_the_job(monkeypatch, tmp_path):
    """scontrol is Slurm's; here a script stands in for it."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames n[1-2]" ] && echo n1 && echo n2\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    slurm = {"NODEID": "1", "NNODES": "2", "JOB_ID": "40007", "JOB_NODELIST": "n[1-2]"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    config = LaunchConfig(nodes=2)
    assert (config.node(), config.meeting_point()) == (1, ("n1", 20007))


def test_more_processes_than_gpus_are_one_sentence_before_anything_is_made(
    training, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headstart.jobs.count_gpus", lambda device: 2)
    with pytest.raises(SystemExit) as ended:
        command(*training, "parallel=ddp", "launch.num_processes=3", "out=never")
    assert ended.value.code.startswith(
        "headstart train: launch.num_processes=3: this machine has 2"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "-m", "train.lr=1,2"], "headstart train: -m under torchrun .* on every rank"),
        (["eval", "checkpoints=[a]"], "headstart eval: 2 processes were started, .* runs in one"),
    ],
)
def test_what_each_rank_would_do_by_itself_is_refused(arguments, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=message):
        command(*arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["runs/a b", "it's", "back\\slash", "a=b,c", "x{y}[z]"])
def test_hydra_reads_a_quoted_directory_back(name):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([f"out={quoted(name)}"])
    assert override.value() == name


def test_other_ranks_own_no_directory_and_no_log():
    given = ["lr=1", "hydra.run.dir=mine", "hydra/job_logging=default"]
    quiet = ranks.quiet_arguments(given)
    assert quiet[0] == "lr=1"
    assert "hydra.run.dir=mine" not in quiet
    assert {"hydra.run.dir=.", "hydra.output_subdir=null"} <= set(quiet)
