"""Greedy outputs against plain decoding, token for token: a gate in fp32, a record in bf16.

In bf16 and fp16 a tree-shaped pass may round differently from a one-token pass. Such a difference
can only start where the target's two best logits nearly tie, so the margin there tells rounding
from a bug. Shapes: T tokens of a prompt and the common output, D width, V vocabulary.
"""

import math
from collections.abc import Sequence

import torch

from headstart.eval.engine.decode import Request
from headstart.eval.engine.records import Completion
from headstart.eval.result import Divergence, Equality
from headstart.heads.target import Target

SUSPECT_SPACINGS = 4
"""Spacings of the dtype at the best logit; a wider margin is more than rounding explains."""


def compare_greedy(
    target: Target,
    requests: Sequence[Request],
    plain: Sequence[Completion],
    drafted: Sequence[Completion],
) -> tuple[Equality, list[str]]:
    """Compare the outputs of two greedy arms, prompt by prompt, and return warnings for a reader.

    All three lists are in one order. The margin of a divergence is the target's best minus
    second-best logit after the common output, from one pass over prompt and common output.
    """
    divergences, spacings = [], []
    for request, one, other in zip(requests, plain, drafted, strict=True):
        assert request.prompt_id == one.prompt_id == other.prompt_id
        position = first_difference(one.token_ids, other.token_ids)
        if position is not None:
            text = [*request.token_ids, *one.token_ids[:position]]
            margin, spacing = top_margin(target, text)
            divergences.append(Divergence(request.prompt_id, position, margin))
            spacings.append(spacing)
    equality = Equality(1 - len(divergences) / len(plain), divergences)
    return equality, _warnings(equality, spacings, target.dtype)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Return the first position at which two outputs differ, an end included; None when equal."""
    if left == right:
        return None
    shared = min(len(left), len(right))
    return next((i for i in range(shared) if left[i] != right[i]), shared)


@torch.no_grad()
def top_margin(target: Target, token_ids: Sequence[int]) -> tuple[float, float]:
    """Return the margin of the two best next-token logits, and the dtype's spacing there."""
    tokens_BT = torch.tensor([list(token_ids)], device=target.device)
    logits_V = target.readout(target.forward(tokens_BT).hidden_BTD[0, -1])
    best, second = logits_V.double().topk(2).values.tolist()
    _, exponent = math.frexp(max(abs(best), abs(second)))
    return best - second, 2.0 ** (exponent - 1) * torch.finfo(target.dtype).eps


def _warnings(equality: Equality, spacings: list[float], dtype: torch.dtype) -> list[str]:
    name = str(dtype).removeprefix("torch.")
    found = equality.divergences
    if found and dtype in (torch.float32, torch.float64):
        return [
            f"the losslessness gate failed: {len(found)} greedy outputs differ from plain decoding "
            f"in {name}, first prompt {found[0].prompt_id} at token {found[0].position} (plain "
            f"top-2 margin {found[0].margin:.3g}); do not use these figures"
        ]
    return [
        f"bug suspect: prompt {d.prompt_id} leaves plain decoding at token {d.position}, where the "
        f"plain top-2 margin {d.margin:.3g} is {d.margin / spacing:.0f} spacings of {name}, more "
        f"than rounding explains"
        for d, spacing in zip(found, spacings, strict=True)
        if d.margin > SUSPECT_SPACINGS * spacing
    ]
