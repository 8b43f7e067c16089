"""How deep a round drafts: all the way, by a table, by the drafter's confidence, or as it pays.

A policy never changes what is decoded. Greedy output, and sampled output where children are not
drawn (schemes a1, b), is the same text at any depth, since the token of a position is drawn with
that position's own randomness. Where children are drawn (a, c) the output keeps the target's law,
but which text is drawn depends on the depths: a policy that measures time then does not repeat.
"""

from collections.abc import Sequence

from headstart.eval.engine.adaptive import Acceptance, RoundSeconds, best_depth
from headstart.eval.engine.drafters.base import FULL, Drafter, DraftLimit, LimitedDrafter
from headstart.eval.engine.policy_config import PolicyConfig
from headstart.eval.engine.records import Round

FIRST_PROBE = 8
"""Rounds before the first probe; each next one comes after twice as many, to probe_every."""


class DraftPolicy:
    """Says before every round how deep it drafts; this one: as deep as the drafter goes."""

    def check(self, drafter: Drafter) -> None:
        """Raise ValueError for a drafter that cannot follow the policy."""

    def limit(self, rows: int, deepest: int) -> DraftLimit:
        """Return the limit of a round of so many rows; the drafter drafts `deepest` levels."""
        return FULL

    def learn(self, depth: int, rounds: Sequence[Round], seconds: float) -> None:
        """Learn from a round: the depth asked for, how it went in each row, the time it took."""


class TablePolicy(DraftPolicy):
    """A depth by the number of rows: pairs (rows, depth), each from that many rows on."""

    def __init__(self, depths: Sequence[Sequence[int]]) -> None:
        self.depths = depths

    def limit(self, rows: int, deepest: int) -> DraftLimit:
        """Return the depth of the last pair that the rows reach."""
        return DraftLimit(depth=[depth for least, depth in self.depths if least <= rows][-1])


class SurvivalPolicy(DraftPolicy):
    """Stops each row where the drafter's own best probabilities multiply to less than `least`."""

    def __init__(self, least: float) -> None:
        self.least = least

    def check(self, drafter: Drafter) -> None:
        """Raise ValueError for a drafter without probabilities of its own."""
        if not isinstance(drafter, LimitedDrafter):
            raise ValueError(
                f"policy=survival: {drafter.name} cannot stop by probabilities of its own; use "
                "another policy"
            )

    def limit(self, rows: int, deepest: int) -> DraftLimit:
        """Return the same limit always."""
        return DraftLimit(survival=self.least)


class AdaptivePolicy(DraftPolicy):
    """Drafts to the depth of most tokens a second, by running estimates; 0 where none pays.

    Every probe_every rounds (sooner at first) a depth beside the best is tried, nothing at all
    included, so that both estimates stay fresh and drafting comes back where it pays again. It
    begins with the deepest draft, none and one level, and does so again when the rows have doubled.
    With a cost given, no clock is read.
    """

    slack = 0.04
    """A deeper draft must promise that much more; it is what measured times are sure to."""

    def __init__(self, cost: float | None, *, memory: int, probe_every: int) -> None:
        self.cost, self.probe_every = cost, probe_every
        self.acceptance, self.seconds = Acceptance(memory), RoundSeconds()
        self._to_try: list[int] = []
        self._tried_at, self._since_probe, self._probe_after = 0, 0, min(FIRST_PROBE, probe_every)

    def limit(self, rows: int, deepest: int) -> DraftLimit:
        """Return the best depth, or one to learn about."""
        if self.cost is None and rows >= 2 * self._tried_at:
            # Twice, since a first pass of a shape does not count where there is a second.
            self._to_try, self._tried_at = [*dict.fromkeys((deepest, 0, 1))] * 2, rows
        if self._to_try:
            return DraftLimit(depth=self._to_try.pop(0))
        survival_K, costs_K1 = self.acceptance.survival(deepest), self._costs(rows, deepest)
        best = best_depth(survival_K, costs_K1, slack=0.0 if self.cost else self.slack)
        self._since_probe += 1
        if self._since_probe < self._probe_after:
            return DraftLimit(depth=best)
        self._since_probe, self._probe_after = 0, min(2 * self._probe_after, self.probe_every)
        beside = {depth for depth in (0, best - 1, best + 1) if 0 <= depth <= deepest} - {best}
        return DraftLimit(depth=min(beside, key=lambda depth: self.seconds.last(rows, depth)))

    def _costs(self, rows: int, deepest: int) -> list[float]:
        if self.cost is not None:
            return [1 + depth * self.cost for depth in range(deepest + 1)]
        return [self.seconds.of(rows, depth) for depth in range(deepest + 1)]

    def learn(self, depth: int, rounds: Sequence[Round], seconds: float) -> None:
        """Update both estimates."""
        self.acceptance.add(depth, rounds)
        self.seconds.add(len(rounds), depth, seconds)


def draft_policy(config: PolicyConfig) -> DraftPolicy:
    """Make the policy of a config, with nothing learned yet."""
    if config.kind == "table":
        return TablePolicy(config.depths or [])
    if config.kind == "survival":
        return SurvivalPolicy(config.survival)
    if config.kind == "adaptive":
        return AdaptivePolicy(config.cost, memory=config.memory, probe_every=config.probe_every)
    return DraftPolicy()


def fair_shares(wanted: Sequence[int], spare: int) -> list[int]:
    """Share `spare` drafted tokens among rows that want some: one each in turn, from the first row.

    No row gets more than it wants; what one leaves goes to the others.
    """
    shares = [0] * len(wanted)
    while spare > 0:
        hungry = [row for row, want in enumerate(wanted) if shares[row] < want]
        if not hungry:
            break
        for row in hungry[:spare]:
            shares[row] += 1
        spare -= min(spare, len(hungry))
    return shares
