"""Bootstrap intervals: pairing, probabilities and limits."""

import time
from collections import Counter

import numpy as np
import pytest
from traces import bench, chain_round, completion, t2

from headstart.eval.intervals import bootstrap, bootstrap_difference, resampled
from headstart.eval.metrics import FIGURES, PromptSums, figures, prompt_sums

TAU, SPEED = "tau_with_bonus_micro", "speedup_ratio_of_sums_decode"


def t2_sums() -> list[PromptSums]:
    return [prompt_sums(c, None) for c in t2()]


def uneven(prompts: int) -> list[PromptSums]:
    rounds = [[chain_round(i % 4, 4), chain_round(i % 3, 4)] for i in range(prompts)]
    return [prompt_sums(completion(f"p{i}", made), None) for i, made in enumerate(rounds)]


def test_two_prompts_give_three_values_with_probabilities_quarter_half_quarter():
    values = resampled(t2_sums(), [TAU], resamples=10_000)[TAU]
    counts = Counter(round(float(v), 4) for v in values)
    assert set(counts) == {2.6667, 2.5, 2.0}
    # Four standard deviations of a binomial share at 10,000 draws.
    assert counts[2.6667] / 10_000 == pytest.approx(0.25, abs=0.018)
    assert counts[2.5] / 10_000 == pytest.approx(0.5, abs=0.02)


def test_interval_covers_the_two_extremes_of_two_prompts():
    assert bootstrap(t2_sums(), [TAU])[TAU] == pytest.approx([2.0, 8 / 3])


def test_same_seed_same_interval_and_other_seed_other_draws():
    one, again, other = (resampled(uneven(30), [TAU], seed=s)[TAU] for s in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other)


def test_resamples_centre_on_the_figure_and_keep_its_depths():
    values = resampled(uneven(30), list(FIGURES), resamples=2_000)
    point = figures(uneven(30))
    assert values[TAU].mean() == pytest.approx(point[TAU], abs=0.02)
    assert values["alpha_cond"].shape == (2_000, 4)


def test_both_arms_are_drawn_together():
    # Every prompt is exactly 1.5x as fast, whatever its length: pairing leaves no spread at all.
    sums = [s for i in range(1, 6) for s in bench(2, 4, seconds=0.2, prompts=1, rounds=5 * i)[0]]
    assert bootstrap(sums, [SPEED])[SPEED] == pytest.approx([1.5, 1.5])


def test_interval_by_depth_is_null_where_nobody_tried():
    sums = [prompt_sums(completion("a", [chain_round(0, 2)]), None)]
    assert bootstrap(sums, ["alpha_cond"], resamples=2_000)["alpha_cond"] == [[0, 0], None]


def test_speed_interval_is_null_without_a_plain_arm():
    assert bootstrap(t2_sums(), [SPEED], resamples=2_000)[SPEED] is None


def test_difference_of_a_head_with_itself_is_exactly_zero():
    difference = bootstrap_difference(uneven(30), uneven(30), [TAU, "alpha_prefix"])
    assert difference[TAU] == [0, 0]
    assert difference["alpha_prefix"] == [[0, 0]] * 4


def test_difference_needs_the_same_prompts():
    with pytest.raises(ValueError, match="'p0' of a stands beside 'p1' of b"):
        bootstrap_difference(uneven(30), uneven(30)[1:], [TAU])


def test_difference_needs_as_many_prompts():
    with pytest.raises(ValueError, match="a has 30 prompts, b has 29"):
        bootstrap_difference(uneven(30), uneven(29), [TAU])


def test_too_few_resamples_are_refused():
    with pytest.raises(ValueError, match="resamples=100"):
        bootstrap(t2_sums(), [TAU], resamples=100)


def test_ten_thousand_resamples_of_a_hundred_prompts_take_under_two_seconds():
    sums = bench(2, 4, seconds=0.2, prompts=100)[0]
    started = time.process_time()
    bootstrap(sums, list(FIGURES))
    assert time.process_time() - started < 2
