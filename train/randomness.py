"""The random generators of a rank, as named tensors: taken, put back, or derived anew.

A run that goes on draws what it would have drawn: the loop's own generator (noise on features) and
the global ones of python, numpy and torch, which a library might ask.
"""

import random

import numpy as np
import torch
from torch import Tensor


def random_state(generator: torch.Generator) -> dict[str, Tensor]:
    """Return the states of all generators of this process, on the CPU."""
    _, words, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state()
    assert name == "MT19937"
    state = {
        "python": torch.tensor(words),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), place, has_gauss]),
        "numpy_gauss": torch.tensor([cached], dtype=torch.float64),
        "torch": torch.get_rng_state(),
        "loop": generator.get_state(),
    }
    if generator.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(generator.device)
    return {name: tensor.clone() for name, tensor in state.items()}


def restore_random(state: dict[str, Tensor], generator: torch.Generator) -> None:
    """Put back what `random_state` returned on a device of the same type."""
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *keys, place, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    generator.set_state(state["loop"])
    if generator.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], generator.device)


def derive_random(seed: int, step: int, rank: int, generator: torch.Generator) -> None:
    """Seed all generators by (seed, step, rank): for ranks that no earlier state belongs to."""
    words = np.random.SeedSequence([seed, step, rank]).generate_state(4).tolist()
    random.seed(words[0])
    np.random.seed(words[1])
    torch.manual_seed(words[2])  # of all devices
    generator.manual_seed(words[3])
