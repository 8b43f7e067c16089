"""Processed distributions and reproducible draws: everything random in decoding starts here.

Randomness is a hash of (seed, prompt, absolute position, use), never the state of a generator, so a
prompt's tokens depend neither on its neighbours in the batch nor on the order of the work.
Shapes: B rows, V target vocabulary; `...` stands for any leading dimensions.
"""

import hashlib
import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

VERIFY = 0
"""Use of the one uniform that draws the emitted token of an absolute position."""
DRAFT = 1
"""Use of the noise that draws children; extra keys: token id (and child rank)."""
ACCEPT = 2
"""Use of the uniforms that accept or reject a child; extra key: its place in the try order."""

# Constants of splitmix64 (Steele, Lea and Flood, 2014), as signed 64-bit numbers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


@dataclass
class SamplingConfig:
    """How the target's tokens are chosen; plain and drafted decoding share one."""

    temperature: float = 0.0
    """Divisor of the logits; 0 takes the argmax, ties to the lowest id."""
    top_k: int = 0
    """Number of most likely tokens kept; 0 keeps all."""
    top_p: float = 1.0
    """Smallest probability mass kept, most likely tokens first, after top_k; 1 keeps all."""
    seed: int = 0
    """Seed of every draw, of the drafts' too."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"sampling.temperature={self.temperature}: need a finite number >= 0; 0 is greedy"
            )
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k={self.top_k}: need 0 (off) or a number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p={self.top_p}: need a mass in (0, 1]; 1 is off")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"sampling.seed={self.seed}: need an integer in [0, 2**63)")
        if self.temperature == 0:
            self._warn_unused()

    def _warn_unused(self) -> None:
        for name, unused in (("top_k", self.top_k > 0), ("top_p", self.top_p < 1)):
            if unused:
                warnings.warn(
                    f"sampling.{name}={getattr(self, name)} has no effect with "
                    "sampling.temperature=0; raise the temperature or drop it",
                    stacklevel=4,
                )


def best_ids(logits: Tensor) -> Tensor:
    """Return the ids of the largest logits [...], ties to the lowest id; -1 where not finite.

    Not argmax, which takes four times as long over bf16 on a CPU.
    """
    values, ids = logits.max(-1)
    return ids.masked_fill(~values.isfinite(), -1)


def processed_probs(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Return the distribution a token is drawn from, [..., V], fp32 (fp64 stays fp64).

    Temperature, then top-k, then top-p on what top-k left, the order of transformers; ties at the
    edge of either keep the lowest ids, so exactly top_k tokens survive. Temperature 0 is one-hot.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if config.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits).scatter_(-1, best, 1.0)
    logits = logits / config.temperature
    if 0 < config.top_k < logits.shape[-1]:
        logits = logits.masked_fill(~_in_top_k(logits, config.top_k), -torch.inf)
    if config.top_p < 1:
        logits = logits.masked_fill(~_in_top_p(logits, config.top_p), -torch.inf)
    return logits.softmax(-1)


def _in_top_k(logits: Tensor, k: int) -> Tensor:
    edge = logits.topk(k).values[..., -1:]
    above, tied = logits > edge, logits == edge
    room = k - above.sum(-1, keepdim=True)
    return above | (tied & (tied.cumsum(-1) <= room))


def _in_top_p(logits: Tensor, mass: float) -> Tensor:
    values, order = logits.sort(dim=-1, descending=True, stable=True)
    probs = values.softmax(-1).double()
    mass_before = probs.cumsum(-1) - probs  # exactly 0 for the first, which therefore stays
    return torch.empty_like(order, dtype=torch.bool).scatter_(-1, order, mass_before < mass)


def prompt_key(prompt_id: str) -> int:
    """Return the 63-bit key that stands for a prompt in `uniforms`; the same on every machine."""
    digest = hashlib.blake2b(prompt_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def uniforms(
    seed: int, prompt_ids_B: Tensor, positions: Tensor, use: int, *extra: Tensor
) -> Tensor:
    """Return fp64 numbers in [0, 1), one for each (seed, prompt, position, use, extra keys).

    prompt_ids_B are int64 keys, positions int64 [B, ...]. Extra keys are int64 tensors that
    broadcast against positions and widen the result: noise for each token of each node is
    `uniforms(seed, prompt_ids_B, positions_BN[..., None], DRAFT, torch.arange(V))`.
    """
    prompts = prompt_ids_B.reshape(-1, *[1] * (positions.ndim - 1))
    state = torch.zeros_like(prompts)
    for key in (seed, use, prompts, positions, *extra):
        state = _mix(state + _STEP + key)
    return ((state >> 11) & (2**53 - 1)).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 one to one (splitmix64's finaliser; products wrap around)."""
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)  # torch's shift copies the sign; clear the copies


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return one token id a row by inverse CDF in fp64; never one of probability 0.

    probs [..., V] need not sum to 1; uniform [...] lies in [0, 1). A row without mass (all zero, or
    NaN logits) gives -1, which no vocabulary holds.
    """
    # A parallel scan may round neighbours apart, so tokens of probability 0 are left out by name.
    cdf = probs.double().cumsum(-1).masked_fill(probs <= 0, 0.0)
    # uniform <= 1 - 2**-53, so its product with the total rounds below it and some token passes.
    passed = cdf > (uniform * cdf.amax(-1))[..., None]
    return passed.byte().argmax(-1).masked_fill(~passed.any(-1), -1)


def sample_without_replacement(probs: Tensor, uniform: Tensor, k: int) -> Tensor:
    """Return k distinct ids a row, [..., k], in sampling order; -1 where support has run out.

    probs and uniform are [..., V], uniform with the token id as its extra key. The order of
    log p + Gumbel noise is that of drawing one by one and renormalising (arXiv 1903.06059).
    """
    waiting = -torch.log1p(-uniform)  # exponential; the token first to arrive is drawn first
    scores = (probs.double().log() - waiting.log()).masked_fill(probs <= 0, -torch.inf)
    ids = scores.topk(k, dim=-1).indices
    return ids.masked_fill(probs.gather(-1, ids) <= 0, -1)
