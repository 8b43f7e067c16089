"""Settings of how deep each round drafts: the `policy` group."""

import warnings
from dataclasses import dataclass, fields

KINDS = {
    "fixed": (),
    "table": ("depths",),
    "survival": ("survival",),
    "adaptive": ("cost", "memory", "probe_every"),
}
"""The settings that each kind reads."""


@dataclass
class PolicyConfig:
    """How deep each round drafts, within the tree."""

    kind: str = "fixed"
    """fixed: as deep as the tree; table: by the rows decoded; survival: while the drafter is sure
    enough; adaptive: as deep as pays, by measured acceptance and measured time, or not at all."""
    depths: list[list[int]] | None = None
    """table: pairs [rows, depth], the first for 1 row; a depth holds from that many rows on, and 0
    drafts nothing."""
    survival: float = 0.3
    """survival: least product of the drafter's best probabilities down to a level drafted."""
    cost: float | None = None
    """adaptive: seconds that one more level adds to a round, as a share of a plain round; null
    measures."""
    memory: int = 128
    """adaptive: rounds over which acceptance is averaged."""
    probe_every: int = 64
    """adaptive: rounds after which a depth beside the best is tried, so that it can change."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"policy.kind={self.kind}: expected one of {', '.join(KINDS)}")
        if self.kind == "table":
            _check_depths(self.depths)
        if not 0 < self.survival <= 1:
            raise ValueError(f"policy.survival={self.survival}: need a probability in (0, 1]")
        if self.cost is not None and not self.cost > 0:
            raise ValueError(f"policy.cost={self.cost}: need a share above 0, or null to measure")
        for name in ("memory", "probe_every"):
            if getattr(self, name) < 2:
                raise ValueError(f"policy.{name}={getattr(self, name)}: need at least 2 rounds")
        self._warn_unused()

    def _warn_unused(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value != field.default and field.name not in KINDS[self.kind]:
                warnings.warn(
                    f"policy.{field.name}={value} has no effect with policy={self.kind}; drop it",
                    stacklevel=4,
                )


def _check_depths(depths: list[list[int]] | None) -> None:
    pairs = depths or []
    if any(len(pair) != 2 or min(pair) < 0 for pair in pairs):
        raise ValueError(f"policy.depths={depths}: need pairs [rows, depth] of numbers, 0 or more")
    rows = [pair[0] for pair in pairs]
    if not rows or rows[0] != 1 or rows != sorted(set(rows)):
        raise ValueError(
            f"policy.depths={depths}: need pairs [rows, depth] with rising rows that begin at 1"
        )
