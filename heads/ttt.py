"""Attention of training-time test: a recurrent head unrolled over its own outputs.

EAGLE-3 (arXiv 2503.01840, section 3.2) and HASS (arXiv 2408.15766). Step s runs every position
again, fed what step s-1 put out there. A query of step s at position i sees what a drafter that
started at i has in its cache: the step-0 keys j <= i of its document and, of each later step up to
s, the key of its own column. So a step costs a causal pass and s products a query, not a square
over all steps. Keys and queries of step s come rotated to position i + s.
Steps after the first may run at some positions only: then M of T.
Shapes: B rows, H query heads, G query heads a key/value head, T positions, M positions of a later
step, S later steps, d head width.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from torch.utils.checkpoint import checkpoint

from headstart.heads.attention import grouped_attention

KINDS = ("sdpa", "flex")


class Unroll:
    """Keys and values of all steps so far, layer by layer; lives for one training pass."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, view: Tensor | BlockMask, layer: int
    ) -> Tensor:
        """Add a step's keys and values to a layer and return what its queries see."""
        self._add(layer, key, value)
        return ttt_attention(query, *self._layers[layer], view)

    def copy(self) -> "Unroll":
        """Return an Unroll of the same steps, to which others can be added."""
        other = Unroll()
        for layer, (keys, values) in self._layers.items():
            other._layers[layer] = ([*keys], [*values])
        return other

    def newest(self) -> list[Tensor]:
        """Return key and value of the last step, layer by layer."""
        return [states[-1] for pair in self._layers.values() for states in pair]

    def take(self, newest: Sequence[Tensor]) -> None:
        """Add a step that ran on a copy, by its `newest`."""
        for layer, (key, value) in enumerate(zip(newest[::2], newest[1::2], strict=True)):
            self._add(layer, key, value)

    def _add(self, layer: int, key: Tensor, value: Tensor) -> None:
        keys, values = self._layers[layer]
        keys.append(key)
        values.append(value)


def recomputed(run: Callable[..., Tensor], *inputs: Tensor | BlockMask, memory: Unroll) -> Tensor:
    """Return run(*inputs, memory), a step that is run again in the backward pass.

    Of its activations only the output and the keys and values, which later steps see, are kept.
    """
    before = memory.copy()

    def step(*inputs: Tensor | BlockMask) -> tuple[Tensor, ...]:
        again = before.copy()  # each time it runs it adds to one of its own
        return run(*inputs, again), *again.newest()

    # Nothing in a step is random.
    output, *newest = checkpoint(step, *inputs, use_reentrant=False, preserve_rng_state=False)
    memory.take(newest)
    return output


def ttt_attention(
    query_BHMd: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    view: Tensor | BlockMask,
) -> Tensor:
    """Return attention [B, H, M, d] of the newest of len(keys) steps.

    keys[s] and values[s] are those of step s: [B, H/G, T, d] of step 0, [B, H/G, M, d] at the
    queries' own positions of the later ones. `view` is what the queries see of step 0: an additive
    mask [B, 1, M, T], or a BlockMask for flex attention. M = T in step 0.
    """
    if len(keys) == 1 and isinstance(view, Tensor):
        return grouped_attention(query_BHMd, keys[0], values[0], view.to(query_BHMd.dtype))
    causal = _causal if isinstance(view, Tensor) else _flex_causal
    seen_BHMd, log_sum_BHM1 = causal(query_BHMd, keys[0], values[0], view)
    if len(keys) == 1:
        return seen_BHMd
    own_BHMS = torch.stack([_own_score(query_BHMd, key) for key in keys[1:]], dim=-1)
    # The softmax over both parts: each part's own softmax, weighed by its share of the sum.
    log_total_BHM1 = torch.cat((log_sum_BHM1, own_BHMS), -1).logsumexp(-1, keepdim=True)
    mixed_BHMd = seen_BHMd * (log_sum_BHM1 - log_total_BHM1).exp()
    share_BHMS = (own_BHMS - log_total_BHM1).exp()
    for step, value in enumerate(values[1:]):
        mixed_BHMd = mixed_BHMd + share_BHMS[..., step : step + 1] * _shared(value, query_BHMd)
    return mixed_BHMd.to(query_BHMd.dtype)


def document_blocks(document_BT: Tensor, place_BM: Tensor | None = None) -> BlockMask:
    """Return the causal BlockMask that keeps packed documents apart, as `document_mask` does.

    Its queries are all positions, or those at some places.
    """
    B, T = document_BT.shape
    if place_BM is None:
        place_BM = torch.arange(T, device=document_BT.device).expand(B, T)

    def sees(b: Tensor, h: Tensor, m: Tensor, j: Tensor) -> Tensor:
        i = place_BM[b, m]
        return (j <= i) & (document_BT[b, i] == document_BT[b, j])

    return create_block_mask(sees, B, None, place_BM.shape[1], T, device=document_BT.device)


def _causal(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention to step 0 and its log-sum [B, H, M, 1], which sdpa does not give."""
    B, H, M, d = query.shape
    folded = query.reshape(B, key.shape[1], -1, d)  # queries of a group read one key/value head
    scores = (folded @ key.transpose(-1, -2)).float()
    scores_BHMT = scores.view(B, H, M, key.shape[2]) * d**-0.5 + mask
    log_sum_BHM1 = scores_BHMT.logsumexp(-1, keepdim=True)
    weights = (scores_BHMT - log_sum_BHM1).exp().to(value.dtype)
    seen = weights.view(*folded.shape[:3], -1) @ value
    return seen.view(B, H, M, value.shape[-1]), log_sum_BHM1


def _flex_causal(
    query: Tensor, key: Tensor, value: Tensor, blocks: BlockMask
) -> tuple[Tensor, Tensor]:
    seen, aux = _flex(query.is_cuda)(
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        block_mask=blocks,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    return seen, aux.lse[..., None]


@cache
def _flex(compiled: bool) -> Callable[..., tuple[Tensor, AuxRequest]]:
    return torch.compile(flex_attention) if compiled else flex_attention


def _own_score(query_BHMd: Tensor, key: Tensor) -> Tensor:
    """Return the score [B, H, M] of each query with the key of its own column, in fp32."""
    product = query_BHMd.float() * _shared(key, query_BHMd).float()
    return product.sum(-1) * query_BHMd.shape[-1] ** -0.5


def _shared(states: Tensor, query_BHMd: Tensor) -> Tensor:
    """Repeat key/value heads [B, H/G, M, d] for the query heads that share them."""
    return states.repeat_interleave(query_BHMd.shape[1] // states.shape[1], dim=1)
