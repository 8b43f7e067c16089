"""Acceptance collected from every place: known exactly, and all that decoding with any tree tells.

Shapes: B rows, K draft depth, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import (
    cycle,
    make_head,
    markov,
    markov_head,
    requests,
    run,
    some_vocab,
    target_of,
    tiny_model,
    tokens_of,
)

from headstart.eval.acceptance import (
    FAR,
    UNKNOWN,
    Acceptance,
    TruePath,
    collect,
    true_nodes,
    value_orders,
)
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.build import head_drafter
from headstart.eval.engine.dynamic_tree import Candidates, best_first
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree_config import TreeConfig
from headstart.eval.tree_search import orders, replay
from headstart.heads.base import DraftHead
from headstart.heads.target import Target, pick_features

GREEDY = SamplingConfig()
GOLDEN = [[0.1, 0.6, 0.2, 0.1], [0.05, 0.05, 0.8, 0.1], [0.5, 0.3, 0.1, 0.1], [0.4, 0.1, 0.1, 0.4]]
LAWS = torch.rand(8, 8, generator=torch.Generator().manual_seed(1)) ** 3 + 0.02
CHAIN = TreeConfig("chain", depth=3)
STATIC = TreeConfig("static", choices=[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2, 1]])
DYNAMIC = TreeConfig("dynamic", top_k=4, levels=3, total=9)
NARROW = TreeConfig("narrow", top_k=2, levels=2, total=5)


def _oracle_medusa(target: Target) -> DraftHead:
    """Return the Medusa head that drafts CYCLE's text, every depth with certainty."""
    head = make_head("medusa", target, seed=None, num_heads=3, readout="own")
    with torch.no_grad():
        for k in range(3):
            # The state of token i points along it; head k says the token 2 + k places on.
            head.lm_heads_KWD[k] = 10 * torch.eye(8).roll(2 + k, dims=0)
    return head


def _answers(
    target: Target, prompts: Sequence[Request], sampling: SamplingConfig = GREEDY
) -> list[list[int]]:
    plain = tokens_of(run(target, None, prompts, sampling=sampling))
    return [plain[request.prompt_id] for request in prompts]


# What is known exactly.


@pytest.mark.parametrize("family", ["medusa", "eagle"])
def test_on_a_cycle_the_exact_heads_best_token_is_the_targets_at_every_place(family: str) -> None:
    target = target_of(cycle())
    head = _oracle_medusa(target) if family == "medusa" else markov_head(target)
    prompts = [Request(f"p{i}", (i,), 6 + i) for i in range(4)]
    grown = () if family == "medusa" else (2,)
    found = collect(target, head, prompts, _answers(target, prompts), depth=3, ranks=4, top_k=grown)
    assert found.lengths == [5, 6, 7, 8]
    assert found.num_places == 26
    known = found.ranks_PK != UNKNOWN
    assert (found.ranks_PK[known] == 0).all()
    assert known.sum(0).tolist() == [26, 22, 18]  # each answer's last places know less
    for of_levels in found.dynamic_PLK.values():
        assert (of_levels[:, 2][known.all(1)] == [0, 1, 2]).all()


def test_on_a_markov_text_every_rank_is_the_tokens_place_in_the_heads_row() -> None:
    """After token i the head drafts by the target's row of token i + 3."""
    target = target_of(markov(LAWS.tolist()))
    head = markov_head(target)
    with torch.no_grad():
        head.fc.weight.copy_(head.fc.weight.roll(3, dims=0))
    prompts = [Request(f"p{i}", (i,), 9) for i in range(8)]
    answers = _answers(target, prompts)
    found = collect(target, head, prompts, answers, depth=3, ranks=8)
    place_VV = (-LAWS.roll(-3, dims=0)).argsort(dim=1, stable=True).argsort(dim=1)
    rows = iter(found.ranks_PK.tolist())
    for answer in answers:
        for start in range(len(answer) - 1):
            path = answer[start : start + 4]
            want = [int(place_VV[a, b]) for a, b in zip(path, path[1:], strict=False)]
            assert next(rows) == want + [UNKNOWN] * (3 - len(want))


def test_tokens_outside_the_draft_vocabulary_or_beyond_the_ranks_kept_are_none() -> None:
    target = target_of(tiny_model())
    head = make_head("eagle", target, vocab=some_vocab(32))
    prompts = requests(4, 12)
    answers = _answers(target, prompts)
    ranks = collect(target, head, prompts, answers, depth=1, ranks=32).ranks_PK[:, 0]
    emitted = [token for answer in answers for token in answer[1:]]
    assert [rank == 32 for rank in ranks] == [t % 4 != 1 for t in emitted]
    few = collect(target, head, prompts, answers, depth=1, ranks=3).ranks_PK[:, 0]
    assert few.tolist() == [min(rank, 3) for rank in ranks]


def test_the_heads_values_are_counted_with_what_the_target_took() -> None:
    """GOLDEN drafts for itself: the target's greedy path is its best child at every place."""
    target = target_of(markov(torch.block_diag(*[torch.tensor(GOLDEN)] * 2).tolist()))
    prompts = [Request("p", (0,), 5)]
    answers = _answers(target, prompts)
    assert answers == [[1, 2, 0, 1, 2]]
    table = collect(
        target, markov_head(target), prompts, answers, depth=2, ranks=4, top_k=(2,)
    ).calibration
    assert sum(table.taken) == 3 * 2 + 1  # the last of four places knows one level
    assert sum(table.candidates) == 3 * 6 + 2
    known = _two_best([1, 2, 0], levels=2) + _two_best([1], levels=1)
    assert sum(table.promised) == pytest.approx(known, abs=1e-5)


def _two_best(roots: list[int], levels: int) -> float:
    """Return the sum of all values of trees of two children a node below these roots."""
    total = 0.0
    for root in roots:
        children = sorted(enumerate(GOLDEN[root]), key=lambda item: -item[1])[:2]
        total += sum(q for _, q in children)
        if levels == 2:
            total += sum(q * sum(sorted(GOLDEN[token])[-2:]) for token, q in children)
    return total


@pytest.mark.parametrize("family", ["medusa", "hydra_heads", "eagle", "eagle3"])
def test_a_path_that_the_drafter_drafts_has_the_ranks_it_was_drafted_by(family: str) -> None:
    """Every token after the first is ranked by a head that was fed those before it."""
    target = target_of(tiny_model(layers=8))
    options = {"num_heads": 4} if family in ("medusa", "hydra_heads") else {}
    head = make_head(family, target, vocab=some_vocab(64), **options)
    path = (1, 2, 0, 3)
    tree = TreeConfig("path", choices=[list(path[:length]) for length in (1, 2, 3, 4)])
    watchers = [head_drafter(head, target.parts, tree, GREEDY), TruePath(head, target.parts, 4, 5)]
    tokens_BM = torch.randint(128, (3, 6), generator=torch.Generator().manual_seed(0))
    output = target.forward(tokens_BM, taps=head.aux_features)
    features = pick_features(output.hidden_BTD, output.aux, head.aux_features)
    for watcher in watchers:
        watcher.start(3, 16)
        watcher.observe(tokens_BM[:, 1:], features[:, :-1], [5, 5, 5])
    place_B = torch.full((3,), 5)
    drafted = watchers[0].propose(tokens_BM[:, -1], place_B, place_B).tokens_BN[:, 1:]
    assert watchers[1].look(drafted).tolist() == [list(path)] * 3


# Nodes of dynamic trees.


def _candidates() -> Candidates:
    """The golden candidates: 1, 2 | 1-2, 1-3, 2-0, 2-1 | 1-2-0, 1-2-1, 2-0-1, 2-0-2."""
    values = torch.tensor([[0.6, 0.2, 0.48, 0.06, 0.1, 0.06, 0.24, 0.144, 0.06, 0.02]])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]])
    return Candidates(torch.tensor([[1, 2, 2, 3, 0, 1, 0, 1, 1, 2]]), values.log(), parents)


@pytest.mark.parametrize(
    ("truth", "nodes"),
    [
        ([1, 2, 1], [0, 2, 7]),
        ([2, 0, 3], [1, 4, -1]),
        ([3, 2, 0], [-1] * 3),
        ([1, -1, -1], [0, -1, -1]),
    ],
)
def test_the_targets_path_is_followed_until_a_candidate_is_missing(
    truth: list[int], nodes: list[int]
) -> None:
    assert true_nodes(_candidates(), torch.tensor([truth])).tolist() == [nodes]


def test_orders_are_the_places_by_value_with_ties_to_the_earlier() -> None:
    values = _candidates().log_values_BC
    every = torch.arange(10)[None]
    found = value_orders(values, every)[0]
    assert found[best_first(values, 10)[0]].tolist() == list(range(10))
    assert value_orders(values[:, :6], torch.tensor([[2, 7, -1]])).tolist() == [[1, FAR, FAR]]


# Replayed rounds are the rounds of decoding.

FAMILIES = ["medusa", "hydra_heads", "eagle", "eagle3"]


def _replayed(found: Acceptance, tree: TreeConfig) -> float:
    if tree.total is not None:
        levels = found.dynamic_PLK[tree.top_k][:, tree.levels - 1]
        return replay((levels < tree.total - 1).sum(1).tolist(), found.lengths)
    accepted = (orders(found.ranks_PK, tree.shape().choices) < FAR).sum(1)
    return replay(accepted.tolist(), found.lengths)


@pytest.mark.parametrize(("temperature", "vocab"), [(0.0, None), (0.8, 64)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replay_has_the_tau_of_the_real_drafter_on_the_same_prompts(
    family: str, vocab: int | None, temperature: float
) -> None:
    """fp32: equal for chains, static and dynamic trees, shortened and cut rounds included."""
    target = target_of(tiny_model(layers=8))
    options = {"num_heads": 3} if family in ("medusa", "hydra_heads") else {}
    head = make_head(family, target, seed=None, vocab=vocab and some_vocab(vocab), **options)
    _break_ties(head)
    prompts = requests(6, 24, longest=20)
    sampling = SamplingConfig(temperature=temperature, seed=3)
    answers = _answers(target, prompts, sampling)
    grown = () if family == "medusa" else (2, 4)
    found = collect(target, head, prompts, answers, depth=3, ranks=5, top_k=grown)
    accepted = 0
    for tree in (CHAIN, STATIC) if family == "medusa" else (CHAIN, STATIC, DYNAMIC, NARROW):
        drafter = head_drafter(head, target.parts, tree, sampling)
        done = run(target, drafter, prompts, sampling=sampling)
        assert tokens_of(done) == {r.prompt_id: a for r, a in zip(prompts, answers, strict=True)}
        rounds = [r for c in done.values() for r in c.rounds]
        measured = sum(r.emitted for r in rounds) / len(rounds)
        assert _replayed(found, tree) == measured
        accepted += sum(r.accepted for r in rounds)
    assert accepted > 0


def _break_ties(head: DraftHead) -> None:
    """Shift the starting weights a little: where two values tie, rounding would decide."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.02 * torch.randn(weight.shape, generator=generator))


def test_rows_of_other_lengths_do_not_change_what_a_prompt_has() -> None:
    target = target_of(tiny_model())
    head = make_head("eagle", target, seed=None)
    prompts = [replace(r, max_new_tokens=4 + i) for i, r in enumerate(requests(18, 10))]
    answers = _answers(target, prompts)
    together = collect(target, head, prompts, answers, depth=3, ranks=5, top_k=(3,))
    start = np.cumsum([0, *together.lengths])
    for i in (0, 17):
        alone = collect(target, head, [prompts[i]], [answers[i]], depth=3, ranks=5, top_k=(3,))
        places = slice(start[i], start[i + 1])
        assert (alone.ranks_PK == together.ranks_PK[places]).all()
        assert (alone.dynamic_PLK[3] == together.dynamic_PLK[3][places]).all()


def test_answers_without_a_second_token_leave_nothing_to_draft() -> None:
    target = target_of(cycle())
    with pytest.raises(ValueError, match="every one of 2 answers ended with its first token"):
        collect(
            target,
            markov_head(target),
            [Request("a", (1,), 1), Request("b", (2,), 1)],
            [[2], [3]],
            depth=2,
            ranks=2,
        )
