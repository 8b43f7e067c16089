"""What every head is: a config, features in, loss sums out in training, logits out in drafting.

At position t a head sees the target's features at t and the embedding of token t+1; it predicts
token t+2, and its teacher is the target's distribution at position t+1.
Shapes: B rows, T tokens, D width, V vocabulary, W draft vocabulary, K depths, M new pairs.
"""

import importlib
import math
import pkgutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headstart.heads.loss_kinds import parse_loss
from headstart.heads.parts import ReadOut, TargetParts
from headstart.heads.target import TargetShape
from headstart.heads.vocab import DraftVocab

OUT_OF_VOCAB = ("drop", "mass")


@dataclass
class HeadConfig:
    """What every head family shares; each option of the group `head` extends it."""

    draft_vocab_size: int | None = None
    """Most frequent target tokens the head drafts over; null means the whole vocabulary."""
    out_of_vocab: str = "drop"
    """Positions whose best target token cannot be drafted: drop, or weigh by in-vocabulary mass."""
    loss: str = "ce_soft"
    """A loss of loss_kinds.py by name, or a weighted sum of them such as kl + 0.1*tv."""
    lk_eta: float = 3.0
    """lk_hybrid: how fast its weight moves from KL to TV as overlap grows."""
    loss_top_k: int = 10
    """topk_hass, kl_topk_tail: tokens of the target's law that are kept."""
    loss_chunk: int = 1 << 26
    """Logits that the loss holds at once, over all depths; at least those of one position."""
    init_from: str | None = None
    """Head checkpoint of the same options whose weights and draft vocabulary training starts from,
    on whatever rows; null starts afresh. A checkpoint holds null here, and says in trained_on."""

    def __post_init__(self) -> None:
        if self.draft_vocab_size is not None and self.draft_vocab_size < 2:
            raise ValueError(
                f"head.draft_vocab_size={self.draft_vocab_size}: need at least 2, or null"
            )
        if self.out_of_vocab not in OUT_OF_VOCAB:
            raise ValueError(
                f"head.out_of_vocab={self.out_of_vocab}: expected one of {', '.join(OUT_OF_VOCAB)}"
            )
        terms = set(parse_loss(self.loss))
        if not 0 <= self.lk_eta < math.inf:
            raise ValueError(f"head.lk_eta={self.lk_eta}: expected a number of at least 0")
        if self.loss_top_k < 1:
            raise ValueError(f"head.loss_top_k={self.loss_top_k}: need at least 1 token")
        if self.loss_chunk < 1:
            raise ValueError(f"head.loss_chunk={self.loss_chunk}: need at least 1 logit")
        for message in self._unused(terms):
            warnings.warn(message, stacklevel=3)

    def _unused(self, terms: set[str]) -> list[str]:
        """Say which settings of the loss were changed to no effect."""
        messages = []
        if self.out_of_vocab == "mass" and (self.draft_vocab_size is None or terms == {"ce_hard"}):
            messages.append(
                "head.out_of_vocab=mass has no effect without head.draft_vocab_size and a "
                "head.loss other than ce_hard; use drop"
            )
        if self.lk_eta != HeadConfig.lk_eta and "lk_hybrid" not in terms:
            messages.append("head.lk_eta has no effect without lk_hybrid in head.loss")
        if self.loss_top_k != HeadConfig.loss_top_k and not terms & {"topk_hass", "kl_topk_tail"}:
            messages.append(
                "head.loss_top_k has no effect without topk_hass or kl_topk_tail in head.loss"
            )
        return messages

    def taps(self, shape: TargetShape) -> tuple[int, ...]:
        """Return the hidden_states[s] that the head reads, ascending; none: the last state.

        Raises ValueError for settings that do not fit the target.
        """
        return ()


@dataclass
class FeatureBatch:
    """Rows of tokens with the target's features, made online or read from a store.

    document_BT numbers packed documents and is -1 on padding; positions restart with a document.
    row_ids_B names the rows in order: more than B of them where several are packed in one.
    logsumexp_BT and argmax_BT are of the target's logits at each position, over all V tokens.
    """

    tokens_BT: Tensor
    loss_mask_BT: Tensor
    positions_BT: Tensor
    document_BT: Tensor
    row_ids_B: Tensor
    hidden_BTD: Tensor
    logsumexp_BT: Tensor
    argmax_BT: Tensor
    aux: dict[int, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> "FeatureBatch":
        """Return the batch on another device; from pinned memory a GPU copies while it computes."""
        ahead = device.type == "cuda"
        return self._each(lambda tensor: tensor.to(device, non_blocking=ahead))

    def pinned(self) -> "FeatureBatch":
        """Return the batch in pinned memory; it must be on the CPU, beside a GPU."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "FeatureBatch":
        tensors = {name: change(v) for name, v in vars(self).items() if name != "aux"}
        return FeatureBatch(**tensors, aux={s: change(a) for s, a in self.aux.items()})


@dataclass
class LossSums:
    """Numerators by term and depth, their weights, and metric sums: never means.

    The loss of an optimizer step is the sum over terms and depths of weight * numerator / N, with N
    the denominator (see `DraftHead.denominators`) over all ranks and micro-batches of the step.
    """

    numerators: dict[str, Tensor]
    weights: dict[str, Tensor]
    metrics: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def total(self, denominators: dict[str, Tensor]) -> Tensor:
        """Return the scalar loss under these global denominators; a zero count contributes 0."""
        scale = loss_scale(self.weights, denominators)
        terms = [(scale[name] * value).sum() for name, value in self.numerators.items()]
        return torch.stack(terms).sum()


def loss_scale(weights: dict[str, Tensor], denominators: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what each numerator [K] of a term is multiplied by in the loss of a step."""
    return {name: weight / denominators[name].clamp(min=1) for name, weight in weights.items()}


class DraftHead(nn.Module, ABC):
    """Base of all heads. Holds trained tensors only; the target's parts come with each call."""

    aux_features: tuple[int, ...]
    """hidden_states[s] the head reads in place of the last one, ascending; empty: the last one."""
    depths_at_once: int = 1
    """Depths whose logits `extend` returns; `step` gives the deeper ones."""

    def __init__(self, config: HeadConfig, shape: TargetShape, vocab: DraftVocab | None) -> None:
        super().__init__()
        wanted = config.draft_vocab_size
        if (wanted is None) != (vocab is None) or (vocab is not None and len(vocab) != wanted):
            have = "none" if vocab is None else len(vocab)
            raise ValueError(
                f"head.draft_vocab_size={wanted} but the draft vocabulary given is {have}"
            )
        self.config, self.shape, self.vocab = config, shape, vocab
        self.aux_features = config.taps(shape)
        self._restricted: tuple[ReadOut, ReadOut] | None = None

    @property
    def num_draft_tokens(self) -> int:
        """W."""
        return self.shape.vocab_size if self.vocab is None else len(self.vocab)

    @property
    @abstractmethod
    def max_depth(self) -> int | None:
        """Deepest draft the head can make; None when `step` goes on for ever."""

    @abstractmethod
    def initialise(self, parts: TargetParts) -> None:
        """Set the starting weights, those copied from the target included."""

    def unrolled(self, depth: int) -> "DraftHead":
        """Return the head as its teacher-forced metrics are taken, `depth` tokens deep or deeper.

        Raises ValueError when it cannot draft so deep.
        """
        if self.max_depth is not None and depth > self.max_depth:
            raise ValueError(f"depth {depth}: this head drafts {self.max_depth} tokens at most")
        return self

    def recompute_activations(self) -> None:
        """Compute a decoder layer's activations again in the backward pass: less memory, more work.

        Raises ValueError for a head without one.
        """
        raise ValueError(
            f"train.activation_checkpointing=true: {type(self).__name__} has no decoder layer to "
            "compute again; use false"
        )

    @abstractmethod
    def denominators(self, batch: FeatureBatch) -> dict[str, Tensor]:
        """Count, by term and depth, the positions the loss of this batch is divided by."""

    @abstractmethod
    def forward(
        self,
        batch: FeatureBatch,
        parts: TargetParts,
        generator: torch.Generator | None = None,
        denominators: dict[str, Tensor] | None = None,
    ) -> LossSums:
        """Return the loss sums of a batch, and metric sums in eval mode.

        `denominators` are the counts of the whole optimizer step, for heads whose gradients need
        the scale of the loss beforehand; without them the batch's own are meant.
        """

    @abstractmethod
    def new_state(self, batch: int, max_len: int, max_nodes: int, parts: TargetParts) -> Any:
        """Make an empty drafting state for `batch` rows; it has `move_row` and `reset`."""

    @abstractmethod
    def extend(
        self,
        state: Any,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        parts: TargetParts,
        rows: Sequence[int] | None = None,
    ) -> Tensor:
        """Read verified pairs (features at t, token t+1), counts[r] of them in row r.

        hidden_RMD is the target's last state, or the states of aux_features side by side.
        Drops all drafted state first. Returns logits [R, K, W] of the depths known without a step.
        """

    def step(self, state: Any, tokens_RM: Tensor, parents_RM: Tensor, parts: TargetParts) -> Tensor:
        """Read drafted tokens and return the logits [R, M, W] of their children.

        parents_RM are state slots: 0 is the root, and each call's M tokens take the next M slots.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts all its depths in one pass")

    def layers_to_compile(self) -> list[nn.Module]:
        """Return the modules that a compiled runtime turns into a graph each: those in its lists.

        Each takes and returns tensors, and may write one layer of a KVCache.
        """
        lists = [child for child in self.children() if isinstance(child, nn.ModuleList)]
        return [module for modules in lists for module in modules]

    def draft_readout(self, parts: TargetParts) -> ReadOut:
        """Return the target's read-out restricted to the draft vocabulary (made once)."""
        if self.vocab is None:
            return parts.readout
        if self._restricted is None or self._restricted[0] is not parts.readout:
            ids = self.vocab.ids_W.to(parts.readout.weight_WD.device)
            self._restricted = (parts.readout, parts.readout.rows(ids))
        return self._restricted[1]

    @torch.no_grad()
    def copy_target_rows(self, own: Tensor, parts: TargetParts, *, instead: str) -> None:
        """Start an own read-out [.., W, D] from the target's rows.

        Raises ValueError for a target whose read-out has a bias; `instead` is the setting that
        works there.
        """
        rows = self.draft_readout(parts)
        if rows.bias_W is not None:
            raise ValueError(
                f"head.readout={self.config.readout}: the target's read-out has a bias; use "
                f"head.readout={instead}"
            )
        own.copy_(rows.weight_WD.expand_as(own))


HeadClass = TypeVar("HeadClass", bound=type[DraftHead])
_FAMILIES: dict[str, tuple[type[HeadConfig], type[DraftHead]]] = {}


def register(family: str, config: type[HeadConfig]) -> Callable[[HeadClass], HeadClass]:
    """Register a head class under its family name and config class."""

    def add(head: HeadClass) -> HeadClass:
        _FAMILIES[family] = (config, head)
        return head

    return add


def families() -> dict[str, tuple[type[HeadConfig], type[DraftHead]]]:
    """Return family name -> (config class, head class), sorted by name.

    Imports every module of this package, so that a new family is one new file.
    """
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"headstart.heads.{module.name}")
    return dict(sorted(_FAMILIES.items()))


def family_of(config: HeadConfig) -> str:
    """Return the family name that a config belongs to."""
    return next(name for name, (kind, _) in _FAMILIES.items() if kind is type(config))


def build_head(config: HeadConfig, shape: TargetShape, vocab: DraftVocab | None) -> DraftHead:
    """Make the head of a config, its weights not yet initialised."""
    return _FAMILIES[family_of(config)][1](config, shape, vocab)
