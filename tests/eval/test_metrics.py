"""The traces T1-T6 and the definitions of the figures; no model runs here."""

import math

import pytest
from traces import bench, chain_round, completion, t1, t2, timed

from headstart.eval.engine.records import Completion, Round
from headstart.eval.metrics import (
    DEFINITIONS,
    figures,
    figures_by_category,
    prompt_sums,
)


def figures_of(*completions: Completion) -> dict:
    return figures([prompt_sums(c, None) for c in completions])


def timed_figures(*arms: tuple[Completion, Completion]) -> dict:
    return figures([prompt_sums(drafted, plain) for drafted, plain in arms])


def test_t1_gives_every_figure_of_a_chain_by_hand():
    f = figures_of(t1())
    assert f["tau_with_bonus_micro"] == pytest.approx(8 / 3)
    assert f["mean_accepted_draft"] == pytest.approx(5 / 3)
    assert f["alpha_prefix"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 0])
    assert f["alpha_cond"] == pytest.approx([2 / 3, 1, 1 / 2, 0])
    assert f["draft_token_acceptance"] == pytest.approx(5 / 12)
    assert f["verify_efficiency"] == pytest.approx(8 / 15)
    assert f["accept_histogram"] == [1, 0, 1, 1, 0]


def test_p52_bonus_counts_and_prefill_is_no_round():
    f = figures_of(t1())
    assert sum(r.emitted for r in t1().rounds) == 8
    assert f["tau_with_bonus_micro"] == pytest.approx(2.667, abs=5e-4)
    assert f["mean_accepted_draft"] == pytest.approx(1.667, abs=5e-4)


def test_p52_pooled_tau_and_mean_over_prompts_are_two_figures():
    a = completion("a", [chain_round(4, 4)])
    b = completion("b", [chain_round(0, 4) for _ in range(9)])
    f = figures_of(a, b)
    assert f["tau_with_bonus_micro"] == pytest.approx(1.4)
    assert f["tau_with_bonus_macro"] == pytest.approx(3.0)


def test_p52_every_figure_has_a_definition():
    assert set(figures_of(t1())) == set(DEFINITIONS)
    assert all(len(text) > 20 for text in DEFINITIONS.values())


def test_t2_pools_rounds_and_averages_prompts():
    f = figures_of(*t2())
    assert f["tau_with_bonus_micro"] == pytest.approx(2.5)
    assert f["tau_with_bonus_macro"] == pytest.approx((8 / 3 + 2) / 2)


def test_t3_cut_round_counts_without_bonus_and_censors_deeper_depths():
    f = figures_of(completion("t3", [chain_round(2, 3), chain_round(2, 3, cut=True)]))
    assert f["tau_with_bonus_micro"] == 2.5
    assert 1 + f["mean_accepted_draft"] == 3.0
    assert f["cut_rounds"] == 1
    assert f["tau_full_rounds"] == 3.0
    assert f["alpha_cond"] == [1, 1, 0]


def t4() -> Completion:
    rounds = [(2, "leaf"), (1, "rejected"), (0, "rejected"), (3, "leaf")]
    return completion("t4", [Round(a, a + 1, 6, 3, 7, stop) for a, stop in rounds])


def test_t4_tree_gives_figures_by_hand():
    f = figures_of(t4())
    assert f["tau_with_bonus_micro"] == 2.5
    assert f["mean_accepted_draft"] == 1.5
    assert f["alpha_prefix"] == [0.75, 0.5, 0.25]
    assert f["alpha_cond"] == pytest.approx([3 / 4, 2 / 3, 1])
    assert f["draft_token_acceptance"] == 0.25
    assert f["verify_efficiency"] == pytest.approx(10 / 28)


def test_t4_leaves_end_tree_rounds_so_the_product_of_alpha_cond_is_not_alpha_prefix():
    f = figures_of(t4())
    assert math.prod(f["alpha_cond"]) == pytest.approx(0.5)
    assert f["alpha_prefix"][2] == 0.25


def test_t5_three_ways_to_average_speed():
    f = timed_figures(
        (timed("A", 100, 4.0), timed("A", 100, 10.0)), (timed("B", 20, 1.6), timed("B", 20, 2.5))
    )
    assert f["speedup_ratio_of_sums_e2e"] == pytest.approx(12.5 / 5.6)
    assert f["speedup_mean_of_rates_e2e"] == pytest.approx(18.75 / 9)
    assert f["speedup_geomean_e2e"] == pytest.approx(1.976, abs=5e-4)


def test_t5_decode_speed_leaves_prefill_and_its_token_out_of_both_arms():
    f = timed_figures((timed("A", 100, 4.0, prefill=0.5), timed("A", 100, 10.0, prefill=0.5)))
    assert f["speedup_ratio_of_sums_e2e"] == pytest.approx(2.5)
    assert f["speedup_ratio_of_sums_decode"] == pytest.approx(2.714, abs=5e-4)
    assert f["tokens_per_s_e2e"] == pytest.approx(25)
    assert f["tokens_per_s_plain_decode"] == pytest.approx(99 / 9.5)


def t6() -> dict:
    times = {"t_draft": 0.005, "t_verify": 0.022, "t_commit": 0.001}
    rounds = [Round(2, 3, 2, 2, 3, "leaf", **times), Round(1, 2, 2, 2, 3, "rejected", **times)]
    arm = completion("t6", rounds, seconds=0.056)
    return figures([prompt_sums(arm, timed("t6", 6, 0.1), draft_calls_per_round=2)])


def test_t6_predicts_speed_from_tau_and_the_cost_of_a_round():
    assert t6()["speedup_predicted"] == pytest.approx(1.786, abs=5e-4)


def test_t6_costs_are_in_units_of_one_plain_token():
    assert t6()["cost_ratio_c"] == pytest.approx(2.5 / 20)
    assert t6()["verify_ratio"] == pytest.approx(22 / 20)
    assert t6()["ms_plain_per_token"] == pytest.approx(20)


def test_predicted_gap_is_zero_when_stages_account_for_all_decode_time():
    assert t6()["predicted_gap"] == pytest.approx(0, abs=1e-12)


def test_depth_that_was_never_tried_is_null_not_zero():
    f = figures_of(completion("x", [chain_round(0, 3)]))
    assert f["alpha_cond"] == [0, None, None]
    assert f["alpha_prefix"] == [0, 0, 0]


def test_prompts_of_unequal_depth_pool_over_the_deepest():
    f = figures_of(completion("a", [chain_round(1, 1)]), completion("b", [chain_round(2, 3)]))
    assert f["alpha_prefix"] == [1, 0.5, 0]
    assert f["alpha_cond"] == [1, 1, 0]


def test_plain_decoding_has_tau_one_and_speedup_one():
    arm = completion("p", [Round(0, 1, 0, 0, 1, "leaf") for _ in range(9)], seconds=1.0)
    f = timed_figures((arm, arm))
    assert f["tau_with_bonus_micro"] == 1.0
    assert f["speedup_ratio_of_sums_decode"] == 1.0
    assert f["alpha_prefix"] == []


def test_speed_is_null_without_a_plain_arm():
    f = figures_of(t1())
    assert [f[name] for name in f if name.startswith("speedup")] == [None] * 7


def test_prompt_that_ends_at_its_first_token_leaves_per_prompt_means():
    short = (timed("s", 1, 0.5, prefill=0.5), timed("s", 1, 0.5, prefill=0.5))
    long = (timed("l", 11, 1.0), timed("l", 11, 2.0))
    f = timed_figures(short, long)
    assert f["speedup_mean_of_rates_decode"] == pytest.approx(2)
    assert f["speedup_geomean_decode"] == pytest.approx(2)
    assert f["tau_with_bonus_macro"] is None


def test_turns_each_take_one_token_out_of_decode():
    arm = Completion("c", list(range(12)), "stop", turns=2, seconds=1.0)
    assert timed_figures((arm, arm))["tokens_per_s_decode"] == 10


def test_no_prompts_is_an_error():
    with pytest.raises(ValueError, match="prompts=0"):
        figures([])


def test_a_plain_arm_for_some_prompts_only_is_an_error():
    with pytest.raises(ValueError, match="'b' has no plain arm"):
        timed_figures((timed("a", 2, 1.0), timed("a", 2, 1.0)), (timed("b", 2, 1.0), None))


def test_figures_by_category_use_only_their_prompts():
    found = figures_by_category([prompt_sums(c, None) for c in t2()], {"t1": "code", "t2": "chat"})
    assert list(found) == ["chat", "code"]
    assert found["chat"]["tau_with_bonus_micro"] == 2.0


def test_p56_equal_tau_although_acceptance_rates_differ_with_depth():
    short, long = (figures(bench(2, k, seconds=0.1)[0]) for k in (3, 8))
    assert short["draft_token_acceptance"] == pytest.approx(2 / 3)
    assert long["draft_token_acceptance"] == pytest.approx(2 / 8)
    assert short["tau_with_bonus_micro"] == long["tau_with_bonus_micro"] == 3.0
