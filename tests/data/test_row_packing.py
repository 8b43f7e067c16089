"""Packed rows: every document sees, learns and loses what it does alone.

Shapes: B rows, T tokens, K depths, D width.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models import DIMENSIONS, make_head, seeded, target_of
from torch import Tensor
from training import CHAT_VOCAB, chat_target, random_rows, token_row
from transformers import JambaConfig, JambaForCausalLM

from headstart.data.capture import capture
from headstart.data.features import OnlineFeatures, PackedFeatures, make_features
from headstart.data.packing import Layout, check_fits, pack_in_windows, pack_rows
from headstart.data.rows import RowsMeta
from headstart.data.store import FeatureStore
from headstart.data.template import TokenRow
from headstart.heads.base import DraftHead, FeatureBatch
from headstart.heads.target import pick_features

FAMILIES = {
    "medusa": {},
    "eagle": {"feature_noise": 0.0},
    "eagle3": {"aux": [1]},
    "hydra_heads": {},
}
EOS = 2
A = token_row("a", [9, 31, 77, EOS, 12, 55, EOS, 8, 41], 2)
B = token_row("b", [63, 5, 28, 90, 17, 101], 1)


def source_of(kind: str, rows: Sequence[TokenRow], directory: Path) -> PackedFeatures:
    """Return rows packed in 20 tokens, from the target or from a store of theirs."""
    if kind == "online":
        return PackedFeatures(OnlineFeatures(chat_target(), rows, [1]), 20)
    capture(chat_target(), rows, directory, meta=RowsMeta("", "", {}), taps=[1])
    return PackedFeatures(FeatureStore(directory, [1]), 20)


def packed(kind: str, rows: Sequence[TokenRow], directory: Path) -> FeatureBatch:
    """Return the rows in one packed row, shorter ones first: the order of a store."""
    source = source_of(kind, sorted(rows, key=lambda row: len(row.token_ids)), directory)
    return source.batch([list(range(len(rows)))])


def alone(row: TokenRow) -> FeatureBatch:
    return make_features(chat_target(), [row], [0], [1])


def sums(head: DraftHead, batches: Sequence[FeatureBatch]) -> dict[str, Tensor]:
    """Return numerators, counts, metrics and the gradients of one step, over its batches."""
    total: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        total[name] = total.get(name, 0) + value.detach()

    for batch in batches:
        for name, value in head.denominators(batch).items():
            add(name, value)
    counts = dict(total)
    head.zero_grad()
    for batch in batches:
        made = head(batch, chat_target().parts, None, counts)
        made.total(counts).backward()
        for name, value in made.numerators.items():
            add(f"loss {name}", value)
        for name, (value, count) in made.metrics.items():
            add(f"metric {name}", torch.stack([value.float(), count.float()]))
    gradients = {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}
    return total | gradients


def assert_equal_sums(family: str, have: FeatureBatch, want: Sequence[FeatureBatch]) -> None:
    head = make_head(family, chat_target(), **FAMILIES[family])
    left, right = sums(head, [have]), sums(head, want)
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-4, atol=2e-5, msg=name)


def trained_states(head: DraftHead, batch: FeatureBatch) -> Tensor:
    """Return what training reads out, [B, T, D] of the first depth."""
    features = pick_features(batch.hidden_BTD, batch.aux, head.aux_features)
    return head.unroll(batch, chat_target().parts, features)[:, :, 0]


# P22


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
@pytest.mark.parametrize("t", [0, 3, 7, 10])
def test_p22_packed_drafts_at_t_see_no_features_after_t_and_no_ids_after_t_plus_1(
    tmp_path, family, t
):
    head = make_head(family, chat_target(), **FAMILIES[family])
    batch = packed("online", [A, B], tmp_path)
    before = trained_states(head, batch)
    for states_BTD in (batch.hidden_BTD, *batch.aux.values()):
        states_BTD[:, t + 1 :] += 1.0
    batch.tokens_BT[:, t + 2 :] = (batch.tokens_BT[:, t + 2 :] + 1) % CHAT_VOCAB
    after = trained_states(head, batch)
    assert torch.equal(before[:, : t + 1], after[:, : t + 1])
    assert not torch.equal(before[:, t + 1], after[:, t + 1])


@pytest.mark.parametrize("family", ["eagle", "eagle3"])
def test_p22_a_document_does_not_see_the_one_before_it(tmp_path, family):
    head = make_head(family, chat_target(), **FAMILIES[family])
    batch = packed("online", [A, B], tmp_path)  # B is first: it is shorter
    first, second = batch.document_BT[0] == 0, batch.document_BT[0] == 1
    before = trained_states(head, batch)[0]
    for states_BTD in (batch.hidden_BTD, *batch.aux.values()):
        states_BTD[0, first] += 1.0
    batch.tokens_BT[0, first] += 1
    after = trained_states(head, batch)[0]
    assert torch.equal(before[second], after[second])
    assert not torch.equal(before[first], after[first])


@pytest.mark.parametrize("kind", ["online", "stored"])
@pytest.mark.parametrize("family", FAMILIES)
def test_p22_documents_a_and_b_packed_lose_what_they_lose_alone(tmp_path, family, kind):
    assert_equal_sums(family, packed(kind, [A, B], tmp_path), [alone(A), alone(B)])


@pytest.mark.parametrize("kind", ["online", "stored"])
@pytest.mark.parametrize("family", FAMILIES)
def test_p22_no_label_crosses_from_one_document_to_the_next(tmp_path, family, kind):
    # Only the second document's first two tokens are supervised: no student stands before them.
    first = replace(B, loss_mask=[0] * 6)
    second = replace(A, loss_mask=[1, 1, 0, 0, 0, 0, 0, 0, 0])
    batch = packed(kind, [first, second], tmp_path)
    assert batch.loss_mask_BT.sum() == 2
    head = make_head(family, chat_target(), **FAMILIES[family])
    for count in head.denominators(batch).values():
        assert count.sum() == 0


@pytest.mark.parametrize("kind", ["online", "stored"])
def test_p22_a_stop_token_inside_a_keeps_it_one_document(tmp_path, kind):
    batch = packed(kind, [A, B], tmp_path)
    assert batch.document_BT[0].tolist() == [0] * 6 + [1] * 9 + [-1] * 5
    assert batch.positions_BT[0].tolist() == [*range(6), *range(9), *range(5)]
    assert batch.tokens_BT[0, 6:15].tolist() == A.token_ids
    assert batch.loss_mask_BT[0].int().tolist() == [*B.loss_mask, *A.loss_mask, *[0] * 5]


# Sources


def test_packed_features_online_equal_those_of_the_rows_alone(tmp_path):
    batch = packed("online", [A, B], tmp_path)
    for document, row in enumerate([B, A]):
        place = batch.document_BT[0] == document
        want = alone(row)
        torch.testing.assert_close(batch.hidden_BTD[0, place], want.hidden_BTD[0])
        torch.testing.assert_close(batch.aux[1][0, place], want.aux[1][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_many_packed_rows_lose_what_they_lose_padded(tmp_path, family):
    rows = random_rows(12, longest=18)
    by_length = sorted(rows, key=lambda row: (len(row.token_ids), row.row_id))
    lengths = [len(row.token_ids) for row in by_length]
    packs = pack_rows(range(12), lengths, 20)
    padded = OnlineFeatures(chat_target(), by_length, [1])
    for kind in ("online", "stored"):
        batch = source_of(kind, by_length, tmp_path / kind).batch(packs)
        assert batch.tokens_BT.shape == (len(packs), 20)
        assert batch.row_ids_B.tolist() == [i for pack in packs for i in pack]
        assert_equal_sums(
            family, batch, [padded.batch([0, 1, 2, 3, 4, 5, 6]), padded.batch([7, 8, 9, 10, 11])]
        )


def test_a_target_whose_state_runs_on_is_refused_online():
    config = JambaConfig(
        **DIMENSIONS | {"num_experts": 1, "num_experts_per_tok": 1, "pad_token_id": 0}
    )
    target = target_of(seeded(0, lambda: JambaForCausalLM(config)))
    with pytest.raises(ValueError, match="train.pack_tokens: tiny does not keep packed rows apart"):
        PackedFeatures(OnlineFeatures(target, [A]), 20)


# Where rows go


def test_rows_go_where_they_leave_the_least_room():
    assert pack_rows([10, 11, 12, 13, 14], [3, 7, 5, 5, 2], 10) == [[11, 10], [12, 13], [14]]


def test_equal_choices_go_to_the_older_pack():
    assert pack_rows(range(4), [6, 6, 4, 4], 10) == [[0, 2], [1, 3]]


def test_packing_in_windows_keeps_far_rows_apart(monkeypatch):
    monkeypatch.setattr("headstart.data.packing.WINDOW_TOKENS", 2)
    packs = pack_in_windows(range(100), [4] * 100, 10)
    assert sorted(i for pack in packs for i in pack) == list(range(100))
    assert max(max(pack) - min(pack) for pack in packs) < 5


def test_a_layout_says_where_every_token_comes_from():
    layout = Layout.of([[2, 1], [3]], 4)
    assert layout.row_PT.tolist() == [[0, 0, 1, 0], [2, 2, 2, 0]]
    assert layout.place_PT.tolist() == [[0, 1, 0, 0], [0, 1, 2, 0]]
    assert layout.document_PT.tolist() == [[0, 0, 1, -1], [0, 0, 0, -1]]
    values_BT = torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
    assert layout.take(values_BT, -7).tolist() == [[1, 2, 3, -7], [4, 5, 6, -7]]


def test_a_row_longer_than_a_packed_row_is_an_error_that_names_it():
    with pytest.raises(ValueError, match="train.pack_tokens=8: row a has 9 tokens; use 9 or more"):
        check_fits([B, A], 8)
