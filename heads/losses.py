"""Distillation from the target, with logits held for a chunk of positions at a time.

For a teacher position j (the target's distribution over token j+1) student k of K sits at position
j-1-k. The losses themselves are in loss_kinds.py; here they are summed, masked and differentiated.
Shapes: N selected teacher positions, K depths, D width, W draft vocabulary, S terms of the loss,
O objectives that get a gradient of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import FeatureBatch, HeadConfig
from headstart.heads.chunks import (
    add_readout_gradient,
    compute_dtype,
    logit_gradients,
    logits_of,
    slices,
    student_gradient,
)
from headstart.heads.loss_kinds import Draft, Law, divergence, loss_functions, overlap, parse_loss
from headstart.heads.parts import ReadOut
from headstart.heads.vocab import DraftVocab


def loss_terms(config: HeadConfig) -> dict[str, float]:
    """Return the weight of each loss in the sum that config.loss names."""
    return parse_loss(config.loss)


@dataclass
class Selection:
    """Teacher positions that at least one depth learns from.

    row_N, position_N index [B, T]; student_NK is the student's position (clamped where invalid);
    label_N is the token after the teacher position. valid_NK says which depths are supervised;
    learned_NK which of them the losses from the target's law count, and learned_hard_NK which of
    them ce_hard counts: the draft vocabulary cannot express the others.
    """

    row_N: Tensor
    position_N: Tensor
    student_NK: Tensor
    label_N: Tensor
    valid_NK: Tensor
    learned_NK: Tensor
    learned_hard_NK: Tensor

    def learned(self, term: str) -> Tensor:
        """Return what a loss counts [N, K], by its name."""
        return self.learned_hard_NK if term == "ce_hard" else self.learned_NK


def select(
    batch: FeatureBatch,
    depths: int,
    config: HeadConfig,
    vocab: DraftVocab | None,
    *,
    all_supervised: bool = False,
) -> Selection:
    """Find what is supervised: a position counts when its LABEL is a supervised token.

    The student, the teacher and the label must lie in one document. With a draft vocabulary,
    ce_hard does not learn a label outside, nor under `drop` the other losses a position whose best
    target token is; all_supervised keeps them all the same, for metrics that must not leave them
    out.
    """
    tokens, documents = batch.tokens_BT, batch.document_BT
    length = tokens.shape[1]
    teacher_T = torch.arange(max(0, length - 1), device=tokens.device)
    label_BT, label_document_BT = tokens[:, 1:], documents[:, 1:]
    counts_BT = batch.loss_mask_BT[:, 1:].bool() & (label_document_BT >= 0)
    soft_BT = hard_BT = torch.ones_like(counts_BT)
    if vocab is not None:
        inside_V = vocab.to(tokens.device).t2d
        hard_BT = inside_V[label_BT]
        if config.out_of_vocab == "drop":
            soft_BT = inside_V[batch.argmax_BT[:, :-1]]
    if not all_supervised:
        needed = [hard_BT if name == "ce_hard" else soft_BT for name in loss_terms(config)]
        counts_BT = counts_BT & torch.stack(needed).any(0)
    student_TK = teacher_T[:, None] - 1 - torch.arange(depths, device=tokens.device)
    student_document_BTK = documents[:, student_TK.clamp(min=0)]
    valid_BTK = (student_TK >= 0) & (student_document_BTK == label_document_BT[..., None])
    valid_BTK = valid_BTK & counts_BT[..., None]
    row_N, position_N = valid_BTK.any(-1).nonzero(as_tuple=True)
    valid_NK = valid_BTK[row_N, position_N]
    return Selection(
        row_N,
        position_N,
        student_TK.clamp(min=0)[position_N],
        label_BT[row_N, position_N],
        valid_NK,
        valid_NK & soft_BT[row_N, position_N][:, None],
        valid_NK & hard_BT[row_N, position_N][:, None],
    )


def token_denominators(selection: Selection, config: HeadConfig) -> dict[str, Tensor]:
    """Count, by loss and depth [K], the positions that each loss of the sum is divided by."""
    return {name: selection.learned(name).sum(0).float() for name in loss_terms(config)}


@dataclass
class Teacher:
    """The target at the selected positions: states and log-normaliser, and what is counted."""

    hidden_ND: Tensor
    logsumexp_N: Tensor
    argmax_N: Tensor
    selection: Selection

    @classmethod
    def at(cls, batch: FeatureBatch, selection: Selection) -> "Teacher":
        """Gather the teacher's side of a batch."""
        index = (selection.row_N, selection.position_N)
        return cls(
            batch.hidden_BTD[index], batch.logsumexp_BT[index], batch.argmax_BT[index], selection
        )


@dataclass
class Distillation:
    """One distillation: teacher, the target's read-out, vocabulary and losses, for `distill`."""

    teacher: Teacher
    readout: ReadOut
    config: HeadConfig
    vocab: DraftVocab | None


def distill(
    student_NKD: Tensor,
    task: Distillation,
    own_KWD: Tensor | None = None,
    *,
    own_WD: Tensor | None = None,
    scale_K: dict[str, Tensor] | None = None,
    metrics: bool = False,
) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """Return the numerators [K] of each loss of the sum and, when asked for, metrics.

    A metric is a sum and its count, each [K].

    The student is read out by the target's frozen rows, by own_KWD (one trainable read-out a depth)
    or by own_WD (one for all depths). Gradients are accumulated chunk by chunk: memory grows with
    the chunk, not with N x W. For own_WD that takes scale_K (see `loss_scale`): by loss and depth,
    the factor that a numerator gets in the scalar loss, up to one factor common to all.
    """
    assert own_KWD is None or own_WD is None
    assert (own_WD is None) == (scale_K is None), "scale_K goes with own_WD"
    names = list(loss_terms(task.config))
    own = own_KWD if own_WD is None else own_WD
    scale_SK = None if scale_K is None else torch.stack([scale_K[name] for name in names])
    seen: list[dict[str, Tensor]] | None = [] if metrics else None
    numerators_SK = _Chunked.apply(student_NKD, own, task, scale_SK, seen)
    numerators = dict(zip(names, numerators_SK.unbind(), strict=True))
    return numerators, {} if seen is None else _metric_sums(seen, task.teacher.selection)


class _Chunked(torch.autograd.Function):
    """Computes the gradients in the forward pass, so that no chunk's logits outlive it.

    Without a scale each loss is an objective of its own: numerator k depends on student k (and
    read-out k) only, so backward can give every depth its own factor. A read-out that all depths
    share mixes them; there the scaled sum of all numerators is the one objective.
    """

    @staticmethod
    def forward(
        ctx: Any,
        student: Tensor,
        own: Tensor | None,
        task: Distillation,
        scale_SK: Tensor | None,
        seen: list[dict[str, Tensor]] | None,
    ) -> Tensor:
        N, K = task.teacher.selection.valid_NK.shape
        S = len(loss_terms(task.config))
        count = S if scale_SK is None else 1
        wants_student, wants_own = ctx.needs_input_grad[:2]
        grad_student = student.new_zeros(count, *student.shape) if wants_student else None
        fp32 = {"dtype": torch.float32, "device": student.device}
        grad_own = torch.zeros(count, *own.shape, **fp32) if wants_own else None
        total_SK = torch.zeros(S, K, **fp32)
        dtype = compute_dtype(student)
        readout = task.readout.to(dtype)  # once: autocast would copy it chunk by chunk
        weight = readout.weight_WD if own is None else own.to(dtype)
        for part in slices(N, task.config.loss_chunk // (K * weight.shape[-2])):
            student_NKD = student[part].to(dtype)
            logits_NKW = logits_of(student_NKD, weight)
            if own is None and readout.bias_W is not None:
                logits_NKW += readout.bias_W
            teacher_NW = readout(task.teacher.hidden_ND[part].to(dtype))

            def objectives(
                piece_NKW: Tensor, piece: slice, first: int = part.start, law: Tensor = teacher_NW
            ) -> Sequence[Tensor]:
                place = slice(first + piece.start, first + piece.stop)
                numerators_SK = _numerators(
                    piece_NKW, _law(law[piece], task, place), task, place, seen
                )
                total_SK.add_(numerators_SK.detach())
                if scale_SK is None:
                    return numerators_SK.sum(1).unbind()
                return [(numerators_SK * scale_SK).sum()]

            wanted = count if wants_student or wants_own else 0
            for o, gradient_NKW in enumerate(logit_gradients(logits_NKW, objectives, wanted)):
                if wants_student:
                    grad_student[o, part] = student_gradient(gradient_NKW, weight)
                if wants_own:
                    add_readout_gradient(grad_own[o], gradient_NKW, student_NKD)
        # Not save_for_backward: it keeps a reference, and autograd would copy a shared gradient.
        ctx.gradients, ctx.scale_SK = (grad_student, grad_own), scale_SK
        return total_SK

    @staticmethod
    def backward(ctx: Any, factor_SK: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "the gradients of a chunked loss can be taken once"
        (grad_student, grad_own), ctx.gradients = ctx.gradients, None
        scale_SK = ctx.scale_SK
        factor_OK = factor_SK if scale_SK is None else _common_factor(factor_SK, scale_SK)
        if grad_student is not None:
            grad_student = _weighed(grad_student, factor_OK[:, None, :, None])
        if grad_own is not None:
            by_depth = factor_OK[..., None, None] if scale_SK is None else factor_OK[..., None]
            grad_own = _weighed(grad_own, by_depth)
        return grad_student, grad_own, None, None, None


def _weighed(gradients: Tensor, factors: Tensor) -> Tensor:
    """Return the sum over objectives of factor * gradient; a single gradient is not copied."""
    return gradients.mul_(factors)[0] if len(gradients) == 1 else (factors * gradients).sum(0)


def _common_factor(factor_SK: Tensor, scale_SK: Tensor) -> Tensor:
    """Return c [1, 1] of factor = c * scale."""
    common = (factor_SK * scale_SK).sum() / scale_SK.square().sum().clamp(min=1e-30)
    assert torch.allclose(factor_SK, common * scale_SK, rtol=1e-3, atol=0), (
        "the loss gave numerators other factors than scale_K: were the denominators others?"
    )
    return common[None, None]


def _numerators(
    logits_NKW: Tensor,
    law: Law,
    task: Distillation,
    part: slice,
    seen: list[dict[str, Tensor]] | None,
) -> Tensor:
    """Return the numerators [S, K] of some positions, in fp32; note their metrics in `seen`."""
    draft, config = Draft(task.readout.post(logits_NKW).float()), task.config
    if seen is not None:
        seen.append(_metrics(Draft(draft.logits_NKW.detach()), law, task, part))
    kinds = loss_functions(eta=config.lk_eta, top_k=config.loss_top_k)
    numerators = [
        (kinds[name](draft, law) * task.teacher.selection.learned(name)[part]).sum(0)
        for name in loss_terms(config)
    ]
    return torch.stack(numerators)


@torch.no_grad()
def _law(logits_NW: Tensor, task: Distillation, part: slice) -> Law:
    """Make the target's law at some positions from its logits there."""
    teacher, vocab = task.teacher, task.vocab
    label_N, by_mass = teacher.selection.label_N[part], task.config.out_of_vocab == "mass"
    if vocab is None:
        return Law(logits_NW.float(), None, by_mass, label_N)
    draft_N = vocab.to(label_N.device).draft_id_V[label_N].clamp(min=0)
    return Law(logits_NW.float(), teacher.logsumexp_N[part, None], by_mass, draft_N)


@torch.no_grad()
def _metrics(draft: Draft, law: Law, task: Distillation, part: slice) -> dict[str, Tensor]:
    """Return top-1 agreement, overlap with p, KL over the draft vocabulary, and what lies outside.

    All are [N, K] and teacher-forced. oov_mass is the target's probability outside, oov_argmax
    whether its best token is.
    """
    best_NK, argmax_N1 = draft.logits_NKW.argmax(-1), task.teacher.argmax_N[part, None]
    outside_argmax_N1 = torch.zeros_like(argmax_N1)
    if task.vocab is not None:
        vocab = task.vocab.to(best_NK.device)
        best_NK = vocab.ids_W[best_NK]
        outside_argmax_N1 = ~vocab.t2d[argmax_N1]
    values = {
        "top1_agreement": best_NK == argmax_N1,
        "alpha_overlap": overlap(draft, law),
        "kl": divergence(draft, law),
        "oov_mass": 1 - law.mass_N1,
        "oov_argmax": outside_argmax_N1,
    }
    return {name: value.float().expand(best_NK.shape) for name, value in values.items()}


def _metric_sums(
    seen: list[dict[str, Tensor]], selection: Selection
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum over chunks; every supervised position counts in full."""
    if not seen:
        return {}
    values = {name: torch.cat([chunk[name] for chunk in seen]) for name in seen[0]}
    valid_NK = selection.valid_NK
    count_K = valid_NK.sum(0).float()
    sums = {name: ((value * valid_NK).sum(0), count_K) for name, value in values.items()}
    return sums | {"joint_agreement": joint_agreement(values["top1_agreement"] > 0, selection)}


def joint_agreement(agree_NK: Tensor, selection: Selection) -> tuple[Tensor, Tensor]:
    """Count, by depth [K], the student positions that agree at this and every shallower depth.

    The second is how many have all these depths supervised. Their ratio is the chance that a greedy
    chain, drafted from a position of the target's own greedy text, is accepted so deep.
    """
    row_N, student_NK, valid_NK = selection.row_N, selection.student_NK, selection.valid_NK
    K = valid_NK.shape[1]
    if len(row_N) == 0:
        return agree_NK.float().sum(0), valid_NK.float().sum(0)
    places = (int(row_N.max()) + 1, int(selection.position_N.max()) + 1, K)
    supervised_BTK = torch.zeros(places, dtype=torch.bool, device=row_N.device)
    agree_BTK = supervised_BTK.clone()
    n, k = valid_NK.nonzero(as_tuple=True)
    supervised_BTK[row_N[n], student_NK[n, k], k] = True
    agree_BTK[row_N[n], student_NK[n, k], k] = agree_NK[n, k]
    counted_BTK = supervised_BTK.long().cumprod(-1)
    joint_BTK = counted_BTK * agree_BTK.long().cumprod(-1)
    return joint_BTK.sum((0, 1)).float(), counted_BTK.sum((0, 1)).float()
