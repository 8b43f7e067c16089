"""Captures of several processes, and captures killed: the store is that of one whole run."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import capture_job
import pytest
from capture_job import META, ROWS
from training import chat_target

from headstart.data import store_writer
from headstart.data.capture import capture
from headstart.data.shards import INDEX
from headstart.data.store import FeatureStore
from headstart.files import read_json

TESTS = Path(capture_job.__file__).parent


def start(directory: Path, *arguments: str, rank: int = 0, world: int = 1) -> subprocess.Popen:
    """Start a capture as torchrun starts its ranks."""
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    environment = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "capture_job", str(directory), *arguments]
    return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)


def shards(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*-0*.safetensors")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The store of one uninterrupted process."""
    directory = tmp_path_factory.mktemp("whole") / "store"
    assert start(directory).wait() == 0
    return directory


def assert_same_store(have: Path, want: Path) -> None:
    assert shards(have) == shards(want)
    left, right = read_json(have / INDEX), read_json(want / INDEX)
    del left["seconds"], right["seconds"]
    assert left == right
    assert not list(have.glob(".*")), "temporary files are left"


def test_two_processes_make_the_store_of_one_and_both_end_when_it_is_complete(tmp_path, whole):
    store = tmp_path / "store"
    slow = start(store, "0.05", rank=0, world=2)
    assert start(store, rank=1, world=2).wait() == 0
    assert (store / INDEX).is_file()  # the quick one waited for the slow one's shards
    assert slow.wait() == 0
    assert_same_store(store, whole)


def killed(store: Path, seed: int) -> int:
    """Start a capture, kill it at a random moment, and return how many shards it left."""
    moment = random.Random(seed).uniform(0.02, 0.6)
    before = len(shards(store)) if store.is_dir() else 0
    process = start(store, "0.03")
    while len(shards(store)) == before and process.poll() is None:
        time.sleep(0.01)
    time.sleep(moment)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return len(shards(store))


def test_a_capture_killed_at_a_random_moment_is_taken_up_to_the_same_store(tmp_path, whole):
    store = tmp_path / "store"
    assert 0 < killed(store, seed=0) < len(ROWS)
    with pytest.raises(FileNotFoundError, match=r"index\.json"):
        FeatureStore(store)
    assert start(store).wait() == 0
    assert_same_store(store, whole)


@pytest.mark.slow
def test_five_kills_at_random_moments_change_nothing(tmp_path, whole):
    for seed in range(5):
        store = tmp_path / str(seed)
        killed(store, seed)
        assert start(store).wait() == 0
        assert_same_store(store, whole)


def test_a_rank_makes_its_own_shards_whatever_the_others_have_done(tmp_path, monkeypatch):
    monkeypatch.setattr(store_writer, "_wait_for_all", stop)
    monkeypatch.setattr("headstart.data.store_job.SHARD_ROWS", 5)
    monkeypatch.setenv("WORLD_SIZE", "2")
    made: list[set[str]] = []
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(KeyboardInterrupt):
            capture(chat_target(), ROWS, tmp_path, meta=META)
        made.append(set(shards(tmp_path)))
    assert [len(names) for names in made] == [2, 5]  # of five, ranks 0 and 1 make three and two


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_rank_that_never_makes_its_shards_is_an_error_that_names_one(tmp_path, monkeypatch):
    monkeypatch.setattr(store_writer, "STALL_SECONDS", 0.3)
    monkeypatch.setattr("headstart.data.store_job.SHARD_ROWS", 5)
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = r"2 shards of other ranks are missing \(.*-00001.safetensors\).* run the same command"
    with pytest.raises(RuntimeError, match=message):
        capture(chat_target(), ROWS, tmp_path, meta=META)
