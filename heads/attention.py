"""Masked attention that never copies keys and values for grouped queries.

transformers' sdpa repeats every key/value head for its query heads when a pass has a mask and more
than one query. Here the query heads of a group become more queries of one key/value head instead:
the same sums, no copy. Shapes: B rows, H query heads, G query heads a key/value head, N queries,
S keys, d head width.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "headstart_sdpa"


def grouped_attention(
    query_BHNd: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None
) -> Tensor:
    """Return attention [B, H, N, d] over key/value heads [B, H/G, S, d]; mask [B, 1, N, S]."""
    B, H, N, d = query_BHNd.shape
    groups = H // key.shape[1]
    folded = query_BHNd.reshape(B, key.shape[1], groups * N, d)
    seen = F.scaled_dot_product_attention(
        folded, key, value, attn_mask=mask.repeat(1, 1, groups, 1), scale=scale
    )
    return seen.reshape(B, H, N, value.shape[-1])


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Serve transformers' attention call; without a mask for all heads alike, its own sdpa does."""
    alone = (
        attention_mask is None or attention_mask.shape[1] != 1 or dropout or others.get("softcap")
    )
    if alone or others.get("position_bias") is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
    seen = grouped_attention(query, key, value, attention_mask, scaling)
    return seen.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
