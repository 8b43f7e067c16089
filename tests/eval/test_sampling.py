"""Processed distributions, hashed uniforms and draws."""

import warnings

import pytest
import torch

from headstart.eval.engine.sampling import (
    ACCEPT,
    DRAFT,
    VERIFY,
    SamplingConfig,
    best_ids,
    draw,
    processed_probs,
    prompt_key,
    sample_without_replacement,
    uniforms,
)

ROWS = 20_000
PROMPTS = torch.arange(ROWS)


def _hashed_uniforms(*extra: torch.Tensor, use: int = VERIFY, position: int = 0) -> torch.Tensor:
    shape = (-1, *[1] * max((tensor.ndim for tensor in extra), default=0))
    return uniforms(0, PROMPTS, torch.full((ROWS,), position).view(shape), use, *extra)


def _chi_square(ids: torch.Tensor, law: torch.Tensor) -> float:
    counts = ids.bincount(minlength=len(law)).double()
    assert (counts[law == 0] == 0).all()
    expected = law.double()[law > 0] * len(ids)
    return float(((counts[law > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -0.5), ("temperature", float("nan")), ("temperature", float("inf"))]
    + [("top_k", -1), ("top_p", 0.0), ("top_p", 1.5), ("seed", -1), ("seed", 2**63)],
)
def test_a_bad_setting_is_an_error_that_names_field_and_value(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^sampling.{field}={value}: need "):
        SamplingConfig(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("top_k", 5), ("top_p", 0.9)])
def test_filters_without_temperature_warn_that_they_do_nothing(field: str, value: float) -> None:
    with pytest.warns(UserWarning, match=f"sampling.{field}={value} has no effect"):
        SamplingConfig(**{field: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SamplingConfig(temperature=1.0, **{field: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_id_is_the_lowest_of_equals_and_none_where_logits_are_not_finite(
    dtype: torch.dtype,
) -> None:
    logits = torch.zeros(4, 40_000, dtype=dtype)
    logits[0, [7, 500, 39_999]] = 1.0
    logits[1, 3], logits[2, 9], logits[3] = torch.nan, torch.inf, -torch.inf
    assert best_ids(logits).tolist() == [7, -1, -1, -1]


def test_temperature_zero_is_one_hot_with_ties_to_the_lowest_id() -> None:
    probs = processed_probs(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]), SamplingConfig())
    assert torch.equal(probs, torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))


def test_exactly_k_tokens_survive_top_k_and_ties_keep_the_lowest_ids() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, 2.0])
    probs = processed_probs(logits, SamplingConfig(temperature=1.0, top_k=3))
    assert (probs > 0).tolist() == [False, True, True, False, True]
    assert probs[1] == probs[2]


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0])
    probs = processed_probs(logits, SamplingConfig(temperature=1.0, top_k=9))
    assert torch.equal(probs, logits.softmax(-1))


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.45, 1), (0.6, 2), (0.8, 3), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p: float, kept: int) -> None:
    law = torch.tensor([0.125, 0.5, 0.125, 0.25])
    probs = processed_probs(law.log(), SamplingConfig(temperature=1.0, top_p=top_p))
    mask = torch.zeros(4).scatter(0, torch.tensor([1, 3, 0, 2])[:kept], 1.0)  # tie: 0 before 2
    assert torch.allclose(probs, law * mask / (law * mask).sum())


def test_filters_apply_in_the_order_of_transformers() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    expected = logits
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(12), TopPLogitsWarper(0.8)):
        expected = warper(None, expected)
    probs = processed_probs(logits, SamplingConfig(temperature=0.7, top_k=12, top_p=0.8))
    assert torch.allclose(probs, expected.softmax(-1))


def test_probs_are_fp32_or_better() -> None:
    config = SamplingConfig(temperature=0.5)
    assert processed_probs(torch.zeros(3, dtype=torch.bfloat16), config).dtype == torch.float32
    assert processed_probs(torch.zeros(3, dtype=torch.float64), config).dtype == torch.float64


def test_uniforms_are_the_published_hash() -> None:
    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    keys = (2**63 - 1, ACCEPT, 2**62 + 12345, 77, 3)
    state = 0
    for key in keys:
        state = mix((state + 0x9E3779B97F4A7C15 + key) % 2**64)
    seed, use, prompt, position, rank = keys
    value = uniforms(
        seed, torch.tensor([prompt]), torch.tensor([position]), use, torch.tensor([rank])
    )
    assert value.dtype == torch.float64
    assert value.item() == (state >> 11) * 2.0**-53


def test_uniforms_do_not_depend_on_neighbours_or_order() -> None:
    prompts, positions = torch.tensor([5, 9, 2]), torch.tensor([[0, 1], [7, 8], [3, 4]])
    together = uniforms(1, prompts, positions, DRAFT)
    order = torch.tensor([2, 0, 1])
    assert torch.equal(uniforms(1, prompts[order], positions[order], DRAFT), together[order])
    for row in range(3):
        alone = uniforms(1, prompts[row : row + 1], positions[row : row + 1], DRAFT)
        assert torch.equal(alone[0], together[row])


def test_extra_keys_widen_the_result() -> None:
    positions_BN = torch.arange(6).view(2, 3)
    wide = uniforms(0, torch.tensor([1, 2]), positions_BN[..., None], ACCEPT, torch.arange(4))
    assert wide.shape == (2, 3, 4)
    assert wide.unique().numel() == 24


def test_uniforms_are_uniform() -> None:
    values = _hashed_uniforms()
    assert 0 <= values.min() < 1e-3
    assert 1 - 1e-3 < values.max() < 1
    counts = (values * 100).long().bincount(minlength=100).double()
    assert ((counts - ROWS / 100) ** 2 / (ROWS / 100)).sum() < 180  # 99 dof, p about 1e-6


@pytest.mark.parametrize(
    "other",
    [
        lambda: _hashed_uniforms(position=1),
        lambda: _hashed_uniforms(use=DRAFT),
        lambda: _hashed_uniforms().roll(1),
        lambda: uniforms(1, PROMPTS, torch.zeros_like(PROMPTS), VERIFY),
        lambda: _hashed_uniforms(torch.tensor([0]))[:, 0],
    ],
    ids=["position", "use", "prompt", "seed", "extra"],
)
def test_uniforms_of_neighbouring_keys_are_independent(other) -> None:
    pair = (_hashed_uniforms() * 8).long() * 8 + (other() * 8).long()
    assert _chi_square(pair, torch.full((64,), 1 / 64)) < 131  # 63 dof, p about 1e-6


def test_prompt_keys_are_stable_and_fit_int64() -> None:
    assert prompt_key("writing/0001") == prompt_key("writing/0001")
    assert prompt_key("") == 0xE4A6A0577479B2B4 >> 1
    assert all(0 <= prompt_key(str(i)) < 2**63 for i in range(100))


def test_draw_inverts_the_cdf() -> None:
    law = torch.tensor([0.25, 0.0, 0.5, 0.25])
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999], dtype=torch.float64)
    assert draw(law.expand(6, -1), uniform).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_draw_never_returns_a_token_of_probability_zero(uniform: float) -> None:
    generator = torch.Generator().manual_seed(0)
    law = torch.rand(2000, 9, generator=generator) * 7
    law[:, [0, 1, 4, 8]] = 0
    ids = draw(law, torch.full((2000,), uniform, dtype=torch.float64))
    assert ids.unique().tolist() == [2 if uniform == 0 else 7]


def test_draw_gives_no_token_where_there_is_no_mass() -> None:
    law = torch.tensor([[0.0, 0.0], [torch.nan, torch.nan], [0.0, 1.0]])
    assert draw(law, torch.full((3,), 0.5, dtype=torch.float64)).tolist() == [-1, -1, 1]


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_draws_have_the_law(temperature: float) -> None:
    logits = torch.tensor([2.0, 6.0, 6.0, 1.0]).log()
    law = processed_probs(logits, SamplingConfig(temperature=temperature))
    assert _chi_square(draw(law.expand(ROWS, -1), _hashed_uniforms()), law) < 31


def test_sampling_without_replacement_has_the_law_of_drawing_one_by_one() -> None:
    law = torch.tensor([0.5, 0.3, 0.0, 0.2])
    noise = _hashed_uniforms(torch.arange(4), use=DRAFT)
    ids = sample_without_replacement(law.expand(ROWS, -1), noise, 2)
    pair_law = law[:, None] * law / (1 - law)[:, None]
    pair_law.fill_diagonal_(0)
    assert _chi_square(ids[:, 0] * 4 + ids[:, 1], pair_law.flatten()) < 37  # 5 dof, p about 1e-6


def test_sampling_stops_where_support_runs_out() -> None:
    law = torch.tensor([0.0, 0.7, 0.0, 0.3])
    ids = sample_without_replacement(law, torch.tensor([0.0, 0.5, 0.9, 0.5]).double(), 4)
    assert ids.tolist() == [1, 3, -1, -1]


def test_sampling_survives_a_uniform_of_zero() -> None:
    ids = sample_without_replacement(torch.tensor([0.5, 0.0, 0.5]), torch.zeros(3).double(), 3)
    assert ids[:2].sort().values.tolist() == [0, 2]
    assert ids[2] == -1
