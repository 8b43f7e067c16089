"""Distillation losses by name: each a pure function of a draft's logits and the target's law, fp32.

q is the draft's law over its W tokens, p the target's over all V tokens. The divergences compare q
with p~, which is p on the W tokens scaled to sum to one, and count a position by the weight that
the policy for out-of-vocabulary mass gives it. The overlap alpha = sum min(p, q), and what is made
of it or of single probabilities of p, takes p as it is: p~ would read too high.
Shapes: N positions, K depths, W draft vocabulary. Every loss is [N, K], not yet summed or masked.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

MIN_OVERLAP = 1e-5
"""Where -log alpha is cut off, with its gradient."""


@dataclass(frozen=True, eq=False)
class Draft:
    """What the student says: its logits, and q, made once for all terms of a sum."""

    logits_NKW: Tensor

    @cached_property
    def logs_NKW(self) -> Tensor:
        """log q."""
        return self.logits_NKW.log_softmax(-1)

    @cached_property
    def probs_NKW(self) -> Tensor:
        """q."""
        return self.logs_NKW.exp()


@dataclass(frozen=True, eq=False)
class Law:
    """What the target says at the same positions, seen through the draft vocabulary."""

    logits_NW: Tensor
    logsumexp_N1: Tensor | None
    """Over all V tokens; None when they can all be drafted."""
    by_mass: bool
    """Whether a divergence counts by the mass of p (out_of_vocab=mass), or in full."""
    label_N: Tensor
    """Draft id of the data token; any id where it cannot be drafted."""

    @cached_property
    def logs_NW(self) -> Tensor:
        """log p~."""
        return self.logits_NW.log_softmax(-1)

    @cached_property
    def probs_NW(self) -> Tensor:
        """p~."""
        return self.logits_NW.softmax(-1)

    @cached_property
    def mass_N1(self) -> Tensor:
        """p's total over the draft vocabulary."""
        if self.logsumexp_N1 is None:
            return torch.ones_like(self.logits_NW[:, :1])
        inside_N1 = self.logits_NW.logsumexp(-1, keepdim=True)
        # Not above 1: the normaliser may come from logits of another precision.
        return (inside_N1 - self.logsumexp_N1).clamp(max=0).exp()

    @cached_property
    def raw_NW(self) -> Tensor:
        """p on the draft vocabulary."""
        return self.probs_NW * self.mass_N1

    @property
    def weight_N1(self) -> Tensor:
        """What a divergence from p~ counts by."""
        return self.mass_N1 if self.by_mass else torch.ones_like(self.logits_NW[:, :1])


Loss = Callable[[Draft, Law], Tensor]


def ce_hard(draft: Draft, law: Law) -> Tensor:
    """Return -log q of the data token."""
    label_NK1 = law.label_N[:, None, None].expand(-1, draft.logs_NKW.shape[1], 1)
    return -draft.logs_NKW.gather(2, label_NK1)[..., 0]


def ce_soft(draft: Draft, law: Law) -> Tensor:
    """Return the cross-entropy -sum p~ log q (EAGLE, arXiv 2401.15077, L_cls)."""
    # Not an einsum, here and below: autocast would run it in bf16.
    return -law.weight_N1 * (law.probs_NW[:, None] * draft.logs_NKW).sum(-1)


def kl(draft: Draft, law: Law) -> Tensor:
    """Return KL(p~, q): the gradient of ce_soft, and 0 at the optimum."""
    return law.weight_N1 * divergence(draft, law)


def rkl(draft: Draft, law: Law) -> Tensor:
    """Return KL(q, p~), which seeks a mode of p rather than covering it."""
    gap_NKW = draft.logs_NKW - law.logs_NW[:, None]
    return law.weight_N1 * (draft.probs_NKW * gap_NKW).sum(-1)


def jsd(draft: Draft, law: Law) -> Tensor:
    """Return the Jensen-Shannon divergence: the mean of both to m = (p~ + q) / 2, at most ln 2."""
    p_N1W, q_NKW = law.logs_NW[:, None], draft.logs_NKW
    m_NKW = torch.logaddexp(p_N1W, q_NKW) - math.log(2)
    both_NKW = law.probs_NW[:, None] * (p_N1W - m_NKW) + draft.probs_NKW * (q_NKW - m_NKW)
    return law.weight_N1 * 0.5 * both_NKW.sum(-1)


def tv(draft: Draft, law: Law) -> Tensor:
    """Return the total variation 1 - alpha, as the sum of what q has in excess of p."""
    return (draft.probs_NKW - law.raw_NW[:, None]).clamp(min=0).sum(-1)


def nla(draft: Draft, law: Law) -> Tensor:
    """Return -log alpha (LK loss, arXiv 2602.23881); alpha is cut off at MIN_OVERLAP."""
    return -overlap(draft, law).clamp(min=MIN_OVERLAP).log()


def lk_hybrid(draft: Draft, law: Law, *, eta: float) -> Tensor:
    """Return lam KL + (1 - lam) TV, lam = exp(-eta alpha) a position (arXiv 2602.23881).

    lam takes no gradient: KL leads while the laws barely overlap, TV once they do.
    """
    lam_NK = (-eta * overlap(draft, law).detach()).exp()
    return lam_NK * kl(draft, law) + (1 - lam_NK) * tv(draft, law)


def topk_hass(draft: Draft, law: Law, *, k: int) -> Tensor:
    """Return -sum p log q over the k best tokens of p (HASS, arXiv 2408.15766).

    p is not scaled to sum to one. With a draft vocabulary they are the k best that can be drafted.
    """
    raw_NW = law.raw_NW * best(law.logs_NW, k)
    return -(raw_NW[:, None] * draft.logs_NKW).sum(-1)


def kl_topk_tail(draft: Draft, law: Law, *, k: int) -> Tensor:
    """Return the KL over the k best tokens of p~ and one bucket for all others.

    Merging tokens only loses information, so this never exceeds `kl`, and equals it when nothing is
    left for the bucket. A sum over the kept tokens alone would be no divergence.
    """
    if k >= law.logs_NW.shape[-1]:
        return kl(draft, law)
    kept_N1W, p_N1W = best(law.logs_NW, k)[:, None], law.logs_NW[:, None]
    kept_NK = (law.probs_NW[:, None] * kept_N1W * (p_N1W - draft.logs_NKW)).sum(-1)
    tail_p_N1 = p_N1W.masked_fill(kept_N1W, -math.inf).logsumexp(-1)
    tail_q_NK = draft.logs_NKW.masked_fill(kept_N1W, -math.inf).logsumexp(-1)
    return law.weight_N1 * (kept_NK + tail_p_N1.exp() * (tail_p_N1 - tail_q_NK))


def divergence(draft: Draft, law: Law) -> Tensor:
    """Return KL(p~, q) [N, K], every position counted in full."""
    # One sum of small terms: cross-entropy less entropy would cancel near the optimum.
    return (law.probs_NW[:, None] * (law.logs_NW[:, None] - draft.logs_NKW)).sum(-1)


def overlap(draft: Draft, law: Law) -> Tensor:
    """Return alpha = sum min(p, q) [N, K]: the chance that a token sampled from q is accepted."""
    return torch.minimum(draft.probs_NKW, law.raw_NW[:, None]).sum(-1)


def best(logs_NW: Tensor, k: int) -> Tensor:
    """Mark the k largest of each row [N, W], the lowest id first where equal; all if W <= k."""
    k = min(k, logs_NW.shape[-1])
    edge_N1 = logs_NW.topk(k, dim=-1).values[:, -1:]
    above_NW, level_NW = logs_NW > edge_N1, logs_NW == edge_N1
    room_N1 = k - above_NW.sum(-1, keepdim=True)
    return above_NW | (level_NW & (level_NW.cumsum(-1) <= room_N1))


def loss_functions(*, eta: float, top_k: int) -> dict[str, Loss]:
    """Return every loss by name, its setting filled in."""
    return {
        "ce_hard": ce_hard,
        "ce_soft": ce_soft,
        "jsd": jsd,
        "kl": kl,
        "kl_topk_tail": partial(kl_topk_tail, k=top_k),
        "lk_hybrid": partial(lk_hybrid, eta=eta),
        "nla": nla,
        "rkl": rkl,
        "topk_hass": partial(topk_hass, k=top_k),
        "tv": tv,
    }


NAMES = tuple(loss_functions(eta=3.0, top_k=10))


def parse_loss(text: str) -> dict[str, float]:
    """Read one loss name or a weighted sum such as "kl + 0.1*tv"; return the weight by name.

    Raises ValueError for an unknown or repeated name and for a weight that is not above 0.
    """
    terms: dict[str, float] = {}
    for part in text.split("+"):
        factor, star, name = part.rpartition("*")
        name = name.strip()
        if name not in NAMES:
            raise ValueError(
                f"head.loss={text}: unknown loss {name!r}; expected one of {', '.join(NAMES)}, "
                "or a sum such as kl + 0.1*tv"
            )
        if name in terms:
            raise ValueError(f"head.loss={text}: {name} is named twice; give it one weight")
        terms[name] = _weight(text, factor.strip()) if star else 1.0
    return terms


def _weight(text: str, factor: str) -> float:
    try:
        weight = float(factor)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"head.loss={text}: weight {factor!r}; expected a number above 0")
    return weight
