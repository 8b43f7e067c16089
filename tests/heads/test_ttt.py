"""Training-time test: what a training step sees is what a drafter sees, step by step.

Shapes: B rows, T tokens, K steps, S keys of all steps, H heads, d head width, V vocabulary.
"""

from typing import Any

import pytest
import torch
from models import feature_batch, make_head, some_vocab
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads.base import FeatureBatch, LossSums
from headstart.heads.eagle import EagleConfig
from headstart.heads.eagle3 import Eagle3Config
from headstart.heads.layers import document_mask
from headstart.heads.losses import select
from headstart.heads.recurrent import RecurrentHead
from headstart.heads.target import Target
from headstart.heads.ttt import Unroll, document_blocks, ttt_attention

SIX, SIX_MASK = [10, 11, 12, 13, 14, 15], [0, 0, 0, 1, 1, 1]
AUX = {"aux": [1, 2, 3]}
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle": ("eagle", {"ttt_steps": 3}),
    "eagle3": ("eagle3", AUX),
    "eagle3, fc_norm": ("eagle3", AUX | {"fc_norm": True}),
    "eagle3, norm_before_fc": ("eagle3", AUX | {"norm_before_fc": True}),
    "eagle3, post_norm": ("eagle3", AUX | {"feedback": "post_norm"}),
    "eagle3, normed residual": ("eagle3", AUX | {"norm_before_residual": True}),
    "eagle3, 3.1 in full": ("eagle3", AUX | {"fc_norm": True, "feedback": "post_norm"}),
    "eagle3, frozen rows": ("eagle3", AUX | {"readout": "frozen"}),
    "eagle3, two states": ("eagle3", {"aux": [1, 3]}),
}


def _head(name: str, target: Target, **options: Any) -> RecurrentHead:
    family, own = HEADS[name]
    return make_head(family, target, **(own | options))


def _row(length: int, seed: int) -> list[int]:
    return torch.randint(128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _batch(head: RecurrentHead, target: Target, *args: Any, **options: Any) -> FeatureBatch:
    return feature_batch(target, *args, taps=head.aux_features, **options)


@torch.no_grad()
def _trained_logits(head: RecurrentHead, batch: FeatureBatch, target: Target) -> Tensor:
    """Return what training reads out, [B, T, K, W]."""
    outputs_BTKD = head.unroll(batch, target.parts, head._features(batch))
    return head.read_out(outputs_BTKD, target.parts)


@torch.no_grad()
def _decoded_logits(
    head: RecurrentHead, tokens_T: Tensor, features_TF: Tensor, target: Target
) -> list[Tensor]:
    """Return, for each start i, the logits of up to K steps of a drafter forced to the tokens."""
    rows = []
    for i in range(len(tokens_T) - 1):
        state = head.new_state(1, 64, 8, target.parts)
        pairs = (tokens_T[None, 1 : i + 2], features_TF[None, : i + 1])
        logits = [head.extend(state, *pairs, [i + 1], target.parts)[0, 0]]
        for step in range(1, min(head.config.ttt_steps, len(tokens_T) - 1 - i)):
            token = tokens_T[None, i + 1 + step, None]
            logits.append(head.step(state, token, torch.tensor([[step - 1]]), target.parts)[0, 0])
        rows.append(torch.stack(logits))
    return rows


def _run_in_training(want: list[Tensor]) -> list[Tensor]:
    """Keep later steps where one of them has a label; training runs only the first elsewhere."""
    return [steps if i < len(want) - 2 else steps[:1] for i, steps in enumerate(want)]


# Training sees what decoding sees.


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", HEADS)
def test_p21_every_step_at_every_position_equals_a_forced_decoder(
    tiny: Target, name: str, layers: int
) -> None:
    head = _head(name, tiny, num_layers=layers)
    batch = _batch(head, tiny, [_row(8, seed=0)], [[1] * 8])
    have_TKW = _trained_logits(head, batch, tiny)[0]
    want = _decoded_logits(head, batch.tokens_BT[0], head._features(batch)[0], tiny)
    assert [len(steps) for steps in want] == [3, 3, 3, 3, 3, 2, 1]
    for i, steps in enumerate(_run_in_training(want)):
        torch.testing.assert_close(have_TKW[i, : len(steps)], steps, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_p21_packed_documents_equal_decoders_that_know_their_own_only(
    tiny: Target, name: str
) -> None:
    head = _head(name, tiny, num_layers=2)
    documents = [[0] * 5 + [1] * 4, [0] * 3 + [1] * 2 + [2] * 4]
    rows = [_row(9, seed=1), _row(9, seed=2)]
    batch = _batch(head, tiny, rows, [[1] * 9] * 2, documents=documents, pad_to=11)
    have_BTKW, features_BTF = _trained_logits(head, batch, tiny), head._features(batch)
    for row, ends in enumerate([(0, 5, 9), (0, 3, 5, 9)]):
        for start, end in zip(ends, ends[1:], strict=False):
            part = slice(start, end)
            want = _decoded_logits(head, batch.tokens_BT[row, part], features_BTF[row, part], tiny)
            for i, steps in enumerate(_run_in_training(want)):
                have_KW = have_BTKW[row, start + i, : len(steps)]
                torch.testing.assert_close(have_KW, steps, rtol=0, atol=1e-5)


def test_p21_the_rotary_position_of_step_s_at_t_is_t_plus_s(tiny: Target) -> None:
    head, seen = _head("eagle3", tiny), []
    rotary = head.rotary.forward
    head.rotary.forward = lambda positions, dtype: (
        seen.append(positions.tolist()),
        rotary(positions, dtype),
    )[1]
    batch = _batch(head, tiny, [_row(10, seed=0)], [[1] * 10], documents=[[0] * 5 + [1] * 5])
    _trained_logits(head, batch, tiny)
    # Later steps run at 0 and 1 of each document: from 2 on they would need a label past its end.
    assert seen == [[[*range(5), *range(5)]], [[1, 2, 1, 2]], [[2, 3, 2, 3]]]


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_later_steps_skip_what_is_not_supervised_and_lose_the_same(
    tiny: Target, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    head, found, runs = _head(name, tiny, num_layers=2), [], []
    rows = [_row(12, seed=1), _row(9, seed=2)]
    masks = [[0] * 8 + [1] * 4, [0] * 3 + [1] * 3 + [0] * 3]
    batch = _batch(head, tiny, rows, masks)
    run = head.run

    def counted(embedded_BMD: Tensor, *others: Any) -> Tensor:
        runs.append(embedded_BMD.shape[1])
        return run(embedded_BMD, *others)

    monkeypatch.setattr(head, "run", counted)
    for everywhere in (False, True):
        if everywhere:
            monkeypatch.setattr(head, "_later_places", lambda _: torch.arange(12).expand(2, 12))
        head.zero_grad()
        loss = head(batch, tiny.parts).total(head.denominators(batch))
        loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in head.named_parameters()}))
    assert runs == [12, 5, 5, 12, 12, 12]  # 5: labels 8 to 11 two or three on
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    for parameter, gradient in found[1][1].items():
        torch.testing.assert_close(found[0][1][parameter], gradient, rtol=1e-5, atol=1e-7)


def test_p64_positions_past_256_of_a_bf16_head_do_not_run_together(tiny: Target) -> None:
    """Step 1 at 256 has position 257, which bf16 would round back to 256."""
    head = _head("eagle3", tiny).to(torch.bfloat16)
    frequencies_d = 10000.0 ** (-torch.arange(0, 8, 2).float() / 8)
    rows = []
    for step in (0, 1):
        for position in (256, 4096):
            at = torch.tensor([[position]]) + step
            phase_d = (position + step) * frequencies_d
            cos, sin = head.rotary(at, torch.bfloat16)
            assert torch.equal(cos[0, 0, 0, :4], phase_d.cos().bfloat16())
            assert torch.equal(sin[0, 0, 0, :4], phase_d.sin().bfloat16())
            rows.append(torch.cat((cos, sin), -1)[0, 0, 0].float())
    assert len(torch.stack(rows).unique(dim=0)) == 4


# What is supervised.


USED = {
    # step: (row i, token fed in, teacher position, label) of the six-token example
    0: [(1, 12, 2, 13), (2, 13, 3, 14), (3, 14, 4, 15)],
    1: [(0, 12, 2, 13), (1, 13, 3, 14), (2, 14, 4, 15)],
    2: [(0, 13, 3, 14), (1, 14, 4, 15)],
}


def test_p20_the_steps_use_exactly_the_rows_of_the_six_token_example(tiny: Target) -> None:
    head = _head("eagle3", tiny)
    batch = _batch(head, tiny, [SIX], [SIX_MASK])
    picked = select(batch, 3, head.config, None)
    embedding_VD = tiny.parts.embed(torch.arange(128))
    used: dict[int, list[tuple[int, ...]]] = {0: [], 1: [], 2: []}
    for n, step in picked.valid_NK.nonzero().tolist():
        i = int(picked.student_NK[n, step])
        fed_D = head._embed_next(batch, tiny.parts, step)[0, i]
        token = int((embedding_VD - fed_D).abs().sum(-1).argmin())
        used[step].append((i, token, int(picked.position_N[n]), int(picked.label_N[n])))
    assert used == USED
    assert head.denominators(batch)["ce_soft"].tolist() == [3, 3, 2]
    counts = _head("eagle", tiny).denominators(batch)
    assert {name: n.tolist() for name, n in counts.items()} == {
        "ce_soft": [3, 3, 2],
        "feature_smoothl1": [3, 3, 2],
    }


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_p20_losses_equal_a_sum_over_the_table_written_out(tiny: Target, name: str) -> None:
    head = _head(name, tiny, step_decay=0.5)
    batch = _batch(head, tiny, [SIX], [SIX_MASK])
    law_TV = tiny.readout(batch.hidden_BTD[0]).double().softmax(-1)
    logs_TKV = _trained_logits(head, batch, tiny)[0].double().log_softmax(-1)
    want = [
        sum(-float((law_TV[teacher] * logs_TKV[i, step]).sum()) for i, _, teacher, _ in rows)
        for step, rows in USED.items()
    ]
    have = head(batch, tiny.parts)
    assert have.numerators["ce_soft"].tolist() == pytest.approx(want, rel=1e-5)
    total = sum(0.5**s * w / n for s, (w, n) in enumerate(zip(want, (3, 3, 2), strict=True)))
    if name == "eagle3":
        assert have.total(head.denominators(batch)).item() == pytest.approx(total, rel=1e-5)


def test_hass_holds_the_output_of_step_s_at_i_to_the_feature_at_i_plus_1_plus_s(
    tiny: Target,
) -> None:
    head = _head("eagle", tiny, step_decay=0.5)
    batch = _batch(head, tiny, [SIX], [SIX_MASK])
    outputs_TKD = head.unroll(batch, tiny.parts, batch.hidden_BTD)[0].detach().double()
    want = [0.0, 0.0, 0.0]
    for step, rows in USED.items():
        for i, _, teacher, _ in rows:
            gap_D = (outputs_TKD[i, step] - batch.hidden_BTD[0, teacher]).abs()
            want[step] += float(torch.where(gap_D < 1, 0.5 * gap_D**2, gap_D - 0.5).mean())
    have = head(batch, tiny.parts)
    assert have.numerators["feature_smoothl1"].tolist() == pytest.approx(want, rel=1e-5)
    assert have.weights["feature_smoothl1"].tolist() == [1.0, 0.5, 0.25]
    assert have.weights["ce_soft"].tolist() == pytest.approx([0.1, 0.05, 0.025])


def test_one_step_of_eagle_is_what_eagle_was_without_unrolling(tiny: Target) -> None:
    one, three = (_head("eagle", tiny, ttt_steps=k) for k in (1, 3))
    batch = _batch(one, tiny, [_row(9, seed=0)], [[1] * 9])
    have, want = one(batch, tiny.parts), three(batch, tiny.parts)
    for term, numerator in have.numerators.items():
        torch.testing.assert_close(numerator, want.numerators[term][:1], rtol=1e-6, atol=0)


# Nothing leaks.


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
@pytest.mark.parametrize("t", [0, 2, 4])
def test_p22_step_s_at_t_sees_neither_later_features_nor_ids_after_t_plus_1_plus_s(
    tiny: Target, name: str, t: int
) -> None:
    head = _head(name, tiny, num_layers=2)
    batch = _batch(head, tiny, [_row(9, seed=0)], [[1] * 9])
    before_TKW = _trained_logits(head, batch, tiny)[0]
    for states_BTD in (batch.hidden_BTD, *batch.aux.values()):
        states_BTD[:, t + 1 :] += 1.0
    batch.tokens_BT[:, t + 2 :] = (batch.tokens_BT[:, t + 2 :] + 1) % 128
    after_TKW = _trained_logits(head, batch, tiny)[0]
    unchanged_TK = (before_TKW == after_TKW).all(-1)
    for step in range(3):
        # Step s at i reads features up to i and tokens up to i + 1 + s.
        blind = max(0, t + 1 - step)
        assert unchanged_TK[:blind, step].all()
        assert not unchanged_TK[blind:6, step].any()  # from 6 on no later step has a label


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_p22_packed_documents_lose_what_they_lose_alone(tiny: Target, name: str) -> None:
    head = _head(name, tiny)
    rows, masks = [_row(7, seed=1), _row(5, seed=2)], [[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    packed = _batch(
        head, tiny, [rows[0] + rows[1]], [masks[0] + masks[1]], documents=[[0] * 7 + [1] * 5]
    )
    alone = [_batch(head, tiny, [row], [mask]) for row, mask in zip(rows, masks, strict=True)]
    have, want = head(packed, tiny.parts), [head(batch, tiny.parts) for batch in alone]
    for term, numerator in have.numerators.items():
        total = want[0].numerators[term] + want[1].numerators[term]
        torch.testing.assert_close(numerator, total, rtol=1e-5, atol=1e-5)
        counts = [head.denominators(batch)[term] for batch in (packed, *alone)]
        assert torch.equal(counts[0], counts[1] + counts[2])


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_p25_padding_changes_neither_loss_nor_gradients(tiny: Target, name: str) -> None:
    head, found = _head(name, tiny), []
    for width in (4, 64):
        batch = _batch(head, tiny, [_row(4, seed=0)], [[0, 0, 1, 1]], pad_to=width)
        head.zero_grad()
        loss = head(batch, tiny.parts).total(head.denominators(batch))
        loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in head.named_parameters()}))
    torch.testing.assert_close(found[1][0], found[0][0], rtol=1e-6, atol=0)
    for parameter, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][parameter], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_p07_a_batch_with_nothing_to_learn_gives_zero_and_zero_gradients(
    tiny: Target, name: str
) -> None:
    head = _head(name, tiny)
    batch = _batch(head, tiny, [_row(6, seed=0)], [[0] * 6])
    loss = head(batch, tiny.parts).total(head.denominators(batch))
    loss.backward()
    assert loss.item() == 0.0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in head.parameters())


def test_a_row_shorter_than_the_steps_trains_what_it_can(tiny: Target) -> None:
    head = _head("eagle3", tiny)
    batch = _batch(head, tiny, [_row(3, seed=0)], [[1, 1, 1]])
    sums: LossSums = head(batch, tiny.parts)
    assert head.denominators(batch)["ce_soft"].tolist() == [1, 0, 0]
    assert sums.total(head.denominators(batch)).isfinite()
    assert (sums.numerators["ce_soft"] > 0).tolist() == [True, False, False]


# The attention by itself.


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _square_mask(document_BT: Tensor, steps: int) -> Tensor:
    """Return what may be seen [B, steps*T, steps*T], cell by cell."""
    B, T = document_BT.shape
    allowed = torch.zeros(B, steps, T, steps, T, dtype=torch.bool)
    for b, s, i, r, j in torch.cartesian_prod(
        *(torch.arange(n) for n in (B, steps, T, steps, T))
    ).tolist():
        same = document_BT[b, i] == document_BT[b, j]
        allowed[b, s, i, r, j] = (j <= i and same) if r == 0 else (r <= s and i == j)
    return allowed.view(B, steps * T, steps * T)


GOLDEN = """
1... .... ....
11.. .... ....
111. .... ....
1111 .... ....
1... 1... ....
11.. .1.. ....
111. ..1. ....
1111 ...1 ....
1... 1... 1...
11.. .1.. .1..
111. ..1. ..1.
1111 ...1 ...1
"""


def test_p21_the_pattern_of_four_tokens_and_three_steps_is_the_published_one() -> None:
    """Queries of zero see all they may alike; values that count keys then read it off."""
    steps, T = 3, 4
    key = torch.zeros(1, 1, T, 8)
    values = torch.eye(steps * T).view(1, 1, steps, T, steps * T).unbind(2)
    view = document_mask(torch.zeros(1, T, dtype=torch.int64), torch.float32)
    lines = []
    for s in range(steps):
        seen = ttt_attention(key, [key] * (s + 1), values[: s + 1], view)[0, 0]
        for i, weights in enumerate(seen.view(T, steps, T)):
            torch.testing.assert_close(
                weights[weights > 0], torch.full((i + 1 + s,), 1 / (i + 1 + s))
            )
            lines.append(
                " ".join("".join("1" if w > 0 else "." for w in part) for part in weights.tolist())
            )
    assert lines == GOLDEN.split("\n")[1:-1]


def test_a_step_equals_dense_attention_over_the_square_of_all_steps_with_its_gradients() -> None:
    B, H, shared, T, d, steps = 2, 4, 2, 6, 8, 3
    document_BT = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]])
    queries, keys, values = (
        [_random(B, n, T, d, seed=10 * kind + s).requires_grad_() for s in range(steps)]
        for kind, n in enumerate((H, shared, shared))
    )
    view, memory = document_mask(document_BT, torch.float64), Unroll()
    have = torch.cat(
        [memory.attend(q, k, v, view, 0) for q, k, v in zip(queries, keys, values, strict=True)],
        dim=2,
    )
    wide = [
        torch.cat(x, 2).repeat_interleave(H // x[0].shape[1], 1) for x in (queries, keys, values)
    ]
    scores = wide[0] @ wide[1].transpose(-1, -2) * d**-0.5
    scores = scores.masked_fill(~_square_mask(document_BT, steps)[:, None], float("-inf"))
    want = scores.softmax(-1) @ wide[2]
    torch.testing.assert_close(have, want, rtol=0, atol=1e-6)  # sums of exponents are kept in fp32
    weight = _random(*want.shape, seed=99)
    leaves = [*queries, *keys, *values]
    ours = torch.autograd.grad((have * weight).sum(), leaves)
    for a, b in zip(ours, torch.autograd.grad((want * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


class _Largest(TorchDispatchMode):
    """Remembers the most elements any operation put out."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_later_steps_make_no_tensor_larger_than_one_causal_square() -> None:
    T, H = 48, 2
    view = document_mask(torch.zeros(1, T, dtype=torch.int64), torch.float32)
    memory, largest = Unroll(), _Largest()
    with largest:
        for step in range(6):
            states = [_random(1, H, T, 8, seed=step, dtype=torch.float32) for _ in range(3)]
            memory.attend(*states, view, 0)
    assert largest.elements == H * T * T


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_what_sdpa_gives() -> None:
    """Its forward pass, uncompiled: on a CPU torch has no backward for it."""
    document_BT = torch.tensor([[0] * 5 + [1] * 4, [0] * 7 + [-1] * 2])
    dense, blocks = Unroll(), Unroll()
    for s in range(3):
        states = [
            _random(2, n, 9, 16, seed=3 * s + kind, dtype=torch.float32)
            for kind, n in enumerate((4, 2, 2))
        ]
        have = blocks.attend(*states, document_blocks(document_BT), 0)
        want = dense.attend(*states, document_mask(document_BT, torch.float32), 0)
        torch.testing.assert_close(have, want, rtol=0, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("length", [100, 256])
def test_compiled_flex_attention_trains_as_sdpa_does(length: int) -> None:
    document_BT = (torch.arange(length, device="cuda") > 40).long()[None]
    gradients = []
    for view in (document_mask(document_BT, torch.float32), document_blocks(document_BT)):
        memory, total, leaves = Unroll(), torch.zeros((), device="cuda"), []
        for s in range(3):
            states = [
                _random(1, n, length, 64, seed=3 * s + kind, dtype=torch.float32).cuda()
                for kind, n in enumerate((6, 2, 2))
            ]
            leaves += [x.requires_grad_() for x in states]
            total = total + memory.attend(*states, view, 0).square().sum()
        gradients.append((total, *torch.autograd.grad(total, leaves)))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_head_told_to_use_flex_has_the_same_outputs_and_refuses_to_train_on_a_cpu(
    tiny: Target,
) -> None:
    sdpa, flex = (_head("eagle3", tiny, ttt_attention=kind) for kind in ("sdpa", "flex"))
    batch = _batch(sdpa, tiny, [_row(9, seed=0)], [[1] * 9], documents=[[0] * 5 + [1] * 4])
    with pytest.raises(ValueError, match="head.ttt_attention=flex trains on a GPU only; use sdpa"):
        flex(batch, tiny.parts)
    flex.requires_grad_(False)
    have, want = (_trained_logits(head, batch, tiny) for head in (flex, sdpa))
    torch.testing.assert_close(have, want, rtol=0, atol=1e-5)


# Settings.


@pytest.mark.parametrize("kind", [EagleConfig, Eagle3Config])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ttt_steps": 0}, "head.ttt_steps=0: need at least one step"),
        ({"step_decay": 0.0}, "head.step_decay=0.0: expected 0 < decay <= 1"),
        ({"step_decay": 1.5}, "head.step_decay=1.5: expected 0 < decay <= 1"),
        ({"num_layers": 0}, "head.num_layers=0: need at least one layer"),
        ({"ttt_attention": "eager"}, "head.ttt_attention=eager: expected one of sdpa, flex"),
    ],
)
def test_bad_settings_of_the_unrolling_name_the_field(
    kind: type, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_a_decay_without_steps_to_decay_over_warns() -> None:
    with pytest.warns(UserWarning, match="head.step_decay=0.5 has no effect with head.ttt_steps=1"):
        EagleConfig(step_decay=0.5)


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_metrics_count_every_supervised_position_of_every_step(tiny: Target, name: str) -> None:
    head = _head(name, tiny, vocab=some_vocab(64))
    batch = _batch(head, tiny, [_row(12, seed=1)], [[1] * 12])
    sums: LossSums = head(batch, tiny.parts)
    value, count = sums.metrics["oov_argmax"]
    assert count.tolist() == [10, 9, 8]
    learned = head.denominators(batch)["ce_soft"]
    assert torch.equal(value, count - learned)
    assert head.train()(batch, tiny.parts).metrics == {}
