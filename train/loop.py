"""The training loop: batches, one visible step, evaluation, checkpoints; the same on every rank."""

import logging
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headstart.data.features import FeatureSource
from headstart.heads.base import DraftHead
from headstart.train.best import new_best
from headstart.train.checkpoint import Snapshot
from headstart.train.clock import StageClock
from headstart.train.config import TrainConfig, rate
from headstart.train.ema import Ema
from headstart.train.feeding import loaded_steps
from headstart.train.meters import Meter, teacher_forced
from headstart.train.optimizer import make_optimizer
from headstart.train.parallel import Parallel
from headstart.train.progress import Progress
from headstart.train.randomness import random_state
from headstart.train.report import Report
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
    save_best: Callable[[dict[str, Tensor], Progress], None] | None = None
    """Write the head of the best evaluation so far; None: nobody wants it."""


@dataclass
class Trainee:
    """A head in training: wrapped, with all that its next step depends on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    ema: Ema | None
    parallel: Parallel

    def served(self) -> dict[str, Tensor]:
        """Return the weights that are evaluated and saved: the averages, if kept; collective."""
        with self.ema.applied(self.model) if self.ema else nullcontext():
            return self.parallel.weights(self.model)

    def snapshot(self, progress: Progress) -> Snapshot:
        """Return all that the run goes on from, on rank 0; collective."""
        return Snapshot(
            progress,
            self.parallel.weights(self.model),
            self.parallel.optimizer_state(self.model, self.optimizer),
            self.parallel.gather(random_state(self.generator)),
            self.served() if self.ema else {},
        )


def train_head(
    head: DraftHead,
    source: FeatureSource,
    config: TrainConfig,
    *,
    parallel: Parallel,
    hooks: Hooks,
    tracker: Tracker,
    resume: Snapshot | None = None,
    meter: Meter | None = None,
) -> Progress:
    """Train until the budget is used, from the start or from where `resume` was taken.

    Ctrl-C and SIGTERM save after a step and raise KeyboardInterrupt. Raises ValueError when no row
    of the source has a supervised token, and for a loss or gradient that is not finite (naming the
    step, the rank and its rows).
    """
    trainee, progress = _begin(head, config, parallel, resume)
    clock = StageClock(parallel.device)
    steps = loaded_steps(source, config, parallel, progress, clock)
    report = Report(config, parallel, tracker, meter or Meter(), progress)
    model = trainee.model

    def save() -> None:
        with clock("save"):
            _save(trainee, hooks, progress)

    def evaluate() -> None:
        with clock("evaluate"):
            _evaluate(trainee, hooks, progress, report)

    model.train()
    with Stop(parallel) as stop, closing(steps), report:
        if evaluates_again(progress, config):
            evaluate()
        while progress.fraction(config) < 1:
            with clock("data"):
                (epoch, window), batches = next(steps)
                batches = [batch.to(parallel.device) for batch in batches]
            number, lr = progress.step + 1, rate(progress.fraction(config, 0.5), config)
            figures = {}
            if report.due(number):
                figures = teacher_forced(model, batches, source.parts, parallel)
            loss, norm = train_step(
                model,
                batches,
                source.parts,
                trainee.optimizer,
                parallel,
                lr=lr,
                clip=config.clip,
                generator=trainee.generator,
                clock=clock,
                number=number,
            )
            if trainee.ema is not None:
                trainee.ema.update(model, number)
            counted = [b for b, micro in zip(batches, window, strict=True) if not micro.filler]
            progress.count(epoch, counted, clock.read(), parallel)
            figures |= {"train/loss": loss, "train/gradient_norm": norm, "train/lr": lr}
            report.step(progress, figures)
            if stop.asked():
                log.warning("interrupted at step %d: saving", progress.step)
                save()
                raise stop.error()
            if config.save_every and progress.step % config.save_every == 0:
                save()
            if config.eval_every and progress.step % config.eval_every == 0:
                evaluate()
        if progress.supervised_tokens == 0:
            raise ValueError("rows: no supervised token in any of them; look at their loss_mask")
        # Saved first: an evaluation that fails must not take the trained head with it.
        save()
        evaluate()
        report.end(progress)
    return progress


def _begin(
    head: DraftHead, config: TrainConfig, parallel: Parallel, resume: Snapshot | None
) -> tuple[Trainee, Progress]:
    """Wrap a head for training, afresh or as it was."""
    model, optimizer = parallel.prepare(head, lambda bare: make_optimizer(bare, config))
    seed = config.seed + RANK_SEEDS * parallel.rank
    generator = torch.Generator(parallel.device).manual_seed(seed)
    ema = None if config.ema is None else Ema(model, config.ema)
    if resume is None:
        return Trainee(model, optimizer, generator, ema, parallel), Progress()
    if ema is not None:
        parallel.load_weights(model, resume.ema)
        ema.take(model)
    take_up(resume, model, optimizer, generator, parallel, config.seed)
    return Trainee(model, optimizer, generator, ema, parallel), resume.progress


def _save(trainee: Trainee, hooks: Hooks, progress: Progress) -> None:
    parallel = trainee.parallel
    if hooks.keep is not None:  # first: no head is ahead of what a run can go on from
        snapshot = trainee.snapshot(progress)
        if parallel.is_main:
            hooks.keep(snapshot)
    weights = trainee.served()
    if parallel.is_main:
        hooks.save(weights, progress)
    parallel.barrier()


def _evaluate(trainee: Trainee, hooks: Hooks, progress: Progress, report: Report) -> None:
    weights, parallel = trainee.served(), trainee.parallel
    figures = hooks.evaluate(weights) if parallel.is_main else {}
    best = new_best(progress.best, figures, report.config.best_metric, progress.step)
    best = parallel.broadcast(best)
    if best != progress.best and hooks.save_best is not None and parallel.is_main:
        hooks.save_best(weights, progress)
    progress.best, progress.evaluated = best, progress.step
    parallel.barrier()
    report.evaluation(progress, figures)
