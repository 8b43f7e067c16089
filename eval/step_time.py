"""What a round costs on this machine, by the shape of its draft: measured in the real loop.

Probe shapes take turns decoding a few tokens of the same texts, and the median of every stage over
their rounds is kept: the target's pass and the commit by number of nodes, drafting by depth of a
chain, by nodes expanded at a level of a static tree, and by levels of a dynamic one.
Shapes: N tree nodes (root included), M nodes expanded at a level.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.drafters.build import head_drafter
from headstart.eval.engine.records import Round
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import Path
from headstart.eval.engine.tree_config import TreeConfig
from headstart.heads.base import DraftHead
from headstart.heads.target import Target

SIZES = (2, 4, 8, 12, 16, 24, 32, 48, 64)
"""N of the probed passes, up to the largest tree asked for, which is probed too."""
WIDTHS = (1, 2, 4, 8, 16, 32)
"""M of the probed draft steps."""
PROBE_TOKENS = 12
PLAIN_EVERY = 6
"""Probes between two of plain decoding: every prediction is divided by its time."""
FIRST_RANKS = 4
"""Children of the root in the tree whose drafting takes no step."""


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of the stages of a round, with what they were measured on."""

    batch: int
    """Rows in lockstep; every time is that of a round of all of them."""
    contexts: list[int]
    """Tokens before the first probed round, of the prompts that were continued."""
    plain: float
    """A whole round that drafts nothing."""
    verify: dict[int, float]
    """The target's pass and read-out, by N."""
    commit: dict[int, float]
    """Acceptance, cache moves and the drafter's refresh, by N."""
    chain: dict[int, float]
    """Drafting a chain, by its depth."""
    first: float
    """Drafting a static tree that takes no step of the head."""
    step: dict[int, float] = field(default_factory=dict)
    """One more step of a static tree, by M; empty for heads that take none."""
    dynamic: dict[int, dict[int, float]] = field(default_factory=dict)
    """Drafting a dynamic tree, by top_k and levels."""
    known_depths: int = 1
    """Depths that a head gives without a step."""

    def after_draft(self, nodes: int) -> float:
        """Return the seconds of pass and commit for a tree of N nodes."""
        return Curve(self.verify)(nodes) + Curve(self.commit)(nodes)

    def draft_static(self, paths: Sequence[Path]) -> float:
        """Return the seconds of drafting a chain or a static tree."""
        depth = max(map(len, paths))
        if depth == len(paths) and depth in self.chain and not any(map(any, paths)):
            return self.chain[depth]
        levels = range(self.known_depths, depth)
        expanded = [
            len({path[:-1] for path in paths if len(path) == level + 1}) for level in levels
        ]
        return self.first + sum(Curve(self.step)(width) for width in expanded)

    def draft_dynamic(self, top_k: int, levels: int) -> float:
        """Return the seconds of drafting a dynamic tree: each level but the first costs as much."""
        return Curve(self.dynamic[top_k])(levels)


class Curve:
    """A measured line: never falling, straight between its points and on beyond the last.

    Noise that would let a larger tree cost less is averaged away (isotonic regression).
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self.x = sorted(points)
        self.y = never_falling([points[x] for x in self.x])

    def __call__(self, x: float) -> float:
        """Return the value at x; below the first point, that point's."""
        if x > self.x[-1] and len(self.x) > 1:
            slope = (self.y[-1] - self.y[-2]) / (self.x[-1] - self.x[-2])
            return self.y[-1] + slope * (x - self.x[-1])
        return float(np.interp(x, self.x, self.y))


def never_falling(values: Sequence[float]) -> list[float]:
    """Return the closest never falling values: falling neighbours become their mean."""
    pools: list[list[float]] = []
    for value in values:
        pools.append([value])
        while len(pools) > 1 and statistics.fmean(pools[-2]) > statistics.fmean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    return [statistics.fmean(pool) for pool in pools for _ in pool]


@dataclass(frozen=True)
class Probe:
    """A shape that is timed."""

    kind: str
    key: int
    tree: TreeConfig


def probes(head: DraftHead, *, nodes: int, depth: int, top_k: Sequence[int]) -> list[Probe]:
    """Return the shapes to time for trees of up to N nodes and `depth` levels."""
    fans = {*(size for size in SIZES if size < nodes), nodes}
    fans = {min(size, head.num_draft_tokens + 1) for size in fans}
    found = [Probe("fan", size, _static([[r] for r in range(size - 1)])) for size in sorted(fans)]
    ranks = min(FIRST_RANKS, head.num_draft_tokens)
    found.append(Probe("first", 0, _static([[rank] for rank in range(ranks)])))
    found += [Probe("chain", d, TreeConfig("probe", depth=d)) for d in range(1, depth + 1)]
    if depth > head.depths_at_once:
        known = head.depths_at_once
        widest = min((nodes - 1) // 2, head.num_draft_tokens)
        for width in sorted({min(width, widest) for width in WIDTHS}):
            found.append(Probe("step", width, _static(_comb(width, known))))
    for k in top_k:
        for levels in sorted({1, depth}):
            total = min(k + (levels - 1) * k**2 + 1, max(16, depth + 1))
            tree = TreeConfig("probe", top_k=k, levels=levels, total=total)
            found.append(Probe(f"dynamic {k}", levels, tree))
    return found


def _static(choices: list[list[int]]) -> TreeConfig:
    return TreeConfig("probe", choices=choices)


def _comb(width: int, known: int) -> list[list[int]]:
    """Return a tree that takes one step, of `width` nodes, each with its second-best child."""
    best = [[0] * length for length in range(1, known)]
    stem = [0] * (known - 1)
    return best + [path for r in range(width) for path in ([*stem, r], [*stem, r, 1])]


def measure(
    target: Target,
    head: DraftHead,
    texts: Sequence[Request],
    *,
    sampling: SamplingConfig,
    nodes: int,
    depth: int,
    top_k: Sequence[int] = (),
    batch: int = 1,
    repeats: int = 5,
) -> StepTimes:
    """Time the probes on the texts, `batch` of them at once, every repeat on the next ones.

    The first turn of each probe is a warm-up. nodes, depth and top_k bound the trees that will be
    priced.
    """
    shapes = probes(head, nodes=nodes, depth=depth, top_k=top_k)
    drafters: list[Drafter] = [NoDrafter(target.device)]
    drafters += [head_drafter(head, target.parts, probe.tree, sampling) for probe in shapes]
    rounds: list[list[Round]] = [[] for _ in drafters]
    groups = [_texts(texts, repeat, batch) for repeat in range(repeats)]
    total = (1 + repeats) * len(turn_order(len(shapes), 0))
    with tqdm(total=total, desc="timing", unit="probe", mininterval=1.0) as bar:
        for turn, group in enumerate([groups[0], *groups]):
            for number in turn_order(len(shapes), turn * len(shapes) // (1 + repeats)):
                timed = _rounds(target, drafters[number], group, sampling)
                rounds[number] += timed if turn > 0 else []
                bar.update()
    contexts = sorted({len(text.token_ids) for group in groups for text in group})
    sizes = [drafter.num_nodes for drafter in drafters[1:]]
    return _tables(shapes, sizes, rounds, batch, contexts, head.depths_at_once)


def turn_order(probes: int, shift: int) -> list[int]:
    """Return who is timed in a turn: probes 1 .. from `shift` on and round, 0 for plain decoding.

    Turns shift by a part of the whole, and plain decoding comes up again and again, so that a
    machine that slows down within a turn slows neither the same probes nor plain decoding alone.
    """
    rotated = [1 + (i + shift) % probes for i in range(probes)]
    return [
        number
        for i, probe in enumerate(rotated)
        for number in ((0, probe) if i % PLAIN_EVERY == 0 else (probe,))
    ]


def _texts(texts: Sequence[Request], repeat: int, batch: int) -> list[Request]:
    chosen = [texts[(repeat * batch + i) % len(texts)] for i in range(batch)]
    return [
        Request(f"{i}-{text.prompt_id}", text.token_ids, PROBE_TOKENS)
        for i, text in enumerate(chosen)
    ]


def _rounds(
    target: Target, drafter: Drafter, group: Sequence[Request], sampling: SamplingConfig
) -> list[Round]:
    """Return the rounds that all rows were in; the last one refreshes no drafter."""
    done = list(
        decode(target, drafter, group, sampling=sampling, stop_ids=(), batch_size=len(group))
    )
    together = min(len(completion.rounds) for completion in done)
    return done[0].rounds[: max(1, together - 1)]


def _tables(
    shapes: Sequence[Probe],
    sizes: Sequence[int],
    rounds: Sequence[Sequence[Round]],
    batch: int,
    contexts: list[int],
    known_depths: int,
) -> StepTimes:
    plain, *timed = rounds
    by_nodes: dict[int, list[Round]] = {}
    drafts: dict[str, dict[int, float]] = {}
    for probe, size, of_probe in zip(shapes, sizes, timed, strict=True):
        by_nodes.setdefault(size, []).extend(of_probe)
        drafts.setdefault(probe.kind, {})[probe.key] = _median(of_probe, _draft)
    first = drafts["first"][0]
    return StepTimes(
        batch,
        contexts,
        _median(plain, lambda r: r.t_draft + r.t_verify + r.t_commit),
        {n: _median(of_size, lambda r: r.t_verify) for n, of_size in sorted(by_nodes.items())},
        {n: _median(of_size, lambda r: r.t_commit) for n, of_size in sorted(by_nodes.items())},
        drafts["chain"],
        first,
        {width: max(0.0, t - first) for width, t in drafts.get("step", {}).items()},
        {int(k.split()[1]): t for k, t in drafts.items() if k.startswith("dynamic")},
        known_depths,
    )


def _draft(one: Round) -> float:
    return one.t_draft


def _median(rounds: Sequence[Round], of: Callable[[Round], float]) -> float:
    return statistics.median(of(one) for one in rounds)
