"""`scripts/leaderboard.sh`, with a `headstart` that only writes down what it is asked."""

import json
import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "leaderboard.sh"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Hold one head with its tree, prompts, and the stand-in for headstart."""
    (tmp_path / "heads" / "eagle" / "head").mkdir(parents=True)
    tree = tmp_path / "out" / "search" / "eagle" / "tree" / "searched_eagle.yaml"
    tree.parent.mkdir(parents=True)
    tree.touch()
    (tmp_path / "prompts").mkdir()
    for suite in ("mt_bench", "gsm8k", "humaneval"):
        (tmp_path / "prompts" / f"{suite}.jsonl").touch()
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "headstart"
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    command.chmod(0o755)
    return tmp_path


def run(place: Path, parts: str = "best") -> subprocess.CompletedProcess:
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [SCRIPT, place / "out", place / "heads", place / "prompts"],
        env=os.environ | {"PATH": path, "PARTS": parts},
        capture_output=True,
        text=True,
        timeout=60,
    )


def measured(place: Path, name: str, speed: float | None) -> None:
    """Write as much of a result of t0 as the script reads."""
    directory = place / "out" / "t0" / name
    directory.mkdir(parents=True)
    figures = {"speedup_ratio_of_sums_decode": speed}
    result = {"drafter": {"name": name}, "figures": figures}
    (directory / "result.json").write_text(json.dumps(result))


@pytest.mark.parametrize("speeds", [{}, {"lookup": None}])
def test_without_a_speed_in_t0_no_arm_is_measured_as_one_of_the_best(place, speeds):
    for name, speed in speeds.items():
        measured(place, name, speed)
    done = run(place)
    assert done.returncode == 1
    assert f"no result with a speed in {place}/out/t0; measure first with PARTS=t0" in done.stderr
    assert not (place / "calls").exists()


def test_the_three_fastest_of_t0_are_measured_again(place):
    speeds = {"a": 1.2, "b": 1.9, "c": None, "d": 1.5, "e": 1.1}
    for name, speed in speeds.items():
        measured(place, name, speed)
    done = run(place)
    assert done.returncode == 0, done.stderr
    (call,) = (place / "calls").read_text().splitlines()
    assert " eval.only=[b,d,a] eval.repeats=3" in call


@pytest.mark.parametrize(
    ("gone", "parts", "message"),
    [
        ("nothing", "t0 tO", "PARTS=tO: expected some of search t0 t1 best equality report"),
        ("heads", "t0", "heads: no NAME/head there; give a directory of trained heads"),
        ("prompts/gsm8k.jsonl", "t0", "prompts: no gsm8k.jsonl there; give the directory"),
        ("out", "t0", "t0: no tree of eagle in "),
    ],
)
def test_what_is_missing_is_told_before_anything_is_measured(place, gone, parts, message):
    if (place / gone).exists():
        (place / gone).rename(place / "elsewhere")
    done = run(place, parts)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (place / "calls").exists()
