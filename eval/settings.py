"""Settings of the benchmark: which prompts, how often, and the shape of the draft."""

from dataclasses import dataclass, field

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
    batch_sizes: list[int] = field(default_factory=list)
    """Batch sizes at which the speedup is measured besides, both arms at each; [1,2,4,8,16]."""
    max_pass_tokens: int | None = None
    """Most tokens that one pass of the target reads, as a serving scheduler has: all rows' drafts
    count against it, and prompts are read in passes of their own between rounds; null for none."""
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
        self._check_batches()

    def _check_batches(self) -> None:
        if min(self.batch_sizes, default=1) < 1 or len(set(self.batch_sizes)) < len(
            self.batch_sizes
        ):
            raise ValueError(f"eval.batch_sizes={self.batch_sizes}: need different numbers >= 1")
        most = max([self.batch_size, *self.batch_sizes])
        if self.max_pass_tokens is not None and self.max_pass_tokens < most:
            raise ValueError(
                f"eval.max_pass_tokens={self.max_pass_tokens}: a pass over {most} rows reads at "
                "least as many tokens; raise it or lower the batch size"
            )
        if max(self.batch_sizes, default=1) > self.num_prompts:
            raise ValueError(
                f"eval.batch_sizes={self.batch_sizes} but eval.num_prompts={self.num_prompts}: "
                "the largest batch needs as many prompts"
            )
