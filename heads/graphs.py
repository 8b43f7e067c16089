"""A layer as one inductor graph: what a call gave it, and a trace of it compiled for such calls.

Sizes that vary (rows, tokens, slots read, capacity) are symbols of the graph; what it assumes of
them is checked whenever a new combination comes up. No graph has a break in it, so nothing can fall
back unseen. Shapes: R rows, N new tokens, S slots read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

Layout = tuple[tuple[str | int, Any], ...]
"""The arguments of a call in order: (name or place, what stands there)."""
TENSOR, CACHE = "<tensor>", "<cache>"
OPTIONS = {
    "size_asserts": False,  # packed weights have no strides to assert
}


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


def read_call(args: tuple, kwargs: dict[str, Any]) -> tuple[Call, KVCache | None]:
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


class Source:
    """A module's own forward, from before anything stood in for it, and its weights by name."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.forward = module, module.forward
        named = dict(module.named_parameters()) | dict(module.named_buffers())
        self.names, self.weights = list(named), list(named.values())

    def of(self, layout: Layout, inputs: Sequence[Tensor]) -> Any:
        """Return what the forward makes of these inputs, the module's weights the last of them."""
        given = len(inputs) - len(self.weights)
        args, kwargs = _write(layout, inputs[:given])
        weights = {f"module.{n}": w for n, w in zip(self.names, inputs[given:], strict=True)}
        return torch.func.functional_call(_Unhooked(self), weights, tuple(args), kwargs)


class _Unhooked(nn.Module):
    """A module's own forward, without the hooks that wait for a call of the module."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.module, self._forward = source.module, source.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module eagerly."""
        return self._forward(*args, **kwargs)


def make_graph(source: Source, one: Call, other: Call) -> Graph:
    """Trace a layer over stand-ins of its inputs and compile the trace.

    A size in which the two calls differ is a symbol, the same one wherever it is the same in both.
    """
    fakes, shapes, mode = _symbolic(one, other, source.weights)
    output: list[pytree.TreeSpec] = []

    def run(*inputs: Tensor) -> list[Any]:
        leaves, spec = pytree.tree_flatten(source.of(other.layout, inputs))
        output.append(spec)
        return leaves

    with mode, torch.no_grad():
        traced = make_fx(run, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fakes)
    with torch._inductor.config.patch(OPTIONS), tracing(TracingContext(mode)):
        compiled = compile_fx(traced, fakes)
    assumed = [guard.expr for guard in mode.shape_env.guards]
    return Graph(other.layout, shapes, assumed, compiled, output[0])


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


def operations(source: Source, call: Call) -> tuple[Any, ...]:
    """Return every operation of a call in order, operands numbered as they come up.

    Layers of equal operations compute the same, and one trace does for all; a tensor that is
    neither given nor computed belongs to one layer alone, whose trace is then its own.
    """
    inputs = [*call.tensors, *source.weights]
    with torch.no_grad(), _Log(inputs) as log:
        source.of(call.layout, inputs)
    return (*log.entries, id(source) if log.foreign else None)


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
