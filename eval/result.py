"""What is told of one evaluated drafter: its figures, and the prompts that they come from.

A Result holds every figure with the settings it is a fact about; a PromptRow the ids and rounds of
one prompt, from which every figure can be computed again. result_files.py writes and reads them.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from headstart.eval.checks import repeated_ngram_share
from headstart.eval.engine.records import Completion
from headstart.eval.engine.verify import SCHEMES
from headstart.eval.intervals import Interval
from headstart.eval.metrics import DEFINITIONS, Value
from headstart.heads.runtime import Compilation

SCHEMA_VERSION = 4
LOSSLESS_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.lossless)
LOSSY_SCHEMES = ("typical",)


@dataclass
class Provenance:
    """Where the figures come from; two results compare only where these agree."""

    headstart_version: str
    torch_version: str
    transformers_version: str
    device: str
    """The device's name, not only its kind."""
    threads: int
    dtype: str
    date: str
    """ISO 8601, UTC."""
    target: str
    target_revision: str | None
    target_fingerprint: str
    template_hash: str
    prompt_suite: str
    prompt_suite_hash: str
    seeds: list[int]
    config: dict[str, Any]
    """The resolved configuration of the run."""


@dataclass
class DrafterInfo:
    """What drafted, and how its drafts were verified."""

    name: str
    """What tables call this row."""
    family: str
    """Head family ('eagle3', 'medusa', ...) or kind of drafter ('lookup', 'suffix', ...)."""
    tree: str
    """'chain:<k>', 'static:<name>' or 'dynamic:<name>'."""
    verify_scheme: str
    """One of a, a1, b, c, c1, d (lossless) or typical."""
    lossless: bool
    checkpoint: str | None = None
    """Path of the head; null for drafters without one."""
    step: int | None = None
    trained_tokens: int | None = None
    policy: str = "fixed"
    """How deep its rounds drafted, within the tree: fixed, table, survival or adaptive."""
    caches: str | None = None
    """'cold' or 'warm' for drafters that remember earlier outputs; null for the others."""

    def __post_init__(self) -> None:
        known = (*LOSSLESS_SCHEMES, *LOSSY_SCHEMES)
        if self.verify_scheme not in known:
            raise ValueError(
                f"drafter.verify_scheme={self.verify_scheme!r}: expected one of {', '.join(known)}"
            )
        if self.lossless != (self.verify_scheme in LOSSLESS_SCHEMES):
            raise ValueError(
                f"drafter.lossless={self.lossless} but verify_scheme={self.verify_scheme!r} "
                f"is {'lossy' if self.lossless else 'lossless'}; label the row by its scheme"
            )


@dataclass
class SamplingInfo:
    """How both arms chose and stopped."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    """The largest limit of any prompt."""
    batch: int = 1
    eos_policy: str = "trim"
    first_token_in_tau: bool = False
    seed: int = 0
    """Of the draws, where the temperature is above 0."""
    max_pass_tokens: int | None = None
    """Most tokens of a target pass; null for any number."""
    limits: str = ""
    """Where prompts have different limits, their range and a hash of all; else empty."""


@dataclass
class Counts:
    """How much was measured; tokens are new tokens, prefill's included."""

    prompts: int
    rounds: int
    tokens: int


@dataclass
class Divergence:
    """First position at which a greedy output differs from plain decoding."""

    prompt_id: str
    position: int
    margin: float
    """Plain arm's best minus second-best logit there: near 0 is a rounding tie."""


@dataclass
class Equality:
    """Greedy outputs (one a turn) compared with plain decoding, token for token."""

    fraction_identical: float
    divergences: list[Divergence] = field(default_factory=list)


@dataclass
class Category:
    """Figures of the prompts of one category or suite, or of one range of lengths."""

    counts: Counts
    figures: dict[str, Value]
    intervals: dict[str, Interval] = field(default_factory=dict)
    """95 % paired bootstrap intervals of decode speedup and tau; of suites only."""


@dataclass
class BatchPoint:
    """Speed at one batch size, prefill excluded, both arms measured at it in turns."""

    batch: int
    prompts: int
    """Prompts decoded at it, rows that end making room for the next ones."""
    tokens_per_s_plain: float | None
    tokens_per_s: float | None
    speedup: float | None
    """speedup_ratio_of_sums_decode."""
    speedup_interval: Interval
    """95 % paired bootstrap over prompts."""
    tau: float | None
    """tau_with_bonus_micro."""
    mean_drafted: float
    """Drafted tokens a round and row; 0 where nothing was drafted."""
    latency_plain: float
    """Mean seconds from a prompt's start to its last token, prefill included."""
    latency: float


@dataclass
class Branch:
    """How the rounds that came to one node of their draft went on, by the place of the child.

    A node is known by its path: the place among siblings, 0 the first tried, of every node from
    the root down; [] is the root.
    """

    path: list[int]
    offered: list[int]
    """Rounds that came here and had a child in this place to try."""
    accepted: list[int]
    """Rounds that accepted it."""


@dataclass
class Run:
    """Some tokens of an answer in a row that have one origin."""

    origin: str
    """'prefill' (the prompt's own pass), 'drafted' (accepted) or 'added' (the target's own)."""
    text: str
    tokens: int


@dataclass
class Sample:
    """One prompt and its answer, to be read."""

    prompt_id: str
    category: str
    prompt: str
    """End of the prompt, special tokens left out."""
    runs: list[Run]
    """Start of the answer."""


@dataclass
class Lead:
    """Decode speedup beside that of the fastest lossless prompt lookup of the same run."""

    rival: str
    """Name of that lookup."""
    interval: Interval
    """95 % paired bootstrap interval of the decode speedup minus that of the rival."""


@dataclass
class Result:
    """One drafter's evaluation; `figures` has every name of metrics.DEFINITIONS."""

    provenance: Provenance
    drafter: DrafterInfo
    sampling: SamplingInfo
    counts: Counts
    figures: dict[str, Value]
    intervals: dict[str, Interval]
    """95 % paired bootstrap intervals, for any of the figures."""
    resamples: int
    repeats: int
    """Timed repeats of each prompt; times are the median."""
    equality: Equality | None = None
    """Null when sampled: outputs of the arms then differ rightly."""
    tau_predicted: float | None = None
    """Tau of full rounds by teacher-forced agreement; of greedy chains only."""
    categories: dict[str, Category] = field(default_factory=dict)
    suites: dict[str, Category] = field(default_factory=dict)
    """By suite, where several were measured together; else empty."""
    context_lengths: dict[str, Category] = field(default_factory=dict)
    """By tokens of the prompt, chat template included: '33-64' and so on by powers of two. Every
    turn of a conversation counts as a prompt, the turns before it in its own."""
    batch_points: list[BatchPoint] = field(default_factory=list)
    """By batch size, where eval.batch_sizes asked for it."""
    loops: dict[str, float] = field(default_factory=dict)
    """Prompts flagged as looping, with the share of repeated 8-grams."""
    figures_without_loops: dict[str, Value] | None = None
    """Null when no prompt or every prompt loops."""
    warnings: list[str] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    """Acceptance by path through the draft; empty where the run did not record paths."""
    samples: list[Sample] = field(default_factory=list)
    """A few prompts as text; empty where the target has no tokenizer."""
    over_lookup: Lead | None = None
    """Null for prompt lookup itself, and where the run had none."""
    compilation: Compilation | None = None
    """What a compiled runtime made for the run, all arms together; null where all ran eagerly."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        tables = {"figures": self.figures, "figures_without_loops": self.figures_without_loops}
        for field_name in ("categories", "suites", "context_lengths"):
            groups = getattr(self, field_name)
            tables |= {f"{field_name}.{name}": group.figures for name, group in groups.items()}
        for where, table in tables.items():
            if table is not None:
                check_names(where, table, set(DEFINITIONS))
        unknown = sorted(set(self.intervals) - set(DEFINITIONS))
        if unknown:
            raise ValueError(f"intervals: unknown {', '.join(unknown)}; figures have definitions")


@dataclass
class PromptRow:
    """One line of prompts.jsonl: a prompt's ids, its rounds and both clocks (seconds)."""

    prompt_id: str
    category: str | None
    prompt_tokens: int | None
    """Of a conversation, those of its first turn."""
    stop_reason: str
    turns: int
    turn_tokens: list[int]
    """New tokens by turn: where a turn begins in `token_ids`, with the one from its prefill."""
    token_ids: list[int]
    repeated_ngram_share: float
    """The largest of any turn."""
    accepted: list[int]
    emitted: list[int]
    drafted: list[int]
    depth_max: list[int]
    stops: list[str]
    t_draft: list[float]
    t_verify: list[float]
    t_commit: list[float]
    seconds: float
    prefill_seconds: float
    plain_tokens: int | None
    plain_seconds: float | None
    plain_prefill_seconds: float | None
    places: list[list[int]] = field(default_factory=list)
    offered: list[list[int]] = field(default_factory=list)


def prompt_row(
    completion: Completion,
    plain: Completion | None,
    category: str | None = None,
    prompt_tokens: int | None = None,
    turn_tokens: Sequence[int] = (),
) -> PromptRow:
    """Lay one prompt out as a row of prompts.jsonl; lists have one entry a round.

    Without `turn_tokens` (new tokens by turn) it is one turn.
    """
    rounds, ids = completion.rounds, completion.token_ids
    counts = list(turn_tokens) or [len(ids)]
    ends = list(accumulate(counts))
    assert (len(ends), ends[-1]) == (completion.turns, len(ids)), "tokens of other turns"
    answers = [ids[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return PromptRow(
        prompt_id=completion.prompt_id,
        category=category,
        prompt_tokens=prompt_tokens,
        stop_reason=completion.stop_reason,
        turns=completion.turns,
        turn_tokens=counts,
        token_ids=ids,
        repeated_ngram_share=max(map(repeated_ngram_share, answers)),
        accepted=[r.accepted for r in rounds],
        emitted=[r.emitted for r in rounds],
        drafted=[r.drafted for r in rounds],
        depth_max=[r.depth_max for r in rounds],
        stops=[r.stop for r in rounds],
        t_draft=[r.t_draft for r in rounds],
        t_verify=[r.t_verify for r in rounds],
        t_commit=[r.t_commit for r in rounds],
        seconds=completion.seconds,
        prefill_seconds=completion.prefill_seconds,
        plain_tokens=None if plain is None else len(plain.token_ids),
        plain_seconds=None if plain is None else plain.seconds,
        plain_prefill_seconds=None if plain is None else plain.prefill_seconds,
        places=[r.places for r in rounds],
        offered=[r.offered for r in rounds],
    )


def check_names(
    where: str, found: dict[str, Any], expected: set[str], optional: Set[str] = frozenset()
) -> None:
    """Raise ValueError for names that are missing or unknown, of which some may be missing."""
    missing = sorted(expected - set(found) - optional)
    unknown = sorted(set(found) - expected)
    if missing or unknown:
        raise ValueError(
            f"{where}: missing {', '.join(missing) or 'nothing'}, "
            f"unknown {', '.join(unknown) or 'nothing'}"
        )
