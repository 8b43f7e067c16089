"""Settings of drafters without a head: the `drafter` group, one class a kind."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from headstart.eval.engine.drafters.lookup import ORDERS
from headstart.heads.load import DTYPES

HEAD = "head"
"""Name by which a fallback refers to the heads under test."""


@dataclass
class DrafterConfig:
    """A drafter beside the heads under test; every kind has options of its own."""


@dataclass
class LookupConfig(DrafterConfig):
    """Prompt lookup: what followed the last tokens of the text where they stood before."""

    tokens: int = 10
    """Most tokens drafted a round."""
    max_n: int = 3
    """Tokens of the longest n-gram looked up; where it is not found, shorter ones are."""
    min_n: int = 1
    """Tokens of the shortest n-gram looked up."""
    order: str = "earliest"
    """Which of several occurrences is taken: earliest or latest."""

    def __post_init__(self) -> None:
        _need("lookup", {"tokens": (self.tokens, 1), "min_n": (self.min_n, 1)})
        if self.max_n < self.min_n:
            raise ValueError(f"lookup.max_n={self.max_n} is below lookup.min_n={self.min_n}")
        if self.order not in ORDERS:
            raise ValueError(f"lookup.order={self.order}: expected one of {', '.join(ORDERS)}")


@dataclass
class SuffixConfig(DrafterConfig):
    """Suffix decoding (arXiv 2411.04975): what most often followed the longest ends of the text."""

    tokens: int = 15
    """Most tokens drafted a round."""
    tree: bool = False
    """Draft the most probable tree instead of one chain."""
    factor: float = 1.0
    """Drafted tokens a matched token: long matches are trusted further."""
    offset: float = 0.0
    """Tokens added to that."""
    min_prob: float = 0.1
    """Least estimated probability of a drafted token, all tokens above it included."""
    min_score: float = 0.0
    """Least number of tokens expected to be accepted; a lower draft is left to a fallback."""
    depth: int = 64
    """Most tokens of a match and its draft together."""
    responses: int = 10_000
    """Finished answers remembered, the oldest is forgotten first; 0 for the row's own text only."""
    keep_warm: bool = False
    """Keep answers when a repeat of the benchmark begins, which then finds its own answers."""

    def __post_init__(self) -> None:
        least = {"tokens": (self.tokens, 1), "depth": (self.depth, 2)}
        least |= {"responses": (self.responses, 0), "factor": (self.factor, 0)}
        _need("suffix", least | {"min_score": (self.min_score, 0)})
        if not 0 < self.min_prob <= 1:
            raise ValueError(f"suffix.min_prob={self.min_prob}: need a probability in (0, 1]")
        if self.factor * (self.depth - 1) + self.offset < 1:
            raise ValueError(
                f"suffix.factor={self.factor} with suffix.offset={self.offset}: not even a match "
                f"of {self.depth - 1} tokens, the longest, drafts one; raise one of them"
            )
        if self.keep_warm and self.responses == 0:
            raise ValueError("suffix.keep_warm=true with suffix.responses=0: nothing is kept")


@dataclass
class ModelConfig(DrafterConfig):
    """A separate, smaller model of the target's tokens; it drafts chains, not trees."""

    path: str = MISSING
    """Directory, .gguf file, Hub id, or package:NAME, as the target's."""
    revision: str | None = None
    """Revision of a Hub id; null means its default branch."""
    dtype: str | None = None
    """float32, bfloat16 or float16; null means the target's."""
    tokens: int = 4
    """Tokens drafted a round, one pass of the model each."""

    def __post_init__(self) -> None:
        _need("model", {"tokens": (self.tokens, 1)})
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(
                f"model.dtype={self.dtype}: expected one of {', '.join(DTYPES)}, or null for the "
                "target's"
            )


@dataclass
class FallbackConfig(DrafterConfig):
    """Several drafters in one: in every row and round, the first that proposes something."""

    members: list[str] = field(default_factory=list)
    """Names of `drafters` in order, lookup and suffix ones; the last may be a model or `head`,
    which stands for each head under test with each tree."""

    def __post_init__(self) -> None:
        if len(self.members) < 2 or len(set(self.members)) < len(self.members):
            raise ValueError(f"fallback.members={self.members}: need at least two different names")
        if HEAD in self.members[:-1]:
            raise ValueError(
                f"fallback.members={self.members}: a head always proposes something, so nothing "
                "after it would; name it last"
            )


KINDS = {
    "lookup": LookupConfig,
    "suffix": SuffixConfig,
    "model": ModelConfig,
    "fallback": FallbackConfig,
}
"""Config class of every kind; feeds Hydra's ConfigStore."""


def _need(kind: str, fields: dict[str, tuple[float, float]]) -> None:
    for name, (value, least) in fields.items():
        if value < least:
            raise ValueError(f"{kind}.{name}={value}: need at least {least}")
