"""Which draft tree emits most tokens a second: the best paths, what trees accept, and what to take.

At every place of a text the target's own continuation is one path of ranks, so a tree accepts there
as many tokens as it holds nodes of that path from the root on. The trees of the best n paths, for
every n at once, are described by orders: when each node of the target's path was added.
Shapes: P places where a round may start, K draft depth, R ranks, N tree nodes (root included).
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.eval.acceptance import FAR, UNKNOWN, Acceptance
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.tree import Path
from headstart.eval.engine.tree_config import TreeConfig
from headstart.eval.step_time import StepTimes

Shares = Callable[[Path], Sequence[float]]
"""By rank, how often the candidates after a path continue the text as the target does."""


def differences(cumulative: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return accuracy by rank, [depth][rank], from top-1, top-2, .. accuracies."""
    return [
        [value - before for before, value in zip([0.0, *row], row, strict=False)]
        for row in cumulative
    ]


def independent(accuracies: Sequence[Sequence[float]]) -> Shares:
    """Return the shares of accuracies by depth and rank, whatever the path before.

    Raises ValueError for cumulative accuracies.
    """
    for depth, row in enumerate(accuracies):
        if min(row) < 0 or sum(row) > 1 + 1e-6:
            raise ValueError(
                f"accuracies of depth {depth} sum to {sum(row):.3f} with minimum {min(row):.3f}: "
                "need shares by rank; pass cumulative ones through differences()"
            )
    return lambda path: accuracies[len(path)]


class PathShares:
    """Shares counted where the target took the path, drawn to the marginals where that was rare.

    After a path taken n times the share of a rank is (count + prior * marginal) / (n + prior); the
    marginal of a depth is over all places, whatever the path before.
    """

    def __init__(self, ranks_PK: np.ndarray, max_rank: int, prior: float) -> None:
        self.prior, self.marginals = prior, marginals(ranks_PK, max_rank)
        self._taken: Counter[Path] = Counter()
        self._continued: Counter[Path] = Counter()
        for row in ranks_PK.tolist():
            path: Path = ()
            for rank in row:
                if rank == UNKNOWN:
                    break
                self._continued[path] += 1
                if rank >= max_rank:
                    break
                path = (*path, rank)
                self._taken[path] += 1

    def __call__(self, path: Path) -> list[float]:
        """Return the share of every rank after a path."""
        tried = self._continued[path] + self.prior
        return [
            (self._taken[(*path, rank)] + self.prior * share) / tried
            for rank, share in enumerate(self.marginals[len(path)])
        ]


def marginals(ranks_PK: np.ndarray, max_rank: int) -> list[list[float]]:
    """Return P(the rank-r candidate of depth d is the target's token), [depth][rank].

    Over the places with a known token at that depth; 0 where there is none.
    """
    known_K = (ranks_PK != UNKNOWN).sum(0).clip(min=1)
    return [
        [float((ranks_PK[:, depth] == rank).sum() / known_K[depth]) for rank in range(max_rank)]
        for depth in range(ranks_PK.shape[1])
    ]


def best_paths(shares: Shares, count: int, max_depth: int) -> list[Path]:
    """Return the `count` paths of highest value (root not counted), best first; fewer if no more.

    A node is worth the product of the shares along its path, so never more than its parent, and the
    most valuable nodes always are a tree: no tree of their number has a larger sum of values. Ties
    go to the shallower, then the lexicographically first (after Medusa, arXiv 2401.10774).
    """
    heap: list[tuple[float, int, Path]] = [(-1.0, 0, ())]
    chosen: list[Path] = []
    while heap and len(chosen) <= count:
        value, depth, path = heapq.heappop(heap)
        chosen.append(path)
        if depth < max_depth:
            for rank, share in enumerate(shares(path)):
                heapq.heappush(heap, (value * share, depth + 1, (*path, rank)))
    return chosen[1:]


def expected_accepted(paths: Sequence[Path], shares: Shares) -> float:
    """Return the drafted tokens that a tree gets accepted at an average place: its nodes' value."""
    return math.fsum(
        math.prod(shares(path[:depth])[rank] for depth, rank in enumerate(path)) for path in paths
    )


def orders(ranks_PK: np.ndarray, paths: Sequence[Path]) -> np.ndarray:
    """Return the index in `paths` of each node of the target's path, FAR from the first missing."""
    index = {path: i for i, path in enumerate(paths)}
    found_PK = np.full(ranks_PK.shape, FAR, dtype=np.int64)
    for place, row in enumerate(ranks_PK.tolist()):
        path: Path = ()
        for depth, rank in enumerate(row):
            path = (*path, rank)
            if path not in index:
                break
            found_PK[place, depth] = index[path]
    return found_PK


def replay(accepted_P: Sequence[int], lengths: Sequence[int]) -> float:
    """Return tau: tokens a round, bonus included, of rounds that accept what each place accepts.

    `lengths` are the places of each prompt: tokens of its answer after the first, which prefill
    gives. The last round of an answer is cut where the answer ends. nan without a round.
    """
    rounds, first = 0, 0
    for length in lengths:
        place = first
        first += length
        while place < first:
            place += accepted_P[place] + 1
            rounds += 1
    return first / rounds if rounds else math.nan


@dataclass(frozen=True)
class Option:
    """One draft shape with what it promises."""

    kind: str
    """chain, static or dynamic."""
    nodes: int
    """N, the root included."""
    levels: int
    """Depth of the deepest candidate."""
    tau: float
    """Tokens a round, bonus included, replayed over the texts acceptance was collected on."""
    seconds: float
    """Seconds of one round."""
    tokens_per_s: float
    """Of all rows of a batch together."""
    speedup: float
    """Over plain decoding."""
    choices: tuple[Path, ...] | None = None
    """Paths of a static tree."""
    top_k: int | None = None
    """Children of an expanded node, of a dynamic tree."""

    def tree(self, name: str) -> TreeConfig:
        """Return the shape as a `tree` option of this name."""
        if self.kind == "chain":
            return TreeConfig(name, depth=self.levels)
        if self.choices is not None:
            return TreeConfig(name, choices=[list(path) for path in sorted_paths(self.choices)])
        return TreeConfig(name, top_k=self.top_k, levels=self.levels, total=self.nodes)

    @property
    def same_shape(self) -> object:
        """Return what is equal for options that draft the same trees, whatever they cost."""
        shape = self.tree("shape").shape()
        return shape if isinstance(shape, DynamicShape) else shape.choices


def sorted_paths(paths: Sequence[Path]) -> list[Path]:
    """Return paths by length, then lexicographically: the order of a tree's nodes."""
    return sorted(paths, key=lambda path: (len(path), path))


@dataclass(frozen=True)
class Limits:
    """How far the search goes."""

    nodes: int
    """N of the largest tree."""
    depth: int
    ranks: int
    """R, candidates of a node that a static tree may hold."""
    top_k: tuple[int, ...]
    """Of dynamic trees; empty for heads that cannot draft them."""


def search(
    found: Acceptance, times: StepTimes, limits: Limits, *, prior: float, folds: int
) -> list[Option]:
    """Return every chain, best static tree by depth and size, and dynamic tree within the limits.

    A static tree is replayed at places that did not choose it: the prompts are parted into `folds`,
    and those of one fold see the trees chosen by the others. The tree itself is chosen by all.
    """
    price = _Price(found.lengths, times)
    options = [_of_shape(TreeConfig("chain", depth=d), found, price) for d in _chains(limits)]
    for depth in range(1, limits.depth + 1):
        options += _static_trees(found, price, depth, limits, prior, folds)
    for top_k in limits.top_k:
        options += _dynamic_trees(found, price, top_k, limits)
    return options


def best(options: Sequence[Option], kind: str | None = None) -> Option | None:
    """Return the fastest option (of one kind), ties to fewer nodes; None where there is none."""
    of_kind = [option for option in options if kind in (None, option.kind)]
    return max(of_kind, key=lambda option: (option.tokens_per_s, -option.nodes), default=None)


def foretell(tree: TreeConfig, found: Acceptance, times: StepTimes) -> Option:
    """Return what any one shape promises; it must lie within what was collected."""
    return _of_shape(tree, found, _Price(found.lengths, times))


@dataclass(frozen=True)
class _Price:
    """Turns what a shape accepts, and how long its round takes, into an option."""

    lengths: Sequence[int]
    times: StepTimes

    def option(
        self,
        kind: str,
        nodes: int,
        levels: int,
        accepted_P: np.ndarray,
        draft: float,
        **shape: object,
    ) -> Option:
        seconds = draft + self.times.after_draft(nodes)
        tau = replay(accepted_P.tolist(), self.lengths)
        speed, gain = self.times.batch * tau / seconds, tau * self.times.plain / seconds
        return Option(kind, nodes, levels, tau, seconds, speed, gain, **shape)


def _chains(limits: Limits) -> range:
    return range(1, min(limits.depth, limits.nodes - 1) + 1)


def _of_shape(tree: TreeConfig, found: Acceptance, price: _Price) -> Option:
    shape = tree.shape()
    if isinstance(shape, DynamicShape):
        orders_PK = found.dynamic_PLK[shape.top_k][:, shape.levels - 1]
        accepted_P = (orders_PK < shape.total - 1).sum(1)
        draft = price.times.draft_dynamic(shape.top_k, shape.levels)
        return price.option(
            "dynamic", shape.total, shape.levels, accepted_P, draft, top_k=shape.top_k
        )
    accepted_P = (orders(found.ranks_PK, shape.choices) < FAR).sum(1)
    kind, nodes = "chain" if shape.is_chain else "static", shape.num_nodes
    choices = None if shape.is_chain else shape.choices
    draft = price.times.draft_static(shape.choices)
    return price.option(kind, nodes, shape.max_depth, accepted_P, draft, choices=choices)


def _static_trees(
    found: Acceptance, price: _Price, depth: int, limits: Limits, prior: float, folds: int
) -> Iterator[Option]:
    """Yield the best tree of each size no deeper than `depth`, where that is not a chain."""

    def chosen_by(ranks_PK: np.ndarray) -> list[Path]:
        shares = PathShares(ranks_PK, limits.ranks, prior)
        return best_paths(shares, limits.nodes - 1, depth)

    paths = chosen_by(found.ranks_PK)
    orders_PK = np.empty(found.ranks_PK.shape, dtype=np.int64)
    fold_P = np.repeat(np.arange(len(found.lengths)) % folds, found.lengths)
    for fold in range(folds):
        others = chosen_by(found.ranks_PK[fold_P != fold])
        orders_PK[fold_P == fold] = orders(found.ranks_PK[fold_P == fold], others)
    for count in range(1, len(paths) + 1):
        tree = paths[:count]
        levels = max(map(len, tree))
        if levels == depth and any(path[-1] > 0 for path in tree):  # a shallower one came before
            draft, accepted_P = price.times.draft_static(tree), (orders_PK < count).sum(1)
            choices = tuple(sorted_paths(tree))
            yield price.option("static", count + 1, levels, accepted_P, draft, choices=choices)


def _dynamic_trees(
    found: Acceptance, price: _Price, top_k: int, limits: Limits
) -> Iterator[Option]:
    for levels in range(1, limits.depth + 1):
        orders_PK = found.dynamic_PLK[top_k][:, levels - 1]
        draft = price.times.draft_dynamic(top_k, levels)
        most = min(limits.nodes, top_k + (levels - 1) * top_k**2 + 1)
        for total in range(levels + 1, most + 1):
            accepted_P = (orders_PK < total - 1).sum(1)
            yield price.option("dynamic", total, levels, accepted_P, draft, top_k=top_k)
