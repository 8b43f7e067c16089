"""Features of token rows, made online by the target: what training reads when nothing is stored.

Shapes: B rows, T tokens (right-padded, or packed), D width, P packed rows, N positions.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from headstart.data.packing import Layout
from headstart.data.token_row import TokenRow, row_lengths
from headstart.heads.base import FeatureBatch
from headstart.heads.chunks import PIECE, PIECE_CPU, slices
from headstart.heads.parts import ReadOut, TargetParts
from headstart.heads.target import Target

READOUT_CHUNK = 512  # positions whose full-vocabulary logits are held at once


class FeatureSource(Protocol):
    """Rows with features by index; training cannot tell an online source from a stored one."""

    parts: TargetParts
    lengths: list[int]
    """Tokens of each row."""

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return these rows with their features, right-padded to the longest."""


class OnlineFeatures:
    """Runs the target whenever rows are asked for."""

    def __init__(self, target: Target, rows: Sequence[TokenRow], taps: Sequence[int] = ()) -> None:
        self.target, self.rows, self.taps = target, rows, tuple(taps)
        self.parts = target.parts
        self.lengths = row_lengths(rows)
        self.stage: Callable[[str], AbstractContextManager] = nullcontext
        """Entered with "target" around the target's passes, by whom wants to time them."""

    def batch(self, indices: Sequence[int], layout: Layout | None = None) -> FeatureBatch:
        """Return these rows with features made now; the target itself runs over a layout."""
        rows = [self.rows[i] for i in indices]
        with self.stage("target"):
            return make_features(self.target, rows, indices, self.taps, layout)


class PackedFeatures:
    """Rows of another source, several in a packed row; stored or online makes no difference.

    Raises ValueError for an online target whose attention does not keep packed rows apart.
    """

    def __init__(self, source: FeatureSource, tokens: int) -> None:
        self.source, self.tokens = source, tokens
        self.parts, self.lengths = source.parts, source.lengths
        if isinstance(source, OnlineFeatures):
            refuse_leaks(source.target)

    def batch(self, packs: Sequence[Sequence[int]]) -> FeatureBatch:
        """Return packed rows of `tokens` tokens, with their features."""
        layout = Layout.of([[self.lengths[i] for i in pack] for pack in packs], self.tokens)
        indices = [i for pack in packs for i in pack]
        if isinstance(self.source, OnlineFeatures):
            return self.source.batch(indices, layout)
        return layout.pack(self.source.batch(indices))


def ranks_together(source: FeatureSource) -> int:
    """Return how many ranks must ask a source for the same rows at the same time."""
    inner = source.source if isinstance(source, PackedFeatures) else source
    return inner.target.tensor_ranks if isinstance(inner, OnlineFeatures) else 1


@torch.no_grad()
def make_features(
    target: Target,
    rows: Sequence[TokenRow],
    row_ids: Sequence[int],
    taps: Sequence[int] = (),
    layout: Layout | None = None,
    *,
    rounded: torch.dtype | None = None,
) -> FeatureBatch:
    """Run the target over rows, right-padded or packed by a layout, and return their features.

    `rounded` is the type that the last state will be stored in: the teacher's statistics are then
    those of the state that a reader will see.
    """
    device = target.device
    tokens_BT = _padded([row.token_ids for row in rows], 0).to(device)
    mask_BT = _padded([row.loss_mask for row in rows], 0).bool().to(device)
    if layout is None:
        # No positions for the target: their default, and the faster attention that knows no mask.
        lengths_B = torch.tensor([len(row.token_ids) for row in rows], device=device)
        places_BT = torch.arange(tokens_BT.shape[1], device=device).expand_as(tokens_BT)
        document_BT = torch.where(places_BT < lengths_B[:, None], 0, -1)
        output = target.forward(tokens_BT, taps=taps)
    else:
        tokens_BT, mask_BT = layout.take(tokens_BT, 0), layout.take(mask_BT, 0)
        places_BT, document_BT = layout.place_PT.to(device), layout.document_PT.to(device)
        output = target.forward(tokens_BT, places_BT, taps=taps)
    hidden_BTD = output.hidden_BTD.to(rounded or target.dtype).to(target.dtype)
    logsumexp_BT, argmax_BT = teacher_statistics(hidden_BTD, mask_BT, target.parts.readout)
    return FeatureBatch(
        tokens_BT,
        mask_BT,
        places_BT,
        document_BT,
        torch.tensor(list(row_ids), device=device),
        output.hidden_BTD,
        logsumexp_BT,
        argmax_BT,
        output.aux,
    )


def refuse_leaks(target: Target) -> None:
    """Raise ValueError when a packed row's features differ from those of the row alone."""
    generator = torch.Generator().manual_seed(0)
    ids_BT = torch.randint(0, target.shape.vocab_size, (2, 8), generator=generator).tolist()
    rows = [TokenRow("", "", ids, [0] * len(ids), None) for ids in ids_BT]
    alone_BTD = make_features(target, rows, [0, 1]).hidden_BTD.float()
    packed = make_features(target, rows, [0, 1], layout=Layout.of([[8, 8]], 20))
    packed_BTD = packed.hidden_BTD[0, :16].float().view_as(alone_BTD)
    error = ((packed_BTD - alone_BTD).norm(dim=-1) / alone_BTD.norm(dim=-1)).max().item()
    limit = 1e-3 if target.dtype in (torch.float32, torch.float64) else 5e-2
    if not error <= limit:
        raise ValueError(
            f"train.pack_tokens: {target.name} does not keep packed rows apart (its states differ "
            f"by {error:.1e} relative, limit {limit:.0e}); use train.features=captured or "
            "train.pack_tokens=null"
        )


def teacher_statistics(
    hidden_BTD: Tensor, mask_BT: Tensor, readout: ReadOut
) -> tuple[Tensor, Tensor]:
    """Return log-normaliser and best token of the target's law, where the next token is supervised.

    Elsewhere they are 0 and -1: nothing is learned there, and the full read-out is a fifth of a
    small target's work.
    """
    B, T = mask_BT.shape
    logsumexp_BT = torch.zeros(B, T, dtype=torch.float32, device=hidden_BTD.device)
    argmax_BT = torch.full((B, T), -1, dtype=torch.int64, device=hidden_BTD.device)
    teaches_BT = torch.zeros_like(mask_BT)
    teaches_BT[:, :-1] = mask_BT[:, 1:]
    rows, positions = teaches_BT.nonzero(as_tuple=True)
    for start in range(0, len(rows), READOUT_CHUNK):
        index = (rows[start : start + READOUT_CHUNK], positions[start : start + READOUT_CHUNK])
        logsumexp_BT[index], argmax_BT[index] = _statistics(readout(hidden_BTD[index]))
    return logsumexp_BT, argmax_BT


def _statistics(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-normaliser and best token of a few positions at a time, while they are cached."""
    N, V = logits_NV.shape
    limit = PIECE_CPU if logits_NV.device.type == "cpu" else PIECE
    logsumexps, best = [], []
    for part in slices(N, limit // V):
        piece_NV = logits_NV[part].float()
        logsumexps.append(piece_NV.logsumexp(-1))
        best.append(piece_NV.argmax(-1))
    return torch.cat(logsumexps), torch.cat(best)


def _padded(lists: Sequence[Sequence[int]], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(values) for values in lists], batch_first=True, padding_value=value
    )
