"""Tau predicted by teacher-forced agreement against the real verifier, round for round."""

import copy

import pytest
from models import GREEDY, make_head, requests, run, target_of, tiny_model
from scripted import Script, arm, cycle, suite
from test_bench import run as bench

from headstart.eval.arms import Arm, head_drafter
from headstart.eval.engine.decode import Request
from headstart.eval.engine.records import Completion
from headstart.eval.report_content import content
from headstart.eval.report_markdown import markdown
from headstart.eval.settings import TreeConfig
from headstart.eval.teacher_forced import predicted_tau, prediction_warnings
from headstart.heads.target import Target

DEPTH = 3
CHAIN = TreeConfig(name="chain3", depth=DEPTH)


@pytest.fixture(scope="module", params=["packed", "plain"])
def target(request: pytest.FixtureRequest) -> Target:
    """Few tokens, so that a random head agrees now and then."""
    target = target_of(tiny_model(vocab=8))
    if request.param == "packed":
        target.pack()
    return target


@pytest.fixture(scope="module")
def answers(target: Target) -> list[tuple[Request, Completion]]:
    prompts = requests(6, 20, vocab=8)
    done = run(target, None, prompts)
    return [(prompt, done[prompt.prompt_id]) for prompt in prompts]


@pytest.mark.parametrize("family", ["eagle", "eagle3", "hydra_heads", "medusa"])
def test_the_prediction_is_the_mean_round_drafted_from_every_position(
    target: Target, answers: list[tuple[Request, Completion]], family: str
) -> None:
    options = {"aux": [1, 2, 3]} if family == "eagle3" else {}
    head = make_head(family, target, **options)
    target.adopt(head)
    predicted = predicted_tau(target, head, DEPTH, *map(list, zip(*answers, strict=True)))
    starts = [
        Request(f"{prompt.prompt_id}-{n}", (*prompt.token_ids, *done.token_ids[:n]), DEPTH + 2)
        for prompt, done in answers
        for n in range(len(done.token_ids) - 1)
    ]
    rounds = run(target, head_drafter(head, target.parts, CHAIN, GREEDY), starts)
    expected = 1.0
    for d in range(DEPTH):  # of the starts that have d + 1 answer tokens to come
        accepted = [
            rounds[f"{prompt.prompt_id}-{n}"].rounds[0].accepted
            for prompt, done in answers
            for n in range(len(done.token_ids) - 1 - d)
        ]
        expected += sum(a > d for a in accepted) / len(accepted)
    assert expected > 1.05
    assert predicted == pytest.approx(expected, abs=1e-6)


def test_answers_too_short_for_the_depth_give_no_prediction(target: Target) -> None:
    prompts = requests(2, 3, vocab=8)
    done = run(target, None, prompts)
    plain = [done[prompt.prompt_id] for prompt in prompts]
    assert predicted_tau(target, make_head("eagle", target), DEPTH, prompts, plain) is None


def test_a_depth_that_the_head_cannot_draft_is_refused(target: Target) -> None:
    with pytest.raises(ValueError, match="drafts 2 tokens at most"):
        make_head("medusa", target, num_heads=2).unrolled(3)


def test_unrolling_leaves_the_head_as_it_was(target: Target) -> None:
    head = make_head("eagle", target)
    before = copy.deepcopy(head.config)
    assert head.unrolled(5).config.ttt_steps == 5
    assert head.config == before


def test_a_gap_beyond_a_tenth_is_told_and_a_smaller_one_is_not() -> None:
    (told,) = prediction_warnings(2.3, 2.0)
    assert "predicts tau 2.30" in told
    assert "2.00 (+15 %)" in told
    assert prediction_warnings(2.19, 2.0) == prediction_warnings(1.81, 2.0) == []
    assert prediction_warnings(None, 2.0) == prediction_warnings(2.0, None) == []


def test_a_greedy_chain_carries_its_prediction_into_result_and_report() -> None:
    target = cycle()
    drafter = head_drafter(make_head("eagle", target, seed=None), target.parts, CHAIN, GREEDY)
    chain = Arm("head", drafter, arm("head", Script([1])).info, is_chain=True)
    outcomes = bench(target, [chain, arm("script", Script([1]))], suite([0, 3], max_new_tokens=12))
    with_head, scripted = (result for result, _ in outcomes)
    assert with_head.tau_predicted is not None
    assert scripted.tau_predicted is None
    assert "predicted by teacher-forced agreement" in markdown(content([with_head]))
    assert "predicted by teacher-forced agreement" not in markdown(content([scripted]))
