"""The benchmark on targets whose every token is known."""

import json
import math
from dataclasses import replace

import pytest
import torch
from fixtures_chat import chat_tokenizer
from models import anti, make_head, oracle, target_of, tiny_model
from scripted import Clock, Script, arm, cycle, law, suite, where

from headstart.data.template import ChatTemplate
from headstart.eval import bench, timing
from headstart.eval.arms import Arm, head_arms
from headstart.eval.bench import benchmark, evaluate_heads, quick_tau
from headstart.eval.engine.decode import decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.equality import compare_greedy, first_difference, top_margin
from headstart.eval.leaderboard import by_speed
from headstart.eval.result import PromptRow, Result, SamplingInfo
from headstart.eval.result_files import read_result
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.eval.suites import Suite
from headstart.eval.timing import Runner
from headstart.heads.checkpoint import info_for, save_head
from headstart.heads.target import Target

GREEDY = SamplingConfig()
QUICK = EvalConfig(resamples=2_000, warmup_prompts=1)
CHAIN = TreeConfig(name="chain2", depth=2)


def run(
    target: Target,
    arms: list[Arm],
    prompts: Suite,
    *,
    sampling: SamplingConfig = GREEDY,
    stop_ids: tuple[int, ...] = (),
    **changes: object,
) -> list[tuple[Result, list[PromptRow]]]:
    return benchmark(
        target,
        arms,
        prompts,
        sampling=sampling,
        config=replace(QUICK, **changes),
        stop_ids=stop_ids,
        provenance=where(target, prompts),
    )


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("headstart.eval.engine.decode.time", clock)
    return clock


def test_a_null_draft_has_tau_1_and_the_plain_text():
    ((result, rows),) = run(cycle(), [arm("null", NoDrafter())], suite([0, 3], max_new_tokens=9))
    assert result.figures["tau_with_bonus_micro"] == 1.0
    assert result.equality.fraction_identical == 1.0
    assert [row.token_ids for row in rows] == [
        [1, 2, 3, 4, 5, 6, 7, 0, 1],
        [4, 5, 6, 7, 0, 1, 2, 3, 4],
    ]


def test_p56_a_null_draft_has_speedup_1_on_a_clock_that_counts_its_reads(clock):
    ((result, _),) = run(cycle(), [arm("null", NoDrafter())], suite(range(8), max_new_tokens=9))
    assert result.figures["speedup_ratio_of_sums_decode"] == pytest.approx(1.0)
    assert result.intervals["speedup_ratio_of_sums_decode"] == pytest.approx([1.0, 1.0])


def test_p54_an_oracle_at_depth_5_has_tau_6_and_an_anti_oracle_1(tiny):
    prompts = suite([5, 90], max_new_tokens=1 + 6 * 4)
    arms = [
        arm("oracle", oracle(tiny, prompts.requests, 5)),
        arm("anti", anti(tiny, prompts.requests, 5)),
    ]
    (best, _), (worst, _) = run(tiny, arms, prompts)
    assert best.figures["tau_full_rounds"] == 6.0
    assert best.figures["alpha_cond"] == [1.0] * 5
    assert worst.figures["tau_with_bonus_micro"] == 1.0
    assert best.equality.fraction_identical == worst.equality.fraction_identical == 1.0


def test_p54_quick_tau_agrees_with_the_made_drafters(tiny):
    requests = suite([5, 90, 7], max_new_tokens=1 + 6 * 4).requests
    made = [oracle(tiny, requests, 5), anti(tiny, requests, 5)]
    taus = [quick_tau(tiny, drafter, requests, sampling=GREEDY, stop_ids=()) for drafter in made]
    assert taus == [6.0, 1.0]


def test_p54_an_evaluator_that_raises_is_seen():
    def fail() -> None:
        raise RuntimeError("the head broke")

    broken = Script([1], on_propose=fail)
    requests = suite([0], max_new_tokens=4).requests
    with pytest.raises(RuntimeError, match="the head broke"):
        quick_tau(cycle(), broken, requests, sampling=GREEDY, stop_ids=())


def test_quick_tau_refuses_prompts_that_never_came_to_a_round():
    requests = suite([0], max_new_tokens=1).requests
    with pytest.raises(ValueError, match="every one of 1 answers ended with its first token"):
        quick_tau(cycle(), Script(range(1, 3)), requests, sampling=GREEDY, stop_ids=())


def test_p55_a_loop_beside_a_normal_prompt_is_flagged_and_figures_come_without_it():
    law_VV = torch.full((8, 8), 1 / 8)
    law_VV[:, 0] = 1e-9  # the normal prompt does not fall into the loop
    law_VV[0] = torch.tensor([1.0] + [1e-9] * 7)
    repeats = arm("repeats", Script([0, 0, 0]))
    ((result, rows),) = run(
        law(law_VV), [repeats], suite([0, 5], max_new_tokens=128), sampling=SamplingConfig(1.0)
    )
    assert list(result.loops) == ["p0"]
    assert result.loops["p0"] > 0.95
    assert rows[1].repeated_ngram_share < 0.05
    assert result.figures["tau_with_bonus_macro"] > 2.5
    assert result.figures_without_loops["tau_with_bonus_macro"] < 1.5
    assert any("repeat themselves" in w for w in result.warnings)


def test_p56_accepting_two_of_three_and_two_of_eight_is_the_same_tau():
    arms = [
        arm("shallow", Script([1, 2, 4])),
        arm("deep", Script([1, 2, 4, 5, 6, 7, 8, 9])),
    ]
    # 7 is always a round's bonus token here, so that no limit shortens a draft and no round is cut.
    outcomes = run(cycle(), arms, suite([0, 3, 0], max_new_tokens=100), stop_ids=(7,))
    shallow, deep = (result for result, _ in outcomes)
    assert shallow.figures["draft_token_acceptance"] == pytest.approx(2 / 3)
    assert deep.figures["draft_token_acceptance"] == pytest.approx(2 / 8)
    assert shallow.figures["tau_with_bonus_micro"] == deep.figures["tau_with_bonus_micro"] == 3.0


def test_p56_arms_rank_by_speed_and_not_by_acceptance_rate(clock):
    def dawdle() -> None:
        clock.now += 1.0

    arms = [
        arm("slow", Script([1, 2, 4], on_propose=dawdle)),
        arm("fast", Script([1, 2, 4, 5, 6, 7, 8, 9])),
    ]
    outcomes = run(cycle(), arms, suite([0, 3], max_new_tokens=100), stop_ids=(7,))
    named = [(result.drafter.name, result) for result, _ in outcomes]
    assert [name for name, _ in by_speed(named)] == ["fast", "slow"]


def test_p56_tokens_are_counted_from_ids_in_both_arms():
    ((result, rows),) = run(
        cycle(),
        [arm("oracle", Script(range(1, 4)))],
        suite([0, 4], max_new_tokens=100),
        stop_ids=(7,),
    )
    assert [(len(row.token_ids), row.plain_tokens) for row in rows] == [(7, 7), (3, 3)]
    assert result.counts.tokens == 10


def test_p56_warm_up_is_not_in_the_times(clock):
    waits = iter([1000.0])

    def compile_once() -> None:
        clock.now += next(waits, 0.0)

    ((result, rows),) = run(
        cycle(),
        [arm("cold", Script([1, 2], on_propose=compile_once))],
        suite([0], max_new_tokens=9),
    )
    assert clock.now > 1000
    assert rows[0].seconds < 1
    assert result.figures["ms_draft_per_round"] < 1000


def test_the_warm_up_is_a_whole_batch_at_least(monkeypatch):
    """A compiled runtime makes its graphs of many rows there, before the clock."""
    groups, prompts = [], suite([0] * 6, max_new_tokens=20).requests
    monkeypatch.setattr(Runner, "decode", lambda self, drafter, group: groups.append(group))
    Runner(cycle(), GREEDY, (), batch_size=4).warm_up([NoDrafter()], prompts, 1)
    assert [len(group) for group in groups] == [4]
    Runner(cycle(), GREEDY, (), batch_size=1).warm_up([NoDrafter()], prompts, 3)
    assert [len(group) for group in groups] == [4, 1, 1, 1]


def test_the_median_repeat_of_a_prompt_counts(clock):
    waits = iter([0.0, 5.0, 1.0, 100.0])  # warm-up, then three repeats of one round each

    def dawdle() -> None:
        clock.now += next(waits)

    ((result, rows),) = run(
        cycle(),
        [arm("uneven", Script([1], on_propose=dawdle))],
        suite([0], max_new_tokens=3),
        repeats=3,
    )
    assert rows[0].seconds == pytest.approx(5, abs=0.1)
    assert result.repeats == 3


def test_arms_take_turns_prompt_by_prompt_in_a_rotating_order(monkeypatch):
    order = []

    def spy(target, drafter, requests, **options):
        order.append((drafter.num_nodes, requests[0].prompt_id))
        return decode(target, drafter, requests, **options)

    monkeypatch.setattr(timing, "decode", spy)
    run(
        cycle(),
        [arm("a", Script(range(1, 2))), arm("b", Script(range(1, 3)))],
        suite([0, 1], max_new_tokens=4),
    )
    assert order[3:] == [(1, "p0"), (2, "p0"), (3, "p0"), (2, "p1"), (3, "p1"), (1, "p1")]


def test_a_batch_of_two_gives_the_text_of_single_prompts():
    prompts, arms = suite([0, 3, 6], max_new_tokens=20), [arm("oracle", Script(range(1, 4)))]
    ((alone, single),) = run(cycle(), arms, prompts)
    ((together, paired),) = run(cycle(), arms, prompts, batch_size=2)
    assert [row.token_ids for row in paired] == [row.token_ids for row in single]
    assert together.sampling.batch == 2
    tau = "tau_with_bonus_micro"
    assert together.figures[tau] == alone.figures[tau]


def test_a_group_shares_its_wall_time_and_its_rounds_times(clock):
    def second() -> None:
        clock.now += 1.0

    # From 3 the stop token comes in round two, from 5 in round one: three row-rounds, two rounds.
    ((result, rows),) = run(
        cycle(),
        [arm("timed", Script([1], on_propose=second))],
        suite([3, 5], max_new_tokens=100),
        stop_ids=(7,),
        batch_size=2,
    )
    assert [row.t_draft for row in rows] == [
        pytest.approx([0.5, 1.0], abs=0.01),
        pytest.approx([0.5], abs=0.01),
    ]
    assert [row.seconds for row in rows] == pytest.approx([1.0, 1.0], abs=0.02)
    assert not any("wall time" in w for w in result.warnings)


def forge(monkeypatch, position: int, token: int) -> None:
    """Make the plain arm say `token` at `position`, as a difference that no drafter caused."""

    def forged(target, drafter, requests, **options):
        for done in decode(target, drafter, requests, **options):
            if drafter.num_nodes == 1:
                done.token_ids[position] = token
            yield done

    monkeypatch.setattr(timing, "decode", forged)


def test_p47_in_float32_a_divergence_fails_the_losslessness_gate(monkeypatch):
    forge(monkeypatch, position=4, token=0)
    ((result, _),) = run(
        cycle(), [arm("oracle", Script(range(1, 3)))], suite([0, 1], max_new_tokens=8)
    )
    assert result.equality.fraction_identical == 0.0
    first = result.equality.divergences[0]
    assert (first.prompt_id, first.position) == ("p0", 4)
    # After 1 2 3 4 the best token is 5 with 0.9999, each other one has 0.0001 / 7.
    assert first.margin == pytest.approx(torch.tensor(0.9999 * 7 / 1e-4).log().item(), rel=1e-5)
    assert "losslessness gate failed: 2 greedy outputs differ" in result.warnings[0]


def test_p47_in_bfloat16_a_wide_margin_is_a_bug_suspect(monkeypatch):
    forge(monkeypatch, position=4, token=0)
    target = cycle(torch.bfloat16)
    ((result, _),) = run(target, [arm("oracle", Script(range(1, 3)))], suite([0], max_new_tokens=8))
    assert "bug suspect: prompt p0 leaves plain decoding at token 4" in result.warnings[0]


def test_p47_in_bfloat16_a_tie_is_recorded_without_suspicion(monkeypatch):
    forge(monkeypatch, position=2, token=5)
    target = law(torch.full((8, 8), 1 / 8), torch.bfloat16)
    ((result, _),) = run(target, [arm("zero", Script([0]))], suite([0], max_new_tokens=8))
    assert [d.margin for d in result.equality.divergences] == [0.0]
    assert not any("suspect" in w for w in result.warnings)


def test_arms_are_compared_with_the_fastest_prompt_lookup_of_their_run(clock):
    def dawdle() -> None:
        clock.now += 1.0

    def named(name: str, family: str, drafter: Script) -> Arm:
        made = arm(name, drafter)
        return replace(made, info=replace(made.info, family=family))

    arms = [
        named("head", "eagle", Script([1, 2, 3])),
        named("slow", "lookup", Script([1], on_propose=dawdle)),
        named("fast", "lookup", Script([1, 3])),
    ]
    outcomes = run(cycle(), arms, suite([0, 3, 5], max_new_tokens=20))
    head, slow, fast = (result for result, _ in outcomes)
    assert head.over_lookup.rival == "fast"
    assert slow.over_lookup is None
    assert fast.over_lookup is None
    low, high = head.over_lookup.interval
    speeds = [r.figures["speedup_ratio_of_sums_decode"] for r in (head, fast)]
    assert low > 0
    assert low - 1e-9 <= speeds[0] - speeds[1] <= high + 1e-9


def test_without_prompt_lookup_there_is_nothing_to_lead():
    ((result, _),) = run(cycle(), [arm("null", NoDrafter())], suite([0], max_new_tokens=4))
    assert result.over_lookup is None


def test_results_record_limits_that_differ_the_bound_of_a_pass_and_the_seed():
    def sampling_of(prompts: Suite, **changes: object) -> SamplingInfo:
        ((result, _),) = run(
            cycle(), [arm("null", NoDrafter())], prompts, sampling=SamplingConfig(seed=5), **changes
        )
        return result.sampling

    def limited(*limits: int) -> Suite:
        prompts = suite([0, 3], max_new_tokens=4)
        asked = [
            replace(request, max_new_tokens=limit)
            for request, limit in zip(prompts.requests, limits, strict=True)
        ]
        return replace(prompts, requests=asked)

    alike = sampling_of(limited(6, 6), max_pass_tokens=64)
    assert (alike.limits, alike.max_new_tokens) == ("", 6)
    assert (alike.max_pass_tokens, alike.seed) == (64, 5)
    one, other = sampling_of(limited(4, 6)), sampling_of(limited(6, 4))
    assert one.limits[:5] == other.limits[:5] == "4-6 ("
    assert one.limits != other.limits
    assert one.max_pass_tokens is None


def test_the_margin_is_measured_against_the_spacing_of_the_dtype_at_the_best_logit():
    law_VV = torch.full((8, 8), 1e-9)  # ln 1e-9 = -20.7; bf16 numbers in [16, 32) are 0.125 apart
    law_VV[:, 0] = 1e-8
    target = law(law_VV, torch.bfloat16)
    margin, spacing = top_margin(target, [3])
    assert spacing == 0.125
    assert margin == pytest.approx(2.3, abs=0.2)


def test_the_margin_of_a_divergence_is_the_targets_after_the_common_output():
    law_VV = torch.full((8, 8), 0.01)
    best = {0: 1, 1: 2, 2: 3, 3: 0}
    for last, token in best.items():
        law_VV[last, token] = 0.01 * (2 + last)  # the margin after token i is ln(2 + i)
    law_VV /= law_VV.sum(1, keepdim=True)
    plain = Completion("p0", [1, 2, 3, 0], "length")
    drafted = Completion("p0", [1, 2, 5, 0], "length")
    requests = suite([0], max_new_tokens=4).requests
    equality, _ = compare_greedy(law(law_VV), requests, [plain], [drafted])
    (found,) = equality.divergences
    assert found.position == 2
    assert found.margin == pytest.approx(math.log(2 + 2), rel=1e-5)


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0)],
)
def test_the_first_difference_of_two_outputs(left, right, position):
    assert first_difference(left, right) == position


def test_equality_is_not_compared_when_sampled_or_switched_off():
    arms, prompts = [arm("null", NoDrafter())], suite([0], max_new_tokens=4)
    ((sampled, _),) = run(cycle(), arms, prompts, sampling=SamplingConfig(1.0))
    ((off, _),) = run(cycle(), arms, prompts, check_equality=False)
    assert sampled.equality is None
    assert off.equality is None


def test_figures_come_by_category():
    ((result, _),) = run(
        cycle(), [arm("oracle", Script(range(1, 3)))], suite([0, 1, 2], max_new_tokens=7)
    )
    assert {name: c.counts.prompts for name, c in result.categories.items()} == {
        "even": 2,
        "odd": 1,
    }


def test_p52_rows_of_prompts_give_the_figures_again():
    ((result, rows),) = run(
        cycle(), [arm("oracle", Script(range(1, 4)))], suite([0, 5], max_new_tokens=11)
    )
    emitted, rounds = sum(sum(r.emitted) for r in rows), sum(len(r.emitted) for r in rows)
    assert result.figures["tau_with_bonus_micro"] == emitted / rounds


def test_a_prompt_longer_than_the_context_is_refused_before_decoding():
    def decoded() -> None:
        raise AssertionError("something was decoded")

    prompts = suite([0], max_new_tokens=4)
    prompts.requests.append(replace(prompts.requests[0], prompt_id="long", token_ids=(1,) * 40))
    with pytest.raises(ValueError, match="suite hand, prompt long: 40 tokens .* context of 32"):
        run(
            target_of(tiny_model(max_position_embeddings=32)),
            [arm("never", Script([1], on_propose=decoded))],
            prompts,
        )


def test_two_arms_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two arms are called 'a'"):
        run(
            cycle(),
            [arm("a", Script(range(1, 2))), arm("a", Script(range(1, 3)))],
            suite([0], max_new_tokens=4),
        )


@pytest.fixture(scope="module")
def chat_target() -> Target:
    model = tiny_model(layers=2, vocab=264, max_position_embeddings=4096, eos_token_id=2)
    return target_of(model, chat_tokenizer())


def save_medusa(path, target: Target, *, fingerprint: str | None = None):
    head = make_head("medusa", target, num_heads=3)
    info = info_for(head, target.name, fingerprint or target.fingerprint, step=7, tokens_seen=99)
    save_head(path, head, info)
    return path


def test_evaluate_heads_writes_a_directory_an_arm_and_a_report(tmp_path, chat_target, capsys):
    checkpoint = save_medusa(tmp_path / "runs" / "head", chat_target)
    trees = [CHAIN, TreeConfig(name="fork", choices=[[0], [1], [0, 0]])]
    results = evaluate_heads(
        chat_target,
        ChatTemplate(chat_target.tokenizer),
        [checkpoint],
        trees,
        sampling=GREEDY,
        config=replace(QUICK, num_prompts=3, max_new_tokens=12),
        out=tmp_path / "out",
        run_config={"seed": 0},
    )
    names = [r.drafter.name for r in results]
    assert names == ["medusa-runs-chain2", "medusa-runs-fork"]
    assert [r.drafter.tree for r in results] == ["chain:2", "static:fork"]
    assert [r.drafter.verify_scheme for r in results] == ["a1", "b"]
    assert all(r.equality.fraction_identical == 1.0 for r in results)
    assert [read_result(tmp_path / "out" / name) for name in names] == results
    assert "medusa-runs-fork" in (tmp_path / "out" / "report.md").read_text()
    assert "medusa-runs-chain2" in capsys.readouterr().out


def evaluate_one(tmp_path, target, **options):
    return evaluate_heads(
        target,
        ChatTemplate(target.tokenizer),
        [save_medusa(tmp_path / "runs" / "head", target)],
        [CHAIN],
        sampling=GREEDY,
        config=replace(QUICK, max_new_tokens=4, **options),
        out=tmp_path / "out",
        run_config={},
    )


def test_a_batch_larger_than_the_prompts_that_fit_is_refused_before_anything_is_decoded(
    tmp_path, chat_target
):
    rows = [{"question_id": n, "category": "x", "turns": ["Hello?"]} for n in range(3)]
    path = tmp_path / "three.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=r"eval.batch_sizes=\[1, 8\]: the suite has 3 prompts"):
        evaluate_one(tmp_path, chat_target, suite=str(path), num_prompts=20, batch_sizes=[1, 8])
    assert not (tmp_path / "out").exists()


def test_what_was_measured_is_written_before_the_batch_sweep_begins(
    tmp_path, chat_target, monkeypatch
):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "batch_sweep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate_one(tmp_path, chat_target, num_prompts=2, batch_sizes=[1])
    assert read_result(tmp_path / "out" / "medusa-runs-chain2").counts.prompts == 2


def test_heads_of_one_directory_name_are_told_apart_by_their_parents(tmp_path, chat_target):
    paths = [save_medusa(tmp_path / run / "head", chat_target) for run in ("a", "b")]
    arms = head_arms(paths, [CHAIN], chat_target, GREEDY, force=False)
    assert [a.name for a in arms] == ["medusa-a-chain2", "medusa-b-chain2"]


def test_a_head_given_twice_is_refused(tmp_path, chat_target):
    path = save_medusa(tmp_path / "head", chat_target)
    with pytest.raises(ValueError, match="head is given twice"):
        head_arms([path, path], [CHAIN], chat_target, GREEDY, force=False)


def test_a_tree_deeper_than_the_head_is_refused(tmp_path, chat_target):
    path = save_medusa(tmp_path / "head", chat_target)
    deep = TreeConfig(name="deep", depth=4)
    with pytest.raises(ValueError, match=r"tree.depth=4 but head.num_heads=3"):
        head_arms([path], [CHAIN, deep], chat_target, GREEDY, force=False)


def test_a_forced_pairing_is_noted_for_the_result(tmp_path, chat_target):
    path = save_medusa(tmp_path / "head", chat_target, fingerprint="f" * 16)
    with pytest.raises(ValueError, match="eval.force_pairing=true"):
        head_arms([path], [CHAIN], chat_target, GREEDY, force=False)
    with pytest.warns(UserWarning, match="paired with tiny"):
        (forced,) = head_arms([path], [CHAIN], chat_target, GREEDY, force=True)
    assert "fingerprint ffffffffffffffff" in forced.notes[0]


def test_notes_of_an_arm_and_of_the_suite_are_warnings_of_the_result():
    noted = replace(arm("null", NoDrafter()), notes=("forced",))
    prompts = replace(suite([0], max_new_tokens=4), dropped="dropped 2 rows: 2 odd")
    ((result, _),) = run(cycle(), [noted], prompts)
    assert result.warnings[0] == "forced"
    assert "suite hand: dropped 2 rows: 2 odd" in result.warnings


def test_sampled_children_without_a_temperature_warn(tmp_path, chat_target):
    path = save_medusa(tmp_path / "head", chat_target)
    with pytest.warns(UserWarning, match="tree.children=sampled has no effect"):
        head_arms([path], [replace(CHAIN, children="sampled")], chat_target, GREEDY, force=False)


def test_nothing_to_measure_is_refused(chat_target):
    with pytest.raises(ValueError, match="0 checkpoints with 1 trees"):
        head_arms([], [CHAIN], chat_target, GREEDY, force=False)
