"""Features of token rows, made online by the target: what training reads when nothing is stored.

Shapes: B rows, T tokens (right-padded), D width.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from headstart.data.template import TokenRow
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
    ahead: int
    """Windows of batches that are worth making ahead, in a thread beside the training step."""

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return these rows with their features, right-padded to the longest."""


class OnlineFeatures:
    """Runs the target whenever rows are asked for."""

    ahead = 0  # the target has no idle device to run on

    def __init__(self, target: Target, rows: Sequence[TokenRow], taps: Sequence[int] = ()) -> None:
        self.target, self.rows, self.taps = target, list(rows), tuple(taps)
        self.parts = target.parts
        self.lengths = [len(row.token_ids) for row in rows]

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return these rows with features made now."""
        return make_features(self.target, [self.rows[i] for i in indices], indices, self.taps)


@torch.no_grad()
def make_features(
    target: Target,
    rows: Sequence[TokenRow],
    row_ids: Sequence[int],
    taps: Sequence[int] = (),
    *,
    rounded: torch.dtype | None = None,
) -> FeatureBatch:
    """Run the target over right-padded rows and return their features.

    `rounded` is the type that the last state will be stored in: the teacher's statistics are then
    those of the state that a reader will see.
    """
    device = target.device
    tokens_BT = _padded([row.token_ids for row in rows], 0).to(device)
    mask_BT = _padded([row.loss_mask for row in rows], 0).bool().to(device)
    lengths_B = torch.tensor([len(row.token_ids) for row in rows], device=device)
    output = target.forward(tokens_BT, taps=taps)
    hidden_BTD = output.hidden_BTD.to(rounded or target.dtype).to(target.dtype)
    logsumexp_BT, argmax_BT = teacher_statistics(hidden_BTD, mask_BT, target.parts.readout)
    positions_T = torch.arange(tokens_BT.shape[1], device=device)
    return FeatureBatch(
        tokens_BT,
        mask_BT,
        positions_T.expand_as(tokens_BT),
        torch.where(positions_T < lengths_B[:, None], 0, -1),
        torch.tensor(list(row_ids), device=device),
        output.hidden_BTD,
        logsumexp_BT,
        argmax_BT,
        output.aux,
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
