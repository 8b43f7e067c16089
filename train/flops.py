"""How much of a device's peak training reaches: FLOPs by a formula over a published peak.

A multiply-add counts two; forth and back three times the pass forth. Only products with weights
are counted, attention's are left out, so the figure is a little low on long rows; and every weight
is counted as one that sends gradients on, so it is a little high for heads of few layers:
head      6 P (T + (S - 1) n)     P weights of its layers, S unrolled steps of n positions after
                                  the first; 6 P n for heads that are not unrolled
read-out  4 K W D n  + 2 W D n    the K depths forth and, to the states, back; the teacher forth
          2 K W D n more          where the head trains a read-out of its own
target    2 A T + 2 V D n         A active weights of its layers, online only
T tokens, n supervised ones, D width, W draft vocabulary, V vocabulary, K depths.
"""

import re
from dataclasses import dataclass
from importlib.resources import files

import torch
import yaml

from headstart.heads.base import DraftHead
from headstart.heads.target import Target
from headstart.train.optimizer import READOUT

PEAK_TYPES = {"bf16": "bfloat16", "fp32": "float32"}
OTHER_BOARDS = r"\b(PCIe|NVL|MIG)\b"
"""Variants of a chip whose peak is not that of the preset."""


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of training, by tokens that pass and tokens that teach."""

    per_token: float
    per_supervised: float

    def of(self, tokens: float, supervised: float) -> float:
        """Return the FLOPs of training on so many tokens, of which some are supervised."""
        return self.per_token * tokens + self.per_supervised * supervised

    def __add__(self, other: "StepFlops") -> "StepFlops":
        """Return the FLOPs of both together."""
        return StepFlops(
            self.per_token + other.per_token, self.per_supervised + other.per_supervised
        )


def head_flops(head: DraftHead) -> StepFlops:
    """Return what a head multiplies in training."""
    named = [(name, p) for name, p in head.named_parameters() if p.ndim >= 2]
    own = any(name.startswith(READOUT) for name, _ in named)
    layers = 6.0 * sum(p.numel() for name, p in named if not name.startswith(READOUT))
    steps = getattr(head.config, "ttt_steps", None)
    depths = steps or head.depths_at_once
    readout = head.num_draft_tokens * head.shape.hidden_size * ((6 if own else 4) * depths + 2)
    if steps is None:
        return StepFlops(0.0, layers + readout)
    return StepFlops(layers, layers * (steps - 1) + readout)


def target_flops(target: Target) -> StepFlops:
    """Return what the target multiplies in a pass forth, read out where it teaches.

    Raises ValueError for an architecture whose weights cannot be told apart.
    """
    from headstart.eval.plan_model import measure_model  # brings the configuration's packages

    readout = target.shape.vocab_size * target.shape.hidden_size
    active = measure_model(target.name, target.model).active_parameters
    return StepFlops(2.0 * (active - readout), 2.0 * readout)


def known_peak(device: torch.device, precision: str) -> float | None:
    """Return the FLOPs a second that a device reaches at most, or None where no preset knows."""
    if device.type != "cuda":
        return None
    return peak_of(torch.cuda.get_device_name(device), PEAK_TYPES[precision])


def peak_of(name: str, dtype: str) -> float | None:
    """Return the peak of a device by the name its driver gives, such as NVIDIA H200.

    The presets of the `hardware` group are looked through for one whose chip is named.
    """
    if re.search(OTHER_BOARDS, name):
        return None
    for path in sorted(files("headstart.conf").joinpath("hardware").iterdir(), key=str):
        preset = yaml.safe_load(path.read_text(encoding="utf-8"))
        chip = re.match(r"(RTX )?\S+", preset.get("name", ""))
        if chip and re.search(rf"\b{chip.group()}\b", name.replace("-", " ")):
            tflops = preset["tflops"].get(dtype)
            return None if tflops is None else tflops * 1e12
    return None
