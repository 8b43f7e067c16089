"""States in fewer bits: what is kept, what is refused, and what it does to the teacher."""

import pytest
import torch
from models import target_of, tiny_model
from torch import Tensor
from training import CHAT_VOCAB, chat_target, random_rows

from headstart.data.capture import capture
from headstart.data.codec import FP8, LAST, Codec, aux_name, is_state, unstorable
from headstart.data.features import make_features
from headstart.data.rows import RowsMeta
from headstart.data.store import FeatureStore

META = RowsMeta("", "t", {})


def states(*, large: float = 1.0) -> Tensor:
    made = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    made[:, 3] *= large
    return made


def through(kind: str, states_ND: Tensor, name: str = "hidden_1") -> Tensor:
    codec = Codec.of(kind, states_ND.dtype)
    return codec.decode(name, codec.encode(name, states_ND))


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("target", 0), ("fp32", 0), ("fp16", 2**-11), ("bf16", 2**-8), ("fp8", 0.0625)],
)
def test_a_state_comes_back_within_the_rounding_of_its_type(kind, limit):
    states_ND = states()
    error_ND = (through(kind, states_ND) - states_ND).abs()
    # fp8 has subnormals below 2^-6 of its scale, which is the position's largest number over 448.
    floor = 2**-10 / 448 * states_ND.abs().amax() if kind == "fp8" else 0
    assert bool((error_ND <= limit * states_ND.abs() + floor).all())


def test_each_position_has_its_own_scale_in_fp8():
    states_ND = states()
    states_ND[4] *= 1000  # as the first token's often is
    error_N = (through("fp8", states_ND) - states_ND).norm(dim=-1) / states_ND.norm(dim=-1)
    assert error_N.max() < 0.04


def test_zeros_stay_zeros_in_fp8():
    assert torch.equal(through("fp8", torch.zeros(2, 4)), torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_come_back_in_the_type_the_target_computes_in(dtype):
    for kind in ("target", "fp32", "bf16", "fp16", "fp8"):
        for name in (LAST, aux_name(2)):
            assert through(kind, states().to(dtype), name).dtype == dtype


def test_the_teachers_state_keeps_sixteen_bits_in_a_store_of_fp8():
    for computed, stored in (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ):
        codec = Codec.of("fp8", computed)
        assert codec.stored(LAST) == stored
        assert codec.stored("hidden_2") == FP8


def test_a_type_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="dtype=int4: expected one of target, fp32, bf16"):
        Codec.of("int4", torch.float32)


def test_scales_are_no_states():
    assert [is_state(n) for n in ("hidden", "hidden_2", "hidden_2.scale", "tokens")] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_cannot_be_stored_in_any_type(value):
    states_ND = states()
    states_ND[7, 2] = value
    for stored in (torch.float32, torch.bfloat16, torch.float16, FP8):
        assert unstorable(states(), stored) is None
        token, why = unstorable(states_ND, stored)
        assert token == 7
        assert why == f"{value} is not finite; use another target.dtype"


@pytest.mark.parametrize("value", [70000.0, -70000.0])
def test_p17_70000_cannot_be_stored_in_fp16(value):
    states_ND = states()
    states_ND[5, 1] = value
    assert unstorable(states_ND, torch.bfloat16) is None
    assert unstorable(states_ND, FP8) is None
    token, why = unstorable(states_ND, torch.float16)
    assert token == 5
    assert why == f"{value} is beyond 65504, the largest fp16; use dtype=bf16 or fp32"


def test_the_teachers_statistics_are_those_of_the_state_that_is_read(tmp_path):
    """Else the law exp(logit - logsumexp) would not sum to one."""
    rows = random_rows(6)
    capture(chat_target(), rows, tmp_path, meta=META, dtype="bf16")
    store = FeatureStore(tmp_path)
    batch = store.batch(range(6))
    logsumexp_BT = store.parts.readout(batch.hidden_BTD).logsumexp(-1)
    taught_BT = batch.argmax_BT >= 0
    assert taught_BT.any()
    torch.testing.assert_close(
        batch.logsumexp_BT[taught_BT], logsumexp_BT[taught_BT], rtol=0, atol=2e-6
    )


def test_a_store_of_fp8_holds_what_a_head_reads_within_a_few_percent(tmp_path):
    target = target_of(tiny_model(layers=4, vocab=CHAT_VOCAB), chat_target().tokenizer)
    rows = random_rows(6)
    capture(target, rows, tmp_path, meta=META, taps=[1, 3], dtype="fp8")
    store = FeatureStore(tmp_path, taps=[1, 3])
    for index, row in enumerate(rows):
        have, want = store.batch([index]), make_features(target, [row], [0], [1, 3])
        for s in (1, 3):
            error = (have.aux[s] - want.aux[s]).norm() / want.aux[s].norm()
            assert error < 0.04
        assert (have.hidden_BTD - want.hidden_BTD).norm() / want.hidden_BTD.norm() < 0.004


def test_fp8_without_tapped_states_is_told_to_have_no_effect(tmp_path):
    with pytest.warns(UserWarning, match="dtype=fp8 has no effect without aux"):
        capture(chat_target(), random_rows(2), tmp_path, meta=META, dtype="fp8")
