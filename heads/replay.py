"""CUDA graphs of compiled layers: one replay instead of a launch for every kernel.

A recording is right for exact sizes and for the cache it was made on, whose keys and values it
addresses, and for later caches that lie in the same place; all other inputs are copied into buffers
of its own, which the layers of a target share, so that a mask is copied once a pass and not once a
layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

MOST = 256
"""Recordings a layer keeps, one for each count of rows, width and extent; one more and it forgets
them all (many belong to caches long gone)."""


KEPT = 8
"""Free stacks that a storage keeps."""


class Recorder(Protocol):
    """Records what a function does to fixed inputs; returns its outputs and how to do it again."""

    def __call__(
        self, run: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]
    ) -> tuple[Sequence[Any], Callable[[], None]]: ...


class CudaRecorder:
    """Captures CUDA graphs in one memory pool."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, run: Callable[..., Sequence[Any]], inputs: Sequence[Tensor]
    ) -> tuple[Sequence[Any], Callable[[], None]]:
        """Run once beside the current stream, as capturing asks for, then capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = run(*inputs)
        return outputs, graph.replay


@dataclass
class _Buffer:
    """A fixed input, and the tensor that was copied into it last."""

    tensor: Tensor
    source: Tensor | None = None

    def fill(self, source: Tensor) -> None:
        if source is not self.source:
            self.tensor.copy_(source)
            self.source = source


class Buffers:
    """Fixed inputs, one for each place and size, shared by every layer of a target or head."""

    def __init__(self) -> None:
        self._made: dict[tuple, _Buffer] = {}

    def at(self, place: int, like: Tensor) -> _Buffer:
        """Return the buffer of a place for tensors of this size."""
        key = (place, like.shape, like.dtype)
        if key not in self._made:
            self._made[key] = _Buffer(torch.empty_like(like))
        return self._made[key]


class Replays:
    """The recordings of one layer."""

    def __init__(self, recorder: Recorder, buffers: Buffers, count: Callable[[], None]) -> None:
        self._recorder, self._buffers, self._count = recorder, buffers, count
        self._made: dict[tuple, tuple[list[_Buffer], Sequence[Any], Callable[[], None]]] = {}

    def __call__(
        self,
        run: Callable[..., Sequence[Any]],
        inputs: Sequence[Tensor],
        stored: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> Sequence[Any]:
        """Return run(*inputs, *stored, *weights); the last two are addressed where they lie.

        `stored` are a cache's keys and values, which another cache has elsewhere.
        """
        key = (id(run), *[t.shape for t in inputs], *[(t.data_ptr(), t.shape) for t in stored])
        if key not in self._made:
            if len(self._made) == MOST:
                self._made.clear()
            buffers = [self._buffers.at(place, tensor) for place, tensor in enumerate(inputs)]
            self._fill(buffers, inputs)
            outputs, again = self._recorder(run, [*[b.tensor for b in buffers], *stored, *weights])
            self._made[key] = (buffers, outputs, again)
            self._count()
        buffers, outputs, again = self._made[key]
        self._fill(buffers, inputs)
        again()
        return [output.clone() for output in outputs]  # the next replay overwrites its own

    def _fill(self, buffers: Sequence[_Buffer], inputs: Sequence[Tensor]) -> None:
        for buffer, tensor in zip(buffers, inputs, strict=True):
            buffer.fill(tensor)


class Storage:
    """Keys and values of caches that are gone, for new caches of the same size.

    A recorded CUDA graph addresses the stack it was made on: on another one it would have to be
    recorded again.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return a stack of zeros: the one that was given back last, if one of the size was."""
        for place in reversed(range(len(self._free))):
            free = self._free[place]
            if (free.shape, free.dtype, free.device) == (shape, like.dtype, like.device):
                return self._free.pop(place).zero_()
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def give(self, stack: Tensor) -> None:
        """Keep a stack whose cache is gone, and of all that are free the newest."""
        self._free = [*self._free, stack][-KEPT:]
