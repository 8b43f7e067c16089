"""Identities, each broken once on purpose, and the guards against bad samples."""

from dataclasses import replace

import pytest
from traces import bench, chain_round, completion, t1, t2, timed

from headstart.eval.checks import (
    check_identities,
    figures_without,
    looping_prompts,
    repeated_ngram_share,
    sample_warnings,
)
from headstart.eval.engine.records import Completion, Round
from headstart.eval.metrics import figures, prompt_sums


def check(*completions: Completion, fixed_chain: bool = True, **changes: object) -> list[str]:
    """Check the given completions after tampering with the first one's sums."""
    sums = [prompt_sums(c, None) for c in completions]
    sums[0] = replace(sums[0], **changes)
    return check_identities(sums, completions, fixed_chain=fixed_chain, greedy_equal=False)


def test_honest_rounds_pass_every_identity():
    assert check(*t2()) == []


def test_cut_rounds_pass_every_identity():
    assert check(completion("t3", [chain_round(2, 3), chain_round(2, 3, cut=True)])) == []


def test_prompts_without_rounds_pass():
    assert check(completion("stop-at-once", [])) == []


def test_rounds_shortened_by_a_limit_are_left_out_of_the_chain_rule():
    assert check(completion("x", [chain_round(2, 4), chain_round(1, 1)])) == []


def test_identity_1_catches_a_missing_bonus():
    with pytest.raises(RuntimeError, match=r"identity 1 .*fails: 2.0 against 3.0"):
        check(completion("x", [Round(2, 2, 4, 4, 5, "rejected")]))


def test_identity_1_catches_a_bonus_in_a_cut_round():
    with pytest.raises(RuntimeError, match="identity 1 .*cuts"):
        check(completion("x", [chain_round(2, 4), Round(2, 3, 4, 4, 5, "cut")]))


def test_identity_2_catches_lost_depths():
    with pytest.raises(RuntimeError, match="identity 2"):
        check(t1(), survived_K=[2, 2], tried_K=[2, 2])


def test_identity_3_catches_a_rejection_recorded_as_a_leaf():
    with pytest.raises(RuntimeError, match=r"identity 3 .*alpha_prefix\[0\]"):
        check(completion("x", [chain_round(2, 2), Round(0, 1, 2, 2, 3, "leaf")]))


def test_identity_3_is_not_asked_of_trees():
    rounds = [Round(1, 2, 2, 2, 3, "leaf"), Round(2, 3, 2, 2, 3, "leaf")]
    assert check(completion("x", rounds), fixed_chain=False) == []


def test_identity_4_catches_ids_that_no_round_emitted():
    odd = replace(t1(), token_ids=list(range(10)))
    with pytest.raises(RuntimeError, match="identity 4 .*prompt 't1'.* 10 against 9"):
        check(odd)


@pytest.mark.parametrize(
    ("made", "statement"),
    [
        (Round(3, 4, 3, 2, 4, "leaf"), "accepted <= depth_max"),
        (Round(1, 2, 1, 2, 2, "rejected"), "depth_max <= drafted"),
        (Round(1, 2, 2, 2, 2, "rejected"), "verified = drafted"),
    ],
)
def test_identity_5_catches_impossible_rounds(made: Round, statement: str):
    survived = {"survived_K": [1] * made.accepted, "tried_K": [1] * made.accepted}
    histogram = {"histogram": [0] * made.accepted + [1]}
    with pytest.raises(RuntimeError, match=f"identity 5 .*{statement}"):
        check(completion("x", [made]), fixed_chain=False, **survived, **histogram)


def test_identity_5_catches_a_prefix_rate_that_rises():
    with pytest.raises(RuntimeError, match="identity 5 .*not rising"):
        check(t1(), survived_K=[1, 2, 2, 0])


def test_identity_6_catches_a_round_counted_twice():
    with pytest.raises(RuntimeError, match="identity 6"):
        check(t1(), rounds=4, cut_rounds=1)


def test_identity_7_catches_arms_of_unequal_length():
    arm = completion("x", [chain_round(4, 4, seconds=1.0)], seconds=1.0)
    sums = [prompt_sums(arm, timed("x", 7, 2.0))]
    with pytest.raises(RuntimeError, match="identity 7"):
        check_identities(sums, [arm], fixed_chain=True, greedy_equal=True)


def test_identity_7_holds_for_equal_outputs():
    sums, done = bench(2, 4, seconds=0.2)
    assert check_identities(sums, done, fixed_chain=True, greedy_equal=True) == []


def test_identity_8_warns_when_stages_miss_wall_time():
    arm = completion("x", [chain_round(4, 4, seconds=1.0)], seconds=1.5)
    found = check_identities(
        [prompt_sums(arm, timed("x", 6, 3.0))], [arm], fixed_chain=True, greedy_equal=True
    )
    assert found[0] == "rounds and prefill account for 1.000 s of 1.500 s wall time"
    assert found[1].startswith("decode speedup 2.000 is -33.3% off the 3.000 predicted")


def test_p55_an_endless_token_repeats_nearly_all_its_8_grams():
    assert repeated_ngram_share([5] * 128) == pytest.approx(120 / 121)
    assert repeated_ngram_share(list(range(128))) == 0
    assert repeated_ngram_share([5] * 7) == 0


def test_p55_loops_are_flagged_and_figures_given_with_and_without_them():
    loop = completion("loop", [chain_round(4, 4) for _ in range(25)] + [chain_round(1, 4)])
    loop.token_ids = [5] * 128
    normal = completion("normal", [chain_round(0, 4) for _ in range(127)])
    sums = [prompt_sums(c, None) for c in (loop, normal)]
    loops = looping_prompts([loop, normal])
    assert list(loops) == ["loop"]
    assert figures(sums)["tau_with_bonus_macro"] > 2.9
    assert figures_without(sums, loops)["tau_with_bonus_micro"] == 1.0
    assert "1 of 2 prompts repeat themselves" in sample_warnings(sums, loops)[1]


def test_figures_without_loops_are_null_when_every_prompt_loops_or_none_does():
    sums = [prompt_sums(t1(), None)]
    assert figures_without(sums, {"t1": 0.9}) is None
    assert figures_without(sums, {}) is None


def test_fewer_than_twenty_prompts_are_flagged():
    sums = bench(2, 4, seconds=0.2, prompts=20)[0]
    assert sample_warnings(sums, {}) == []
    assert "19 prompts" in sample_warnings(sums[1:], {})[0]
