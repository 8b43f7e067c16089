"""Every figure the evaluation prints: one name, one definition, one formula over per-prompt sums.

Depths count from 0, the first drafted token. Each figure is a ratio of sums that are linear in the
prompts, so the same formula gives the value (every prompt once) and its bootstrap distribution
(prompts drawn with replacement). The token from prefill belongs to no round and is not in tau.

Shape letters here: M prompts, K draft depths, R resamples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headstart.eval.engine.records import Completion, Round

Value = float | list[float | None] | None
"""A figure: a number, one number a depth (null where it was never tried), or null."""
Pooled = dict[str, np.ndarray]
"""Sums over prompts by name; a leading R axis when they are bootstrap resamples."""


@dataclass(frozen=True)
class PromptSums:
    """Sums over the rounds of one prompt, and the clock of both arms; the unit of resampling."""

    prompt_id: str
    rounds: int
    emitted: int
    accepted: int
    drafted: int
    verified: int
    cut_rounds: int
    full_emitted: int
    """Tokens emitted by rounds that were not cut."""
    survived_K: list[int]
    """Rounds with accepted > d."""
    tried_K: list[int]
    """Rounds with accepted > d, or accepted = d and stopped by a rejection."""
    histogram: list[int]
    """Rounds with accepted = a; one entry more than there are depths."""
    draft_calls: float
    t_draft: float
    t_verify: float
    t_commit: float
    tokens: int
    turns: int
    seconds: float
    prefill_seconds: float
    plain_tokens: float = math.nan
    """Plain arm; nan when this prompt was not decoded plainly."""
    plain_turns: float = math.nan
    plain_seconds: float = math.nan
    plain_prefill_seconds: float = math.nan


def prompt_sums(
    completion: Completion, plain: Completion | None, *, draft_calls_per_round: float = 0.0
) -> PromptSums:
    """Sum the rounds of one prompt; `plain` is the same prompt decoded without a drafter.

    Tokens are counted from ids in both arms. `draft_calls_per_round` is how often the drafter ran
    its network while drafting (t_draft); 0 leaves cost_ratio_c null.
    """
    rounds = completion.rounds
    full = [r for r in rounds if r.stop != "cut"]
    plain_arm = {} if plain is None else _plain_arm(completion, plain)
    return PromptSums(
        prompt_id=completion.prompt_id,
        rounds=len(rounds),
        emitted=sum(r.emitted for r in rounds),
        accepted=sum(r.accepted for r in rounds),
        drafted=sum(r.drafted for r in rounds),
        verified=sum(r.verified for r in rounds),
        cut_rounds=len(rounds) - len(full),
        full_emitted=sum(r.emitted for r in full),
        **_depth_counts(rounds),
        draft_calls=draft_calls_per_round * len(rounds),
        t_draft=sum(r.t_draft for r in rounds),
        t_verify=sum(r.t_verify for r in rounds),
        t_commit=sum(r.t_commit for r in rounds),
        tokens=len(completion.token_ids),
        turns=completion.turns,
        seconds=completion.seconds,
        prefill_seconds=completion.prefill_seconds,
        **plain_arm,
    )


def _plain_arm(completion: Completion, plain: Completion) -> dict[str, float]:
    assert plain.prompt_id == completion.prompt_id, "arms of different prompts"
    return {
        "plain_tokens": len(plain.token_ids),
        "plain_turns": plain.turns,
        "plain_seconds": plain.seconds,
        "plain_prefill_seconds": plain.prefill_seconds,
    }


def _depth_counts(rounds: Sequence[Round]) -> dict[str, list[int]]:
    depths = range(max((r.depth_max for r in rounds), default=0))
    survived_K = [sum(r.accepted > d for r in rounds) for d in depths]
    rejected_K = [sum(r.accepted == d and r.stop == "rejected" for r in rounds) for d in depths]
    return {
        "survived_K": survived_K,
        "tried_K": [s + r for s, r in zip(survived_K, rejected_K, strict=True)],
        "histogram": [sum(r.accepted == a for r in rounds) for a in range(len(depths) + 1)],
    }


def pool(sums: Sequence[PromptSums], weights_RM: np.ndarray | None = None) -> Pooled:
    """Add the prompts up, each counted once or, with `weights_RM`, as often as a resample drew it.

    Raises ValueError without prompts, or when only some of them have a plain arm.
    """
    if not sums:
        raise ValueError("prompts=0: figures need at least one decoded prompt")
    columns = _columns(sums)
    weights = np.ones(len(sums)) if weights_RM is None else weights_RM
    return {name: np.asarray(weights @ column) for name, column in columns.items()}


def _columns(sums: Sequence[PromptSums]) -> Pooled:
    """One row a prompt: every field of PromptSums and the terms whose means figures use."""
    depth = max(len(s.survived_K) for s in sums)
    columns = {"prompts": np.ones(len(sums))}
    for name in PromptSums.__annotations__:
        values = [getattr(s, name) for s in sums]
        if name in ("survived_K", "tried_K", "histogram"):
            width = depth + (name == "histogram")
            values = [v + [0] * (width - len(v)) for v in values]
        if name != "prompt_id":
            columns[name] = np.asarray(values, dtype=np.float64)
    unpaired = np.isnan(columns["plain_tokens"])
    if unpaired.any() and not unpaired.all():
        missing = sums[int(unpaired.argmax())].prompt_id
        raise ValueError(f"prompt {missing!r} has no plain arm but others do; decode all plainly")
    columns["with_rounds"] = (columns["rounds"] > 0).astype(np.float64)
    columns["tau"] = columns["emitted"] / np.maximum(columns["rounds"], 1)
    return columns | _rates(columns, "e2e", 0.0) | _rates(columns, "decode", 1.0)


def _rates(columns: Pooled, suffix: str, decode: float) -> Pooled:
    """Tokens, seconds and per-prompt rates of both arms, prefill taken out when `decode` is 1."""
    tokens = columns["tokens"] - decode * columns["turns"]
    seconds = columns["seconds"] - decode * columns["prefill_seconds"]
    plain_tokens = columns["plain_tokens"] - decode * columns["plain_turns"]
    plain_seconds = columns["plain_seconds"] - decode * columns["plain_prefill_seconds"]
    # A prompt that ended at its first token has no decode rate; it leaves both arms of a mean.
    rated = (tokens > 0) & (seconds > 0) & (plain_tokens > 0) & (plain_seconds > 0)
    rate = np.divide(tokens, seconds, out=np.zeros_like(tokens), where=rated)
    plain_rate = np.divide(plain_tokens, plain_seconds, out=np.zeros_like(tokens), where=rated)
    gain = np.divide(rate, plain_rate, out=np.ones_like(tokens), where=rated)
    terms = {
        "tokens": tokens,
        "seconds": seconds,
        "plain_tokens": plain_tokens,
        "plain_seconds": plain_seconds,
        "rated": rated.astype(np.float64),
        "rate": rate,
        "plain_rate": plain_rate,
        "log_gain": np.log(gain),
    }
    return {f"{name}_{suffix}": term for name, term in terms.items()}


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divide, giving nan (printed as null) where the denominator is 0."""
    numerator, denominator = np.broadcast_arrays(numerator, denominator)
    out = np.full(numerator.shape, np.nan)
    return np.divide(numerator, denominator, out=out, where=denominator != 0)


def _seconds_per_plain_token(s: Pooled) -> np.ndarray:
    return ratio(s["plain_seconds_decode"], s["plain_tokens_decode"])


def _seconds_per_round(s: Pooled) -> np.ndarray:
    return ratio(s["t_draft"] + s["t_verify"] + s["t_commit"], s["rounds"])


def _speedup_of_sums(s: Pooled, suffix: str) -> np.ndarray:
    rate = ratio(s[f"tokens_{suffix}"], s[f"seconds_{suffix}"])
    return ratio(rate, ratio(s[f"plain_tokens_{suffix}"], s[f"plain_seconds_{suffix}"]))


def _speedup_predicted(s: Pooled) -> np.ndarray:
    tau = ratio(s["emitted"], s["rounds"])
    return ratio(tau * _seconds_per_plain_token(s), _seconds_per_round(s))


@dataclass(frozen=True)
class Figure:
    """One printed quantity: what it means in a line, and its formula over pooled sums."""

    definition: str
    formula: Callable[[Pooled], np.ndarray]


def _speed_figures(suffix: str, meaning: str) -> dict[str, Figure]:
    def of(name: str) -> Callable[[Pooled], np.ndarray]:
        return lambda s: s[f"{name}_{suffix}"]

    return {
        f"speedup_ratio_of_sums_{suffix}": Figure(
            f"(sum tokens / sum seconds) over the same of plain decoding; {meaning}",
            lambda s: _speedup_of_sums(s, suffix),
        ),
        f"speedup_mean_of_rates_{suffix}": Figure(
            f"mean over prompts of tokens/s, over the same mean of plain decoding; {meaning}",
            lambda s: ratio(of("rate")(s), of("plain_rate")(s)),
        ),
        f"speedup_geomean_{suffix}": Figure(
            f"geometric mean over prompts of tokens/s over plain tokens/s; {meaning}",
            lambda s: np.exp(ratio(of("log_gain")(s), of("rated")(s))),
        ),
        f"tokens_per_s_{suffix}": Figure(
            f"sum tokens / sum seconds with the drafter; {meaning}",
            lambda s: ratio(of("tokens")(s), of("seconds")(s)),
        ),
        f"tokens_per_s_plain_{suffix}": Figure(
            f"sum tokens / sum seconds of plain decoding; {meaning}",
            lambda s: ratio(of("plain_tokens")(s), of("plain_seconds")(s)),
        ),
    }


FIGURES: dict[str, Figure] = {
    "tau_with_bonus_micro": Figure(
        "tokens emitted per round, bonus included, pooled over all rounds; plain decoding is 1.00",
        lambda s: ratio(s["emitted"], s["rounds"]),
    ),
    "tau_with_bonus_macro": Figure(
        "mean over prompts of each prompt's own tokens per round; prompts weigh equally",
        lambda s: ratio(s["tau"], s["with_rounds"]),
    ),
    "tau_full_rounds": Figure(
        "tokens per round over rounds that no stop token or limit cut short",
        lambda s: ratio(s["full_emitted"], s["rounds"] - s["cut_rounds"]),
    ),
    "cut_rounds": Figure(
        "rounds cut by a stop token, stop string or limit inside the accepted path",
        lambda s: s["cut_rounds"],
    ),
    "mean_accepted_draft": Figure(
        "drafted tokens accepted per round, bonus not counted",
        lambda s: ratio(s["accepted"], s["rounds"]),
    ),
    "alpha_prefix": Figure(
        "by depth d: share of all rounds that accepted more than d drafted tokens",
        lambda s: ratio(s["survived_K"], s["rounds"][..., None]),
    ),
    "alpha_cond": Figure(
        "by depth d: share of the rounds that tried depth d which accepted there; null if untried",
        lambda s: ratio(s["survived_K"], s["tried_K"]),
    ),
    "draft_token_acceptance": Figure(
        "accepted over drafted tokens; low by construction for trees and long drafts, never ranked",
        lambda s: ratio(s["accepted"], s["drafted"]),
    ),
    "verify_efficiency": Figure(
        "tokens emitted per node that the target verified",
        lambda s: ratio(s["emitted"], s["verified"]),
    ),
    "accept_histogram": Figure(
        "number of rounds that accepted exactly 0, 1, 2, ... drafted tokens",
        lambda s: s["histogram"],
    ),
    **_speed_figures("decode", "prefill and the token it yields excluded in both arms"),
    **_speed_figures("e2e", "prefill and the token it yields included in both arms"),
    "cost_ratio_c": Figure(
        "seconds of one draft step over seconds of one plain token; null when the refresh that "
        "follows verification gives all depths",
        lambda s: ratio(ratio(s["t_draft"], s["draft_calls"]), _seconds_per_plain_token(s)),
    ),
    "verify_ratio": Figure(
        "seconds of one verifying target pass over seconds of one plain token",
        lambda s: ratio(ratio(s["t_verify"], s["rounds"]), _seconds_per_plain_token(s)),
    ),
    "speedup_predicted": Figure(
        "tau times seconds per plain token over seconds per round (draft + verify + commit)",
        _speedup_predicted,
    ),
    "predicted_gap": Figure(
        "speedup_ratio_of_sums_decode over speedup_predicted, minus 1",
        lambda s: ratio(_speedup_of_sums(s, "decode"), _speedup_predicted(s)) - 1,
    ),
    "ms_draft_per_round": Figure(
        "milliseconds a round spent proposing", lambda s: 1e3 * ratio(s["t_draft"], s["rounds"])
    ),
    "ms_verify_per_round": Figure(
        "milliseconds a round spent in the target pass",
        lambda s: 1e3 * ratio(s["t_verify"], s["rounds"]),
    ),
    "ms_commit_per_round": Figure(
        "milliseconds a round spent on acceptance, cache moves and the drafter's refresh",
        lambda s: 1e3 * ratio(s["t_commit"], s["rounds"]),
    ),
    "ms_prefill_per_turn": Figure(
        "milliseconds of prefill per turn, with the drafter",
        lambda s: 1e3 * ratio(s["prefill_seconds"], s["turns"]),
    ),
    "ms_plain_per_token": Figure(
        "milliseconds per token of plain decoding, prefill excluded",
        lambda s: 1e3 * _seconds_per_plain_token(s),
    ),
}

DEFINITIONS: dict[str, str] = {name: figure.definition for name, figure in FIGURES.items()}


def figures(sums: Sequence[PromptSums]) -> dict[str, Value]:
    """Return every figure of DEFINITIONS; null where it is undefined (never tried, no plain arm).

    Raises ValueError without prompts.
    """
    pooled = pool(sums)
    return {name: _value(figure.formula(pooled)) for name, figure in FIGURES.items()}


def _value(array: np.ndarray) -> Value:
    if array.ndim:
        return [None if math.isnan(x) else float(x) for x in array]
    return None if math.isnan(array) else float(array)


def figures_by_category(
    sums: Sequence[PromptSums], categories: Mapping[str, str]
) -> dict[str, dict[str, Value]]:
    """Return the figures of each category, by name; `categories` maps every prompt id to one."""
    names = sorted({categories[s.prompt_id] for s in sums})
    return {name: figures([s for s in sums if categories[s.prompt_id] == name]) for name in names}


def length_bucket(tokens: int) -> str:
    """Return the range of lengths that a length of at least 1 falls in: 1-1, 2-2, 3-4, 5-8, ..."""
    top = 1 << (tokens - 1).bit_length()
    return f"{top // 2 + 1}-{top}"
