"""The held-out loss and metrics of a head: sums over all rows, divided at the end."""

import torch
from torch import Tensor

from headstart.data.features import FeatureSource
from headstart.heads.base import DraftHead
from headstart.train.meters import MetricSums, add_metrics, metric_figures
from headstart.train.parallel import Parallel
from headstart.train.step import add


@torch.no_grad()
def heldout_figures(
    head: DraftHead, source: FeatureSource, batch_rows: int, parallel: Parallel
) -> dict[str, float]:
    """Return the held-out loss and teacher-forced metrics by depth, over all rows of a source.

    The head is a bare one; this rank alone computes, and the head keeps its mode.
    """
    training = head.training
    head.eval()
    numerators: dict[str, Tensor] = {}
    denominators: dict[str, Tensor] = {}
    metrics: MetricSums = {}
    weights: dict[str, Tensor] = {}
    for start in range(0, len(source.lengths), batch_rows):
        rows = range(start, min(start + batch_rows, len(source.lengths)))
        batch = source.batch(list(rows)).to(parallel.device)
        with parallel.autocast():
            sums = head(batch, source.parts)
        add(denominators, head.denominators(batch))
        add(numerators, sums.numerators)
        weights = sums.weights
        add_metrics(metrics, sums.metrics)
    head.train(training)
    terms = {name: numerators[name] / denominators[name].clamp(min=1) for name in numerators}
    figures = {"heldout/loss": sum((weights[n] * t).sum().item() for n, t in terms.items())}
    return figures | metric_figures(metrics, "heldout")
