"""Training from a store is training online: the same losses, step by step."""

import json
from pathlib import Path

import pytest
import torch
from models import target_of, tiny_model
from training import CHAT_VOCAB, chat_target, random_rows

from headstart.data.capture import capture
from headstart.data.rows import RowsMeta, RowsWriter, read_rows
from headstart.data.template import ChatTemplate
from headstart.eval.settings import TreeConfig
from headstart.heads.base import families
from headstart.heads.load import TargetConfig
from headstart.heads.target import Target
from headstart.train.config import TrainConfig
from headstart.train.run import TrainRun, train

STEPS = 20
FAMILIES = {"medusa": {}, "eagle": {"feature_noise": 0.0}, "eagle3": {"aux": [1, 3]}}


def deep_target(dtype: torch.dtype) -> Target:
    model = tiny_model(layers=4, vocab=CHAT_VOCAB, max_position_embeddings=2048)
    return target_of(model.to(dtype), chat_target().tokenizer)


def losses(root: Path, target: Target, family: str, *, features: str) -> list[float]:
    """Train on 40 rows, four epochs in 20 steps, and return the loss of each step."""
    rows, out = root / "rows", root / features
    precision = "fp32" if target.dtype == torch.float32 else "bf16"
    settings = {"eval_prompts": 0, "log_every": 1, "precision": precision}
    config = TrainRun(
        target=TargetConfig(path="in memory"),
        # The whole vocabulary: over a smaller one a position whose best token cannot be drafted is
        # dropped, and in bf16 best tokens tie, and part in another way in another batch.
        head=families()[family][0](**FAMILIES[family]),
        train=TrainConfig(
            max_steps=STEPS,
            batch_rows=8,
            features="online" if features == "online" else "captured",
            **settings,
        ),
        tree=TreeConfig(name="chain2", depth=2),
        rows=str(rows),
        features=None if features == "online" else str(root / features / "store"),
        out=str(out / "run"),
    )
    if features != "online":
        stored, meta = read_rows(rows)
        taps = FAMILIES[family].get("aux", [])
        capture(target, stored, out / "store", meta=meta, taps=taps, dtype=features)
    train(target, config)
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines]


@pytest.fixture
def root(tmp_path) -> Path:
    """A directory with 40 rows in it, whose order of ids is not that of their lengths."""
    template = ChatTemplate(chat_target().tokenizer).hash
    writer = RowsWriter(tmp_path / "rows", RowsMeta("", template, {"data.max_length": 64}))
    for row in random_rows(40, seed=9, longest=64):
        writer.add(row)
    writer.finish("made for a test", {})
    return tmp_path


def worst(have: list[float], want: list[float]) -> float:
    assert len(have) == len(want) == STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(have, want, strict=True))


@pytest.mark.filterwarnings("ignore:.*rows made for target")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_store_of_fp32_trains_as_the_target_online_does(root, family):
    target = deep_target(torch.float32)
    online = losses(root, target, family, features="online")
    assert worst(losses(root, target, family, features="target"), online) < 1e-6
    assert len(set(online)) == STEPS


@pytest.mark.filterwarnings("ignore:.*rows made for target")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_store_of_bf16_trains_as_a_bf16_target_online_does(root, family):
    target = deep_target(torch.bfloat16)
    online = losses(root, target, family, features="online")
    assert worst(losses(root, target, family, features="bf16"), online) < 1e-3
