"""The prompts of a tree search: some to collect acceptance and times on, the others to measure.

The two never share a prompt: a tree is not judged by the texts that chose it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tqdm import tqdm

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.settings import EvalConfig
from headstart.eval.suites import Suite, evenly
from headstart.heads.target import Target

BATCH_ROWS = 16


def with_more(config: EvalConfig, prompts: int) -> EvalConfig:
    """Return settings that load so many prompts more of every suite."""
    suites = [
        suite
        if suite.num_prompts is None
        else replace(suite, num_prompts=suite.num_prompts + prompts)
        for suite in config.suites
    ]
    return replace(config, num_prompts=config.num_prompts + prompts, suites=suites)


def split_suite(suite: Suite, first: int, second: Mapping[str, int]) -> tuple[Suite, Suite]:
    """Part every member of a suite into `first` prompts and `second` others, each evenly over it.

    `second` is by the name of the member, or of a suite without any. Raises ValueError for a member
    with fewer prompts than both ask for.
    """
    searched: list[str] = []
    measured: list[str] = []
    for name, count in second.items():
        ids = [r.prompt_id for r in suite.requests if suite.members.get(r.prompt_id, name) == name]
        if len(ids) < first + count:
            raise ValueError(
                f"suite {name}: {len(ids)} prompts, but search.num_prompts={first} and "
                f"eval.num_prompts={count} together ask for {first + count}; lower one of them"
            )
        chosen = evenly(ids, first)
        searched += chosen
        measured += evenly([i for i in ids if i not in chosen], count)
    return suite.part(searched), suite.part(measured)


def plain_answers(
    target: Target, requests: Sequence[Request], sampling: SamplingConfig, stop_ids: Sequence[int]
) -> list[list[int]]:
    """Return the target's own answers, in the order of the requests."""
    done = decode(
        target,
        NoDrafter(target.device),
        requests,
        sampling=sampling,
        stop_ids=stop_ids,
        batch_size=BATCH_ROWS,
    )
    bar = tqdm(done, total=len(requests), desc="answering", unit="prompt", mininterval=1.0)
    answers = {completion.prompt_id: completion.token_ids for completion in bar}
    return [answers[request.prompt_id] for request in requests]


def midway(
    requests: Sequence[Request], answers: Sequence[Sequence[int]], *, room: int
) -> list[Request]:
    """Return the texts half-way through their answers, so with contexts as rounds have on average.

    Those longer than `room` tokens are left out; raises ValueError when that leaves none.
    """
    texts = [
        replace(request, token_ids=(*request.token_ids, *answer[: len(answer) // 2]))
        for request, answer in zip(requests, answers, strict=True)
    ]
    fitting = [text for text in texts if len(text.token_ids) <= room]
    if not fitting:
        raise ValueError(
            f"every prompt is longer than {room} tokens, which leaves no room in the target's "
            "context to time a draft; give shorter prompts"
        )
    return fitting
