"""Every drafter without a head, and combinations of them with heads: lossless, batched, repeatable.

Shapes: B rows, N tree nodes, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from laws import LAWS, PROCESSORS, chi_square_of_answers
from models import (
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
from paced import Whim, rounds_of
from paced import run as run_paced
from scripted import cycle
from torch import Tensor

from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.drafters.build import text_drafter
from headstart.eval.engine.drafters.config import LookupConfig, SuffixConfig
from headstart.eval.engine.drafters.draft_model import ModelDrafter
from headstart.eval.engine.drafters.dynamic import DynamicHeadDrafter
from headstart.eval.engine.drafters.fallback import FallbackDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.policy import AdaptivePolicy, TablePolicy, fair_shares
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig, processed_probs, prompt_key
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.heads.target import Target
from headstart.heads.vocab import DraftVocab

GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.8, top_k=50, top_p=0.95, seed=11)
CHAIN = TreeShape.chain(3)
TREE = TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])
Make = Callable[[Target, SamplingConfig], Drafter]


def lookup(**options: Any) -> Make:
    return lambda target, sampling: text_drafter(LookupConfig(**{"tokens": 4, **options}))


def suffix(**options: Any) -> Make:
    return lambda target, sampling: text_drafter(SuffixConfig(**options))


def other_model(target: Target) -> Target:
    """Make a model beside the target: of other weights, or of other laws."""
    if target.shape.vocab_size == 8:
        rows = 0.6 * LAWS + 0.4 * LAWS.roll(1, dims=-1)
        rows[:, 2] = 0  # a token that is never drafted
        return target_of(markov((rows / rows.sum(-1, keepdim=True)).tolist()))
    return target_of(tiny_model(seed=1, layers=2))


def model(target: Target, sampling: SamplingConfig) -> ModelDrafter:
    return ModelDrafter(other_model(target), target, tokens=3, sampling=sampling)


def head(shape: TreeShape, children: str = "top_k", family: str = "eagle") -> Make:
    def make(target: Target, sampling: SamplingConfig) -> HeadDrafter:
        few = target.shape.vocab_size == 8
        vocab = DraftVocab(torch.tensor([0, 1, 3, 4, 6, 7]), 8) if few else some_vocab(64)
        options = {"aux": [1]} if family == "eagle3" else {}
        made = make_head(family, target, vocab=vocab, **options)
        return HeadDrafter(made, target.parts, shape, sampling=sampling, children=children)

    return make


def fallback(*members: Make) -> Make:
    def make(target: Target, sampling: SamplingConfig) -> FallbackDrafter:
        *first, last = (member(target, sampling) for member in members)
        return FallbackDrafter(first, last, vocab_size=target.shape.vocab_size)

    return make


def nothing(target: Target, sampling: SamplingConfig) -> NoDrafter:
    return NoDrafter()


SURE = lookup(min_n=2)
MADE: dict[str, tuple[Make, str]] = {
    "lookup": (lookup(), "a1"),
    "lookup, latest": (lookup(order="latest", max_n=4, min_n=2), "a1"),
    "suffix chain": (suffix(), "a1"),
    "suffix tree": (suffix(tree=True, tokens=7), "b"),
    "model": (model, "a"),
    "lookup, suffix": (fallback(SURE, suffix(tree=True), nothing), "b"),
    "lookup, model": (fallback(SURE, model), "a"),
    "lookup, head": (fallback(SURE, head(CHAIN)), "a1"),
    "suffix tree, head tree": (fallback(suffix(tree=True, min_score=1.0), head(TREE)), "b"),
    "suffix, head of aux": (fallback(suffix(min_score=1.0), head(TREE, family="eagle3")), "b"),
    "lookup, drawn head": (fallback(SURE, head(CHAIN, "sampled")), "a"),
    "lookup, drawn head tree": (fallback(SURE, head(TREE, "sampled")), "c"),
}
"""Every drafter with its scheme at temperature > 0."""
FIXED = [name for name, (_, scheme) in MADE.items() if scheme in ("a1", "b")]
DRAWN = [name for name, (_, scheme) in MADE.items() if scheme in ("a", "c")]


def made(name: str, target: Target, sampling: SamplingConfig = GREEDY) -> Drafter:
    return MADE[name][0](target, sampling)


def sound(drafter: Drafter) -> Drafter:
    """Check every tree that it drafts."""
    propose = drafter.propose

    def checked(*args: Tensor) -> DraftTree:
        tree = propose(*args)
        tree.check()
        assert tree.tokens_BN.shape[1] <= drafter.num_nodes
        return tree

    drafter.propose = checked
    return drafter


def looping_requests(count: int, new: int) -> list[Request]:
    """Prompts of 2 to 12 tokens, of which every second repeats itself and asks for fewer."""
    made = requests(count, new, seed=3)
    return [
        Request(r.prompt_id, (*r.token_ids, *r.token_ids), new // 2 + i) if i % 2 else r
        for i, r in enumerate(made)
    ]


@pytest.fixture(scope="module")
def prompts() -> list[Request]:
    return looping_requests(9, 40)


@pytest.fixture(scope="module")
def plain(tiny: Target, prompts: list[Request]) -> dict[str, list[int]]:
    return tokens_of(run(tiny, None, prompts))


@pytest.mark.parametrize("name", MADE)
def test_p47_greedy_output_with_any_drafter_is_the_plain_one(name, tiny, prompts, plain):
    """Prompts of different lengths; rows finish at different times; batches of 4 and 1."""
    batched = run(tiny, sound(made(name, tiny)), prompts, batch_size=4)
    assert tokens_of(batched) == plain
    assert any(r.accepted > 0 for c in batched.values() for r in c.rounds)
    for prompt_id, c in run(tiny, made(name, tiny), prompts[:3], batch_size=1).items():
        assert c.token_ids == plain[prompt_id]


@pytest.mark.parametrize("name", MADE)
def test_a_drafter_names_its_scheme(name, tiny):
    assert made(name, tiny, SAMPLED).scheme == MADE[name][1]
    greedy = made(name, tiny, GREEDY).scheme
    assert greedy in ("a1", "b")
    assert greedy == MADE[name][1] or name in DRAWN


@pytest.mark.parametrize("name", FIXED)
def test_fixed_children_leave_sampled_output_token_identical(name, tiny, prompts):
    want = tokens_of(run(tiny, None, prompts, sampling=SAMPLED))
    drafter = sound(made(name, tiny, SAMPLED))
    assert tokens_of(run(tiny, drafter, prompts, sampling=SAMPLED)) == want


BEST = LAWS.argmax(-1).tolist()
REPEATED = [t for x in LAWS[3].topk(4).indices.tolist() for t in (3, x, BEST[x], BEST[BEST[x]])]


def markov_requests(count: int) -> list[Request]:
    """Prompts that end in token 3; in every second one it stood before, and what follows it too."""
    return [Request(f"p{i}", (5, 6, *(REPEATED if i % 2 else []), 3), 3) for i in range(count)]


def markov_answers(
    name: str, change: Callable[[DraftTree], DraftTree]
) -> tuple[Drafter, dict[str, Completion]]:
    """Decode 4,000 answers of three tokens from drafts that were changed on their way."""
    target = target_of(markov(LAWS.tolist()))
    drafter = made(name, target, PROCESSORS)
    propose = drafter.propose
    drafter.propose = lambda *args: change(propose(*args))
    options = {"sampling": PROCESSORS, "batch_size": 1_000}
    return drafter, run(target, drafter, markov_requests(4_000), **options)


@pytest.mark.parametrize("name", MADE)
def test_the_law_of_the_output_is_the_targets(name):
    """4,000 answers of three tokens; rows of one batch are drafted for by different drafters."""
    _, done = markov_answers(name, lambda tree: tree)
    accepted = [r.accepted for c in done.values() for r in c.rounds]
    assert 0.05 < sum(a > 0 for a in accepted) / len(accepted) < 0.95
    chi_square_of_answers(done, processed_probs(LAWS.log(), PROCESSORS), 3)


@pytest.mark.parametrize("halves", [1, 3])
@pytest.mark.parametrize("name", DRAWN)
def test_the_law_of_the_output_is_the_targets_within_a_budget(name, halves):
    """Half of the rows get no node or one, half one more, whatever the tokens are."""

    def bounded(tree: DraftTree) -> DraftTree:
        shares = fair_shares(tree.num_drafted_B.tolist(), halves * len(tree.tokens_BN) // 2)
        return tree.limit_nodes(torch.tensor(shares)).trimmed()

    drafter, done = markov_answers(name, bounded)
    most = max(r.drafted for c in done.values() for r in c.rounds)
    assert most == (2 if halves == 3 and drafter.scheme == "c" else 1)  # a chain has room for one
    chi_square_of_answers(done, processed_probs(LAWS.log(), PROCESSORS), 3)


@pytest.mark.parametrize("name", DRAWN)
def test_the_law_of_the_output_is_found_wrong_with_a_wrong_law_of_the_drafts(name, monkeypatch):
    """The chi-square has power: laws recorded as uniform over the draft vocabulary are caught."""

    def wrong(tree: DraftTree) -> DraftTree:
        return replace(tree, draft_probs_BNV=torch.full_like(tree.draft_probs_BNV, 1 / 6))

    _, done = markov_answers(name, wrong)
    with pytest.raises(AssertionError):
        chi_square_of_answers(done, processed_probs(LAWS.log(), PROCESSORS), 3)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", MADE)
def test_a_prompts_result_depends_neither_on_the_batch_nor_on_the_order(name, sampling, tiny):
    """Answers of 1 to 17 tokens; drafts from remembered answers differ, what is said does not."""
    limits = [1, 17, 5, 1, 1, 9, 5, 2, 17, 3, 1]
    prompts = [
        Request(r.prompt_id, r.token_ids, n)
        for r, n in zip(looping_requests(len(limits), 0), limits, strict=True)
    ]
    results = []
    for order, batch_size in ((1, 1), (1, 4), (-1, 4), (1, 11)):
        drafter = made(name, tiny, sampling)
        done = run(tiny, drafter, prompts[::order], sampling=sampling, batch_size=batch_size)
        drafts = {} if "suffix" in name else {k: c.rounds for k, c in done.items()}
        counts = {k: [(r.accepted, r.drafted) for r in rounds] for k, rounds in drafts.items()}
        results.append((tokens_of(done), dict(sorted(counts.items()))))
    assert all(result == results[0] for result in results[1:])


@pytest.mark.parametrize("name", DRAWN)
def test_a_run_is_repeated_by_its_seed(name, tiny, prompts):
    first, again = (
        run(tiny, made(name, tiny, SAMPLED), prompts[:4], sampling=SAMPLED) for _ in range(2)
    )
    assert tokens_of(first) == tokens_of(again)
    other = SamplingConfig(temperature=0.8, top_k=50, top_p=0.95, seed=12)
    assert tokens_of(run(tiny, made(name, tiny, other), prompts[:4], sampling=other)) != tokens_of(
        first
    )


# Pitfalls that any drafter can meet


@pytest.mark.parametrize("name", MADE)
def test_p43_padding_is_not_token_0(name):
    """A target whose every row peaks at 0; prompts that make drafts of other tokens."""
    rows = torch.full((8, 8), 0.02)
    rows[:, 0] = 0.86
    target = target_of(markov(rows.tolist()))
    prompt = [Request("p", (5, 6, 7, 5, 6, 7, 5), 12), Request("q", (1, 2), 12)]
    done = run(target, sound(made(name, target)), prompt, batch_size=2)
    assert tokens_of(done) == {"p": [0] * 12, "q": [0] * 12}
    assert all(r.accepted <= r.depth_max and r.emitted == r.accepted + 1
               for c in done.values() for r in c.rounds)  # fmt: skip


CYCLED = ["lookup", "suffix chain", "suffix tree", "lookup, suffix", "lookup, head"]


@pytest.mark.parametrize("name", CYCLED)
@pytest.mark.parametrize(("new", "stop_ids"), [(20, [3]), (7, [])])
def test_p46_a_stop_token_or_the_limit_inside_a_draft_ends_the_output(name, new, stop_ids):
    target = cycle()
    prompt = [Request("p", (*range(8), *range(8), 0), new)]
    done = run(target, made(name, target), prompt, stop_ids=stop_ids)["p"]
    assert done.token_ids == ([1, 2, 3] if stop_ids else [1, 2, 3, 4, 5, 6, 7])
    assert len(done.token_ids) == 1 + sum(r.emitted for r in done.rounds)
    assert (done.rounds[-1].stop == "cut") == bool(stop_ids)


def head_of_the_law(shape: TreeShape | DynamicShape, children: str = "top_k") -> Make:
    def make(target: Target, sampling: SamplingConfig) -> Drafter:
        exact = markov_head(target)
        if isinstance(shape, DynamicShape):
            return DynamicHeadDrafter(exact, target.parts, shape)
        return HeadDrafter(exact, target.parts, shape, sampling=sampling, children=children)

    return make


def the_same_model(target: Target, sampling: SamplingConfig) -> ModelDrafter:
    return ModelDrafter(cycle(), target, tokens=5, sampling=sampling)


BUSHY = TreeShape.from_choices([[0], [1], [0, 0], [1, 0], [0] * 3, [0] * 4, [0] * 5])
RIGHT: dict[str, Make] = {
    "model": the_same_model,
    "lookup, model": fallback(SURE, the_same_model),
    "chain": head_of_the_law(TreeShape.chain(5)),
    "tree": head_of_the_law(BUSHY),
    "dynamic tree": head_of_the_law(DynamicShape(2, 5, 8)),
    "lookup, drawn chain": fallback(SURE, head_of_the_law(TreeShape.chain(5), "sampled")),
    "drawn chain": head_of_the_law(TreeShape.chain(5), "sampled"),
}
"""Drafters of the right five tokens, on CYCLE."""


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize(("new", "stop_ids"), [(20, [3]), (7, []), (5, [])])
def test_p46_a_stop_token_or_the_limit_inside_a_models_draft_ends_the_output(
    name, new, stop_ids, sampling
):
    target = cycle()
    drafter = RIGHT[name](target, sampling)
    request = [Request("p", (0,), new)]
    done = run(target, drafter, request, stop_ids=stop_ids, sampling=sampling)["p"]
    assert done.token_ids == list(range(1, 4 if stop_ids else 1 + new))
    (only,) = done.rounds
    assert only.stop == ("cut" if stop_ids else "leaf")
    assert only.accepted == (2 if stop_ids else new - 2)


@pytest.mark.parametrize("name", MADE)
def test_p50_drafts_get_shorter_near_the_end_of_the_context(name):
    target = target_of(tiny_model(max_position_embeddings=64))
    pair = [Request("long", (1, 2, 3) * 20, 100), Request("short", (4, 5) * 15, 20)]
    want = tokens_of(run(target, None, pair))
    for subset in (pair[:1], pair):
        done = run(target, sound(made(name, target)), subset, batch_size=2)
        assert all(c.token_ids == want[k] for k, c in done.items())
        assert done["long"].stop_reason == "context"
        assert max(r.depth_max for r in done["long"].rounds) <= 2


def test_p50_a_long_draft_of_text_in_one_row_leaves_a_head_room_in_the_longest():
    """One row is at the end of its cache while the other accepts ten tokens of its prompt."""
    target = cycle()
    pair = [Request("longest", (0,) * 60, 8), Request("repeats", (*range(8),) * 3, 40)]
    text = text_drafter(LookupConfig(tokens=10, max_n=3, min_n=3))
    for last in (head(TreeShape.chain(2)), the_same_model):
        drafter = FallbackDrafter([text], last(target, GREEDY), vocab_size=8)
        done = run(target, drafter, pair, batch_size=2)
        assert tokens_of(done) == tokens_of(run(target, None, pair))
        assert max(r.accepted for r in done["repeats"].rounds) == 10


@pytest.mark.parametrize("max_pass_tokens", [None, 9])
@pytest.mark.parametrize("name", MADE)
def test_p47_greedy_output_is_the_plain_one_at_any_depth_and_within_a_budget(
    name, max_pass_tokens, tiny, prompts, plain
):
    few = prompts[:4]
    for policy in (Whim(), TablePolicy([[1, 2]]), AdaptivePolicy(None, memory=9, probe_every=4)):
        options = {"policy": policy, "max_pass_tokens": max_pass_tokens}
        done = run_paced(tiny, made(name, tiny), few, **options)
        assert all(c.token_ids == plain[k] for k, c in done.items())
        assert any(r.drafted > 0 for r in rounds_of(done))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("name", "whose"),
    [("head", "the head's"), ("drawn head", "the head's"), ("model", "the draft model's")],
)
def test_logits_that_are_no_numbers_are_told_as_the_drafters(name, whose, sampling, tiny):
    """Greedy drafting would go on with any token, and tau would fall to 1 without a word."""
    make = {"head": head(CHAIN), "drawn head": head(CHAIN, "sampled"), "model": model}[name]
    drafter = make(tiny, sampling)
    drafting = drafter.model.model if name == "model" else drafter.head
    for weight in drafting.parameters():
        weight.data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=f"{whose} logits are not finite"):
        run(tiny, drafter, requests(2, 8), sampling=sampling)


@pytest.mark.parametrize("name", MADE)
def test_p47_bf16_ends_with_answers_of_the_same_length(name):
    target = target_of(tiny_model().to(torch.bfloat16))
    prompts = looping_requests(3, 24)
    done = run(target, made(name, target), prompts)
    assert {k: len(c.token_ids) for k, c in done.items()} == {
        r.prompt_id: r.max_new_tokens for r in prompts
    }


# What only combinations can get wrong


class Recorded:
    """Keeps what a drafter drafted, by prompt and root position."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.drafts = drafter, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Draft and record."""
        tree = self.drafter.propose(root_B, positions_B, keys_B)
        places = zip(keys_B.tolist(), positions_B.tolist(), strict=True)
        self.drafts |= dict(zip(places, tree.tokens_BN.tolist(), strict=True))
        return tree


@pytest.mark.parametrize("make", [head(TREE), model], ids=["head", "model"])
def test_p49_a_drafter_that_was_not_asked_for_some_rounds_drafts_as_a_new_one(
    make, tiny, prompts, plain
):
    first = text_drafter(LookupConfig(tokens=4, min_n=2))
    last = Recorded(make(tiny, GREEDY))
    run(tiny, FallbackDrafter([first], last, vocab_size=128), prompts[:5], batch_size=3)
    by_key = {prompt_key(r.prompt_id): r for r in prompts}
    rounds = sum(len(plain[r.prompt_id]) - 1 for r in prompts[:5])
    assert 10 < len(last.drafts) < rounds
    for (key, position), drafted in list(last.drafts.items())[::4]:
        request = by_key[key]
        text = (*request.token_ids, *plain[request.prompt_id])[:position]
        fresh = Recorded(make(tiny, GREEDY))
        run(tiny, fresh, [Request(request.prompt_id, text, 2)], batch_size=1)
        assert fresh.drafts[key, position] == drafted


def test_the_first_drafter_that_finds_something_drafts_row_by_row():
    """On CYCLE: lookup drafts for the row that repeats itself, the head for the other."""
    target = cycle()
    prompts = [Request("again", (5, 6, 7, 5, 6), 9), Request("new", (1, 2, 3), 9)]
    texts, last = text_drafter(LookupConfig(tokens=5, min_n=2)), head(TREE)(target, GREEDY)
    drafter, trees = FallbackDrafter([texts], last, vocab_size=8), []
    propose = drafter.propose
    drafter.propose = lambda *args: trees.append(propose(*args)) or trees[-1]
    run(target, drafter, prompts, batch_size=2)
    trees[0].check()
    roots = trees[0].tokens_BN[:, 0].tolist()
    again, new = roots.index(7), roots.index(4)
    assert trees[0].parents_BN[again, :4].tolist() == [-1, 0, 1, 2]
    assert trees[0].tokens_BN[again].tolist()[:4] == [7, 5, 6, 7]
    assert trees[0].parents_BN[new].tolist()[:6] == TREE.parents_N.tolist()
    assert trees[0].num_drafted_B[[again, new]].tolist() == [3, TREE.num_nodes - 1]


def test_no_drafter_is_asked_behind_one_that_serves_every_row():
    target = cycle()

    class Counted(NoDrafter):
        asked = 0

        def propose(self, *args: Tensor) -> DraftTree:
            self.asked += 1
            return super().propose(*args)

    last = Counted()
    drafter = FallbackDrafter([text_drafter(LookupConfig(tokens=4))], last, vocab_size=8)
    run(target, drafter, [Request(f"p{i}", tuple(range(8)) * 2, 20) for i in range(3)])
    assert last.asked == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": True, "responses": 0}, "suffix drafts trees, model draws its children: the two"),
        ({}, "suffix remembers finished answers and model draws its children: .*set responses=0"),
    ],
)
def test_what_cannot_stand_before_drawn_children_is_refused(options, message, tiny):
    texts = text_drafter(SuffixConfig(**options))
    FallbackDrafter([texts], model(tiny, GREEDY), vocab_size=128)  # greedy: nothing is drawn
    with pytest.raises(ValueError, match=message):
        FallbackDrafter([texts], model(tiny, SAMPLED), vocab_size=128)


def test_a_suffix_chain_without_memory_may_stand_before_drawn_children():
    target = target_of(markov(LAWS.tolist()))
    make = fallback(suffix(responses=0), model)
    drafter = make(target, PROCESSORS)
    assert drafter.scheme == "a"
    done = run(target, drafter, markov_requests(4_000), sampling=PROCESSORS, batch_size=1_000)
    chi_square_of_answers(done, processed_probs(LAWS.log(), PROCESSORS), 3)


# Drawn children beside fixed ones


@pytest.mark.parametrize("family", ["eagle", "hydra_heads"])
def test_trees_of_drawn_and_of_fixed_children_side_by_side(family):
    """One tree shape at T > 0: schemes b and c keep one law, b even the plain text."""
    target = target_of(markov(LAWS.tolist()))
    prompts = markov_requests(4_000)
    plain = run(target, None, prompts, sampling=PROCESSORS, batch_size=1_000)
    outputs, taus = {}, {}
    for children, scheme in (("top_k", "b"), ("sampled", "c")):
        drafter = head(TreeShape.from_choices([[0], [1], [0, 0], [1, 0]]), children, family)
        drafter = sound(drafter(target, PROCESSORS))
        assert drafter.scheme == scheme
        done = run(target, drafter, prompts, sampling=PROCESSORS, batch_size=1_000)
        chi_square_of_answers(done, processed_probs(LAWS.log(), PROCESSORS), 3)
        outputs[scheme], taus[scheme] = tokens_of(done), tau(done)
    assert outputs["b"] == tokens_of(plain)
    assert outputs["c"] != outputs["b"]
    assert taus["b"] != taus["c"]
    assert all(1.05 < value < 3 for value in taus.values())
