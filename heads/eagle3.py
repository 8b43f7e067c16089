"""EAGLE-3 (arXiv 2503.01840) and its 3.1 options: states of several layers fused, own read-out.

Position t takes (embedding of token t+1, fused states at t); drafting, and training from its second
step on, goes on with the head's own output in their place. Nothing is regressed onto features.
Shapes: B rows, T tokens, F tapped states, D width, W draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from headstart.heads.base import FeatureBatch, LossSums, register
from headstart.heads.cache import KVCache
from headstart.heads.layers import MLP, Attention, DecoderLayer, RMSNorm, Rotary
from headstart.heads.packing import dense_weight
from headstart.heads.parts import TargetParts
from headstart.heads.recurrent import RecurrentConfig, RecurrentHead
from headstart.heads.target import AUX_CONVENTION, TargetShape
from headstart.heads.ttt import Unroll
from headstart.heads.vocab import DraftVocab

READOUTS = ("random", "frozen", "trained")
FEEDBACKS = ("pre_norm", "post_norm")


@dataclass
class Eagle3Config(RecurrentConfig):
    """EAGLE-3: fused states, a first layer of double width, trained on its own outputs."""

    ttt_steps: int = 3
    """Passes of a training step over the head's own outputs; 1 trains on the target's states."""
    aux: list[int] | None = None
    """hidden_states[s] that are fused, ascending; null means [2, L//2, L-3] of L layers."""
    readout: str = "trained"
    """random or trained: an own read-out, the latter started from the target's rows; frozen: the
    target's rows."""
    norm_before_residual: bool = False
    """Whether the first layer's residual is the normed feature rather than the feature."""
    fc_norm: bool = False
    """EAGLE-3.1: norm each tapped state before they are fused."""
    norm_before_fc: bool = False
    """EAGLE-3.1: norm the tapped states together before they are fused."""
    feedback: str = "pre_norm"
    """What the next step is fed, the output before or (EAGLE-3.1) after the final norm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, known in (("readout", READOUTS), ("feedback", FEEDBACKS)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"head.{name}={getattr(self, name)}: expected one of {', '.join(known)}"
                )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "head.fc_norm=true and head.norm_before_fc=true: states are normed one by one or "
                "together; choose one"
            )

    def taps(self, shape: TargetShape) -> tuple[int, ...]:
        """Return the tapped s, checked against the target's layers."""
        L = shape.num_layers
        aux = (2, L // 2, L - 3) if self.aux is None else tuple(self.aux)
        if not aux or list(aux) != sorted(set(aux)) or aux[0] <= 0 or aux[-1] >= L:
            given = "null" if self.aux is None else str(self.aux)
            raise ValueError(
                f"head.aux={given} taps {list(aux)} of a target of {L} layers: give ascending, "
                f"distinct s with 0 < s < {L} ({AUX_CONVENTION}; s = {L} is post-norm)"
            )
        return aux


class FusingLayer(nn.Module):
    """The first layer: attention reads [normed embedding; normed feature], the residual is one D.

    The residual is the feature as it came, or under norm_before_residual the normed one.
    """

    def __init__(self, shape: TargetShape, *, norm_before_residual: bool) -> None:
        super().__init__()
        D = shape.hidden_size
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(D, shape.norm_eps)
        self.hidden_norm = RMSNorm(D, shape.norm_eps)
        self.self_attn = Attention(shape, width=2 * D)
        self.post_attention_layernorm = RMSNorm(D, shape.norm_eps)
        self.mlp = MLP(D, shape.intermediate_size)

    def forward(
        self,
        embedded_BTD: Tensor,
        feature_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        mask: Tensor | BlockMask,
        cache: KVCache | Unroll | None,
    ) -> Tensor:
        """Return the layer's output [B, T, D]."""
        normed_BTD = self.hidden_norm(feature_BTD)
        both = torch.cat((self.input_layernorm(embedded_BTD), normed_BTD), dim=-1)
        x_BTD = normed_BTD if self.norm_before_residual else feature_BTD
        x_BTD = x_BTD + self.self_attn(both, rotary, mask, cache, 0)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


@register("eagle3", Eagle3Config)
class Eagle3Head(RecurrentHead):
    """fc over tapped states, the fusing layer, further plain layers, a final norm and a read-out.

    Layers after the first are the target's kind, each with a norm over its own input; the token
    embedding enters the first one only. Rows of an own read-out are saved, those of the target's
    are not.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, shape: TargetShape, vocab: DraftVocab | None) -> None:
        super().__init__(config, shape, vocab)
        D, F, eps = shape.hidden_size, len(self.aux_features), shape.norm_eps
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(D, eps) for _ in range(F))
        if config.norm_before_fc:
            self.norm_before_fc = RMSNorm(F * D, eps)
        self.fc = nn.Linear(F * D, D, bias=False)
        first = FusingLayer(shape, norm_before_residual=config.norm_before_residual)
        further = (DecoderLayer(shape, input_norm=True) for _ in range(config.num_layers - 1))
        self.layers = nn.ModuleList((first, *further))
        self.norm = RMSNorm(D, eps)
        if config.readout != "frozen":
            self.lm_head = nn.Linear(D, self.num_draft_tokens, bias=False)
        self.rotary = Rotary(shape)

    def initialise(self, parts: TargetParts) -> None:
        """Start from the last tapped state as it is, and read out by the target's rows.

        That state lies nearest the read-out, in whose terms it is already written: SmolLM2's head
        was at a held-out KL of 2.40 after 160 small steps, from a random fc at 2.73 (one seed). The
        first layer norms the token embedding, so its size needs no care here.
        """
        D = self.shape.hidden_size
        with torch.no_grad():
            self.fc.weight.zero_()
            nn.init.eye_(self.fc.weight[:, -D:])
        if self.config.readout == "trained":
            self.copy_target_rows(self.lm_head.weight, parts, instead="frozen")

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Return fc over the tapped states [B, T, F*D], normed as the config says."""
        if self.config.fc_norm:
            chunks = features_BTF.chunk(len(self.aux_features), dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            features_BTF = torch.cat(normed, dim=-1)
        elif self.config.norm_before_fc:
            features_BTF = self.norm_before_fc(features_BTF)
        return self.fc(features_BTF)

    def run(
        self,
        embedded_BTD: Tensor,
        feature_BTD: Tensor,
        positions_BT: Tensor,
        mask: Tensor | BlockMask,
        cache: KVCache | Unroll | None = None,
    ) -> Tensor:
        """Return the outputs o [B, T, D], before the final norm."""
        rotary = self.rotary(positions_BT, feature_BTD.dtype)
        x_BTD = self.layers[0](embedded_BTD, feature_BTD, rotary, mask, cache)
        for index, layer in enumerate(self.layers[1:], start=1):
            x_BTD = layer(x_BTD, rotary, mask, cache, index)
        return x_BTD

    def feedback(self, output_BTD: Tensor) -> Tensor:
        """Return the outputs, through the final norm where the config says so."""
        return self.norm(output_BTD) if self.config.feedback == "post_norm" else output_BTD

    def normed(self, output: Tensor) -> Tensor:
        """Return the outputs through the final norm."""
        return self.norm(output)

    @property
    def own_rows_WD(self) -> Tensor | None:
        """The trainable read-out [W, D], unless it is the target's."""
        return None if self.config.readout == "frozen" else dense_weight(self.lm_head)

    def read_out(self, output: Tensor, parts: TargetParts) -> Tensor:
        """Return draft logits [.., W] of outputs."""
        if self.config.readout == "frozen":
            return super().read_out(output, parts)
        return parts.readout.post(self.lm_head(self.norm(output)))

    def forward(
        self,
        batch: FeatureBatch,
        parts: TargetParts,
        generator: torch.Generator | None = None,
        denominators: dict[str, Tensor] | None = None,
    ) -> LossSums:
        """Return the sums of the token losses by step."""
        outputs_BTKD = self.unroll(batch, parts, self._features(batch))
        return self.distilled(outputs_BTKD, batch, parts, denominators)
