"""Features read from a store: memory-mapped, so that rows of any number are seen many times.

Shapes: B rows, T tokens, D width.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headstart.data.codec import LAST, Codec, aux_name
from headstart.data.shards import read_index, read_parts, read_shard
from headstart.data.store_job import COLUMNS
from headstart.data.store_key import AUX, refuse_other
from headstart.heads.base import FeatureBatch

log = logging.getLogger(__name__)


class FeatureStore:
    """A captured store; it needs no target. Row i is row i of the rows that were captured.

    Batches hold the tapped states `taps`, of those that were stored. Raises FileNotFoundError for a
    store that was never finished, ValueError for a damaged shard or a tap that is not stored.
    """

    def __init__(self, directory: Path, taps: Sequence[int] = ()) -> None:
        self.directory = Path(directory)
        index = read_index(self.directory)
        self.key, self.target_name = index["key"], index["target_name"]
        self.taps = tuple(taps)
        self._require_taps(self.taps)
        self.codec = Codec(self.key["stored_as"], getattr(torch, self.key["dtype"]))
        self.parts = read_parts(self.directory)
        count = sum(len(shard["rows"]) for shard in index["shards"])
        self.lengths, self.row_ids = [0] * count, [""] * count
        self._where = [(0, 0)] * count
        self._files = [shard["file"] for shard in index["shards"]]
        self._shards = [self._open(number, shard) for number, shard in enumerate(index["shards"])]

    def _open(self, number: int, shard: dict[str, Any]) -> dict[str, Tensor]:
        path = self.directory / shard["file"]
        tensors, row_ids = read_shard(path)
        offset = 0
        for row, row_id, length in zip(shard["rows"], row_ids, shard["lengths"], strict=True):
            self._where[row], self.lengths[row] = (number, offset), length
            self.row_ids[row] = row_id
            offset += length
        if offset != len(tensors["tokens"]):
            raise ValueError(
                f"{path}: {len(tensors['tokens'])} tokens, the index says {offset}; "
                "delete the store and capture again"
            )
        return tensors

    def require(self, key: dict[str, Any]) -> None:
        """Raise ValueError naming the first field in which the store was made otherwise.

        More tapped states than a run needs may be stored, fewer may not.
        """
        self._require_taps(key[AUX])
        refuse_other(self.key, key, what="feature store", cure="capture again", more_taps=True)

    def _require_taps(self, taps: Sequence[int]) -> None:
        stored = self.key[AUX]
        if not set(taps) <= set(stored):
            raise ValueError(
                f"feature store: made with {AUX}={stored}, this run has {AUX}={list(taps)}; "
                f"capture again, with aux={sorted({*stored, *taps})} into another directory"
            )

    def row(self, index: int) -> dict[str, Tensor]:
        """Return a row's columns and states [T, ..], the states as the target computed them.

        Raises ValueError naming the shard and the row when a state is not finite.
        """
        number, start = self._where[index]
        part = slice(start, start + self.lengths[index])
        shard = self._shards[number]
        made = {name: shard[name][part] for name in COLUMNS}
        for name in (LAST, *(aux_name(s) for s in self.taps)):
            stored = {column: shard[column][part] for column in self.codec.columns(name)}
            made[name] = self.codec.decode(name, stored)
            if not made[name].isfinite().all():
                raise ValueError(
                    f"{self._files[number]}: the states of row {self.row_ids[index]} are not "
                    "finite; delete the shard and capture again"
                )
        return made

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return these rows with their stored features, right-padded to the longest."""
        rows = [self.row(index) for index in indices]
        padded = {
            name: pad_sequence(
                [row[name] for row in rows],
                batch_first=True,
                padding_value=-1 if name == "argmax" else 0,
            )
            for name in rows[0]
        }
        tokens_BT = padded["tokens"].long()
        positions_T = torch.arange(tokens_BT.shape[1])
        lengths_B = torch.tensor([self.lengths[i] for i in indices])
        return FeatureBatch(
            tokens_BT,
            padded["loss_mask"],
            positions_T.expand_as(tokens_BT),
            torch.where(positions_T < lengths_B[:, None], 0, -1),
            torch.tensor(list(indices)),
            padded[LAST],
            padded["logsumexp"],
            padded["argmax"].long(),
            {s: padded[aux_name(s)] for s in self.taps},
        )
