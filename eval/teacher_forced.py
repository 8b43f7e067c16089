"""What a chain should be accepted, predicted from teacher-forced agreement on the same texts.

A head that is drafted from as it was trained is accepted as often as it agrees with the target on
the target's own greedy text. A gap says that training and serving see different inputs: features,
positions, masks or a cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.data.features import OnlineFeatures
from headstart.data.template import TokenRow
from headstart.eval.engine.decode import Request
from headstart.eval.engine.records import Completion
from headstart.heads.base import DraftHead
from headstart.heads.target import Target

TOLERANCE = 0.10
"""Relative gap between predicted and measured tau that is told."""
BATCH_ROWS = 8


@torch.no_grad()
def predicted_tau(
    target: Target,
    head: DraftHead,
    depth: int,
    requests: Sequence[Request],
    plain: Sequence[Completion],
) -> float | None:
    """Return 1 + sum over d < depth of P(the head agrees at depths 0 to d), tau of a greedy chain.

    The mean at depth d is over all positions of the target's greedy answers `plain` with d + 1
    answer tokens to come; rounds start at some of them only. None when no answer is long enough.
    """
    rows = [_row(*pair) for pair in zip(requests, plain, strict=True)]
    source = OnlineFeatures(target, rows, head.aux_features)
    unrolled = head.unrolled(depth).eval()
    joint_K: Tensor | int = 0
    count_K: Tensor | int = 0
    for start in range(0, len(rows), BATCH_ROWS):
        batch = source.batch(range(start, min(start + BATCH_ROWS, len(rows))))
        value_K, counted_K = unrolled(batch, target.parts).metrics["joint_agreement"]
        joint_K, count_K = joint_K + value_K, count_K + counted_K
    if not count_K[:depth].all():
        return None
    return 1 + (joint_K / count_K)[:depth].sum().item()


def _row(request: Request, completion: Completion) -> TokenRow:
    prompt, answer = list(request.token_ids), completion.token_ids
    # Its first token is prefill's and never drafted, so it is no label.
    mask = [0] * (len(prompt) + 1) + [1] * (len(answer) - 1)
    return TokenRow(request.prompt_id, "", prompt + answer, mask, completion.stop_reason)


def prediction_warnings(predicted: float | None, measured: float | None) -> list[str]:
    """Tell a gap between the two taus of more than the tolerance."""
    if predicted is None or measured is None:
        return []
    gap = predicted / measured - 1
    if abs(gap) <= TOLERANCE:
        return []
    return [
        f"teacher-forced agreement predicts tau {predicted:.2f}, full rounds measured "
        f"{measured:.2f} ({100 * gap:+.0f} %): the head may see other inputs in serving than in "
        "training, or rounds start at other positions than the average one"
    ]
