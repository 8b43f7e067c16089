"""hydra_heads: shifts, inputs, start, and drafting over paths that equals training.

Shapes: B rows, T tokens, K heads, N selected positions, W draft vocabulary, D width, M nodes.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    cycle,
    feature_batch,
    make_head,
    markov,
    requests,
    run,
    some_vocab,
    target_of,
    tau,
    tokens_of,
    variant_model,
)
from torch import Tensor

from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.dynamic import DynamicHeadDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import TreeShape
from headstart.heads.base import FeatureBatch, families
from headstart.heads.checkpoint import info_for, load_head, save_head
from headstart.heads.hydra_heads import HydraHeads, HydraHeadsConfig
from headstart.heads.losses import select
from headstart.heads.target import Target
from headstart.heads.vocab import DraftVocab

GREEDY = SamplingConfig()
CHAIN = TreeShape.chain
TREE = TreeShape.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
SIX, SIX_MASK = [10, 11, 12, 13, 14, 15], [0, 0, 0, 1, 1, 1]
USED = {0: (1, 2, 3), 1: (0, 1, 2), 2: (0, 1)}
"""Rows of the six-token example by head, prompt 10 11 12 and response 13 14 15."""
KINDS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "mlp, own rows": {"num_layers": 3, "readout": "own"},
    "prefix-mlp": {"arch": "prefix-mlp", "num_layers": 2},
}
every_kind = pytest.mark.parametrize("kind", list(KINDS))


def _head(
    kind: str,
    target: Target,
    *,
    vocab: DraftVocab | None = None,
    seed: int | None = 0,
    **options: Any,
) -> HydraHeads:
    head = make_head("hydra_heads", target, vocab=vocab, seed=seed, **KINDS[kind], **options)
    assert isinstance(head, HydraHeads)
    return head


def _row(length: int, seed: int) -> list[int]:
    return torch.randint(128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _training_logits(
    head: HydraHeads, batch: FeatureBatch, target: Target
) -> dict[tuple[int, int], Tensor]:
    """Return what training reads out in row 0, by (position, head), where there is a label."""
    picked = select(batch, len(head.heads), head.config, head.vocab, all_supervised=True)
    states_NKD = head.states(batch, picked, target.parts)
    readout = head.draft_readout(target.parts)
    logits_NKW = readout(states_NKD)
    if head.lm_heads_KWD is not None:
        logits_NKW = readout.post(torch.einsum("nkd,kwd->nkw", states_NKD, head.lm_heads_KWD))
    return {
        (int(picked.student_NK[n, k]), k): logits_NKW[n, k]
        for n, k in picked.valid_NK.nonzero().tolist()
        if picked.row_N[n] == 0
    }


def _drafted(
    head: HydraHeads, target: Target, text: Tensor, *levels: tuple[list[int], list[int]]
) -> Tensor:
    """Return the logits [M, W] after text [1, T] and levels of (tokens, parent slots)."""
    hidden, known = target.forward(text).hidden_BTD[:, :-1], text.shape[1] - 1
    state = head.new_state(1, 32, 8, target.parts)
    if known > 2:  # two calls, as a prompt and a round give them
        head.extend(state, text[:, 1:3], hidden[:, :2], [2], target.parts)
    first = 2 if known > 2 else 0
    pairs = (text[:, 1 + first :], hidden[:, first:])
    logits = head.extend(state, *pairs, [known - first], target.parts)
    for tokens, parents in levels:
        logits = head.step(state, torch.tensor([tokens]), torch.tensor([parents]), target.parts)
    return logits[0]


def _drafter(head: HydraHeads, target: Target, shape: TreeShape) -> HeadDrafter:
    return HeadDrafter(head, target.parts, shape, sampling=GREEDY)


def _loss(head: HydraHeads, batch: FeatureBatch, target: Target) -> Tensor:
    return head(batch, target.parts).total(head.denominators(batch))


# Settings.


def test_the_family_is_registered_with_its_config() -> None:
    assert families()["hydra_heads"] == (HydraHeadsConfig, HydraHeads)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_heads": 0}, "head.num_heads=0: need at least one"),
        ({"num_layers": 0}, "head.num_layers=0: need at least one"),
        ({"arch": "prefix"}, "head.arch=prefix: expected one of mlp, prefix-mlp"),
        ({"readout": "new"}, "head.readout=new: expected one of tied, own"),
        ({"depth_decay": 1.5}, "head.depth_decay=1.5: expected 0 < decay <= 1"),
    ],
)
def test_bad_settings_name_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HydraHeadsConfig(**values)


def test_own_read_outs_refuse_a_target_with_a_read_out_bias() -> None:
    with pytest.raises(ValueError, match="head.readout=own: the target's read-out has a bias"):
        _head("mlp, own rows", target_of(variant_model("phi")))


# Shifts, inputs and masks.


@every_kind
def test_p20_the_six_token_example_uses_exactly_its_rows_and_inputs(
    tiny: Target, kind: str
) -> None:
    """Row 2 (root 13): head 0 takes (c2, 13) and head 1 (c2, 13, 14)."""
    head, batch = _head(kind, tiny, num_heads=3), feature_batch(tiny, [SIX], [SIX_MASK])
    context_TD = batch.hidden_BTD[0]
    if head.prefix is not None:
        causal = torch.full((6, 6), -torch.inf).triu(1)
        context_TD = head.prefix(context_TD[None], torch.arange(6)[None], causal)[0]
    picked = select(batch, 3, head.config, None)
    states_NKD = head.states(batch, picked, tiny.parts)
    used: dict[int, set[int]] = {0: set(), 1: set(), 2: set()}
    for n, k in picked.valid_NK.nonzero().tolist():
        i = int(picked.student_NK[n, k])
        used[k].add(i)
        fed = tiny.parts.embed(torch.tensor(SIX[i + 1 : i + 2 + k]))
        want = head.heads[k](context_TD[i], fed)
        torch.testing.assert_close(states_NKD[n, k], want, rtol=0, atol=1e-5)
        assert int(picked.label_N[n]) == SIX[i + 2 + k]
    assert used == {k: set(rows) for k, rows in USED.items()}
    assert head.denominators(batch)["ce_soft"].tolist() == [3, 3, 2]


@every_kind
def test_p20_losses_equal_a_sum_over_the_table_written_out(tiny: Target, kind: str) -> None:
    head, batch = _head(kind, tiny, num_heads=3), feature_batch(tiny, [SIX], [SIX_MASK])
    law_TV = tiny.readout(batch.hidden_BTD[0]).double().softmax(-1)
    with torch.no_grad():
        logs = {
            at: logits_V.double().log_softmax(-1)
            for at, logits_V in _training_logits(head, batch, tiny).items()
        }
    want = [
        sum(-float((law_TV[i + 1 + k] * logs[i, k]).sum()) for i in rows)
        for k, rows in USED.items()
    ]
    sums = head(batch, tiny.parts)
    assert sums.numerators["ce_soft"].tolist() == pytest.approx(want, rel=1e-5)
    assert sums.weights["ce_soft"].tolist() == pytest.approx([0.8, 0.64, 0.512])


@every_kind
def test_no_loss_reads_a_token_wrapped_around_from_the_start(tiny: Target, kind: str) -> None:
    """Inputs made by a circular roll would feed the first token to the last rows."""
    head, batch = _head(kind, tiny), feature_batch(tiny, [_row(7, seed=0)], [[1] * 7])
    before = head(batch, tiny.parts).numerators["ce_soft"]
    batch.tokens_BT[:, 0] = (batch.tokens_BT[:, 0] + 1) % 128
    assert torch.equal(head(batch, tiny.parts).numerators["ce_soft"], before)


@every_kind
@pytest.mark.parametrize("i", [0, 2])
def test_p22_head_k_at_i_sees_no_feature_after_i_and_no_token_after_i_plus_1_plus_k(
    tiny: Target, kind: str, i: int
) -> None:
    head, row = _head(kind, tiny, num_heads=3), _row(9, seed=0)
    clean = _training_logits(head, feature_batch(tiny, [row], [[1] * 9]), tiny)
    for k in range(3):
        batch = feature_batch(tiny, [row], [[1] * 9])
        batch.hidden_BTD[:, i + 1 :] += 1.0
        batch.tokens_BT[:, i + 2 + k :] = (batch.tokens_BT[:, i + 2 + k :] + 1) % 128
        after = _training_logits(head, batch, tiny)
        torch.testing.assert_close(after[i, k], clean[i, k], rtol=0, atol=1e-6)
        assert not torch.allclose(after[i + 1, k], clean[i + 1, k], atol=1e-3)


@every_kind
def test_p22_packed_documents_lose_what_they_lose_alone(tiny: Target, kind: str) -> None:
    head = _head(kind, tiny)
    rows, masks = [_row(7, seed=1), _row(5, seed=2)], [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    packed = feature_batch(
        tiny, [rows[0] + rows[1]], [masks[0] + masks[1]], documents=[[0] * 7 + [1] * 5]
    )
    alone = [feature_batch(tiny, [row], [mask]) for row, mask in zip(rows, masks, strict=True)]
    have, *want = (head(b, tiny.parts).numerators["ce_soft"] for b in (packed, *alone))
    torch.testing.assert_close(have, want[0] + want[1], rtol=1e-5, atol=1e-5)
    counts, *each = (head.denominators(b)["ce_soft"] for b in (packed, *alone))
    assert torch.equal(counts, each[0] + each[1])


@every_kind
def test_p07_a_batch_with_nothing_to_learn_gives_zero_and_zero_gradients(
    tiny: Target, kind: str
) -> None:
    head = _head(kind, tiny).train()
    loss = _loss(head, feature_batch(tiny, [_row(6, seed=0)], [[0] * 6]), tiny)
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


@every_kind
def test_p25_padding_changes_neither_loss_nor_gradients(tiny: Target, kind: str) -> None:
    head, row, mask = _head(kind, tiny), _row(4, seed=0), [0, 0, 1, 1]
    weights = list(head.parameters())
    results = []
    for width in (4, 64):
        loss = _loss(head, feature_batch(tiny, [row], [mask], pad_to=width), tiny)
        results.append((loss.detach(), torch.autograd.grad(loss, weights, allow_unused=True)))
    (short, short_grads), (long, long_grads) = results
    torch.testing.assert_close(long, short, rtol=1e-6, atol=0)
    for a, b in zip(long_grads, short_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["mlp", "mlp, own rows"])
@pytest.mark.parametrize("vocab", [None, some_vocab(64)], ids=["whole", "draft vocabulary"])
def test_gradients_equal_those_of_the_whole_logits(
    tiny: Target, kind: str, vocab: DraftVocab | None
) -> None:
    head = _head(kind, tiny, vocab=vocab, loss_chunk=1000).train()
    batch = feature_batch(tiny, [_row(10, seed=1)], [[1] * 10])
    weights, counts = list(head.parameters()), head.denominators(batch)
    have = torch.autograd.grad(head(batch, tiny.parts).total(counts), weights)
    inside = batch.argmax_BT[0] >= 0 if vocab is None else vocab.t2d[batch.argmax_BT[0]]
    rows_WD = head.draft_readout(tiny.parts).weight_WD
    terms = [
        -((rows_WD @ batch.hidden_BTD[0, i + 1 + k]).softmax(-1) * logits.log_softmax(-1)).sum()
        * (0.8 ** (k + 1) / counts["ce_soft"][k])
        for (i, k), logits in _training_logits(head, batch, tiny).items()
        if inside[i + 1 + k]
    ]
    assert 0 < len(terms) == counts["ce_soft"].sum()
    for a, b in zip(have, torch.autograd.grad(torch.stack(terms).sum(), weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@every_kind
def test_a_sum_of_losses_has_a_numerator_and_a_count_a_term(tiny: Target, kind: str) -> None:
    head = _head(kind, tiny, vocab=some_vocab(64), loss="kl + 0.1*tv").train()
    batch = feature_batch(tiny, [_row(12, seed=1)], [[1] * 12])
    sums, counts = head(batch, tiny.parts), head.denominators(batch)
    assert sums.numerators.keys() == sums.weights.keys() == counts.keys() == {"kl", "tv"}
    assert sums.weights["tv"].tolist() == pytest.approx([0.08, 0.064, 0.0512, 0.04096])
    sums.total(counts).backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in head.heads.parameters())


@every_kind
def test_autocast_changes_the_loss_by_rounding_only(tiny: Target, kind: str) -> None:
    head, batch = _head(kind, tiny).train(), feature_batch(tiny, [_row(12, seed=1)], [[1] * 12])
    want = _loss(head, batch, tiny)
    with torch.autocast("cpu", torch.bfloat16):
        have = _loss(head, batch, tiny)
    have.backward()
    torch.testing.assert_close(have, want, rtol=0.02, atol=0)
    assert have.dtype == torch.float32
    assert all(p.grad.isfinite().all() for p in head.parameters())


# Weights at the start.


@pytest.mark.parametrize("kind", ["mlp", "mlp, own rows"])
def test_every_head_starts_where_medusa_starts(tiny: Target, kind: str) -> None:
    """P23: at step 0 each head's law is the target's own next-token law, whatever the path."""
    head, text = _head(kind, tiny, seed=None), torch.tensor([_row(6, seed=0)])
    medusa = make_head("medusa", tiny, seed=None)
    hidden = tiny.forward(text).hidden_BTD
    state = medusa.new_state(1, 16, 4, tiny.parts)
    want = medusa.extend(state, text[:, 1:], hidden[:, :-1], [5], tiny.parts)[0]
    torch.testing.assert_close(want, tiny.readout(hidden[0, -2]).expand(4, -1))
    levels = [([token], [depth]) for depth, token in enumerate((7, 20, 3))]
    for depth in range(4):
        have = _drafted(head, tiny, text, *levels[:depth])[0]
        torch.testing.assert_close(have, want[depth], rtol=1e-6, atol=1e-6)


def test_a_prefix_starts_with_the_targets_order_of_tokens(tiny: Target) -> None:
    """Its final norm rescales the state, so laws may differ in sharpness at the start."""
    head, text = _head("prefix-mlp", tiny, seed=None), torch.tensor([_row(6, seed=0)])
    want = tiny.readout(tiny.forward(text).hidden_BTD[0, -2])
    for levels in ([], [([7], [0])]):
        have = _drafted(head, tiny, text, *levels)[0]
        torch.testing.assert_close(have / have.norm(), want / want.norm(), rtol=0, atol=1e-6)


def test_p23_no_two_heads_or_blocks_share_weights(tiny: Target) -> None:
    head = _head("mlp, own rows", tiny, seed=None, num_heads=3)
    assert len({p.data_ptr() for p in head.parameters()}) == 3 * (4 + 2 * 2) + 1
    first = sum((k + 2) * 32 * 32 + 32 for k in range(3)) * 2
    blocks = 3 * 2 * (32 * 32 + 32)
    assert sum(p.numel() for p in head.parameters()) == first + blocks + 3 * 128 * 32


# Drafting equals training.


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
@pytest.mark.parametrize("readout", ["tied", "own"])
@pytest.mark.parametrize("vocab", [None, some_vocab()], ids=["whole", "draft vocabulary"])
def test_p21_stepping_along_the_text_equals_training(
    tiny: Target, arch: str, readout: str, layers: int, vocab: DraftVocab | None
) -> None:
    options = {"arch": arch, "readout": readout, "num_layers": layers, "num_heads": 3}
    head = make_head("hydra_heads", tiny, vocab=vocab, **options)
    row = _row(9, seed=0)  # 8 tokens and a label for the last of them
    want = _training_logits(head, feature_batch(tiny, [row], [[1] * 9]), tiny)
    for (i, k), logits in want.items():
        levels = [([row[i + 2 + s]], [s]) for s in range(k)]
        have = _drafted(head, tiny, torch.tensor([row[: i + 2]]), *levels)[0]
        torch.testing.assert_close(have, logits, rtol=0, atol=1e-5)
    assert len(want) == 7 + 6 + 5


@every_kind
def test_p21_a_stepped_tree_equals_training_on_each_of_its_paths(tiny: Target, kind: str) -> None:
    head, text = _head(kind, tiny), _row(6, seed=0)
    # Slots: root 0; tokens 7 and 9 take 1 and 2; their children 20, 21 and 22 take 3, 4 and 5.
    levels = [([7, 9], [0, 0]), ([20, 21, 22], [1, 2, 2]), ([30, 31, 32], [4, 3, 4])]
    paths = [
        [(7,), (9,)],
        [(7, 20), (9, 21), (9, 22)],
        [(9, 21, 30), (7, 20, 31), (9, 21, 32)],
    ]
    for depth, wanted in enumerate(paths):
        have = _drafted(head, tiny, torch.tensor([text]), *levels[: depth + 1])
        for node, path in enumerate(wanted):
            row = [*text, *path, 0]
            batch = feature_batch(tiny, [row], [[1] * len(row)])
            want = _training_logits(head, batch, tiny)[len(text) - 2, len(path)]
            torch.testing.assert_close(have[node], want, rtol=0, atol=1e-5)


@every_kind
def test_rows_of_unequal_length_draft_as_each_does_alone(tiny: Target, kind: str) -> None:
    head, counts = _head(kind, tiny), [3, 6, 1]
    rows = torch.tensor([_row(7, seed=s) for s in range(3)])
    hidden = tiny.forward(rows).hidden_BTD
    state = head.new_state(3, 32, 4, tiny.parts)
    # The last row comes later and by name, as a refill does.
    for some in ([0, 1], [2]):
        pairs = (rows[some, 1:], hidden[some, :-1], [counts[r] for r in some])
        head.extend(state, *pairs, tiny.parts, rows=some)
    children = (torch.tensor([[5, 8]] * 3), torch.zeros(3, 2, dtype=torch.int64))
    have = head.step(state, *children, tiny.parts)
    for r, n in enumerate(counts):
        want = _drafted(head, tiny, rows[r : r + 1, : n + 1], ([5, 8], [0, 0]))
        torch.testing.assert_close(have[r], want, rtol=0, atol=1e-5)


@every_kind
def test_a_moved_row_drafts_on_where_it_went(tiny: Target, kind: str) -> None:
    head, rows = _head(kind, tiny), torch.tensor([_row(7, seed=s) for s in range(2)])
    hidden = tiny.forward(rows).hidden_BTD
    state = head.new_state(2, 32, 4, tiny.parts)
    head.extend(state, rows[:, 1:5], hidden[:, :4], [4, 4], tiny.parts)
    state.move_row(1, 0)
    child = (torch.tensor([[9]]), torch.tensor([[0]]), tiny.parts)
    want = _drafted(head, tiny, rows[1:, :5], ([9], [0]))
    torch.testing.assert_close(head.step(state, *child)[0], want, rtol=0, atol=1e-5)
    have = head.extend(state, rows[1:, 5:], hidden[1:, 4:6], [2], tiny.parts, rows=[0])
    want = _drafted(head, tiny, rows[1:])
    torch.testing.assert_close(have[0], want, rtol=0, atol=1e-5)


@every_kind
def test_p49_drafts_after_three_rounds_equal_those_of_a_new_drafter(
    tiny: Target, kind: str
) -> None:
    head, row = _head(kind, tiny), torch.tensor([_row(16, seed=0)])
    hidden = tiny.forward(row).hidden_BTD
    state, known = head.new_state(1, 32, 8, tiny.parts), 6
    head.extend(state, row[:, 1 : known + 1], hidden[:, :known], [known], tiny.parts)
    for accepted in (2, 0, 3):
        for depth in range(3):  # drafts, some of which are then rejected
            head.step(state, torch.tensor([[50 + depth]]), torch.tensor([[depth]]), tiny.parts)
        end = known + accepted + 1
        pairs = (row[:, known + 1 : end + 1], hidden[:, known:end])
        have, known = head.extend(state, *pairs, [accepted + 1], tiny.parts), end
    want = _drafted(head, tiny, row[:, : known + 1])
    torch.testing.assert_close(have[0], want, rtol=0, atol=1e-5)
    child = (torch.tensor([[9]]), torch.tensor([[0]]), tiny.parts)
    want = _drafted(head, tiny, row[:, : known + 1], ([9], [0]))
    torch.testing.assert_close(head.step(state, *child)[0], want, rtol=0, atol=1e-5)


# Through the decoding loop.


@pytest.fixture(scope="module")
def prompts() -> list[Request]:
    return requests(20, 64)


@pytest.fixture(scope="module")
def plain(tiny: Target, prompts: list[Request]) -> dict[str, list[int]]:
    return tokens_of(run(tiny, None, prompts))


@every_kind
@pytest.mark.parametrize("shape", [CHAIN(4), TREE], ids=["chain", "tree"])
def test_p47_greedy_output_is_the_plain_one(
    tiny: Target, prompts: list[Request], plain: dict[str, list[int]], kind: str, shape: TreeShape
) -> None:
    """20 prompts of 64 tokens in a batch of 4 with refill."""
    head = _head(kind, tiny)
    assert tokens_of(run(tiny, _drafter(head, tiny, shape), prompts)) == plain


@every_kind
def test_p47_greedy_output_with_a_dynamic_tree_is_the_plain_one(
    tiny: Target, prompts: list[Request], plain: dict[str, list[int]], kind: str
) -> None:
    """Rows of a batch step below different nodes; the tree may be as deep as there are heads."""
    shape = DynamicShape(top_k=3, levels=4, total=8)
    drafter = DynamicHeadDrafter(_head(kind, tiny, seed=None), tiny.parts, shape)
    done = run(tiny, drafter, prompts)
    assert tokens_of(done) == plain
    assert tau(done) > 1.1
    assert drafter.draft_calls == 3


def test_a_draft_vocabulary_costs_acceptance_and_never_output(
    tiny: Target, prompts: list[Request], plain: dict[str, list[int]]
) -> None:
    head = _head("prefix-mlp", tiny, vocab=some_vocab())
    done = tokens_of(run(tiny, _drafter(head, tiny, TREE), prompts[:8]))
    assert done == {r.prompt_id: plain[r.prompt_id] for r in prompts[:8]}


@every_kind
def test_a_head_at_its_start_has_drafts_accepted(
    tiny: Target, prompts: list[Request], plain: dict[str, list[int]], kind: str
) -> None:
    done = run(tiny, _drafter(_head(kind, tiny, seed=None), tiny, TREE), prompts)
    assert tokens_of(done) == plain
    assert tau(done) > 1.1


def _last_token_head(target: Target, heads: int) -> HydraHeads:
    """Build the head that ignores the context and knows MARKOV: its state is the last token's."""
    head = make_head("hydra_heads", target, seed=None, num_heads=heads)
    for k, mlp in enumerate(head.heads):
        mlp.skip.weight.data.zero_()
        # MARKOV embeds a token as 4 times its unit vector, which the norm makes sqrt(8) times it.
        mlp.skip.weight.data[:, (k + 1) * 8 :] = torch.eye(8) * (math.sqrt(8) / 4)
    return head


@pytest.mark.parametrize("shape", [CHAIN(4), TREE], ids=["chain", "tree"])
def test_p54_a_head_that_reads_the_last_drafted_token_is_an_oracle_of_a_markov_target(
    shape: TreeShape,
) -> None:
    """Accepted to the full depth only if each node is fed its own path, root first."""
    rows = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)).softmax(-1)
    for model in (cycle(), markov(rows.tolist())):
        target, depth = target_of(model), shape.max_depth
        prompts = [Request(f"p{i}", (3, i), 1 + 4 * (depth + 1)) for i in range(8)]
        done = run(target, _drafter(_last_token_head(target, 4), target, shape), prompts)
        assert {r.accepted for c in done.values() for r in c.rounds} == {depth}
        assert tau(done) == depth + 1


def test_p44_a_tree_deeper_than_the_heads_is_refused(tiny: Target) -> None:
    head = _head("mlp", tiny, num_heads=2)
    with pytest.raises(ValueError, match="tree.depth=3 but head.num_heads=2"):
        _drafter(head, tiny, TREE)


@every_kind
def test_k_drafted_tokens_cost_k_head_calls(tiny: Target, kind: str) -> None:
    head, calls = _head(kind, tiny), []
    for k, mlp in enumerate(head.heads):
        mlp.register_forward_hook(lambda *_, k=k: calls.append(k))
    text = torch.tensor([_row(6, seed=0)])
    hidden = tiny.forward(text).hidden_BTD[:, :-1]
    for depth in (1, 2, 3, 4):
        drafter = _drafter(head, tiny, CHAIN(depth))
        drafter.start(1, 32)
        calls.clear()
        drafter.observe(text[:, 1:], hidden, [5])
        assert calls == [0]
        drafter.propose(text[:, -1], torch.tensor([5]), torch.tensor([0]))
        assert calls == list(range(depth))
        assert drafter.draft_calls == depth - 1


# Checkpoints.


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("vocab", [None, some_vocab()], ids=["whole", "draft vocabulary"])
def test_p36_a_reloaded_head_drafts_bit_for_bit_on_a_tied_target(
    tied: Target, tmp_path: Path, kind: str, dtype: torch.dtype, vocab: DraftVocab | None
) -> None:
    head = _head(kind, tied, vocab=vocab).to(dtype)
    save_head(tmp_path / "head", head, info_for(head, tied.name, tied.fingerprint))
    loaded, info = load_head(tmp_path / "head")
    assert info.family == "hydra_heads"
    assert loaded.config == head.config
    assert (loaded.lm_heads_KWD is None) == (kind != "mlp, own rows")
    text, levels = torch.tensor([_row(6, seed=0)]), [([7, 9], [0, 0]), ([20], [2])]
    head.float()
    for depth in range(3):
        want = _drafted(head, tied, text, *levels[:depth])
        assert torch.equal(_drafted(loaded, tied, text, *levels[:depth]), want)


# Learning.


@pytest.mark.parametrize("arch", ["mlp", "prefix-mlp"])
def test_deeper_heads_learn_from_the_tokens_what_medusa_cannot_know(arch: str) -> None:
    """On a Markov target the tokens fed in decide the next law; the context alone does not."""
    rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).mul(2).softmax(-1)
    target = target_of(markov(rows.tolist()))
    text = torch.randint(8, (16, 24), generator=torch.Generator().manual_seed(2)).tolist()
    batch = feature_batch(target, text, [[1] * 24] * 16)

    def final_agreement(family: str, **options: Any) -> list[float]:
        head = make_head(family, target, seed=None, num_heads=3, **options).train()
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
        for _ in range(120):
            optimizer.zero_grad()
            head(batch, target.parts).total(head.denominators(batch)).backward()
            optimizer.step()
        value_K, count_K = head.eval()(batch, target.parts).metrics["top1_agreement"]
        return (value_K / count_K).tolist()

    assert min(final_agreement("hydra_heads", arch=arch)) > 0.95
    assert max(final_agreement("medusa")[1:]) < 0.7
