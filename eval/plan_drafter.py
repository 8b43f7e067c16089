"""What drafting with a head costs, counted by running the head's own calls without weights.

`extend` and `step` run once each on the meta device while every operation is watched: which weights
it reads, how many FLOPs it is, and that it was started. No family is named, so a new one is
planned as it is evaluated. A separate draft model is a drafter of its own kind.
Shapes: B rows, M pairs, D width, W draft vocabulary, V vocabulary.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from headstart.eval.plan_model import ModelSize
from headstart.eval.roofline import Context, DrafterWork, Work
from headstart.heads.base import DraftHead, HeadConfig, build_head, family_of
from headstart.heads.cache import KVCache
from headstart.heads.parts import ReadOut, TargetParts
from headstart.heads.target import TargetShape
from headstart.heads.vocab import DraftVocab


@dataclass(frozen=True)
class PlannedDrafter:
    """A drafter's work and what it keeps in memory."""

    name: str
    num_parameters: int
    """Its own weights: trained ones of a head, all of a draft model."""
    readout_rows: int
    """Weights of the target's read-out copied for a draft vocabulary."""
    kv_bytes: float
    """Bytes of its cache for one row at the planned context."""
    work: DrafterWork


def plan_draft_model(
    size: ModelSize, *, weight_bytes: int, kv_bytes: int, context: int, max_depth: int
) -> PlannedDrafter:
    """Return a separate model as a drafter: one of its passes a depth, over one token a row.

    After a fully accepted draft its first pass reads one token more; that is not counted.
    """
    seen, work = size.context(context, kv_bytes), size.work(weight_bytes)
    return PlannedDrafter(
        f"draft model {size.name}",
        size.num_parameters,
        0,
        seen.row_bytes,
        DrafterWork(work, (work,) * (max_depth - 1), reads_verified=False, context=seen),
    )


def plan_head(
    config: HeadConfig,
    shape: TargetShape,
    *,
    weight_bytes: int,
    kv_bytes: int,
    context: int,
    max_depth: int,
) -> PlannedDrafter:
    """Return a head as a drafter, `max_depth` deep or as deep as it goes.

    Raises ValueError for a draft vocabulary that does not fit the target.
    """
    head, parts = build_on_meta(config, shape)
    depth = min(max_depth, head.max_depth or max_depth)
    state = head.new_state(1, context, depth + 2, parts)
    counts = _Counts(head, parts)
    # One pair and two: what grows with the verified tokens, and what is done once a row.
    one, two = (counts.of(lambda M=M: _extend(head, state, M, parts), weight_bytes) for M in (1, 2))
    per_token = two.flops_per_token - one.flops_per_token
    first = Work(
        one.read_bytes, per_token, one.flops_per_token - per_token, operations=one.operations
    )
    deeper = tuple(
        counts.of(lambda d=d: _step(head, state, d, parts), weight_bytes)
        for d in range(depth - head.depths_at_once)
    )
    seen = _cache_context(state, shape, context, kv_bytes)
    return PlannedDrafter(
        family_of(config),
        sum(weight.numel() for weight in head.parameters()),
        counts.copied_readout,
        seen.row_bytes,
        DrafterWork(first, deeper, head.depths_at_once, context=seen),
    )


def build_on_meta(config: HeadConfig, shape: TargetShape) -> tuple[DraftHead, TargetParts]:
    """Build a head and the target's parts without storage; its draft vocabulary is any."""
    V, W = shape.vocab_size, config.draft_vocab_size
    if W is not None and W > V:
        raise ValueError(
            f"head.draft_vocab_size={W}: expected at most the target's {V} tokens; "
            "give fewer, or null for all of them"
        )
    vocab = None if W is None else DraftVocab(torch.arange(W), V)
    with torch.device("meta"):
        head = build_head(config, shape, vocab).eval().requires_grad_(False)
        embedding_VD = torch.empty(V, shape.hidden_size)
        readout = _MetaReadOut(torch.empty(V, shape.hidden_size))
    return head, TargetParts(embedding_VD, 1.0, readout)


class _MetaReadOut(ReadOut):
    """Rows are cut without looking at the ids, which tensors without storage cannot show."""

    def rows(self, ids_W: Tensor) -> ReadOut:
        return ReadOut(self.weight_WD[: len(ids_W)])


class _Counts:
    """Counts what a call of a head reads, multiplies and starts; token embeddings are looked up."""

    def __init__(self, head: DraftHead, parts: TargetParts) -> None:
        self._readout = _storage(parts.readout.weight_WD)
        self._weights = {_storage(weight) for weight in head.parameters()} | {self._readout}
        self._restricted = head.vocab is not None
        self.copied_readout = 0

    @torch.no_grad()
    def of(self, call: Callable[[], object], weight_bytes: int) -> Work:
        """Run a call for one row; all its FLOPs are counted as of one token."""
        with _Watch(self._weights) as watch:
            call()
        if self._restricted:
            self.copied_readout = max(self.copied_readout, watch.read.get(self._readout, 0))
        return Work(
            read_bytes=weight_bytes * sum(watch.read.values()),
            flops_per_token=float(watch.flops),
            operations=watch.operations,
        )


class _Watch(TorchDispatchMode):
    """Notes the weights that operations read, each once, the FLOPs with them, and all operations.

    Products without weights are attention's; they grow with the context and are counted apart.
    """

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self._weights, self.read, self.flops, self.operations = weights, {}, 0, 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = operation(*args, **kwargs)
        if operation.is_view:
            return result
        self.operations += 1
        count_flops = flop_registry.get(operation._overloadpacket)
        if self._note(tree_leaves((args, kwargs))) and count_flops is not None:
            self.flops += count_flops(*args, **kwargs, out_val=result)
        return result

    def _note(self, arguments: Iterable[Any]) -> bool:
        """Note the weights among the arguments; return whether there was one."""
        weights = [t for t in arguments if isinstance(t, Tensor) and _storage(t) in self._weights]
        for weight in weights:
            key = _storage(weight)
            self.read[key] = max(self.read.get(key, 0), weight.numel())
        return bool(weights)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _extend(head: DraftHead, state: Any, pairs: int, parts: TargetParts) -> None:
    tokens_BM = torch.zeros(1, pairs, dtype=torch.int64, device="meta")
    width = max(1, len(head.aux_features)) * head.shape.hidden_size
    features_BMF = torch.empty(1, pairs, width, device="meta")
    head.extend(state, tokens_BM, features_BMF, [pairs], parts)


def _step(head: DraftHead, state: Any, parent: int, parts: TargetParts) -> None:
    tokens_BM = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    head.step(state, tokens_BM, torch.full_like(tokens_BM, parent), parts)


def _cache_context(state: Any, shape: TargetShape, context: int, kv_bytes: int) -> Context:
    """Return what attention to the head's own cache costs; nothing for a head without one."""
    caches = [value for value in vars(state).values() if isinstance(value, KVCache)]
    numbers = sum(s.numel() // s.shape[3] for cache in caches for s in cache.stacks) * context
    groups = shape.num_heads // shape.num_kv_heads
    # Every cached number enters one multiply-add for each query head of its group.
    return Context(row_bytes=numbers * kv_bytes, flops_per_token=2.0 * groups * numbers)
