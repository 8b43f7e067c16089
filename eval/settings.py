"""Settings of the benchmark: which prompts, how often, and the shape of the draft."""

from dataclasses import dataclass

from headstart.eval.engine.tree_config import TreeConfig as TreeConfig
from headstart.eval.intervals import MIN_RESAMPLES


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
