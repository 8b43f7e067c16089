"""The prompts of a tree search: some to collect acceptance and times on, the others to measure.

The two never share a prompt: a tree is not judged by the texts that chose it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

from tqdm import tqdm

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.suites import Suite
from headstart.heads.target import Target

BATCH_ROWS = 16


def split_suite(suite: Suite, first: int, second: int) -> tuple[Suite, Suite]:
    """Part a suite into `first` prompts, evenly over it, and `second` others.

    Raises ValueError when there are fewer than both ask for.
    """
    total = len(suite.requests)
    if total < first + second:
        raise ValueError(
            f"suite {suite.name}: {total} prompts, but search.num_prompts={first} and "
            f"eval.num_prompts={second} together ask for {first + second}; lower one of them"
        )
    chosen = {i * total // first for i in range(first)}
    others = [r for i, r in enumerate(suite.requests) if i not in chosen]
    return (
        _part(suite, [r for i, r in enumerate(suite.requests) if i in chosen]),
        _part(suite, others[:second]),
    )


def _part(suite: Suite, requests: list[Request]) -> Suite:
    ids = [request.prompt_id for request in requests]
    text = json.dumps([suite.hash, ids])
    return replace(
        suite,
        hash=hashlib.sha256(text.encode()).hexdigest()[:16],
        requests=requests,
        categories={prompt_id: suite.categories[prompt_id] for prompt_id in ids},
    )


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
