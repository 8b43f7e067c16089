"""`headstart eval` in processes of its own, killed and interrupted: it goes on and loses nothing.

They are forked from one that has imported everything, so that the moments fall into the work.
"""

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from models import make_head
from training import command, save_target, saved, talking_target

from headstart.data.template import ChatTemplate
from headstart.eval.journal import JOURNAL
from headstart.heads.checkpoint import info_for, save_head

LIMIT = 300  # seconds
PROMPTS, REPEATS = 8, 2
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["headstart.eval.run", "headstart.cli", "headstart.pipeline"])


def _run(arguments: list[str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    command(*arguments)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Hold a target, a head, and conversations of one to three turns."""
    root = tmp_path_factory.mktemp("eval-kill")
    save_target(root / "target", target=talking_target())
    target = talking_target()
    head = make_head("medusa", target, num_heads=3)
    template = ChatTemplate(target.tokenizer).hash
    info = info_for(head, target.name, target.fingerprint, template_hash=template)
    save_head(root / "head", head, info)
    rows = [
        {"question_id": i, "category": "x", "turns": [f"Question {i}?", "Why?", "So?"][: 1 + i % 3]}
        for i in range(PROMPTS)
    ]
    (root / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def start(root: Path, out: Path) -> multiprocessing.Process:
    arguments = ["eval", *saved(root / "target"), f"checkpoints=[{root}/head]", f"out={out}"]
    arguments += ["tree=chain3", f"eval.suite={root}/q.jsonl", f"eval.num_prompts={PROMPTS}"]
    arguments += [f"eval.repeats={REPEATS}", "eval.max_new_tokens=60", "eval.resamples=2000"]
    arguments += ["runtime.threads=1"]
    process = PROCESSES.Process(target=_run, args=(arguments, f"{out}.txt"))
    process.start()
    return process


def sessions(out: Path) -> list[dict]:
    """Return the whole sessions of a journal."""
    if not (out / JOURNAL).exists():
        return []
    lines = (out / JOURNAL).read_text().splitlines(keepends=True)
    whole = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry for entry in whole if "place" in entry]


def stop(process: multiprocessing.Process, out: Path, how: int, count: int) -> None:
    """Send a signal once the journal holds so many sessions."""
    begun = time.monotonic()
    while len(sessions(out)) < count and process.is_alive():
        assert time.monotonic() < begun + LIMIT, Path(f"{out}.txt").read_text()[-2000:]
        time.sleep(0.005)
    os.kill(process.pid, how)
    process.join(LIMIT)


def finish(process: multiprocessing.Process, out: Path) -> list[dict]:
    process.join(LIMIT)
    assert process.exitcode == 0, Path(f"{out}.txt").read_text()[-2000:]
    (rows,) = out.glob("*/prompts.jsonl")
    return [json.loads(line) for line in rows.read_text().splitlines()]


def untimed(rows: list[dict]) -> list[dict]:
    kept = ("prompt_id", "token_ids", "turn_tokens", "accepted", "emitted", "stops", "turns")
    return [{name: row[name] for name in kept} for row in rows]


@pytest.fixture(scope="module")
def whole(root) -> list[dict]:
    """Return the rows of a run that nothing interrupted."""
    return finish(start(root, root / "whole"), root / "whole")


def test_killed_again_and_again_it_ends_with_the_rows_of_an_uninterrupted_run(root, whole):
    out, draw = root / "killed", random.Random(0)
    for count in (1, 4, 9):
        process = start(root, out)
        time.sleep(draw.random() * 0.01)
        stop(process, out, signal.SIGKILL, count)
        assert process.exitcode == -signal.SIGKILL
    before = sessions(out)
    assert 9 <= len(before) < PROMPTS * REPEATS
    rows = finish(start(root, out), out)
    assert untimed(rows) == untimed(whole)
    after = sessions(out)
    assert after[: len(before)] == before  # nothing was measured twice
    assert len(after) == PROMPTS * REPEATS
    _times_are_pairs(rows, after)
    (result,) = out.glob("*/result.json")
    told = json.loads(result.read_text())["warnings"]
    assert any(w.startswith("measured in ") and "runs, begun " in w for w in told)


def _times_are_pairs(rows: list[dict], sessions: list[dict]) -> None:
    """Hold a prompt's times to those of its sessions: for each arm the lower of two repeats."""
    for number, row in enumerate(rows):
        own = [session["done"] for session in sessions if session["place"][1] == number]
        plain, drafted = (
            min(sum(c["seconds"] for turn in done[arm] for c in turn) for done in own)
            for arm in (0, 1)
        )
        assert row["plain_seconds"] == pytest.approx(plain, rel=1e-12)
        assert row["seconds"] == pytest.approx(drafted, rel=1e-12)


def test_ctrl_c_leaves_a_journal_and_says_how_to_go_on(root, whole):
    out = root / "interrupted"
    process = start(root, out)
    stop(process, out, signal.SIGINT, 2)
    assert process.exitcode == 130
    told = Path(f"{out}.txt").read_text()
    assert f"{out}/{JOURNAL} keeps the " in told
    assert "the same command again goes on from there" in told
    assert "Traceback" not in told
    assert untimed(finish(start(root, out), out)) == untimed(whole)
    assert "sessions were measured earlier and are kept" in Path(f"{out}.txt").read_text()
