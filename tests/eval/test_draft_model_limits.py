"""A draft model under limits: every policy leaves the output alone, and its cache stays right."""

import math

import pytest
import torch
from laws import LAWS, PROCESSORS, chi_square_of_answers
from models import markov, requests, target_of, tiny_model, tokens_of
from paced import GREEDY, POLICIES, Watched, Whim, rounds_of, run
from torch import Tensor

from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.base import FULL, DraftLimit
from headstart.eval.engine.drafters.draft_model import ModelDrafter
from headstart.eval.engine.drafters.head import best_log_prob
from headstart.eval.engine.policy import DraftPolicy, SurvivalPolicy
from headstart.eval.engine.sampling import SamplingConfig, processed_probs, prompt_key
from headstart.eval.engine.tree import DraftTree
from headstart.heads.target import Target

K = 4
LEAST = 0.003


@pytest.fixture(scope="module")
def model() -> Target:
    return target_of(tiny_model(seed=7, layers=2), name="small")


@pytest.fixture(scope="module")
def prompts() -> list[Request]:
    return requests(5, 12)


@pytest.fixture(scope="module")
def plain(tiny: Target, prompts: list[Request]) -> dict[str, list[int]]:
    return tokens_of(run(tiny, None, prompts))


def drafter_of(
    model: Target, target: Target, sampling: SamplingConfig = GREEDY, tokens: int = K
) -> ModelDrafter:
    return ModelDrafter(model, target, tokens=tokens, sampling=sampling)


# Output


@pytest.mark.parametrize("max_pass_tokens", [None, 9])
@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("policy", POLICIES)
def test_p47_greedy_output_is_the_plain_one_under_every_policy(
    tiny, model, prompts, plain, policy, batch_size, max_pass_tokens
):
    options = {"batch_size": batch_size, "max_pass_tokens": max_pass_tokens}
    done = run(tiny, drafter_of(model, tiny), prompts, policy=POLICIES[policy](), **options)
    assert tokens_of(done) == plain
    assert any(r.drafted > 0 for r in rounds_of(done))


def mixed_model() -> Target:
    """A MARKOV model of other laws than the target's, near enough to be accepted often."""
    return target_of(markov((0.6 * LAWS + 0.4 * LAWS.roll(1, dims=-1)).tolist()))


@pytest.mark.parametrize("policy", [Whim, lambda: SurvivalPolicy(0.1)], ids=["whim", "survival"])
def test_drawn_tokens_keep_the_law_under_a_policy(policy):
    target = target_of(markov(LAWS.tolist()))
    drafter = drafter_of(mixed_model(), target, PROCESSORS, tokens=3)
    asked = [Request(f"p{i}", (5, 3), 4) for i in range(6_000)]
    done = run(target, drafter, asked, policy=policy(), sampling=PROCESSORS, batch_size=1_000)
    assert drafter.scheme == "a"
    assert len({r.depth_max for r in rounds_of(done)}) > 2
    chi_square_of_answers(done, processed_probs(LAWS.log(), PROCESSORS), 3)


# Drafts


def drafted(
    model: Target, target: Target, limit: DraftLimit, sampling: SamplingConfig = GREEDY
) -> DraftTree:
    """Draft for two texts of one length."""
    drafter = drafter_of(model, target, sampling)
    texts_BT = torch.tensor([[5, 77, 3, 41, 9], [8, 8, 120, 2, 60]])
    drafter.start(2, 32)
    for row in range(2):
        drafter.begin(row, int(texts_BT[row, 0]))
    drafter.observe(texts_BT[:, 1:], torch.zeros(2, 4, 32), [4, 4])
    tree = drafter.propose_within(texts_BT[:, -1], torch.tensor([4, 4]), torch.arange(2), limit)
    tree.check()
    return tree


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_limited_draft_is_the_beginning_of_the_whole_one(tiny, model, temperature):
    sampling = SamplingConfig(temperature=temperature, seed=5)
    whole = drafted(model, tiny, FULL, sampling)
    assert torch.equal(drafted(model, tiny, DraftLimit(99), sampling).tokens_BN, whole.tokens_BN)
    for depth in range(K + 1):
        tree = drafted(model, tiny, DraftLimit(depth), sampling)
        assert torch.equal(tree.tokens_BN, whole.tokens_BN[:, : depth + 1])
        if temperature > 0 and depth > 0:
            laws_BNV = tree.draft_probs_BNV
            assert torch.equal(laws_BNV[:, :depth], whole.draft_probs_BNV[:, :depth])


def survived(model: Target, text: list[int], draft: list[int]) -> int:
    """Return how many levels of a whole draft survive, by the model's own law of a whole text."""
    output = model.forward(torch.tensor([[*text, *draft]]))
    logits_KV = model.readout(output.hidden_BTD)[0, len(text) - 1 : -1]
    return int((best_log_prob(logits_KV).cumsum(-1) >= math.log(LEAST)).sum())


def texts_and_drafts(
    target: Target, model: Target, policy: DraftPolicy, prompts: list[Request]
) -> list[tuple[list[int], list[int], int]]:
    """Return the text that each round of a batch stood on, its draft, and how deep it might go."""
    drafter = Watched(drafter_of(model, target))
    done = run(target, drafter, prompts, policy=policy, batch_size=3)  # rows that join and move
    texts = {prompt_key(r.prompt_id): [*r.token_ids, *done[r.prompt_id].token_ids] for r in prompts}
    return [
        (texts[place[0]][: place[1] + 1], [t for t in tokens[1:] if t >= 0], drafter.depths[place])
        for place, tokens in drafter.drafts.items()
    ]


def continued(model: Target, text: list[int], count: int) -> list[int]:
    """Continue a text greedily by the model alone."""
    if count == 0:
        return []
    return run(model, None, [Request("p", tuple(text), count)], batch_size=1)["p"].token_ids


@pytest.mark.parametrize("policy", [Whim(), SurvivalPolicy(LEAST)], ids=["whim", "survival"])
def test_p49_drafts_after_limited_rounds_are_the_models_own_continuation(tiny, model, policy):
    found = texts_and_drafts(tiny, model, policy, requests(5, 30))
    assert len({len(draft) for _, draft, _ in found}) > 2
    assert len(found) > 40
    for text, draft, _ in found[:: len(found) // 30]:
        assert draft == continued(model, text, len(draft))


def test_a_row_drafts_the_levels_that_survive_and_no_more(tiny, model):
    found = texts_and_drafts(tiny, model, SurvivalPolicy(LEAST), requests(5, 30))
    for text, draft, depth in found[:: len(found) // 20]:
        whole = continued(model, text, K)
        assert len(draft) == min(depth, survived(model, text, whole))


def test_p63_past_the_draft_models_own_context_no_policy_drafts(tiny):
    small = target_of(tiny_model(seed=7, layers=2, max_position_embeddings=40))
    asked = [Request(f"p{n}", tuple(i * 7 % 128 for i in range(n)), 20) for n in (32, 50)]
    for policy in ("whim", "survival"):
        done = run(tiny, drafter_of(small, tiny), asked, policy=POLICIES[policy]())
        assert tokens_of(done) == tokens_of(run(tiny, None, asked))
        assert all(r.drafted == 0 for r in done["p50"].rounds)
        assert any(r.drafted > 0 for r in done["p32"].rounds)


# What a limit saves


def passes_of(drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the tokens a row of every pass of the draft model."""
    passes, pass_over = [], drafter.model.pass_over

    def counted(tokens_RN: Tensor, *args: object, **kwargs: object) -> object:
        passes.append(tokens_RN.shape[1])
        return pass_over(tokens_RN, *args, **kwargs)

    monkeypatch.setattr(drafter.model, "pass_over", counted)
    return passes


@pytest.mark.parametrize("depth", range(K + 1))
def test_a_draft_of_so_many_levels_costs_as_many_passes(tiny, model, monkeypatch, depth):
    drafter = drafter_of(model, tiny)
    drafter.start(1, 32)
    drafter.begin(0, 5)
    drafter.observe(torch.tensor([[6, 7]]), torch.zeros(1, 2, 32), [2])
    passes = passes_of(drafter, monkeypatch)
    places = torch.tensor([2]), torch.tensor([0])
    drafter.propose_within(torch.tensor([7]), *places, DraftLimit(depth))
    assert passes == [1] * depth


def test_a_draft_that_no_row_survives_ends_after_the_pass_that_tells(tiny, model, monkeypatch):
    drafter = drafter_of(model, tiny)
    drafter.start(1, 32)
    drafter.begin(0, 5)
    drafter.observe(torch.tensor([[6]]), torch.zeros(1, 1, 32), [1])
    passes = passes_of(drafter, monkeypatch)
    places = torch.tensor([1]), torch.tensor([0])
    tree = drafter.propose_within(torch.tensor([6]), *places, DraftLimit(survival=0.999))
    assert passes == [1]
    assert tree.tokens_BN.tolist() == [[6]]
