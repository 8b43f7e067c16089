"""Activations computed again in the backward pass: the same gradients, and less that is kept."""

import pytest
import torch
from models import make_head, target_of, tiny_model
from training import CHAT_VOCAB, chat_target, random_rows

from headstart.data.features import make_features
from headstart.heads.base import DraftHead, FeatureBatch

TARGET = target_of(tiny_model(layers=3, vocab=CHAT_VOCAB))
HEADS = {
    "eagle": {"feature_noise": 0.0},
    "eagle, two layers unrolled": {"feature_noise": 0.0, "num_layers": 2, "ttt_steps": 3},
    "eagle3": {"aux": [1, 2], "ttt_steps": 3},
    "eagle3, two layers": {"aux": [1], "num_layers": 2},
    "hydra_heads": {"arch": "prefix-mlp"},
}


def batch() -> FeatureBatch:
    return make_features(TARGET, random_rows(3, longest=40), range(3), taps=[1, 2])


def gradients(
    name: str, *, recompute: bool, precision: torch.dtype = torch.float32
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of a pass, and the elements of all tensors kept for the backward."""
    head: DraftHead = make_head(name.split(",")[0], TARGET, **HEADS[name]).train()
    if recompute:
        head.recompute_activations()
    kept = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    rows = batch()
    denominators = head.denominators(rows)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        with torch.autocast("cpu", precision, enabled=precision == torch.bfloat16):
            sums = head(rows, TARGET.parts, None, denominators)
        loss = sums.total(denominators)
    loss.backward()
    return {name: weight.grad for name, weight in head.named_parameters()}, kept


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HEADS)
def test_gradients_are_those_of_kept_activations_bit_for_bit(name, precision):
    want, _ = gradients(name, recompute=False, precision=precision)
    have, _ = gradients(name, recompute=True, precision=precision)
    assert any(value.abs().sum() > 0 for value in want.values())
    for weight, value in want.items():
        assert torch.equal(have[weight], value), weight


@pytest.mark.parametrize("name", HEADS)
def test_less_is_kept_for_the_backward_pass(name):
    _, whole = gradients(name, recompute=False)
    _, less = gradients(name, recompute=True)
    assert less < 0.7 * whole


@pytest.mark.parametrize(("family", "options"), [("medusa", {}), ("hydra_heads", {"arch": "mlp"})])
def test_a_head_without_a_decoder_layer_says_so(family, options):
    head = make_head(family, chat_target(), **options)
    with pytest.raises(ValueError, match=r"train\.activation_checkpointing=true: .* no decoder"):
        head.recompute_activations()
