"""Settings of the benchmark: which prompts, how often, and the shape of the draft."""

import re
from dataclasses import dataclass

from omegaconf import MISSING

from headstart.eval.engine.tree import TreeShape
from headstart.eval.intervals import MIN_RESAMPLES


@dataclass
class TreeConfig:
    """The shape of a draft: a chain, or a static tree given by its rank paths."""

    name: str = MISSING
    """What tables and result directories call the shape."""
    depth: int | None = None
    """Drafted tokens of a chain; null for a static tree."""
    choices: list[list[int]] | None = None
    """Rank paths of a static tree, [0, 1] the second-best child of the best; null for a chain."""
    children: str = "top_k"
    """top_k: the head's best tokens; sampled: drawn from the head (at temperature > 0 only)."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"tree.name={self.name}: need letters, digits, dots, dashes")
        if (self.depth is None) == (self.choices is None):
            raise ValueError(
                f"tree.depth={self.depth} and tree.choices={self.choices}: "
                "give a depth for a chain or choices for a static tree, and the other as null"
            )
        if self.choices is not None and len(self.choices) == 0:
            raise ValueError("tree.choices=[]: give at least one path, such as [0]")
        if self.children not in ("top_k", "sampled"):
            raise ValueError(f"tree.children={self.children}: expected top_k or sampled")
        self.shape()  # a malformed path is refused here, not after the target has been loaded

    def shape(self) -> TreeShape:
        """Return the shape a drafter fills. Raises ValueError naming the depth or path at fault."""
        return TreeShape.from_choices(self.choices) if self.choices else TreeShape.chain(self.depth)

    def label(self) -> str:
        """Return how result files write the shape: 'chain:<depth>' or 'static:<name>'."""
        return f"static:{self.name}" if self.choices else f"chain:{self.depth}"


@dataclass
class EvalConfig:
    """What is decoded, how often, and how the figures are checked."""

    suite: str | None = None
    """JSON Lines file of prompts; null means generated held-out prompts."""
    num_prompts: int = 20
    """Prompts decoded; under 20 the intervals are rough."""
    seed: int = 0
    """Seed of the generated prompts and of the bootstrap."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    repeats: int = 1
    """Timed repeats of every prompt, the median counts; use 3 or more for a published figure."""
    warmup_prompts: int = 3
    """Prompts that every arm decodes before the clock counts."""
    batch_size: int = 1
    """Prompts decoded in lockstep; their wall time is shared equally."""
    resamples: int = 10_000
    """Bootstrap resamples of the prompts behind each interval."""
    force_pairing: bool = False
    """Measure a head on a target it was not trained for, with a warning in its result."""
    check_equality: bool = True
    """Compare greedy outputs with plain decoding token for token."""

    def __post_init__(self) -> None:
        least = {
            "num_prompts": 1,
            "seed": 0,
            "max_new_tokens": 1,
            "repeats": 1,
            "warmup_prompts": 1,
            "batch_size": 1,
            "resamples": MIN_RESAMPLES,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"eval.{name}={getattr(self, name)}: need at least {minimum}")
