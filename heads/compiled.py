"""Compiled layers: which graph each layer of the target or of a drafter runs, and when it is made.

A layer is traced once for each class of sizes (one row or several, one token or several), and every
layer of the same operations shares the graph, its weights among the inputs: compiling takes
seconds, and no size that decoding meets needs another graph.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from headstart.heads.cache import KVCache
from headstart.heads.graphs import Call, Graph, Source, make_graph, operations, read_call
from headstart.heads.replay import Buffers, Recorder, Replays, Storage
from headstart.heads.runtime import Compilation


class Layer:
    """Stands in for a module's forward: the graph inside a compiled pass, the module elsewhere."""

    def __init__(self, module: nn.Module, compiler: "Compiler") -> None:
        self.compiler, self.source = compiler, Source(module)
        self.graphs: list[Graph] = []
        self.watched: list[Call] = []
        self._chosen: dict[tuple, Graph] = {}
        self.replays = compiler.replays()
        self._cache_layer = -1
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        mode = self.compiler.mode
        if mode == "eager":
            return self.source.forward(*args, **kwargs)
        call, cache = read_call(args, kwargs)
        if mode == "watch":
            return self._watch(call, cache, args, kwargs)
        if cache is not None:
            if len(cache) <= self._cache_layer:  # a pass that fills an empty cache allocates it
                return self.source.forward(*args, **kwargs)
            call.tensors += cache.graph_inputs(self._cache_layer)
        key = call.key
        graph = self._chosen.get(key)
        if graph is None:
            graph = self._chosen[key] = self._choose(call)
        if self.replays is None:
            outputs = graph.run(*call.tensors, *self.source.weights)
        else:
            given = len(call.tensors) - (0 if cache is None else 2)
            inputs, stored = call.tensors[:given], call.tensors[given:]
            outputs = self.replays(graph.run, inputs, stored, self.source.weights)
        alone = graph.output.is_leaf()
        return outputs[0] if alone else pytree.tree_unflatten(outputs, graph.output)

    def _watch(self, call: Call, cache: KVCache | None, args: tuple, kwargs: dict) -> Any:
        """Run eagerly and note what the layer was given, and which cache layer it wrote."""
        output = self.source.forward(*args, **kwargs)
        if cache is not None:
            self._cache_layer = cache.last_updated
            call.tensors += cache.graph_inputs(self._cache_layer)
        self.watched.append(call)
        return output

    def _choose(self, call: Call) -> Graph:
        fitting = (graph for graph in self.graphs if graph.fits(call))
        return next(fitting, None) or self.compiler.compile(self, call, call)

    def learn(self, calls: Sequence[tuple[Call, Call]]) -> None:
        """Compile a graph for each pair of calls, symbolic in the sizes in which the two differ."""
        for one, other in calls:
            if not any(graph.fits(one) and graph.fits(other) for graph in self.graphs):
                self.compiler.compile(self, one, other)


@dataclass
class Compiler:
    """Makes the graphs of a target and of the drafters beside it, and keeps count of them."""

    info: Compilation
    recorder: Recorder | None = None
    """Records CUDA graphs; null: layers are called, not replayed."""
    mode: str = "eager"
    """eager, compiled or watch: what a layer called now does."""
    timing: bool = False
    """Whether a measurement's clock is running: a graph made now is late."""
    _made: dict[Any, Graph] = field(default_factory=dict)
    _buffers: Buffers = field(default_factory=Buffers)
    _storage: Storage = field(default_factory=Storage)

    def take(self, modules: Sequence[nn.Module]) -> list[Layer]:
        """Have these modules run as graphs inside compiled passes."""
        return [Layer(module, self) for module in modules]

    def replays(self) -> Replays | None:
        """Return a place for the recordings of one layer, if there are to be any."""
        if self.recorder is None:
            return None
        return Replays(self.recorder, self._buffers, self._count_recording)

    def place(self, cache: KVCache | None) -> None:
        """Have an empty cache lie where one of its size lay, if there are recordings on that."""
        if self.recorder is not None and cache is not None:
            cache.reuse(self._storage)

    def _count_recording(self) -> None:
        self.info.recordings += 1
        self.info.late += self.timing

    @contextlib.contextmanager
    def within(self, mode: str) -> Iterator[None]:
        """Set what layers do; a watched pass stays one, whatever is asked inside it."""
        before = self.mode
        self.mode = before if before == "watch" else mode
        try:
            yield
        finally:
            self.mode = before

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Count graphs made inside as late."""
        self.timing = True
        try:
            yield
        finally:
            self.timing = False

    @torch.no_grad()
    def learn(self, layers: Sequence[Layer], passes: Callable[[int], None]) -> None:
        """Watch two passes that differ in every size that can vary; compile what they called."""
        seen: list[list[list[Call]]] = []
        for turn in range(2):
            with self.within("watch"):
                passes(turn)
            seen.append([layer.watched for layer in layers])
            for layer in layers:
                layer.watched = []
        for layer, one, other in zip(layers, *seen, strict=True):
            layer.learn(list(zip(one, other, strict=True)))

    def compile(self, layer: Layer, one: Call, other: Call) -> Graph:
        """Trace and compile a layer, unless another one of the same operations was.

        Raises RuntimeError naming the layer for one that cannot be traced or compiled.
        """
        start, mode, self.mode = time.perf_counter(), self.mode, "eager"
        try:
            graph = self._compile(layer, one, other)
        except Exception as error:
            kind = type(layer.source.module).__name__
            raise RuntimeError(
                f"runtime.compile={self.info.parts}: {kind} cannot be compiled "
                f"({type(error).__name__}: {str(error).splitlines()[0]}); use runtime=eager"
            ) from error
        finally:
            self.mode = mode
        layer.graphs.append(graph)
        self.info.seconds += time.perf_counter() - start
        return graph

    def _compile(self, layer: Layer, one: Call, other: Call) -> Graph:
        sizes = [(a.shape, b.shape) for a, b in zip(one.tensors, other.tensors, strict=True)]
        key = (other.layout, str(sizes), *operations(layer.source, other))
        if key not in self._made:
            self._made[key] = make_graph(layer.source, one, other)
            self.info.graphs += 1
            self.info.late += self.timing
        return self._made[key]
