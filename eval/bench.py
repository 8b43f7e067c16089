"""The benchmark: every prompt decoded plainly and by each drafter, and what that makes of each.

Plain decoding is the same loop with nothing drafted; one plain arm serves every drafter.
"""

import contextlib
import copy
import logging
import platform
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from headstart import __version__
from headstart.data.template import ChatTemplate
from headstart.eval.arms import Arm, head_arms, refuse_repeats
from headstart.eval.checks import (
    check_identities,
    figures_without,
    length_warnings,
    looping_prompts,
    sample_warnings,
)
from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.equality import compare_greedy
from headstart.eval.intervals import bootstrap
from headstart.eval.leaderboard import print_leaderboard
from headstart.eval.metrics import (
    FIGURES,
    PromptSums,
    figures,
    figures_by_category,
    length_bucket,
    prompt_sums,
)
from headstart.eval.report import write_report
from headstart.eval.result import (
    Category,
    Counts,
    PromptRow,
    Provenance,
    Result,
    SamplingInfo,
    prompt_row,
    write_result,
)
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.eval.suites import Suite, check_lengths, load_suite
from headstart.eval.teacher_forced import predicted_tau, prediction_warnings
from headstart.eval.timing import Runner
from headstart.heads.runtime import late_warning
from headstart.heads.target import Target

log = logging.getLogger(__name__)
QUICK_BATCH = 8
"""Prompts of a quick check decoded in lockstep: tau does not depend on it."""


def evaluate_heads(
    target: Target,
    template: ChatTemplate,
    checkpoints: Sequence[Path],
    trees: Sequence[TreeConfig],
    *,
    sampling: SamplingConfig,
    config: EvalConfig,
    out: Path,
    run_config: dict[str, Any],
) -> list[Result]:
    """Measure every head with every tree; write a directory an arm, and report.md, under `out`.

    `run_config` is the resolved configuration that results record. Raises ValueError, before any
    decoding, for heads, trees or prompts that do not fit the target.
    """
    suite = load_suite(config, template)
    arms = head_arms(
        checkpoints,
        trees,
        target,
        sampling,
        force=config.force_pairing,
        template_hash=template.hash,
    )
    seeds = [config.seed, sampling.seed]
    outcomes = benchmark(
        target,
        arms,
        suite,
        sampling=sampling,
        config=config,
        stop_ids=template.stop_ids(target.stop_ids),
        provenance=provenance(target, suite, template.hash, run_config, seeds),
    )
    for arm, (result, rows) in zip(arms, outcomes, strict=True):
        write_result(out / arm.name, result, rows)
    results = [result for result, _ in outcomes]
    print_leaderboard(results)
    log.info("report: %s", write_report(results, out))
    return results


def benchmark(
    target: Target,
    arms: Sequence[Arm],
    suite: Suite,
    *,
    sampling: SamplingConfig,
    config: EvalConfig,
    stop_ids: Iterable[int],
    provenance: Provenance,
) -> list[tuple[Result, list[PromptRow]]]:
    """Decode the suite plainly and with every arm; return each arm's result and prompt rows.

    Raises ValueError for a prompt that leaves no room in the target's context, and RuntimeError
    when a figure breaks an identity.
    """
    refuse_repeats([arm.name for arm in arms])
    check_lengths(suite, target.shape.max_positions)
    runner = Runner(target, sampling, tuple(stop_ids), config.batch_size)
    drafters = [NoDrafter(target.device), *(arm.drafter for arm in arms)]
    runner.warm_up(drafters, suite.requests, config.warmup_prompts)
    with contextlib.nullcontext() if target.compiled is None else target.compiled.clock():
        plain, *drafted = runner.timed(drafters, suite.requests, config.repeats)
    sampled = SamplingInfo(
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        config.max_new_tokens,
        batch=config.batch_size,
    )
    outcomes = []
    for arm, done in zip(arms, drafted, strict=True):
        result = _result(target, arm, suite, plain, done, config, sampled, provenance)
        rows = [
            prompt_row(one, other, suite.categories[one.prompt_id], suite.lengths[one.prompt_id])
            for one, other in zip(done, plain, strict=True)
        ]
        outcomes.append((result, rows))
    return outcomes


def _result(
    target: Target,
    arm: Arm,
    suite: Suite,
    plain: list[Completion],
    done: list[Completion],
    config: EvalConfig,
    sampled: SamplingInfo,
    provenance: Provenance,
) -> Result:
    """Turn the completions of one arm into its result, checking every identity."""
    sums = [
        prompt_sums(one, other, draft_calls_per_round=arm.drafter.draft_calls)
        for one, other in zip(done, plain, strict=True)
    ]
    equality, told = None, []
    if config.check_equality and sampled.temperature == 0:
        equality, told = compare_greedy(target, suite.requests, plain, done)
    loops = looping_prompts(done)
    predicted, drafter = None, arm.drafter
    if arm.is_chain and isinstance(drafter, HeadDrafter) and sampled.temperature == 0:
        depth = drafter.shape.max_depth
        predicted = predicted_tau(target, drafter.head, depth, suite.requests, plain)
    equal = equality is not None and not equality.divergences
    told += check_identities(sums, done, fixed_chain=arm.is_chain, greedy_equal=equal)
    told += sample_warnings(sums, loops)
    values = figures(sums)
    told += prediction_warnings(predicted, values["tau_full_rounds"])
    compilation = None if target.compiled is None else copy.deepcopy(target.compiled.info)
    told += late_warning(compilation)
    told += length_warnings(suite.lengths, done, arm.trained_length)
    if suite.dropped:
        told.append(f"suite {suite.name}: {suite.dropped}")
    return Result(
        provenance=provenance,
        drafter=arm.info,
        sampling=sampled,
        counts=_counts(sums),
        figures=values,
        intervals=bootstrap(sums, list(FIGURES), resamples=config.resamples, seed=config.seed),
        resamples=config.resamples,
        repeats=config.repeats,
        equality=equality,
        tau_predicted=predicted,
        categories=_categories(sums, suite.categories),
        context_lengths=_context_lengths(sums, suite.lengths),
        loops=loops,
        figures_without_loops=figures_without(sums, loops),
        warnings=[*arm.notes, *told],
        compilation=compilation,
    )


def _counts(sums: Sequence[PromptSums]) -> Counts:
    return Counts(len(sums), sum(s.rounds for s in sums), sum(s.tokens for s in sums))


def _categories(sums: Sequence[PromptSums], of: dict[str, str]) -> dict[str, Category]:
    return {
        name: Category(_counts([s for s in sums if of[s.prompt_id] == name]), values)
        for name, values in figures_by_category(sums, of).items()
    }


def _context_lengths(sums: Sequence[PromptSums], of: dict[str, int]) -> dict[str, Category]:
    """Return the figures by length of the prompt, shortest first; `of` gives tokens by prompt id.

    A prompt belongs to one bucket with all its rounds, so that every figure has its meaning there.
    """
    found = _categories(sums, {prompt_id: length_bucket(n) for prompt_id, n in of.items()})
    return {length_bucket(n): found[length_bucket(n)] for n in sorted(of.values())}


def provenance(
    target: Target, suite: Suite, template_hash: str, config: dict[str, Any], seeds: Iterable[int]
) -> Provenance:
    """Return where the figures of this run come from."""
    return Provenance(
        headstart_version=__version__,
        torch_version=torch.__version__,
        transformers_version=transformers.__version__,
        device=_device_name(target.device),
        threads=torch.get_num_threads(),
        dtype=str(target.dtype).removeprefix("torch."),
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        target=target.name,
        target_revision=getattr(target.model.config, "_commit_hash", None),
        target_fingerprint=target.fingerprint,
        template_hash=template_hash,
        prompt_suite=suite.name,
        prompt_suite_hash=suite.hash,
        seeds=list(seeds),
        config=config,
    )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def quick_tau(
    target: Target,
    drafter: Drafter,
    requests: Sequence[Request],
    *,
    sampling: SamplingConfig,
    stop_ids: Iterable[int],
) -> float:
    """Return tau_with_bonus_micro on a few prompts, from the real verifier; no clock, no plain arm.

    Errors of the drafter are not caught. Raises ValueError when no prompt came to a round.
    """
    completions = decode(
        target, drafter, requests, sampling=sampling, stop_ids=stop_ids, batch_size=QUICK_BATCH
    )
    tau = figures([prompt_sums(done, None) for done in completions])["tau_with_bonus_micro"]
    if tau is None:
        raise ValueError(
            f"every one of {len(requests)} answers ended with its first token, so nothing was "
            "drafted; choose other prompts or raise max_new_tokens"
        )
    return tau
