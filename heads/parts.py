"""The two pieces of the target that heads and losses need: its embedding and its read-out.

They load from a small file without the model, so that training from captured features never has
the target in memory. Shapes: D width, V vocabulary, W draft vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import safe_open, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from headstart.files import atomic_path
from headstart.heads.packing import can_pack, pack_weight, packed_linear


@dataclass
class ReadOut:
    """Logits from post-norm states: the target's rows (all of them, or a draft vocabulary's)."""

    weight_WD: Tensor
    bias_W: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    packed_WD: Tensor | None = None
    """The same weight packed for decoding; training reads weight_WD, which gradients pass."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return logits [.., W] of hidden [.., D]."""
        if self.packed_WD is None or _in_training(hidden, self.weight_WD.dtype):
            return self.post(F.linear(hidden, self.weight_WD, self.bias_W))
        return self.post(packed_linear(hidden, self.packed_WD, self.bias_W))

    def pack(self) -> None:
        """Keep a packed copy of the weight beside it, where the device has use for one."""
        if can_pack(self.weight_WD.device, self.weight_WD.dtype):
            self.packed_WD = pack_weight(self.weight_WD)

    def post(self, logits: Tensor) -> Tensor:
        """Apply the target's logit scale and soft cap."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def to(self, dtype: torch.dtype) -> "ReadOut":
        """Return the read-out in another dtype, not packed; itself if it is in that dtype."""
        if self.weight_WD.dtype == dtype:
            return self
        bias = None if self.bias_W is None else self.bias_W.to(dtype)
        return ReadOut(self.weight_WD.to(dtype), bias, self.scale, self.softcap)

    def rows(self, ids_W: Tensor) -> "ReadOut":
        """Return the read-out of these vocabulary rows only, copied unless they are the first."""
        first = torch.equal(ids_W, torch.arange(len(ids_W), device=ids_W.device))
        weight = self.weight_WD[: len(ids_W)] if first else self.weight_WD[ids_W]
        bias = None if self.bias_W is None else self.bias_W[ids_W]
        rows = ReadOut(weight, bias, self.scale, self.softcap)
        if self.packed_WD is not None:
            rows.pack()
        return rows


@dataclass
class TargetParts:
    """The target's frozen embedding and read-out; heads are passed them and never own them."""

    embedding_VD: Tensor
    embed_scale: float
    readout: ReadOut

    @classmethod
    def of(
        cls, model: PreTrainedModel, embedding_output: Callable[[Tensor], Tensor]
    ) -> "TargetParts":
        """Take the parts out of a model; `embedding_output` gives hidden_states[0] of tokens.

        They are whole, and on the device of the embedding, wherever the model's weights lie.
        Raises ValueError when hidden_states[0] is not a multiple of the embedding rows.
        """
        config = model.config.get_text_config()
        rows_VD = model.get_input_embeddings().weight
        embedding = whole(rows_VD)
        lm_head = model.get_output_embeddings()
        if lm_head is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings: not a causal LM")
        bias = getattr(lm_head, "bias", None)
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)
        softcap = getattr(config, "final_logit_softcapping", None)
        tied = lm_head.weight is rows_VD
        weight_VD = embedding if tied else whole(lm_head.weight).to(embedding.device)
        bias_V = None if bias is None else whole(bias).to(embedding.device)
        readout = ReadOut(weight_VD, bias_V, scale, softcap)
        tokens = torch.arange(min(8, len(embedding)), device=embedding.device)[None]
        embed_scale = _embed_scale(embedding[tokens[0]], embedding_output(tokens)[0])
        return cls(embedding, embed_scale, readout)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return hidden_states[0] [.., D] of token ids [..]."""
        embedded = F.embedding(tokens, self.embedding_VD)
        return embedded if self.embed_scale == 1.0 else embedded * self.embed_scale

    def to(self, dtype: torch.dtype) -> "TargetParts":
        """Return the parts in another dtype."""
        return TargetParts(self.embedding_VD.to(dtype), self.embed_scale, self.readout.to(dtype))

    @property
    def tied(self) -> bool:
        """Whether embedding and read-out are one tensor."""
        return self.embedding_VD.data_ptr() == self.readout.weight_WD.data_ptr()

    @property
    def nbytes(self) -> int:
        """Bytes that the parts take, a tied embedding counted once."""
        held = [self.readout.weight_WD, *([] if self.tied else [self.embedding_VD])]
        return sum(t.nbytes for t in (*held, self.readout.bias_W) if t is not None)

    def save(self, path: Path) -> None:
        """Write the parts to one safetensors file; a tied embedding is stored once."""
        tensors = {"readout": self.readout.weight_WD.contiguous()}
        if not self.tied:
            tensors["embedding"] = self.embedding_VD.contiguous()
        if self.readout.bias_W is not None:
            tensors["bias"] = self.readout.bias_W
        scalars = {
            "embed_scale": repr(self.embed_scale),
            "scale": repr(self.readout.scale),
            "softcap": repr(self.readout.softcap),
        }
        with atomic_path(path) as temporary:
            save_file(tensors, temporary, metadata=scalars)

    @classmethod
    def load(cls, path: Path) -> "TargetParts":
        """Read what `save` wrote; the tensors are memory-mapped."""
        with safe_open(path, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
            scalars = stored.metadata()
        softcap = None if scalars["softcap"] == "None" else float(scalars["softcap"])
        weight = tensors["readout"]
        readout = ReadOut(weight, tensors.get("bias"), float(scalars["scale"]), softcap)
        return cls(tensors.get("embedding", weight), float(scalars["embed_scale"]), readout)


def whole(weight: Tensor) -> Tensor:
    """Return a weight that is split over ranks as one (collective), any other as it is."""
    weight = weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def _in_training(hidden: Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient or a cast is due, of which packed weights know nothing."""
    cast = torch.is_autocast_enabled(hidden.device.type) or hidden.dtype != dtype
    return cast or (hidden.requires_grad and torch.is_grad_enabled())


def _embed_scale(rows: Tensor, seen: Tensor) -> float:
    """Return the factor between embedding rows and hidden_states[0] (1 for most models)."""
    rows, seen = rows.float(), seen.float()
    if torch.equal(rows, seen):
        return 1.0
    scale = ((rows * seen).sum() / (rows * rows).sum()).item()
    error = (rows * scale - seen).abs().max() / seen.abs().max().clamp(min=1e-6)
    if not error < 1e-2:
        raise ValueError(
            "hidden_states[0] is not a multiple of the token embedding (learned positions or an "
            "embedding norm); headstart cannot feed token embeddings to a head of this target"
        )
    return scale
