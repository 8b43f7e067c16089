"""Going on with a run: from where, with which options changed, and what its files then hold.

A resumed run is the run: what would make it another one is refused by name. What only says how it
runs (where, how often it logs) may change, and is told.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headstart.files import atomic_path, read_json
from headstart.train.changes import BUDGET, EVALUATION, Change, refuse_another_run
from headstart.train.checkpoint import Checkpoints, Snapshot, read_snapshot, read_state
from headstart.train.config import TrainConfig
from headstart.train.parallel import Parallel
from headstart.train.progress import Progress
from headstart.train.randomness import derive_random, restore_random
from headstart.train.tracking import METRICS

log = logging.getLogger(__name__)
SUMMARY = "summary.json"


def tell_changes(path: Path, progress: Progress, found: list[Change]) -> None:
    """Log where a run goes on and what is no longer as it was.

    Where other figures are measured, the best one so far is forgotten: they do not compare.
    """
    log.info("going on from %s: step %d, epoch %d", path, progress.step, progress.epoch)
    for change in found:
        log.info("going on with a change: %s", change)
        if change.among(BUDGET):
            log.info("%s: the learning rate schedule is stretched from here on", change.name)
        if change.name == "processes":
            log.info("processes: rows a step are the same; each rank's random state starts anew")
        if change.among(EVALUATION) and change.name != "train.eval_every" and progress.best:
            log.info("%s: the best figure so far, %s, is forgotten", change.name, progress.best)
            progress.best = None


def finished(
    out: Path, config: TrainConfig, checkpoints: Checkpoints, own: dict[str, Any]
) -> Progress | None:
    """Return the progress of a run that has ended in `out`; None when there is something to do.

    Reads no tensor, so that it can be asked before anything is loaded. Raises ValueError for an
    `out` that must not be written to, and for options that would make it another run;
    FileNotFoundError for a checkpoint that is not there.
    """
    if config.resume == "never":
        refuse_occupied(out, checkpoints)
    elif config.resume != "auto":
        given_checkpoint(config.resume)
    newest = checkpoints.newest()
    if config.resume != "auto" or newest is None:
        return None
    state = read_state(newest)
    refuse_another_run(newest, state.identity, own)
    if state.progress.fraction(config) < 1 or not (out / SUMMARY).exists():
        return None
    progress = Progress(**read_json(out / SUMMARY)["progress"])
    log.info("%s: finished already at step %d; nothing to do", out, progress.step)
    return progress


def going_on(
    out: Path,
    config: TrainConfig,
    checkpoints: Checkpoints,
    own: dict[str, Any],
    head: nn.Module,
    parallel: Parallel,
) -> Snapshot | None:
    """Return what a run goes on from, and make its files fit; None starts a new one.

    Every rank gets it, the tensors are on rank 0. Collective.
    """
    snapshot = None
    if parallel.is_main:
        found = choose_start(out, config.resume, checkpoints)
        metrics = out / METRICS
        if found is None:
            metrics.unlink(missing_ok=True)
        else:
            path, snapshot = found
            changed = refuse_another_run(path, snapshot.identity, own)
            refuse_misfit(path, snapshot.weights, head)
            tell_changes(path, snapshot.progress, changed)
            before = path.resolve().parents[1] / METRICS
            if before.exists() and before != metrics.resolve():  # in another out: its past as well
                shutil.copyfile(before, metrics)
            ended = snapshot.progress.fraction(config) >= 1
            again = ended or evaluates_again(snapshot.progress, config)
            cut_lines(metrics, snapshot.progress.step, heldout=again)
        (out / SUMMARY).unlink(missing_ok=True)
    return share(snapshot, parallel)


def choose_start(out: Path, resume: str, checkpoints: Checkpoints) -> tuple[Path, Snapshot] | None:
    """Return the checkpoint that a run goes on from and what it holds; None starts a new run.

    Raises ValueError for an `out` that must not be written to, FileNotFoundError for a path that
    is not there.
    """
    if resume == "never":
        refuse_occupied(out, checkpoints)
        return None
    if resume == "auto":
        found = checkpoints.read_newest()
        if found is None and checkpoints.steps():
            raise ValueError(
                f"{checkpoints.directory}: none of its training checkpoints can be read (see the "
                "warnings); restore one, or choose another out"
            )
        if found is None:
            refuse_occupied(out, checkpoints)
        return found
    path = given_checkpoint(resume)
    if path.resolve().parent == checkpoints.directory.resolve():
        _refuse_later(path, checkpoints)
    else:
        refuse_occupied(out, checkpoints)
    return path, read_snapshot(path)


def given_checkpoint(resume: str) -> Path:
    """Return the training checkpoint that train.resume names.

    Raises FileNotFoundError where it is not there.
    """
    path = Path(resume)
    if not path.is_dir():
        raise FileNotFoundError(
            f"train.resume={resume}: no such training checkpoint; use auto, never, or a directory "
            "such as OUT/checkpoints/step-00000100"
        )
    return path


def refuse_occupied(out: Path, checkpoints: Checkpoints) -> None:
    """Raise ValueError when `out` holds the head or training checkpoints of an earlier run."""
    if checkpoints.newest() is not None:
        raise ValueError(
            f"out={out}: holds training checkpoints already; go on with train.resume=auto, or "
            "choose another directory"
        )
    if (out / "head").exists():
        raise ValueError(f"out={out}: holds a head already; choose another directory")


def _refuse_later(path: Path, checkpoints: Checkpoints) -> None:
    newest = checkpoints.newest()
    if newest is not None and newest.name > path.name:
        raise ValueError(
            f"train.resume={path}: {newest} is later; remove it to go back, or go on in another out"
        )


def refuse_misfit(path: Path, weights: Mapping[str, Tensor], head: nn.Module) -> None:
    """Raise ValueError naming tensors of a checkpoint that are not those of the head."""
    want = head.state_dict()
    for name in sorted(want.keys() | weights.keys()):
        shapes = [tuple(t[name].shape) if name in t else "nothing" for t in (weights, want)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"train.resume: {path} holds {shapes[0]} for {name}, this head {shapes[1]}; use "
                "the head options of that run"
            )


def share(snapshot: Snapshot | None, parallel: Parallel) -> Snapshot | None:
    """Give every rank the snapshot of rank 0; its tensors stay there."""
    light = snapshot and replace(snapshot, weights={}, optimizer={}, ema={})
    light = parallel.broadcast(light)
    return snapshot if parallel.is_main else light


def take_up(
    snapshot: Snapshot,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    parallel: Parallel,
    seed: int,
) -> None:
    """Put weights, moments and random states where they were; every rank calls it.

    With another number of ranks, or on another kind of device, random states are derived anew from
    (seed, step, rank): no rank may repeat what another one drew.
    """
    parallel.load_weights(model, snapshot.weights)
    parallel.load_optimizer_state(model, optimizer, snapshot.optimizer)
    ranks, device = len(snapshot.random), snapshot.identity["device"]
    if (ranks, device) == (parallel.world, parallel.device.type):
        restore_random(snapshot.random[parallel.rank], generator)
    else:
        derive_random(seed, snapshot.progress.step, parallel.rank, generator)


def evaluates_again(progress: Progress, config: TrainConfig) -> bool:
    """Tell whether a run that goes on makes the evaluation of its last step.

    A checkpoint is saved before the evaluation of its step: a kill between them swallowed that.
    """
    due = config.eval_every and progress.step > 0 and progress.step % config.eval_every == 0
    return bool(due) and progress.evaluated < progress.step


def cut_lines(path: Path, step: int, *, heldout: bool) -> None:
    """Drop the lines of metrics.jsonl that the run will write again: none may stand there twice.

    Those are the lines after `step`, and with `heldout` the held-out figures of `step`.
    """
    if not path.exists():
        return
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8") as kept:
        for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                line = json.loads(text)
            except json.JSONDecodeError:  # a kill cut it: it was the last
                break
            measured = any(name.startswith("heldout/") for name in line)
            if line["step"] < step or (line["step"] == step and not (heldout and measured)):
                kept.write(text)
