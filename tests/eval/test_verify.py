"""The tensor verifier: its laws by chi-square, and the cases that break verifiers."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from headstart.eval.engine.sampling import (
    ACCEPT,
    DRAFT,
    VERIFY,
    SamplingConfig,
    draw,
    processed_probs,
    sample_without_replacement,
    uniforms,
)
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.eval.engine.verify import Verdict, verify_draw, verify_greedy, verify_ratio

ROWS = 20_000
BOUND = 31  # chi-square with 3 degrees of freedom, p about 1e-6
P = torch.tensor([2.0, 6.0, 6.0, 1.0]) / 15
Q = torch.tensor([8.0, 4.0, 1.0, 9.0]) / 22
TARGET = torch.stack([P, P[[1, 0, 3, 2]], P[[2, 3, 0, 1]], torch.tensor([0.4, 0.3, 0.2, 0.1])])
NEAR = torch.tensor([0.1, 0.45, 0.25, 0.2])
DRAFTER = torch.stack([NEAR, Q[[2, 1, 0, 3]], Q[[3, 2, 1, 0]], torch.tensor([0.1, 0.0, 0.6, 0.3])])
PAIRS = [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
CHAIN = TreeShape.chain


def _chi_square(ids: Tensor, law: Tensor) -> float:
    counts = ids.bincount(minlength=len(law)).double()
    assert (counts[law == 0] == 0).all()
    expected = law.double()[law > 0] * len(ids)
    return float(((counts[law > 0] - expected) ** 2 / expected).sum())


def _grow(shape: TreeShape, scheme: str, drafter_VV: Tensor, rows: int = ROWS) -> DraftTree:
    """Draft a tree from a drafter that knows only the last token; the root is token 0."""
    B, V = rows, drafter_VV.shape[-1]
    tokens_BN = torch.zeros(B, shape.num_nodes, dtype=torch.int64)
    q_BNV = torch.zeros(B, shape.num_nodes, V)
    for node, children in enumerate(shape.children_NC.tolist()):
        children = [child for child in children if child >= 0]
        q_BNV[:, node] = drafter_VV[tokens_BN[:, node].clamp(min=0)]
        if children:
            tokens_BN[:, children] = _children(scheme, q_BNV[:, node], node, len(children))
    tree = shape.fill(tokens_BN, q_BNV)
    tree = tree.merge_repeats() if scheme == "d" else tree
    tree.check()
    return tree


def _children(scheme: str, q_BV: Tensor, node: int, k: int) -> Tensor:
    B, V = q_BV.shape
    prompts_B, node_B1 = torch.arange(B), torch.full((B, 1), node)
    if scheme == "b":
        return q_BV.topk(k).indices
    if scheme == "d":
        noise_BK = uniforms(7, prompts_B, node_B1, DRAFT, torch.arange(k))
        return draw(q_BV[:, None].expand(-1, k, -1), noise_BK)
    noise_BV = uniforms(7, prompts_B, node_B1, DRAFT, torch.arange(V))
    return sample_without_replacement(q_BV, noise_BV, k)


def _verify(tree: DraftTree, scheme: str, probs_BNV: Tensor) -> Verdict:
    prompts_B, position_BN = torch.arange(len(probs_BNV)), 5 + tree.depth_BN
    final_BN = uniforms(7, prompts_B, position_BN, VERIFY)
    if scheme in ("a1", "b", "c1"):
        return verify_draw(tree, probs_BNV, final_BN)
    tries_C = torch.arange(tree.children_BNC.shape[-1])
    accept_BNC = uniforms(7, prompts_B, position_BN[..., None], ACCEPT, tries_C)
    return verify_ratio(tree, probs_BNV, accept_BNC, final_BN, replacement=scheme == "d")


def _emitted(tree: DraftTree, verdict: Verdict) -> Tensor:
    """Return the tokens of the round, [B, K], the added one last, padded with -1."""
    path_BK, accepted_B1 = verdict.path_BK, verdict.accepted_B[:, None]
    drafted = tree.tokens_BN.gather(1, path_BK.clamp(min=0)).masked_fill(path_BK < 0, -1)
    emitted = torch.cat([drafted[:, 1:], torch.full_like(accepted_B1, -1)], 1)
    return emitted.scatter(1, accepted_B1, verdict.next_B[:, None])


def _target_probs(tree: DraftTree, target_VV: Tensor) -> Tensor:
    return target_VV[tree.tokens_BN.clamp(min=0)]


CONFIGS = [
    SamplingConfig(temperature=0.3),
    SamplingConfig(temperature=1.0),
    SamplingConfig(temperature=1.0, top_p=0.85),
]
SHAPES = {
    "a": [[0]],
    "a1": [[0]],
    "b": [[0], [1], [2]],
    "c": [[0], [1], [2]],
    "c1": [[0], [1], [2]],
    "d": [[0], [1], [2]],
}


@pytest.mark.parametrize("config", CONFIGS, ids=["cool", "plain", "top_p"])
@pytest.mark.parametrize("scheme", SHAPES)
def test_p41_the_emitted_token_has_the_processed_law(scheme: str, config: SamplingConfig) -> None:
    law = processed_probs(P.log(), config)
    tree = _grow(TreeShape.from_choices(SHAPES[scheme]), scheme, Q.expand(4, -1))
    verdict = _verify(tree, scheme, law.expand(ROWS, tree.tokens_BN.shape[1], -1))
    assert _chi_square(_emitted(tree, verdict)[:, 0], law) < BOUND


@pytest.mark.parametrize(
    ("scheme", "accepted"), [("a", 47 / 110), ("c", 19 / 25), ("d", 35033 / 53240), ("b", 3 / 5)]
)
def test_children_are_accepted_as_often_as_enumeration_says(scheme: str, accepted: float) -> None:
    tree = _grow(TreeShape.from_choices(SHAPES[scheme]), scheme, Q.expand(4, -1))
    verdict = _verify(tree, scheme, P.expand(ROWS, tree.tokens_BN.shape[1], -1))
    assert verdict.accepted_B.double().mean() == pytest.approx(accepted, abs=0.018)  # 5 sigma


@pytest.mark.parametrize("config", CONFIGS, ids=["cool", "plain", "top_p"])
@pytest.mark.parametrize("scheme", ["a", "b", "c", "d"])
def test_the_second_token_of_a_tree_has_the_law_of_its_path(
    scheme: str, config: SamplingConfig
) -> None:
    target_VV = processed_probs(TARGET.log(), config)
    tree = _grow(CHAIN(2) if scheme == "a" else TreeShape.from_choices(PAIRS), scheme, DRAFTER)
    verdict = _verify(tree, scheme, _target_probs(tree, target_VV))
    emitted = _emitted(tree, verdict)
    assert _chi_square(emitted[:, 0], target_VV[0]) < BOUND
    first = int(emitted[verdict.accepted_B > 0, 0].mode().values)
    second = emitted[(verdict.accepted_B > 0) & (emitted[:, 0] == first), 1]
    assert len(second) > 1000
    assert _chi_square(second, target_VV[first]) < BOUND


@pytest.mark.parametrize("scheme", ["a", "b"])
def test_the_bonus_after_an_oracle_has_the_tempered_law(scheme: str) -> None:
    law = processed_probs(P.log(), SamplingConfig(temperature=0.3))
    if scheme == "a":
        tree = _grow(CHAIN(2), "a", law.expand(4, -1))
    else:
        tree = _grow(TreeShape.from_choices([[i] for i in range(4)]), "b", Q.expand(4, -1))
    verdict = _verify(tree, scheme, law.expand(ROWS, tree.tokens_BN.shape[1], -1))
    assert (verdict.accepted_B == tree.max_depth).all()
    assert verdict.stopped_at_leaf_B.all()
    assert _chi_square(verdict.next_B, law) < BOUND


def test_p42_first_verified_and_bonus_tokens_are_tempered_alike() -> None:
    """The MARKOV row (.6, .3, .1) at T 0.5 is (.783, .196, .022) wherever a token is emitted."""
    row = torch.tensor([0.6, 0.3, 0.1] + [1e-9] * 5)
    law = processed_probs(row.log(), SamplingConfig(temperature=0.5))
    rows = 100_000
    tree = _grow(CHAIN(1), "a", law.expand(8, -1), rows)
    verdict = _verify(tree, "a", law.expand(rows, 2, -1))
    plain = TreeShape.root_only().fill(torch.zeros(rows, 1, dtype=torch.int64))
    first = _verify(plain, "b", law.expand(rows, 1, -1)).next_B
    assert (verdict.accepted_B == 1).all()
    for ids in (first, tree.tokens_BN[:, 1], verdict.next_B):
        shares = ids.bincount(minlength=8) / rows
        assert shares[:3].tolist() == pytest.approx([0.783, 0.196, 0.022], abs=0.005)


@pytest.mark.parametrize(("choices", "k"), [([[0]], 1), (PAIRS, 2), ([[0], [1], [0, 0]], 2)])
@pytest.mark.parametrize("sampled", [False, True])
def test_drafts_that_were_not_drawn_leave_the_tokens_of_plain_decoding_as_they_are(
    choices: list, k: int, sampled: bool
) -> None:
    rows = 500
    target_VV = processed_probs(
        TARGET.log().double(), SamplingConfig(temperature=1.0 if sampled else 0.0)
    )
    tree = _grow(TreeShape.from_choices(choices), "b", DRAFTER, rows)
    verdict = _verify(tree, "b", _target_probs(tree, target_VV))
    emitted = _emitted(tree, verdict)
    last = torch.zeros(rows, dtype=torch.int64)
    for i in range(emitted.shape[1]):
        uniform = uniforms(7, torch.arange(rows), torch.full((rows,), 5 + i), VERIFY)
        last = draw(target_VV[last], uniform)
        here = emitted[:, i] >= 0
        assert torch.equal(emitted[here, i], last[here])


def test_a_token_of_target_probability_zero_is_never_accepted() -> None:
    q_BNV = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]])
    tree = CHAIN(1).fill(torch.tensor([[0, 1]]), q_BNV)
    zeros = torch.zeros(1, 2, 1, dtype=torch.float64)
    probs = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])
    verdict = verify_ratio(tree, probs, zeros, zeros[..., 0], replacement=False)
    assert verdict.accepted_B.tolist() == [0]
    assert verdict.next_B.tolist() == [0]
    assert verify_draw(tree, probs, zeros[..., 0]).accepted_B.tolist() == [0]


def test_a_rejection_that_leaves_nothing_counts_as_accepted() -> None:
    """p a rounding error below q everywhere: the ratio is just under 1, the residual empty."""
    p = torch.full((1, 2, 2), 0.5 - 2.0**-40, dtype=torch.float64)
    tree = CHAIN(1).fill(torch.tensor([[0, 1]]), torch.full((1, 2, 2), 0.5, dtype=torch.float64))
    almost_1 = torch.full((1, 2, 1), 1 - 2.0**-53, dtype=torch.float64)
    verdict = verify_ratio(tree, p, almost_1, almost_1[..., 0], replacement=False)
    assert verdict.accepted_B.tolist() == [1]
    assert verdict.next_B.tolist() == [1]


def test_nothing_left_does_not_accept_a_token_of_target_probability_zero() -> None:
    """q gives the child 2**-60: too little to leave a residual elsewhere, yet p forbids it."""
    q_BNV = torch.tensor([2.0**-60, 1.0], dtype=torch.float64).expand(1, 2, -1)
    tree = CHAIN(1).fill(torch.tensor([[1, 0]]), q_BNV)
    zeros = torch.zeros(1, 2, 1, dtype=torch.float64)
    probs = torch.tensor([0.0, 1.0]).expand(1, 2, -1)
    verdict = verify_ratio(tree, probs, zeros, zeros[..., 0], replacement=False)
    assert (verdict.accepted_B.tolist(), verdict.next_B.tolist()) == ([0], [1])


def _try_first_then_2(first: int, absent_between: bool) -> Verdict:
    """Verify drawn children `first` and 2; q is (8, 1, 9, 4) / 22, p forbids the first."""
    shape = TreeShape.from_choices([[0], [1], [2]] if absent_between else [[0], [1]])
    tokens = [first, first, -1, 2] if absent_between else [first, first, 2]
    tries = [0, 1, 2] if absent_between else [0, 2]
    swap = [0, 1, 2, 3] if first == 0 else [1, 0, 2, 3]
    q_BNV = (torch.tensor([8.0, 1.0, 9.0, 4.0]) / 22)[swap].expand(50, shape.num_nodes, -1)
    probs_BNV = torch.tensor([0.0, 0.3, 0.6, 0.1])[swap].expand(50, shape.num_nodes, -1)
    uniform = torch.rand(50, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uniform = uniform.expand(-1, shape.num_nodes, -1)
    tree = shape.fill(torch.tensor([tokens] * 50), q_BNV)
    return verify_ratio(tree, probs_BNV, uniform[..., tries], uniform[..., 0], replacement=False)


@pytest.mark.parametrize("first", [0, 1])
def test_an_absent_child_between_others_is_passed_over(first: int) -> None:
    without = _try_first_then_2(first, absent_between=False)
    between = _try_first_then_2(first, absent_between=True)
    assert 0 < without.accepted_B.sum() < 50
    assert torch.equal(between.accepted_B, without.accepted_B)
    assert torch.equal(between.next_B, without.next_B)


def test_the_last_of_a_draft_vocabulary_can_be_rejected() -> None:
    """All of q's support is tried and refused: the correction comes from outside it."""
    q = torch.tensor([0.5, 0.5, 0.0])
    tree = TreeShape.from_choices([[0], [1], [2]]).fill(
        torch.tensor([[2, 0, 1, -1]]), q.expand(1, 4, -1)
    )
    tree.check()
    high = torch.full((1, 4, 3), 0.99, dtype=torch.float64)
    probs = torch.tensor([0.25, 0.25, 0.5]).expand(1, 4, -1)
    verdict = verify_ratio(tree, probs, high, high[..., 0], replacement=False)
    assert verdict.accepted_B.tolist() == [0]
    assert verdict.next_B.tolist() == [2]
    assert verdict.stopped_at_leaf_B.tolist() == [False]


def _p43_trees() -> list[DraftTree]:
    shape = TreeShape.from_choices([[0], [1], [1, 0]])
    tree = shape.fill(torch.tensor([[0, 5, 6, 7], [0, 5, -1, 7], [0, -1, -1, -1]]))
    dynamic = DraftTree.from_parents(
        torch.tensor([[0, 5, 6, 7], [0, 5, -1, -1]]),
        torch.tensor([[-1, 0, 0, 2], [-1, 0, 0, 0]]),
        max_depth=2,
        max_children=2,
    )
    return [tree, dynamic, CHAIN(1).fill(torch.tensor([[0, 5]]))]


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("rule", ["greedy", "draw"])
def test_p43_padding_is_not_accepted_where_the_argmax_is_token_0(index: int, rule: str) -> None:
    tree = _p43_trees()[index]
    tree.check()
    best_BN = torch.zeros_like(tree.tokens_BN)
    if rule == "greedy":
        verdict = verify_greedy(tree, best_BN)
    else:
        one_hot = torch.nn.functional.one_hot(best_BN, 8).float()
        verdict = verify_draw(tree, one_hot, torch.zeros(best_BN.shape, dtype=torch.float64))
    assert (verdict.accepted_B == 0).all()
    assert (verdict.next_B == 0).all()
    assert (verdict.path_BK[:, 0] == 0).all()
    assert (verdict.path_BK[:, 1:] == -1).all()


def test_p43_the_ratio_rule_tries_no_padding() -> None:
    tree = _p43_trees()[0]
    q_BNV = torch.full((3, 4, 8), 1 / 8)
    tree = TreeShape.from_choices([[0], [1], [1, 0]]).fill(tree.tokens_BN, q_BNV)
    probs = torch.zeros(3, 4, 8).index_fill(-1, torch.tensor([0]), 1.0)
    zeros = torch.zeros(3, 4, 2, dtype=torch.float64)
    verdict = verify_ratio(tree, probs, zeros, zeros[..., 0], replacement=False)
    assert (verdict.accepted_B == 0).all()
    assert (verdict.next_B == 0).all()
    assert verdict.stopped_at_leaf_B.tolist() == [False, False, True]


def test_greedy_follows_the_branch_the_target_takes() -> None:
    shape = TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    tree = shape.fill(torch.tensor([[9, 1, 2, 3, 4, 5, 6]] * 4))
    best_BN = torch.tensor(
        [
            [1, 3, 0, 6, 0, 0, 8],  # 0-1-3-6, a leaf
            [1, 4, 0, 0, 7, 0, 0],  # 0-1-4, a leaf of less depth
            [2, 0, 9, 0, 0, 0, 0],  # 0-2, then the child is rejected
            [3, 3, 3, 3, 3, 3, 3],  # 3 is a token of the tree but no child of the root
        ]
    )
    verdict = verify_greedy(tree, best_BN)
    assert verdict.path_BK.tolist() == [
        [0, 1, 3, 6],
        [0, 1, 4, -1],
        [0, 2, -1, -1],
        [0, -1, -1, -1],
    ]
    assert verdict.accepted_B.tolist() == [3, 2, 1, 0]
    assert verdict.next_B.tolist() == [8, 7, 9, 3]
    assert verdict.stopped_at_leaf_B.tolist() == [True, True, False, False]


def test_greedy_ties_go_to_the_lowest_id_in_drafted_and_plain_decoding() -> None:
    logits_BNV = torch.tensor([[[1.0, 7.0, 7.0, 0.0], [2.0, 2.0, 2.0, 2.0]]])
    tree = TreeShape.from_choices([[0]]).fill(torch.tensor([[3, 2]]))
    probs_BNV = processed_probs(logits_BNV, SamplingConfig())
    drawn = verify_draw(tree, probs_BNV, torch.full((1, 2), 0.999, dtype=torch.float64))
    greedy = verify_greedy(tree, logits_BNV.argmax(-1))
    assert drawn.next_B.tolist() == greedy.next_B.tolist() == [1]
    right = tree.tokens_BN.clone().index_fill(1, torch.tensor([1]), 1)
    verdict = verify_greedy(CHAIN(1).fill(right), logits_BNV.argmax(-1))
    assert (verdict.accepted_B.tolist(), verdict.next_B.tolist()) == ([1], [0])


def test_a_depth_limit_ends_the_walk_at_a_leaf() -> None:
    tree = CHAIN(3).fill(torch.tensor([[1, 2, 3, 4]] * 3))
    best_BN = torch.tensor([[2, 3, 4, 5]] * 3)
    verdict = verify_greedy(tree.limit_depth(torch.tensor([0, 1, 3])), best_BN)
    assert verdict.accepted_B.tolist() == [0, 1, 3]
    assert verdict.next_B.tolist() == [2, 3, 5]
    assert verdict.stopped_at_leaf_B.all()


def test_a_law_that_is_not_a_number_gives_no_token() -> None:
    probs, half = torch.full((1, 2, 2), torch.nan), torch.full((1, 2, 1), 0.5).double()
    for child in (1, -1):
        tree = CHAIN(1).fill(torch.tensor([[0, child]]), torch.full((1, 2, 2), 0.5))
        for verdict in (
            verify_draw(tree, probs, half[..., 0]),
            verify_ratio(tree, probs, half, half[..., 0], replacement=False),
        ):
            assert (verdict.accepted_B.tolist(), verdict.next_B.tolist()) == ([0], [-1])


@pytest.mark.parametrize("scheme", ["b", "c", "d"])
def test_a_row_alone_gives_what_it_gives_in_a_batch(scheme: str) -> None:
    tree = _grow(TreeShape.from_choices(PAIRS), scheme, DRAFTER, 40)
    tree = tree.limit_depth(torch.arange(40) % 3)
    probs_BNV = _target_probs(tree, TARGET)
    generator = torch.Generator().manual_seed(0)
    accept_BNC = torch.rand(40, 7, 2, generator=generator, dtype=torch.float64)
    final_BN = torch.rand(40, 7, generator=generator, dtype=torch.float64)

    def verdict(rows: slice) -> Verdict:
        part = DraftTree(
            **{
                field.name: value[rows] if isinstance(value, Tensor) else value
                for field in fields(tree)
                for value in [getattr(tree, field.name)]
            }
        )
        if scheme == "b":
            return verify_draw(part, probs_BNV[rows], final_BN[rows])
        return verify_ratio(
            part, probs_BNV[rows], accept_BNC[rows], final_BN[rows], replacement=scheme == "d"
        )

    together = verdict(slice(None))
    for row in range(40):
        alone = verdict(slice(row, row + 1))
        for field in fields(Verdict):
            whole = getattr(together, field.name)[row : row + 1]
            assert torch.equal(getattr(alone, field.name), whole)
