"""Medusa and EAGLE: shifts, masks, losses, and drafting that equals training.

Shapes: B rows, T tokens, K depths, W draft vocabulary, V target vocabulary.
"""

from typing import Any

import pytest
import torch
from models import feature_batch, make_head, some_vocab, target_of, tiny_model, variant_model
from torch import Tensor

from headstart.heads.base import DraftHead, FeatureBatch, HeadConfig, LossSums, families
from headstart.heads.eagle import EagleConfig, EagleHead
from headstart.heads.layers import Rotary, document_mask
from headstart.heads.losses import select
from headstart.heads.medusa import MedusaConfig, MedusaHead
from headstart.heads.target import Target

FAMILIES = ["medusa", "eagle"]
SIX, SIX_MASK = [10, 11, 12, 13, 14, 15], [0, 0, 0, 1, 1, 1]


def _row(length: int, seed: int) -> list[int]:
    return torch.randint(128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _loss(head: DraftHead, batch: FeatureBatch, target: Target) -> Tensor:
    return head(batch, target.parts).total(head.denominators(batch))


def _gradients(
    head: DraftHead, batch: FeatureBatch, target: Target
) -> tuple[Tensor, dict[str, Tensor]]:
    head.zero_grad()
    loss = _loss(head, batch, target)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in head.named_parameters()}


def _states(head: DraftHead, batch: FeatureBatch, target: Target) -> Tensor:
    """Return what training reads out, [B, T, K, D]."""
    if isinstance(head, MedusaHead):
        return torch.stack([h(batch.hidden_BTD) for h in head.heads], dim=2)
    mask = document_mask(batch.document_BT, torch.float32)
    embedded = head._embed_next(batch, target.parts)
    return head.run(embedded, batch.hidden_BTD, batch.positions_BT, mask)[:, :, None]


def _training_logits(head: DraftHead, batch: FeatureBatch, target: Target) -> Tensor:
    return head.draft_readout(target.parts)(_states(head, batch, target))


# The registry and its settings.


def test_both_families_are_registered_with_their_configs() -> None:
    assert families()["medusa"] == (MedusaConfig, MedusaHead)
    assert families()["eagle"] == (EagleConfig, EagleHead)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (HeadConfig, {"draft_vocab_size": 1}, "head.draft_vocab_size=1: need at least 2, or null"),
        (HeadConfig, {"out_of_vocab": "keep"}, "head.out_of_vocab=keep: expected one of drop, m"),
        (HeadConfig, {"loss_chunk": 0}, "head.loss_chunk=0: need at least 1 logit"),
        (MedusaConfig, {"num_heads": 0}, "head.num_heads=0: need at least one"),
        (MedusaConfig, {"num_blocks": 0}, "head.num_blocks=0: need at least one"),
        (MedusaConfig, {"readout": "new"}, "head.readout=new: expected one of tied, own"),
        (MedusaConfig, {"depth_decay": 0.0}, "head.depth_decay=0.0: expected 0 < decay <= 1"),
        (EagleConfig, {"num_layers": 0}, "head.num_layers=0: need at least one layer"),
        (EagleConfig, {"feature_noise": -1.0}, "head.feature_noise=-1.0: expected 0 or more"),
        (EagleConfig, {"feature_weight": 0.0, "token_weight": 0.0}, "nothing to train on"),
    ],
)
def test_bad_head_settings_name_the_field(
    kind: type[HeadConfig], values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_a_vocabulary_rule_without_a_vocabulary_warns() -> None:
    with pytest.warns(UserWarning, match="head.out_of_vocab=mass has no effect"):
        EagleConfig(out_of_vocab="mass")


def test_a_head_and_its_vocabulary_must_agree(tiny: Target) -> None:
    with pytest.raises(ValueError, match="head.draft_vocab_size=None but .* given is 32"):
        MedusaHead(MedusaConfig(), tiny.shape, some_vocab())
    with pytest.raises(ValueError, match="head.draft_vocab_size=16 but .* given is none"):
        EagleHead(EagleConfig(draft_vocab_size=16), tiny.shape, None)


# Shifts and masks.


def test_p20_medusa_uses_exactly_the_rows_of_the_six_token_example(tiny: Target) -> None:
    batch = feature_batch(tiny, [SIX], [SIX_MASK])
    picked = select(batch, 3, MedusaConfig(), None)
    used = sorted(
        (k, int(picked.student_NK[n, k]), int(picked.position_N[n]), int(picked.label_N[n]))
        for n, k in picked.valid_NK.nonzero().tolist()
    )
    # (head, student position i, teacher position i + 1 + k, label x at i + 2 + k)
    assert used == [
        (0, 1, 2, 13),
        (0, 2, 3, 14),
        (0, 3, 4, 15),
        (1, 0, 2, 13),
        (1, 1, 3, 14),
        (1, 2, 4, 15),
        (2, 0, 3, 14),
        (2, 1, 4, 15),
    ]
    head = make_head("medusa", tiny, num_heads=3)
    assert head.denominators(batch)["ce_soft"].tolist() == [3, 3, 2]


def test_p20_medusa_head_k_at_t_learns_token_t_plus_2_plus_k(tiny: Target) -> None:
    """At t = 0 the three heads predict 12, 13, 14: a mask of one label at a time shows which."""
    for k, label in enumerate((2, 3, 4)):
        batch = feature_batch(tiny, [SIX], [[int(i == label) for i in range(6)]])
        picked = select(batch, 3, MedusaConfig(), None)
        students = {k: int(s) for k, s in enumerate(picked.student_NK[0]) if picked.valid_NK[0, k]}
        assert students[k] == 0
        assert picked.label_N.tolist() == [SIX[label]]


def test_p20_eagle_reads_t_plus_1_and_learns_t_plus_2_at_1_2_3(tiny: Target) -> None:
    batch = feature_batch(tiny, [SIX], [SIX_MASK])
    picked = select(batch, 1, EagleConfig(), None)
    assert picked.student_NK[:, 0].tolist() == [1, 2, 3]
    assert picked.position_N.tolist() == [2, 3, 4]
    assert picked.label_N.tolist() == [13, 14, 15]
    head = make_head("eagle", tiny)
    want = tiny.parts.embed(torch.tensor([[11, 12, 13, 14, 15]]))
    assert torch.equal(head._embed_next(batch, tiny.parts)[:, :5], want)
    counts = head.denominators(batch)
    assert {name: n.tolist() for name, n in counts.items()} == {
        "ce_soft": [3],
        "feature_smoothl1": [3],
    }


def test_p20_losses_equal_a_sum_over_the_table_written_out(tiny: Target) -> None:
    batch = feature_batch(tiny, [SIX], [SIX_MASK])
    law_TV = tiny.readout(batch.hidden_BTD[0]).double().softmax(-1)
    medusa = make_head("medusa", tiny, num_heads=3)
    logs_TKV = _training_logits(medusa, batch, tiny)[0].detach().double().log_softmax(-1)
    want = [
        sum(-float((law_TV[i + 1 + k] * logs_TKV[i, k]).sum()) for i in rows)
        for k, rows in enumerate([(1, 2, 3), (0, 1, 2), (0, 1)])
    ]
    have = medusa(batch, tiny.parts)
    assert have.numerators["ce_soft"].tolist() == pytest.approx(want, rel=1e-5)
    assert have.weights["ce_soft"].tolist() == pytest.approx([0.8, 0.64, 0.512])

    eagle = make_head("eagle", tiny)
    output_TD = _states(eagle, batch, tiny)[0, :, 0].detach()
    logs_TV = tiny.readout(output_TD).double().log_softmax(-1)
    token = sum(-float((law_TV[i + 1] * logs_TV[i]).sum()) for i in (1, 2, 3))
    gap_TD = (output_TD[:-1] - batch.hidden_BTD[0, 1:]).abs().double()
    huber_TD = torch.where(gap_TD < 1, 0.5 * gap_TD**2, gap_TD - 0.5)
    have = eagle(batch, tiny.parts)
    assert have.numerators["ce_soft"].item() == pytest.approx(token, rel=1e-5)
    feature = float(huber_TD.mean(-1)[1:4].sum())
    assert have.numerators["feature_smoothl1"].item() == pytest.approx(feature, rel=1e-5)
    total = have.total(eagle.denominators(batch)).item()
    assert total == pytest.approx(0.1 * token / 3 + feature / 3, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("t", [0, 2, 4])
def test_p22_drafts_at_t_do_not_see_later_features_and_ids(
    tiny: Target, family: str, t: int
) -> None:
    head, row = make_head(family, tiny), _row(8, seed=0)
    batch = feature_batch(tiny, [row], [[1] * 8])
    before = _training_logits(head, batch, tiny)
    batch.hidden_BTD[:, t + 1 :] += 1.0
    batch.tokens_BT[:, t + 2 :] = (batch.tokens_BT[:, t + 2 :] + 1) % 128
    after = _training_logits(head, batch, tiny)
    assert torch.equal(before[:, : t + 1], after[:, : t + 1])
    assert not torch.equal(before[:, t + 1], after[:, t + 1])


@pytest.mark.parametrize("family", FAMILIES)
def test_p22_packed_documents_lose_what_they_lose_alone(tiny: Target, family: str) -> None:
    head = make_head(family, tiny)
    rows, masks = [_row(7, seed=1), _row(5, seed=2)], [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    packed = feature_batch(
        tiny, [rows[0] + rows[1]], [masks[0] + masks[1]], documents=[[0] * 7 + [1] * 5]
    )
    alone = [feature_batch(tiny, [row], [mask]) for row, mask in zip(rows, masks, strict=True)]
    have, want = head(packed, tiny.parts), [head(batch, tiny.parts) for batch in alone]
    for name, numerator in have.numerators.items():
        total = want[0].numerators[name] + want[1].numerators[name]
        torch.testing.assert_close(numerator, total, rtol=1e-5, atol=1e-5)
        counts = [head.denominators(batch)[name] for batch in (packed, *alone)]
        assert torch.equal(counts[0], counts[1] + counts[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_p22_a_stop_token_inside_a_document_does_not_end_it(family: str) -> None:
    target = target_of(tiny_model(eos_token_id=2))
    row = _row(8, seed=1)
    batch = feature_batch(target, [[*row[:3], 2, *row[4:]]], [[1] * 8])
    counts = make_head(family, target).denominators(batch)["ce_soft"]
    assert counts[0] == 6  # labels at 2..7: every one but the first two, which no row predicts
    head = make_head(family, target)
    before = _training_logits(head, batch, target)
    batch.hidden_BTD[:, 1] += 1.0
    changed = (_training_logits(head, batch, target) != before).any(-1).any(-1)[0]
    seen = range(1, 8) if family == "eagle" else [1]
    assert changed.nonzero().flatten().tolist() == list(seen)


# Weights at the start.


def test_p23_medusa_blocks_are_distinct_and_counted(tiny: Target) -> None:
    head = make_head("medusa", tiny, seed=None, num_heads=3, num_blocks=2, readout="own")
    blocks = [block for stack in head.heads for block in stack]
    assert len({id(block) for block in blocks}) == 6
    assert len({block.linear.weight.data_ptr() for block in blocks}) == 6
    assert sum(p.numel() for p in head.parameters()) == 18624


@pytest.mark.parametrize("readout", ["tied", "own"])
def test_p23_every_medusa_head_starts_at_the_targets_next_token_law(
    tiny: Target, readout: str
) -> None:
    head = make_head("medusa", tiny, seed=None, num_heads=3, num_blocks=2, readout=readout)
    tokens = torch.tensor([_row(6, seed=0)])
    hidden = tiny.forward(tokens).hidden_BTD
    state = head.new_state(1, 16, 4, tiny.parts)
    have = head.extend(state, tokens, hidden, [6], tiny.parts)
    want = tiny.readout(hidden[:, -1])[:, None].expand(-1, 3, -1)
    torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_p24_layers_with_zero_branches_are_the_identity(tiny: Target, layers: int) -> None:
    head = make_head("eagle", tiny, num_layers=layers).requires_grad_(False)
    for layer in head.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    batch = feature_batch(tiny, [_row(8, seed=0)], [[1] * 8])
    embedded = head._embed_next(batch, tiny.parts)
    want = head.fc(torch.cat((embedded, batch.hidden_BTD), -1))
    assert torch.equal(_states(head, batch, tiny)[:, :, 0], want)
    assert _loss(head, batch, tiny).isfinite()


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_eagle_starts_from_the_feature_and_sees_a_token_of_unit_size(scale: float) -> None:
    model = tiny_model()
    model.get_input_embeddings().weight.data *= scale
    target, D = target_of(model), model.config.hidden_size
    head = make_head("eagle", target, seed=None)
    assert torch.equal(head.fc.weight[:, D:], torch.eye(D))
    embedded_VD = target.parts.embed(torch.arange(target.shape.vocab_size))
    # torch draws fc's weights with variance 1 / (3 * 2D), so unit rows come out with 1 / 6.
    size = (embedded_VD @ head.fc.weight[:, :D].T).square().mean().item()
    assert size == pytest.approx(1 / 6, rel=0.2)


# Drafting equals training.


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_p21_eagle_extend_and_step_equal_one_causal_pass(tiny: Target, layers: int) -> None:
    """P24 as well: the second and third step of a deeper head are what its training would see."""
    head, row = make_head("eagle", tiny, num_layers=layers), torch.tensor([_row(8, seed=0)])
    hidden = tiny.forward(row).hidden_BTD[:, :-1]
    state = head.new_state(1, 32, 8, tiny.parts)
    # Two calls, as a prompt and a round give them.
    head.extend(state, row[:, 1:5], hidden[:, :4], [4], tiny.parts)
    first = head.extend(state, row[:, 5:], hidden[:, 4:], [3], tiny.parts)[:, 0]

    tokens, features = row[:, 1:], hidden
    logits, drafted = first, None
    for depth in range(3):
        T = tokens.shape[1]
        mask = document_mask(torch.zeros(1, T, dtype=torch.int64), torch.float32)
        output = head.run(tiny.parts.embed(tokens), features, torch.arange(T)[None], mask)
        torch.testing.assert_close(logits, tiny.readout(output[:, -1]), rtol=0, atol=1e-5)
        drafted = logits.argmax(-1, keepdim=True)
        logits = head.step(state, drafted, torch.tensor([[depth]]), tiny.parts)[:, 0]
        tokens = torch.cat((tokens, drafted), 1)
        features = torch.cat((features, output[:, -1:]), 1)


def test_p21_a_stepped_tree_equals_each_of_its_paths(tiny: Target) -> None:
    head, row = make_head("eagle", tiny, num_layers=2), torch.tensor([_row(6, seed=0)])
    hidden = tiny.forward(row).hidden_BTD[:, :-1]

    def drafted(*levels: tuple[list[int], list[int]]) -> Tensor:
        state = head.new_state(1, 32, 8, tiny.parts)
        head.extend(state, row[:, 1:], hidden, [5], tiny.parts)
        for tokens, parents in levels:
            logits = head.step(state, torch.tensor([tokens]), torch.tensor([parents]), tiny.parts)
        return logits[0]

    # Slots: root 0; tokens 7 and 9 take 1 and 2; their children 20, 21 and 22 take 3, 4 and 5.
    tree = drafted(([7, 9], [0, 0]), ([20, 21, 22], [1, 2, 2]), ([30, 31], [4, 3]))
    for index, path in enumerate([(9, 21, 30), (7, 20, 31)]):
        chain = drafted(*(([token], [slot]) for slot, token in enumerate(path)))
        torch.testing.assert_close(tree[index], chain[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_extending_rows_of_unequal_length_equals_extending_each(tiny: Target, family: str) -> None:
    head, counts = make_head(family, tiny), [3, 6, 1]
    rows = torch.tensor([_row(7, seed=s) for s in range(3)])
    hidden = tiny.forward(rows).hidden_BTD[:, :-1]
    state = head.new_state(3, 32, 4, tiny.parts)
    have = head.extend(state, rows[:, 1:], hidden, counts, tiny.parts)
    for r, n in enumerate(counts):
        alone = head.new_state(1, 32, 4, tiny.parts)
        tokens, features = rows[r : r + 1, 1 : n + 1], hidden[r : r + 1, :n]
        want = head.extend(alone, tokens, features, [n], tiny.parts)
        torch.testing.assert_close(have[r], want[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_medusa_and_eagle_draft_as_they_train(tiny: Target, family: str) -> None:
    head, vocab = make_head(family, tiny, vocab=some_vocab()), some_vocab()
    batch = feature_batch(tiny, [_row(8, seed=0)], [[1] * 8])
    want = _training_logits(head, batch, tiny)[:, 6]
    state = head.new_state(1, 32, 4, tiny.parts)
    have = head.extend(state, batch.tokens_BT[:, 1:], batch.hidden_BTD[:, :7], [7], tiny.parts)
    assert have.shape[-1] == len(vocab)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2])
def test_p49_drafts_after_three_rounds_equal_those_of_a_new_drafter(
    tiny: Target, layers: int
) -> None:
    head, row = make_head("eagle", tiny, num_layers=layers), torch.tensor([_row(16, seed=0)])
    hidden = tiny.forward(row).hidden_BTD
    state, known = head.new_state(1, 32, 8, tiny.parts), 6
    head.extend(state, row[:, 1 : known + 1], hidden[:, :known], [known], tiny.parts)
    for accepted in (2, 0, 3):
        for depth in range(3):  # drafts, some of which are then rejected
            head.step(state, torch.tensor([[50 + depth]]), torch.tensor([[depth]]), tiny.parts)
        end = known + accepted + 1
        pairs = (row[:, known + 1 : end + 1], hidden[:, known:end])
        have, known = head.extend(state, *pairs, [accepted + 1], tiny.parts), end
    fresh = head.new_state(1, 32, 8, tiny.parts)
    want = head.extend(fresh, row[:, 1 : known + 1], hidden[:, :known], [known], tiny.parts)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-5)
    child = (torch.tensor([[9]]), torch.tensor([[0]]), tiny.parts)
    have, want = head.step(state, *child), head.step(fresh, *child)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-5)


# The loss.


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("train", [True, False])
def test_p07_a_batch_with_nothing_to_learn_gives_zero_and_zero_gradients(
    tiny: Target, family: str, train: bool
) -> None:
    head = make_head(family, tiny).train(train)
    batch = feature_batch(tiny, [_row(6, seed=0)], [[0] * 6])
    loss, gradients = _gradients(head, batch, tiny)
    assert loss.item() == 0.0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in gradients.values())
    assert all(n.sum() == 0 for n in head.denominators(batch).values())


@pytest.mark.parametrize("family", FAMILIES)
def test_p25_padding_changes_neither_loss_nor_gradients(tiny: Target, family: str) -> None:
    head = make_head(family, tiny)
    row, mask = _row(4, seed=0), [0, 0, 1, 1]
    short = _gradients(head, feature_batch(tiny, [row], [mask]), tiny)
    long_batch = feature_batch(tiny, [row], [mask], pad_to=64)
    long = _gradients(head, long_batch, tiny)
    # Equal up to the order in which an attention kernel sums rows of another width.
    torch.testing.assert_close(long[0], short[0], rtol=1e-6, atol=0)
    for name, gradient in short[1].items():
        torch.testing.assert_close(long[1][name], gradient, rtol=1e-5, atol=1e-6)


OPTIONS = [
    {"loss": "ce_soft", "out_of_vocab": "drop"},
    {"loss": "ce_soft", "out_of_vocab": "mass"},
    {"loss": "ce_hard"},
]


def _dense(
    logits_BTKW: Tensor, batch: FeatureBatch, target: Target, head: DraftHead
) -> tuple[Tensor, Tensor]:
    """Return numerators and counts [K] written out position by position in fp64."""
    ids, config = head.vocab.ids_W.tolist(), head.config
    B, T, K, _ = logits_BTKW.shape
    sums, counts = [logits_BTKW.sum() * 0 for _ in range(K)], torch.zeros(K)
    for b, t, k in ((b, t, k) for b in range(B) for t in range(T) for k in range(K)):
        teacher, label = t + 1 + k, t + 2 + k
        if label >= T or not batch.loss_mask_BT[b, label]:
            continue
        law_V = target.readout(batch.hidden_BTD[b, teacher]).double().softmax(-1)
        logs_W, token = logits_BTKW[b, t, k].log_softmax(-1), int(batch.tokens_BT[b, label])
        if config.loss == "ce_hard":
            if token not in ids:
                continue
            term = -logs_W[ids.index(token)]
        elif config.out_of_vocab == "drop":
            if int(law_V.argmax()) not in ids:
                continue
            term = -(law_V[ids] / law_V[ids].sum() * logs_W).sum()
        else:
            term = -(law_V[ids] * logs_W).sum()
        sums[k] = sums[k] + term
        counts[k] += 1
    return torch.stack(sums), counts


@pytest.mark.parametrize("options", OPTIONS, ids=["drop", "mass", "hard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_over_a_draft_vocabulary_equals_a_dense_one_in_fp64(
    tiny: Target, family: str, options: dict[str, str]
) -> None:
    head = make_head(family, tiny, vocab=some_vocab(64), loss_chunk=1000, **options)
    rows = [_row(12, seed=1), _row(9, seed=2)]
    batch = feature_batch(tiny, rows, [[0, 0] + [1] * 10, [0] + [1] * 8])
    have, name = head(batch, tiny.parts).numerators[options["loss"]], options["loss"]
    weights = list(head.parameters())
    grads = torch.autograd.grad(have.sum(), weights, allow_unused=True)
    logits = _training_logits(head, batch, tiny).double()
    want, counts = _dense(logits, batch, tiny, head)
    torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=0)
    assert torch.equal(head.denominators(batch)[name], counts)
    supervised = 10 + 7  # token 1 of the second row is supervised, but nothing predicts it
    inside_only = options.get("out_of_vocab") != "mass"
    assert (0 < counts[0] < supervised) if inside_only else counts[0] == supervised
    for a, b in zip(grads, torch.autograd.grad(want.sum(), weights), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_chunk_size_changes_neither_loss_nor_gradients(tiny: Target, family: str) -> None:
    batch = feature_batch(tiny, [_row(9, seed=1), _row(12, seed=2)], [[1] * 9, [1] * 12])
    options = {"readout": "own"} if family == "medusa" else {}
    results = [
        _gradients(make_head(family, tiny, loss_chunk=chunk, **options), batch, tiny)
        for chunk in (1, 1000, 1 << 26)
    ]
    for loss, gradients in results[:-1]:
        torch.testing.assert_close(loss, results[-1][0], rtol=1e-6, atol=0)
        for name, gradient in results[-1][1].items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_gradients_of_own_read_outs_equal_those_of_a_dense_loss(tiny: Target) -> None:
    head = make_head("medusa", tiny, num_heads=3, readout="own", loss_chunk=4 * 3 * 128)
    batch = feature_batch(tiny, [_row(9, seed=1)], [[0, 0] + [1] * 7])
    _, have = _gradients(head, batch, tiny)
    head.zero_grad()
    law_TV = tiny.readout(batch.hidden_BTD[0]).softmax(-1)
    states_TKD = _states(head, batch, tiny)[0]
    logs_TKV = torch.einsum("tkd,kvd->tkv", states_TKD, head.lm_heads_KWD).log_softmax(-1)
    loss = torch.zeros(())
    for k in range(3):
        rows = [t for t in range(9) if 2 <= t + 2 + k < 9]
        terms = [-(law_TV[t + 1 + k] * logs_TKV[t, k]).sum() for t in rows]
        loss = loss + 0.8 ** (k + 1) * torch.stack(terms).mean()
    loss.backward()
    for name, weight in head.named_parameters():
        torch.testing.assert_close(have[name], weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_p53_metrics_of_a_head_count_every_supervised_position(tiny: Target, family: str) -> None:
    head = make_head(family, tiny, vocab=some_vocab(64))
    batch = feature_batch(tiny, [_row(12, seed=1)], [[1] * 12])
    sums: LossSums = head(batch, tiny.parts)
    value, count = sums.metrics["oov_argmax"]
    assert count[0] == 10
    learned = head.denominators(batch)["ce_soft"][0]
    assert 0 < learned < 10
    assert value[0] == 10 - learned
    assert head.train()(batch, tiny.parts).metrics == {}
    trained = head(batch, tiny.parts).numerators["ce_soft"]
    if family == "medusa":  # EAGLE adds noise to its features in training
        torch.testing.assert_close(trained, sums.numerators["ce_soft"])


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_changes_the_loss_by_rounding_only(tiny: Target, family: str) -> None:
    head = make_head(family, tiny)
    batch = feature_batch(tiny, [_row(12, seed=1)], [[1] * 12])
    want, gradients = _gradients(head, batch, tiny)
    with torch.autocast("cpu", torch.bfloat16):
        have = _loss(head, batch, tiny)
    have.backward()
    torch.testing.assert_close(have, want, rtol=0.02, atol=0)
    assert have.dtype == torch.float32
    assert all(torch.isfinite(g).all() for g in gradients.values())


def test_noise_on_features_comes_from_the_generator_and_only_in_training(tiny: Target) -> None:
    head = make_head("eagle", tiny, feature_noise=0.5)
    batch = feature_batch(tiny, [_row(8, seed=0)], [[1] * 8])

    def loss(train: bool, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        sums = head.train(train)(batch, tiny.parts, generator)
        return sums.total(head.denominators(batch)).item()

    assert loss(True, 0) == loss(True, 0) != loss(True, 1)
    assert loss(False, 0) == loss(False, 1)


def test_own_read_outs_refuse_a_target_with_a_read_out_bias() -> None:
    with pytest.raises(ValueError, match="head.readout=own: the target's read-out has a bias"):
        make_head("medusa", target_of(variant_model("phi")), readout="own")


# Positions.


def test_p64_phases_of_a_bf16_head_keep_neighbouring_positions_apart(tiny: Target) -> None:
    head = make_head("eagle", tiny).to(torch.bfloat16)
    positions = torch.tensor([[256, 257, 4096, 4097]])
    have = head.rotary(positions, torch.bfloat16)
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2).float() / 8)
    phase = positions[0][:, None].float() * frequencies
    for part, want in zip(have, (phase.cos(), phase.sin()), strict=True):
        assert part.dtype == torch.bfloat16
        assert torch.equal(part[0, 0, :, :4], want.to(torch.bfloat16))
    table = torch.cat(have, -1)[0, 0].float()
    assert len(table.unique(dim=0)) == 4


def test_the_rotary_base_and_scaling_are_the_targets() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    target = target_of(tiny_model(rope_parameters=rope, max_position_embeddings=4096))
    positions = torch.tensor([[0, 7, 3000]])
    have = Rotary(target.shape)(positions, torch.float32)
    want = target.decoder.rotary_emb(torch.zeros(1), positions)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a[:, 0], b, rtol=0, atol=1e-6)
