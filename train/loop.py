"""The training loop: batches, one visible step, evaluation, checkpoints.

The loss of a step is a sum over all its micro-batches divided by the count of supervised tokens in
all of them: never a mean of means. The last window of an epoch may be shorter and is divided by its
own count.
"""

import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from headstart.data.batching import batches_forever
from headstart.data.features import FeatureSource
from headstart.data.prefetch import made_ahead
from headstart.heads.base import DraftHead, FeatureBatch
from headstart.heads.parts import TargetParts
from headstart.train.config import TrainConfig, rate

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run is; sums over everything seen, repeats included."""

    step: int = 0
    epoch: int = 0
    rows: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    seconds: float = 0.0
    """Training only."""
    by_stage: dict[str, float] = field(default_factory=lambda: {"data": 0.0, "head": 0.0})

    def fraction(self, config: TrainConfig, ahead: float = 0.0) -> float:
        """Return how much of the budget is used, in [0, 1]: the larger of steps and seconds.

        `ahead` counts steps not taken yet: half of the coming one sets its learning rate.
        """
        parts = [0.0]
        if config.max_steps is not None:
            parts.append((self.step + ahead) / config.max_steps)
        if config.max_seconds is not None:
            parts.append(self.seconds / config.max_seconds)
        return min(1.0, max(parts))


@dataclass
class Hooks:
    """What the loop calls out to: evaluation returns figures, save writes a checkpoint."""

    evaluate: Callable[[DraftHead], dict[str, float]]
    save: Callable[[DraftHead, Progress], None]


def train_head(
    head: DraftHead,
    source: FeatureSource,
    config: TrainConfig,
    *,
    accelerator: Accelerator,
    hooks: Hooks,
    metrics_path: Path,
) -> Progress:
    """Train until the budget is used; Ctrl-C saves a usable checkpoint and goes on up.

    Raises ValueError when no row of the source has a supervised token, and for a loss that is not
    finite (naming the step and its rows).
    """
    parts = source.parts
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=config.lr, betas=tuple(config.betas), weight_decay=config.weight_decay
    )
    head, optimizer = accelerator.prepare(head, optimizer)
    generator = torch.Generator(accelerator.device).manual_seed(config.seed)
    progress = Progress()
    windows = made_ahead(_windows(source, config), partial(_batches, source), source.ahead)
    bar = tqdm(total=1.0, desc="train", bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}")
    head.train()
    try:
        while progress.fraction(config) < 1:
            start = time.perf_counter()
            (epoch, _), batches = next(windows)
            batches = [batch.to(accelerator.device) for batch in batches]
            loaded, lr = time.perf_counter(), rate(progress.fraction(config, 0.5), config)
            loss, norm = train_step(
                head,
                batches,
                parts,
                optimizer,
                accelerator,
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
            _count(progress, epoch, batches, start, loaded)
            _report(progress, config, loss, norm, lr, metrics_path, bar)
            if config.save_every and progress.step % config.save_every == 0:
                hooks.save(accelerator.unwrap_model(head), progress)
            if config.eval_every and progress.step % config.eval_every == 0:
                _evaluate(head, hooks, progress, metrics_path, accelerator)
        if progress.supervised_tokens == 0:
            raise ValueError("rows: no supervised token in any of them; look at their loss_mask")
        # Saved first: an evaluation that fails must not take the trained head with it.
        hooks.save(accelerator.unwrap_model(head), progress)
        _evaluate(head, hooks, progress, metrics_path, accelerator)
    except KeyboardInterrupt:
        log.warning("interrupted at step %d: saving", progress.step)
        hooks.save(accelerator.unwrap_model(head), progress)
        raise
    finally:
        windows.close()
        bar.close()
    return progress


def train_step(
    head: torch.nn.Module,
    batches: list[FeatureBatch],
    parts: TargetParts,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    *,
    lr: float,
    clip: float,
    generator: torch.Generator | None = None,
) -> tuple[float, float]:
    """Take one optimizer step over a window of micro-batches; return its loss and gradient norm.

    DDP averages gradients over ranks, so each rank's loss is multiplied by the number of ranks.
    """
    bare = accelerator.unwrap_model(head)
    denominators = _global_sums(accelerator, [bare.denominators(batch) for batch in batches])
    for group in optimizer.param_groups:
        group["lr"] = lr
    total = torch.zeros((), device=accelerator.device)
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with accelerator.autocast():
            sums = head(batch, parts, generator, denominators)
        loss = sums.total(denominators)
        total += loss.detach()
        if last:
            accelerator.backward(loss * accelerator.num_processes)
        else:
            with accelerator.no_sync(head):
                accelerator.backward(loss * accelerator.num_processes)
    norm = accelerator.clip_grad_norm_(head.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    total = accelerator.reduce(total, reduction="sum")
    return total.item(), float(norm)


@torch.no_grad()
def heldout_figures(
    head: DraftHead, source: FeatureSource, batch_rows: int, accelerator: Accelerator
) -> dict[str, float]:
    """Return the held-out loss and teacher-forced metrics by depth, over all rows of a source."""
    head.eval()
    numerators: dict[str, Tensor] = {}
    denominators: dict[str, Tensor] = {}
    metrics: dict[str, tuple[Tensor, Tensor]] = {}
    weights: dict[str, Tensor] = {}
    for start in range(0, len(source.lengths), batch_rows):
        rows = range(start, min(start + batch_rows, len(source.lengths)))
        batch = source.batch(list(rows)).to(accelerator.device)
        with accelerator.autocast():
            sums = head(batch, source.parts)
        _add(denominators, head.denominators(batch))
        _add(numerators, sums.numerators)
        weights = sums.weights
        for name, (value, count) in sums.metrics.items():
            old = metrics.get(name, (0, 0))
            metrics[name] = (old[0] + value, old[1] + count)
    terms = {name: numerators[name] / denominators[name].clamp(min=1) for name in numerators}
    figures = {"heldout/loss": sum((weights[n] * t).sum().item() for n, t in terms.items())}
    for name, (value, count) in metrics.items():
        for depth, figure in enumerate((value / count.clamp(min=1)).tolist()):
            figures[f"heldout/{name}[{depth}]"] = figure
    head.train()
    return figures


def _windows(source: FeatureSource, config: TrainConfig) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield (epoch, the micro-batches of one optimizer step); windows end with their epoch."""
    window: list[list[int]] = []
    for epoch, last, rows in batches_forever(source.lengths, config.batch_rows, seed=config.seed):
        window.append(rows)
        if last or len(window) == config.accumulation:
            yield epoch, window
            window = []


def _batches(source: FeatureSource, window: tuple[int, list[list[int]]]) -> list[FeatureBatch]:
    return [source.batch(rows) for rows in window[1]]


def _global_sums(accelerator: Accelerator, counts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for one in counts:
        _add(total, one)
    return {name: accelerator.reduce(value, reduction="sum") for name, value in total.items()}


def _add(total: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, value in more.items():
        total[name] = total[name] + value if name in total else value


def _count(
    progress: Progress, epoch: int, batches: list[FeatureBatch], start: float, loaded: float
) -> None:
    now = time.perf_counter()
    progress.step += 1
    progress.epoch = epoch
    for batch in batches:
        progress.rows += len(batch.tokens_BT)
        progress.tokens += int((batch.document_BT >= 0).sum())
        progress.supervised_tokens += int(batch.loss_mask_BT.sum())
    progress.seconds += now - start
    progress.by_stage["data"] += loaded - start
    progress.by_stage["head"] += now - loaded


def _report(
    progress: Progress,
    config: TrainConfig,
    loss: float,
    norm: float,
    lr: float,
    path: Path,
    bar: tqdm,
) -> None:
    speed = progress.tokens / max(progress.seconds, 1e-9)
    bar.n = progress.fraction(config)
    bar.set_postfix_str(
        f"step {progress.step}, epoch {progress.epoch}, loss {loss:.3f}, {speed:.0f} tokens/s"
    )
    if progress.step % config.log_every == 0:
        figures = {"train/loss": loss, "train/gradient_norm": norm, "train/tokens_per_s": speed}
        _write(path, progress, figures | {"train/lr": lr})


def _evaluate(
    head: torch.nn.Module,
    hooks: Hooks,
    progress: Progress,
    path: Path,
    accelerator: Accelerator,
) -> None:
    figures = hooks.evaluate(accelerator.unwrap_model(head))
    if not figures:
        return
    shown = ", ".join(f"{name.split('/')[-1]} {value:.3f}" for name, value in figures.items())
    log.info("step %d: %s", progress.step, shown)
    _write(path, progress, figures)


def _write(path: Path, progress: Progress, figures: dict[str, Any]) -> None:
    line = {"step": progress.step, "tokens": progress.tokens, "seconds": round(progress.seconds, 3)}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line | figures) + "\n")
