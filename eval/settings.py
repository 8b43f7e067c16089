"""Settings of the benchmark: which prompts, how often, and the shape of the draft."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from headstart.eval.engine.tree_config import TreeConfig as TreeConfig
from headstart.eval.intervals import MIN_RESAMPLES

GENERATED = "generated-heldout"
"""Name of the suite of our own generator."""


@dataclass
class SuiteConfig:
    """One of several suites: {path: mt_bench.jsonl, num_prompts: 10}; {} generates prompts."""

    path: str | None = None
    """JSON Lines file of prompts; null means generated held-out prompts."""
    name: str | None = None
    """What tables call it; null takes the name of the file."""
    num_prompts: int | None = None
    """Prompts decoded; null means eval.num_prompts."""
    max_new_tokens: int | None = None
    """Longest answer, in tokens; null means eval.max_new_tokens."""
    max_turns: int | None = None
    """Most user turns answered of a conversation; null means eval.max_turns."""
    seed: int | None = None
    """Seed of the generated prompts; null means eval.seed."""

    def __post_init__(self) -> None:
        least = {"num_prompts": 1, "max_new_tokens": 1, "max_turns": 1, "seed": 0}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"eval.suites: {name}={value}: need at least {minimum}, or null")

    @property
    def label(self) -> str:
        """The name, given or taken from the file."""
        return self.name or (GENERATED if self.path is None else Path(self.path).stem)


@dataclass
class EvalConfig:
    """What is decoded, how often, and how the figures are checked."""

    suite: str | None = None
    """The one suite, as in eval.suites; null means generated held-out prompts."""
    suites: list[SuiteConfig] = field(default_factory=list)
    """Several suites: 'eval.suites=[{path:mt_bench.jsonl},{path:code.jsonl,num_prompts:10},{}]'."""
    num_prompts: int = 20
    """Prompts decoded of every suite; under 20 the intervals are rough."""
    seed: int = 0
    """Seed of the generated prompts and of the bootstrap."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""
    max_turns: int | None = None
    """Most user turns answered of a conversation; null answers every one."""
    repeats: int = 1
    """Timed repeats of every prompt, the median counts; use 3 or more for a published figure."""
    warmup_prompts: int = 3
    """Prompts that every arm decodes before the clock counts; one batch of them at least."""
    batch_size: int = 1
    """Prompts decoded in lockstep; their wall time is shared equally."""
    batch_sizes: list[int] = field(default_factory=list)
    """Batch sizes at which the speedup is measured besides, both arms at each; [1,2,4,8,16]. Of
    conversations the first turns are decoded there."""
    max_pass_tokens: int | None = None
    """Most tokens that one pass of the target reads, as a serving scheduler has: all rows' drafts
    count against it, and prompts are read in passes of their own between rounds; null for none.
    Rows of shorter drafts are padded besides. Where children are drawn, what a prompt samples then
    depends on its neighbours; its law does not."""
    resamples: int = 10_000
    """Bootstrap resamples of the prompts behind each interval."""
    resume: bool = True
    """Go on from what an earlier run of the same settings measured in `out`; false measures all."""
    only: list[str] = field(default_factory=list)
    """Arms measured, by the names that tables give them, as patterns ('*-chain3'); empty measures
    every one."""
    skip_misfits: bool = False
    """Leave out, with a note, a tree that a head cannot draft; false refuses it."""
    force_pairing: bool = False
    """Measure a head on a target it was not trained for, with a warning in its result."""
    check_equality: bool = True
    """Compare greedy outputs with plain decoding token for token."""
    training_rows: list[str] = field(default_factory=list)
    """Directories of rows that the heads were trained on, in which the prompts are looked for;
    empty means where each head says that its rows were."""

    def __post_init__(self) -> None:
        least = {
            "num_prompts": 1,
            "seed": 0,
            "max_new_tokens": 1,
            "max_turns": 1,
            "repeats": 1,
            "warmup_prompts": 1,
            "batch_size": 1,
            "resamples": MIN_RESAMPLES,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"eval.{name}={value}: need at least {minimum}")
        if self.suite is not None and self.suites:
            raise ValueError(f"eval.suite={self.suite}: eval.suites is given too; keep one of them")
        names = Counter(suite.label for suite in self.suites)
        for name, count in names.items():
            if count > 1:
                raise ValueError(
                    f"eval.suites: {count} suites are called {name!r}; give each a name"
                )
        self._check_batches()

    def _check_batches(self) -> None:
        sizes = self.batch_sizes
        if min(sizes, default=1) < 1 or len(set(sizes)) < len(sizes):
            raise ValueError(f"eval.batch_sizes={sizes}: need different numbers >= 1")
        most = max([self.batch_size, *sizes])
        if self.max_pass_tokens is not None and self.max_pass_tokens < most:
            raise ValueError(
                f"eval.max_pass_tokens={self.max_pass_tokens}: a pass over {most} rows reads at "
                "least as many tokens; raise it or lower the batch size"
            )
        prompts = sum(suite.num_prompts for suite in self.chosen_suites)
        if max(sizes, default=1) > prompts:
            raise ValueError(
                f"eval.batch_sizes={sizes} but eval.num_prompts={prompts}: the largest batch "
                "needs as many prompts"
            )

    @property
    def chosen_suites(self) -> list[SuiteConfig]:
        """The suites to decode, with what they leave open filled in from the options for all."""
        return [
            SuiteConfig(
                suite.path,
                suite.label,
                suite.num_prompts or self.num_prompts,
                suite.max_new_tokens or self.max_new_tokens,
                suite.max_turns or self.max_turns,
                self.seed if suite.seed is None else suite.seed,
            )
            for suite in self.suites or [SuiteConfig(path=self.suite)]
        ]

    def option_of(self, number: int) -> str:
        """Return the option that gave the path of a suite, for messages."""
        return f"eval.suites[{number}].path" if self.suites else "eval.suite"
