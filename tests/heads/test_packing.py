"""Packed weights: the same numbers, in training and in decoding, and left alone where they must."""

import copy
from pathlib import Path

import pytest
import torch
from fixtures_chat import chat_tokenizer
from models import make_head, seeded, target_of, tiny_model
from torch import nn

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import TreeShape
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.packing import PackedLinear, can_pack, dense_weight, pack_linears
from headstart.heads.target import Target

pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.float32), reason="this torch has no oneDNN"
)


def _states(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _dtypes() -> list[torch.dtype]:
    return [d for d in (torch.float32, torch.bfloat16) if can_pack(torch.device("cpu"), d)]


@pytest.mark.parametrize("dtype", _dtypes())
@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 5, 24), (0, 24), (2, 0, 24)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_gives_what_the_layer_gives(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    linear = seeded(0, lambda: nn.Linear(24, 40, bias=bias)).to(dtype).requires_grad_(False)
    hidden = _states(*shape).to(dtype)
    have, want = PackedLinear(linear)(hidden), linear(hidden)
    assert have.shape == want.shape
    assert have.dtype == dtype
    torch.testing.assert_close(have, want, rtol=0, atol=0 if dtype == torch.bfloat16 else 1e-6)


def test_strided_input_is_read_as_it_stands() -> None:
    linear, hidden = nn.Linear(24, 8).requires_grad_(False), _states(24, 6)
    packed = PackedLinear(linear)
    torch.testing.assert_close(packed(hidden.t()), linear(hidden.t()), rtol=0, atol=1e-6)


def test_fp64_fp16_and_other_devices_are_not_packed() -> None:
    assert not can_pack(torch.device("cpu"), torch.float64)
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(torch.device("meta"), torch.float32)
    module = nn.Sequential(nn.Linear(4, 4, dtype=torch.float64))
    pack_linears(module)
    assert type(module[0]) is nn.Linear


def test_layers_of_a_derived_class_keep_their_own_forward() -> None:
    class Doubling(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden)

    module = nn.Sequential(Doubling(4, 4), nn.Sequential(nn.Linear(4, 4)))
    pack_linears(module)
    assert type(module[0]) is Doubling
    assert type(module[1][0]) is PackedLinear


def _pair() -> tuple[Target, Target]:
    model = tiny_model()
    packed = target_of(copy.deepcopy(model))
    packed.pack()
    return target_of(model), packed


def test_a_packed_target_has_the_same_states_logits_and_fingerprint() -> None:
    plain, packed = _pair()
    tokens = torch.arange(20)[None]
    have, want = packed.forward(tokens).hidden_BTD, plain.forward(tokens).hidden_BTD
    torch.testing.assert_close(have, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed.readout(have), plain.readout(want), rtol=0, atol=1e-5)
    assert packed.fingerprint == plain.fingerprint
    assert any(isinstance(m, PackedLinear) for m in packed.decoder.modules())


@pytest.mark.parametrize("family", ["medusa", "eagle", "eagle3", "hydra_heads"])
def test_heads_on_a_packed_target_are_packed_and_leave_greedy_text_alone(family: str) -> None:
    plain, packed = _pair()
    options = {"aux": [1, 2, 3]} if family == "eagle3" else {}
    head = make_head(family, plain, **options)
    packed.adopt(head)
    assert any(isinstance(m, PackedLinear) for m in head.modules())
    drafter = HeadDrafter(head, packed.parts, TreeShape.chain(2), sampling=SamplingConfig())
    request = Request("p", (1, 2, 3), 12)
    texts = []
    for target, drafts in ((plain, NoDrafter()), (packed, NoDrafter()), (packed, drafter)):
        done = decode(target, drafts, [request], sampling=SamplingConfig(), stop_ids=[])
        texts.append([c.token_ids for c in done])
    assert len(texts[0][0]) == 12
    assert texts[0] == texts[1] == texts[2]


def test_a_head_on_a_target_left_alone_is_left_alone() -> None:
    plain, _ = _pair()
    head = make_head("eagle", plain)
    plain.adopt(head)
    assert not any(isinstance(m, PackedLinear) for m in head.modules())


@pytest.mark.parametrize("pack", [True, False])
def test_a_target_is_loaded_packed_unless_told_otherwise(pack: bool, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    options = {} if pack else {"pack": False}
    target = load_target(TargetConfig(str(tmp_path), dtype="float32", device="cpu", **options))
    assert any(isinstance(m, PackedLinear) for m in target.decoder.modules()) == pack


def test_gradients_and_autocast_pass_by_the_packed_copy() -> None:
    _, packed = _pair()
    readout = packed.parts.readout
    hidden = _states(3, packed.shape.hidden_size).requires_grad_()
    readout(hidden).sum().backward()
    torch.testing.assert_close(hidden.grad, readout.weight_WD.sum(0).expand_as(hidden))
    with torch.autocast("cpu", torch.bfloat16):
        assert readout(hidden.detach()).dtype == torch.bfloat16


def test_a_draft_vocabulary_of_a_packed_read_out_is_packed_too() -> None:
    plain, packed = _pair()
    ids = torch.tensor([1, 5, 9])
    rows = packed.parts.readout.rows(ids)
    assert rows.packed_WD is not None
    assert plain.parts.readout.rows(ids).packed_WD is None
    hidden = _states(2, packed.shape.hidden_size)
    torch.testing.assert_close(rows(hidden), plain.readout(hidden)[:, ids], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", _dtypes())
def test_a_packed_weight_comes_back_as_it_was(dtype: torch.dtype) -> None:
    linear = nn.Linear(24, 40, bias=False).to(dtype)
    assert torch.equal(dense_weight(PackedLinear(linear)), linear.weight)
    assert dense_weight(linear) is linear.weight
