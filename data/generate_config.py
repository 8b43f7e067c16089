"""Settings of the `generate` command: how long, how many at once, how warm, and by what."""

import math
from dataclasses import dataclass, field

from headstart.data.answering import pick_temperature
from headstart.data.server import ServerConfig
from headstart.eval.engine.sampling import SamplingConfig

TURNS = ("first", "all")


@dataclass
class GenerateConfig:
    """How answers are generated."""

    max_new_tokens: int = 128
    """Longest answer in tokens; a cut answer teaches no end of turn, and ends its conversation."""
    batch_size: int = 32
    """Prompts decoded side by side, or requests under way at a server."""
    turns: str = "all"
    """all: every user turn is answered, after the target's own earlier answers; first: one."""
    temperatures: list[float] | None = None
    """Temperatures mixed over the prompts, by a hash of id and seed; null: sampling.temperature."""
    weights: list[float] | None = None
    """Share of the prompts that each of the temperatures gets; null: equal shares."""
    head: str | None = None
    """Head checkpoint that drafts, with `tree`: the same answers, sooner; null decodes plainly."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """A server of the target that answers in place of our own engine."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"generate.{name}={getattr(self, name)}: need at least 1")
        if self.turns not in TURNS:
            raise ValueError(f"generate.turns={self.turns}: expected {' or '.join(TURNS)}")
        self._check_mixture()
        if self.head is not None and self.server.url is not None:
            raise ValueError(
                f"generate.head={self.head} has no effect with generate.server.url="
                f"{self.server.url}: a server drafts by its own settings; drop one of the two"
            )

    def _check_mixture(self) -> None:
        found, weights = self.temperatures, self.weights
        if found is None:
            if weights is not None:
                raise ValueError(
                    f"generate.weights={weights}: weights of what; set generate.temperatures too"
                )
            return
        if not found or len(set(found)) < len(found):
            raise ValueError(f"generate.temperatures={found}: need one or more, each once")
        for temperature in found:
            if not (math.isfinite(temperature) and temperature >= 0):
                raise ValueError(
                    f"generate.temperatures={found}: need finite numbers >= 0; 0 is greedy"
                )
        if weights is not None and len(weights) != len(found):
            raise ValueError(
                f"generate.weights={weights}: need one weight for each of the {len(found)} "
                "generate.temperatures"
            )
        if weights is not None and not all(math.isfinite(w) and w > 0 for w in weights):
            raise ValueError(f"generate.weights={weights}: need finite numbers above 0")

    def temperature_of(self, prompt_id: str, sampling: SamplingConfig) -> float:
        """Return the temperature at which a prompt is answered."""
        found = self.temperatures or [sampling.temperature]
        weights = self.weights or [1.0] * len(found)
        return pick_temperature(prompt_id, found, weights, seed=sampling.seed)
