"""A compiled target and the drafters beside it: when graphs are made, and in which passes they run.

A head or a draft model is compiled when the target adopts it. All graphs are made when a cache or a
drafting state is asked for, before any clock runs: two small passes that differ in every size are
watched, and what they called is compiled. Prefills stay eager.
Shapes: R rows, N new tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._triton import has_triton

from headstart.heads.base import DraftHead, family_of
from headstart.heads.compiled import Compiler, Layer
from headstart.heads.parts import TargetParts
from headstart.heads.target import Target

# Sizes of the two passes that are watched; no two of one pass may be the same.
ROWS, TOKENS, LENGTHS, MAX_LENGTHS = (2, 3), (5, 7), (100, 200), (300, 450)


@dataclass
class CompiledPasses:
    """The compiled layers of a target or of a head, and the passes that show their sizes."""

    compiler: Compiler
    modules: Sequence[nn.Module]
    passes: Callable[[int, int, int], None]
    """Runs the layers once: rows, tokens, and which of the two passes."""
    _layers: list[Layer] = field(init=False)
    _done: set[tuple[bool, bool]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._layers = self.compiler.take(self.modules)

    def prepare(self, batch: int) -> None:
        """Make every graph that passes of up to `batch` rows can need, unless they are there."""
        classes = {(many, several) for many in {False, batch > 1} for several in (False, True)}
        missing = sorted(classes - self._done)
        self._done |= classes  # before the passes, which ask for caches themselves
        for many, several in missing:
            self.compiler.learn(
                self._layers,
                lambda turn, many=many, several=several: self.passes(
                    ROWS[turn] if many else 1, TOKENS[turn] if several else 1, turn
                ),
            )


class CompiledTarget:
    """A target's compiled layers; it compiles the heads and draft models that it adopts too."""

    def __init__(self, compiler: Compiler, target: Target, network: str) -> None:
        self.info, self._compiler, self._parts = compiler.info, compiler, target.parts
        self._passes = CompiledPasses(compiler, target.layers, _target_passes(target))
        self.prepare, self.within = self._passes.prepare, compiler.within
        self.clock, self.place = compiler.clock, compiler.place
        self.info.networks.append(network)

    def adopt(self, head: DraftHead) -> None:
        """Have a head's layers run compiled where it drafts, if drafters are to be."""
        if "drafter" not in self.info.parts:
            return
        compiler = self._compiler
        modules = head.layers_to_compile()
        passes = CompiledPasses(compiler, modules, _head_passes(head, self._parts))
        self.info.networks.append(f"{family_of(head.config)} head")
        new_state, extend, step = head.new_state, head.extend, head.step

        def prepared(batch: int, *args: Any) -> Any:
            passes.prepare(batch)
            state = new_state(batch, *args)
            compiler.place(getattr(state, "cache", None))
            return state

        def extended(*args: Any, rows: Sequence[int] | None = None) -> Any:
            with compiler.within("compiled" if rows is None else "eager"):
                return extend(*args, rows=rows)

        def stepped(*args: Any) -> Any:
            with compiler.within("compiled"):
                return step(*args)

        head.new_state, head.extend, head.step = prepared, extended, stepped

    def adopt_model(self, model: Target) -> None:
        """Have a draft model's layers run compiled as the target's do, if drafters are to be.

        Raises RuntimeError for a layer that cannot be compiled.
        """
        if "drafter" not in self.info.parts or model.compiled is not None:
            return
        model.compiled = CompiledTarget(self._compiler, model, f"draft model {model.name}")
        model.compiled.prepare(batch=1)


def _target_passes(target: Target) -> Callable[[int, int, int], None]:
    def run(rows: int, tokens: int, turn: int) -> None:
        cache = target.new_cache(rows, MAX_LENGTHS[turn], tokens)
        cache.advance([LENGTHS[turn]] * rows)
        ids_RN = torch.zeros(rows, tokens, dtype=torch.int64, device=target.device)
        depth_RN = torch.arange(tokens, device=target.device).expand(rows, -1)
        causal_NN = torch.ones(tokens, tokens, dtype=torch.bool, device=target.device).tril()
        target.pass_over(ids_RN, depth_RN, causal_NN.expand(rows, -1, -1), cache)

    return run


def _head_passes(head: DraftHead, parts: TargetParts) -> Callable[[int, int, int], None]:
    device, dtype = parts.readout.weight_WD.device, parts.readout.weight_WD.dtype
    width = head.shape.hidden_size * max(1, len(head.aux_features))
    steps = (head.max_depth or 2) - head.depths_at_once

    def run(rows: int, tokens: int, turn: int) -> None:
        state = head.new_state(rows, MAX_LENGTHS[turn], (steps + 1) * tokens, parts)
        if getattr(state, "cache", None) is not None:
            state.cache.advance([LENGTHS[turn]] * rows)
        ids_RM = torch.zeros(rows, tokens, dtype=torch.int64, device=device)
        hidden_RMF = torch.zeros(rows, tokens, width, dtype=dtype, device=device)
        head.extend(state, ids_RM, hidden_RMF, [tokens] * rows, parts)
        for step in range(steps):
            slot = 1 + (step - 1) * tokens if step else 0  # of the first node of the level above
            head.step(state, ids_RM, torch.full_like(ids_RM, slot), parts)

    return run


def require_compiler(device: torch.device) -> None:
    """Raise RuntimeError where torch has no compiler for a device, with the cure."""
    if device.type == "cuda":
        if not has_triton():
            raise RuntimeError(
                "runtime.compile: torch's compiler needs triton on this GPU; install it, or use "
                "runtime=eager"
            )
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise RuntimeError(
            "runtime.compile: no C++ compiler found; install g++ or name one in CXX, or use "
            "runtime=eager"
        ) from error
