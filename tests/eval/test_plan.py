"""`headstart plan`: what it predicts, says, writes and refuses."""

import dataclasses
import json
import re
from functools import cache

import pytest
import torch
from models import make_head, target_of, tiny_model
from traces import bench, chain_round, completion, make_result, timed
from training import command

from headstart import cli
from headstart.data.codec import Codec
from headstart.data.store_job import stored_bytes
from headstart.eval.engine.records import Round
from headstart.eval.metrics import prompt_sums
from headstart.eval.plan_acceptance import acceptance
from headstart.eval.plan_costs import largest_batch
from headstart.eval.plan_figure import draw
from headstart.eval.plan_make import make_plan
from headstart.eval.plan_report import markdown, sections, write_plan
from headstart.eval.result_files import write_result
from headstart.eval.roofline import expected_tokens
from headstart.files import read_json

cli.register()
TINY = [
    "model=hf",
    "hardware.bandwidth_gb_s=1",
    "hardware.memory_gb=0.001",
    "hardware.tflops={bfloat16: 0.1, float32: 0.05}",
    "head.draft_vocab_size=64",
    "context=64",
]
EIGHT = ["model=llama3_8b", "alphas=0.8", "batch_sizes=[1,64,256]", "ks=[1,2,4,7]"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Overrides of a plan for TINY, of 8 layers for the taps of EAGLE-3."""
    directory = tmp_path_factory.mktemp("tiny")
    tiny_model(layers=8).config.save_pretrained(directory)
    return [*TINY, f"model.path={directory}"]


@cache
def plan(*overrides: str):
    return make_plan(cli.load_config("plan", ["out=out", *overrides]))


def told(made) -> str:
    return markdown(made, "plan.png")


# What it predicts


def test_the_default_plan_is_of_an_8b_model_on_an_h100():
    made = plan()
    assert made.target.num_parameters == 8_030_261_248
    assert round(made.knee_tokens) == 295
    assert made.batches[0].best_speedup > 2


def test_a_plan_without_caches_and_drafting_cost_is_the_published_table():
    made = plan(*EIGHT, "head=medusa", "head.num_heads=7", "head.draft_vocab_size=2", "context=16")
    found = {row.batch: [r.speedup for r in row.rounds.values()] for row in made.batches}
    # Medusa's blocks and 16 cached tokens are not quite nothing.
    assert found[1] == pytest.approx([1.80, 2.44, 3.36, 4.16], rel=0.04)
    assert found[256] == pytest.approx([1.04, 0.94, 0.78, 0.60], rel=0.04)


def test_the_best_draft_is_the_fastest_and_none_where_all_lose():
    made = plan(*EIGHT, "alphas=0.3", "context=16", "batch_sizes=[1,4096]")
    first, last = made.batches
    assert first.best.label == "k=2"  # .3 ** 3 is less than a third draft step costs
    assert first.best_speedup == first.rounds["k=2"].speedup
    assert (last.best, last.best_speedup) == (None, 1.0)
    assert max(r.speedup for r in last.rounds.values()) < 1


def test_a_fraction_of_the_vocabulary_drafts_faster():
    whole, part = (plan(f"head.draft_vocab_size={w}").cost_ratio_c for w in ("null", "8192"))
    assert part < 0.6 * whole


def test_trees_are_planned_from_acceptance_by_rank():
    made = plan("alphas=[[.6,.12,.05],[.35,.1,.06]]", "trees=[4,8]", "ks=[1,2]")
    assert [d.label for d in made.drafts] == ["k=1", "k=2", "tree 4", "tree 8"]
    assert made.drafts[2].expected == pytest.approx(1 + 0.6 + 0.6 * 0.35 + 0.12)


def test_shown_chains_end_where_the_head_or_the_acceptance_does():
    assert [d.nodes for d in plan("head=medusa").drafts] == [2, 3, 4, 5]
    assert [d.label for d in plan("alphas=[.7,.6,.5]").drafts] == ["k=1", "k=2", "k=3"]


def test_a_float8_target_has_half_the_weights_and_a_bfloat16_head():
    wide, narrow = plan(), plan("dtype=float8")
    assert narrow.memory[0].target_weights * 2 == wide.memory[0].target_weights
    assert narrow.memory[0].draft_weights == wide.memory[0].draft_weights
    assert narrow.knee_tokens == pytest.approx(wide.knee_tokens, rel=1e-3)


# Acceptance


def test_without_alphas_acceptance_is_assumed_and_said_to_be():
    assert "Acceptance is not measured (assumed: 0.7 at every depth)" in told(plan())


def test_alphas_of_a_measured_chain_are_read_from_its_result(tmp_path):
    sums, done = bench(2, 4, seconds=0.2)  # two of four accepted in every round
    write_result(tmp_path, make_result("eagle3", sums, done), [])
    made = plan(f"alphas_from={tmp_path}", "ks=null")
    assert made.acceptance.alphas == [1.0, 1.0, 0.0]  # depth 3 was never tried
    assert [d.expected for d in made.drafts] == [2.0, 3.0, 3.0]
    assert "measured: eagle3 (chain:4) on tiny, 20 prompts of hand: 1, 1, 0" in told(made)
    assert "Acceptance is not measured" not in told(made)


NO_CHAINS = [
    ({"tree": "static:static7"}, "measured with tree static:static7, whose .* tree=chain5"),
    ({"tree": "chain:15+chain:3"}, r"measured with tree chain:15\+chain:3, whose .* tree=chain5"),
    ({"policy": "survival"}, "measured with policy survival, which drafts .* policy=fixed"),
]


@pytest.mark.parametrize(("changes", "message"), NO_CHAINS)
def test_a_result_of_no_chain_of_one_length_is_refused(tmp_path, changes, message):
    result = make_result("eagle3", *bench(2, 4, seconds=0.2))
    drafter = dataclasses.replace(result.drafter, **changes)
    write_result(tmp_path, dataclasses.replace(result, drafter=drafter), [])
    with pytest.raises(ValueError, match=message):
        acceptance(None, str(tmp_path))


def lookup(misses: int) -> tuple[list, list]:
    """One prompt: twenty rounds that accept one of two, and rounds that found nothing to draft."""
    rounds = [chain_round(1, 2)] * 20 + [Round(0, 1, 0, 0, 1, "leaf")] * misses
    done = completion("p", rounds, seconds=1.0)
    return [prompt_sums(done, timed("p", len(done.token_ids), 2.0))], [done]


def test_a_drafter_that_often_drafts_nothing_has_no_chains_acceptance(tmp_path):
    write_result(tmp_path, make_result("lookup", *lookup(misses=20)), [])
    with pytest.raises(
        ValueError, match="alpha_cond of lookup would emit 2.00 .* but tau_full_rou"
    ):
        acceptance(None, str(tmp_path))


def test_a_round_now_and_then_without_a_draft_is_no_matter(tmp_path):
    write_result(tmp_path, make_result("lookup", *lookup(misses=2)), [])
    assert acceptance(None, str(tmp_path)).alphas == [1.0, 0.0]


def test_a_result_of_cut_rounds_alone_is_refused(tmp_path):
    done = completion("p", [chain_round(1, 2, cut=True)], seconds=1.0)
    sums = [prompt_sums(done, timed("p", len(done.token_ids), 2.0))]
    write_result(tmp_path, make_result("eagle3", sums, [done]), [])
    with pytest.raises(
        ValueError, match="would emit 2.00 tokens a round, but tau_full_rounds=null"
    ):
        acceptance(None, str(tmp_path))


# Costs


def test_memory_is_weights_caches_and_logits(tiny):
    made = plan(*tiny, "batch_sizes=[1,3]", "ks=[2]")
    row, model = made.memory[1], tiny_model(layers=8)
    assert row.target_weights == 2 * sum(weight.numel() for weight in model.parameters())
    assert row.target_cache == 3 * 64 * 8 * 2 * 2 * 8 * 2  # rows tokens layers k+v heads dim bytes
    assert row.draft_cache == 3 * 64 * 1 * 2 * 2 * 8 * 2
    assert row.logits == 3 * 3 * 128 * 4
    parts = [value for name, value in vars(row).items() if name != "batch"]
    assert row.total == sum(parts)


def test_the_largest_batch_is_the_last_that_fits(tiny):
    made = plan(*tiny)
    fits = made.largest_batch
    at, over = plan(*tiny, f"batch_sizes=[{fits},{fits + 1}]").memory
    assert at.total <= made.memory_bytes < over.total


def test_a_target_that_does_not_fit_leaves_room_for_no_row():
    made = plan("model=llama3_70b", "batch_sizes=[1]")
    assert made.largest_batch == 0
    assert largest_batch(made.memory[0], made.memory_bytes) == 0


def test_a_separate_draft_models_state_is_its_weights_and_its_cache():
    made = plan("model@draft_model=llama3_1b", "batch_sizes=[4]")
    assert made.memory[0].draft_weights == 2 * 1_235_814_400
    assert made.memory[0].draft_cache == 4 * 2048 * 16 * 2 * 8 * 64 * 2
    assert made.training is None
    assert made.cost_ratio_c == pytest.approx(1.236 / 7.505, rel=0.03)


def test_training_counts_three_passes_of_every_unrolled_step_and_the_teacher(tiny):
    made = plan(*tiny, "head.ttt_steps=3").training
    head = make_head("eagle3", target_of(tiny_model(layers=8)), vocab=None)
    D, W, fc = 32, 64, 3 * 32 * 32
    norms = sum(p.numel() for n, p in head.named_parameters() if "norm" in n)
    whole = sum(p.numel() for p in head.parameters()) - norms - 128 * D + W * D
    assert made.depths == 3
    assert made.head_flops_per_token == 3 * 2 * (3 * whole - 2 * fc) + 2 * W * D


@pytest.mark.parametrize("head", ["medusa", "hydra_heads"])
def test_training_a_head_a_depth_counts_every_head(head, tiny):
    made = plan(*tiny, f"head={head}", "head.num_heads=3", "alphas=0.5")
    assert made.training.depths == 3
    assert made.drafter.work.max_depth == 3


def test_captured_features_take_what_the_store_says(tiny):
    made = plan(*tiny, "training.rows=500", "training.row_tokens=100").training
    each = stored_bytes(Codec.of("target", torch.bfloat16), 32, (2, 4, 5))
    assert each == 4 * 32 * 2 + 13
    assert made.stored_bytes_per_1000_rows == 1000 * 100 * each
    assert made.stored_bytes == 500 * 100 * each


def test_capturing_once_beats_the_target_in_every_step_when_rows_are_seen_often():
    once, often = plan("training.epochs=1").training, plan("training.epochs=10").training
    assert once.captured_hours == pytest.approx(once.online_hours)
    assert often.captured_hours < 0.5 * often.online_hours


# What it says and writes


def test_the_command_prints_and_writes_the_plan(tiny, tmp_path, capsys):
    command("plan", *tiny, f"out={tmp_path}/plan")
    printed = capsys.readouterr().out
    assert "In short" in printed
    assert "Speedup over plain decoding at the same batch" in printed
    names = {"plan.json", "plan.md", "plan.png"}
    assert names <= {path.name for path in (tmp_path / "plan").iterdir()}


def test_plan_json_holds_the_numbers_of_the_tables(tiny, tmp_path):
    made = plan(*tiny)
    write_plan(made, tmp_path)
    stored = read_json(tmp_path / "plan.json")
    row = stored["batches"][0]
    assert row["drafts"]["k=3"]["speedup"] == made.batches[0].rounds["k=3"].speedup
    assert stored["knee_tokens"] == made.knee_tokens
    assert stored["memory"][0]["total"] == made.memory[0].total
    assert stored["drafts"][0]["expected"] == expected_tokens([0.7])
    assert stored["config"]["model"]["path"] == made.config.model.path
    assert json.loads(json.dumps(stored)) == stored


def test_every_table_of_the_markdown_has_cells_under_every_column():
    for section in sections(plan()):
        assert {len(row) for row in section.rows} <= {len(section.columns)}
    tables = re.findall(r"^\| .*\|$", told(plan()), re.M)
    assert len(tables) > 30


def test_the_summary_names_the_best_draft_and_where_drafting_stops_paying():
    made = plan("context=16", "batch_sizes=[1,128,4096]")
    text = sections(made)[0].lines[0]
    assert text.startswith(f"At batch 1 drafting {made.batches[0].best.label} is ")
    assert text.endswith("From batch 4096 on no draft pays: switch speculation off there.")


def test_the_summary_says_when_nothing_pays():
    text = sections(plan("alphas=0", "batch_sizes=[1]"))[0].lines[0]
    assert text == "Drafting pays at no batch that fits: plain decoding is faster."


def test_a_chain_is_not_said_to_end_where_only_the_acceptance_does():
    worth = "While verifying is free a chain of"
    assert f"{worth} at least k=2 is worth drafting; no acceptance is known beyond." in told(
        plan("alphas=[.9,.9]")
    )
    assert f"{worth} k=4 is worth drafting, which is as deep as the drafter goes." in told(
        plan("head=medusa", "alphas=0.9")
    )
    ended = plan("alphas=[.9,.01,.9]")
    assert ended.rule_depth == 1
    assert f"{worth} k=1 is worth drafting, and no longer one." in told(ended)


def test_no_chain_is_said_to_be_worth_drafting_where_none_is():
    made = plan("alphas=0.01")
    assert made.rule_depth == 0
    assert "yields: no chain is worth drafting." in told(made)
    assert "k=0" not in told(made)


def test_a_target_that_does_not_fit_is_told_first_and_shaded_everywhere():
    made = plan("model=llama3_70b", "hardware=h100", "batch_sizes=[1,8]")
    first = sections(made)[0].lines[0]
    assert first.startswith(f"{made.target.name} on H100 SXM, drafting with ")
    assert re.search(r" does not fit: batch 1 takes \d+ GB of 80.0 GB\. What follows", first)
    assert shaded(made) == (1, 8)


def test_what_pays_is_told_of_the_batches_that_fit():
    made = plan("batch_sizes=[1,8,4096]")
    assert 8 < made.largest_batch < 4096
    assert "4096" not in sections(made)[0].lines[0]
    assert shaded(made) == (made.largest_batch, 4096)
    assert shaded(plan("batch_sizes=[1,8]")) is None


def shaded(made) -> tuple[float, float] | None:
    """Return the batches that the plot says do not fit."""
    patches = draw(made, "title").axes[0].patches
    assert len(patches) <= 1
    return (patches[0].get_x(), patches[0].get_x() + patches[0].get_width()) if patches else None


def test_the_summary_tells_that_a_mixture_reads_more_for_more_tokens():
    text = told(plan("model=qwen3_30b_a3b"))
    assert "as they are sent to more of the 128 experts" in text


def test_batches_that_do_not_fit_are_marked():
    made = plan("batch_sizes=[1,256]")
    speeds = sections(made)[1]
    assert [row[0] for row in speeds.rows] == ["1", "256 *"]
    assert "* does not fit the memory of H100 SXM." in speeds.lines


# What it refuses


MISTAKES = [
    (["dtype=int4"], "dtype=int4: expected one of float32, bfloat16, float16, float8"),
    (["kv_dtype=int8"], "kv_dtype=int8: expected one of"),
    (["dtype=float8", "hardware=a100"], "dtype=float8: A100 .* no peak for it; use one of bfloat"),
    (["context=1"], "context=1: need at least 16 tokens"),
    (["batch_sizes=[]"], r"batch_sizes=\[\]: give at least one"),
    (["batch_sizes=[0,1]"], r"batch_sizes=\[0, 1\]: need at least 1 in each"),
    (["ks=[0]"], r"ks=\[0\]: need at least 1 in each"),
    (["ks=[]"], r"ks=\[\]: give at least one"),
    (["ks=[5]", "head=medusa"], r"ks=\[5\]: the drafter goes 4 tokens deep; lower 5"),
    (["ks=[3]", "alphas=[.7,.6]"], r"ks=\[3\]: acceptance is known for 2 depths; lower 3 or give"),
    (["trees=[1]"], r"trees=\[1\]: need at least 2 in each"),
    (["trees=[8]"], r"trees=\[8\]: needs acceptance by rank too, such as alphas=\[\["),
    (["trees=[9]", "alphas=[[.6,.2]]"], r"trees=\[9\]: alphas by 1 depths .* 3 nodes at most; low"),
    (["alphas=1.5"], r"alphas=1\.5 at depth 0: expected shares in \[0, 1\]"),
    (["alphas=often"], "alphas=often at depth 0: expected shares"),
    (["alphas=[]"], r"alphas=\[\] at depth 0: expected shares"),
    (["alphas=[.5,x]"], "alphas=x at depth 1: expected shares"),
    (["alphas=[[.6,.7]]"], "alphas at depth 0 add up to 1.300: expected the share of each rank"),
    (["alphas=.5", "alphas_from=a"], "alphas=0.5 and alphas_from=a: acceptance is given or measur"),
    (["hardware.compute_efficiency=0"], "hardware.compute_efficiency=0.0: expected a fraction"),
    (["hardware.bandwidth_efficiency=2"], "hardware.bandwidth_efficiency=2.0: expected a fraction"),
    (["hardware.bandwidth_gb_s=null"], "hardware.bandwidth_gb_s=null: give a number, or hardware="),
    (["hardware.launch_us=-1"], "hardware.launch_us=-1.0: need 0 or more"),
    (["hardware.memory_gb=0"], "hardware.memory_gb=0.0: need more than 0"),
    (["+hardware.tflops.int8=1"], "hardware.tflops.int8: expected one of float32"),
    (["training.epochs=0"], "training.epochs=0: need at least 1"),
    (["training.utilisation=1.1"], "training.utilisation=1.1: expected a fraction"),
    (["model@draft_model=qwen3_8b"], "draft_model Qwen3-8B: vocab_size=151936, but Llama-3.1-8B"),
]


@pytest.mark.parametrize(("overrides", "message"), MISTAKES)
def test_a_mistake_is_one_sentence_with_field_value_and_cure(overrides, message):
    with pytest.raises(ValueError, match=message) as raised:
        plan(*overrides)
    assert "\n" not in str(raised.value)
