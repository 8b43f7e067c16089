"""Distillation from the target, with logits held for a chunk of positions at a time.

For a teacher position j (the target's distribution over token j+1) student k of K sits at position
j-1-k. Shapes: N selected teacher positions, K depths, D width, W draft vocabulary.
Formulas: EAGLE (arXiv 2401.15077, eq. for L_cls), Medusa (arXiv 2401.10774, eq. 1), soft labels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headstart.heads.base import FeatureBatch, HeadConfig
from headstart.heads.parts import ReadOut
from headstart.heads.vocab import DraftVocab


@dataclass
class Selection:
    """Teacher positions that at least one depth learns from.

    row_N, position_N index [B, T]; student_NK is the student's position (clamped where invalid);
    label_N is the token after the teacher position. valid_NK says which depths are supervised, and
    learned_NK which of them the loss counts: the draft vocabulary cannot express the others.
    """

    row_N: Tensor
    position_N: Tensor
    student_NK: Tensor
    label_N: Tensor
    valid_NK: Tensor
    learned_NK: Tensor


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
    positions whose label (ce_hard) or best target token (ce_soft under `drop`) is outside are not
    learned; all_supervised keeps them all the same, for metrics that must not leave them out.
    """
    tokens, documents = batch.tokens_BT, batch.document_BT
    length = tokens.shape[1]
    teacher_T = torch.arange(max(0, length - 1), device=tokens.device)
    label_BT, label_document_BT = tokens[:, 1:], documents[:, 1:]
    counts_BT = batch.loss_mask_BT[:, 1:].bool() & (label_document_BT >= 0)
    inside_BT = torch.ones_like(counts_BT)
    if vocab is not None:
        inside_V = vocab.to(tokens.device).t2d
        if config.loss == "ce_hard":
            inside_BT = inside_V[label_BT]
        elif config.out_of_vocab == "drop":
            inside_BT = inside_V[batch.argmax_BT[:, :-1]]
    if not all_supervised:
        counts_BT = counts_BT & inside_BT
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
        valid_NK & inside_BT[row_N, position_N][:, None],
    )


@dataclass
class Teacher:
    """The target at the selected positions: states, log-normaliser, best token; what counts."""

    hidden_ND: Tensor
    logsumexp_N: Tensor
    argmax_N: Tensor
    label_N: Tensor
    valid_NK: Tensor
    """Positions and depths that metrics count."""
    learned_NK: Tensor
    """Positions and depths that the loss counts."""

    @classmethod
    def at(cls, batch: FeatureBatch, selection: Selection) -> "Teacher":
        """Gather the teacher's side of a batch."""
        index = (selection.row_N, selection.position_N)
        return cls(
            batch.hidden_BTD[index],
            batch.logsumexp_BT[index],
            batch.argmax_BT[index],
            selection.label_N,
            selection.valid_NK,
            selection.learned_NK,
        )


@dataclass
class Distillation:
    """One distillation: teacher, read-outs, vocabulary and loss kind, ready for `distill`."""

    teacher: Teacher
    readout: ReadOut
    config: HeadConfig
    vocab: DraftVocab | None


def distill(
    student_NKD: Tensor, task: Distillation, own_KWD: Tensor | None = None, *, metrics: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss numerators [K], and metric numerators [K] when asked for.

    The student is read out by the target's frozen rows, or by own_KWD (one trainable read-out a
    depth). Gradients are accumulated chunk by chunk: memory grows with the chunk, not with N x W.
    """
    sums: dict[str, Tensor] = {}
    if own_KWD is None:
        own_KWD = student_NKD.new_empty(0)
    numerators = _Chunked.apply(student_NKD, own_KWD, task, metrics, sums)
    return numerators, sums


class _Chunked(torch.autograd.Function):
    """Computes the gradients in the forward pass, so that no chunk's logits outlive it.

    Numerator k depends on student k (and read-out k) only; backward scales each by its own factor.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, own: Tensor, task: Distillation, metrics: bool, sums: dict
    ) -> Tensor:
        N, K = task.teacher.learned_NK.shape
        grad_student = torch.zeros_like(student)
        grad_own = torch.zeros_like(own)
        total = torch.zeros(K, dtype=torch.float32, device=student.device)
        for start in range(0, N, task.config.loss_chunk):
            part = slice(start, start + task.config.loss_chunk)
            with torch.enable_grad():
                leaf = student[part].detach().requires_grad_(ctx.needs_input_grad[0])
                own_leaf = own.detach().requires_grad_(ctx.needs_input_grad[1])
                numerator_K = _chunk_loss(leaf, own_leaf, task, part, metrics, sums)
                leaves = [x for x in (leaf, own_leaf) if x.requires_grad]
                grads = torch.autograd.grad(numerator_K.sum(), leaves) if leaves else ()
            for source, grad in zip(leaves, grads, strict=True):
                if source is leaf:
                    grad_student[part] = grad
                else:
                    grad_own += grad
            total += numerator_K.detach()
        ctx.save_for_backward(grad_student, grad_own)
        return total

    @staticmethod
    def backward(ctx: Any, scale_K: Tensor) -> tuple[Tensor | None, ...]:
        grad_student, grad_own = ctx.saved_tensors
        own = grad_own * scale_K[:, None, None] if grad_own.numel() else grad_own
        return grad_student * scale_K[None, :, None], own, None, None, None


def _chunk_loss(
    student_NKD: Tensor,
    own_KWD: Tensor,
    task: Distillation,
    part: slice,
    metrics: bool,
    sums: dict[str, Tensor],
) -> Tensor:
    """Return the numerators [K] of one chunk, in fp32; add to the metric sums."""
    if own_KWD.numel():
        logits_NKW = task.readout.post(torch.einsum("nkd,kwd->nkw", student_NKD, own_KWD)).float()
    else:
        logits_NKW = task.readout(student_NKD).float()
    teacher = task.teacher
    weight_NK = teacher.learned_NK[part].float()
    normaliser_NK = logits_NKW.logsumexp(-1)
    with torch.no_grad():
        teacher_NW = task.readout(teacher.hidden_ND[part].to(student_NKD.dtype)).float()
        if metrics:
            _add_metrics(sums, logits_NKW.detach(), teacher_NW, task, part)
    if task.config.loss == "ce_hard":
        label_N = teacher.label_N[part]
        if task.vocab is not None:
            label_N = task.vocab.to(label_N.device).draft_id_V[label_N]
        label_N1 = label_N.clamp(min=0)[:, None].expand(-1, logits_NKW.shape[1])
        fit_NK = logits_NKW.gather(2, label_N1[..., None])[..., 0]
    else:
        if task.config.out_of_vocab == "mass" and task.vocab is not None:
            mass_N = (teacher_NW.logsumexp(-1) - teacher.logsumexp_N[part]).exp()
            weight_NK = weight_NK * mass_N[:, None]
        # Not an einsum: autocast would run it in bf16.
        fit_NK = (teacher_NW.softmax(-1)[:, None] * logits_NKW).sum(-1)
    return ((normaliser_NK - fit_NK) * weight_NK).sum(0)


@torch.no_grad()
def _add_metrics(
    sums: dict[str, Tensor],
    logits_NKW: Tensor,
    teacher_NW: Tensor,
    task: Distillation,
    part: slice,
) -> None:
    """Add top-1 agreement, overlap with the raw p, and what lies outside the draft vocabulary.

    All are teacher-forced. oov_mass is the target's probability outside, oov_argmax the share of
    positions whose best token is.
    """
    valid_NK = task.teacher.valid_NK[part].float()
    raw_NW = (teacher_NW - task.teacher.logsumexp_N[part][:, None]).exp()
    best_NK, argmax_N1 = logits_NKW.argmax(-1), task.teacher.argmax_N[part][:, None]
    outside_argmax_N1 = torch.zeros_like(argmax_N1, dtype=torch.float32)
    if task.vocab is not None:
        vocab = task.vocab.to(best_NK.device)
        best_NK = vocab.ids_W[best_NK]
        outside_argmax_N1 = 1 - vocab.t2d[argmax_N1].float()
    agree_NK = (best_NK == argmax_N1).float()
    overlap_NK = torch.minimum(logits_NKW.softmax(-1), raw_NW[:, None]).sum(-1)
    outside_N1 = (1 - raw_NW.sum(-1)).clamp(min=0)[:, None]
    for name, value in (
        ("top1_agreement", agree_NK),
        ("alpha_overlap", overlap_NK),
        ("oov_mass", outside_N1),
        ("oov_argmax", outside_argmax_N1),
    ):
        sums[name] = sums.get(name, 0) + (value * valid_NK).sum(0)
