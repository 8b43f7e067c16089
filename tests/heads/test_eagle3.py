"""EAGLE-3: tapped states, read-outs, training that learns, and the target's own output in decoding.

Shapes: B rows, T tokens, K steps, F tapped states, D width, W draft vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    feature_batch,
    make_head,
    requests,
    run,
    some_vocab,
    target_of,
    tiny_model,
    tokens_of,
    variant_model,
)
from safetensors.torch import load_file
from torch import Tensor
from training import chat_target, command, random_rows, save_target, saved

from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.store import FeatureStore
from headstart.data.template import ChatTemplate
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import TreeShape
from headstart.heads.base import DraftHead, FeatureBatch, build_head
from headstart.heads.checkpoint import info_for, load_head, save_head
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
from headstart.heads.layers import rotate
from headstart.heads.target import Target, TargetShape
from headstart.heads.vocab import DraftVocab

GREEDY = SamplingConfig()
CHAIN = TreeShape.chain
TREE = TreeShape.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_layers": 2},
    "frozen": {"readout": "frozen"},
    "3.1": {"fc_norm": True, "feedback": "post_norm"},
    "one norm": {"norm_before_fc": True, "norm_before_residual": True},
}


def _head(target: Target, *, seed: int | None = 0, **options: Any) -> Eagle3Head:
    return make_head("eagle3", target, seed=seed, **({"aux": [1, 2, 3]} | options))


def _row(length: int, seed: int) -> list[int]:
    return torch.randint(128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _batch(head: DraftHead, target: Target, rows: list[list[int]], from_: int = 0) -> FeatureBatch:
    masks = [[int(t >= from_) for t in range(len(row))] for row in rows]
    return feature_batch(target, rows, masks, taps=head.aux_features)


def _drafter(target: Target, head: DraftHead, shape: TreeShape) -> HeadDrafter:
    return HeadDrafter(head, target.parts, shape, sampling=GREEDY)


# Which states are tapped.


def _shape(layers: int) -> TargetShape:
    return TargetShape.of(tiny_model(layers=1).config.__class__(num_hidden_layers=layers))


@pytest.mark.parametrize(
    ("layers", "want"), [(30, (2, 15, 27)), (32, (2, 16, 29)), (36, (2, 18, 33)), (8, (2, 4, 5))]
)
def test_the_default_taps_are_the_inputs_of_layers_2_half_and_the_last_but_two(
    layers: int, want: tuple[int, ...]
) -> None:
    assert Eagle3Config().taps(_shape(layers)) == want


@pytest.mark.parametrize("aux", [[0, 2], [2, 8], [3, 2], [2, 2, 5], [-1, 3], []])
def test_taps_that_are_outside_unsorted_or_repeated_are_refused(aux: list[int]) -> None:
    with pytest.raises(ValueError, match=r"head.aux=\[.*of a target of 8 layers: give asc"):
        Eagle3Config(aux=aux).taps(_shape(8))


def test_the_default_of_a_target_with_too_few_layers_is_refused(tiny: Target) -> None:
    with pytest.raises(ValueError, match=r"head.aux=null taps \[2, 2, 1\] of a target of 4 layers"):
        build_head(Eagle3Config(), tiny.shape, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"readout": "tied"}, "head.readout=tied: expected one of random, frozen, trained"),
        ({"feedback": "none"}, "head.feedback=none: expected one of pre_norm, post_norm"),
        ({"fc_norm": True, "norm_before_fc": True}, "head.fc_norm=true and head.norm_before_fc=t"),
    ],
)
def test_bad_settings_name_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Eagle3Config(**values)


# Weights at the start.


def test_the_head_starts_from_the_last_tapped_state_as_it_is(tiny: Target) -> None:
    head = _head(tiny, seed=None)
    features = torch.randn(1, 3, 96, generator=torch.Generator().manual_seed(0))
    assert torch.equal(head.fuse(features), features[..., 64:])


def test_own_rows_start_from_the_targets_or_at_random(tiny: Target) -> None:
    vocab = some_vocab()
    rows_WD = tiny.parts.readout.weight_WD[vocab.ids_W]
    trained, drawn = (_head(tiny, seed=None, vocab=vocab, readout=r) for r in ("trained", "random"))
    assert torch.equal(trained.lm_head.weight, rows_WD)
    assert trained.lm_head.weight.data_ptr() != tiny.parts.readout.weight_WD.data_ptr()
    assert drawn.lm_head.weight.shape == rows_WD.shape
    assert not torch.equal(drawn.lm_head.weight, rows_WD)


def test_rows_started_from_the_targets_read_out_as_frozen_ones_do(tiny: Target) -> None:
    trained, frozen = (_head(tiny, seed=None, readout=r) for r in ("trained", "frozen"))
    frozen.load_state_dict(trained.state_dict(), strict=False)
    output = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        trained.read_out(output, tiny.parts), frozen.read_out(output, tiny.parts)
    )


def test_own_rows_keep_the_targets_soft_cap_and_refuse_its_bias() -> None:
    soft = target_of(variant_model("gemma2"))
    head = _head(soft, readout="random")
    assert head.read_out(1e4 * torch.ones(1, 32), soft.parts).abs().max() <= 5.0
    biased = target_of(variant_model("phi"))
    with pytest.raises(ValueError, match="head.readout=trained: the target's read-out has a bias"):
        _head(biased)
    _head(biased, readout="frozen")


@pytest.mark.parametrize("scale", [0.01, 3.0])
def test_the_token_embedding_counts_the_same_whatever_its_size(scale: float) -> None:
    outputs = []
    for factor in (1.0, scale):
        model = tiny_model(rms_norm_eps=1e-12)
        target = target_of(model)
        head, D = _head(target), 32
        feature = torch.randn(1, 4, D, generator=torch.Generator().manual_seed(0))
        embedded = factor * target.parts.embed(torch.tensor([[5, 6, 7, 8]]))
        mask = torch.zeros(1, 1, 4, 4)
        outputs.append(head.run(embedded, feature, torch.arange(4)[None], mask))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_p24_layers_with_zero_branches_pass_the_fused_feature_on(tiny: Target, layers: int) -> None:
    head = _head(tiny, num_layers=layers).requires_grad_(False)
    for layer in head.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    batch = _batch(head, tiny, [_row(8, seed=0)])
    features = head._features(batch)
    outputs_BTKD = head.unroll(batch, tiny.parts, features)
    for step in range(3):
        run = slice(None) if step == 0 else slice(5)  # later steps have no label from 5 on
        assert torch.equal(outputs_BTKD[:, run, step], head.fuse(features)[:, run])
    assert head(batch, tiny.parts).total(head.denominators(batch)).isfinite()


# The forward pass against its formulas written out.


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _layer_written_out(head: Eagle3Head, embedded_TD: Tensor, u_TD: Tensor) -> Tensor:
    """Return o [T, D] of one fusing layer: causal, 4 query heads over 2 key/value heads."""
    w = {name.removeprefix("layers.0."): t for name, t in head.state_dict().items()}
    normed_TD = _rms(u_TD, w["hidden_norm.weight"])
    c = torch.cat((_rms(embedded_TD, w["input_layernorm.weight"]), normed_TD), -1)
    T = len(u_TD)
    cos, sin = (x[0] for x in head.rotary(torch.arange(T)[None], torch.float32))
    q, k = (
        rotate((c @ w[f"self_attn.{x}_proj.weight"].T).view(T, -1, 8).transpose(0, 1), cos, sin)
        for x in "qk"
    )
    v = (c @ w["self_attn.v_proj.weight"].T).view(T, -1, 8).transpose(0, 1)
    scores = q @ k.repeat_interleave(2, 0).transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
    seen = (scores.softmax(-1) @ v.repeat_interleave(2, 0)).transpose(0, 1).reshape(T, -1)
    residual = normed_TD if head.config.norm_before_residual else u_TD
    y = residual + seen @ w["self_attn.o_proj.weight"].T
    x = _rms(y, w["post_attention_layernorm.weight"])
    gate, up = x @ w["mlp.gate_proj.weight"].T, x @ w["mlp.up_proj.weight"].T
    return y + (gate * gate.sigmoid() * up) @ w["mlp.down_proj.weight"].T


def _fused_written_out(head: Eagle3Head, states: list[Tensor]) -> Tensor:
    w = head.state_dict()
    if head.config.fc_norm:
        states = [_rms(a, w[f"fc_norm.{i}.weight"]) for i, a in enumerate(states)]
    joined = torch.cat(states, -1)
    if head.config.norm_before_fc:
        joined = _rms(joined, w["norm_before_fc.weight"])
    return joined @ w["fc.weight"].T


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "two layers"])
def test_drafts_are_those_of_the_formulas_written_out(tiny: Target, name: str) -> None:
    """Three drafted tokens: fused states at first, then what the head feeds back to itself."""
    head, row = _head(tiny, **OPTIONS[name]), _row(6, seed=0)
    for parameter in head.parameters():
        parameter.mul_(3)  # norm weights far from 1, branches as large as the residual
    aux = tiny.forward(torch.tensor([row]), taps=(1, 2, 3)).aux
    u_TD = _fused_written_out(head, [aux[s][0, :5] for s in (1, 2, 3)])
    tokens = row[1:]
    features = torch.cat([aux[s][:, :5] for s in (1, 2, 3)], -1)
    state = head.new_state(1, 32, 8, tiny.parts)
    have = head.extend(state, torch.tensor([tokens]), features, [5], tiny.parts)[0, 0]
    rows_VD = tiny.readout if head.config.readout == "frozen" else head.lm_head
    norm_D = head.state_dict()["norm.weight"]
    for depth in range(3):
        o_D = _layer_written_out(head, tiny.parts.embed(torch.tensor(tokens)), u_TD)[-1]
        torch.testing.assert_close(have, rows_VD(_rms(o_D, norm_D)), rtol=1e-4, atol=1e-4)
        fed = _rms(o_D, norm_D) if head.config.feedback == "post_norm" else o_D
        u_TD, drafted = torch.cat((u_TD, fed[None])), int(have.argmax())
        tokens = [*tokens, drafted]
        slot = torch.tensor([[depth]])
        have = head.step(state, torch.tensor([[drafted]]), slot, tiny.parts)[0, 0]


# Loss.


@pytest.mark.parametrize(
    ("loss", "policy"),
    [
        ("ce_soft", "drop"),
        ("ce_soft", "mass"),
        ("ce_hard", "drop"),
        ("kl + 0.1*tv", "drop"),
        ("kl + 0.1*tv", "mass"),
    ],
)
def test_gradients_equal_those_of_a_loss_over_whole_logits(
    tiny: Target, loss: str, policy: str
) -> None:
    """The read-out that all steps share included, whose gradient is summed chunk by chunk."""
    vocab = some_vocab(64)
    head = _head(tiny, vocab=vocab, loss=loss, out_of_vocab=policy, loss_chunk=1000)
    batch = _batch(head, tiny, [_row(12, seed=1), _row(9, seed=2)], from_=2)
    have = head(batch, tiny.parts).total(head.denominators(batch))
    ours = torch.autograd.grad(have, list(head.parameters()))
    outputs_BTKD = head.unroll(batch, tiny.parts, head._features(batch))
    logs_BTKW = head.read_out(outputs_BTKD, tiny.parts).double().log_softmax(-1)
    want = _whole_loss(logs_BTKW, batch, tiny, head)
    assert have.item() == pytest.approx(want.item(), rel=1e-5)
    theirs = torch.autograd.grad(want, list(head.parameters()))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))


def _whole_loss(logs_BTKW: Tensor, batch: FeatureBatch, target: Target, head: Eagle3Head) -> Tensor:
    """Return the loss written out position by position."""
    ids = head.vocab.ids_W
    B, T = batch.tokens_BT.shape
    total = logs_BTKW.sum() * 0
    for step in range(3):
        terms = []
        for b, i in ((b, i) for b in range(B) for i in range(T - 2 - step)):
            label, log_q = i + 2 + step, logs_BTKW[b, i, step]
            if not batch.loss_mask_BT[b, label]:
                continue
            p_V = target.readout(batch.hidden_BTD[b, label - 1]).detach().double().softmax(-1)
            term = _term(log_q, p_V, int(batch.tokens_BT[b, label]), ids, head.config)
            if term is not None:
                terms.append(term)
        total = total + 0.8**step * torch.stack(terms).mean()
    return total


def _term(
    log_q: Tensor, p_V: Tensor, token: int, ids: Tensor, config: Eagle3Config
) -> Tensor | None:
    if config.loss == "ce_hard":
        return -log_q[ids.tolist().index(token)] if token in ids else None
    if config.out_of_vocab == "drop" and p_V.argmax() not in ids:
        return None
    raw = p_V[ids]
    law = raw / raw.sum()
    weight = raw.sum() if config.out_of_vocab == "mass" else 1.0
    if config.loss == "ce_soft":
        return -weight * (law * log_q).sum()
    overlap = torch.minimum(log_q.exp(), raw).sum()
    return weight * (law * (law.log() - log_q)).sum() + 0.1 * (1 - overlap)


def test_p29_a_teacher_cut_to_its_best_tokens_never_gives_a_negative_or_larger_divergence(
    tiny: Target,
) -> None:
    full, cut = (_head(tiny, loss=loss) for loss in ("kl", "kl_topk_tail"))
    batch = _batch(full, tiny, [_row(12, seed=1)])
    want = full(batch, tiny.parts).numerators["kl"]
    have = cut(batch, tiny.parts).numerators["kl_topk_tail"]
    assert ((have > 0) & (have < want)).all()


def test_the_last_step_alone_reaches_every_weight(tiny: Target) -> None:
    head = _head(tiny, num_layers=2, fc_norm=True)
    batch = _batch(head, tiny, [_row(9, seed=0)])
    outputs_BTKD = head.unroll(batch, tiny.parts, head._features(batch))
    head.read_out(outputs_BTKD[:, :, 2], tiny.parts).square().sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in head.parameters())


@pytest.mark.parametrize("name", OPTIONS)
def test_a_short_training_run_brings_the_loss_of_every_step_down(name: str, tiny: Target) -> None:
    head = _head(tiny, seed=None, vocab=some_vocab(64), loss="kl", **OPTIONS[name]).train()
    batch = _batch(head, tiny, [_row(24, seed=s) for s in range(4)])
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    counts, losses = head.denominators(batch), []
    for _ in range(40):
        sums = head(batch, tiny.parts, denominators=counts)
        loss = sums.total(counts)
        losses.append((sums.numerators["kl"] / counts["kl"]).tolist())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(last < 0.6 * first for first, last in zip(losses[0], losses[-1], strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_autocast_changes_the_loss_by_rounding_only(tiny: Target, name: str) -> None:
    head = _head(tiny, vocab=some_vocab(64), **OPTIONS[name])
    batch = _batch(head, tiny, [_row(12, seed=1)])
    counts = head.denominators(batch)
    want = head(batch, tiny.parts).total(counts)
    with torch.autocast("cpu", torch.bfloat16):
        have = head(batch, tiny.parts, denominators=counts).total(counts)
    have.backward()
    torch.testing.assert_close(have, want, rtol=0.03, atol=0)
    assert all(p.grad.isfinite().all() for p in head.parameters())


# Checkpoints.


@pytest.mark.parametrize("name", OPTIONS)
def test_p36_a_head_of_a_tied_target_comes_back_bit_for_bit_with_its_taps(
    tmp_path: Path, tied: Target, name: str
) -> None:
    head = _head(tied, vocab=some_vocab(32), **OPTIONS[name])
    save_head(tmp_path / "head", head, info_for(head, tied.name, tied.fingerprint))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["aux_features"] == [1, 2, 3]
    assert config["aux_convention"] == "hidden_states[s]"
    stored = load_file(tmp_path / "head" / "model.safetensors")
    if name == "frozen":
        assert not any(x.startswith("lm_head") for x in stored)
    else:
        assert stored["lm_head.weight"].shape == (32, 32)
    loaded, _ = load_head(tmp_path / "head")
    assert loaded.config == head.config
    assert torch.equal(_drafts(loaded, tied), _drafts(head, tied))


def _drafts(head: DraftHead, target: Target, start: int = 0) -> Tensor:
    """Return the logits of a prompt and of a step after it, the prompt from a position on."""
    tokens = torch.tensor([_row(6, seed=0)])
    output = target.forward(tokens, taps=head.aux_features)
    features = torch.cat([output.aux[s] for s in head.aux_features], -1)
    state = head.new_state(1, start + 32, 4, target.parts)
    state.cache.advance([start])
    first = head.extend(state, tokens[:, 1:], features[:, :5], [5], target.parts)
    more = head.step(state, tokens[:, :1], torch.tensor([[0]]), target.parts)
    return torch.cat((first, more), 1)


def test_a_checkpoint_whose_taps_were_changed_is_refused(tmp_path: Path, tiny: Target) -> None:
    head = _head(tiny)
    save_head(tmp_path / "head", head, info_for(head, tiny.name, tiny.fingerprint))
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    config["aux_features"] = [0, 1, 2]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"aux features \[0, 1, 2\] .* expected \[1, 2, 3\]"):
        load_head(tmp_path / "head")


ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def test_p37_position_settings_survive_a_reload(tmp_path: Path) -> None:
    target = target_of(tiny_model(rope_parameters=ROPE, max_position_embeddings=4096))
    head = _head(target)
    save_head(tmp_path / "head", head, info_for(head, target.name, target.fingerprint))
    stored = json.loads((tmp_path / "head" / "config.json").read_text())["target_shape"]
    assert stored["max_positions"] == 4096
    assert stored["rope"] == ROPE
    loaded, _ = load_head(tmp_path / "head")
    assert loaded.shape.max_positions == 4096
    assert loaded.shape.rope == head.shape.rope
    assert loaded.shape.rope["rope_theta"] == 500000.0
    assert loaded.shape.rope["factor"] == 8.0
    with torch.no_grad():
        assert torch.equal(_drafts(loaded, target, 3000), _drafts(head, target, 3000))
    # The settings matter there: a head that knows another base says something else.
    plain = _head(target_of(tiny_model(max_position_embeddings=4096)))
    plain.load_state_dict(head.state_dict())
    assert not torch.equal(_drafts(plain, target, 3000), _drafts(head, target, 3000))


# Decoding.


@pytest.fixture(scope="module")
def prompts() -> list[Request]:
    return requests(20, 64)


@pytest.fixture(scope="module")
def plain(tiny: Target, prompts: list[Request]) -> dict[str, list[int]]:
    return tokens_of(run(tiny, None, prompts))


@pytest.mark.parametrize("shape", [CHAIN(4), TREE], ids=["chain", "tree"])
def test_p47_greedy_output_is_the_plain_one(
    tiny: Target, prompts: list[Request], plain: dict[str, list[int]], shape: TreeShape
) -> None:
    """20 prompts of 64 tokens in a batch of 4 with refill, three of them at batch 1 as well."""
    drafter = _drafter(tiny, _head(tiny), shape)
    assert drafter.taps == (1, 2, 3)
    done = run(tiny, drafter, prompts)
    assert tokens_of(done) == plain
    for prompt_id, c in run(tiny, drafter, prompts[:3], batch_size=1).items():
        assert [r.accepted for r in c.rounds] == [r.accepted for r in done[prompt_id].rounds]


@pytest.mark.parametrize("name", OPTIONS)
def test_greedy_output_is_the_plain_one_under_every_option(
    tiny: Target, prompts: list[Request], plain: dict[str, list[int]], name: str
) -> None:
    done = tokens_of(run(tiny, _drafter(tiny, _head(tiny, **OPTIONS[name]), TREE), prompts[:4]))
    assert done == {prompt_id: plain[prompt_id] for prompt_id in done}


def test_a_draft_vocabulary_costs_acceptance_and_never_output(
    tiny: Target, prompts: list[Request], plain: dict[str, list[int]]
) -> None:
    head = _head(tiny, vocab=some_vocab(32))
    done = tokens_of(run(tiny, _drafter(tiny, head, TREE), prompts[:8]))
    assert done == {prompt_id: plain[prompt_id] for prompt_id in done}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_decoding_shows_the_head_the_states_that_training_shows_it(
    tiny: Target, prompts: list[Request], batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prefill in chunks and any path of a tree, they are those of one pass over the text."""
    monkeypatch.setattr("headstart.eval.engine.prefill.PREFILL_CHUNK", 5)
    head, shown = _head(tiny), []
    extend = head.extend

    def watched(state: Any, tokens: Tensor, features: Tensor, counts: Any, *rest: Any, **kw: Any):
        for r, count in enumerate(counts):
            shown.append((tokens[r, :count].tolist(), features[r, :count].clone()))
        return extend(state, tokens, features, counts, *rest, **kw)

    head.extend = watched
    prompts = prompts[:batch_size]
    done = tokens_of(run(tiny, _drafter(tiny, head, TREE), prompts, batch_size=batch_size))
    texts = [[*r.token_ids, *done[r.prompt_id]] for r in prompts]
    passes = [tiny.forward(torch.tensor([text]), taps=(1, 2, 3)).aux for text in texts]
    truths = [torch.cat([aux[s][0] for s in (1, 2, 3)], -1) for aux in passes]

    def gaps(tokens: list[int], features: Tensor) -> list[float]:
        """Return how far these features are from the truth, wherever a text has these tokens."""
        n = len(tokens)
        return [
            float((truth_TF[p : p + n] - features).abs().max())
            for text, truth_TF in zip(texts, truths, strict=True)
            for p in range(len(text) - n)
            if text[p + 1 : p + 1 + n] == tokens
        ]

    assert len(shown) > 20 * batch_size
    assert all(min(gaps(*pairs)) < 1e-4 for pairs in shown)


def test_p49_drafts_after_three_rounds_equal_those_of_a_new_drafter(tiny: Target) -> None:
    head, row = _head(tiny, num_layers=2), torch.tensor([_row(16, seed=0)])
    aux = tiny.forward(row, taps=head.aux_features).aux
    features = torch.cat([aux[s] for s in head.aux_features], -1)
    state, known = head.new_state(1, 32, 8, tiny.parts), 6
    head.extend(state, row[:, 1 : known + 1], features[:, :known], [known], tiny.parts)
    for accepted in (2, 0, 3):
        for depth in range(3):  # drafts, some of which are then rejected
            head.step(state, torch.tensor([[50 + depth]]), torch.tensor([[depth]]), tiny.parts)
        end = known + accepted + 1
        pairs = (row[:, known + 1 : end + 1], features[:, known:end])
        have, known = head.extend(state, *pairs, [accepted + 1], tiny.parts), end
    fresh = head.new_state(1, 32, 8, tiny.parts)
    want = head.extend(fresh, row[:, 1 : known + 1], features[:, :known], [known], tiny.parts)
    torch.testing.assert_close(have, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("shape", "calls"), [(CHAIN(1), 1), (CHAIN(4), 4), (TREE, 3)])
def test_k_drafted_tokens_cost_k_calls(tiny: Target, shape: TreeShape, calls: int) -> None:
    head, made = _head(tiny), []
    for name in ("extend", "step"):
        method = getattr(head, name)
        setattr(head, name, lambda *a, m=method, **k: made.append(1) or m(*a, **k))
    done = run(tiny, _drafter(tiny, head, shape), [Request("p", (1, 2, 3), 9)])["p"]
    assert len(made) == calls * len(done.rounds)


def test_p63_prompts_longer_than_any_trained_row_decode_as_plainly() -> None:
    """A head trained on rows of 64 tokens; prompts of 32 to 256 on a target that allows 512."""
    target = target_of(tiny_model())
    head = _head(target, seed=None).train()
    batch = _batch(head, target, [_row(64, seed=0)])
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-3)
    for _ in range(5):
        optimizer.zero_grad()
        head(batch, target.parts).total(head.denominators(batch)).backward()
        optimizer.step()
    prompts = [Request(f"p{n}", tuple(_row(n, seed=n)), 24) for n in (32, 64, 128, 256)]
    drafter = _drafter(target, head.eval().requires_grad_(False), CHAIN(3))
    assert tokens_of(run(target, drafter, prompts)) == tokens_of(run(target, None, prompts))


# The command, with features from disk.


def test_the_train_command_captures_what_the_head_taps_and_saves_a_head(tmp_path: Path) -> None:
    target = chat_target()
    template = ChatTemplate(target.tokenizer).hash
    writer = RowsWriter(tmp_path / "rows", RowsMeta(target.fingerprint, template, {}))
    for row in random_rows(8, seed=3):
        writer.add(row)
    writer.finish("made for a test", {})
    settings = [
        *("head=eagle3", "head.aux=[1]", "head.draft_vocab_size=64", "head.loss=kl"),
        *("train.max_steps=3", "train.eval_prompts=2", "train.eval_new_tokens=8"),
        *(f"rows={tmp_path}/rows", f"heldout_rows={tmp_path}/rows", f"out={tmp_path}/out"),
    ]
    command("train", *saved(save_target(tmp_path / "target")), *settings)
    head, info = load_head(tmp_path / "out" / "head")
    assert info.family == "eagle3"
    assert head.aux_features == (1,)
    assert FeatureStore(tmp_path / "rows-features").key["aux_features"] == [1]
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    figures = {name for line in lines for name in json.loads(line)}
    assert {"heldout/top1_agreement[2]", "heldout/tau_with_bonus_micro"} <= figures


def test_a_draft_vocabulary_of_another_size_than_the_read_out_is_refused(tiny: Target) -> None:
    config = Eagle3Config(aux=[1, 2], draft_vocab_size=16)
    with pytest.raises(ValueError, match="head.draft_vocab_size=16 but .* given is 32"):
        Eagle3Head(config, tiny.shape, DraftVocab(torch.arange(32), 128))
