"""`make bench-step`: peak memory and speed of one EAGLE-3 training step, on the CPU and Linux.

Features, tokens and the target's rows are random, so no target is needed; the layer is shaped like
Qwen3-0.6B's, and the vocabulary is whole. Every arm runs in a process of its own, as its peak is
the process's. Beside ours there are the plain ways to do the same: all logits of all steps at once,
and attention over all keys of all steps under a dense mask. `head only` stops short of the loss.
Shapes: B rows, T tokens, H query heads, d head width, D width, V vocabulary, K steps, N selected
positions.
"""

import argparse
import ctypes
import math
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from headstart.heads.base import DraftHead, FeatureBatch, LossSums
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
from headstart.heads.losses import Selection, Teacher, select
from headstart.heads.parts import ReadOut, TargetParts
from headstart.heads.recurrent import at_students
from headstart.heads.target import TargetShape
from headstart.heads.ttt import Unroll
from headstart.train.backends import make_parallel
from headstart.train.config import PRECISIONS, ParallelConfig, TrainConfig
from headstart.train.optimizer import make_optimizer
from headstart.train.step import train_step

STEPS, LAYERS = 3, 28
ARMS = ("ours", "whole logits", "dense attention", "both", "head only")
SAME_LOSS = 1e-3


@dataclass(frozen=True)
class Sizes:
    """What a step is made of; rows are documents of `row_length` tokens."""

    tokens: int = 1024
    vocab: int = 151_936
    width: int = 1024
    row_length: int = 1024
    precision: str = "bf16"
    repeats: int = 3

    def __post_init__(self) -> None:
        if self.tokens % self.row_length:
            raise ValueError(
                f"--tokens {self.tokens}: expected a multiple of --row-length {self.row_length}"
            )
        if self.width % 128:
            raise ValueError(f"--width {self.width}: expected a multiple of 128")

    @property
    def shape(self) -> TargetShape:
        """The target's dimensions: those of Qwen3-0.6B at width 1024."""
        rope = {"rope_type": "default", "rope_theta": 1e6}
        D, heads, shared, d = self.width, self.width // 64, self.width // 128, 128
        return TargetShape(D, self.vocab, LAYERS, heads, shared, d, 3 * D, 1e-6, 40_960, rope)


@dataclass(frozen=True)
class Figures:
    """What one arm came to."""

    rise_bytes: int
    """Most memory in use during a step, over what stood before it."""
    seconds: float
    """Median of a step."""
    loss: float
    """Of the first step."""


class WholeLogits(Eagle3Head):
    """EAGLE-3 with its loss by plain autograd, over the logits of all positions and steps."""

    def forward(
        self,
        batch: FeatureBatch,
        parts: TargetParts,
        generator: torch.Generator | None = None,
        denominators: dict[str, Tensor] | None = None,
    ) -> LossSums:
        """Return the sums of the soft cross-entropy by step."""
        picked, student_NKD = _students(self, batch, parts)
        logits_NKV = parts.readout.post(self.lm_head(student_NKD)).float()
        with torch.no_grad():
            teacher_ND = Teacher.at(batch, picked).hidden_ND.to(student_NKD.dtype)
            law_NV = parts.readout(teacher_ND).float().softmax(-1)
        loss_NK = -(law_NV[:, None] * logits_NKV.log_softmax(-1)).sum(-1)
        return self._sums((loss_NK * picked.learned_NK).sum(0))

    def _sums(self, numerators_K: Tensor) -> LossSums:
        weights_K = self.step_weights(numerators_K.device)
        return LossSums({"ce_soft": numerators_K}, {"ce_soft": weights_K})


class HeadOnly(WholeLogits):
    """EAGLE-3 up to what it reads out, with a plain sum in place of the loss."""

    def forward(
        self,
        batch: FeatureBatch,
        parts: TargetParts,
        generator: torch.Generator | None = None,
        denominators: dict[str, Tensor] | None = None,
    ) -> LossSums:
        """Return sums of the normed outputs by step."""
        return self._sums(_students(self, batch, parts)[1].sum((0, 2)))


def _students(
    head: Eagle3Head, batch: FeatureBatch, parts: TargetParts
) -> tuple[Selection, Tensor]:
    """Return the supervised positions and the states [N, K, D] that are read out there."""
    outputs_BTKD = head.unroll(batch, parts, head._features(batch))
    picked = select(batch, STEPS, head.config, None)
    return picked, head.normed(at_students(outputs_BTKD, picked))


def dense_attend(
    self: Unroll, query: Tensor, key: Tensor, value: Tensor, view: Tensor, layer: int
) -> Tensor:
    """Do what Unroll.attend does, by one softmax over the keys of all steps under a dense mask."""
    keys, values = self._layers[layer]
    keys.append(key)
    values.append(value)
    B, H, M, d = query.shape
    own_MM = torch.zeros(M, M).masked_fill_(~torch.eye(M, dtype=torch.bool), -math.inf)
    mask = torch.cat((view, *[own_MM.expand(B, 1, M, M)] * (len(keys) - 1)), dim=-1)
    every_key, every_value = (
        torch.cat(list(x), dim=2).repeat_interleave(H // key.shape[1], dim=1)
        for x in (keys, values)
    )
    scores = (query @ every_key.transpose(-1, -2)).float() * d**-0.5 + mask
    return scores.softmax(-1).to(value.dtype) @ every_value


def make(arm: str, sizes: Sizes) -> tuple[DraftHead, FeatureBatch, TargetParts]:
    """Make an arm's head and its batch; every arm gets the same weights and features."""
    if arm not in ARMS:
        raise ValueError(f"--arms {arm}: expected some of {', '.join(ARMS)}")
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if sizes.precision == "bf16" else torch.float32
    D, B, T = sizes.width, sizes.tokens // sizes.row_length, sizes.row_length

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype).normal_(generator=generator)

    rows_VD = draw(sizes.vocab, D).mul_(D**-0.5)  # tied, as in Qwen3-0.6B
    parts = TargetParts(rows_VD, 1.0, ReadOut(rows_VD))
    kinds = {"whole logits": WholeLogits, "both": WholeLogits, "head only": HeadOnly}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = kinds.get(arm, Eagle3Head)(Eagle3Config(ttt_steps=STEPS), sizes.shape, None)
    head.initialise(parts)
    tokens_BT = torch.randint(sizes.vocab, (B, T), generator=generator)
    place_BT, zero_BT = torch.arange(T).expand(B, T), torch.zeros(B, T, dtype=torch.int64)
    batch = FeatureBatch(
        tokens_BT,
        torch.ones_like(zero_BT),
        place_BT,
        zero_BT,
        torch.arange(B),
        draw(B, T, D),
        zero_BT.float(),
        zero_BT,
        {s: draw(B, T, D) for s in head.aux_features},
    )
    return head.train(), batch, parts


def attention_of(arm: str) -> AbstractContextManager:
    """Return a context in which an arm's attention runs."""
    dense = arm in ("dense attention", "both")
    return patch.object(Unroll, "attend", dense_attend) if dense else nullcontext()


def measure(arm: str, sizes: Sizes) -> Figures:
    """Take one step and `repeats` timed ones after it; made for a process of its own."""
    head, batch, parts = make(arm, sizes)
    config = TrainConfig(precision=sizes.precision)
    parallel = make_parallel(ParallelConfig(), config, torch.device("cpu"))
    head, optimizer = parallel.prepare(head, lambda bare: make_optimizer(bare, config))
    _make_state(optimizer)
    before = _start_watching()
    seconds, losses = [], []
    with attention_of(arm):
        for _ in range(1 + sizes.repeats):
            start = time.perf_counter()
            loss, _ = train_step(
                head, [batch], parts, optimizer, parallel, lr=config.lr, clip=config.clip
            )
            seconds.append(time.perf_counter() - start)
            losses.append(loss)
    rise = _status("VmHWM") - before
    return Figures(rise, statistics.median(seconds[1:]), losses[0])


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the moments without a step: they stand before it, and are no part of its rise."""
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for weight in group["params"]:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _start_watching() -> int:
    """Give freed memory back, start the peak anew, and return the bytes in use."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    """Return a size of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def check_losses(figures: dict[str, Figures]) -> None:
    """Raise AssertionError when an arm that computes the loss has another value than the others."""
    losses = {arm: f.loss for arm, f in figures.items() if arm != "head only"}
    for arm, loss in losses.items():
        first, want = next(iter(losses.items()))
        assert math.isclose(loss, want, rel_tol=SAME_LOSS), f"{arm}: loss {loss}, {first}: {want}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; `python -m headstart.train.step_bench --help`."""
    arms, sizes = _parse(arguments)
    figures = {}
    for arm in arms:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            figures[arm] = fresh.submit(measure, arm, sizes).result()
        print(f"{arm}: {figures[arm]}", flush=True)
    check_losses(figures)
    Console().print(_table(figures, sizes))
    if {"ours", "head only"} <= figures.keys():
        added = figures["ours"].rise_bytes - figures["head only"].rise_bytes
        own = 4 * sizes.vocab * sizes.width
        print(
            f"the loss adds {added / 1e9:.2f} GB to the head's activations; "
            f"{own / 1e9:.2f} GB of it is the gradient of the head's own read-out"
        )


def _parse(arguments: Sequence[str] | None) -> tuple[list[str], Sizes]:
    defaults = Sizes()
    parser = argparse.ArgumentParser(prog="python -m headstart.train.step_bench")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument("--precision", default=defaults.precision, choices=list(PRECISIONS))
    for name in ("tokens", "vocab", "width", "row_length", "repeats"):
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=int, default=getattr(defaults, name))
    options = vars(parser.parse_args(arguments))
    return options.pop("arms"), Sizes(**options)


def _table(figures: dict[str, Figures], sizes: Sizes) -> Table:
    rows = sizes.tokens // sizes.row_length
    table = Table(
        title=f"EAGLE-3, {STEPS} steps, {rows} x {sizes.row_length} tokens, V {sizes.vocab}, "
        f"D {sizes.width}, {sizes.precision}, {torch.get_num_threads()} threads"
    )
    for column in ("arm", "tokens", "peak rise, GB", "s/step", "tokens/s", "loss"):
        table.add_column(column)
    for arm, f in figures.items():
        loss = "-" if arm == "head only" else f"{f.loss:.4f}"
        speed = sizes.tokens / f.seconds
        rise = f"{f.rise_bytes / 1e9:.2f}"
        table.add_row(arm, str(sizes.tokens), rise, f"{f.seconds:.2f}", f"{speed:.0f}", loss)
    return table


if __name__ == "__main__":
    main()
