"""Speed over batch size: plain decoding and every arm at each size, taking turns group by group.

A group is a queue of a few prompts for every row: as in a server, a row that ends is given the next
prompt, so that the batch is full until the queue is empty; the end of a group, with fewer rows,
counts as well. Prompts share their group's time. Intervals are over prompts, as everywhere: where
there are few groups they tell little of how one group differs from another.
"""

import itertools
import logging
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from headstart.eval.arms import Arm
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.policy import DraftPolicy, draft_policy
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.intervals import bootstrap
from headstart.eval.leaderboard import SPEED, TAU, number, with_interval
from headstart.eval.metrics import figures, prompt_sums
from headstart.eval.result import BatchPoint, Result
from headstart.eval.settings import EvalConfig
from headstart.eval.suites import Suite
from headstart.eval.timing import Runner
from headstart.heads.target import Target

log = logging.getLogger(__name__)
QUEUED = 4
"""Prompts of a group for every row of the batch, where the suite has as many."""


def batch_sweep(
    target: Target,
    arms: Sequence[Arm],
    suite: Suite,
    *,
    sampling: SamplingConfig,
    config: EvalConfig,
    stop_ids: Iterable[int],
) -> list[list[BatchPoint]]:
    """Return the points of each arm, one for each of eval.batch_sizes.

    Policies learn at each size afresh, warm-up included. Raises ValueError as `check_sizes` does.
    """
    check_sizes(config.batch_sizes, suite)
    points: list[list[BatchPoint]] = [[] for _ in arms]
    later = suite.num_turns - len(suite.requests)
    if config.batch_sizes and later:
        log.info("batch sizes: first turns only; %d later turns are left out", later)
    for size in sorted(config.batch_sizes):
        groups = queues(suite.requests, size)
        bounds = (size, config.max_pass_tokens)
        runner = Runner(target, sampling, tuple(stop_ids), *bounds, policies_of(arms))
        drafters = [NoDrafter(target.device), *(arm.drafter for arm in arms)]
        # As many groups as otherwise prompts, so that policies begin with every shape tried.
        again = config.warmup_prompts
        runner.warm_up(drafters, list(groups[0][:size]) * again, size * again)
        with runner.clock():
            plain, *drafted = _in_turns(runner, drafters, groups, config.repeats)
        for arm, of_arm, done in zip(arms, points, drafted, strict=True):
            point = _point(size, plain, done, config)
            log.info("batch %d, %s: %s times plain", size, arm.name, number(point.speedup))
            of_arm.append(point)
    return points


def policies_of(arms: Iterable[Arm]) -> dict[int, DraftPolicy]:
    """Make the policies of arms, with nothing learned yet, by the ids of their drafters."""
    return {id(a.drafter): draft_policy(a.policy) for a in arms if a.policy.kind != "fixed"}


def queues(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    """Split the prompts into groups of QUEUED for every row; one that fills no batch is out."""
    groups = [requests[i : i + QUEUED * size] for i in range(0, len(requests), QUEUED * size)]
    return [group for group in groups if len(group) >= size]


def check_sizes(sizes: Sequence[int], suite: Suite) -> None:
    """Raise ValueError for a batch larger than the suite."""
    prompts = len(suite.requests)
    if max(sizes, default=1) > prompts:
        raise ValueError(
            f"eval.batch_sizes={list(sizes)}: the suite has {prompts} prompts; lower the largest "
            "or give more prompts"
        )


def _in_turns(
    runner: Runner, drafters: Sequence[Drafter], groups: Sequence[Sequence[Request]], repeats: int
) -> list[list[Completion]]:
    """Return each drafter's completions, of each group the repeat of the median time."""
    runs: list[list[list[list[Completion]]]] = [[[] for _ in groups] for _ in drafters]
    for repeat, (place, group) in itertools.product(range(repeats), enumerate(groups)):
        if place == 0:  # a drafter that remembers answers would replay them
            for drafter in drafters:
                drafter.clear()
        for step in range(len(drafters)):
            arm = (repeat + place + step) % len(drafters)
            runs[arm][place].append(runner.decode(drafters[arm], group))
    return [[c for repeated in of_arm for c in _median(repeated)] for of_arm in runs]


def _median(repeated: list[list[Completion]]) -> list[Completion]:
    return sorted(repeated, key=lambda done: done[0].seconds)[(len(repeated) - 1) // 2]


def _point(
    size: int, plain: Sequence[Completion], done: Sequence[Completion], config: EvalConfig
) -> BatchPoint:
    sums = [prompt_sums(one, other) for one, other in zip(done, plain, strict=True)]
    values = figures(sums)
    drawn = bootstrap(sums, [SPEED], resamples=config.resamples, seed=config.seed)
    return BatchPoint(
        batch=size,
        prompts=len(sums),
        tokens_per_s_plain=values["tokens_per_s_plain_decode"],
        tokens_per_s=values["tokens_per_s_decode"],
        speedup=values[SPEED],
        speedup_interval=drawn[SPEED],
        tau=values[TAU],
        mean_drafted=sum(s.drafted for s in sums) / max(1, sum(s.rounds for s in sums)),
        latency_plain=sum(c.latency for c in plain) / len(plain),
        latency=sum(c.latency for c in done) / len(done),
    )


def print_sweep(results: Sequence[Result]) -> None:
    """Print the points of all results, a line a size and arm; nothing without points."""
    table = Table(title="Decode speedup over the target alone, by batch size")
    columns = ("batch", "drafter", "plain tokens/s", "tokens/s", "speedup", "tau", "drafted")
    for column in columns:
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for points in zip(*(result.batch_points for result in results), strict=True):
        for result, p in zip(results, points, strict=True):
            speeds = (number(p.tokens_per_s_plain, 1), number(p.tokens_per_s, 1))
            speedup = with_interval(p.speedup, p.speedup_interval)
            rest = (speedup, number(p.tau), number(p.mean_drafted))
            table.add_row(str(p.batch), result.drafter.name, *speeds, *rest)
        table.add_section()
    if table.row_count:
        Console(width=None if sys.stdout.isatty() else 140).print(table)
