"""A preallocated KV cache with a length per row: rejection costs a number, not a copy.

A pass writes N new rows after each row's length. Nothing moves until `keep` copies the accepted
rows into place and sets the length; what lies beyond a length is overwritten by the next pass.
Shapes: R rows taking part in a pass, N new nodes, P pending rows (written after the length and not
kept yet, the new ones included), S slots read (a multiple of 128, so that shapes repeat).
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from headstart.heads.replay import Storage

BLOCK = 128
ROOM = 512
"""Slots by which the capacity of caches in reused storage grows, so that their sizes repeat."""


class KVCache(Cache):
    """Keys and values of every layer, [batch, kv_heads, max_len + max_pending, head_dim] each.

    Layers are allocated when they are first written, from the shapes they are given, so any
    attention that calls `update` works; `num_layers` is the most there can be. `windows` maps an
    attention kind to its sliding window (None: full attention); `open` returns a mask a kind.
    """

    def __init__(
        self,
        batch: int,
        max_len: int,
        max_pending: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        windows: Mapping[str, int | None] | None = None,
        num_layers: int = 1,
    ) -> None:
        super().__init__(layers=[])
        self.batch, self.max_len, self.capacity = batch, max_len, max_len + max_pending
        self.dtype, self.device_ = dtype, torch.device(device)
        self.windows = dict(windows or {"full_attention": None})
        self.lengths = [0] * batch  # on the host: known after the round's one synchronisation
        self.num_layers = num_layers
        self._keys: list[tuple[Tensor, int]] = []
        self._values: list[tuple[Tensor, int]] = []
        self._stacks: dict[tuple[int, ...], list[tuple[Tensor, int]]] = {}
        self._rows: slice | Tensor = slice(0, 0)
        self._slots: slice | Tensor = slice(0, 0)
        self._extent = 0
        self._start: tuple[list[int], int, int] = ([], 0, 0)
        self._mask: Tensor | None = None
        self._slots_RN: Tensor | None = None
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.last_updated = -1
        """The layer that `update` wrote last."""
        self._storage: Storage | None = None

    def reuse(self, storage: Storage) -> None:
        """Take the stacks of this cache, which is still empty, from storage, and give them back."""
        assert not self._keys, "a cache that was written has its stacks"
        self._storage = storage
        self.capacity = -(-(self.capacity + 1) // ROOM) * ROOM - 1

    def open(
        self,
        positions_RN: Tensor,
        visible_RNP: Tensor,
        *,
        rows: Sequence[int] | None = None,
        key_positions_RP: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Reserve slots for a pass and return its additive masks [R, 1, N, S] by attention kind.

        visible_RNP is boolean: node n sees pending row p (P >= N: the last N are the new nodes,
        earlier ones were written since the last keep). Committed rows are always seen, unless a
        window hides them. `rows` names the cache rows taking part (default: the first R).
        Raises ValueError when a row has no room for one more token.
        """
        R, N, P = visible_RNP.shape
        lengths = self.lengths[:R] if rows is None else [self.lengths[r] for r in rows]
        self._reserve(lengths, R, N, P, rows)
        start_R1 = torch.tensor(lengths, device=self.device_)[:, None]
        slot_S = torch.arange(self._extent, device=self.device_)
        offset_RS = slot_S[None] - start_R1
        pending_RS = offset_RS.clamp(0, P - 1)
        is_pending_RS = (offset_RS >= 0) & (offset_RS < P)
        allowed_RNS = visible_RNP.expand(R, N, P).gather(2, pending_RS[:, None].expand(-1, N, -1))
        allowed_RNS = (offset_RS < 0)[:, None] | (allowed_RNS & is_pending_RS[:, None])
        if all(window is None for window in self.windows.values()):
            self._mask = _additive(allowed_RNS, self.dtype)
            return dict.fromkeys(self.windows, self._mask)
        key_positions_RP = positions_RN if key_positions_RP is None else key_positions_RP
        key_RS = torch.where(is_pending_RS, key_positions_RP.gather(1, pending_RS), slot_S[None])
        distance_RNS = positions_RN[:, :, None] - key_RS[:, None]
        masks = {
            kind: _additive(
                allowed_RNS if window is None else allowed_RNS & (distance_RNS < window), self.dtype
            )
            for kind, window in self.windows.items()
        }
        self._mask = next(iter(masks.values()))
        return masks

    def open_next(
        self, num_rows: int, num_new: int, *, rows: Sequence[int] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Reserve the next tokens of each row, one after the other; return positions_RN and masks.

        As `open`, for a causal pass with nothing pending.
        """
        lengths = self.lengths[:num_rows] if rows is None else [self.lengths[r] for r in rows]
        starts_R1 = torch.tensor(lengths, device=self.device_)[:, None]
        positions_RN = starts_R1 + torch.arange(num_new, device=self.device_)
        causal_NN = torch.ones(num_new, num_new, dtype=torch.bool, device=self.device_).tril()
        return positions_RN, self.open(positions_RN, causal_NN.expand(num_rows, -1, -1), rows=rows)

    def _reserve(
        self, lengths: list[int], R: int, N: int, P: int, rows: Sequence[int] | None
    ) -> None:
        longest = max(lengths)
        if longest >= self.max_len or longest + P > self.capacity:
            raise ValueError(
                f"KV cache: a row holds {longest} of {self.max_len} tokens and {P} more were asked "
                "for; shorten the draft or the prompt"
            )
        self._extent = min(self.capacity, -(-(longest + P) // BLOCK) * BLOCK)
        first = P - N
        self._start, self._slots_RN = (lengths, first, N), None
        self._rows = slice(0, R) if rows is None else torch.tensor(rows, device=self.device_)
        if len(set(lengths)) == 1:  # a plain slice, no index arithmetic: batch 1 and prefill
            self._slots = slice(lengths[0] + first, lengths[0] + P)
        else:
            start_R1 = torch.tensor(lengths, device=self.device_)[:, None]
            self._slots = start_R1 + torch.arange(first, P, device=self.device_)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the pass's new rows [R, H, N, d] and return what its queries read [R, H, S, d]."""
        while len(self._keys) <= layer_idx:
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        self.last_updated = layer_idx
        return (
            self._write_and_read(*self._keys[layer_idx], key_states),
            self._write_and_read(*self._values[layer_idx], value_states),
        )

    def graph_inputs(self, layer: int) -> list[Tensor]:
        """Return what a compiled layer needs of an open pass over the first R rows.

        The slots [R, N] to write, a mask [R, 1, N, S], then keys and values [R, H, capacity, d].
        """
        lengths, first, N = self._start
        assert isinstance(self._rows, slice), "a compiled pass takes the first rows"
        if self._slots_RN is None:
            start_R1 = torch.tensor(lengths, device=self.device_)[:, None] + first
            self._slots_RN = start_R1 + torch.arange(N, device=self.device_)
        view = self._views.get((layer, len(lengths)))
        if view is None:
            (key, i), (value, j) = self._keys[layer], self._values[layer]
            view = key[i][: len(lengths)], value[j][: len(lengths)]
            self._views[layer, len(lengths)] = view
        return [self._slots_RN, self._mask, *view]

    @property
    def stacks(self) -> list[Tensor]:
        """Everything stored: [layers, batch, H, slots, d], one tensor a shape."""
        return [stack[0][0] for stack in self._stacks.values()]

    def _allocate(self, states: Tensor) -> tuple[Tensor, int]:
        """Return one layer's keys or values, cut from a stack that `keep` moves as a whole."""
        # One slot is never read: to a compiled layer, reading them all would be a case of its own.
        shape = (self.batch, states.shape[1], self.capacity + 1, states.shape[3])
        if shape not in self._stacks:
            # Zeros, not empty: masked slots are multiplied by weight 0, and 0 * NaN would be NaN.
            whole = (2 * self.num_layers, *shape)
            if self._storage is None:
                stack = torch.zeros(whole, dtype=states.dtype, device=states.device)
            else:
                stack = self._storage.take(whole, states)
                weakref.finalize(self, self._storage.give, stack)
            self._stacks[shape] = []
        else:
            stack = self._stacks[shape][0][0]
        self._stacks[shape].append((stack, len(self._stacks[shape])))
        return self._stacks[shape][-1]

    def _write_and_read(self, stack: Tensor, index: int, new: Tensor) -> Tensor:
        stored = stack[index]
        if isinstance(self._slots, slice):
            stored[self._rows, :, self._slots] = new
        else:
            rows = self._rows
            if isinstance(rows, slice):
                rows = torch.arange(rows.stop, device=stored.device)
            stored[rows[:, None], :, self._slots] = new.transpose(1, 2)
        return stored[self._rows, :, : self._extent]

    def advance(self, counts: Sequence[int], *, rows: Sequence[int] | None = None) -> None:
        """Commit the first counts[r] pending rows of each row of the pass, where they stand."""
        for row, count in zip(range(len(counts)) if rows is None else rows, counts, strict=True):
            self.lengths[row] += count

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Commit the pending rows named by paths[r] (ascending node ids, root first), in order.

        Keys need no new rotation: a node's position is the length plus its depth, which is the
        slot it moves to.
        """
        if any(path[i] != i for path in paths for i in range(len(path))):
            width = max(len(path) for path in paths)
            padded = [[*path, *range(len(path), width)] for path in paths]
            start_R1 = torch.tensor(self.lengths[: len(paths)], device=self.device_)[:, None]
            source_RK = start_R1 + torch.tensor(padded, device=self.device_)
            target_RK = start_R1 + torch.arange(width, device=self.device_)
            rows_R1 = torch.arange(len(paths), device=self.device_)[:, None]
            for stack in self.stacks:
                stack[:, rows_R1, :, target_RK] = stack[:, rows_R1, :, source_RK]
        self.advance([len(path) for path in paths])

    def reset(self, row: int | None = None) -> None:
        """Forget one row, or all of them."""
        for index in range(self.batch) if row is None else (row,):
            self.lengths[index] = 0

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row's committed content over another row."""
        length = self.lengths[source]
        for stack in self.stacks:
            stack[:, destination, :, :length] = stack[:, source, :, :length]
        self.lengths[destination] = length

    def committed(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Return the committed (keys, values) [H, length, d] of one row, layer by layer."""
        length = self.lengths[row]
        return [
            (key[i, row, :, :length], value[j, row, :, :length])
            for (key, i), (value, j) in zip(self._keys, self._values, strict=True)
        ]

    # What transformers may ask of a Cache; masks and positions are always given by the caller.
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the longest committed length."""
        return max(self.lengths)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return (slots read, 0)."""
        return self._extent, 0

    def __len__(self) -> int:
        return len(self._keys)


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean [R, N, S] into 0 / -inf [R, 1, N, S]: right with sdpa and with eager."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill_(~allowed, float("-inf"))[:, None]
