"""Paired bootstrap intervals of the figures: prompts are drawn with replacement, rounds never are.

Shape letters here: M prompts, K draft depths, R resamples.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from headstart.eval.metrics import FIGURES, PromptSums, pool

Interval = list[float | list[float] | None] | None
"""[low, high], one such pair a depth, or null where no resample defines the figure."""

MIN_RESAMPLES = 2_000


def resampled(
    sums: Sequence[PromptSums],
    statistics: Sequence[str],
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Return each statistic on `resamples` draws of the prompts with replacement, as [R] or [R, K].

    Every statistic and both arms of a draw use the same prompts. Prompts, not rounds, are drawn:
    the rounds of one prompt are correlated. Raises ValueError below 2,000 resamples.
    """
    if resamples < MIN_RESAMPLES:
        raise ValueError(f"resamples={resamples}: an interval needs at least {MIN_RESAMPLES}")
    parts: dict[str, list[np.ndarray]] = {name: [] for name in statistics}
    for weights_RM in _draw_counts(len(sums), resamples, seed):
        pooled = pool(sums, weights_RM)
        for name in statistics:
            parts[name].append(FIGURES[name].formula(pooled))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _draw_counts(prompts: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield how often each prompt was drawn, [R, M], a thousand resamples at a time."""
    generator = np.random.default_rng(seed)
    for start in range(0, resamples, 1000):
        rows = min(1000, resamples - start)
        drawn_RM = generator.integers(prompts, size=(rows, prompts))
        flat = (drawn_RM + prompts * np.arange(rows)[:, None]).ravel()
        counts = np.bincount(flat, minlength=rows * prompts)
        yield counts.reshape(rows, prompts).astype(np.float64)


def bootstrap(
    sums: Sequence[PromptSums],
    statistics: Sequence[str],
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return the paired 95 % percentile interval of each statistic over prompts.

    Resamples in which a figure is undefined (a depth nobody tried) are left out of its interval.
    """
    draws = resampled(sums, statistics, resamples=resamples, seed=seed)
    return {name: _interval(values) for name, values in draws.items()}


def bootstrap_difference(
    sums_a: Sequence[PromptSums],
    sums_b: Sequence[PromptSums],
    statistics: Sequence[str],
    *,
    resamples: int = 10_000,
    seed: int = 0,
) -> dict[str, Interval]:
    """Return the 95 % interval of a minus b for two heads on the same prompts, drawn together.

    Statistics by depth need drafts of one depth. Raises ValueError when the prompts differ.
    """
    for one, other in zip(sums_a, sums_b, strict=False):
        if one.prompt_id != other.prompt_id:
            raise ValueError(
                f"prompt {one.prompt_id!r} of a stands beside {other.prompt_id!r} of b; "
                "compare two heads on the same prompts in the same order"
            )
    if len(sums_a) != len(sums_b):
        raise ValueError(f"a has {len(sums_a)} prompts, b has {len(sums_b)}; compare the same ones")
    a = resampled(sums_a, statistics, resamples=resamples, seed=seed)
    b = resampled(sums_b, statistics, resamples=resamples, seed=seed)
    return {name: _interval(a[name] - b[name]) for name in statistics}


def _interval(values: np.ndarray) -> Interval:
    if values.ndim == 2:
        return [_interval(column) for column in values.T]
    defined = values[np.isfinite(values)]
    if not len(defined):
        return None
    return [float(edge) for edge in np.percentile(defined, [2.5, 97.5])]
