"""Several heads and several trees over one plain arm, by the command line."""

import json
from pathlib import Path

import pytest
from models import make_head
from training import chat_target, command, save_target, saved

from headstart.data.template import ChatTemplate
from headstart.eval.arms import head_arms
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.result import Result
from headstart.eval.result_files import read_result
from headstart.eval.settings import TreeConfig
from headstart.heads.checkpoint import info_for, save_head

QUICK = ["eval.num_prompts=2", "eval.max_new_tokens=6", "eval.warmup_prompts=1"]
QUICK += ["eval.resamples=2000"]
CHAIN = TreeConfig(name="chain2", depth=2)
DEEP = TreeConfig(name="deep", depth=4)


def save(path: Path, family: str, **options: object) -> Path:
    target = chat_target()
    head = make_head(family, target, **options)
    template = ChatTemplate(target.tokenizer).hash
    info = info_for(head, target.name, target.fingerprint, template_hash=template)
    save_head(path, head, info)
    return path


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Hold a target, a Medusa of two heads and an EAGLE."""
    root = tmp_path_factory.mktemp("arms")
    save_target(root / "target")
    save(root / "medusa" / "head", "medusa", num_heads=2)
    save(root / "eagle" / "head", "eagle")
    return root


def evaluate(root: Path, out: Path, *overrides: str) -> dict[str, Result]:
    heads = f"checkpoints=[{root}/medusa/head,{root}/eagle/head]"
    command("eval", *saved(root / "target"), *QUICK, heads, f"out={out}", *overrides)
    results = [read_result(path.parent) for path in sorted(out.rglob("result.json"))]
    return {result.drafter.name: result for result in results}


def test_every_head_is_measured_with_every_tree_against_one_plain_arm(root, tmp_path):
    found = evaluate(root, tmp_path / "out", "+tree@trees.a=chain2", "+tree@trees.b=static7")
    assert sorted(found) == ["eagle-chain2", "eagle-static7", "medusa-chain2", "medusa-static7"]
    plain = {result.figures["tokens_per_s_plain_decode"] for result in found.values()}
    assert len(plain) == 1


def test_without_several_trees_the_one_is_measured(root, tmp_path):
    assert sorted(evaluate(root, tmp_path / "out", "tree=chain2")) == [
        "eagle-chain2",
        "medusa-chain2",
    ]


def test_a_tree_that_a_head_cannot_draft_is_refused_or_left_out_by_option(root, tmp_path):
    trees = ["+tree@trees.a=chain2", "+tree@trees.b=dynamic8"]
    with pytest.raises(SystemExit, match="^error: .*"):
        evaluate(root, tmp_path / "refused", *trees)
    found = evaluate(root, tmp_path / "out", *trees, "eval.skip_misfits=true")
    assert sorted(found) == ["eagle-chain2", "eagle-dynamic8", "medusa-chain2"]
    told = [w for w in found["medusa-chain2"].warnings if "dynamic8 is left out: " in w]
    assert len(told) == 1
    assert not any("left out" in w for w in found["eagle-chain2"].warnings)


def test_a_head_that_fits_no_tree_is_refused_all_the_same(root):
    paths = [root / "eagle" / "head", root / "medusa" / "head"]
    with pytest.raises(ValueError, match=r"tree\.depth=4 but head\.num_heads=2"):
        head_arms(paths, [DEEP], chat_target(), SamplingConfig(), force=False, skip_misfits=True)
    arms = head_arms(
        paths, [DEEP, CHAIN], chat_target(), SamplingConfig(), force=False, skip_misfits=True
    )
    assert [arm.name for arm in arms] == ["eagle-deep", "eagle-chain2", "medusa-chain2"]


def test_several_suites_give_figures_by_suite_with_intervals(root, tmp_path):
    paths = [tmp_path / "mt.jsonl", tmp_path / "code.jsonl"]
    for path in paths:
        rows = [{"id": i, "category": "x", "turns": [f"Say {i}", "Again"]} for i in range(3)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    suites = f"eval.suites=[{{path:{paths[0]}}},{{path:{paths[1]},num_prompts:3}},{{}}]"
    found = evaluate(root, tmp_path / "out", "tree=chain2", suites)
    for result in found.values():
        counts = {name: group.counts.prompts for name, group in result.suites.items()}
        assert counts == {"mt": 2, "code": 3, "generated-heldout": 2}
        assert result.counts.prompts == 7
        assert set(result.suites["code"].intervals) == {
            "speedup_ratio_of_sums_decode",
            "tau_with_bonus_micro",
        }
        assert {"mt/x", "code/x"} < set(result.categories)
        assert result.equality.fraction_identical == 1.0
        assert result.provenance.prompt_suite == "mt+code+generated-heldout"
    report = (tmp_path / "out" / "report.md").read_text()
    assert "## By suite" in report


def test_only_the_arms_asked_for_are_measured(root, tmp_path):
    trees = ["+tree@trees.a=chain2", "+tree@trees.b=static7"]
    some = "eval.only=[eagle-static7,medusa-chain2]"
    assert sorted(evaluate(root, tmp_path / "out", *trees, some)) == [
        "eagle-static7",
        "medusa-chain2",
    ]
    assert sorted(evaluate(root, tmp_path / "chains", *trees, "eval.only=['*-chain2']")) == [
        "eagle-chain2",
        "medusa-chain2",
    ]
    with pytest.raises(
        SystemExit, match="eval.only: no arm 'eagle'; expected some of medusa-chain2"
    ):
        evaluate(root, tmp_path / "none", *trees, "eval.only=[eagle]")
