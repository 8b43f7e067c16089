"""What heads that draft from their own outputs share: unrolled training, drafting with a cache.

Position t takes (embedding of token t+1, feature t) and its output stands for position t+1: it is
read out as token t+2 and, fed back, is the next feature. Training-time test unrolls that: step s at
position i reads token i+1+s and its own output of step s-1, and learns from the teacher at i+1+s.
Shapes: B rows, T tokens, K unrolled steps, F features a position, D width, W draft vocabulary,
M new pairs or nodes (in training: places of a later step), R rows of a pass, P drafted (pending)
nodes, N selected teacher positions.
"""

import copy
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from headstart.heads.base import DraftHead, FeatureBatch, HeadConfig, LossSums, loss_scale
from headstart.heads.cache import KVCache
from headstart.heads.layers import document_mask
from headstart.heads.losses import (
    Distillation,
    Selection,
    Teacher,
    distill,
    loss_terms,
    select,
    token_denominators,
)
from headstart.heads.parts import TargetParts
from headstart.heads.target import pick_features
from headstart.heads.ttt import KINDS, Unroll, document_blocks, recomputed

STEP_DECAY = 0.8


@dataclass
class RecurrentConfig(HeadConfig):
    """What every recurrent head is told about its layers and its unrolled training."""

    num_layers: int = 1
    """Decoder layers."""
    ttt_steps: int = 1
    """Passes of a training step over the head's own outputs; 1 trains on the target's features."""
    step_decay: float = STEP_DECAY
    """Weight of step s is step_decay ** s."""
    ttt_attention: str = "sdpa"
    """sdpa: anywhere; flex: torch's flex attention, which trains on a GPU only (torch 2.9)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_layers < 1:
            raise ValueError(f"head.num_layers={self.num_layers}: need at least one layer")
        if self.ttt_steps < 1:
            raise ValueError(f"head.ttt_steps={self.ttt_steps}: need at least one step")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"head.step_decay={self.step_decay}: expected 0 < decay <= 1")
        if self.ttt_attention not in KINDS:
            raise ValueError(
                f"head.ttt_attention={self.ttt_attention}: expected one of {', '.join(KINDS)}"
            )
        if self.ttt_steps == 1 and self.step_decay != STEP_DECAY:
            warnings.warn(
                f"head.step_decay={self.step_decay} has no effect with head.ttt_steps=1; drop it",
                stacklevel=3,
            )


@dataclass
class RecurrentState:
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


class RecurrentHead(DraftHead):
    """A head whose output is its next feature. Subclasses say how one pass runs, and no more."""

    config: RecurrentConfig
    max_depth = None
    _recompute = False

    @abstractmethod
    def run(
        self,
        embedded_BTD: Tensor,
        feature_BTD: Tensor,
        positions_BT: Tensor,
        mask: Tensor | BlockMask,
        cache: KVCache | Unroll | None = None,
    ) -> Tensor:
        """Return the outputs o [B, T, D] of one pass over (token embedding, feature) pairs."""

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Return what a pass takes for the target's features [B, T, D]."""
        return features_BTF

    def feedback(self, output_BTD: Tensor) -> Tensor:
        """Return what the next pass takes for the head's own outputs."""
        return output_BTD

    def normed(self, output: Tensor) -> Tensor:
        """Return the states [.., D] that the read-out reads of outputs."""
        return output

    @property
    def own_rows_WD(self) -> Tensor | None:
        """The head's own trainable read-out; None reads out by the target's rows."""
        return None

    def read_out(self, output: Tensor, parts: TargetParts) -> Tensor:
        """Return draft logits [.., W] of outputs."""
        return self.draft_readout(parts)(self.normed(output))

    # Training

    def recompute_activations(self) -> None:
        """Run every training pass again in the backward pass, step by step."""
        self._recompute = True

    def unroll(self, batch: FeatureBatch, parts: TargetParts, features_BTF: Tensor) -> Tensor:
        """Return the outputs o of every step [B, T, K, D].

        Later steps run only where one of them is supervised; elsewhere they hold zeros, or values
        that no selection reads.
        """
        dtype, memory = features_BTF.dtype, Unroll()
        embedded_BTD = self._embed_next(batch, parts).to(dtype)
        view = self._view(batch.document_BT, dtype)
        first_BTD = self._pass(
            embedded_BTD, self.fuse(features_BTF), batch.positions_BT, view, memory
        )
        outputs = [first_BTD]
        if self.config.ttt_steps > 1:
            place_BM = self._later_places(batch)
            view = self._view(batch.document_BT, dtype, place_BM)
            output_BMD = _at(first_BTD, place_BM)
        for step in range(1, self.config.ttt_steps):
            embedded_BMD = _at(self._embed_next(batch, parts, step), place_BM).to(dtype)
            positions_BM = batch.positions_BT.gather(1, place_BM) + step
            feature_BMD = self.feedback(output_BMD)
            output_BMD = self._pass(embedded_BMD, feature_BMD, positions_BM, view, memory)
            outputs.append(_spread(output_BMD, place_BM, first_BTD.shape[1]))
        return torch.stack(outputs, dim=2)

    def _pass(self, *inputs: Tensor | BlockMask) -> Tensor:
        """Return the outputs of one training pass; the last input is what it remembers."""
        *inputs, memory = inputs
        if self._recompute and torch.is_grad_enabled():
            return recomputed(self.run, *inputs, memory=memory)
        return self.run(*inputs, memory)

    def _later_places(self, batch: FeatureBatch) -> Tensor:
        """Return the positions [B, M] that a later step is supervised at, filled up with others."""
        picked = select(batch, self.config.ttt_steps, self.config, None, all_supervised=True)
        needed_BT = torch.zeros_like(batch.tokens_BT)
        n, k = picked.valid_NK[:, 1:].nonzero(as_tuple=True)
        needed_BT[picked.row_N[n], picked.student_NK[n, k + 1]] = 1
        most = max(1, int(needed_BT.sum(1).max()))
        return needed_BT.sort(dim=1, descending=True, stable=True).indices[:, :most]

    def _view(
        self, document_BT: Tensor, dtype: torch.dtype, place_BM: Tensor | None = None
    ) -> Tensor | BlockMask:
        """Return what queries at all positions, or at some places, see of step 0."""
        if self.config.ttt_attention == "sdpa":
            mask_B1TT = document_mask(document_BT, dtype)
            return mask_B1TT if place_BM is None else _rows_of(mask_B1TT, place_BM)
        if document_BT.device.type == "cpu" and torch.is_grad_enabled():
            raise ValueError("head.ttt_attention=flex trains on a GPU only; use sdpa")
        return document_blocks(document_BT, place_BM)

    def _embed_next(self, batch: FeatureBatch, parts: TargetParts, step: int = 0) -> Tensor:
        """Return the embedding of token t+1+step at t; past the row's end, of its last token."""
        T = batch.tokens_BT.shape[1]
        place_T = torch.arange(T, device=batch.tokens_BT.device) + 1 + step
        return parts.embed(batch.tokens_BT[:, place_T.clamp(max=T - 1)])

    def _features(self, batch: FeatureBatch) -> Tensor:
        """Return what the head reads of the target, in the dtype it is trained in."""
        features_BTF = pick_features(batch.hidden_BTD, batch.aux, self.aux_features)
        return features_BTF.to(next(self.parameters()).dtype)

    def denominators(self, batch: FeatureBatch) -> dict[str, Tensor]:
        """Count, by loss and step, the positions that the token losses learn from."""
        return token_denominators(
            select(batch, self.config.ttt_steps, self.config, self.vocab), self.config
        )

    def unrolled(self, depth: int) -> "RecurrentHead":
        """Return the head with `depth` steps a training pass, on the same weights."""
        deeper = copy.copy(self)
        deeper.config = replace(self.config, ttt_steps=depth)
        return deeper

    def step_weights(self, device: torch.device) -> Tensor:
        """Return the weight [K] of each step."""
        return self.config.step_decay ** torch.arange(self.config.ttt_steps, device=device).float()

    def distilled(
        self,
        outputs_BTKD: Tensor,
        batch: FeatureBatch,
        parts: TargetParts,
        denominators: dict[str, Tensor] | None,
        weight: float = 1.0,
    ) -> LossSums:
        """Return the sums of the token losses over all steps, and metric sums in eval mode."""
        steps, config = outputs_BTKD.shape[2], self.config
        picked = select(batch, steps, config, self.vocab, all_supervised=not self.training)
        teacher = Teacher.at(batch, picked)
        task = Distillation(teacher, self.draft_readout(parts), config, self.vocab)
        student_NKD = self.normed(at_students(outputs_BTKD, picked))
        step_K = self.step_weights(student_NKD.device)
        weights = {name: w * weight * step_K for name, w in loss_terms(config).items()}
        own, scale = self.own_rows_WD, None
        if own is not None:
            scale = loss_scale(weights, denominators or token_denominators(picked, config))
        numerators, metrics = distill(
            student_NKD, task, own_WD=own, scale_K=scale, metrics=not self.training
        )
        return LossSums(numerators, weights, metrics)

    # Drafting

    def new_state(
        self, batch: int, max_len: int, max_nodes: int, parts: TargetParts
    ) -> RecurrentState:
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
        root_BD = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        return RecurrentState(cache, root_BD, [])

    def extend(
        self,
        state: RecurrentState,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        parts: TargetParts,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Read verified pairs over the committed cache; return first-depth logits [R, 1, W]."""
        R, M = tokens_RM.shape
        cache = state.cache
        positions_RM, masks = cache.open_next(R, M, rows=rows)
        mask, feature_RMD = masks["full_attention"], self.fuse(hidden_RMD)
        output_RMD = self.run(parts.embed(tokens_RM), feature_RMD, positions_RM, mask, cache)
        cache.advance(counts, rows=rows)
        last_R = torch.tensor(counts, device=tokens_RM.device) - 1
        root_RD = output_RMD[torch.arange(R, device=last_R.device), last_R]
        state.root_BD[slice(0, R) if rows is None else list(rows)] = root_RD
        state.outputs, state.visible_RPP, state.position_RP = [], None, None
        return self.read_out(root_RD[:, None], parts)

    def step(
        self, state: RecurrentState, tokens_RM: Tensor, parents_RM: Tensor, parts: TargetParts
    ) -> Tensor:
        """Read drafted nodes, each with its parent's output as feature; return [R, M, W] logits."""
        R = len(tokens_RM)
        outputs_RSD = torch.cat([state.root_BD[:R, None], *state.outputs], dim=1)
        parent_RMD = outputs_RSD.gather(
            1, parents_RM[..., None].expand(-1, -1, outputs_RSD.shape[2])
        )
        positions_RM, visible_RMP = _place(state, parents_RM)
        mask = state.cache.open(positions_RM, visible_RMP)["full_attention"]
        feature_RMD = self.feedback(parent_RMD)
        output_RMD = self.run(parts.embed(tokens_RM), feature_RMD, positions_RM, mask, state.cache)
        state.outputs.append(output_RMD)
        return self.read_out(output_RMD, parts)


def at_students(outputs_BTKD: Tensor, picked: Selection) -> Tensor:
    """Return the outputs [N, K, D] that learn from the selected teacher positions."""
    step_K = torch.arange(outputs_BTKD.shape[2], device=outputs_BTKD.device)
    return outputs_BTKD[picked.row_N[:, None], picked.student_NK, step_K]


def _at(states_BTD: Tensor, place_BM: Tensor) -> Tensor:
    """Return the states [B, M, D] at some places."""
    return states_BTD.gather(1, place_BM[..., None].expand(-1, -1, states_BTD.shape[2]))


def _spread(states_BMD: Tensor, place_BM: Tensor, length: int) -> Tensor:
    """Return the states at their places in [B, T, D], zeros elsewhere."""
    B, _, D = states_BMD.shape
    index_BMD = place_BM[..., None].expand_as(states_BMD)
    return states_BMD.new_zeros(B, length, D).scatter(1, index_BMD, states_BMD)


def _rows_of(mask_B1TT: Tensor, place_BM: Tensor) -> Tensor:
    """Return the rows [B, 1, M, T] of a mask."""
    return mask_B1TT.gather(2, place_BM[:, None, :, None].expand(-1, 1, -1, mask_B1TT.shape[3]))


def _place(state: RecurrentState, parents_RM: Tensor) -> tuple[Tensor, Tensor]:
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
    state.position_RP = positions_RM if P == 0 else torch.cat((position_RS[:, 1:], positions_RM), 1)
    return positions_RM, visible_RMP
