"""Drafters without a head as arms of the benchmark: names, labels, notes, and cold repeats."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures_chat import chat_tokenizer
from models import make_head, target_of, tiny_model
from scripted import cycle, suite, where

from headstart import cli
from headstart.data.template import ChatTemplate
from headstart.eval.arms import Arm, head_arms
from headstart.eval.bench import benchmark, evaluate_heads
from headstart.eval.drafter_arms import drafter_arms
from headstart.eval.engine.drafters.config import (
    DrafterConfig,
    FallbackConfig,
    LookupConfig,
    ModelConfig,
    SuffixConfig,
)
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.result_files import read_result
from headstart.eval.run import run
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.heads.checkpoint import info_for, save_head
from headstart.heads.load import ATTENTION
from headstart.heads.runtime import RuntimeConfig
from headstart.heads.target import Target

GREEDY = SamplingConfig()
QUICK = EvalConfig(resamples=2_000, warmup_prompts=1)
SURE = SuffixConfig(min_score=3.0)
cli.register()


def chat_target(seed: int = 0, **config: Any) -> Target:
    options = {"vocab": 264, "max_position_embeddings": 4096, "eos_token_id": 2, **config}
    return target_of(tiny_model(seed, layers=2, **options), chat_tokenizer(), name=f"tiny{seed}")


@pytest.fixture(scope="module")
def target() -> Target:
    return chat_target()


@pytest.fixture(scope="module")
def checkpoint(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, head = tmp_path_factory.mktemp("heads") / "eagle", make_head("eagle", target)
    info = info_for(head, target.name, target.fingerprint, step=7, tokens_seen=99)
    save_head(path, head, info)
    return path


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path, small = tmp_path_factory.mktemp("model"), chat_target(1, max_position_embeddings=512)
    small.model.save_pretrained(path)
    small.tokenizer.save_pretrained(path)
    return str(path)


def arms(
    drafters: dict[str, DrafterConfig],
    target: Target,
    heads: list[Arm] | None = None,
    sampling: SamplingConfig = GREEDY,
) -> dict[str, Arm]:
    return {arm.name: arm for arm in drafter_arms(drafters, heads or [], target, sampling)}


def test_every_arm_says_what_it_is(target, checkpoint, model_path):
    heads = head_arms([checkpoint], [TreeConfig("chain2", depth=2)], target, GREEDY, force=False)
    made = arms(
        {
            "lookup": LookupConfig(),
            "chain": SuffixConfig(tokens=6),
            "tree": SuffixConfig(tree=True),
            "own": SuffixConfig(responses=0),
            "small": ModelConfig(model_path, tokens=3),
            "both": FallbackConfig(["lookup", "tree"]),
            "either": FallbackConfig(["lookup", "small"]),
            "ours": FallbackConfig(["tree", "head"]),
        },
        target,
        heads,
    )
    said = {n: (a.info.family, a.info.tree, a.info.verify_scheme) for n, a in made.items()}
    assert said == {
        "lookup": ("lookup", "chain:10", "a1"),
        "chain": ("suffix", "chain:6", "a1"),
        "tree": ("suffix", "dynamic:tree", "b"),
        "own": ("suffix", "chain:15", "a1"),
        "small": ("model", "chain:3", "a1"),
        "both": ("lookup+suffix", "chain:10+dynamic:tree", "b"),
        "either": ("lookup+model", "chain:10+chain:3", "a1"),
        "ours-eagle-chain2": ("suffix+eagle", "dynamic:tree+chain:2", "b"),
    }
    caches = {n: a.info.caches for n, a in made.items()}
    cold = {"chain", "tree", "both", "ours-eagle-chain2"}
    assert caches == {n: "cold" if n in cold else None for n in made}
    assert {n for n, a in made.items() if a.is_chain} == {"small"}
    assert made["small"].info.checkpoint == model_path
    assert made["ours-eagle-chain2"].info.step == 7
    assert all(a.info.lossless for a in made.values())


def test_a_draft_model_draws_its_tokens_at_a_temperature(target, model_path):
    sampling = SamplingConfig(temperature=0.7)
    made = arms({"small": ModelConfig(model_path)}, target, sampling=sampling)
    assert made["small"].info.verify_scheme == "a"


def test_a_draft_model_of_a_shorter_context_is_told(target, model_path):
    (note,) = arms({"small": ModelConfig(model_path)}, target)["small"].notes
    assert note.endswith("a context of 512 tokens, the target of 4096: beyond, nothing is drafted")


def test_a_draft_model_that_is_not_there_is_named_by_its_option(target):
    with pytest.raises(FileNotFoundError, match=r"drafters\.mine\.path=/none: no such directory"):
        arms({"mine": ModelConfig("/none")}, target)


def test_a_draft_model_that_is_not_there_is_told_before_the_target_is_loaded(monkeypatch):
    config = cli.load_config("eval", ["drafter=[model]", "drafters.model.path=runs/no/model"])
    monkeypatch.setattr("headstart.eval.run.load_target", None)
    with pytest.raises(FileNotFoundError, match=r"drafters\.model\.path=runs/no/model: no su"):
        run(config)


def test_a_draft_model_of_an_unknown_type_is_refused():
    with pytest.raises(ValueError, match=r"model\.dtype=fp16: expected one of float32.* or null"):
        ModelConfig("x", dtype="fp16")


@pytest.mark.parametrize("packed", [False, True])
def test_a_draft_model_is_packed_as_the_target_is(model_path, packed):
    target = chat_target()
    if packed:
        target.pack()
    model = arms({"small": ModelConfig(model_path)}, target)["small"].drafter.model
    assert (model.parts.readout.packed_WD is None) == (target.parts.readout.packed_WD is None)
    assert type(model.layers[0].mlp.up_proj) is type(target.layers[0].mlp.up_proj)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_draft_model_attends_as_the_target_does(model_path, attention):
    """Soft-capped models are known to eager attention only, and there is no option beside this."""
    target = chat_target()
    target.model.set_attn_implementation(ATTENTION[attention])
    model = arms({"small": ModelConfig(model_path)}, target)["small"].drafter.model
    assert model.model.config._attn_implementation == ATTENTION[attention]


@pytest.mark.slow
def test_an_evaluation_with_a_compiled_draft_model_says_what_was_compiled(tmp_path, model_path):
    target = chat_target()
    RuntimeConfig(compile=["target", "drafter"]).attach(target)
    (result,) = evaluate_heads(
        target,
        ChatTemplate(target.tokenizer),
        [],
        [],
        sampling=GREEDY,
        config=replace(QUICK, num_prompts=2, max_new_tokens=8, batch_sizes=[2]),
        out=tmp_path,
        run_config={},
        drafters={"small": ModelConfig(model_path, tokens=3)},
    )
    assert result.compilation == target.compiled.info  # with what the batch sweep compiled
    assert result.compilation.parts == ["target", "drafter"]
    assert result.compilation.networks == ["target", f"draft model {model_path}"]
    assert result.compilation.late == 0
    assert result.equality.fraction_identical == 1.0
    assert read_result(tmp_path / "small") == result


def test_text_drafters_of_two_arms_remember_apart(target):
    made = arms({"suffix": SURE, "lookup": LookupConfig(), "both": BOTH}, target)
    assert made["both"].drafter.first[0] is not made["suffix"].drafter
    made["suffix"].drafter.finish(0, [1, 2, 3])
    assert len(made["both"].drafter.first[0]._answers) == 0


BOTH = FallbackConfig(["suffix", "lookup"])


def test_kept_warm_answers_are_told_in_the_result_and_by_its_fallbacks(target):
    warm = replace(SURE, keep_warm=True)
    made = arms({"suffix": warm, "lookup": LookupConfig(), "both": BOTH}, target)
    for name in ("suffix", "both"):
        assert made[name].info.caches == "warm"
        assert made[name].notes == (
            "suffix: answers are kept warm between repeats, so that a repeat finds its own answers",
        )


@pytest.mark.parametrize(
    ("drafters", "message"),
    [
        ({"f": FallbackConfig(["lookup", "head"])}, "drafters.f.members: lookup: no such drafter"),
        (
            {"lookup": LookupConfig(), "f": FallbackConfig(["lookup", "head"])},
            "drafters.f.members: head: there is no head; give checkpoints",
        ),
        (
            {"lookup": LookupConfig(), "f": FallbackConfig(["lookup", "sufix"])},
            "drafters.f.members: sufix: no such drafter; expected lookup or head",
        ),
        (
            {"m": ModelConfig("x"), "lookup": LookupConfig(), "f": FallbackConfig(["m", "lookup"])},
            "drafters.f.members: m: a draft model always proposes something.*; name it last",
        ),
        (
            {
                "lookup": LookupConfig(),
                "suffix": SURE,
                "both": BOTH,
                "f": FallbackConfig(["both", "lookup"]),
            },
            "drafters.f.members: both: is a fallback itself; name its members",
        ),
    ],
)
def test_a_fallback_that_cannot_be_made_names_the_member(drafters, message, target):
    with pytest.raises(ValueError, match=message):
        arms(drafters, target)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (["lookup"], r"fallback.members=\['lookup'\]: need at least two different names"),
        (["lookup", "lookup"], "need at least two different names"),
        (["head", "lookup"], "a head always proposes something.*; name it last"),
    ],
)
def test_members_that_make_no_sense_are_refused(members, message):
    with pytest.raises(ValueError, match=message):
        FallbackConfig(members)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_evaluation_with_every_drafter_passes_every_identity(
    tmp_path, target, checkpoint, model_path, temperature
):
    sampling = SamplingConfig(temperature=temperature)
    drafters = {
        "lookup": LookupConfig(),
        "suffix": SuffixConfig(),
        "suffix_tree": SuffixConfig(tree=True),
        "small": ModelConfig(model_path),
        "both": FallbackConfig(["lookup", "head"]),
    }
    results = evaluate_heads(
        target,
        ChatTemplate(target.tokenizer),
        [checkpoint],
        [TreeConfig("chain2", depth=2)],
        sampling=sampling,
        config=replace(QUICK, num_prompts=2, max_new_tokens=8, batch_size=2),
        out=tmp_path,
        run_config={"seed": 0},
        drafters=drafters,
    )
    names = ["eagle-chain2", "lookup", "suffix", "suffix_tree", "small", "both-eagle-chain2"]
    assert [r.drafter.name for r in results] == names
    assert temperature > 0 or all(r.equality.fraction_identical == 1.0 for r in results)
    assert [read_result(tmp_path / name) for name in names] == results
    assert "both-eagle-chain2" in (tmp_path / "report.md").read_text()
    assert results[4].figures["cost_ratio_c"] > 0
    assert results[1].figures["cost_ratio_c"] is None  # no model runs


def test_without_a_head_drafters_are_measured_alone(tmp_path, target):
    results = evaluate_heads(
        target,
        ChatTemplate(target.tokenizer),
        [],
        [],
        sampling=GREEDY,
        config=replace(QUICK, num_prompts=2, max_new_tokens=6),
        out=tmp_path,
        run_config={},
        drafters={"lookup": LookupConfig()},
    )
    assert [r.drafter.family for r in results] == ["lookup"]


@pytest.mark.parametrize("keep_warm", [False, True])
def test_a_repeat_starts_cold_unless_it_is_told_not_to(keep_warm):
    """On CYCLE from another start each prompt: a warm repeat would draft the first prompt too."""
    target, seen = cycle(), []
    made = arms({"suffix": SuffixConfig(keep_warm=keep_warm)}, target)["suffix"]
    finish = made.drafter.finish
    made.drafter.finish = lambda row, tokens: (
        seen.append(len(made.drafter._answers)),
        finish(row, tokens),
    )
    prompts = suite([0, 3], max_new_tokens=9)
    benchmark(
        target,
        [made],
        prompts,
        sampling=GREEDY,
        config=replace(QUICK, repeats=2),
        stop_ids=(),
        provenance=where(target, prompts),
    )
    warm_up, *timed = seen
    assert warm_up == 0
    assert timed == ([1, 2, 3, 4] if keep_warm else [0, 1, 0, 1])
