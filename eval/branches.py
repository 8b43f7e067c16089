"""Acceptance by path through the draft, counted over the rounds of all prompts."""

from collections import defaultdict
from collections.abc import Sequence

from headstart.eval.engine.records import Completion
from headstart.eval.result import Branch


def branches(completions: Sequence[Completion]) -> list[Branch]:
    """Return the counts of every node that some round came to, the root first, then by depth.

    Over all nodes of depth d the accepted rounds add up to those that accepted more than d tokens.
    """
    offered: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    accepted: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    for completion in completions:
        for r in completion.rounds:
            for depth, children in enumerate(r.offered):
                path = tuple(r.places[:depth])
                _add(offered[path], range(children))
                _add(accepted[path], r.places[depth : depth + 1])
    paths = sorted((p for p in offered if offered[p]), key=lambda p: (len(p), p))
    return [Branch(list(p), offered[p], _widened(accepted[p], len(offered[p]))) for p in paths]


def _add(counts: list[int], places: Sequence[int]) -> None:
    for place in places:
        counts += [0] * (place + 1 - len(counts))
        counts[place] += 1


def _widened(counts: list[int], width: int) -> list[int]:
    assert len(counts) <= width, "a child was accepted that was not offered"
    return counts + [0] * (width - len(counts))
