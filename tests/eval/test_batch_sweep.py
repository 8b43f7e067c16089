"""The batch sweep: both arms at each size, a queue for every row, in turns; and its command."""

import time
from dataclasses import replace

import pytest
from models import make_head, oracle
from scripted import Script, arm, cycle, suite, where
from training import save_target

from headstart.eval import batch_bench, timing
from headstart.eval.arms import paced
from headstart.eval.batch_sweep import batch_sweep, policies_of, print_sweep, queues
from headstart.eval.bench import benchmark
from headstart.eval.engine.decode import decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.policy import AdaptivePolicy
from headstart.eval.engine.policy_config import PolicyConfig
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.result import BatchPoint
from headstart.eval.result_files import read_result, write_result
from headstart.eval.settings import EvalConfig
from headstart.files import read_json
from headstart.heads.checkpoint import info_for, save_head
from headstart.heads.load import TargetConfig, load_target

GREEDY = SamplingConfig()
CONFIG = EvalConfig(resamples=2_000, warmup_prompts=1, batch_sizes=[4, 1], num_prompts=10)
ADAPTIVE = PolicyConfig(kind="adaptive")


def sweep(target, arms, prompts, **changes):
    config = replace(CONFIG, **changes)
    return batch_sweep(target, arms, prompts, sampling=GREEDY, config=config, stop_ids=())


def test_there_is_a_point_for_each_size_smallest_first(tiny):
    prompts = suite(range(10), max_new_tokens=13)
    drafter = oracle(tiny, prompts.requests, 2)
    ((one, four),) = sweep(tiny, [arm("oracle", drafter)], prompts)
    assert [(p.batch, p.prompts) for p in (one, four)] == [(1, 10), (4, 10)]
    assert one.tau == four.tau == 3.0
    assert one.mean_drafted == four.mean_drafted == 2.0
    for p in (one, four):
        assert p.speedup == pytest.approx(p.tokens_per_s / p.tokens_per_s_plain)
        assert p.speedup_interval[0] <= p.speedup <= p.speedup_interval[1]
        assert p.latency > 0


def test_the_arms_take_turns_at_each_size_in_a_rotating_order(monkeypatch):
    order = []

    def spy(target, drafter, requests, **options):
        order.append((len(requests), drafter.num_nodes))
        return decode(target, drafter, requests, **options)

    monkeypatch.setattr(timing, "decode", spy)
    arms = [arm("a", Script([1])), arm("b", Script([1, 2]))]
    sweep(cycle(), arms, suite([0] * 16, max_new_tokens=3), batch_sizes=[2])
    assert order[3:] == [(8, 1), (8, 2), (8, 3), (8, 2), (8, 3), (8, 1)]


def test_repeats_count_by_their_median(monkeypatch):
    runs = []
    decode_group = timing.Runner.decode

    def spy(self, drafter, group):
        runs.append(drafter.num_nodes)
        return decode_group(self, drafter, group)

    monkeypatch.setattr(timing.Runner, "decode", spy)
    sweep(
        cycle(), [arm("a", Script([1]))], suite([0], max_new_tokens=3), repeats=3, batch_sizes=[1]
    )
    assert runs == [1, 2] + [1, 2, 2, 1, 1, 2]


def test_a_batch_larger_than_the_suite_is_refused():
    with pytest.raises(ValueError, match=r"eval.batch_sizes=\[1, 4\]: the suite has 3 prompts"):
        sweep(cycle(), [], suite([0, 1, 2], max_new_tokens=3), batch_sizes=[1, 4])


def test_a_group_is_four_prompts_a_row_and_one_that_fills_no_batch_is_left_out():
    prompts = suite([0] * 27, max_new_tokens=3).requests
    assert [len(group) for group in queues(prompts, 3)] == [12, 12, 3]
    assert [len(group) for group in queues(prompts[:26], 3)] == [12, 12]


def test_a_batch_stays_full_while_prompts_wait_and_they_share_the_groups_time():
    target, prompts = cycle(), suite([0] * 8, max_new_tokens=3).requests
    uneven = [replace(r, max_new_tokens=3 + 2 * i) for i, r in enumerate(prompts)]
    start = time.perf_counter()
    done = timing.Runner(target, GREEDY, (), 2).decode(NoDrafter(), uneven)
    took = time.perf_counter() - start
    assert [c.prompt_id for c in done] == [r.prompt_id for r in uneven]
    alone = [r.rows for c in done for r in c.rounds if r.rows < 2]
    assert len(alone) == 8  # rows take 2 + 6 + 10 + 14 rounds, and 4 + 8 + 12 + 16
    shares = {c.seconds for c in done}
    assert len(shares) == 1
    assert 0.5 * took < 8 * shares.pop() <= took


def test_no_sizes_give_no_points():
    prompts = suite([0], max_new_tokens=3)
    assert sweep(cycle(), [arm("a", Script([1]))], prompts, batch_sizes=[]) == [[]]


def test_an_arm_under_a_policy_says_so_and_learns_afresh_at_each_size(tiny):
    prompts = suite(range(4), max_new_tokens=40)
    drafter = oracle(tiny, prompts.requests, 3)
    adaptive = paced(arm("oracle", drafter), ADAPTIVE)
    assert (adaptive.name, adaptive.info.policy, adaptive.is_chain) == (
        "oracle-adaptive",
        "adaptive",
        False,
    )
    (made,) = policies_of([adaptive, arm("fixed", Script([1]))]).values()
    assert isinstance(made, AdaptivePolicy)
    ((one, four),) = sweep(tiny, [adaptive], prompts)
    assert 0 < one.mean_drafted <= 3.0


def test_an_arm_that_cannot_follow_a_policy_is_refused_before_anything_is_decoded():
    with pytest.raises(ValueError, match="policy=survival: script cannot stop by probabilities"):
        paced(arm("a", Script([1])), PolicyConfig(kind="survival"))


def test_an_arm_is_left_alone_without_a_policy_or_a_budget():
    fixed = arm("a", Script([1]))
    assert paced(fixed, PolicyConfig()) is fixed
    bounded = paced(fixed, PolicyConfig(), max_pass_tokens=8)
    assert (bounded.name, bounded.is_chain) == ("a", False)


@pytest.mark.parametrize("policy", [PolicyConfig(), ADAPTIVE, PolicyConfig("table", [[1, 1]])])
@pytest.mark.parametrize("max_pass_tokens", [None, 5])
def test_identities_hold_and_greedy_text_is_equal_under_policies_and_budgets(
    tiny, policy, max_pass_tokens
):
    prompts = suite([5, 90, 7, 33], max_new_tokens=21)
    arms = [paced(arm("oracle", oracle(tiny, prompts.requests, 3)), policy, max_pass_tokens)]
    config = replace(CONFIG, batch_size=3, max_pass_tokens=max_pass_tokens, batch_sizes=[])
    ((result, rows),) = benchmark(
        tiny,
        arms,
        prompts,
        sampling=GREEDY,
        config=config,
        stop_ids=(),
        provenance=where(tiny, prompts),
    )
    assert result.equality.fraction_identical == 1.0
    assert result.drafter.policy == policy.kind
    assert all(sum(row.emitted) == len(row.token_ids) - 1 for row in rows)


def test_points_are_written_and_read_back_and_printed(tmp_path, capsys):
    prompts = suite(range(8), max_new_tokens=9)
    config = replace(CONFIG, batch_sizes=[])
    ((result, rows),) = benchmark(
        cycle(),
        [arm("null", NoDrafter())],
        prompts,
        sampling=GREEDY,
        config=config,
        stop_ids=(),
        provenance=where(cycle(), prompts),
    )
    result.batch_points = [BatchPoint(2, 8, 10.0, 12.0, 1.2, [1.1, 1.3], 2.0, 3.0, 0.5, 0.4)]
    write_result(tmp_path, result, rows)
    assert read_result(tmp_path) == result
    print_sweep([result])
    assert "1.20 [1.10, 1.30]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_sizes": [0]}, r"eval.batch_sizes=\[0\]: need different numbers >= 1"),
        ({"batch_sizes": [2, 2]}, r"eval.batch_sizes=\[2, 2\]: need different numbers >= 1"),
        ({"batch_sizes": [32]}, r"eval.batch_sizes=\[32\] but eval.num_prompts=20: the largest"),
        ({"max_pass_tokens": 7, "batch_size": 8}, "eval.max_pass_tokens=7: a pass over 8 rows"),
        ({"max_pass_tokens": 7, "batch_sizes": [8]}, "eval.max_pass_tokens=7: a pass over 8 rows"),
    ],
)
def test_a_bad_size_is_refused_by_field(values, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**values)


def test_the_command_compares_the_adaptive_policy_with_fixed_depths(tmp_path, capsys):
    directory = save_target(tmp_path / "target")
    target = load_target(TargetConfig(str(directory), dtype="float32"))
    head = make_head("eagle", target)
    save_head(tmp_path / "head", head, info_for(head, target.name, target.fingerprint))
    sizes = ["--depths", "1", "2", "--batches", "1", "2", "--prompts", "2", "--tokens", "6"]
    place = ["--target", str(directory), "--dtype", "float32", "--out", str(tmp_path / "out")]
    batch_bench.main([str(tmp_path / "head"), *sizes, *place])
    shown = capsys.readouterr().out
    assert "adaptive" in shown
    assert "of best k" in shown
    found = read_json(tmp_path / "out" / "batch.json")
    assert [name.split("-")[-1] for name in found] == ["chain1", "chain2", "adaptive"]
    assert [[p["batch"] for p in points] for points in found.values()] == [[1, 2]] * 3
