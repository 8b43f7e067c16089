"""The decoding loop: the target's own output, whatever drafts, in any batch, up to any limit.

Shapes: B rows, T tokens, N tree nodes, V vocabulary.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from laws import LAWS, PROCESSORS, chi_square_of_answers
from models import (
    VARIANTS,
    ScriptedDrafter,
    anti,
    cycle,
    make_head,
    markov,
    oracle,
    requests,
    run,
    scripted,
    some_vocab,
    target_of,
    tau,
    tiny_model,
    tokens_of,
    variant_model,
)
from torch import Tensor

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.drafters.head import HeadDrafter, top_ids
from headstart.eval.engine.sampling import SamplingConfig, processed_probs, prompt_key
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.heads.base import DraftHead
from headstart.heads.cache import KVCache
from headstart.heads.target import Target, pick_features
from headstart.heads.vocab import DraftVocab

GREEDY = SamplingConfig()
CHAIN = TreeShape.chain
TREE = TreeShape.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
BRANCH = TreeShape.from_choices([[0], [1], [1, 0]])  # P48
FAMILIES = ("medusa", "eagle", "eagle3", "hydra_heads")


def _head(family: str, target: Target, **options: Any) -> DraftHead:
    """Make a random head; EAGLE-3 taps every state that there is."""
    if family == "eagle3":
        options = {"aux": list(range(1, target.shape.num_layers))} | options
    return make_head(family, target, **options)


def _drafter(
    target: Target, head: DraftHead, shape: TreeShape, sampling: SamplingConfig = GREEDY, **kw: Any
) -> HeadDrafter:
    return HeadDrafter(head, target.parts, shape, sampling=sampling, **kw)


def _generated(target: Target, prompts: list[Request]) -> dict[str, list[int]]:
    """Return what transformers' own greedy decoding says."""
    found = {}
    for r in prompts:
        ids = torch.tensor([r.token_ids])
        out = target.model.generate(ids, do_sample=False, max_new_tokens=r.max_new_tokens)
        found[r.prompt_id] = out[0, ids.shape[1] :].tolist()
    return found


class FixedDrafter(NoDrafter):
    """Drafts the same tokens below every root."""

    def __init__(self, shape: TreeShape, tokens: list[int]) -> None:
        self.shape, self.tokens, self.num_nodes = shape, tokens, shape.num_nodes

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Return the fixed tree."""
        drafted_BN = torch.tensor(self.tokens).expand(len(root_B), -1)
        return self.shape.fill(torch.cat([root_B[:, None], drafted_BN], 1))


# Greedy output is the target's own.


@pytest.fixture(scope="module")
def prompts() -> list[Request]:
    return requests(20, 64)


@pytest.fixture(scope="module")
def generated(tiny: Target, prompts: list[Request]) -> dict[str, list[int]]:
    return _generated(tiny, prompts)


@pytest.mark.parametrize(("batch_size", "count"), [(1, 6), (4, 20)])
def test_p47_plain_decoding_is_what_transformers_generates(
    tiny: Target,
    prompts: list[Request],
    generated: dict[str, list[int]],
    batch_size: int,
    count: int,
) -> None:
    done = run(tiny, None, prompts[:count], batch_size=batch_size)
    assert all(c.token_ids == generated[prompt_id] for prompt_id, c in done.items())


HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 4},
    "medusa, own rows": {"num_heads": 4, "num_blocks": 2, "readout": "own"},
    "eagle": {},
    "eagle, two layers": {"num_layers": 2},
    "eagle3": {},
    "eagle3, two layers": {"num_layers": 2, "fc_norm": True, "feedback": "post_norm"},
    "hydra_heads": {},
    "hydra_heads, prefix": {"num_heads": 3, "arch": "prefix-mlp", "readout": "own"},
}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("medusa", CHAIN(4)),
        ("medusa", TREE),
        ("medusa, own rows", TREE),
        ("eagle", CHAIN(4)),
        ("eagle", TREE),
        ("eagle, two layers", TREE),
        ("eagle3", CHAIN(4)),
        ("eagle3", TREE),
        ("eagle3, two layers", TREE),
        ("hydra_heads", CHAIN(4)),
        ("hydra_heads", TREE),
        ("hydra_heads, prefix", TREE),
    ],
)
def test_p47_greedy_output_with_any_head_is_the_plain_one(
    tiny: Target,
    prompts: list[Request],
    generated: dict[str, list[int]],
    name: str,
    shape: TreeShape,
) -> None:
    """20 prompts of 64 tokens in a batch of 4 with refill, three of them at batch 1 as well."""
    head = _head(name.split(",")[0], tiny, **HEADS[name])
    drafter = _drafter(tiny, head, shape)
    done = run(tiny, drafter, prompts, batch_size=4)
    assert {c.prompt_id: c.token_ids for c in done.values()} == generated
    for prompt_id, c in run(tiny, drafter, prompts[:3], batch_size=1).items():
        assert c.token_ids == generated[prompt_id]
        assert [r.accepted for r in c.rounds] == [r.accepted for r in done[prompt_id].rounds]


def test_a_head_at_its_start_has_drafts_accepted_and_changes_nothing(
    tiny: Target, prompts: list[Request], generated: dict[str, list[int]]
) -> None:
    """An untrained Medusa repeats the target's next token, which a looping target then says."""
    head = make_head("medusa", tiny, seed=None)
    done = run(tiny, _drafter(tiny, head, TREE), prompts)
    assert {c.prompt_id: c.token_ids for c in done.values()} == generated
    assert tau(done) > 1.1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_vocabulary_costs_acceptance_and_never_output(
    tiny: Target, prompts: list[Request], generated: dict[str, list[int]], family: str
) -> None:
    head = _head(family, tiny, vocab=some_vocab(32))
    done = run(tiny, _drafter(tiny, head, TREE), prompts[:8])
    assert all(c.token_ids == generated[c.prompt_id] for c in done.values())


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "llama"])
def test_other_architectures_decode_as_transformers_generates(name: str) -> None:
    """Soft caps, scales, biases and windows of 8, drafted partly right on a branching tree."""
    target = target_of(variant_model(name))
    prompts = requests(4, 24, seed=1)
    want = _generated(target, prompts)
    assert tokens_of(run(target, None, prompts)) == want
    half = scripted(target, prompts, TREE, lambda path: path in [(1,), (1, 0)])
    done = run(target, half, prompts)
    assert tokens_of(done) == want
    assert tau(done) > 2.5
    # Frozen: phi's read-out has a bias, which rows of one's own have not.
    for family, options in (("eagle", {}), ("eagle3", {"readout": "frozen"}), ("hydra_heads", {})):
        drafter = _drafter(target, _head(family, target, **options), TREE)
        assert tokens_of(run(target, drafter, prompts)) == want


def test_p51_a_sliding_window_of_8_rolls_back(tiny: Target) -> None:
    target = target_of(variant_model("mistral", num_hidden_layers=2))
    prompt = [Request("p", (3, 14, 15, 92, 65, 35), 20)]
    want = _generated(target, prompt)
    for right in ((), (1,), (1, 2), (1, 2, 3, 4)):
        depths = set(right)
        drafter = scripted(target, prompt, CHAIN(4), lambda path, ok=depths: len(path) in ok)
        assert tokens_of(run(target, drafter, prompt)) == want
    for family in FAMILIES:
        drafter = _drafter(target, _head(family, target), CHAIN(4))
        assert tokens_of(run(target, drafter, prompt)) == want


def test_p47_bf16_ends_and_reports_where_it_leaves_fp32(
    prompts: list[Request], capsys: pytest.CaptureFixture[str]
) -> None:
    """Kernels of other shapes round otherwise in bf16: this reports and asserts no equality."""
    target = target_of(tiny_model().to(torch.bfloat16))
    prompts = prompts[:10]
    plain = tokens_of(run(target, None, prompts))
    for family in FAMILIES:
        head = _head(family, target)
        drafted = tokens_of(run(target, _drafter(target, head, TREE), prompts))
        assert {k: len(v) for k, v in drafted.items()} == {k: len(v) for k, v in plain.items()}
        first = {
            k: next(i for i, (a, b) in enumerate(zip(v, plain[k], strict=True)) if a != b)
            for k, v in drafted.items()
            if v != plain[k]
        }
        with capsys.disabled():
            print(f"\nbf16 {family}: {10 - len(first)}/10 equal, first differences {first}")


# Acceptance of drafters with known answers.


def test_p54_oracle_and_anti_have_tau_6_and_1(tiny: Target) -> None:
    prompts = requests(6, 1 + 6 * 8)
    plain = tokens_of(run(tiny, None, prompts))
    for drafter, want in ((oracle(tiny, prompts, 5), 6.0), (anti(tiny, prompts, 5), 1.0)):
        done = run(tiny, drafter, prompts)
        assert tokens_of(done) == plain
        assert tau(done) == want
    rounds = [r for c in done.values() for r in c.rounds]
    assert {(r.accepted, r.stop) for r in rounds if r.drafted == 5} == {(0, "rejected")}


def _cycle_oracle(target: Target, heads: int) -> DraftHead:
    """Build the exact oracle of CYCLE: zero blocks, head k says i + 2 + k modulo 8."""
    head = make_head("medusa", target, seed=None, num_heads=heads, readout="own")
    i = torch.arange(8)
    head.lm_heads_KWD.data.zero_()
    for k in range(heads):
        head.lm_heads_KWD.data[k, (i + 2 + k) % 8, i] = 10.0
    return head


def test_p54_the_exact_medusa_head_of_a_cycle_has_tau_6() -> None:
    target = target_of(cycle())
    head = _cycle_oracle(target, 5)
    done = run(target, _drafter(target, head, CHAIN(5)), [Request("p", (0,), 1 + 6 * 5)])
    assert done["p"].token_ids == [(1 + i) % 8 for i in range(31)]
    assert [r.accepted for r in done["p"].rounds] == [5] * 5
    assert tau(done) == 6.0


def test_p46_a_stop_token_inside_an_accepted_run_ends_the_output() -> None:
    target = target_of(cycle())
    drafter = _drafter(target, _cycle_oracle(target, 5), CHAIN(5))
    prompt = [Request("p", (0,), 20)]
    done = run(target, drafter, prompt, stop_ids=[3])["p"]
    assert done.token_ids == [1, 2, 3]
    assert done.stop_reason == "stop"
    assert [(r.accepted, r.emitted, r.stop) for r in done.rounds] == [(2, 2, "cut")]
    plain = run(target, None, prompt, stop_ids=[3])["p"]
    assert plain.token_ids == done.token_ids
    assert plain.stop_reason == "stop"


def test_p46_a_stop_token_as_the_bonus_ends_the_output_uncut() -> None:
    target = target_of(cycle())
    drafter = _drafter(target, _cycle_oracle(target, 2), CHAIN(2))
    done = run(target, drafter, [Request("p", (0,), 20)], stop_ids=[4])["p"]
    assert done.token_ids == [1, 2, 3, 4]
    assert [(r.accepted, r.emitted, r.stop) for r in done.rounds] == [(2, 3, "leaf")]


def test_a_stop_token_from_prefill_ends_before_the_first_round() -> None:
    target = target_of(cycle())
    prompt = [Request(f"p{i}", (i,), 5) for i in range(8)]
    done = run(target, _drafter(target, _cycle_oracle(target, 5), CHAIN(5)), prompt, stop_ids=[1])
    assert done["p0"].token_ids == [1]
    assert done["p0"].rounds == []
    assert done["p7"].token_ids == [0, 1]
    assert done["p6"].token_ids == [7, 0, 1]


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_p46_a_limit_is_met_exactly(limit: int) -> None:
    target = target_of(cycle())
    drafter = _drafter(target, _cycle_oracle(target, 5), CHAIN(5))
    prompt = [Request("p", (0,), limit)]
    done = run(target, drafter, prompt)["p"]
    assert done.token_ids == [(1 + i) % 8 for i in range(limit)]
    assert done.stop_reason == "length"
    assert done.token_ids == run(target, None, prompt)["p"].token_ids
    assert len(done.token_ids) == 1 + sum(r.emitted for r in done.rounds)
    assert all(r.accepted <= r.depth_max for r in done.rounds)


def _peaks_at_zero() -> Target:
    rows = torch.full((8, 8), 0.02)
    rows[:, 0] = 0.86
    return target_of(markov(rows.tolist()))


@pytest.mark.parametrize(
    ("shape", "drafted"),
    [
        (CHAIN(1), [5]),
        (BRANCH, [5, 6, 7]),
        (BRANCH, [5, 6, -1]),  # a short leaf: the absent node is computed with token 0
        (CHAIN(3), [-1, -1, -1]),
        (TreeShape.from_choices([[0], [1], [0, 0], [1, 0]]), [5, -1, -1, -1]),
    ],
    ids=["chain", "tree", "short leaf", "nothing", "padding"],
)
def test_p43_no_token_is_taken_unseen_and_padding_is_not_token_0(
    shape: TreeShape, drafted: list[int]
) -> None:
    target = _peaks_at_zero()
    prompt = [Request("p", (4, 2), 12), Request("q", (1,), 9)]
    done = run(target, FixedDrafter(shape, drafted), prompt)
    plain = run(target, None, prompt)
    for prompt_id, length in (("p", 12), ("q", 9)):
        assert done[prompt_id].token_ids == [0] * length == plain[prompt_id].token_ids
        assert {r.accepted for r in done[prompt_id].rounds} == {0}
    assert tau(done) == 1.0


def test_the_cache_of_a_run_is_free_at_its_end(tiny: Target, monkeypatch) -> None:
    """Kept until a garbage collection it would be held beside those of the next runs."""
    made, new_cache = [], tiny.new_cache

    def spy(*sizes: int) -> KVCache:
        cache = new_cache(*sizes)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(tiny, "new_cache", spy)
    gc.disable()
    try:
        run(tiny, None, requests(3, 6))
        assert [ref() for ref in made] == [None]
    finally:
        gc.enable()


def test_p43_the_cache_is_not_read_at_a_padding_slot(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies beyond each row's length is spoilt after every round: one read would show."""
    keep = KVCache.keep

    def keep_and_spoil(cache: KVCache, paths: list[list[int]]) -> None:
        keep(cache, paths)
        for stack in cache.stacks:
            for row, length in enumerate(cache.lengths):
                stack[:, row, :, length:] = 1e6

    prompts = requests(3, 24)
    want = tokens_of(run(tiny, None, prompts))
    drafter = scripted(tiny, prompts, BRANCH, lambda path: path == (1,))
    propose = drafter.propose

    def with_absent_nodes(*args: Tensor) -> DraftTree:
        tokens_BN = propose(*args).tokens_BN
        return BRANCH.fill(tokens_BN.index_fill(1, torch.tensor([1, 3]), -1))

    monkeypatch.setattr(drafter, "propose", with_absent_nodes)
    monkeypatch.setattr(KVCache, "keep", keep_and_spoil)
    done = run(tiny, drafter, prompts)
    assert tokens_of(done) == want
    assert {r.drafted for c in done.values() for r in c.rounds} <= {0, 1}
    assert tau(done) > 1.9


def test_p48_three_rounds_accept_a_later_branch_end_to_end(tiny: Target) -> None:
    prompts = requests(3, 1 + 3 * 3)
    want = tokens_of(run(tiny, None, prompts))
    drafter = scripted(tiny, prompts, BRANCH, lambda path: path[0] == 1)
    done = run(tiny, drafter, prompts)
    assert tokens_of(done) == want
    for c in done.values():
        assert [(r.accepted, r.emitted, r.drafted, r.stop) for r in c.rounds] == [
            (2, 3, 3, "leaf")
        ] * 3


class Overruled:
    """Lets a head draft, keeps what it drafted by root position, and sends a script instead.

    The script accepts another path every round, so the head's state sees every kind of round.
    """

    PATHS = ([], [(0,)], [(1,), (1, 0)], [(0,), (0, 0), (0, 0, 0)], [(1,), (1, 0), (1, 0, 0)])

    def __init__(self, inner: HeadDrafter, script: ScriptedDrafter) -> None:
        self.inner, self.script, self.turn = inner, script, 0
        self.drafts: dict[tuple[int, int], list[int]] = {}
        script.right = lambda path: path in self.PATHS[self.turn % len(self.PATHS)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Record the head's draft and return the script's."""
        drafted = self.inner.propose(root_B, positions_B, keys_B).tokens_BN.tolist()
        places = zip(keys_B.tolist(), positions_B.tolist(), strict=True)
        self.drafts |= dict(zip(places, drafted, strict=True))
        self.turn += 1
        return self.script.propose(root_B, positions_B, keys_B)


@pytest.mark.parametrize("family", FAMILIES)
def test_p49_a_drafter_after_any_rounds_drafts_as_a_new_one(tiny: Target, family: str) -> None:
    prompts = requests(5, 30)
    head = _head(family, tiny)

    def overruled(script: ScriptedDrafter) -> Overruled:
        return Overruled(_drafter(tiny, head, TREE), script)

    script = scripted(tiny, prompts, TREE, lambda path: True)
    worn = overruled(script)
    done = run(tiny, worn, prompts, batch_size=3)  # with refill and rows that move
    assert {r.accepted for c in done.values() for r in c.rounds} == {0, 1, 2, 3}
    for (key, position), drafted in worn.drafts.items():
        new = overruled(script)
        prompt_id = next(r.prompt_id for r in prompts if prompt_key(r.prompt_id) == key)
        text = script.texts[key][:position]
        run(tiny, new, [Request(prompt_id, tuple(text), 2)], batch_size=1)
        assert new.drafts[key, position] == drafted


# Batches, order and limits.


def _with_limits(counts: list[int]) -> list[Request]:
    made = requests(len(counts), 0)
    return [Request(r.prompt_id, r.token_ids, n) for r, n in zip(made, counts, strict=True)]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(temperature=0.8, seed=3)])
@pytest.mark.parametrize("children", ["top_k", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompts_result_depends_neither_on_the_batch_nor_on_the_order(
    tiny: Target, family: str, children: str, sampling: SamplingConfig
) -> None:
    """Answers of 1 to 17 tokens, so that rows finish together, alone, and in prefill."""
    prompts = _with_limits([1, 17, 5, 1, 1, 9, 5, 2, 17, 3, 1])
    head = _head(family, tiny, vocab=some_vocab(64))
    results = []
    for order, batch_size in ((1, 1), (1, 4), (-1, 4), (1, 11)):
        drafter = _drafter(tiny, head, TREE, sampling, children=children)
        done = run(tiny, drafter, prompts[::order], sampling=sampling, batch_size=batch_size)
        results.append(
            {k: (c.token_ids, [r.accepted for r in c.rounds]) for k, c in sorted(done.items())}
        )
        assert {r.prompt_id: r.max_new_tokens for r in prompts} == {
            k: len(c.token_ids) for k, c in done.items()
        }
    assert all(result == results[0] for result in results[1:])


def test_a_finished_completion_is_handed_out_once_and_not_touched_again(tiny: Target) -> None:
    """Two rows finish in one round while one prompt waits; prompts end in prefill among them."""
    prompts = _with_limits([3, 3, 1, 3, 1, 1])
    done = {}
    for c in decode(tiny, NoDrafter(), prompts, sampling=GREEDY, stop_ids=[], batch_size=2):
        assert c.prompt_id not in done
        done[c.prompt_id] = (c, list(c.token_ids), len(c.rounds))
    for r in prompts:
        c, tokens, rounds = done[r.prompt_id]
        assert len(tokens) == r.max_new_tokens == rounds + 1
        assert (c.token_ids, len(c.rounds)) == (tokens, rounds)


def test_prompts_longer_than_a_prefill_chunk_are_read_whole(
    tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [Request(f"p{n}", tuple(range(1, n + 1)), 12) for n in (3, 8, 11, 16, 25)]
    head = make_head("eagle", tiny)
    want = run(tiny, _drafter(tiny, head, TREE), prompts, batch_size=1)
    monkeypatch.setattr("headstart.eval.engine.prefill.PREFILL_CHUNK", 8)
    have = run(tiny, _drafter(tiny, head, TREE), prompts, batch_size=5)
    assert tokens_of(have) == tokens_of(want) == _generated(tiny, prompts)
    for prompt_id, c in have.items():
        assert [r.accepted for r in c.rounds] == [r.accepted for r in want[prompt_id].rounds]


@pytest.mark.parametrize("family", [*FAMILIES, "oracle"])
def test_p50_drafts_get_shorter_near_the_end_of_the_context(family: str) -> None:
    """A maximum of 64, a prompt of 60 and a tree of depth 6; then a shorter prompt beside it."""
    target = target_of(tiny_model(max_position_embeddings=64))
    prompts = [
        Request("long", tuple(range(1, 61)), 100),
        Request("short", tuple(range(1, 31)), 20),
    ]
    plain = run(target, None, prompts)
    if family == "oracle":
        drafter = oracle(target, prompts, 6)
    else:
        options = {} if family.startswith("eagle") else {"num_heads": 6}
        drafter = _drafter(target, _head(family, target, **options), CHAIN(6))
    for subset in (prompts[:1], prompts):
        done = run(target, drafter, subset, batch_size=2)
        assert len(done["long"].token_ids) == 4  # 60 + 4 = 64
        assert done["long"].stop_reason == "context"
        assert all(c.token_ids == plain[k].token_ids for k, c in done.items())
        assert max(r.depth_max for r in done["long"].rounds) <= 2
    assert done["short"].stop_reason == "length"
    assert len(done["short"].token_ids) == 20


def test_max_len_bounds_prompt_and_answer_together(tiny: Target) -> None:
    done = run(tiny, None, [Request("p", (1, 2, 3), 50)], max_len=10)["p"]
    assert len(done.token_ids) == 7
    assert done.stop_reason == "context"


@pytest.mark.parametrize(
    ("request_", "max_len", "message"),
    [
        (Request("e", (), 5), None, "prompt e: no tokens; remove the row"),
        (Request("l", (1,) * 512, 5), None, "prompt l: 512 tokens leave no room in a context of 5"),
        (Request("m", (1,) * 10, 5), 10, "prompt m: 10 tokens leave no room in a context of 10"),
        (Request("n", (1,), 0), None, "prompt n: max_new_tokens=0: need at least 1"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_named_before_any_work(
    tiny: Target, request_: Request, max_len: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(tiny, None, [Request("fine", (1,), 5), request_], max_len=max_len)


def test_no_prompts_give_no_completions(tiny: Target) -> None:
    assert run(tiny, None, []) == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_name_the_prompt(temperature: float) -> None:
    target = target_of(tiny_model())
    target.parts.readout.weight_WD.fill_(float("nan"))
    sampling = SamplingConfig(temperature=temperature)
    with pytest.raises(RuntimeError, match="prompt p: the target's logits are not finite at token"):
        run(target, None, [Request("p", (1,), 5)], sampling=sampling)


def test_a_tree_deeper_than_the_head_is_refused(tiny: Target) -> None:
    head = make_head("medusa", tiny, num_heads=2)
    with pytest.raises(ValueError, match="tree.depth=3 but head.num_heads=2"):
        _drafter(tiny, head, CHAIN(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_wider_than_the_draft_vocabulary_is_refused(tiny: Target, family: str) -> None:
    head = _head(family, tiny, vocab=some_vocab(2))
    with pytest.raises(ValueError, match=r"path \[2\] asks for rank 2"):
        _drafter(tiny, head, TREE)


def test_drawn_children_with_a_rank_left_out_are_refused(tiny: Target) -> None:
    shape, sampling = TreeShape.from_choices([[1]]), SamplingConfig(temperature=1.0)
    head = make_head("eagle", tiny)
    _drafter(tiny, head, shape, sampling)  # fixed children may be any
    with pytest.raises(ValueError, match=r"path \[1\] without rank 0 beside it"):
        _drafter(tiny, head, shape, sampling, children="sampled")


DEPTHS = ((CHAIN(1), 1), (CHAIN(4), 4), (TREE, 3))


@pytest.mark.parametrize(
    ("family", "shape", "calls"),
    [
        ("medusa", TREE, 1),
        *((family, shape, depth) for family in FAMILIES[1:] for shape, depth in DEPTHS),
    ],
)
def test_k_drafted_tokens_cost_k_calls_and_not_one_more(
    tiny: Target, family: str, shape: TreeShape, calls: int
) -> None:
    head, made = _head(family, tiny), []
    for name in ("extend", "step"):
        method = getattr(head, name)
        setattr(head, name, lambda *a, m=method, **k: made.append(1) or m(*a, **k))
    drafter = _drafter(tiny, head, shape)
    done = run(tiny, drafter, [Request("p", (1, 2, 3), 9)])["p"]
    assert drafter.draft_calls == calls - 1  # the first depth comes with the refresh
    # Prefill adds one refresh; the last round, after which nothing is drafted, has none.
    assert len(made) == calls * len(done.rounds)


# Sampling.


@pytest.mark.parametrize("shape", [CHAIN(3), TREE], ids=["a1", "b"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fixed_children_leave_sampled_output_token_identical(
    tiny: Target, prompts: list[Request], family: str, shape: TreeShape
) -> None:
    sampling = SamplingConfig(temperature=0.8, top_k=50, top_p=0.95, seed=11)
    drafter = _drafter(tiny, _head(family, tiny), shape, sampling)
    assert drafter.scheme == ("a1" if shape.num_nodes == 4 else "b")
    prompts = prompts[:6]
    plain = run(tiny, None, prompts, sampling=sampling)
    assert tokens_of(run(tiny, drafter, prompts, sampling=sampling)) == tokens_of(plain)
    other = SamplingConfig(temperature=0.8, top_k=50, top_p=0.95, seed=12)
    assert tokens_of(run(tiny, None, prompts, sampling=other)) != tokens_of(plain)


def test_an_oracle_of_the_sampled_text_is_always_accepted(tiny: Target) -> None:
    sampling = SamplingConfig(temperature=0.8, seed=5)
    prompts = requests(4, 1 + 6 * 5)
    done = run(tiny, oracle(tiny, prompts, 5, sampling), prompts, sampling=sampling)
    assert tau(done) == 6.0
    assert tokens_of(done) == tokens_of(run(tiny, None, prompts, sampling=sampling))


def test_p42_the_first_a_verified_and_the_bonus_token_have_the_tempered_law() -> None:
    """100,000 draws of each: the head is the target's own law, so every draft is accepted."""
    target = target_of(markov([[0.6, 0.3, 0.1, 0, 0, 0, 0, 0]] * 8))
    sampling = SamplingConfig(temperature=0.5)
    head = make_head("medusa", target, seed=None, num_heads=1)
    drafter = _drafter(target, head, CHAIN(1), sampling, children="sampled")
    assert drafter.scheme == "a"
    prompts = [Request(f"p{i}", (i % 8,), 3) for i in range(100_000)]
    done = run(target, drafter, prompts, sampling=sampling, batch_size=5_000)
    assert {tuple((r.accepted, r.stop) for r in c.rounds) for c in done.values()} == {
        ((1, "leaf"),)
    }
    tokens_BT = torch.tensor([c.token_ids for c in done.values()])
    for place in range(3):
        share = tokens_BT[:, place].bincount(minlength=8) / len(prompts)
        assert share[:3].tolist() == pytest.approx([0.783, 0.196, 0.022], abs=0.005)
        assert share[3:].sum() == 0


@pytest.mark.parametrize(
    ("shape", "scheme"),
    [(CHAIN(2), "a"), (TreeShape.from_choices([[0], [1], [0, 0], [1, 0], [1, 1]]), "c")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_children_leave_the_law_of_the_output_unchanged(
    family: str, shape: TreeShape, scheme: str
) -> None:
    """6,000 prompts of two tokens, answers of three, from a head that drafts over 6 of 8 tokens."""
    target = target_of(markov(LAWS.tolist()))
    vocab = DraftVocab(torch.tensor([0, 1, 3, 4, 6, 7]), 8)
    head = _head(
        family, target, vocab=vocab, **({} if family.startswith("eagle") else {"num_heads": 2})
    )
    drafter = _drafter(target, head, shape, PROCESSORS, children="sampled")
    assert drafter.scheme == scheme
    prompts = [Request(f"p{i}", (5, 3), 3) for i in range(6_000)]
    done = run(target, drafter, prompts, sampling=PROCESSORS, batch_size=1_000)
    accepted = [r.accepted for c in done.values() for r in c.rounds]
    assert 0.05 < sum(a > 0 for a in accepted) / len(accepted) < 0.95
    chi_square_of_answers(done, processed_probs(LAWS.log(), PROCESSORS), 3)


def test_thechi_square_of_answers_sees_a_wrong_bonus() -> None:
    """Answers whose last token ignores the temperature are found out: the test has power."""
    target, raw = target_of(markov(LAWS.tolist())), SamplingConfig(temperature=1.0, top_k=4, seed=2)
    prompts = [Request(f"p{i}", (5, 3), 3) for i in range(6_000)]
    done = run(target, None, prompts, sampling=raw, batch_size=1_000)
    with pytest.raises(AssertionError):
        chi_square_of_answers(done, processed_probs(LAWS.log(), PROCESSORS), 3)


# The head drafter's own parts.


def test_top_ids_order_by_value_and_break_ties_by_the_lowest_id() -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0, 3.0, -0.0, 0.0, float("-inf"), 1.0]])
    assert top_ids(logits, 5).tolist() == [[1, 3, 0, 7, 5]]
    assert top_ids(logits.bfloat16(), 3).tolist() == [[1, 3, 0]]
    assert top_ids(torch.zeros(2, 4), 1).tolist() == [[0], [0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_node_carries_what_the_head_ranks_there_after_the_path_to_it(
    tiny: Target, family: str
) -> None:
    head, text = _head(family, tiny), torch.tensor([[5, 77, 3, 41, 9]])
    output = tiny.forward(text, taps=head.aux_features)
    hidden = pick_features(output.hidden_BTD, output.aux, head.aux_features)[:, :-1]
    drafter = _drafter(tiny, head, TREE)
    drafter.start(1, 32)
    drafter.observe(text[:, 1:], hidden, [4])
    tree = drafter.propose(text[:, -1], torch.tensor([4]), torch.tensor([0]))
    token_of = {(): 9} | dict(zip(TREE.choices, tree.tokens_BN[0, 1:].tolist(), strict=True))
    for path in TREE.choices:
        state = head.new_state(1, 32, 8, tiny.parts)
        logits = head.extend(state, text[:, 1:], hidden, [4], tiny.parts)
        if family == "medusa":
            logits = logits[:, len(path) - 1]
        else:
            for depth in range(1, len(path)):
                above = torch.tensor([[token_of[path[:depth]]]])
                logits = head.step(state, above, torch.tensor([[depth - 1]]), tiny.parts)
        best = logits.flatten().sort(descending=True, stable=True).indices
        assert token_of[path] == int(best[path[-1]])


@pytest.mark.parametrize(
    ("children", "temperature", "shape", "scheme"),
    [
        ("top_k", 1.0, CHAIN(2), "a1"),
        ("top_k", 1.0, TREE, "b"),
        ("sampled", 1.0, CHAIN(2), "a"),
        ("sampled", 1.0, TREE, "c"),
        ("sampled", 0.0, TREE, "b"),
    ],
)
def test_a_drafter_names_its_scheme(
    tiny: Target, children: str, temperature: float, shape: TreeShape, scheme: str
) -> None:
    sampling = SamplingConfig(temperature=temperature)
    drafter = _drafter(tiny, make_head("eagle", tiny), shape, sampling, children=children)
    assert drafter.scheme == scheme


@pytest.mark.parametrize("children", ["top_k", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafted_tree_is_sound(
    tiny: Target, prompts: list[Request], family: str, children: str
) -> None:
    sampling = SamplingConfig(temperature=1.0, top_k=2)  # fewer candidates than the tree asks for
    drafter = _drafter(
        tiny, _head(family, tiny, vocab=some_vocab(64)), TREE, sampling, children=children
    )
    propose = drafter.propose

    def checked(*args: Tensor) -> DraftTree:
        tree = propose(*args)
        tree.check()
        return tree

    drafter.propose = checked
    run(tiny, drafter, prompts[:2], sampling=sampling)
