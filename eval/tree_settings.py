"""The settings of `headstart tree`."""

import warnings
from dataclasses import dataclass, field

from omegaconf import MISSING

from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.heads.load import TargetConfig
from headstart.heads.runtime import RuntimeConfig

UNUSED = ("only", "batch_sizes", "skip_misfits", "training_rows", "resume")
"""Options of an evaluation that a search does not read."""


@dataclass
class TreeSearchConfig:
    """What is searched, and on how much."""

    num_prompts: int = 40
    """Prompts of every suite on which acceptance is collected; none of them is measured."""
    max_nodes: int = 64
    """N of the largest tree, the root included."""
    max_depth: int = 6
    """Deepest draft, in tokens; less where the head's own limit is less."""
    max_rank: int = 10
    """Best candidates of a node that a static tree may hold."""
    top_k: list[int] = field(default_factory=lambda: [2, 3, 4, 5, 6, 8, 10])
    """Of the dynamic trees tried; each is grown once from every place."""
    prior: float = 20.0
    """Places that the accuracy of a depth counts as, beside those that took the very same path."""
    folds: int = 5
    """Parts of the prompts; a static tree is judged on the part that did not choose it."""
    timing_repeats: int = 5
    """Prompts that every probed shape continues for a few rounds."""
    presets_measured: int = 3
    """Most promising presets measured beside what was found."""

    def __post_init__(self) -> None:
        least = {
            "num_prompts": 2,
            "max_nodes": 3,
            "max_depth": 1,
            "max_rank": 1,
            "folds": 2,
            "timing_repeats": 1,
            "presets_measured": 0,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"search.{name}={getattr(self, name)}: need at least {minimum}")
        if self.folds > self.num_prompts:
            raise ValueError(
                f"search.folds={self.folds} but search.num_prompts={self.num_prompts}: every part "
                "needs a prompt; lower search.folds"
            )
        if not self.prior > 0:
            raise ValueError(f"search.prior={self.prior}: need more than 0 places")
        if min(self.top_k, default=2) < 2:
            raise ValueError(f"search.top_k={self.top_k}: need at least 2; 1 is a chain")


@dataclass
class TreeRun:
    """`headstart tree`: the chain, static and dynamic tree that emit most tokens a second."""

    target: TargetConfig = MISSING
    checkpoint: str = MISSING
    """Head checkpoint directory."""
    sampling: SamplingConfig = MISSING
    runtime: RuntimeConfig = MISSING
    presets: dict[str, TreeConfig] = field(default_factory=dict)
    """Shapes to compare with."""
    search: TreeSearchConfig = field(default_factory=TreeSearchConfig)
    eval: EvalConfig = field(default_factory=lambda: EvalConfig(max_turns=1))
    """How what was found is measured; eval.batch_size is also that of the step times. Trees are
    searched on first turns, and so measured on them."""
    name: str = "searched"
    """Name of the tree option that is written."""
    out: str = MISSING
    """Directory that receives tree/NAME.yaml, tree.json, tree.png, and results as eval writes."""

    def __post_init__(self) -> None:
        for suite in self.eval.chosen_suites:
            if suite.max_turns != 1:
                raise ValueError(
                    f"eval.max_turns={suite.max_turns} for {suite.label}: trees are searched on "
                    "first turns, and so measured on them; leave it at 1"
                )
        usual = EvalConfig()
        for name in UNUSED:
            value = getattr(self.eval, name)
            if value != getattr(usual, name):
                warnings.warn(
                    f"eval.{name}={value} has no effect in headstart tree; drop it", stacklevel=4
                )
