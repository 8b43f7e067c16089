"""Yields, optima and the roofline against the published table, and against enumeration by hand."""

import itertools
from fractions import Fraction

import pytest

from headstart import cli
from headstart.eval.roofline import (
    FREE,
    Context,
    DrafterWork,
    Machine,
    Work,
    best_depth,
    chain_draft,
    draft_seconds,
    expected_tokens,
    knee,
    knee_batch,
    round_time,
    simple_speedup,
    step_time,
    touched_share,
    tree_draft,
    weight_bytes,
    worth_extending,
)

cli.register()
H100 = Machine(flops=989.4e12, bandwidth=3.35e12)
DENSE_8B = Work(read_bytes=16e9, flops_per_token=16e9)
VICUNA_7B = [
    [0.560, 0.112, 0.055, 0.033, 0.020],
    [0.316, 0.108, 0.061, 0.043, 0.034],
    [0.201, 0.087, 0.060, 0.035, 0.034],
    [0.147, 0.078, 0.049, 0.037, 0.029],
    [0.118, 0.069, 0.048, 0.037, 0.028],
]


def chain(alpha: float, k: int):
    return chain_draft([[alpha]] * k, k)


def speedup(batch: int, k: int, alpha: float = 0.8) -> float:
    return round_time(DENSE_8B, FREE, chain(alpha, k), H100, rows=batch).speedup


# Yield and cost


@pytest.mark.parametrize(("alpha", "k", "tokens"), [(0.8, 4, 3.36), (0.7, 4, 2.77)])
def test_equal_acceptance_yields_a_geometric_sum(alpha, k, tokens):
    assert expected_tokens([alpha] * k) == pytest.approx(tokens, abs=5e-3)
    assert expected_tokens([alpha] * k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_acceptance_by_depth_yields_the_sum_of_its_products():
    assert expected_tokens([0.79, 0.74, 0.72, 0.73, 0.67]) == pytest.approx(3.31, abs=5e-3)
    assert expected_tokens([]) == 1.0


def test_certain_acceptance_yields_every_drafted_token_and_the_bonus():
    assert expected_tokens([1.0] * 7) == 8.0


@pytest.mark.parametrize(("alpha", "gain"), [(0.7, 2.31), (0.8, 2.80)])
def test_speedup_divides_the_yield_by_the_cost_of_drafting(alpha, gain):
    assert simple_speedup([alpha] * 4, 0.05) == pytest.approx(gain, abs=5e-3)


OPTIMA = [
    (0.6, 0.02, 6, 2.17),
    (0.6, 0.05, 4, 1.92),
    (0.6, 0.1, 3, 1.67),
    (0.7, 0.02, 8, 2.76),
    (0.7, 0.05, 6, 2.35),
    (0.7, 0.1, 4, 1.98),
    (0.8, 0.02, 11, 3.82),
    (0.8, 0.05, 8, 3.09),
    (0.8, 0.1, 6, 2.47),
    (0.9, 0.02, 19, 6.36),
    (0.9, 0.05, 13, 4.67),
    (0.9, 0.1, 10, 3.43),
]


@pytest.mark.parametrize(("alpha", "c", "k", "gain"), OPTIMA)
def test_extending_stops_at_the_best_length(alpha, c, k, gain):
    assert best_depth([alpha] * 40, c) == k
    assert simple_speedup([alpha] * k, c) == pytest.approx(gain, abs=6e-3)
    assert max(range(1, 40), key=lambda n: simple_speedup([alpha] * n, c)) == k


@pytest.mark.parametrize("c", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("alphas", [[0.6], [0.7] * 5, [0.8, 0.6, 0.4, 0.2], [0.9, 0.1]])
def test_the_extension_rule_says_whether_the_longer_chain_is_faster(alphas, c):
    for k in range(1, len(alphas) + 1):
        faster = simple_speedup(alphas[:k], c) > simple_speedup(alphas[: k - 1], c)
        assert worth_extending(alphas[:k], c) == faster


def test_a_draft_that_costs_more_than_it_yields_is_not_begun():
    assert best_depth([0.3, 0.3], 0.5) == 0


@pytest.mark.parametrize(
    ("drafted", "accepted"), [(4, 0.9094), (10, 1.1266), (25, 1.2890), (63, 1.3841)]
)
def test_a_static_tree_yields_the_values_of_its_nodes_and_the_bonus(drafted, accepted):
    draft = tree_draft(VICUNA_7B, drafted + 1)
    assert draft.expected == pytest.approx(1 + accepted, abs=1.5e-4)
    assert draft.nodes == drafted + 1


def test_a_trees_draft_steps_are_the_nodes_expanded_by_depth():
    # [0] [0,0] [1] [0,1]: the root and [0] have children.
    assert tree_draft(VICUNA_7B, 5).stepped == (1, 1)
    # ... [2] [0,0,0] [1,0] [0,2]: [0] and [1] have children, then [0,0].
    assert tree_draft(VICUNA_7B, 9).stepped == (1, 2, 1)


# The roofline


@pytest.mark.parametrize(("name", "tokens"), [("a100", 153), ("h100", 295), ("h200", 206)])
def test_the_knee_of_a_dense_bf16_model_is_peak_over_bandwidth(name, tokens):
    machine = cli.load_config("plan", [f"hardware={name}"]).hardware.machine("bfloat16")
    assert round(knee(DENSE_8B, machine)) == tokens
    assert knee(DENSE_8B, machine) == pytest.approx(machine.flops / machine.bandwidth)


def test_efficiencies_move_the_knee():
    slow = ["hardware.compute_efficiency=0.5", "hardware.bandwidth_efficiency=0.8"]
    machine = cli.load_config("plan", slow).hardware.machine("bfloat16")
    assert knee(DENSE_8B, machine) == pytest.approx(989.4e12 * 0.5 / (3.35e12 * 0.8))


def test_a_tree_of_60_reaches_the_knee_at_batch_5_and_a_chain_of_7_at_37():
    assert knee_batch(knee(DENSE_8B, H100), 60) == 5
    assert knee_batch(knee(DENSE_8B, H100), 8) == 37


TABLE = {
    1: {1: 1.80, 8: 1.80, 32: 1.80, 64: 1.80, 128: 1.80, 256: 1.04, 512: 0.90},
    2: {1: 2.44, 8: 2.44, 32: 2.44, 64: 2.44, 128: 1.88, 256: 0.94, 512: 0.81},
    4: {1: 3.36, 8: 3.36, 32: 3.36, 64: 3.10, 128: 1.55, 256: 0.78, 512: 0.67},
    7: {1: 4.16, 8: 4.16, 32: 4.16, 64: 2.40, 128: 1.20, 256: 0.60, 512: 0.52},
}


@pytest.mark.parametrize("k", TABLE)
def test_speedup_of_an_8b_model_falls_with_batch_as_published(k):
    assert {n: speedup(n, k) for n in TABLE[k]} == pytest.approx(TABLE[k], abs=6e-3)


@pytest.mark.parametrize("k", [1, 4, 7])
def test_far_past_the_knee_speedup_is_the_yield_over_the_nodes(k):
    assert speedup(100_000, k) == pytest.approx(expected_tokens([0.8] * k) / (k + 1))
    assert speedup(100_000, k) < 1


def test_a_pass_takes_the_longer_of_reading_and_computing_and_the_rest_on_top():
    work = Work(read_bytes=10.0, flops_per_token=3.0, flops_per_row=1.0, operations=4)
    step = step_time(work, 6, Machine(2.0, 5.0, 0.5), rows=2, context=Context(row_bytes=10.0))
    assert vars(step) == {"weights": 2.0, "compute": 10.0, "attention": 4.0, "launch": 2.0}
    assert step.total == 16.0


def test_reading_caches_grows_with_batch_and_context_and_not_with_the_draft():
    context = Context(row_bytes=131072 * 4096)  # 8B: 2 x 32 layers x 8 heads x 128 x 2 bytes
    draft = chain(0.8, 7)
    made = round_time(DENSE_8B, FREE, draft, H100, rows=16, context=context)
    assert made.verify.attention == made.plain.attention == 16 * 131072 * 4096 / 3.35e12


def test_long_contexts_keep_speculation_worthwhile_at_a_larger_batch():
    context = Context(row_bytes=131072 * 16384)
    draft = chain(0.8, 4)
    short = round_time(DENSE_8B, FREE, draft, H100, rows=256).speedup
    long = round_time(DENSE_8B, FREE, draft, H100, rows=256, context=context).speedup
    assert short < 1 < long


def test_a_wide_tree_over_a_long_context_is_bound_by_attentions_products():
    context = Context(row_bytes=100.0, flops_per_token=60.0)
    narrow, wide = (
        step_time(DENSE_8B, n, Machine(10.0, 10.0), rows=1, context=context) for n in (1, 4)
    )
    assert (narrow.attention, wide.attention) == (10.0, 24.0)


# Drafting


def test_drafting_takes_a_first_call_and_one_for_each_further_depth():
    step = Work(read_bytes=20.0, flops_per_token=0.0)
    first = Work(read_bytes=30.0, flops_per_token=0.0)
    machine = Machine(1.0, 10.0)
    recurrent = DrafterWork(first, (step, step, step))
    assert draft_seconds(recurrent, chain(0.5, 1), 1, machine) == 3.0
    assert draft_seconds(recurrent, chain(0.5, 3), 1, machine) == 7.0
    at_once = DrafterWork(first, depths_at_once=4)
    assert draft_seconds(at_once, chain(0.5, 4), 1, machine) == 3.0


def test_the_first_call_reads_the_tokens_of_the_last_round():
    drafter = DrafterWork(Work(0.0, flops_per_token=2.0, flops_per_row=1.0))
    made = draft_seconds(drafter, chain(0.5, 1), 4, Machine(1.0, 1.0))
    assert made == 4 * (1.5 * 2.0 + 1.0)


def test_a_trees_steps_compute_over_the_nodes_they_expand():
    drafter = DrafterWork(Work(0.0, 0.0), (Work(0.0, flops_per_token=1.0),) * 2)
    assert draft_seconds(drafter, tree_draft(VICUNA_7B, 9), 5, Machine(1.0, 1.0)) == 5 * (2 + 1)


def test_a_costly_drafter_divides_the_speedup():
    draft, step = chain(0.7, 4), step_time(DENSE_8B, 1, H100, rows=1).total
    call = Work(read_bytes=0.05 * 16e9, flops_per_token=0.0)
    made = round_time(DENSE_8B, DrafterWork(call, (call,) * 3), draft, H100, rows=1)
    assert made.draft == pytest.approx(4 * 0.05 * step)
    assert made.speedup == pytest.approx(2.31, abs=5e-3)


# Experts


@pytest.mark.parametrize("tokens", [1, 2, 3])
@pytest.mark.parametrize(("num_experts", "top_k"), [(4, 1), (4, 2), (5, 2)])
def test_expected_experts_equal_exact_enumeration(num_experts, top_k, tokens):
    choices = list(itertools.combinations(range(num_experts), top_k))
    drawn = list(itertools.product(choices, repeat=tokens))
    touched = sum(Fraction(len(set().union(*picks))) for picks in drawn) / len(drawn)
    assert num_experts * touched_share(num_experts, top_k, tokens) == pytest.approx(float(touched))


def test_a_mixture_reads_more_weights_for_more_tokens_up_to_all():
    work = Work(10.0, 1.0, expert_bytes=80.0, num_experts=8, top_k=2)
    assert weight_bytes(work, 1) == 10.0 + 80.0 / 4
    assert weight_bytes(work, 2) == pytest.approx(10.0 + 80.0 * (1 - 0.75**2))
    assert weight_bytes(work, 1000) == pytest.approx(90.0)


def test_a_mixture_makes_verifying_dearer_than_one_step_below_the_knee():
    work = Work(2e9, 6e9, expert_bytes=56e9, num_experts=128, top_k=8)
    made = round_time(work, FREE, chain(0.8, 7), H100, rows=1)
    assert made.verify.total > 2 * made.plain.total
    assert made.speedup < 0.5 * expected_tokens([0.8] * 7)


def test_experts_put_the_knee_further_out():
    dense = Work(8e9, 8e9)
    mixture = Work(2e9, 8e9, expert_bytes=60e9, num_experts=10, top_k=1)
    assert knee(mixture, H100) > 5 * knee(dense, H100)
    step = step_time(mixture, knee(mixture, H100), H100, rows=0)
    assert step.compute == pytest.approx(step.weights)
