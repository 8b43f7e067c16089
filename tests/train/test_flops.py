"""FLOPs of training by formula against what torch counts, and the peaks of known devices."""

import pytest
import torch
from models import make_head, some_vocab
from torch.utils.flop_counter import FlopCounterMode
from training import chat_target, token_row

from headstart import cli
from headstart.data.features import make_features
from headstart.train.flops import head_flops, known_peak, peak_of, target_flops

ROWS = [token_row(str(n), list(range(5, 5 + 48)), 1) for n in range(4)]
"""Rows whose every token but the first is supervised."""


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("medusa", {}),
        ("medusa", {"readout": "own"}),
        ("eagle", {}),
        ("eagle3", {"aux": [1], "ttt_steps": 1}),
        ("eagle3", {"aux": [1], "ttt_steps": 3}),
        ("hydra_heads", {}),
    ],
)
def test_the_formula_is_what_torch_counts_of_a_pass_forth_and_back(family, options):
    """Not quite: what reads the target's features sends no gradient there, of deeper labels a row
    has fewer, and attention is left out.
    """
    vocab = some_vocab(64, of=chat_target().shape.vocab_size)
    head = make_head(family, chat_target(), vocab=vocab, **options).train()
    batch = make_features(chat_target(), ROWS, range(4), taps=[1])
    batch.argmax_BT = torch.full_like(batch.argmax_BT, int(vocab.ids_W[5]))  # all in vocabulary
    with FlopCounterMode(display=False) as counter:
        head(batch, chat_target().parts).total(head.denominators(batch)).backward()
    products = counter.get_flop_counts()["Global"]
    counted = sum(n for op, n in products.items() if "attention" not in str(op))
    tokens, supervised = batch.tokens_BT.numel(), int(batch.loss_mask_BT.sum())
    assert head_flops(head).of(tokens, supervised) == pytest.approx(counted, rel=0.3)


def test_the_targets_formula_is_what_torch_counts_of_its_pass():
    with FlopCounterMode(display=False) as counter:
        batch = make_features(chat_target(), ROWS, range(4))
    products = counter.get_flop_counts()["Global"]
    counted = sum(n for op, n in products.items() if "attention" not in str(op))
    tokens, supervised = batch.tokens_BT.numel(), int(batch.loss_mask_BT.sum())
    assert target_flops(chat_target()).of(tokens, supervised) == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA RTX 4000 Ada Generation", None),
        ("NVIDIA T4", None),
    ],
)
def test_a_device_is_known_by_the_name_of_its_chip_or_not_at_all(name, peak):
    assert peak_of(name, "bfloat16") == peak


def test_every_preset_of_the_hardware_group_is_found_by_its_own_name():
    cli.register()
    for option in ("a100", "b200", "h100", "h200", "l40s", "mi300x", "rtx4090"):
        preset = cli.load_config("plan", [f"hardware={option}"]).hardware
        assert peak_of(f"Maker {preset.name}", "bfloat16") == preset.tflops["bfloat16"] * 1e12


def test_a_type_without_a_peak_has_none():
    assert peak_of("NVIDIA B200", "int4") is None


def test_the_peak_of_a_cpu_is_not_known():
    assert known_peak(torch.device("cpu"), "bf16") is None
