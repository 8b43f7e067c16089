"""Beyond the length a head was trained on: no crash, the target's own output, and a warning.

Prompts of a benchmark fall in buckets by their tokens, 33-64 and so on by powers of two.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures_chat import chat_tokenizer
from models import oracle, target_of, tiny_model
from scripted import arm, cycle, suite, where
from training import CHAT_VOCAB, token_row

from headstart.data.rows import RowsMeta, RowsWriter
from headstart.data.template import ChatTemplate
from headstart.eval.arms import Arm, head_arms
from headstart.eval.bench import benchmark
from headstart.eval.checks import length_warnings
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.metrics import length_bucket
from headstart.eval.report_content import content
from headstart.eval.report_markdown import markdown
from headstart.eval.result import PromptRow, Result
from headstart.eval.result_files import read_result, write_result
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.eval.suites import Suite
from headstart.heads.base import families
from headstart.heads.checkpoint import load_head
from headstart.heads.load import TargetConfig
from headstart.heads.target import Target
from headstart.train.config import TrainConfig
from headstart.train.run import TrainRun, train

GREEDY = SamplingConfig()
FAMILIES: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 3},
    "eagle": {},
    "eagle3": {"aux": [1]},
    "hydra_heads": {"num_heads": 3, "arch": "prefix-mlp"},
}
CHAIN = TreeConfig(name="chain3", depth=3)
DYNAMIC = TreeConfig(name="dynamic8", top_k=4, levels=3, total=8)
LENGTHS = (32, 64, 128, 256)


@cache
def target() -> Target:
    """A random Llama of two layers that speaks CHAT, in a context of 512."""
    return target_of(tiny_model(layers=2, vocab=CHAT_VOCAB), chat_tokenizer(), name="tiny-512")


def _tokens(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(5, CHAT_VOCAB, (count,), generator=generator).tolist()


def _trained_at_64(path: Path, family: str) -> Path:
    """Train a head on rows of 20 to 64 tokens and return its checkpoint."""
    template = ChatTemplate(target().tokenizer).hash
    writer = RowsWriter(path / "rows", RowsMeta(target().fingerprint, template, {}))
    for number, length in enumerate((20, 64, 40)):
        writer.add(token_row(f"row-{number}", _tokens(length), 8))
    writer.finish("made for a test", {})
    job = TrainRun(
        target=TargetConfig(path="in memory"),
        head=families()[family][0](**FAMILIES[family]),
        train=TrainConfig(max_steps=3, batch_rows=3, eval_prompts=0, precision="fp32"),
        tree=CHAIN,
        rows=str(path / "rows"),
        out=str(path / "out"),
    )
    train(target(), job)
    return path / "out" / "head"


def _prompts(new_tokens: int) -> Suite:
    requests = [Request(f"p{n}", tuple(_tokens(n)), new_tokens) for n in LENGTHS]
    return Suite("lengths", "0" * 16, requests, dict.fromkeys((r.prompt_id for r in requests), ""))


def _measured(arms: list[Arm], prompts: Suite) -> list[tuple[Result, list[PromptRow]]]:
    return benchmark(
        target(),
        arms,
        prompts,
        sampling=GREEDY,
        config=EvalConfig(resamples=2_000, warmup_prompts=1),
        stop_ids=(),
        provenance=where(target(), prompts),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_p63_a_head_trained_at_64_tokens_drafts_for_prompts_of_up_to_256(
    tmp_path: Path, family: str
) -> None:
    """Prompts of 32, 64, 128 and 256 tokens in a context of 512, by chain and by dynamic tree."""
    checkpoint = _trained_at_64(tmp_path, family)
    trees = [CHAIN] if family == "medusa" else [CHAIN, DYNAMIC]
    arms = head_arms([checkpoint], trees, target(), GREEDY, force=False)
    assert {arm.trained_length for arm in arms} == {64}
    for result, rows in _measured(arms, _prompts(40)):
        assert result.equality.fraction_identical == 1.0
        assert list(result.context_lengths) == ["17-32", "33-64", "65-128", "129-256"]
        for row, found in zip(rows, result.context_lengths.values(), strict=True):
            assert found.counts.prompts == 1
            assert found.figures["tau_with_bonus_micro"] == sum(row.emitted) / len(row.emitted)
        (told,) = [w for w in result.warnings if "trained on" in w]
        assert "4 of 4 prompts with their answers reach up to 296 tokens, the head was" in told
        assert "trained on rows of at most 64: tau falls beyond" in told


def test_p63_training_records_its_longest_row(tmp_path: Path) -> None:
    _, info = load_head(_trained_at_64(tmp_path, "medusa"))
    assert info.trained_on["max_length"] == 64


def test_training_records_where_its_rows_are(tmp_path: Path) -> None:
    """So that an evaluation can look for its prompts there."""
    _, info = load_head(_trained_at_64(tmp_path, "medusa"))
    assert info.trained_on["rows_path"] == str(tmp_path / "rows")


def test_p63_a_head_that_says_nothing_of_its_training_has_no_warning(tmp_path: Path) -> None:
    checkpoint = _trained_at_64(tmp_path, "medusa")
    config = json.loads((checkpoint / "config.json").read_text())
    del config["info"]["trained_on"]["max_length"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    (made,) = head_arms([checkpoint], [CHAIN], target(), GREEDY, force=False)
    assert made.trained_length is None
    ((result, _),) = _measured([made], _prompts(4))
    assert not any("trained on" in w for w in result.warnings)
    assert len(result.context_lengths) == 4


@pytest.mark.parametrize(("trained", "warned"), [(15, 2), (16, 1), (30, 1), (31, 0), (None, 0)])
def test_answers_count_towards_the_length_that_is_warned_of(
    trained: int | None, warned: int
) -> None:
    done = [Completion("short", [0] * 6, "stop"), Completion("long", [0] * 1, "stop")]
    found = length_warnings({"short": 10, "long": 30}, done, trained)
    assert len(found) == (warned > 0)
    assert not warned or found[0].startswith(f"{warned} of 2 prompts with their answers reach up")


def test_lengths_fall_in_buckets_by_powers_of_two() -> None:
    found = {n: length_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 64, 65, 4096)}
    assert list(found.values()) == [
        *("1-1", "2-2", "3-4", "3-4", "5-8", "5-8", "9-16", "33-64", "65-128", "2049-4096")
    ]


def test_a_bucket_pools_the_rounds_of_its_prompts(tmp_path: Path) -> None:
    """Tau by length is a ratio of sums, and the report shows it beside the categories."""
    prompts = _prompts(1 + 4 * 3)
    prompts = replace(prompts, requests=[*prompts.requests, Request("p50", tuple(_tokens(50)), 6)])
    prompts.categories["p50"] = ""
    (outcome,) = _measured([arm("oracle", oracle(target(), prompts.requests, 3))], prompts)
    result, rows = outcome
    # Rounds of 4, 4, 4 and, from 50, of 4 and 1.
    pooled = result.context_lengths["33-64"]
    assert (pooled.counts.prompts, pooled.counts.rounds) == (2, 5)
    assert pooled.figures["tau_with_bonus_micro"] == 17 / 5
    assert {row.prompt_id: row.prompt_tokens for row in rows} == {
        f"p{n}": n for n in (*LENGTHS, 50)
    }
    assert read_result(write_result(tmp_path, result, rows)) == result
    report = markdown(content([result]))
    table = report[report.index("| drafter | prompt tokens | prompts |") :].splitlines()[:6]
    assert table[0].startswith("| drafter | prompt tokens | prompts | rounds | tau |")
    buckets = ("17-32", "33-64", "65-128", "129-256")
    for line, bucket in zip(table[2:], buckets, strict=True):
        assert line.startswith(f"| oracle | {bucket} | {1 + (bucket == '33-64')} |")


def test_a_drafter_without_a_head_has_buckets_and_no_warning() -> None:
    prompts = suite([0, 3], max_new_tokens=9)
    ((result, _),) = benchmark(
        cycle(),
        [arm("null", NoDrafter())],
        prompts,
        sampling=GREEDY,
        config=EvalConfig(resamples=2_000, warmup_prompts=1),
        stop_ids=(),
        provenance=where(cycle(), prompts),
    )
    assert list(result.context_lengths) == ["1-1"]
    assert not any("trained on" in w for w in result.warnings)
