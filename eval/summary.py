"""What the completions of one arm come to: its result, every identity checked, and prompt rows.

A conversation is one prompt in every figure and one draw of the bootstrap. Where a prompt of its
own matters, each of its turns is one: equality with plain decoding, loops, and context lengths.
"""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence

from headstart.eval.arms import Arm
from headstart.eval.branches import branches
from headstart.eval.checks import (
    check_identities,
    figures_without,
    length_warnings,
    looping_prompts,
    sample_warnings,
)
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.equality import compare_greedy
from headstart.eval.intervals import Interval, bootstrap, bootstrap_difference
from headstart.eval.metrics import (
    FIGURES,
    SPEED,
    TAU,
    PromptSums,
    figures,
    figures_by_category,
    length_bucket,
    prompt_sums,
)
from headstart.eval.result import (
    Category,
    Counts,
    Lead,
    PromptRow,
    Provenance,
    Result,
    SamplingInfo,
    prompt_row,
)
from headstart.eval.samples import samples
from headstart.eval.sessions import Timed
from headstart.eval.settings import EvalConfig
from headstart.eval.standing import LOOKUP
from headstart.eval.suites import Suite
from headstart.eval.teacher_forced import predicted_tau, prediction_warnings
from headstart.eval.timing import PLAIN
from headstart.heads.runtime import late_warning
from headstart.heads.target import Target


def summarise(
    target: Target,
    arm: Arm,
    timed: Timed,
    number: int,
    suite: Suite,
    *,
    sampling: SamplingConfig,
    config: EvalConfig,
    provenance: Provenance,
) -> Result:
    """Turn the completions of arm `number` into its result.

    Raises RuntimeError when a figure breaks an identity.
    """
    done = timed.prompts(number)
    sums = _sums(done, timed.prompts(PLAIN), arm)
    by_turn = _sums(timed.done[number], timed.done[PLAIN], arm)
    first_turns = [turns[0] for turns in timed.by_turn(number).values()]
    lengths = {request.prompt_id: len(request.token_ids) for request in timed.requests}
    greedy = sampling.temperature == 0
    equality, told = None, []
    if config.check_equality and greedy:
        equality, told = compare_greedy(
            target, timed.requests, timed.done[PLAIN], timed.done[number]
        )
    loops = _loops(timed, number)
    predicted, drafter = None, arm.drafter
    if arm.is_chain and isinstance(drafter, HeadDrafter) and greedy:
        depth = drafter.shape.max_depth
        predicted = predicted_tau(target, drafter.head, depth, timed.requests, timed.done[PLAIN])
    equal = equality is not None and not equality.divergences
    told += check_identities(sums, done, fixed_chain=arm.is_chain, greedy_equal=equal)
    told += sample_warnings(sums, loops)
    values = figures(sums)
    told += prediction_warnings(predicted, values["tau_full_rounds"])
    compilation = None if target.compiled is None else copy.deepcopy(target.compiled.info)
    told += late_warning(compilation)
    told += length_warnings(lengths, timed.done[number], arm.trained_length)
    told += timed.notes[number]
    if suite.dropped:
        told.append(f"suite {suite.name}: {suite.dropped}")
    return Result(
        provenance=provenance,
        drafter=arm.info,
        sampling=_sampling_info(sampling, config, suite),
        counts=_counts(sums),
        figures=values,
        intervals=bootstrap(sums, list(FIGURES), resamples=config.resamples, seed=config.seed),
        resamples=config.resamples,
        repeats=config.repeats,
        equality=equality,
        tau_predicted=predicted,
        categories=_categories(sums, suite.categories),
        suites=_suites(sums, suite.members, config),
        context_lengths=_context_lengths(by_turn, lengths),
        loops=loops,
        figures_without_loops=figures_without(sums, loops),
        warnings=[*arm.notes, *told],
        compilation=compilation,
        branches=branches(done),
        samples=samples(
            target.tokenizer, suite.requests, first_turns, suite.categories, suite.members
        ),
    )


def leads_over_lookup(arms: Sequence[Arm], timed: Timed, config: EvalConfig) -> list[Lead | None]:
    """Compare every arm with the fastest lossless prompt lookup among them, prompt by prompt.

    None for prompt lookup itself, and for all where none was timed.
    """
    plain = timed.prompts(PLAIN)
    sums = [_sums(timed.prompts(i), plain, arm) for i, arm in enumerate(arms, start=1)]
    speeds = {
        i: figures(sums[i])[SPEED]
        for i, arm in enumerate(arms)
        if arm.info.family == LOOKUP and arm.info.lossless
    }
    known = {i: speed for i, speed in speeds.items() if speed is not None}
    if not known:
        return [None] * len(arms)
    rival = max(known, key=known.get)
    return [
        None
        if arm.info.family == LOOKUP
        else Lead(arms[rival].name, _difference(one, sums[rival], config))
        for arm, one in zip(arms, sums, strict=True)
    ]


def _difference(
    one: Sequence[PromptSums], other: Sequence[PromptSums], config: EvalConfig
) -> Interval:
    options = {"resamples": config.resamples, "seed": config.seed}
    return bootstrap_difference(one, other, [SPEED], **options)[SPEED]


def prompt_rows(timed: Timed, number: int, suite: Suite) -> list[PromptRow]:
    """Lay the prompts of arm `number` out as rows of prompts.jsonl."""
    turns = timed.by_turn(number)
    return [
        prompt_row(
            one,
            other,
            suite.categories[one.prompt_id],
            suite.lengths[one.prompt_id],
            [len(turn.token_ids) for turn in turns[one.prompt_id]],
        )
        for one, other in zip(timed.prompts(number), timed.prompts(PLAIN), strict=True)
    ]


def _sums(done: Sequence[Completion], plain: Sequence[Completion], arm: Arm) -> list[PromptSums]:
    return [
        prompt_sums(one, other, draft_calls_per_round=arm.drafter.draft_calls)
        for one, other in zip(done, plain, strict=True)
    ]


def _loops(timed: Timed, number: int) -> dict[str, float]:
    """Return the prompts with a looping answer; a turn that repeats an earlier one is no loop."""
    found: dict[str, float] = {}
    of_turn = looping_prompts(timed.done[number])
    for turn in timed.turns:
        share = of_turn.get(turn.request.prompt_id)
        if share is not None:
            found[turn.owner] = max(share, found.get(turn.owner, 0.0))
    return found


def _sampling_info(sampling: SamplingConfig, config: EvalConfig, suite: Suite) -> SamplingInfo:
    limits = {request.prompt_id: request.max_new_tokens for request in suite.requests}
    return SamplingInfo(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        max(limits.values()),
        batch=config.batch_size,
        seed=sampling.seed,
        max_pass_tokens=config.max_pass_tokens,
        limits=_told_limits(limits),
    )


def _told_limits(limits: Mapping[str, int]) -> str:
    """Tell limits that differ by prompt, with 8 hex digits over all of them; equal ones are ''."""
    least, most = min(limits.values()), max(limits.values())
    if least == most:
        return ""
    digest = hashlib.sha256(json.dumps(sorted(limits.items())).encode()).hexdigest()[:8]
    return f"{least}-{most} ({digest})"


def _counts(sums: Sequence[PromptSums]) -> Counts:
    return Counts(len(sums), sum(s.rounds for s in sums), sum(s.tokens for s in sums))


def _categories(sums: Sequence[PromptSums], of: Mapping[str, str]) -> dict[str, Category]:
    return {
        name: Category(_counts([s for s in sums if of[s.prompt_id] == name]), values)
        for name, values in figures_by_category(sums, of).items()
    }


def _suites(
    sums: Sequence[PromptSums], of: Mapping[str, str], config: EvalConfig
) -> dict[str, Category]:
    """Return the figures of each suite of several, in their order, headline ones with intervals."""
    found = _categories(sums, of) if of else {}
    for name, group in found.items():
        group.intervals = bootstrap(
            [s for s in sums if of[s.prompt_id] == name],
            [SPEED, TAU],
            resamples=config.resamples,
            seed=config.seed,
        )
    return {name: found[name] for name in dict.fromkeys(of.values())}


def _context_lengths(sums: Sequence[PromptSums], of: Mapping[str, int]) -> dict[str, Category]:
    """Return the figures by length of the prompt, shortest first; `of` gives tokens by prompt id.

    A prompt belongs to one bucket with all its rounds, so that every figure has its meaning there.
    """
    found = _categories(sums, {prompt_id: length_bucket(n) for prompt_id, n in of.items()})
    return {length_bucket(n): found[length_bucket(n)] for n in sorted(of.values())}
