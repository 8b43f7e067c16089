"""What a run tells of itself in numbers: speed, use of the device, time by stage, memory, alpha.

Everything comes from sums over all ranks, divided at the end. K draft depths.
"""

import resource
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headstart.heads.base import FeatureBatch
from headstart.heads.parts import TargetParts
from headstart.train.clock import STAGES
from headstart.train.flops import StepFlops
from headstart.train.parallel import Parallel
from headstart.train.progress import Progress

MetricSums = dict[str, tuple[Tensor, Tensor]]
"""Metric -> (numerators [K], counts [K])."""


@dataclass
class Meter:
    """Speeds since the last figures and over the whole run; made at the start of a run."""

    flops: StepFlops | None = None
    """Of training; None where they are not known, as is the peak."""
    peak: float | None = None
    """FLOPs a second of all devices together."""
    _last: Progress = field(default_factory=Progress)

    def start(self, progress: Progress) -> None:
        """Take what a resumed run did before as told."""
        self._last = _copy(progress)

    def figures(self, progress: Progress) -> dict[str, float]:
        """Return speeds and shares of time since the last call, and speeds over the run.

        train/mfu is left out where the peak or the FLOPs are not known.
        """
        since, self._last = _difference(progress, self._last), _copy(progress)
        seconds, whole = max(since.seconds, 1e-9), max(progress.seconds, 1e-9)
        figures = {
            "train/tokens_per_s": since.tokens / seconds,
            "train/supervised_per_s": since.supervised_tokens / seconds,
            "train/run_tokens_per_s": progress.tokens / whole,
            "train/run_supervised_per_s": progress.supervised_tokens / whole,
        }
        if (mfu := self.mfu(since)) is not None:
            figures["train/mfu"] = mfu
        return figures | {
            f"time/{stage}": since.by_stage.get(stage, 0.0) / seconds for stage in STAGES
        }

    def mfu(self, progress: Progress) -> float | None:
        """Return the fraction of the peak that a stretch of training reached, if it is known."""
        if self.flops is None or self.peak is None:
            return None
        done = self.flops.of(progress.tokens, progress.supervised_tokens)
        return done / max(progress.seconds, 1e-9) / self.peak

    def mfu_text(self, progress: Progress) -> str:
        """Return the same for people: - where it is not known."""
        mfu = self.mfu(progress)
        return "-" if mfu is None else f"{mfu:.1%}"

    def speed(self, progress: Progress) -> float:
        """Return tokens a second over the run."""
        return progress.tokens / max(progress.seconds, 1e-9)


def _copy(progress: Progress) -> Progress:
    return Progress(
        tokens=progress.tokens,
        supervised_tokens=progress.supervised_tokens,
        seconds=progress.seconds,
        by_stage=dict(progress.by_stage),
    )


def _difference(now: Progress, before: Progress) -> Progress:
    return Progress(
        tokens=now.tokens - before.tokens,
        supervised_tokens=now.supervised_tokens - before.supervised_tokens,
        seconds=now.seconds - before.seconds,
        by_stage={s: t - before.by_stage.get(s, 0.0) for s, t in now.by_stage.items()},
    )


def time_shares(progress: Progress) -> str:
    """Return where the seconds of training went, as one line for people."""
    whole = max(progress.seconds, 1e-9)
    return ", ".join(f"{stage} {t / whole:.1%}" for stage, t in progress.by_stage.items())


def peak_memory(parallel: Parallel) -> dict[str, float]:
    """Return the peak memory of the rank that had most, in 10^9 bytes; collective.

    On a GPU what tensors took of it, on a CPU the whole process.
    """
    if parallel.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(parallel.device)
    else:
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    by_rank = torch.zeros(parallel.world, dtype=torch.float64, device=parallel.device)
    by_rank[parallel.rank] = peak / 1e9
    return {"memory/peak_gb": parallel.sum(by_rank).max().item()}


@torch.no_grad()
def teacher_forced(
    model: nn.Module, batches: Sequence[FeatureBatch], parts: TargetParts, parallel: Parallel
) -> dict[str, float]:
    """Return train/ metrics by depth over all ranks' batches, before they are learnt; collective.

    In eval mode, without noise: the same figures as held-out ones, positions outside the draft
    vocabulary included. The run's chances are not touched.
    """
    sums: MetricSums = {}
    model.eval()
    for batch in batches:
        model(batch, parts, None, parallel.bare(model).denominators(batch))
        add_metrics(sums, parallel.metrics)
    model.train()
    return metric_figures(sum_over_ranks(sums, parallel), "train")


def add_metrics(total: MetricSums, more: MetricSums) -> None:
    """Add metric sums by name to those of `total`, in place."""
    for name, (value, count) in more.items():
        old = total.get(name, (0, 0))
        total[name] = (old[0] + value, old[1] + count)


def sum_over_ranks(sums: MetricSums, parallel: Parallel) -> MetricSums:
    """Return metric sums added up over all ranks, on the CPU; collective.

    A rank whose rows teach nothing has none, and takes part all the same.
    """
    total: MetricSums = {}
    for own in parallel.gather({n: (v.cpu(), c.cpu()) for n, (v, c) in sums.items()}):
        add_metrics(total, own)
    return total


def metric_figures(sums: MetricSums, prefix: str) -> dict[str, float]:
    """Return each metric by depth, and tau of a greedy chain as teacher forcing predicts it.

    tau_predicted = 1 + sum over d of joint_agreement[d]: one drafted token for every depth trained.
    """
    figures = {}
    for name, (value, count) in sums.items():
        for depth, figure in enumerate((value / count.clamp(min=1)).tolist()):
            figures[f"{prefix}/{name}[{depth}]"] = figure
    if "joint_agreement" in sums:
        joint, count = sums["joint_agreement"]
        figures[f"{prefix}/tau_predicted"] = 1 + (joint / count.clamp(min=1)).sum().item()
    return figures
