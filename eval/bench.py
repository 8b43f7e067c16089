"""The benchmark: every prompt decoded plainly and by each drafter, and what that makes of each.

Plain decoding is the same loop with nothing drafted; one plain arm serves every drafter.
"""

import copy
import fnmatch
import logging
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from headstart.data.template import ChatTemplate
from headstart.eval.arms import Arm, head_arms, paced, refuse_repeats
from headstart.eval.batch_sweep import batch_sweep, check_sizes, policies_of, print_sweep
from headstart.eval.contamination import with_contamination
from headstart.eval.drafter_arms import drafter_arms
from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.drafters.config import DrafterConfig
from headstart.eval.engine.policy_config import PolicyConfig
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.journal import Journal
from headstart.eval.leaderboard import print_leaderboard
from headstart.eval.metrics import figures, prompt_sums
from headstart.eval.provenance import provenance
from headstart.eval.report import write_report
from headstart.eval.result import BatchPoint, PromptRow, Provenance, Result
from headstart.eval.result_files import write_result
from headstart.eval.session_key import measured_settings
from headstart.eval.sessions import Place, Session
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.eval.suites import Suite, check_lengths, load_suite
from headstart.eval.summary import leads_over_lookup, prompt_rows, summarise
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
    drafters: Mapping[str, DrafterConfig] | None = None,
    policy: PolicyConfig | None = None,
) -> list[Result]:
    """Measure every head with every tree; write a directory an arm, and the report, under `out`.

    `drafters` are measured beside the heads, of which there may then be none. What is measured
    goes to a journal under `out` as it comes, from which a later run of the same settings goes on.
    `policy` says how deep rounds draft (default: as deep as the tree), `run_config` is the resolved
    configuration that results record. Raises ValueError, before any decoding, for heads, trees,
    drafters or prompts that do not fit the target.
    """
    drafters = drafters or {}
    suite = load_suite(config, template)
    check_sizes(config.batch_sizes, suite)
    policy = policy or PolicyConfig()
    arms = []
    if checkpoints or not drafters:
        arms = head_arms(
            checkpoints,
            trees,
            target,
            sampling,
            force=config.force_pairing,
            template_hash=template.hash,
            skip_misfits=config.skip_misfits,
        )
        arms = with_contamination(arms, suite, template, config.training_rows)
    arms = [*arms, *drafter_arms(drafters, arms, target, sampling)]
    arms = _only([paced(arm, policy, config.max_pass_tokens) for arm in arms], config.only)
    where = provenance(target, suite, template.hash, run_config, [config.seed, sampling.seed])
    options = {
        "eval": asdict(config),
        "sampling": asdict(sampling),
        "policy": asdict(policy),
        "trees measured": [asdict(tree) for tree in trees],
        "drafters measured": {name: asdict(drafter) for name, drafter in drafters.items()},
    }
    stop_ids = template.stop_ids(target.stop_ids)
    settings = measured_settings(where, arms, options)
    with Journal(out, settings, resume=config.resume) as journal:
        outcomes = benchmark(
            target,
            arms,
            suite,
            sampling=sampling,
            config=config,
            stop_ids=stop_ids,
            provenance=where,
            sessions=journal,
        )
        journal.finish()
    for arm, (result, rows) in zip(arms, outcomes, strict=True):
        result.warnings += journal.notes()
        write_result(out / arm.name, result, rows)  # here: a sweep takes long and may be ended
    points = batch_sweep(target, arms, suite, sampling=sampling, config=config, stop_ids=stop_ids)
    if config.batch_sizes:
        for arm, (result, rows), of_arm in zip(arms, outcomes, points, strict=True):
            _take_points(result, of_arm, target)
            write_result(out / arm.name, result, rows)
    results = [result for result, _ in outcomes]
    print_leaderboard(results)
    print_sweep(results)
    log.info("report: %s", write_report(results, out))
    return results


def _take_points(result: Result, points: list[BatchPoint], target: Target) -> None:
    """Add a batch sweep to a result, and what was compiled for it."""
    told = late_warning(result.compilation)
    result.batch_points = points
    result.compilation = None if target.compiled is None else copy.deepcopy(target.compiled.info)
    others = [warning for warning in result.warnings if warning not in told]
    result.warnings = [*others, *late_warning(result.compilation)]


def benchmark(
    target: Target,
    arms: Sequence[Arm],
    suite: Suite,
    *,
    sampling: SamplingConfig,
    config: EvalConfig,
    stop_ids: Iterable[int],
    provenance: Provenance,
    sessions: MutableMapping[Place, Session] | None = None,
) -> list[tuple[Result, list[PromptRow]]]:
    """Decode the suite plainly and with every arm; return each arm's result and prompt rows.

    `sessions` holds what an earlier run measured, and receives what this one does. Raises
    ValueError for a prompt that leaves no room in the target's context, and RuntimeError when a
    figure breaks an identity.
    """
    refuse_repeats([arm.name for arm in arms])
    check_lengths(suite, target.shape.max_positions)
    bounds = (config.batch_size, config.max_pass_tokens)
    runner = Runner(target, sampling, tuple(stop_ids), *bounds, policies_of(arms))
    timed = runner.timed(
        [NoDrafter(target.device), *(arm.drafter for arm in arms)],
        suite,
        config.repeats,
        warmup_prompts=config.warmup_prompts,
        sessions=sessions,
    )
    outcomes = []
    for number, arm in enumerate(tqdm(arms, desc="summarising", unit="drafter"), start=1):
        result = summarise(
            target,
            arm,
            timed,
            number,
            suite,
            sampling=sampling,
            config=config,
            provenance=provenance,
        )
        outcomes.append((result, prompt_rows(timed, number, suite)))
    for (result, _), lead in zip(outcomes, leads_over_lookup(arms, timed, config), strict=True):
        result.over_lookup = lead
    return outcomes


def _only(arms: Sequence[Arm], patterns: Sequence[str]) -> list[Arm]:
    """Return the arms that a pattern matches, in the order of the arms; all without patterns."""
    names = [arm.name for arm in arms]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"eval.only: no arm {pattern!r}; expected some of {', '.join(names)}")
    found = {name for pattern in patterns for name in fnmatch.filter(names, pattern)}
    return [arm for arm in arms if not patterns or arm.name in found]


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
