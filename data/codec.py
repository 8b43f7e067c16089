"""The types that states are stored in: what the target computed, or less room for a known error.

fp8 (e4m3, one fp32 scale a position) is for tapped states only: they are what a head reads, and it
learns around 3 % of noise. The last state is the teacher, whose logits are rebuilt from it, and it
stays in 16 bits.
Shapes: N tokens, D width.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
KINDS = ("target", *PLAIN, "fp8")
LAST = "hidden"  # the post-norm last state; tapped states are hidden_1, hidden_2, ...


def aux_name(s: int) -> str:
    """Return the name under which hidden_states[s] is stored."""
    return f"{LAST}_{s}"


def is_state(name: str) -> bool:
    """Whether a stored tensor holds states, and not their scales, tokens or statistics."""
    return name.startswith(LAST) and not name.endswith(".scale")


@dataclass(frozen=True)
class Codec:
    """Stores states of a target that computes in `computed`, as `kind` says, and reads them back.

    Raises ValueError for a kind that does not exist.
    """

    kind: str
    computed: torch.dtype

    @classmethod
    def of(cls, kind: str, computed: torch.dtype) -> "Codec":
        """Return the codec of an option dtype=KIND; `target` means the type the target runs in."""
        if kind not in KINDS:
            raise ValueError(f"dtype={kind}: expected one of {', '.join(KINDS)}")
        own = next((name for name, dtype in PLAIN.items() if dtype == computed), None)
        if own is None:
            raise ValueError(f"a target in {computed} cannot be stored; use target.dtype=float32")
        return cls(own if kind == "target" else kind, computed)

    def stored(self, name: str) -> torch.dtype:
        """Return the type in which a state is stored."""
        if self.kind != "fp8":
            return PLAIN[self.kind]
        if name != LAST:
            return FP8
        return torch.bfloat16 if self.computed == torch.float32 else self.computed

    def encode(self, name: str, states_ND: Tensor) -> dict[str, Tensor]:
        """Return what is stored for states that `unstorable` passed: a tensor, and its scales."""
        if self.stored(name) != FP8:
            return {name: states_ND.to(self.stored(name))}
        wide_ND = states_ND.float()
        scale_N = wide_ND.abs().amax(-1) / FP8_MAX
        scale_N = torch.where(scale_N > 0, scale_N, 1.0)
        return {name: (wide_ND / scale_N[:, None]).to(FP8), _scale(name): scale_N}

    def decode(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        """Return states [N, D] in the type the target computes in."""
        if self.stored(name) != FP8:
            return stored[name].to(self.computed)
        wide_ND = stored[name].float() * stored[_scale(name)][:, None]
        return wide_ND.to(self.computed)

    def columns(self, name: str) -> tuple[str, ...]:
        """Return the names of the stored tensors that hold a state."""
        return (name,) if self.stored(name) != FP8 else (name, _scale(name))

    def bytes_per_token(self, name: str, width: int) -> int:
        """Return the bytes that a state of one token takes."""
        stored = self.stored(name)
        return width * stored.itemsize + (4 if stored == FP8 else 0)


def unstorable(states_ND: Tensor, stored: torch.dtype) -> tuple[int, str] | None:
    """Return the first token whose state a type cannot hold, and why; None when all is well."""
    limit = torch.finfo(torch.float32 if stored == FP8 else stored).max
    if states_ND.numel() == 0:
        return None
    low, high = states_ND.aminmax()  # one pass; not a number if any is not
    if bool(low >= -limit) and bool(high <= limit):
        return None
    wide_ND = states_ND.double()
    bad_ND = ~(wide_ND.abs() <= limit)
    token, place = (int(i) for i in bad_ND.nonzero()[0])
    value = wide_ND[token, place].item()
    if not states_ND[token, place].isfinite():
        return token, f"{value} is not finite; use another target.dtype"
    kind = next(name for name, dtype in PLAIN.items() if dtype == stored)
    return token, f"{value} is beyond {limit:.5g}, the largest {kind}; use dtype=bf16 or fp32"


def _scale(name: str) -> str:
    return f"{name}.scale"
