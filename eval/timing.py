"""The timing protocol: arms take turns prompt by prompt, after warm-up, the median repeat counts.

The order of the arms rotates, so that a machine that slows down slows all of them alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tqdm import tqdm

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import Drafter
from headstart.eval.engine.policy import DraftPolicy
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.heads.target import Target

WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Runner:
    """Decodes groups of prompts with any drafter, all under the same conditions."""

    target: Target
    sampling: SamplingConfig
    stop_ids: tuple[int, ...]
    batch_size: int
    max_pass_tokens: int | None = None
    """Most tokens that a pass reads, in every arm; null for no bound."""
    policies: Mapping[int, DraftPolicy] = field(default_factory=dict)
    """How deep drafters draft, by the id of each; the others as deep as they go."""

    def warm_up(
        self, drafters: Sequence[Drafter], requests: Sequence[Request], prompts: int
    ) -> None:
        """Decode the first tokens of a few prompts with every drafter; nothing is recorded."""
        short = [
            replace(r, max_new_tokens=min(r.max_new_tokens, WARMUP_TOKENS))
            for r in requests[:prompts]
        ]
        for drafter in drafters:
            for group in _groups(short, self.batch_size):
                self.decode(drafter, group)

    def timed(
        self, drafters: Sequence[Drafter], requests: Sequence[Request], repeats: int
    ) -> list[list[Completion]]:
        """Return each drafter's completions in the order of the requests, median over repeats."""
        groups = _groups(requests, self.batch_size)
        runs = [[[] for _ in groups] for _ in drafters]
        tokens, seconds = 0, 0.0
        total = repeats * len(requests) * len(drafters)
        with tqdm(total=total, desc="evaluating", unit="prompt", mininterval=1.0) as bar:
            for repeat in range(repeats):
                for drafter in drafters:  # a drafter that remembers answers would replay them
                    drafter.clear()
                for number, group in enumerate(groups):
                    for arm in _rotated(len(drafters), repeat + number):
                        done = self.decode(drafters[arm], group)
                        runs[arm][number].append(done)
                        tokens += sum(len(c.token_ids) for c in done)
                        seconds += sum(c.seconds for c in done)
                        bar.set_postfix_str(f"{tokens / seconds:.1f} tokens/s", refresh=False)
                        bar.update(len(done))
        return [[c for repeated in of_arm for c in _median(repeated)] for of_arm in runs]

    def decode(self, drafter: Drafter, group: Sequence[Request]) -> list[Completion]:
        """Decode one group in lockstep; return its completions in order, sharing its wall time."""
        completions = decode(
            self.target,
            drafter,
            group,
            sampling=self.sampling,
            stop_ids=self.stop_ids,
            batch_size=len(group),
            policy=self.policies.get(id(drafter)),
            max_pass_tokens=self.max_pass_tokens,
        )
        done = {completion.prompt_id: completion for completion in completions}
        return _share([done[request.prompt_id] for request in group])


def _groups(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _rotated(count: int, by: int) -> list[int]:
    return [(by + i) % count for i in range(count)]


def _share(group: list[Completion]) -> list[Completion]:
    """Share the wall time of a group equally, and each round's among the rows that were in it.

    What the rows of a group add up to is then what the group took, as it is for single prompts.
    """
    wall = max(c.seconds for c in group)
    return [
        replace(
            c,
            seconds=wall / len(group),
            latency=c.seconds,
            rounds=[
                replace(
                    r,
                    t_draft=r.t_draft / r.rows,
                    t_verify=r.t_verify / r.rows,
                    t_commit=r.t_commit / r.rows,
                )
                for r in c.rounds
            ],
        )
        for c in group
    ]


def _median(repeated: list[list[Completion]]) -> list[Completion]:
    """Return the run of the median wall time (the lower middle one of an even number)."""
    ids = [c.token_ids for c in repeated[0]]
    assert all([c.token_ids for c in run] == ids for run in repeated), "repeats differ in tokens"
    return sorted(repeated, key=lambda run: run[0].seconds)[(len(repeated) - 1) // 2]
