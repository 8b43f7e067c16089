"""The draft vocabulary: a head may draft over W of the target's V tokens (EAGLE-3's d2t, FR-Spec).

Verification is always over the whole vocabulary, so a small draft vocabulary costs acceptance and
never correctness. `d2t` holds offsets: target id = draft id + d2t[draft id]; `t2d` says of every
target id whether it can be drafted. The rows of a head mean the tokens of its own vocabulary only:
it is stored with the weights, named by a hash, and never made anew for a head that has one.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """W target ids in ascending order, of a target vocabulary of `target_size` tokens."""

    ids_W: Tensor
    target_size: int

    def __post_init__(self) -> None:
        ids = self.ids_W
        if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) == 0:
            raise ValueError("draft vocabulary: expected a non-empty int64 vector of target ids")
        if ids[0] < 0 or ids[-1] >= self.target_size or not bool((ids.diff() > 0).all()):
            raise ValueError(
                f"draft vocabulary: ids must rise strictly inside 0..{self.target_size - 1}; "
                "is d2t absolute where offsets are expected, or from another target?"
            )

    def __len__(self) -> int:
        return len(self.ids_W)

    @cached_property
    def hash(self) -> str:
        """The 16 hex digits that name the target size and the ids."""
        content = json.dumps([self.target_size, self.ids_W.tolist()])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def d2t(self) -> Tensor:
        """Offsets [W], int64."""
        return self.ids_W - torch.arange(len(self.ids_W), device=self.ids_W.device)

    @cached_property
    def draft_id_V(self) -> Tensor:
        """The draft id of each target token, -1 outside the draft vocabulary."""
        table = torch.full((self.target_size,), -1, dtype=torch.int64, device=self.ids_W.device)
        table[self.ids_W] = torch.arange(len(self.ids_W), device=self.ids_W.device)
        return table

    @property
    def t2d(self) -> Tensor:
        """Membership [V], bool."""
        return self.draft_id_V >= 0

    def spread(self, probs_W: Tensor) -> Tensor:
        """Return probabilities [.., V] over the target vocabulary, zero outside."""
        full = probs_W.new_zeros(*probs_W.shape[:-1], self.target_size)
        return full.index_copy_(-1, self.ids_W.to(probs_W.device), probs_W)

    def to(self, device: torch.device) -> "DraftVocab":
        """Return the vocabulary with its tensors on a device: itself, if they are there."""
        if self.ids_W.device == device:
            return self
        return DraftVocab(self.ids_W.to(device), self.target_size)

    @classmethod
    def from_d2t(cls, d2t_W: Tensor, t2d_V: Tensor) -> "DraftVocab":
        """Read the offset form, int64 [W], checked against the membership, bool [V].

        Raises ValueError where they disagree: absolute ids in d2t may rise inside the target's
        vocabulary as offsets do, but t2d does not know the tokens they would lead to.
        """
        if t2d_V.dtype != torch.bool or t2d_V.dim() != 1:
            raise ValueError(
                f"draft vocabulary: t2d is {t2d_V.dtype} of shape {tuple(t2d_V.shape)}; "
                "expected a bool for each target token"
            )
        vocab = cls(torch.arange(d2t_W.shape[-1]) + d2t_W, len(t2d_V))
        unknown, left_out = vocab.t2d & ~t2d_V, t2d_V & ~vocab.t2d
        if unknown.any() or left_out.any():
            raise ValueError(
                f"draft vocabulary: d2t leads to target ids where t2d is false "
                f"({_some_ids(unknown)}) and to none of others where it is true "
                f"({_some_ids(left_out)}); is d2t absolute where offsets are expected?"
            )
        return vocab

    @classmethod
    def from_counts(
        cls, counts_V: Tensor, size: int, *, forced: Iterable[int], below: int | None = None
    ) -> "DraftVocab":
        """Keep the `size` most frequent tokens, the `forced` ones (stop ids) always among them.

        Ties go to the lower id; too few distinct tokens are filled up with the lowest unused ids.
        Only ids under `below` are kept, where a model has more rows than its tokenizer has tokens.
        Raises ValueError when size does not fit the vocabulary or the forced ids.
        """
        below = len(counts_V) if below is None else below
        forced = sorted({token for token in forced if token < below})
        if not len(forced) < size <= below:
            raise ValueError(
                f"head.draft_vocab_size={size}: expected more than {len(forced)} stop ids and at "
                f"most the target's {below} tokens"
            )
        rank = counts_V[:below].clone().to(torch.int64)
        rank[forced] = rank.max() + 1
        order = torch.sort(rank, descending=True, stable=True).indices
        return cls(order[:size].sort().values, len(counts_V))


def _some_ids(member_V: Tensor, count: int = 4) -> str:
    ids = member_V.nonzero()[:, 0].tolist()
    shown = ", ".join(map(str, ids[:count])) or "none"
    return shown if len(ids) <= count else f"{shown} and {len(ids) - count} more"
