"""The decoder layer, norm and rotary embedding that EAGLE-type heads share.

Shapes: B rows, T new tokens, S tokens attended to, D width, H heads, d head width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headstart.heads.attention import grouped_attention
from headstart.heads.cache import KVCache
from headstart.heads.target import TargetShape
from headstart.heads.ttt import Unroll


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class Rotary(nn.Module):
    """cos and sin of the target's rotary embedding, phases in fp32 whatever the head's dtype."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        rope = dict(shape.rope) or {"rope_type": "default", "rope_theta": 10000.0}
        config = LlamaConfig(
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_positions,
            rope_parameters=rope,
        )
        rotary = LlamaRotaryEmbedding(config)
        self.scaling = float(rotary.attention_scaling)
        # Not a buffer: head.to(bfloat16) would round it, and position 257 would become 256. The
        # clone matters: assigning transformers' own tensor registers it as a buffer here too.
        self._frequencies = rotary.inv_freq.float().clone()

    def forward(self, positions_BT: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, 1, T, d] in `dtype`."""
        if self._frequencies.device != positions_BT.device:
            self._frequencies = self._frequencies.to(positions_BT.device)
        phase = positions_BT[:, None, :, None].float() * self._frequencies
        phase = torch.cat((phase, phase), dim=-1)
        return (phase.cos() * self.scaling).to(dtype), (phase.sin() * self.scaling).to(dtype)


def rotate(x_BHTd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (half-split convention)."""
    first, second = x_BHTd.chunk(2, dim=-1)
    return x_BHTd * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and an additive mask.

    `width` is that of its input, where it is not the target's own.
    """

    def __init__(self, shape: TargetShape, width: int | None = None) -> None:
        super().__init__()
        D, d = shape.hidden_size, shape.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(width or D, shape.num_heads * d, bias=False)
        self.k_proj = nn.Linear(width or D, shape.num_kv_heads * d, bias=False)
        self.v_proj = nn.Linear(width or D, shape.num_kv_heads * d, bias=False)
        self.o_proj = nn.Linear(shape.num_heads * d, D, bias=False)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask,
        cache: KVCache | Unroll | None,
        layer: int,
    ) -> Tensor:
        """Attend; with a cache, over what it holds and the new rows; see ttt.py for an Unroll."""
        B, T, _ = x_BTD.shape
        heads = (B, T, -1, self.head_dim)
        query = rotate(self.q_proj(x_BTD).view(heads).transpose(1, 2), *rotary)
        key = rotate(self.k_proj(x_BTD).view(heads).transpose(1, 2), *rotary)
        value = self.v_proj(x_BTD).view(heads).transpose(1, 2)
        if isinstance(cache, Unroll):
            seen = cache.attend(query, key, value, mask, layer)
        else:
            if cache is not None:
                key, value = cache.update(key, value, layer)
            seen = grouped_attention(query, key, value, mask.to(query.dtype))
        return self.o_proj(seen.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(silu(gate x) * up x)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A Llama-type layer; EAGLE-1's first layer has no input norm."""

    def __init__(self, shape: TargetShape, *, input_norm: bool) -> None:
        super().__init__()
        D = shape.hidden_size
        self.input_layernorm = RMSNorm(D, shape.norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(D, shape.norm_eps)
        self.mlp = MLP(D, shape.intermediate_size)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask,
        cache: KVCache | Unroll | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Return the layer's output [B, T, D]; the residual is the un-normed input."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotary, mask, cache, layer)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


def document_mask(document_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive causal mask [B, 1, T, T] that keeps packed documents apart.

    Every position sees itself, padding included, so that no row of the softmax is empty.
    """
    T = document_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=document_BT.device).tril()
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    allowed = (causal_TT & same_BTT)[:, None]
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, float("-inf")
    )
