"""The training loop: batches, one visible step, evaluation, checkpoints; the same on every rank."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from headstart.data.features import FeatureSource
from headstart.heads.base import DraftHead
from headstart.train.checkpoint import Snapshot
from headstart.train.config import TrainConfig, rate
from headstart.train.feeding import loaded_steps
from headstart.train.parallel import Parallel
from headstart.train.progress import Progress
from headstart.train.randomness import random_state
from headstart.train.resume import evaluates_again, take_up
from headstart.train.step import train_step
from headstart.train.stopping import Stop
from headstart.train.tracking import Tracker

log = logging.getLogger(__name__)
RANK_SEEDS = 1_000_003  # apart from each other, so that no run's rank draws as another run's does


@dataclass
class Hooks:
    """What the loop calls out to on rank 0, with the whole weights, fp32 on the CPU."""

    evaluate: Callable[[dict[str, Tensor]], dict[str, float]]
    """Return figures."""
    save: Callable[[dict[str, Tensor], Progress], None]
    """Write the head."""
    keep: Callable[[Snapshot], None] | None = None
    """Write a training checkpoint; None: nobody will go on with this run."""


def train_head(
    head: DraftHead,
    source: FeatureSource,
    config: TrainConfig,
    *,
    parallel: Parallel,
    hooks: Hooks,
    tracker: Tracker,
    resume: Snapshot | None = None,
) -> Progress:
    """Train until the budget is used, from the start or from where `resume` was taken.

    Ctrl-C and SIGTERM save after a step and raise KeyboardInterrupt. Raises ValueError when no row
    of the source has a supervised token, and for a loss that is not finite (naming the step and its
    rows).
    """
    model, optimizer = parallel.prepare(head, lambda bare: make_optimizer(bare, config))
    seed = config.seed + RANK_SEEDS * parallel.rank
    generator = torch.Generator(parallel.device).manual_seed(seed)
    progress = Progress()
    if resume is not None:
        take_up(resume, model, optimizer, generator, parallel, config.seed)
        progress = resume.progress
    steps = loaded_steps(source, config, parallel, progress)

    def save() -> None:
        _save(model, optimizer, generator, hooks, progress, parallel)

    model.train()
    with Stop(parallel) as stop, closing(steps), _bar(parallel) as bar:
        if evaluates_again(progress, config):
            _evaluate(model, hooks, progress, tracker, parallel)
        while progress.fraction(config) < 1:
            start = time.perf_counter()
            (epoch, window), batches = next(steps)
            batches = [batch.to(parallel.device) for batch in batches]
            loaded, lr = time.perf_counter(), rate(progress.fraction(config, 0.5), config)
            loss, norm = train_step(
                model,
                batches,
                source.parts,
                optimizer,
                parallel,
                lr=lr,
                clip=config.clip,
                generator=generator,
            )
            if not math.isfinite(loss) or not math.isfinite(norm):
                rows = [int(i) for batch in batches for i in batch.row_ids_B]
                raise ValueError(
                    f"step {progress.step + 1}: loss {loss}, gradient norm {norm} (rows {rows}); "
                    "lower train.lr"
                )
            counted = [b for b, micro in zip(batches, window, strict=True) if not micro.filler]
            seconds = {"data": loaded - start, "head": time.perf_counter() - loaded}
            progress.count(epoch, counted, seconds, parallel)
            if parallel.is_main:
                _report(progress, config, loss, norm, lr, tracker, bar)
            if stop.asked():
                log.warning("interrupted at step %d: saving", progress.step)
                save()
                raise stop.error()
            if config.save_every and progress.step % config.save_every == 0:
                save()
            if config.eval_every and progress.step % config.eval_every == 0:
                _evaluate(model, hooks, progress, tracker, parallel)
        if progress.supervised_tokens == 0:
            raise ValueError("rows: no supervised token in any of them; look at their loss_mask")
        # Saved first: an evaluation that fails must not take the trained head with it.
        save()
        _evaluate(model, hooks, progress, tracker, parallel)
    return progress


def make_optimizer(head: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a head's parameters, its rate still to be set in every step."""
    return torch.optim.AdamW(
        head.parameters(),
        lr=config.lr,
        betas=tuple(config.betas),
        weight_decay=config.weight_decay,
        fused=True,  # one pass, no temporaries as large as a weight
    )


def _bar(parallel: Parallel) -> tqdm:
    return tqdm(
        total=1.0,
        desc="train",
        bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
        disable=not parallel.is_main,
    )


def _report(
    progress: Progress,
    config: TrainConfig,
    loss: float,
    norm: float,
    lr: float,
    tracker: Tracker,
    bar: tqdm,
) -> None:
    speed = progress.tokens / max(progress.seconds, 1e-9)
    bar.n = progress.fraction(config)
    bar.set_postfix_str(
        f"step {progress.step}, epoch {progress.epoch}, loss {loss:.3f}, {speed:.0f} tokens/s"
    )
    if progress.step % config.log_every == 0:
        figures = {"train/loss": loss, "train/gradient_norm": norm, "train/tokens_per_s": speed}
        _track(tracker, progress, figures | {"train/lr": lr})


def _save(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    hooks: Hooks,
    progress: Progress,
    parallel: Parallel,
) -> None:
    weights = parallel.weights(model)
    if hooks.keep is not None:  # first: no head is ahead of what a run can go on from
        moments = parallel.optimizer_state(model, optimizer)
        random = parallel.gather(random_state(generator))
        if parallel.is_main:
            hooks.keep(Snapshot(progress, weights, moments, random))
    if parallel.is_main:
        hooks.save(weights, progress)
    parallel.barrier()


def _evaluate(
    model: nn.Module, hooks: Hooks, progress: Progress, tracker: Tracker, parallel: Parallel
) -> None:
    weights = parallel.weights(model)
    figures = hooks.evaluate(weights) if parallel.is_main else {}
    parallel.barrier()
    progress.evaluated = progress.step
    if figures:
        shown = ", ".join(f"{name.split('/')[-1]} {value:.3f}" for name, value in figures.items())
        log.info("step %d: %s", progress.step, shown)
        _track(tracker, progress, figures)


def _track(tracker: Tracker, progress: Progress, figures: dict[str, Any]) -> None:
    counted = {"tokens": progress.tokens, "seconds": round(progress.seconds, 3)}
    tracker.log(progress.step, counted | figures)
