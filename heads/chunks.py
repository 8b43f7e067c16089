"""A read-out differentiated by hand, so that logits are made once and held for one chunk only.

The losses are applied to a few positions at a time, while these lie in a CPU's cache, and the
gradient takes the place of the logits it came from. What is left are products of whole chunks.
Shapes: N positions of a chunk, K depths, D width, W draft vocabulary, O objectives.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

PIECE_CPU, PIECE = 1 << 18, 1 << 24
"""Logits that losses are applied to at once: in fp32 a megabyte, and enough to fill a GPU."""
READOUT_ROWS = 8192
"""Rows of a read-out whose gradient is made at once before it is added."""


def slices(count: int, size: int) -> Iterator[slice]:
    """Cut range(count) into slices of `size`, at least 1."""
    for start in range(0, count, max(1, size)):
        yield slice(start, min(start + max(1, size), count))


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype that products with a tensor are computed in: autocast's, or its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def logits_of(student_NKD: Tensor, weight: Tensor) -> Tensor:
    """Return [N, K, W] by one read-out [W, D], or by one a depth [K, W, D]."""
    if weight.dim() == 2:
        return F.linear(student_NKD, weight)
    return torch.einsum("nkd,kwd->nkw", student_NKD, weight)


def student_gradient(gradient_NKW: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient [N, K, D] of what was read out."""
    if weight.dim() == 2:
        return gradient_NKW @ weight
    return torch.einsum("nkw,kwd->nkd", gradient_NKW, weight)


def add_readout_gradient(total: Tensor, gradient_NKW: Tensor, student_NKD: Tensor) -> None:
    """Add the gradient of a read-out to its total, [W, D] or [K, W, D], some rows at a time."""
    if total.dim() == 3:
        for total_WD, g_NW, x_ND in zip(
            total, gradient_NKW.unbind(1), student_NKD.unbind(1), strict=True
        ):
            _add_product(total_WD, g_NW, x_ND)
    else:
        _add_product(total, gradient_NKW.flatten(0, 1), student_NKD.flatten(0, 1))


def _add_product(total_WD: Tensor, gradient_NW: Tensor, student_ND: Tensor) -> None:
    for rows in slices(len(total_WD), READOUT_ROWS):
        total_WD[rows] += gradient_NW[:, rows].T @ student_ND


def logit_gradients(
    logits_NKW: Tensor, objectives: Callable[[Tensor, slice], Sequence[Tensor]], count: int
) -> Tensor:
    """Return the gradients [O, N, K, W] of O = count objectives by the logits.

    `objectives` is given the logits of some positions, and which, and returns O sums over them. A
    single gradient overwrites the logits. With count 0 the objectives are only computed.
    """
    N, K, W = logits_NKW.shape
    several = count > 1
    gradients = logits_NKW.new_empty(count, N, K, W) if several else logits_NKW[None][:count]
    limit = PIECE_CPU if logits_NKW.device.type == "cpu" else PIECE
    for piece in slices(N, limit // (K * W)):
        with torch.set_grad_enabled(count > 0):
            leaf = logits_NKW[piece].detach().requires_grad_(count > 0)
            sums = objectives(leaf, piece)
        for o in range(count):
            again = o + 1 < count
            (gradients[o, piece],) = torch.autograd.grad(sums[o], leaf, retain_graph=again)
    return gradients
