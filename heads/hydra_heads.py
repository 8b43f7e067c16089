"""Hydra heads (arXiv 2402.05109): Medusa whose head k also reads the k+1 tokens drafted before it.

Head k (from 0) at position t takes a context c of position t and the embeddings of tokens t+1 to
t+1+k; it predicts token t+2+k, and its teacher is the target at t+1+k. Drafting feeds the tokens on
the path to a node, so every expanded node costs one evaluation of a small head.
Shapes: B rows, T tokens, D width, W draft vocabulary, K heads, N selected positions, M new pairs or
nodes, R rows of a pass, k tokens of a path (root first), S nodes of the level above.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headstart.heads.base import DraftHead, FeatureBatch, HeadConfig, LossSums, register
from headstart.heads.cache import KVCache
from headstart.heads.layers import DecoderLayer, RMSNorm, Rotary, document_mask
from headstart.heads.losses import Selection, select, token_denominators
from headstart.heads.medusa import READOUTS, ResidualBlock, distilled_by_head
from headstart.heads.parts import TargetParts
from headstart.heads.target import TargetShape
from headstart.heads.vocab import DraftVocab

ARCHS = ("mlp", "prefix-mlp")


@dataclass
class HydraHeadsConfig(HeadConfig):
    """Hydra heads: Medusa heads that see the tokens drafted before theirs."""

    num_heads: int = 4
    """Deepest draft, one head a depth."""
    num_layers: int = 1
    """Layers a head: the first takes context and tokens in, the others are residual blocks."""
    arch: str = "mlp"
    """mlp: the context is the last state; prefix-mlp: a decoder layer over the last states."""
    readout: str = "tied"
    """tied: the target's frozen rows; own: a trainable copy a head."""
    depth_decay: float = 0.8
    """Weight of head k is depth_decay ** (k + 1), as for Medusa; not studied here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_heads", "num_layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"head.{name}={getattr(self, name)}: need at least one")
        for name, allowed in (("arch", ARCHS), ("readout", READOUTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"head.{name}={getattr(self, name)}: expected one of {', '.join(allowed)}"
                )
        if not 0 < self.depth_decay <= 1:
            raise ValueError(f"head.depth_decay={self.depth_decay}: expected 0 < decay <= 1")


class SequentialMLP(nn.Module):
    """Head k: y = R u + SiLU(A u) of u = [context; k+1 embeddings], then residual blocks."""

    def __init__(self, width: int, num_tokens: int, num_layers: int) -> None:
        super().__init__()
        self.skip = nn.Linear((1 + num_tokens) * width, width)
        self.branch = nn.Linear((1 + num_tokens) * width, width)
        self.blocks = nn.Sequential(*(ResidualBlock(width) for _ in range(num_layers - 1)))

    def initialise(self) -> None:
        """Return the context as it is: R = (I, 0, .., 0), all else zero."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        with torch.no_grad():
            nn.init.eye_(self.skip.weight[:, : self.skip.out_features])

    def forward(self, context_D: Tensor, path_kD: Tensor) -> Tensor:
        """Return the state to read out [.., D] of contexts [.., D] and embeddings [.., k, D]."""
        u = torch.cat((context_D[..., None, :], path_kD), dim=-2).flatten(-2)
        return self.blocks(self.skip(u) + F.silu(self.branch(u)))


class PrefixLayer(nn.Module):
    """The context of `prefix-mlp`: a causal decoder layer with final norm over the last states."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.layer = DecoderLayer(shape, input_norm=True)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.rotary = Rotary(shape)

    def initialise(self) -> None:
        """Start as the norm alone: the context points where the last state does."""
        nn.init.zeros_(self.layer.self_attn.o_proj.weight)
        nn.init.zeros_(self.layer.mlp.down_proj.weight)

    def forward(
        self, hidden_BTD: Tensor, positions_BT: Tensor, mask: Tensor, cache: KVCache | None = None
    ) -> Tensor:
        """Return the contexts [B, T, D]."""
        rotary = self.rotary(positions_BT, hidden_BTD.dtype)
        return self.norm(self.layer(hidden_BTD, rotary, mask, cache))


@dataclass
class HydraHeadsState:
    """Drafting state: context and root of each row, and the paths to the nodes stepped last.

    Nodes of a level are stepped in one call, so head and path length are the same for all of them.
    The cache holds the prefix layer's verified positions; drafted tokens never enter it.
    """

    context_BD: Tensor
    root_B: Tensor
    cache: KVCache | None
    paths_RSk: Tensor | None = None
    first_slot: int = 0
    """Slot of the first node of paths_RSk; with no path yet, the root in slot 0 stands there."""

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row over another; drafts in progress are dropped by the next extend."""
        self.context_BD[destination] = self.context_BD[source]
        self.root_B[destination] = self.root_B[source]
        if self.cache is not None:
            self.cache.move_row(source, destination)

    def reset(self, row: int) -> None:
        """Forget one row."""
        if self.cache is not None:
            self.cache.reset(row)


@register("hydra_heads", HydraHeadsConfig)
class HydraHeads(DraftHead):
    """K heads over a context and the tokens after it; no head's output is fed back."""

    config: HydraHeadsConfig
    _recompute = False

    def __init__(
        self, config: HydraHeadsConfig, shape: TargetShape, vocab: DraftVocab | None
    ) -> None:
        super().__init__(config, shape, vocab)
        self.heads = nn.ModuleList(
            SequentialMLP(shape.hidden_size, k + 1, config.num_layers)
            for k in range(config.num_heads)
        )
        self.prefix = PrefixLayer(shape) if config.arch == "prefix-mlp" else None
        own = (config.num_heads, self.num_draft_tokens, shape.hidden_size)
        self.lm_heads_KWD = nn.Parameter(torch.zeros(own)) if config.readout == "own" else None

    @property
    def max_depth(self) -> int:
        """One depth a head."""
        return self.config.num_heads

    def initialise(self, parts: TargetParts) -> None:
        """Start where Medusa starts: every head reads the context out as the target would."""
        for head in self.heads:
            head.initialise()
        if self.prefix is not None:
            self.prefix.initialise()
        if self.lm_heads_KWD is not None:
            self.copy_target_rows(self.lm_heads_KWD, parts, instead="tied")

    def recompute_activations(self) -> None:
        """Run the prefix layer again in the backward pass; refused where there is none."""
        if self.prefix is None:
            super().recompute_activations()
        self._recompute = True

    def layers_to_compile(self) -> list[nn.Module]:
        """Return every head, and the layer of the prefix."""
        prefix = [] if self.prefix is None else [self.prefix.layer]
        return [*super().layers_to_compile(), *prefix]

    def denominators(self, batch: FeatureBatch) -> dict[str, Tensor]:
        """Count supervised positions a head."""
        picked = select(batch, self.config.num_heads, self.config, self.vocab)
        return token_denominators(picked, self.config)

    def forward(
        self,
        batch: FeatureBatch,
        parts: TargetParts,
        generator: torch.Generator | None = None,
        denominators: dict[str, Tensor] | None = None,
    ) -> LossSums:
        """Return the loss sums by head, each fed the data's own tokens."""
        K = self.config.num_heads
        picked = select(batch, K, self.config, self.vocab, all_supervised=not self.training)
        return distilled_by_head(self, self.states(batch, picked, parts), picked, batch, parts)

    def states(self, batch: FeatureBatch, picked: Selection, parts: TargetParts) -> Tensor:
        """Return what each head reads out at its selected position [N, K, D].

        The last token fed in is the one at the teacher's position, so a supervised position asks
        for no token past its document; the others may repeat the row's last and are not counted.
        """
        dtype = self.heads[0].skip.weight.dtype
        context_BTD = batch.hidden_BTD.to(dtype)
        if self.prefix is not None:
            mask = document_mask(batch.document_BT, dtype)
            inputs = (context_BTD, batch.positions_BT, mask)
            if self._recompute:
                context_BTD = checkpoint(self.prefix, *inputs, use_reentrant=False)
            else:
                context_BTD = self.prefix(*inputs)
        last, row_N1 = batch.tokens_BT.shape[1] - 1, picked.row_N[:, None]
        states = []
        for k, head in enumerate(self.heads):
            student_N = picked.student_NK[:, k]
            fed_Nk = student_N[:, None] + 1 + torch.arange(k + 1, device=student_N.device)
            tokens_Nk = batch.tokens_BT[row_N1, fed_Nk.clamp(max=last)]
            context_ND = context_BTD[picked.row_N, student_N]
            states.append(head(context_ND, parts.embed(tokens_Nk).to(dtype)))
        return torch.stack(states, dim=1)

    def new_state(
        self, batch: int, max_len: int, max_nodes: int, parts: TargetParts
    ) -> HydraHeadsState:
        """Make an empty drafting state."""
        weight = parts.readout.weight_WD
        kind = {"dtype": weight.dtype, "device": weight.device}
        return HydraHeadsState(
            torch.zeros(batch, self.shape.hidden_size, **kind),
            torch.zeros(batch, dtype=torch.int64, device=weight.device),
            None if self.prefix is None else KVCache(batch, max_len, max_nodes, **kind),
        )

    def extend(
        self,
        state: HydraHeadsState,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        parts: TargetParts,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Read verified pairs; return head 0's logits [R, 1, W] after each row's last one."""
        context_RMD = self._contexts(state, hidden_RMD, counts, rows)
        row_R = torch.arange(len(counts), device=tokens_RM.device)
        last_R = torch.tensor(counts, device=tokens_RM.device) - 1
        context_RD, root_R = context_RMD[row_R, last_R], tokens_RM[row_R, last_R]
        place = slice(0, len(counts)) if rows is None else list(rows)
        state.context_BD[place], state.root_B[place] = context_RD, root_R
        state.paths_RSk, state.first_slot = None, 0
        return self._logits(context_RD, root_R[:, None, None], parts)

    def step(
        self, state: HydraHeadsState, tokens_RM: Tensor, parents_RM: Tensor, parts: TargetParts
    ) -> Tensor:
        """Evaluate the next head once a node, over the path to it; return [R, M, W] logits.

        One call takes nodes of one level: their parents are the nodes of the call before.
        """
        R = len(tokens_RM)
        above_RSk = state.root_B[:R, None, None] if state.paths_RSk is None else state.paths_RSk
        index_RM1 = (parents_RM - state.first_slot)[..., None]
        inherited_RMk = above_RSk.gather(1, index_RM1.expand(-1, -1, above_RSk.shape[2]))
        state.paths_RSk = torch.cat((inherited_RMk, tokens_RM[..., None]), dim=2)
        state.first_slot += above_RSk.shape[1]
        return self._logits(state.context_BD[:R], state.paths_RSk, parts)

    def _contexts(
        self,
        state: HydraHeadsState,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        rows: Sequence[int] | None,
    ) -> Tensor:
        """Return contexts [R, M, D]; the prefix layer reads on over its committed cache."""
        if self.prefix is None:
            return hidden_RMD
        R, M = hidden_RMD.shape[:2]
        positions_RM, masks = state.cache.open_next(R, M, rows=rows)
        context_RMD = self.prefix(hidden_RMD, positions_RM, masks["full_attention"], state.cache)
        state.cache.advance(counts, rows=rows)
        return context_RMD

    def _logits(self, context_RD: Tensor, paths_RMk: Tensor, parts: TargetParts) -> Tensor:
        """Return the logits [R, M, W] after paths of k tokens, of head k-1."""
        k = paths_RMk.shape[2]
        assert k <= len(self.heads), f"depth {k} of {len(self.heads)} heads"
        context_RMD = context_RD[:, None].expand(-1, paths_RMk.shape[1], -1)
        state_RMD = self.heads[k - 1](context_RMD, parts.embed(paths_RMk))
        readout = self.draft_readout(parts)
        if self.lm_heads_KWD is None:
            return readout(state_RMD)
        return readout.post(F.linear(state_RMD, self.lm_heads_KWD[k - 1]))
