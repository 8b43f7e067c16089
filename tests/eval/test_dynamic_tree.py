"""Dynamic trees: the golden tree, ties, the rule written out, and output that stays the target's.

Shapes: B rows, N tree nodes, V vocabulary.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_chat import chat_tokenizer
from models import (
    cycle,
    make_head,
    markov,
    markov_head,
    requests,
    run,
    some_vocab,
    target_of,
    tau,
    tiny_model,
    tokens_of,
)
from omegaconf import OmegaConf
from torch import Tensor

from headstart.data.template import ChatTemplate
from headstart.eval.arms import head_arms, head_drafter
from headstart.eval.bench import evaluate_heads
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.dynamic import DynamicHeadDrafter
from headstart.eval.engine.dynamic_tree import DynamicShape, best_first, keep_best
from headstart.eval.engine.sampling import SamplingConfig, prompt_key
from headstart.eval.engine.tree import DraftTree
from headstart.eval.result_files import read_result
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import info_for, save_head
from headstart.heads.target import Target

GREEDY = SamplingConfig()
SMALL = DynamicShape(top_k=4, levels=3, total=8)
PAPER = DynamicShape(top_k=10, levels=6, total=60)
GOLDEN = [[0.1, 0.6, 0.2, 0.1], [0.05, 0.05, 0.8, 0.1], [0.5, 0.3, 0.1, 0.1], [0.4, 0.1, 0.1, 0.4]]
LAWS = torch.rand(8, 8, generator=torch.Generator().manual_seed(1)) ** 3 + 0.02
LAWS = LAWS / LAWS.sum(-1, keepdim=True)


def _drafts(drafter: DynamicHeadDrafter, roots: list[int]) -> DraftTree:
    """Return what is drafted right after these roots, one a row."""
    root_B = torch.tensor(roots)
    B, D = len(roots), drafter.head.shape.hidden_size
    drafter.start(B, 16)
    drafter.observe(root_B[:, None], torch.zeros(B, 1, D), [1] * B)
    tree = drafter.propose(root_B, torch.ones(B, dtype=torch.int64), torch.arange(B))
    tree.check()
    return tree


def _of_laws(rows: list[list[float]], shape: DynamicShape) -> DynamicHeadDrafter:
    target = target_of(markov(rows))
    return DynamicHeadDrafter(markov_head(target), target.parts, shape)


def _mask(tree: DraftTree) -> str:
    return " ".join("".join(str(int(bit)) for bit in row) for row in tree.ancestors_BNN[0])


# The tree itself.


def test_p45_the_golden_laws_give_the_golden_tree() -> None:
    tree = _drafts(_of_laws(GOLDEN, DynamicShape(top_k=2, levels=3, total=7)), [0])
    assert tree.tokens_BN.tolist() == [[0, 1, 2, 2, 0, 0, 1]]
    assert tree.parents_BN.tolist() == [[-1, 0, 0, 1, 2, 3, 3]]
    assert tree.depth_BN.tolist() == [[0, 1, 1, 2, 2, 3, 3]]
    assert _mask(tree) == "1000000 1100000 1010000 1101000 1010100 1101010 1101001"
    leaves = [node for node in range(7) if (tree.children_BNC[0, node] < 0).all()]
    paths = [tree.ancestors_BNN[0, leaf].nonzero().flatten().tolist() for leaf in leaves]
    assert paths == [[0, 2, 4], [0, 1, 3, 5], [0, 1, 3, 6]]


def test_p45_the_golden_candidates_are_kept_by_value() -> None:
    """Candidates in order of creation: 1, 2 | 1-2, 1-3, 2-0, 2-1 | 1-2-0, 1-2-1, 2-0-1, 2-0-2."""
    values = torch.tensor([[0.6, 0.2, 0.48, 0.06, 0.1, 0.06, 0.24, 0.144, 0.06, 0.02]])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]])
    kept, kept_parents = keep_best(values.log(), parents, total=7)
    assert kept.tolist() == [[0, 1, 2, 4, 6, 7]]
    assert kept_parents.tolist() == [[-1, 0, 0, 1, 2, 3, 3]]
    assert float(values.gather(1, kept).sum()) == pytest.approx(1.764)
    assert best_first(values, 6).tolist() == [[0, 2, 6, 1, 7, 4]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_p45_one_hot_rows_draft_a_chain_with_every_parent_present(dtype: torch.dtype) -> None:
    target = target_of(cycle().to(dtype))
    shape = DynamicShape(top_k=2, levels=3, total=4)
    drafter = DynamicHeadDrafter(markov_head(target), target.parts, shape)
    drafter.start(1, 16)
    drafter.observe(torch.tensor([[5]]), torch.zeros(1, 1, 8, dtype=dtype), [1])
    tree = drafter.propose(torch.tensor([5]), torch.tensor([1]), torch.tensor([0]))
    tree.check()
    assert tree.parents_BN.tolist() == [[-1, 0, 1, 2]]
    assert tree.tokens_BN.tolist() == [[5, 6, 7, 0]]


def test_p45_equal_scores_in_fp16_keep_the_shallower_and_every_parent() -> None:
    """The golden tree's candidates again, all worth the same in fp16: room for six of ten."""
    values = torch.full((1, 10), 0.25, dtype=torch.float16).log()
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]])
    kept, kept_parents = keep_best(values, parents, total=7)
    assert kept.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert kept_parents.tolist() == [[-1, 0, 0, 1, 1, 2, 2]]


def test_p45_a_head_in_fp16_that_knows_nothing_drafts_the_lowest_ids_shallow_first() -> None:
    target = target_of(markov([[0.25] * 4] * 4).half())
    drafter = DynamicHeadDrafter(
        markov_head(target), target.parts, DynamicShape(top_k=2, levels=3, total=7)
    )
    drafter.start(1, 16)
    drafter.observe(torch.tensor([[0]]), torch.zeros(1, 1, 4, dtype=torch.float16), [1])
    tree = drafter.propose(torch.tensor([0]), torch.tensor([1]), torch.tensor([0]))
    tree.check()
    assert tree.tokens_BN.tolist() == [[0, 0, 1, 0, 1, 0, 1]]
    assert tree.parents_BN.tolist() == [[-1, 0, 0, 1, 1, 2, 2]]


@pytest.mark.parametrize("value", [float("nan"), -float("nan")])
def test_p45_one_nan_among_the_scores_is_an_error(value: float) -> None:
    values = torch.zeros(2, 10)
    values[1, 7] = value
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]] * 2)
    with pytest.raises(RuntimeError, match="not finite: NaN among its values"):
        keep_best(values, parents, total=7)


@pytest.mark.parametrize("total", [3, 8, 60, 300, 511])
@pytest.mark.parametrize("log_value", [0.0, -1.0, float("-inf")])
def test_p45_equal_values_go_to_the_shallower_then_the_earlier(
    total: int, log_value: float
) -> None:
    """All 510 candidates of the paper's tree tie: those created first are kept, parents present."""
    parents = [-1] * 10
    for level in range(5):
        start = 0 if level == 0 else 10 + 100 * (level - 1)
        parents += [start + place // 10 for place in range(100)]
    log_values = torch.full((2, 510), log_value)
    kept, kept_parents = keep_best(log_values, torch.tensor([parents] * 2), total)
    assert kept.tolist() == [list(range(total - 1))] * 2
    assert kept_parents.tolist() == [[-1, *(p + 1 for p in parents[: total - 1])]] * 2


def test_p45_a_child_as_good_as_its_parent_does_not_displace_it() -> None:
    """Three nodes on a path are certain, and there is room for two."""
    log_values = torch.tensor([[0.0, -20, 0, -20, -20, -20, 0, -20, -20, -20]])
    parents = torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]])
    kept, kept_parents = keep_best(log_values, parents, total=3)
    assert kept.tolist() == [[0, 2]]
    assert kept_parents.tolist() == [[-1, 0, 1]]


def test_p45_nan_values_are_an_error(tiny: Target) -> None:
    head = make_head("eagle", tiny)
    head.fc.weight.data.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="the head's logits are not finite"):
        run(tiny, DynamicHeadDrafter(head, tiny.parts, SMALL), requests(1, 8))


def test_rows_of_a_batch_draft_what_each_drafts_alone() -> None:
    drafter = _of_laws(LAWS.tolist(), SMALL)
    together = _drafts(drafter, list(range(8)))
    assert len({tuple(row) for row in together.parents_BN.tolist()}) > 2  # shapes differ
    for root in range(8):
        alone = _drafts(drafter, [root])
        assert torch.equal(alone.tokens_BN[0], together.tokens_BN[root])
        assert torch.equal(alone.parents_BN[0], together.parents_BN[root])


def _written_out(
    head: DraftHead, target: Target, text: Tensor, hidden: Tensor, shape: DynamicShape
) -> tuple[list[int], list[int]]:
    """Return tokens and parents by the rule, one path at a time, each in a state of its own."""

    def children(path: list[int]) -> list[tuple[int, float]]:
        state = head.new_state(1, 32, 16, target.parts)
        logits = head.extend(state, text[:, 1:], hidden, [text.shape[1] - 1], target.parts)
        for slot, token in enumerate(path):
            logits = head.step(state, torch.tensor([[token]]), torch.tensor([[slot]]), target.parts)
        log_q = logits.flatten().log_softmax(-1)
        best = log_q.sort(descending=True, stable=True).indices[: shape.top_k]
        ids = best if head.vocab is None else head.vocab.ids_W[best]
        return list(zip(ids.tolist(), log_q[best].tolist(), strict=True))

    made: list[tuple[float, int, int, list[int]]] = []  # -value, index, parent, path
    expanded: list[tuple[float, int, int, list[int]]] = [(0.0, -1, -1, [])]
    for _ in range(shape.levels):
        level = []
        for negative, index, _, path in expanded:
            for token, log_q in children(path):
                level.append((negative - log_q, len(made) + len(level), index, [*path, token]))
        made += level
        expanded = sorted(level)[: shape.top_k]
    kept = sorted(sorted(made)[: shape.total - 1], key=lambda node: node[1])
    place = {-1: 0} | {node[1]: i for i, node in enumerate(kept, start=1)}
    tokens = [int(text[0, -1]), *(node[3][-1] for node in kept)]
    return tokens, [-1, *(place[node[2]] for node in kept)]


@torch.no_grad()
@pytest.mark.parametrize("vocab", [None, 32])
@pytest.mark.parametrize(
    "shape", [SMALL, DynamicShape(3, 5, 20), DynamicShape(1, 3, 4), DynamicShape(5, 1, 4)]
)
def test_the_drafted_tree_is_the_rule_written_out(
    tiny: Target, shape: DynamicShape, vocab: int | None
) -> None:
    """Every expanded node reads its own path: a wrong slot or parent would give another tree."""
    head = make_head("eagle", tiny, vocab=None if vocab is None else some_vocab(vocab), seed=4)
    for weight in head.parameters():
        weight *= 4  # sure of itself, so that deep nodes are kept
    texts = torch.tensor([[5, 77, 3, 41, 9], [8, 100, 64, 2, 33]])
    hidden = tiny.forward(texts).hidden_BTD[:, :-1]
    drafter = DynamicHeadDrafter(head, tiny.parts, shape)
    drafter.start(2, 32)
    drafter.observe(texts[:, 1:], hidden, [4, 4])
    tree = drafter.propose(texts[:, -1], torch.tensor([4, 4]), torch.tensor([0, 1]))
    tree.check()
    assert tree.depth_max_B.tolist() == [shape.levels] * 2
    for row in range(2):
        tokens, parents = _written_out(
            head, tiny, texts[row : row + 1], hidden[row : row + 1], shape
        )
        assert tree.tokens_BN[row].tolist() == tokens
        assert tree.parents_BN[row].tolist() == parents


# Decoding.


@pytest.fixture(scope="module")
def prompts() -> list[Request]:
    return requests(20, 64)


@pytest.fixture(scope="module")
def plain(tiny: Target, prompts: list[Request]) -> dict[str, list[int]]:
    return tokens_of(run(tiny, None, prompts))


@pytest.mark.parametrize(
    ("shape", "count", "family", "options"),
    [
        (SMALL, 20, "eagle", {}),
        (SMALL, 6, "eagle", {"num_layers": 2}),
        (PAPER, 6, "eagle", {}),
        (SMALL, 6, "eagle", {"vocab": some_vocab(32)}),
        (SMALL, 20, "eagle3", {"aux": [1, 2, 3]}),
        (PAPER, 6, "eagle3", {"aux": [1, 2, 3], "fc_norm": True, "feedback": "post_norm"}),
        (SMALL, 6, "eagle3", {"aux": [2], "num_layers": 2, "vocab": some_vocab(32)}),
        (SMALL, 20, "hydra_heads", {"num_heads": 3}),
        (SMALL, 6, "hydra_heads", {"num_heads": 3, "arch": "prefix-mlp"}),
    ],
    ids=[
        *("small", "two layers", "paper", "draft vocabulary"),
        *("eagle3", "eagle3.1, paper", "eagle3, draft vocabulary"),
        *("hydra_heads", "hydra_heads, prefix"),
    ],
)
def test_p47_greedy_output_with_a_dynamic_tree_is_the_plain_one(
    tiny: Target,
    prompts: list[Request],
    plain: dict[str, list[int]],
    shape: DynamicShape,
    count: int,
    family: str,
    options: dict[str, Any],
) -> None:
    """Prompts of 64 tokens in a batch of 4 with refill, three of them at batch 1 as well."""
    drafter = DynamicHeadDrafter(make_head(family, tiny, **options), tiny.parts, shape)
    done = run(tiny, drafter, prompts[:count], batch_size=4)
    assert all(c.token_ids == plain[prompt_id] for prompt_id, c in done.items())
    for prompt_id, c in run(tiny, drafter, prompts[:3], batch_size=1).items():
        assert c.token_ids == plain[prompt_id]
        assert [r.accepted for r in c.rounds] == [r.accepted for r in done[prompt_id].rounds]


def test_p47_bf16_ends_with_answers_of_the_same_length(prompts: list[Request]) -> None:
    """Kernels of other shapes round otherwise in bf16, so equality is not asserted."""
    target = target_of(tiny_model().to(torch.bfloat16))
    drafter = DynamicHeadDrafter(make_head("eagle", target), target.parts, SMALL)
    done = run(target, drafter, prompts[:3])
    assert {len(c.token_ids) for c in done.values()} == {64}


@pytest.mark.parametrize(("temperature", "shape"), [(0.7, SMALL), (0.7, PAPER), (1.3, SMALL)])
def test_sampled_output_with_a_dynamic_tree_is_the_plain_one(
    temperature: float, shape: DynamicShape
) -> None:
    """MARKOV, drafted by another law: some drafts are accepted, and no token differs."""
    rows = LAWS if shape is SMALL else torch.block_diag(LAWS, LAWS).clamp(min=1e-3)
    target = target_of(markov(rows.tolist()))
    other = target_of(markov((0.7 * rows + 0.3 * rows.roll(1, dims=-1)).tolist()))
    sampling = SamplingConfig(temperature=temperature, top_p=0.95, seed=7)
    drafter = DynamicHeadDrafter(markov_head(other), other.parts, shape)
    assert drafter.scheme == "b"
    prompts = [Request(f"p{i}", (i % 8, 3), 24) for i in range(64)]
    done = run(target, drafter, prompts, sampling=sampling, batch_size=16)
    want = run(target, None, prompts, sampling=sampling, batch_size=16)
    assert tokens_of(done) == tokens_of(want)
    assert 1.3 < tau(done) < shape.levels + 1


def test_the_exact_head_of_a_cycle_is_accepted_to_the_last_level() -> None:
    target = target_of(cycle())
    drafter = DynamicHeadDrafter(markov_head(target), target.parts, SMALL)
    done = run(target, drafter, [Request("p", (0,), 1 + 4 * 5)])["p"]
    assert done.token_ids == [(1 + i) % 8 for i in range(21)]
    assert [(r.accepted, r.emitted, r.drafted, r.depth_max, r.stop) for r in done.rounds] == [
        (3, 4, 7, 3, "leaf")
    ] * 5


def test_rounds_record_each_rows_own_shape() -> None:
    target = target_of(markov(LAWS.tolist()))
    drafter = DynamicHeadDrafter(markov_head(target), target.parts, SMALL)
    drafts = {}

    def recorded(root_B: Tensor, *args: Tensor) -> DraftTree:
        tree = DynamicHeadDrafter.propose(drafter, root_B, *args)
        tree.check()
        drafts.update(zip(root_B.tolist(), tree.depth_max_B.tolist(), strict=True))
        return tree

    drafter.propose = recorded
    sampling = SamplingConfig(temperature=1.0)
    done = run(target, drafter, [Request(f"p{i}", (i,), 40) for i in range(8)], sampling=sampling)
    assert len(set(drafts.values())) > 1
    for c in done.values():
        emitted = 1
        for r in c.rounds:
            room = 40 - emitted - 1
            assert r.depth_max == min(room, drafts[c.token_ids[emitted - 1]])
            assert r.drafted == 7 or room < SMALL.levels
            emitted += r.emitted


def test_p49_a_drafter_after_any_rounds_drafts_as_a_new_one(
    tiny: Target, prompts: list[Request], plain: dict[str, list[int]]
) -> None:
    """A self-drafting head of a looping target is accepted at times, so rounds of many kinds."""
    head = make_head("eagle", tiny, seed=None)

    def recording() -> tuple[DynamicHeadDrafter, dict[tuple[int, int], list[list[int]]]]:
        drafter, seen = DynamicHeadDrafter(head, tiny.parts, SMALL), {}

        def propose(root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
            tree = DynamicHeadDrafter.propose(drafter, root_B, positions_B, keys_B)
            drafted = torch.stack((tree.tokens_BN, tree.parents_BN), 1).tolist()
            places = zip(keys_B.tolist(), positions_B.tolist(), strict=True)
            seen.update(zip(places, drafted, strict=True))
            return tree

        drafter.propose = propose
        return drafter, seen

    worn, drafts = recording()
    done = run(tiny, worn, prompts[:5], batch_size=3)  # with refill and rows that move
    assert len({r.accepted for c in done.values() for r in c.rounds}) > 1
    by_key = {prompt_key(r.prompt_id): r for r in prompts[:5]}
    for (key, position), drafted in list(drafts.items())[::7]:
        request = by_key[key]
        text = (*request.token_ids, *plain[request.prompt_id])[:position]
        new, fresh = recording()
        run(tiny, new, [Request(request.prompt_id, text, 2)], batch_size=1)
        assert fresh[key, position] == drafted


def test_p50_drafts_get_shorter_near_the_end_of_the_context() -> None:
    """A maximum of 64, a prompt of 60 and a tree six deep; then a shorter prompt beside it."""
    target = target_of(tiny_model(max_position_embeddings=64))
    pair = [Request("long", tuple(range(1, 61)), 100), Request("short", tuple(range(1, 31)), 20)]
    want = tokens_of(run(target, None, pair))
    drafter = DynamicHeadDrafter(make_head("eagle", target), target.parts, PAPER)
    for subset in (pair[:1], pair):
        done = run(target, drafter, subset, batch_size=2)
        assert all(c.token_ids == want[k] for k, c in done.items())
        assert max(r.depth_max for r in done["long"].rounds) <= 2


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_k_levels_cost_k_head_calls_and_not_one_more(tiny: Target, levels: int) -> None:
    head, made = make_head("eagle", tiny), []
    for name in ("extend", "step"):
        method = getattr(head, name)
        setattr(head, name, lambda *a, m=method, **k: made.append(1) or m(*a, **k))
    drafter = DynamicHeadDrafter(head, tiny.parts, DynamicShape(6, levels, 7))
    done = run(tiny, drafter, [Request("p", (1, 2, 3), 9)])["p"]
    assert drafter.draft_calls == levels - 1  # the first level comes with the refresh
    # Prefill adds one refresh; the last round, after which nothing is drafted, has none.
    assert len(made) == levels * len(done.rounds)


# What is refused.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "tree.top_k=0: need at least 1"),
        ({"levels": 0}, "tree.levels=0: need at least 1"),
        ({"total": 1}, "tree.total=1: need at least 2"),
        ({"total": -3}, "tree.total=-3: need at least 2"),
        (
            {"total": 38},
            "tree.total=38 but tree.top_k=4 and tree.levels=3 make 36 candidates: lower tree.total "
            "to 37",
        ),
        ({"total": 3}, "tree.levels=3 but tree.total=3 keeps nothing deeper than 2: lower"),
        ({"top_k": None}, "tree: tree.top_k not set; a dynamic tree needs"),
        ({"levels": None, "total": None}, "tree: tree.levels and tree.total not set"),
        ({"depth": 3}, "tree.depth=3, tree.choices=None, tree.top_k=4, .*: give a depth for a"),
        ({"choices": [[0]]}, r"tree.depth=None, tree.choices=\[\[0\]\], tree.top_k=4, "),
        ({"children": "sampled"}, "tree.children=sampled with a dynamic tree: .*; use top_k"),
    ],
)
def test_a_dynamic_tree_that_cannot_be_grown_is_refused_by_field(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TreeConfig(**{"name": "tree", "top_k": 4, "levels": 3, "total": 8, **fields})


def test_the_largest_tree_keeps_every_candidate() -> None:
    drafter = _of_laws(LAWS.tolist(), DynamicShape(top_k=4, levels=3, total=37))
    tree = _drafts(drafter, [0, 3])
    assert tree.num_drafted_B.tolist() == [36, 36]
    assert tree.depth_max_B.tolist() == [3, 3]


def test_a_head_that_gives_all_depths_at_once_is_refused(tiny: Target) -> None:
    with pytest.raises(
        ValueError, match="tree.levels=3: a dynamic tree needs an autoregressive head, but medusa"
    ):
        DynamicHeadDrafter(make_head("medusa", tiny, num_heads=4), tiny.parts, SMALL)


def test_more_levels_than_the_head_has_depths_are_refused(tiny: Target) -> None:
    with pytest.raises(ValueError, match="tree.levels=3 but head.num_heads=2: the tree is deeper"):
        DynamicHeadDrafter(make_head("hydra_heads", tiny, num_heads=2), tiny.parts, SMALL)


def test_a_tree_wider_than_the_draft_vocabulary_is_refused(tiny: Target) -> None:
    head = make_head("eagle", tiny, vocab=some_vocab(2))
    with pytest.raises(ValueError, match="tree.top_k=4 but the head drafts over 2 tokens"):
        DynamicHeadDrafter(head, tiny.parts, SMALL)


# Configuration and results.


def test_a_dynamic_tree_composes_and_says_what_it_is() -> None:
    values = {"name": "dynamic8", "top_k": 4, "levels": 3, "total": 8}
    tree = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TreeConfig), values))
    assert tree == TreeConfig(**values)
    assert tree.shape() == SMALL
    assert tree.label() == "dynamic:dynamic8"


def test_only_a_tree_without_siblings_is_a_chain(tiny: Target) -> None:
    """DynamicShape(2, 3, 4) has as many nodes as a chain of its depth, and is none."""
    shapes = {DynamicShape(2, 3, 4): "b", DynamicShape(1, 3, 4): "a1", DynamicShape(4, 1, 2): "a1"}
    for shape, scheme in shapes.items():
        drafter = DynamicHeadDrafter(make_head("eagle", tiny), tiny.parts, shape)
        assert (drafter.scheme, shape.is_chain) == (scheme, scheme == "a1")


def test_head_drafter_makes_what_the_tree_asks_for(tiny: Target) -> None:
    head, sampling = make_head("eagle", tiny), SamplingConfig(temperature=0.7)
    trees = {
        "b": TreeConfig("d", top_k=4, levels=3, total=8),
        "a1": TreeConfig("c", depth=2),
        "c": TreeConfig("s", choices=[[0], [1]], children="sampled"),
    }
    for scheme, tree in trees.items():
        assert head_drafter(head, tiny.parts, tree, sampling).scheme == scheme


def _saved_eagle(path: Path, target: Target) -> Path:
    head = make_head("eagle", target)
    save_head(path, head, info_for(head, target.name, target.fingerprint, step=7, tokens_seen=99))
    return path


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_evaluation_with_dynamic_trees_passes_every_identity(
    tmp_path: Path, temperature: float
) -> None:
    target = target_of(
        tiny_model(layers=2, vocab=264, max_position_embeddings=4096, eos_token_id=2),
        chat_tokenizer(),
    )
    checkpoint = _saved_eagle(tmp_path / "head", target)
    tree = TreeConfig("dynamic8", top_k=4, levels=3, total=8)
    trees = [tree, replace(tree, name="narrow", top_k=1, total=4), TreeConfig("chain3", depth=3)]
    arms = head_arms([checkpoint], trees, target, GREEDY, force=False)
    assert [arm.is_chain for arm in arms] == [False, True, True]
    results = evaluate_heads(
        target,
        ChatTemplate(target.tokenizer),
        [checkpoint],
        trees,
        sampling=SamplingConfig(temperature=temperature),
        config=EvalConfig(num_prompts=3, max_new_tokens=12, warmup_prompts=1, resamples=2000),
        out=tmp_path / "out",
        run_config={"seed": 0},
    )
    drafters = [r.drafter for r in results]
    assert [d.tree for d in drafters] == ["dynamic:dynamic8", "dynamic:narrow", "chain:3"]
    assert [d.verify_scheme for d in drafters] == ["b", "a1", "a1"]
    assert all(r.drafter.lossless for r in results)
    assert temperature > 0 or all(r.equality.fraction_identical == 1.0 for r in results)
    for key in ("tau_with_bonus_micro", "alpha_prefix"):  # a chain, however it is grown
        assert results[1].figures[key] == results[2].figures[key]
    assert [read_result(tmp_path / "out" / r.drafter.name) for r in results] == results
    assert "dynamic:dynamic8" in (tmp_path / "out" / "report.md").read_text()
