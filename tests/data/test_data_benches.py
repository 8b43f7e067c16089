"""The benches of the data side run, on a small target, and print the figures they are for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from training import chat_target, random_rows, save_target

from headstart.data.capture import capture
from headstart.data.rows import RowsMeta
from headstart.heads.base import build_head
from headstart.heads.checkpoint import HeadInfo, save_head
from headstart.heads.medusa import MedusaConfig

ROWS = random_rows(12)


def bench(name: str, *arguments: object) -> str:
    """Run `python -m headstart.data.NAME` in a process of its own and return what it prints."""
    line = [sys.executable, "-m", f"headstart.data.{name}", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def target_path(tmp_path_factory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def test_the_reading_bench_reads_every_token_and_tells_how_often_training_could_eat_it(tmp_path):
    capture(chat_target(), ROWS, tmp_path / "store", meta=RowsMeta("", "t", {}), taps=[1])
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"train/tokens_per_s": 10.0}) + "\n")
    told = bench("read_bench", tmp_path / "store", "--metrics", tmp_path / "metrics.jsonl")
    tokens = sum(len(row.token_ids) for row in ROWS)
    assert "training consumed 10 tokens/s" in told
    assert f"cold: {tokens} tokens" in told
    assert f"warm: {tokens} tokens" in told
    assert "times training" in told


def test_the_capture_bench_compares_capture_with_the_bare_forward(target_path):
    few = ["--num-rows", 4, "--length", 16, "--repeats", 1, "--threads", 1, "--aux", 1]
    told = bench("capture_bench", "--target", target_path, "--dtype", "float32", *few)
    assert "capture / forward: " in told
    assert "capture / decoder: " in told


def test_the_generation_bench_says_the_same_with_a_head_and_without(target_path, tmp_path):
    target = chat_target()
    head = build_head(MedusaConfig(num_heads=2), target.shape, None)
    info = HeadInfo("medusa", target.name, target.fingerprint)
    save_head(tmp_path / "head", head, info)
    few = [
        "num_prompts=3",
        "max_new_tokens=6",
        "repeats=1",
        "batches=[1,2]",
        "tree=chain2",
        "dtype=float32",
    ]
    told = bench("generate_bench", f"head={tmp_path / 'head'}", f"target={target_path}", *few)
    assert told.count("3 of 3") == 2
