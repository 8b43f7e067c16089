"""Tree shapes and drafted trees."""

import pytest
import torch

from headstart.eval.engine.tree import DraftTree, TreeShape

GOLDEN = [[1], [0], [0, 1], [1, 0], [0, 0], [0, 0, 0]]


def _fill(shape: TreeShape, tokens: list[list[int]]) -> DraftTree:
    return shape.fill(torch.tensor(tokens))


def test_p44_golden_choices_give_the_golden_buffers() -> None:
    shape = TreeShape.from_choices(GOLDEN)
    assert shape.parents_N.tolist() == [-1, 0, 0, 1, 1, 2, 3]
    assert shape.ranks_N.tolist() == [-1, 0, 1, 0, 1, 0, 0]
    assert shape.depth_N.tolist() == [0, 1, 1, 2, 2, 2, 3]
    mask = ["".join(str(int(bit)) for bit in row) for row in shape.ancestors_NN]
    assert " ".join(mask) == "1000000 1100000 1010000 1101000 1100100 1010010 1101001"
    assert shape.children_NC.tolist() == [[1, 2], [3, 4], [5, -1], [6, -1]] + [[-1, -1]] * 3
    assert (shape.num_nodes, shape.max_depth, shape.max_rank) == (7, 3, 1)


def test_medusa_tree_indices_follow_from_ranks_and_depth() -> None:
    shape = TreeShape.from_choices(GOLDEN)
    indices_N = shape.ranks_N + 10 * (shape.depth_N - 1) + 1
    assert indices_N[1:].tolist() == [1, 2, 11, 12, 11, 21]


def test_retrieve_paths_follow_from_the_mask() -> None:
    shape = TreeShape.from_choices(GOLDEN)
    leaves = (shape.children_NC < 0).all(-1).nonzero().flatten()
    paths = [shape.ancestors_NN[leaf].nonzero().flatten().tolist() for leaf in leaves]
    assert sorted(paths) == [[0, 1, 3, 6], [0, 1, 4], [0, 2, 5]]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([[0, 1]], r"path \[0, 1\] has no parent; add \[0\]"),
        ([[0], [1], [0]], r"path \[0\] is given twice"),
        ([[0], []], r"path \[\] is not a list of ranks"),
        ([[0], [-1]], r"path \[-1\] is not a list of ranks"),
    ],
)
def test_p44_a_bad_tree_is_an_error_that_names_the_path(choices: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TreeShape.from_choices(choices)


def test_p44_a_tree_deeper_than_the_heads_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^tree.depth=4 but head.num_heads=3: path \[0, 0, 0, 0\] is"
    ):
        TreeShape.chain(4).check(max_depth=3, top_k=10)


def test_p44_a_rank_beyond_top_k_is_refused() -> None:
    shape = TreeShape.from_choices([[0], [12]])
    with pytest.raises(ValueError, match=r"^tree.top_k=10 but path \[12\] asks for rank 12: "):
        shape.check(max_depth=3, top_k=10)
    shape.check(max_depth=1, top_k=13)


def test_a_chain_is_the_tree_with_one_branch() -> None:
    shape = TreeShape.chain(3)
    assert shape.parents_N.tolist() == [-1, 0, 1, 2]
    assert torch.equal(shape.ancestors_NN, torch.ones(4, 4, dtype=torch.bool).tril())
    with pytest.raises(ValueError, match="tree.depth=0"):
        TreeShape.chain(0)


def test_the_root_alone_is_plain_decoding() -> None:
    tree = _fill(TreeShape.root_only(), [[5], [6]])
    tree.check()
    assert tree.num_drafted_B.tolist() == [0, 0]
    assert (tree.max_depth, tree.depth_max_B.tolist()) == (0, [0, 0])


@pytest.mark.parametrize("depth", [1, 2, 5, 16, 33])
def test_masks_reach_every_ancestor_of_deep_trees(depth: int) -> None:
    _fill(TreeShape.chain(depth), [list(range(depth + 1))]).check()


def test_a_filled_tree_keeps_every_invariant() -> None:
    tree = _fill(TreeShape.from_choices(GOLDEN), [[9, 1, 2, 3, 4, 5, 6], [0, 2, 1, 2, 0, 0, 2]])
    tree.check()
    assert tree.child_tokens_BNC[0, :4].tolist() == [[1, 2], [3, 4], [5, -1], [6, -1]]


def test_nodes_below_an_absent_node_are_absent() -> None:
    tree = _fill(TreeShape.from_choices(GOLDEN), [[9, -1, 2, 3, 4, 5, 6]])
    tree.check()
    assert tree.tokens_BN.tolist() == [[9, -1, 2, -1, -1, 5, -1]]
    assert tree.num_drafted_B.tolist() == [2]


def test_limit_depth_cuts_each_row_to_its_room() -> None:
    tree = _fill(TreeShape.from_choices(GOLDEN), [[9, 1, 2, 3, 4, 5, 6]] * 3)
    tree = tree.limit_depth(torch.tensor([0, 2, 7]))
    tree.check()
    assert tree.tokens_BN[0].tolist() == [9, -1, -1, -1, -1, -1, -1]
    assert tree.num_drafted_B.tolist() == [0, 5, 6]
    assert tree.depth_max_B.tolist() == [0, 2, 3]


def test_rows_may_differ_in_shape() -> None:
    tree = DraftTree.from_parents(
        torch.tensor([[0, 1, 2, 2, 0, 0, 1], [3, 1, 4, -1, -1, -1, -1]]),
        torch.tensor([[-1, 0, 0, 1, 2, 3, 3], [-1, 0, 1, 0, 0, 0, 0]]),
        max_depth=3,
        max_children=2,
    )
    tree.check()
    assert tree.depth_BN[0].tolist() == [0, 1, 1, 2, 2, 3, 3]
    mask = ["".join(str(int(bit)) for bit in row) for row in tree.ancestors_BNN[0]]
    assert " ".join(mask) == "1000000 1100000 1010000 1101000 1010100 1101010 1101001"
    assert tree.children_BNC[0].tolist() == [[1, 2], [3, -1], [4, -1], [5, 6]] + [[-1, -1]] * 3
    assert tree.children_BNC[1].tolist() == [[1, -1], [2, -1]] + [[-1, -1]] * 5


def test_an_absent_node_takes_no_place_among_the_children() -> None:
    tree = DraftTree.from_parents(
        torch.tensor([[3, -1, 4]]), torch.tensor([[-1, 0, 0]]), max_depth=1, max_children=1
    )
    tree.check()
    assert tree.children_BNC[0, 0].tolist() == [2]


def test_repeated_siblings_become_repeated_tries_of_the_first() -> None:
    shape = TreeShape.from_choices([[0], [1], [2], [0, 0], [1, 0], [2, 0]])
    tree = _fill(shape, [[9, 4, 4, 5, 1, 2, 3], [9, 4, 5, 6, 1, 2, 3]]).merge_repeats()
    tree.check()
    assert tree.tokens_BN.tolist() == [[9, 4, -1, 5, 1, -1, 3], [9, 4, 5, 6, 1, 2, 3]]
    assert tree.children_BNC[:, 0].tolist() == [[1, 1, 3], [1, 2, 3]]


def test_check_notices_a_broken_tree() -> None:
    with pytest.raises(AssertionError, match="siblings carry one token"):
        _fill(TreeShape.from_choices([[0], [1]]), [[9, 4, 4]]).check()
    tree = _fill(TreeShape.chain(2), [[9, 4, 5]])
    tree.tokens_BN = torch.tensor([[9, -1, 5]])
    with pytest.raises(AssertionError, match="absent parent"):
        tree.check()


def test_check_notices_a_child_that_cannot_have_been_drawn() -> None:
    q_BNV = torch.tensor([[[0.0, 1.0], [0.0, 0.0]]])
    with pytest.raises(AssertionError, match="probability 0"):
        TreeShape.chain(1).fill(torch.tensor([[1, 0]]), q_BNV).check()
