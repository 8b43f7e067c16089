"""EAGLE-1 (arXiv 2401.15077): autoregression on the target's features, read out by the target.

Position t takes (embedding of token t+1, feature t) and predicts feature t+1, which the target's
own read-out turns into token t+2. Drafting goes on with its own output in the feature's place.
Shapes: B rows, T tokens, D width, W draft vocabulary, M new pairs or nodes, R rows of a pass,
P drafted (pending) nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headstart.heads.base import DraftHead, FeatureBatch, HeadConfig, LossSums, register
from headstart.heads.cache import KVCache
from headstart.heads.layers import DecoderLayer, Rotary, document_mask
from headstart.heads.losses import Distillation, Teacher, distill, select
from headstart.heads.parts import TargetParts
from headstart.heads.target import TargetShape
from headstart.heads.vocab import DraftVocab


@dataclass
class EagleConfig(HeadConfig):
    """EAGLE-1: one decoder layer over (token embedding, feature) pairs."""

    num_layers: int = 1
    """Decoder layers; the first has no input norm."""
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
        if self.num_layers < 1:
            raise ValueError(f"head.num_layers={self.num_layers}: need at least one layer")
        for name in ("feature_weight", "token_weight", "feature_noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"head.{name}={getattr(self, name)}: expected 0 or more")
        if self.feature_weight == 0 and self.token_weight == 0:
            raise ValueError("head.feature_weight=0 and head.token_weight=0: nothing to train on")


@dataclass
class EagleState:
    """Drafting state: the cache of verified pairs, the last outputs, and the drafted nodes so far.

    Slot 0 is the root's output; slots 1.. are drafted nodes, in the order they were stepped. Node
    rows of the cache lie after its committed length, so dropping a draft costs nothing.
    """

    cache: KVCache
    root_BD: Tensor
    outputs: list[Tensor]
    visible_RPP: Tensor | None = None
    position_RP: Tensor | None = None

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row over another; drafts in progress are dropped by the next extend."""
        self.cache.move_row(source, destination)
        self.root_BD[destination] = self.root_BD[source]

    def reset(self, row: int) -> None:
        """Forget one row."""
        self.cache.reset(row)


@register("eagle", EagleConfig)
class EagleHead(DraftHead):
    """fc over [embedding; feature], decoder layers, the target's frozen read-out."""

    config: EagleConfig
    max_depth = None

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
        mask: Tensor,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the outputs o [B, T, D], which stand for the features one position on."""
        x_BTD = self.fc(torch.cat((embedded_BTD, feature_BTD), dim=-1))
        rotary = self.rotary(positions_BT, x_BTD.dtype)
        for index, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, rotary, mask, cache, index)
        return x_BTD

    def denominators(self, batch: FeatureBatch) -> dict[str, Tensor]:
        """Count supervised positions; the regression counts out-of-vocabulary labels too."""
        token = select(batch, 1, self.config, self.vocab).learned_NK.sum(0).float()
        feature = select(batch, 1, self.config, None).valid_NK.sum(0).float()
        return {self.config.loss: token, "feature_smoothl1": feature}

    def forward(
        self, batch: FeatureBatch, parts: TargetParts, generator: torch.Generator | None = None
    ) -> LossSums:
        """Return the sums of feature regression and token distillation, one depth."""
        dtype = self.fc.weight.dtype
        output_BTD = self.run(
            self._embed_next(batch, parts).to(dtype),
            self._noisy(batch.hidden_BTD.to(dtype), generator),
            batch.positions_BT,
            document_mask(batch.document_BT, dtype),
        )
        feature = select(batch, 1, self.config, None)
        error_ND = F.smooth_l1_loss(
            output_BTD[feature.row_N, feature.student_NK[:, 0]].float(),
            batch.hidden_BTD[feature.row_N, feature.position_N].float(),
            reduction="none",
        )
        token = select(batch, 1, self.config, self.vocab, all_supervised=not self.training)
        task = Distillation(
            Teacher.at(batch, token), self.draft_readout(parts), self.config, self.vocab
        )
        student_NKD = output_BTD[token.row_N[:, None], token.student_NK]
        numerators, metrics = distill(student_NKD, task, metrics=not self.training)
        counts = token.valid_NK.sum(0).float()
        ones = torch.ones(1, device=counts.device)
        return LossSums(
            {self.config.loss: numerators, "feature_smoothl1": error_ND.mean(-1).sum()[None]},
            {
                self.config.loss: ones * self.config.token_weight,
                "feature_smoothl1": ones * self.config.feature_weight,
            },
            {name: (value, counts) for name, value in metrics.items()},
        )

    def _embed_next(self, batch: FeatureBatch, parts: TargetParts) -> Tensor:
        """Return the embedding of token t+1 at t; the last column has none and repeats itself."""
        return parts.embed(torch.cat((batch.tokens_BT[:, 1:], batch.tokens_BT[:, -1:]), dim=1))

    def _noisy(self, hidden_BTD: Tensor, generator: torch.Generator | None) -> Tensor:
        if not self.training or self.config.feature_noise == 0:
            return hidden_BTD
        noise = torch.empty_like(hidden_BTD)
        noise.uniform_(-self.config.feature_noise, self.config.feature_noise, generator=generator)
        return hidden_BTD + noise

    def new_state(self, batch: int, max_len: int, max_nodes: int, parts: TargetParts) -> EagleState:
        """Make an empty drafting state."""
        weight = parts.readout.weight_WD
        cache = KVCache(
            batch,
            max_len,
            max_nodes,
            dtype=weight.dtype,
            device=weight.device,
            num_layers=self.config.num_layers,
        )
        shape = (batch, self.shape.hidden_size)
        return EagleState(cache, torch.zeros(shape, dtype=weight.dtype, device=weight.device), [])

    def extend(
        self,
        state: EagleState,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        parts: TargetParts,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Read verified pairs over the committed cache; return first-depth logits [R, 1, W]."""
        R, M = tokens_RM.shape
        cache = state.cache
        lengths = cache.lengths[:R] if rows is None else [cache.lengths[r] for r in rows]
        starts_R1 = torch.tensor(lengths, device=tokens_RM.device)[:, None]
        positions_RM = starts_R1 + torch.arange(M, device=tokens_RM.device)
        causal_MM = torch.ones(M, M, dtype=torch.bool, device=tokens_RM.device).tril()
        mask = cache.open(positions_RM, causal_MM.expand(R, M, M), rows=rows)["full_attention"]
        output_RMD = self.run(parts.embed(tokens_RM), hidden_RMD, positions_RM, mask, cache)
        cache.advance(counts, rows=rows)
        last_R = torch.tensor(counts, device=tokens_RM.device) - 1
        root_RD = output_RMD[torch.arange(R, device=last_R.device), last_R]
        state.root_BD[slice(0, R) if rows is None else list(rows)] = root_RD
        state.outputs, state.visible_RPP, state.position_RP = [], None, None
        return self.draft_readout(parts)(root_RD[:, None])

    def step(
        self, state: EagleState, tokens_RM: Tensor, parents_RM: Tensor, parts: TargetParts
    ) -> Tensor:
        """Read drafted nodes, each with its parent's output as feature; return [R, M, W] logits."""
        R, M = tokens_RM.shape
        outputs_RSD = torch.cat([state.root_BD[:R, None], *state.outputs], dim=1)
        feature_RMD = outputs_RSD.gather(
            1, parents_RM[..., None].expand(-1, -1, outputs_RSD.shape[2])
        )
        positions_RM, visible_RMP = self._place(state, parents_RM)
        mask = state.cache.open(positions_RM, visible_RMP)["full_attention"]
        output_RMD = self.run(parts.embed(tokens_RM), feature_RMD, positions_RM, mask, state.cache)
        state.outputs.append(output_RMD)
        return self.draft_readout(parts)(output_RMD)

    def _place(self, state: EagleState, parents_RM: Tensor) -> tuple[Tensor, Tensor]:
        """Give new nodes their positions and their view of the drafted nodes; record both."""
        R, M = parents_RM.shape
        device = parents_RM.device
        P = 0 if state.visible_RPP is None else state.visible_RPP.shape[1]
        # The root's own pair is the last committed row, one position before the length.
        before_R1 = torch.tensor(state.cache.lengths[:R], device=device)[:, None] - 1
        if P == 0:
            position_RS, seen_RSP = before_R1, torch.zeros(R, 1, 0, dtype=torch.bool, device=device)
        else:
            position_RS = torch.cat((before_R1, state.position_RP), dim=1)
            nothing = torch.zeros(R, 1, P, dtype=torch.bool, device=device)
            seen_RSP = torch.cat((nothing, state.visible_RPP), dim=1)
        positions_RM = position_RS.gather(1, parents_RM) + 1
        inherited_RMP = seen_RSP.gather(1, parents_RM[..., None].expand(R, M, P))
        itself = torch.eye(M, dtype=torch.bool, device=device).expand(R, M, M)
        visible_RMP = torch.cat((inherited_RMP, itself), dim=2)
        earlier = seen_RSP[:, 1:]
        grown = torch.cat((earlier, earlier.new_zeros(R, P, M)), dim=2)
        state.visible_RPP = torch.cat((grown, visible_RMP), dim=1)
        state.position_RP = (
            positions_RM if P == 0 else torch.cat((position_RS[:, 1:], positions_RM), 1)
        )
        return positions_RM, visible_RMP
