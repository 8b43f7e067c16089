"""A token budget a pass: shorter drafts, prompts in chunks between rounds, and the same output."""

from dataclasses import dataclass

import pytest
import torch
from models import oracle, requests, tokens_of
from paced import (
    CHAIN,
    GREEDY,
    TREE,
    Watched,
    Whim,
    drafter_of,
    rounds_of,
    run,
)
from scripted import Clock, Script, cycle
from torch import Tensor

from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.base import Drafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.policy import fair_shares
from headstart.eval.engine.prefill import of_like_length, within
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import DraftTree
from headstart.eval.timing import Runner
from headstart.heads.target import Target

SAMPLED = SamplingConfig(temperature=0.8, seed=3)


# The rules


@pytest.mark.parametrize(
    ("wanted", "spare", "shares"),
    [
        ([3, 3, 3], 6, [2, 2, 2]),
        ([3, 3, 3], 7, [3, 2, 2]),
        ([5, 1, 5], 8, [4, 1, 3]),
        ([2, 0, 2], 99, [2, 0, 2]),
        ([4, 4], 0, [0, 0]),
        ([], 3, []),
    ],
)
def test_spare_tokens_go_round_and_what_one_row_leaves_goes_to_the_others(wanted, spare, shares):
    assert fair_shares(wanted, spare) == shares


def test_what_a_row_gets_depends_on_its_own_wish_by_nothing_but_the_wish():
    """So whether a drawn token is verified never depends on it or on later ones."""
    for own in range(8):
        for spare in range(20):
            most = fair_shares([4, 99, 2], spare)[1]
            assert fair_shares([4, own, 2], spare)[1] == min(own, most)


@pytest.mark.parametrize(
    ("lengths", "budget", "groups"),
    [
        ([3, 3, 3, 3], 7, [[0, 1], [2, 3]]),
        ([2, 9, 2, 2], 8, [[0], [1], [2, 3]]),
        ([30], 8, [[0]]),
        ([4, 1], 8, [[0, 1]]),
        ([4, 1], 7, [[0], [1]]),
    ],
)
def test_prompts_are_read_together_where_one_pass_holds_them_with_their_padding(
    lengths, budget, groups
):
    assert within(lengths, budget) == groups


def test_without_a_budget_prompts_of_like_length_are_read_together():
    assert of_like_length([10, 100, 11, 90]) == [[0, 2], [3, 1]]


# What a pass reads


@dataclass
class Pass:
    """One pass of the target: how many tokens it read, and whether it was a round."""

    tokens: int
    is_round: bool
    slots: tuple[int, ...] = ()


@pytest.fixture
def passes(tiny: Target, monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    found, pass_over = [], tiny.pass_over

    def spy(tokens_RN: Tensor, *arguments, rows=None, **options):
        # Padding of a prompt counts: it is token 0; absent nodes, which hold -1, do not.
        tokens = int((tokens_RN >= 0).sum())
        found.append(Pass(tokens, rows is None, tuple(rows or ())))
        return pass_over(tokens_RN, *arguments, rows=rows, **options)

    monkeypatch.setattr(tiny, "pass_over", spy)
    return found


def mixed_prompts(new: int = 12) -> list[Request]:
    """Prompts of 1 to 40 tokens, answers of 1 to `new`."""
    lengths = (3, 40, 1, 17, 5, 29, 8, 2, 33)
    limits = (new, 7, 1, new, 9, 2, 3, 5, new)
    return [
        Request(f"p{i}", tuple((7 * i + 3 * t) % 128 for t in range(n)), limit)
        for i, (n, limit) in enumerate(zip(lengths, limits, strict=True))
    ]


def drafters(
    target: Target, prompts: list[Request], sampling: SamplingConfig
) -> dict[str, Drafter]:
    return {
        "none": None,
        "oracle": oracle(target, prompts, 5, sampling),
        "chain": drafter_of(target, "eagle", CHAIN(4), sampling),
        "tree": drafter_of(target, "hydra_heads", TREE, sampling, num_heads=3),
        "dynamic": drafter_of(target, "eagle3", DynamicShape(2, 3, 6), sampling),
    }


NAMES = ("none", "oracle", "chain", "tree", "dynamic")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_no_pass_reads_more_than_the_budget_and_the_text_stays_the_same(
    tiny, passes, name, batch_size, sampling
):
    prompts = mixed_prompts()
    want = tokens_of(run(tiny, None, prompts, sampling=sampling, batch_size=batch_size))
    drafter = drafters(tiny, prompts, sampling)[name]
    for budget in (4, 9):
        passes.clear()
        options = {"sampling": sampling, "batch_size": batch_size, "max_pass_tokens": budget}
        done = run(tiny, drafter, prompts, **options)
        assert tokens_of(done) == want
        assert max(p.tokens for p in passes) <= budget
        assert all(len(c.token_ids) == 1 + sum(r.emitted for r in c.rounds) for c in done.values())


def test_a_budget_and_a_policy_that_changes_its_mind_go_together(tiny, passes):
    prompts = mixed_prompts()
    want = tokens_of(run(tiny, None, prompts))
    passes.clear()
    drafter = drafter_of(tiny, "eagle3", TREE)
    for seed in range(3):
        assert tokens_of(run(tiny, drafter, prompts, policy=Whim(seed), max_pass_tokens=9)) == want
    assert max(p.tokens for p in passes) <= 9


def test_rows_that_run_go_on_between_the_chunks_of_a_long_prompt(tiny, passes):
    prompts = [
        Request("runs", (1, 2, 3), 30),
        Request("ends", (4, 5), 2),
        Request("long", tuple(range(40)), 5),
    ]
    alone = {r.prompt_id: run(tiny, None, [r])[r.prompt_id].token_ids for r in prompts}
    passes.clear()
    done = run(tiny, None, prompts, batch_size=2, max_pass_tokens=8)
    assert tokens_of(done) == dict(sorted(alone.items()))
    first = next(i for i, p in enumerate(passes) if p.tokens == 8)
    assert [p.is_round for p in passes[first : first + 9]] == [False, True] * 4 + [False]
    assert [p.tokens for p in passes[first : first + 9]] == [8, 1] * 4 + [8]


def test_a_row_may_end_and_another_move_while_a_long_prompt_is_read(tiny, passes):
    """The prompt is read in the last slot, and joins behind the rows that are left."""
    prompts = [
        Request("a", (1, 2, 3), 4),
        Request("b", (9, 8), 40),
        Request("ends", (4, 5), 2),
        Request("long", tuple(range(3, 60)), 9),
    ]
    alone = {r.prompt_id: run(tiny, None, [r])[r.prompt_id].token_ids for r in prompts}
    for drafter in (None, drafter_of(tiny, "eagle", TREE), oracle(tiny, prompts, 3)):
        passes.clear()
        done = run(tiny, drafter, prompts, batch_size=3, max_pass_tokens=6)
        assert tokens_of(done) == dict(sorted(alone.items()))
        assert {p.slots for p in passes if len(p.slots) == 1} >= {(2,)}


def test_a_drafter_drafts_the_same_after_a_prompt_read_in_chunks(tiny):
    prompts = mixed_prompts()
    whole, part = (Watched(drafter_of(tiny, "eagle", CHAIN(3))) for _ in range(2))
    run(tiny, whole, prompts, batch_size=3)
    run(tiny, part, prompts, batch_size=3, max_pass_tokens=7)
    both = part.drafts.keys() & whole.drafts.keys()
    assert len(both) > 30
    for place in both:
        assert part.drafts[place] == whole.drafts[place][: len(part.drafts[place])]


def test_drafts_share_the_budget_fairly(tiny):
    prompts = [Request(f"p{i}", (i + 1, 5), 25) for i in range(3)]
    done = run(tiny, oracle(tiny, prompts, 5), prompts, batch_size=3, max_pass_tokens=9)
    together = [r for r in rounds_of(done) if r.rows == 3][:9]
    assert {r.drafted for r in together} == {2}


def test_a_tree_keeps_its_first_nodes(tiny):
    prompts = requests(2, 12)
    drafter = Watched(drafter_of(tiny, "eagle", TREE))
    done = run(tiny, drafter, prompts, batch_size=2, max_pass_tokens=8)
    assert max(r.drafted for r in rounds_of(done) if r.rows == 2) == 3
    tree = TREE.fill(torch.arange(18).view(2, 9))
    kept = tree.limit_nodes(torch.tensor([4, 0]))
    kept.check()
    assert kept.tokens_BN.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1, -1], [9, *[-1] * 8]]


def test_a_trimmed_tree_is_a_sound_tree_of_the_nodes_that_some_row_has():
    tokens_BN = torch.arange(18).view(2, 9)
    tree = TREE.fill(tokens_BN, torch.full((2, 9, 20), 0.05))
    tree = tree.limit_depth(torch.tensor([2, 1])).trimmed()
    tree.check()
    assert tree.tokens_BN.shape == (2, 7)
    assert tree.draft_probs_BNV.shape == (2, 7, 20)
    assert isinstance(tree, DraftTree)
    whole = TREE.fill(tokens_BN)
    assert whole.trimmed() is whole


def test_a_budget_below_the_rows_is_refused(tiny):
    with pytest.raises(ValueError, match="max_pass_tokens=3: a batch of 4 rows verifies at least"):
        run(tiny, None, requests(4, 5), max_pass_tokens=3)


def test_a_group_whose_rows_begin_apart_shares_each_round_among_those_in_it(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("headstart.eval.engine.decode.time", clock)
    made = []

    def second() -> None:
        clock.now += 1.0
        made.append(1)

    target = cycle()
    runner = Runner(target, GREEDY, (), 3, max_pass_tokens=4)
    group = [Request(f"p{i}", (1,) * n, 25) for i, n in enumerate((2, 11, 3))]
    done = runner.decode(Script([1, 2], on_propose=second), group)
    rounds = rounds_of({c.prompt_id: c for c in done})
    assert sum(r.t_draft for r in rounds) == pytest.approx(len(made), abs=0.1)
    assert {r.rows for r in rounds} == {1, 2, 3}
    wall = max(c.latency for c in done)
    assert sum(c.seconds for c in done) == pytest.approx(wall)
    assert wall == pytest.approx(len(made), abs=0.5)
