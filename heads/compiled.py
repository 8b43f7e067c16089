"""Compiled layers: each layer of the target or of a head runs as one inductor graph.

A layer is traced once for each class of sizes (one row or several, one token or several), and every
layer of the same operations shares the graph, its weights among the inputs: compiling takes
seconds, and no size that decoding meets needs another graph. Sizes that vary (rows, tokens, slots
read, capacity) are symbols of the graph; what it assumes of them is checked whenever a new
combination comes up. No graph has a break in it, so nothing can fall back unseen.
Shapes: R rows, N new tokens, S slots read.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import Cache

from headstart.heads.cache import KVCache
from headstart.heads.replay import Buffers, Recorder, Replays

Layout = tuple[tuple[str | int, Any], ...]
"""The arguments of a call in order: (name or place, what stands there)."""
TENSOR, CACHE = "<tensor>", "<cache>"
OPTIONS = {
    "size_asserts": False,  # packed weights have no strides to assert
}


@dataclass
class Compilation:
    """What a compiled runtime made, for the record of a measurement."""

    parts: list[str]
    """What is compiled: target, drafter."""
    graphs: int = 0
    seconds: float = 0.0
    """Seconds spent tracing and compiling, none of them on a measurement's clock."""
    recordings: int = 0
    """CUDA graphs recorded, where there is a GPU: one a layer for each exact size."""
    late: int = 0
    """Graphs or recordings made while the clock ran: they spoil the times of the prompts they met.
    """


@dataclass
class Call:
    """What one call of a layer was given: the layout of its arguments and every input tensor."""

    layout: Layout
    tensors: list[Tensor]

    @property
    def key(self) -> tuple:
        """What a graph is chosen by."""
        return (self.layout, *[t.shape for t in self.tensors])


@dataclass
class Graph:
    """A compiled layer for one layout of arguments and one class of sizes."""

    layout: Layout
    shapes: list[tuple[Any, ...]]
    """Sizes of the inputs: an int is fixed, a symbol is any size that `assumed` allows."""
    assumed: list[Any]
    run: Callable[..., Sequence[Any]]
    output: pytree.TreeSpec

    def fits(self, call: Call) -> bool:
        """Whether the graph is right for these sizes."""
        if call.layout != self.layout:
            return False
        sizes: dict[Any, int] = {}
        for tensor, shape in zip(call.tensors, self.shapes, strict=True):
            if tensor.dim() != len(shape):
                return False
            for have, want in zip(tensor.shape, shape, strict=True):
                if have != (want if isinstance(want, int) else sizes.setdefault(want, have)):
                    return False
        return min(sizes.values(), default=2) > 1 and all(bool(a.subs(sizes)) for a in self.assumed)


class GraphCache(Cache):
    """The cache as a layer sees it inside a graph: its own keys and values, of the pass's rows."""

    def __init__(self, slots_RN: Tensor, mask: Tensor, keys: Tensor, values: Tensor) -> None:
        super().__init__(layers=[])
        self._keys, self._values, self._slots_RN, self._extent = (
            keys,
            values,
            slots_RN,
            mask.shape[-1],
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new rows and return what is read, as KVCache does."""
        rows_R1 = torch.arange(self._slots_RN.shape[0], device=self._slots_RN.device)[:, None]
        for stored, new in ((self._keys, key_states), (self._values, value_states)):
            stored[rows_R1, :, self._slots_RN] = new.transpose(1, 2)
        return self._keys[:, :, : self._extent], self._values[:, :, : self._extent]


class Layer:
    """Stands in for a module's forward: the graph inside a compiled pass, the module elsewhere."""

    def __init__(self, module: nn.Module, compiler: "Compiler") -> None:
        self.module, self.compiler, self.eager = module, compiler, module.forward
        self.graphs: list[Graph] = []
        self.watched: list[Call] = []
        self._chosen: dict[tuple, Graph] = {}
        self.replays = compiler.replays()
        self._cache_layer = -1
        named = dict(module.named_parameters()) | dict(module.named_buffers())
        self.names, self.weights = list(named), list(named.values())
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        mode = self.compiler.mode
        if mode == "eager":
            return self.eager(*args, **kwargs)
        call, cache = _read(args, kwargs)
        if mode == "watch":
            return self._watch(call, cache, args, kwargs)
        if cache is not None:
            if len(cache) <= self._cache_layer:  # a pass that fills an empty cache allocates it
                return self.eager(*args, **kwargs)
            call.tensors += cache.graph_inputs(self._cache_layer)
        key = call.key
        graph = self._chosen.get(key)
        if graph is None:
            graph = self._chosen[key] = self._choose(call)
        if self.replays is None:
            outputs = graph.run(*call.tensors, *self.weights)
        else:
            given = len(call.tensors) - (0 if cache is None else 2)
            inputs, stored = call.tensors[:given], call.tensors[given:]
            outputs = self.replays(graph.run, inputs, stored, self.weights)
        alone = graph.output.is_leaf()
        return outputs[0] if alone else pytree.tree_unflatten(outputs, graph.output)

    def _watch(self, call: Call, cache: KVCache | None, args: tuple, kwargs: dict) -> Any:
        """Run eagerly and note what the layer was given, and which cache layer it wrote."""
        output = self.eager(*args, **kwargs)
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


def _read(args: tuple, kwargs: dict[str, Any]) -> tuple[Call, KVCache | None]:
    """Take the tensors and the cache out of a layer's arguments."""
    layout: list[tuple[str | int, Any]] = []
    tensors: list[Tensor] = []
    cache = None
    for place, value in (*enumerate(args), *kwargs.items()):
        if isinstance(value, Tensor):
            tensors.append(value.contiguous())
            value = TENSOR
        elif isinstance(value, KVCache):
            cache, value = value, CACHE
        elif isinstance(value, tuple) and value and all(isinstance(v, Tensor) for v in value):
            tensors += [v.contiguous() for v in value]
            value = (TENSOR,) * len(value)
        layout.append((place, value))
    return Call(tuple(layout), tensors), cache


def _write(layout: Layout, tensors: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Put tensors back in the places they were read from; those left over make up the cache."""
    args, kwargs, left = [], {}, list(tensors)
    for place, value in layout:
        if value is TENSOR:
            value = left.pop(0)
        elif isinstance(value, tuple) and value[:1] == (TENSOR,):
            value, left = tuple(left[: len(value)]), left[len(value) :]
        elif value is CACHE:
            value = GraphCache(*left[-4:])
        if isinstance(place, int):
            args.append(value)
        else:
            kwargs[place] = value
    return args, kwargs


@dataclass
class Compiler:
    """Makes the graphs of one target and of the heads it adopts, and keeps count of them."""

    info: Compilation
    recorder: Recorder | None = None
    """Records CUDA graphs; null: layers are called, not replayed."""
    mode: str = "eager"
    """eager, compiled or watch: what a layer called now does."""
    timing: bool = False
    """Whether a measurement's clock is running: a graph made now is late."""
    _made: dict[Any, Graph] = field(default_factory=dict)
    _buffers: Buffers = field(default_factory=Buffers)

    def take(self, modules: Sequence[nn.Module]) -> list[Layer]:
        """Have these modules run as graphs inside compiled passes."""
        return [Layer(module, self) for module in modules]

    def replays(self) -> Replays | None:
        """Return a place for the recordings of one layer, if there are to be any."""
        if self.recorder is None:
            return None
        return Replays(self.recorder, self._buffers, self._count_recording)

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
            kind = type(layer.module).__name__
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
        key = (other.layout, str(sizes), *_operations(layer, other))
        if key not in self._made:
            self._made[key] = _graph(layer, one, other)
            self.info.graphs += 1
            self.info.late += self.timing
        return self._made[key]


def _graph(layer: Layer, one: Call, other: Call) -> Graph:
    """Trace a layer over stand-ins of its inputs and compile the trace."""
    fakes, shapes, mode = _symbolic(one, other, layer.weights)
    output: list[pytree.TreeSpec] = []

    def run(*inputs: Tensor) -> list[Any]:
        leaves, spec = pytree.tree_flatten(_called(layer, other.layout, inputs))
        output.append(spec)
        return leaves

    with mode, torch.no_grad():
        traced = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fakes)
    with torch._inductor.config.patch(OPTIONS), tracing(TracingContext(mode)):
        compiled = compile_fx(traced, fakes)
    assumed = [guard.expr for guard in mode.shape_env.guards]
    return Graph(other.layout, shapes, assumed, compiled, output[0])


def _called(layer: Layer, layout: Layout, inputs: Sequence[Tensor]) -> Any:
    """Return what a layer's own forward makes of these inputs, its weights the last of them."""
    given = len(inputs) - len(layer.weights)
    args, kwargs = _write(layout, inputs[:given])
    weights = {f"layer.{n}": w for n, w in zip(layer.names, inputs[given:], strict=True)}
    return torch.func.functional_call(_Unhooked(layer), weights, tuple(args), kwargs)


def _operations(layer: Layer, call: Call) -> tuple[Any, ...]:
    """Return every operation of a call in order, operands numbered as they come up.

    Layers of equal operations compute the same, and one trace does for all; a tensor that is
    neither given nor computed belongs to one layer alone, whose trace is then its own.
    """
    inputs = [*call.tensors, *layer.weights]
    with torch.no_grad(), _Log(inputs) as log:
        _called(layer, call.layout, inputs)
    return (*log.entries, id(layer) if log.foreign else None)


class _Log(TorchDispatchMode):
    """Notes operations, tensors by number, and whether one came from elsewhere."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.entries: list[tuple[Any, ...]] = []
        self.foreign = False
        self._kept = list(inputs)  # alive, so that no other tensor gets the identity of one of them
        self._number = {id(tensor): number for number, tensor in enumerate(inputs)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = pytree.tree_leaves((args, kwargs))
        self.foreign |= any(isinstance(v, Tensor) and id(v) not in self._number for v in operands)
        result = func(*args, **kwargs)
        self.entries.append((str(func), *map(self._named, operands)))
        self.entries.append(tuple(map(self._named, pytree.tree_leaves(result))))
        return result

    def _named(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return repr(value)
        if id(value) not in self._number:
            self._number[id(value)] = len(self._kept)
            self._kept.append(value)
        return self._number[id(value)], tuple(value.shape), value.dtype, value.device


class _Unhooked(nn.Module):
    """A layer's own forward, without the hooks that wait for a call of the layer."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, self._forward = layer.module, layer.eager

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer eagerly."""
        return self._forward(*args, **kwargs)


def _symbolic(
    one: Call, other: Call, weights: Sequence[Tensor]
) -> tuple[list[Tensor], list[tuple[Any, ...]], FakeTensorMode]:
    """Return fake inputs and the sizes of those of the call.

    A size in which the calls differ is a symbol, the same one wherever it is the same in both.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    fakes, shapes = [], []
    pairs = [(a.shape, b.shape) for a, b in zip(one.tensors, other.tensors, strict=True)]
    pairs += [(w.shape, w.shape) for w in weights]
    for number, (tensor, pair) in enumerate(zip((*other.tensors, *weights), pairs, strict=True)):
        kinds = [
            DimDynamic.STATIC if a == b else DimDynamic.DUCK for a, b in zip(*pair, strict=True)
        ]
        # Storage of its own: keys and values are parts of one stack, and never overlap.
        stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        fake = mode.from_tensor(
            stand_in,
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds),
            source=ConstantSource(f"input_{number}"),
        )
        fakes.append(fake)
        shapes.append(tuple(s if isinstance(s, int) else s.node.expr for s in fake.shape))
    return fakes, shapes[: len(other.tensors)], mode
