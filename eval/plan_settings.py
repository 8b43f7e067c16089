"""The settings of `headstart plan`."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from headstart.eval.hardware import BYTES, HardwareConfig
from headstart.eval.plan_costs import TrainingConfig
from headstart.eval.plan_model import ModelConfig
from headstart.heads.base import HeadConfig

LEAST_CONTEXT = 16


@dataclass
class PlanRun:
    """`headstart plan`: what a head would buy on a device, predicted by a roofline."""

    model: ModelConfig = MISSING
    """The target."""
    draft_model: ModelConfig | None = None
    """A separate model that drafts in the head's place; null plans for the head."""
    head: HeadConfig = MISSING
    hardware: HardwareConfig = MISSING
    dtype: str = "bfloat16"
    """float32, bfloat16, float16 or float8: of the target's weights and products. The drafter's are
    the same, but bfloat16 beside a float8 target."""
    kv_dtype: str = "bfloat16"
    """Of the KV caches."""
    context: int = 2048
    """Tokens in the cache of every row."""
    batch_sizes: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32, 64, 128, 256])
    """Rows decoded together."""
    ks: list[int] | None = None
    """Drafted tokens of the chains shown; null shows 1, 2, 3, 5 and 7, or as far as they go."""
    trees: list[int] = field(default_factory=list)
    """Nodes, root included, of the static trees shown; they need alphas by depth and rank."""
    alphas: Any = None
    """Share of drafted tokens accepted: one number, alpha_cond by depth, or by depth a list of the
    share of each rank. null assumes 0.7 at every depth."""
    alphas_from: str | None = None
    """result.json of a head measured with a chain, or its directory, in place of alphas."""
    training: TrainingConfig = field(default_factory=TrainingConfig)
    out: str = MISSING
    """Directory that receives plan.json, plan.md and plan.png."""

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_dtype"):
            if getattr(self, name) not in BYTES:
                raise ValueError(
                    f"{name}={getattr(self, name)}: expected one of {', '.join(BYTES)}"
                )
        if self.context < LEAST_CONTEXT:
            raise ValueError(f"context={self.context}: need at least {LEAST_CONTEXT} tokens")
        for name, least in (("batch_sizes", 1), ("ks", 1), ("trees", 2)):
            values = getattr(self, name)
            if values == [] and name != "trees":
                raise ValueError(f"{name}=[]: give at least one")
            if values and min(values) < least:
                raise ValueError(f"{name}={values}: need at least {least} in each")
        self.batch_sizes = sorted(set(self.batch_sizes))

    @property
    def draft_dtype(self) -> str:
        """Of the drafter's weights and products."""
        return "bfloat16" if self.dtype == "float8" else self.dtype
