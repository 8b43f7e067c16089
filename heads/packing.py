"""Weights laid out once for the CPU's matrix kernels (oneDNN) instead of anew in every call.

A product over one to sixteen tokens is bound by reading the weight. Packed, it is read once and in
order, and eight tokens cost hardly more than one, which is what verification lives on (`make bench`
measures it). The values are the same numbers: bf16 results are equal bit for bit, fp32 sums may be
taken in another order.
"""

import torch
from torch import Tensor, nn


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch and this processor have the kernels for packed weights of a dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def pack_weight(weight_WD: Tensor) -> Tensor:
    """Return a weight in the kernels' own layout, which only `packed_linear` can read."""
    return torch.ops.mkldnn._reorder_linear_weight(weight_WD.detach().contiguous(), None)


def packed_linear(hidden: Tensor, packed_WD: Tensor, bias_W: Tensor | None = None) -> Tensor:
    """Return hidden [.., D] times a packed weight [W, D]; no gradient."""
    if not packed_WD.is_mkldnn:  # a stand-in, while a compiler traces
        return torch.ops.headstart.packed_linear(hidden, packed_WD, bias_W)
    return _product(hidden, packed_WD, bias_W)


def _product(hidden: Tensor, packed_WD: Tensor, bias_W: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden, packed_WD, bias_W, "none", [], "")


# An operator of our own, because the compiler takes packed weights of the kernels' operator for
# constants, and layers that share a graph are given theirs.
LIBRARY = torch.library.Library("headstart", "DEF")
LIBRARY.define("packed_linear(Tensor hidden, Tensor weight, Tensor? bias) -> Tensor")
for _key in ("CPU", "MkldnnCPU"):
    LIBRARY.impl("packed_linear", _product, _key)


@torch.library.register_fake("headstart::packed_linear", lib=LIBRARY)
def _shape_of_product(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden.new_empty(*hidden.shape[:-1], weight.shape[0])


class PackedLinear(nn.Module):
    """A frozen linear layer that owns its weight in packed form only."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.register_buffer("weight", pack_weight(linear.weight), persistent=False)
        self.bias = linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the layer's output [.., out_features]."""
        return packed_linear(hidden, self.weight, self.bias)


def dense_weight(linear: nn.Linear | PackedLinear) -> Tensor:
    """Return the weight [W, D] of a linear layer in the ordinary layout."""
    return linear.weight.to_dense() if linear.weight.is_mkldnn else linear.weight


def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers below a frozen module, one by one; where it cannot, do nothing.

    Layers of a class derived from nn.Linear keep their own ways.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and can_pack(child.weight.device, child.weight.dtype):
                setattr(parent, name, PackedLinear(child))
