"""`scripts/gpu_check.sh` runs with torch, transformers and accelerate alone, and can fail."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"
LIMIT = ("--limit", "300")
"""A busy machine may take longer to load torch than a part may take on one with a GPU."""
ABSENT = ["hydra", "omegaconf", "datasets", "pyarrow", "wandb", "rich", "matplotlib", "scipy"] + [
    "deepspeed",
    "gguf",
    "pandas",
    "sklearn",
]
HIDING = f"""
import sys
ABSENT = {ABSENT}

class Hiding:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path = [Hiding(finder) for finder in sys.meta_path]
"""


def check(*options: str, hide: Path | None = None) -> subprocess.CompletedProcess:
    """Run the script, in an interpreter that finds none of ABSENT when `hide` is a directory."""
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    if hide is not None:
        (hide / "sitecustomize.py").write_text(HIDING)
        environment["PYTHONPATH"] = str(hide)
    return subprocess.run(
        [SCRIPT, *options], env=environment, capture_output=True, text=True, timeout=900
    )


def test_attention_is_checked_with_nothing_else_installed(tmp_path):
    done = check("--device", "cpu", "--tiny", "--parts", "attention", *LIMIT, hide=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "output of step 2: relative error" in done.stdout
    assert "not checked on a CPU: flex attention's backward pass" in done.stdout
    assert "\nPASS attention in" in done.stdout


@pytest.mark.slow
def test_all_of_it_runs_through_on_a_cpu_and_says_what_was_not_checked(tmp_path):
    done = check("--device", "cpu", "--tiny", *LIMIT, hide=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = [line.split(" in ")[0] for line in done.stdout.splitlines()[-3:]]
    assert verdicts == ["PASS train", "PASS attention", "PASS decode"]
    assert "tokens/s over" in done.stdout
    assert "MFU not known: no peak of this device" in done.stdout
    assert "texts equal" in done.stdout
    assert done.stdout.count("not checked on a CPU") == 3


def test_the_hidden_packages_are_hidden(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    done = subprocess.run(
        [sys.executable, "-c", "import hydra"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert "No module named 'hydra'" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_machine_without_a_gpu_fails_and_says_so():
    done = check("--parts", "train", "attention", *LIMIT)
    assert done.returncode == 1
    assert done.stderr.count("--device cuda: torch") == 2
    assert done.stdout.splitlines()[-2:] == [
        "FAIL train: exit code 1",
        "FAIL attention: exit code 1",
    ]


def test_a_part_that_runs_past_its_time_fails_and_the_next_one_runs():
    done = check("--device", "cpu", "--parts", "decode", "attention", "--tiny", "--limit", "1")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        "FAIL decode: ran past 1 s",
        "FAIL attention: ran past 1 s",
    ]


def test_the_help_says_that_no_gpu_has_been_seen():
    done = check("--help")
    assert done.returncode == 0
    assert "has not been seen yet" in " ".join(done.stdout.split())
