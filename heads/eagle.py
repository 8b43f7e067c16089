"""EAGLE-1 (arXiv 2401.15077): autoregression on the target's features, read out by the target.

Position t takes (embedding of token t+1, feature t) and predicts feature t+1, which the target's
own read-out turns into token t+2. Drafting goes on with its own output in the feature's place, and
with ttt_steps above 1 so does training (HASS, arXiv 2408.15766).
Shapes: B rows, T tokens, K unrolled steps, D width, N selected teacher positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from headstart.heads.base import FeatureBatch, LossSums, register
from headstart.heads.cache import KVCache
from headstart.heads.layers import DecoderLayer, Rotary
from headstart.heads.losses import select
from headstart.heads.parts import TargetParts
from headstart.heads.recurrent import RecurrentConfig, RecurrentHead, at_students
from headstart.heads.target import TargetShape
from headstart.heads.ttt import Unroll
from headstart.heads.vocab import DraftVocab

FEATURE_LOSS = "feature_smoothl1"


@dataclass
class EagleConfig(RecurrentConfig):
    """EAGLE-1: decoder layers over (token embedding, feature) pairs, the first without input norm.

    ttt_steps above 1 is HASS: step s learns the feature and the token at i+1+s from its own output.
    """

    fc_bias: bool = True
    """Whether the fusing projection has a bias."""
    feature_weight: float = 1.0
    """Weight of the smooth-L1 regression onto the next feature."""
    token_weight: float = 0.1
    """Weight of the token loss."""
    feature_noise: float = 0.1
    """Half-width of the uniform noise added to features in training; 0 turns it off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("feature_weight", "token_weight", "feature_noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"head.{name}={getattr(self, name)}: expected 0 or more")
        if self.feature_weight == 0 and self.token_weight == 0:
            raise ValueError("head.feature_weight=0 and head.token_weight=0: nothing to train on")


@register("eagle", EagleConfig)
class EagleHead(RecurrentHead):
    """fc over [embedding; feature], decoder layers, the target's frozen read-out."""

    config: EagleConfig

    def __init__(self, config: EagleConfig, shape: TargetShape, vocab: DraftVocab | None) -> None:
        super().__init__(config, shape, vocab)
        D = shape.hidden_size
        self.fc = nn.Linear(2 * D, D, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            DecoderLayer(shape, input_norm=layer > 0) for layer in range(config.num_layers)
        )
        self.rotary = Rotary(shape)

    def initialise(self, parts: TargetParts) -> None:
        """Start from the feature as it is, the token embedding brought to unit size beside it.

        A target's embedding can be far smaller than its states (SmolLM2: 0.12 against 2.0 root mean
        square): unscaled, the head would hardly see the newest token at first.
        """
        size = parts.embedding_VD.float().square().mean().sqrt().item() * parts.embed_scale
        D = self.shape.hidden_size
        with torch.no_grad():
            self.fc.weight[:, :D] /= max(size, 1e-6)
            nn.init.eye_(self.fc.weight[:, D:])

    def run(
        self,
        embedded_BTD: Tensor,
        feature_BTD: Tensor,
        positions_BT: Tensor,
        mask: Tensor | BlockMask,
        cache: KVCache | Unroll | None = None,
    ) -> Tensor:
        """Return the outputs o [B, T, D], which stand for the features one position on."""
        x_BTD = self.fc(torch.cat((embedded_BTD, feature_BTD), dim=-1))
        rotary = self.rotary(positions_BT, x_BTD.dtype)
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, rotary, mask, cache, index)
        return x_BTD

    def denominators(self, batch: FeatureBatch) -> dict[str, Tensor]:
        """Count supervised positions; the regression counts out-of-vocabulary labels too."""
        everywhere = select(batch, self.config.ttt_steps, self.config, None)
        return super().denominators(batch) | {FEATURE_LOSS: everywhere.valid_NK.sum(0).float()}

    def forward(
        self,
        batch: FeatureBatch,
        parts: TargetParts,
        generator: torch.Generator | None = None,
        denominators: dict[str, Tensor] | None = None,
    ) -> LossSums:
        """Return the sums of feature regression and token distillation, by step."""
        features_BTD = self._noisy(self._features(batch), generator)
        outputs_BTKD = self.unroll(batch, parts, features_BTD)
        sums = self.distilled(outputs_BTKD, batch, parts, denominators, self.config.token_weight)
        step_K = self.step_weights(outputs_BTKD.device)
        sums.numerators[FEATURE_LOSS] = self._feature_error(outputs_BTKD, batch)
        sums.weights[FEATURE_LOSS] = self.config.feature_weight * step_K
        return sums

    def _feature_error(self, outputs_BTKD: Tensor, batch: FeatureBatch) -> Tensor:
        """Return the regression's numerators [K]: step s at i is held to feature i+1+s."""
        picked = select(batch, self.config.ttt_steps, self.config, None)
        output_NKD = at_students(outputs_BTKD, picked).float()
        feature_N1D = batch.hidden_BTD[picked.row_N, picked.position_N, None].float()
        feature_NKD = feature_N1D.expand_as(output_NKD)
        error_NKD = F.smooth_l1_loss(output_NKD, feature_NKD, reduction="none")
        return (error_NKD.mean(-1) * picked.valid_NK).sum(0)

    def _noisy(self, hidden_BTD: Tensor, generator: torch.Generator | None) -> Tensor:
        if not self.training or self.config.feature_noise == 0:
            return hidden_BTD
        noise = torch.empty_like(hidden_BTD)
        noise.uniform_(-self.config.feature_noise, self.config.feature_noise, generator=generator)
        return hidden_BTD + noise
