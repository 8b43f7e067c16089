"""Checks on every evaluation: identities that the figures must satisfy, and signs of a bad sample.

A broken identity means that something was counted wrongly, so no figure may be printed.
"""

import math
from collections.abc import Mapping, Sequence

from headstart.eval.engine.records import Completion, Round
from headstart.eval.metrics import PromptSums, Value, figures

FEW_PROMPTS = 20
LOOP_SHARE = 0.5
TIMING_TOLERANCE = 0.05


def check_identities(
    sums: Sequence[PromptSums],
    completions: Sequence[Completion],
    *,
    fixed_chain: bool,
    greedy_equal: bool,
) -> list[str]:
    """Check the figures against the rounds they came from; return warnings about timing.

    `completions` are those that `sums` were made of, in the same order. `fixed_chain` says that the
    draft is a chain of one length (rounds shortened by a limit are left out); `greedy_equal` that
    decoding was greedy and both arms emitted the same ids. Raises RuntimeError naming the identity
    and both values when one fails.
    """
    assert [s.prompt_id for s in sums] == [c.prompt_id for c in completions]
    values = figures(sums)
    rounds = [r for c in completions for r in c.rounds]
    if rounds:
        _bonus_per_round(sums, values, rounds)
        _prefix_sums_to_accepted(values)
        if fixed_chain:
            _prefix_is_product(rounds)
    _tokens_are_turns_plus_emitted(sums, completions)
    _rounds_are_possible(values, rounds)
    if rounds:
        _micro_is_weighted_mean(values, completions)
    if greedy_equal:
        _speedup_is_ratio_of_times(sums, values)
    return _timing_warnings(sums, values)


def _require(identity: str, left: float | None, right: float | None) -> None:
    if left is None or right is None or not math.isclose(left, right, rel_tol=1e-9, abs_tol=1e-9):
        raise RuntimeError(f"identity {identity} fails: {left} against {right}")


def _bonus_per_round(
    sums: Sequence[PromptSums], values: Mapping[str, Value], rounds: Sequence[Round]
) -> None:
    full = [r for r in rounds if r.stop != "cut"]
    if full:
        mean = sum(r.accepted for r in full) / len(full)
        _require("1 (tau = 1 + accepted over uncut rounds)", values["tau_full_rounds"], 1 + mean)
    cuts = sum(s.cut_rounds for s in sums) / sum(s.rounds for s in sums)
    _require(
        "1 (tau = 1 + accepted - cuts / rounds)",
        values["tau_with_bonus_micro"],
        1 + values["mean_accepted_draft"] - cuts,
    )


def _prefix_sums_to_accepted(values: Mapping[str, Value]) -> None:
    _require(
        "2 (sum of alpha_prefix = mean_accepted_draft)",
        math.fsum(values["alpha_prefix"]),
        values["mean_accepted_draft"],
    )


def _prefix_is_product(rounds: Sequence[Round]) -> None:
    """Hold rounds of the full length to the chain rule; shortened and cut ones never tried all."""
    depth = max(r.depth_max for r in rounds)
    whole = [r for r in rounds if r.stop != "cut" and r.depth_max == depth]
    product = 1.0
    for d in range(depth):
        survived = sum(r.accepted > d for r in whole)
        tried = survived + sum(r.accepted == d and r.stop == "rejected" for r in whole)
        product *= survived / tried if tried else 0.0
        _require(f"3 (chain: alpha_prefix[{d}] = product)", survived / max(len(whole), 1), product)


def _tokens_are_turns_plus_emitted(
    sums: Sequence[PromptSums], completions: Sequence[Completion]
) -> None:
    for s, c in zip(sums, completions, strict=True):
        name = f"4 (new tokens = turns + emitted, prompt {s.prompt_id!r})"
        _require(name, len(c.token_ids), s.turns + s.emitted)
        _require(name, s.tokens, s.turns + s.emitted)


def _rounds_are_possible(values: Mapping[str, Value], rounds: Sequence[Round]) -> None:
    for r in rounds:
        for statement, left, right in (
            ("accepted <= depth_max", r.accepted, r.depth_max),
            ("emitted <= accepted + 1", r.emitted, r.accepted + 1),
            ("depth_max <= drafted", r.depth_max, r.drafted),
        ):
            if left > right:
                raise RuntimeError(f"identity 5 ({statement}) fails: {left} against {right}")
        _require("5 (verified = drafted + 1)", r.verified, r.drafted + 1)
    alpha_K = [1.0, *values["alpha_prefix"], 0.0]
    for before, after in zip(alpha_K, alpha_K[1:], strict=False):
        if after > before:
            raise RuntimeError(
                f"identity 5 (1 >= alpha_prefix >= 0, not rising) fails: {before} against {after}"
            )


def _micro_is_weighted_mean(values: Mapping[str, Value], completions: Sequence[Completion]) -> None:
    counts = [len(c.rounds) for c in completions if c.rounds]
    taus = [sum(r.emitted for r in c.rounds) / len(c.rounds) for c in completions if c.rounds]
    weighted = sum(n * tau for n, tau in zip(counts, taus, strict=True)) / sum(counts)
    micro = values["tau_with_bonus_micro"]
    _require("6 (micro = mean of tau weighted by rounds)", micro, weighted)
    if len(set(counts)) == 1:
        _require("6 (equal rounds: micro = macro)", micro, values["tau_with_bonus_macro"])


def _speedup_is_ratio_of_times(sums: Sequence[PromptSums], values: Mapping[str, Value]) -> None:
    plain, drafted = sum(s.plain_seconds for s in sums), sum(s.seconds for s in sums)
    _require(
        "7 (equal outputs: speedup = plain seconds / seconds)",
        values["speedup_ratio_of_sums_e2e"],
        plain / drafted,
    )


def _timing_warnings(sums: Sequence[PromptSums], values: Mapping[str, Value]) -> list[str]:
    """Identity 8: the clock is not exact, so a gap is told and not refused."""
    found = []
    wall = sum(s.seconds for s in sums)
    staged = sum(s.t_draft + s.t_verify + s.t_commit + s.prefill_seconds for s in sums)
    if abs(staged - wall) > TIMING_TOLERANCE * wall:
        found.append(f"rounds and prefill account for {staged:.3f} s of {wall:.3f} s wall time")
    gap = values["predicted_gap"]
    if gap is not None and abs(gap) > TIMING_TOLERANCE:
        found.append(
            f"decode speedup {values['speedup_ratio_of_sums_decode']:.3f} is {gap:+.1%} off the "
            f"{values['speedup_predicted']:.3f} predicted from tau and stage times"
        )
    return found


def repeated_ngram_share(ids: Sequence[int], n: int = 8) -> float:
    """Return the share of n-grams that already occurred earlier in `ids`; 0 below n + 1 tokens."""
    ngrams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def looping_prompts(completions: Sequence[Completion]) -> dict[str, float]:
    """Return the prompts whose output mostly repeats itself, with the share of repeated 8-grams.

    A loop is easy to draft and inflates tau: show figures with and without these prompts.
    """
    shares = {c.prompt_id: repeated_ngram_share(c.token_ids) for c in completions}
    return {prompt_id: share for prompt_id, share in shares.items() if share > LOOP_SHARE}


def figures_without(
    sums: Sequence[PromptSums], prompt_ids: Mapping[str, float]
) -> dict[str, Value] | None:
    """Return the figures without the given prompts; None when that changes or leaves nothing."""
    kept = [s for s in sums if s.prompt_id not in prompt_ids]
    return figures(kept) if 0 < len(kept) < len(sums) else None


def length_warnings(
    prompt_tokens: Mapping[str, int], completions: Sequence[Completion], trained: int | None
) -> list[str]:
    """Return a warning when prompts with their answers grew longer than any row of training.

    `prompt_tokens` are by prompt id, `trained` the longest row in tokens; nothing is known, and
    nothing said, when it is None.
    """
    lengths = [prompt_tokens[c.prompt_id] + len(c.token_ids) for c in completions]
    beyond = [length for length in lengths if trained is not None and length > trained]
    if not beyond:
        return []
    return [
        f"{len(beyond)} of {len(lengths)} prompts with their answers reach up to {max(beyond)} "
        f"tokens, the head was trained on rows of at most {trained}: tau falls beyond, read the "
        "figures by context length"
    ]


def sample_warnings(sums: Sequence[PromptSums], loops: Mapping[str, float]) -> list[str]:
    """Return what a reader must know before trusting the intervals and tau."""
    found = []
    if len(sums) < FEW_PROMPTS:
        found.append(f"{len(sums)} prompts: intervals need at least {FEW_PROMPTS} to be worth much")
    if loops:
        found.append(
            f"{len(loops)} of {len(sums)} prompts repeat themselves (over half of their 8-grams): "
            "tau on loops is inflated, read the figures without them"
        )
    return found
