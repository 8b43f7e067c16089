"""Packing: short rows laid end to end in rows of one fixed length, without a trace in the losses.

Every row stays a document of its own: positions restart with it, attention and labels end with it,
and its limits come from its length, never from a token in it.
Shapes: B rows as they come, right-padded; P packed rows, T tokens.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from headstart.data.token_row import TokenRow, row_lengths
from headstart.heads.base import FeatureBatch

WINDOW_TOKENS = 64  # packed rows' worth of tokens that are packed together


def check_fits(rows: Sequence[TokenRow], tokens: int) -> None:
    """Raise ValueError naming the longest row when it does not fit into a packed row."""
    lengths = row_lengths(rows)
    longest = max(lengths)
    if longest > tokens:
        raise ValueError(
            f"train.pack_tokens={tokens}: row {rows[lengths.index(longest)].row_id} has {longest} "
            f"tokens; use {longest} or more, or null"
        )


def pack_rows(rows: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Return packs of rows, each of at most `tokens` together; every row is in exactly one.

    Best fit, longest first: a row goes where it leaves the least room; equal choices go to the
    older pack. `lengths` are those of `rows`, in the same order.
    """
    assert max(lengths, default=0) <= tokens, "check_fits was not asked"
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, pack), ascending
    for place in sorted(range(len(rows)), key=lambda i: -lengths[i]):
        found = bisect_left(rooms, (lengths[place], -1))
        if found < len(rooms):
            room, pack = rooms.pop(found)
        else:
            room, pack = tokens, len(packs)
            packs.append([])
        packs[pack].append(int(rows[place]))
        insort(rooms, (room - lengths[place], pack))
    return packs


def pack_in_windows(rows: Sequence[int], lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Pack rows that stand near each other: the order of `rows` decides who may meet whom."""
    packs: list[list[int]] = []
    window = [total // (WINDOW_TOKENS * tokens) for total in accumulate(lengths)]
    start = 0
    while start < len(rows):
        stop = bisect_left(window, window[start] + 1, lo=start)
        packs += pack_rows(rows[start:stop], lengths[start:stop], tokens)
        start = stop
    return packs


@dataclass
class Layout:
    """Where each token of packed rows comes from: a row of the batch and a place in it.

    document_PT numbers the documents of a packed row from 0 and is -1 on padding; place_PT restarts
    with every document, and once more on the padding, which is nobody's context.
    """

    row_PT: Tensor
    place_PT: Tensor
    document_PT: Tensor

    @classmethod
    def of(cls, lengths: Sequence[Sequence[int]], tokens: int) -> "Layout":
        """Lay out packs of rows with these lengths; rows are numbered through all packs."""
        shape = (len(lengths), tokens)
        row_PT, place_PT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape).long()
        document_PT = torch.full(shape, -1)
        row = 0
        for pack, sizes in enumerate(lengths):
            start = 0
            for document, size in enumerate(sizes):
                row_PT[pack, start : start + size] = row
                place_PT[pack, start : start + size] = torch.arange(size)
                document_PT[pack, start : start + size] = document
                start, row = start + size, row + 1
            place_PT[pack, start:] = torch.arange(tokens - start)
        return cls(row_PT, place_PT, document_PT)

    def take(self, values_BT: Tensor, padding: float) -> Tensor:
        """Return values [B, T, ..] of rows as they came, laid out [P, T, ..]."""
        real_PT = (self.document_PT >= 0).to(values_BT.device)
        row_PT = self.row_PT.to(values_BT.device)
        place_PT = self.place_PT.to(values_BT.device).where(real_PT, 0)
        laid = values_BT[row_PT, place_PT]
        laid[~real_PT] = padding
        return laid

    def pack(self, batch: FeatureBatch) -> FeatureBatch:
        """Return the rows of a batch, packed; its row_ids_B name them in the order of documents."""
        device = batch.tokens_BT.device
        return FeatureBatch(
            self.take(batch.tokens_BT, 0),
            self.take(batch.loss_mask_BT, 0),
            self.place_PT.to(device),
            self.document_PT.to(device),
            batch.row_ids_B,
            self.take(batch.hidden_BTD, 0),
            self.take(batch.logsumexp_BT, 0),
            self.take(batch.argmax_BT, -1),
            {s: self.take(states_BTD, 0) for s, states_BTD in batch.aux.items()},
        )
