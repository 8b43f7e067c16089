"""What drafting is worth: running estimates of acceptance and of a round's time, and their optimum.

A round that drafts k levels emits E(k) tokens a row and takes t(k) seconds, so the best depth is
the k of most E(k) / t(k). With i.i.d. acceptance a and t(k) = 1 + k c that is the rule to extend a
draft from k to k + 1 exactly where a^(k+1) > c E(k) / (1 + k c) (from arXiv 2211.17192, theorem
3.8). Depths count from 0, the first drafted token.
"""

import itertools
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np

from headstart.eval.engine.records import Round

PRIOR, PRIOR_WEIGHT = 0.7, 1.0
"""Acceptance assumed before anything was drafted, and the rows that this counts for."""
POOL_WEIGHT = 4.0
"""Rows that the acceptance of all depths counts for at each of them."""
REMEMBERED = 16.0
"""Rows that are not forgotten, however long nothing is drafted: the prior would draft again."""
SAMPLES, FIT_WEIGHT = 5, 2.0
"""Rounds of one shape whose median time counts, the newest ones; and those that the fit over all
shapes counts for beside them."""


def best_depth(
    survival_K: Sequence[float], seconds_K1: Sequence[float], *, slack: float = 0.0
) -> int:
    """Return the depth of most tokens a second, 0 to K; ties go to the shallowest.

    survival_K[d] is the share of rows that accept depth d and all before, seconds_K1[k] the time
    of a round that drafts k levels, in any unit. Rates of drafts within `slack` of the best are
    ties: where estimates are noisy the largest likely errs, and a shallow error costs less.
    """
    tokens_K1 = itertools.accumulate(survival_K, initial=1.0)
    rates = [tokens / seconds for tokens, seconds in zip(tokens_K1, seconds_K1, strict=True)]
    enough = (1 - slack) * max(rates)
    return next(k for k, rate in enumerate(rates) if rate >= (enough if k else max(rates)))


class Acceptance:
    """Share of rows that accept each depth among those that came so far; older rounds fade.

    They fade with every round, plain ones too, until few are left: after a while without drafts
    some new ones decide.
    """

    def __init__(self, memory: int) -> None:
        self.keep = 1 - 1 / memory
        self.came_K: list[float] = []
        self.passed_K: list[float] = []

    def add(self, asked: int, rounds: Sequence[Round]) -> None:
        """Count one round of several rows, drafted to the depth asked for.

        What counts is what was gained: a depth is not accepted that the drafter had nothing for,
        that lies behind a stop token, or that a row near its end had no room for.
        """
        grown = max(0, asked - len(self.came_K))
        keep = self.keep if sum(self.came_K) > REMEMBERED else 1.0
        self.came_K = [keep * n for n in self.came_K] + [0.0] * grown
        self.passed_K = [keep * n for n in self.passed_K] + [0.0] * grown
        for one in rounds:
            for depth in range(min(asked, one.accepted + 1)):
                self.came_K[depth] += 1
                self.passed_K[depth] += one.accepted > depth

    def survival(self, deepest: int) -> list[float]:
        """Return the estimated share of rows that accept each depth and all before it.

        A depth of which little is known is taken to be accepted as often as the others.
        """
        pooled = (sum(self.passed_K) + PRIOR * PRIOR_WEIGHT) / (sum(self.came_K) + PRIOR_WEIGHT)
        unknown = [0.0] * max(0, deepest - len(self.came_K))
        counts = zip([*self.passed_K, *unknown], [*self.came_K, *unknown], strict=True)
        shares = ((p + pooled * POOL_WEIGHT) / (n + POOL_WEIGHT) for p, n in counts)
        return list(itertools.accumulate(shares, lambda a, b: a * b))[:deepest]


class RoundSeconds:
    """Seconds of a round by its shape (rows, drafted depth): measured, or fitted if tried little.

    The first round of a shape may compile or allocate: it counts only until there is another.
    """

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], deque[float]] = {}
        self._median: dict[tuple[int, int], float] = {}
        self._tried: dict[tuple[int, int], int] = {}
        self._weights: np.ndarray | None = None
        self._rounds = 0

    def add(self, rows: int, depth: int, seconds: float) -> None:
        """Count a round."""
        shape = (rows, depth)
        if shape in self._tried:
            newest = self._newest.setdefault(shape, deque(maxlen=SAMPLES))
            newest.append(seconds)
            self._median[shape] = statistics.median(newest)
        else:
            self._median[shape] = seconds
        self._rounds += 1
        self._tried[shape] = self._rounds
        self._weights = None

    def last(self, rows: int, depth: int) -> int:
        """Return when such a round was last tried, as the number of the round; 0 for never."""
        return self._tried.get((rows, depth), 0)

    def of(self, rows: int, depth: int) -> float:
        """Return the estimated seconds: the median, drawn to the fit where few rounds made it."""
        if self._weights is None:
            # All shapes: without the few plain rounds there would be no telling what drafts cost.
            self._weights = fit_seconds(self._median)
        least = 0.5 * min(self._median.values())
        fitted = max(float(_terms([(rows, depth)])[0] @ self._weights), least)
        count = len(self._newest.get((rows, depth), ()))
        measured = self._median.get((rows, depth), fitted)
        return (count * measured + FIT_WEIGHT * fitted) / (count + FIT_WEIGHT)


def fit_seconds(measured: dict[tuple[int, int], float]) -> np.ndarray:
    """Return the weights of `_terms` by least squares over the seconds of shapes (rows, depth).

    Linear in rows, depth, rows x depth and whether anything is drafted: a pass over n tokens costs
    a + b n, a level of drafting c + d rows. Relative errors count.
    """
    design = _terms(list(measured))
    seconds = np.array(list(measured.values()))
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1.0
    weighted = design / scale / seconds[:, None]
    return np.linalg.lstsq(weighted, np.ones(len(seconds)), rcond=1e-6)[0] / scale


def _terms(shapes: Sequence[tuple[int, int]]) -> np.ndarray:
    rows, depth = np.array(shapes, dtype=np.float64).T
    return np.stack([np.ones_like(rows), rows, rows * depth, depth, depth > 0], axis=1)
