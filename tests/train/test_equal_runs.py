"""One run, whatever its features come from: the target, a store, or either of them packed."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from models import make_head, seeded, target_of, tiny_model
from training import CHAT_VOCAB, random_rows

from headstart.data.capture import capture
from headstart.data.features import FeatureSource, OnlineFeatures, PackedFeatures
from headstart.data.rows import RowsMeta
from headstart.data.store import FeatureStore
from headstart.heads.base import FeatureBatch
from headstart.heads.target import Target
from headstart.train.backends import make_parallel
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.loop import Hooks, train_head
from headstart.train.tracking import JsonLines

ROWS = random_rows(150, longest=30)
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3}
"""Relative, of a step's loss: what is left are sums taken in another order."""
FAMILIES = {
    "medusa": {},
    "eagle": {"feature_noise": 0.0},
    "eagle3": {"aux": [1], "ttt_steps": 2},
    "hydra_heads": {},
}


@cache
def target(precision: str) -> Target:
    """Wrap a tiny target in the precision that a store of its features has."""
    model = tiny_model(layers=2, vocab=CHAT_VOCAB)
    return target_of(model.bfloat16() if precision == "bf16" else model)


class Padded:
    """Takes packs, and pads their rows: the same rows a step as when they are packed."""

    def __init__(self, source: FeatureSource) -> None:
        self.source, self.parts, self.lengths = source, source.parts, source.lengths

    def batch(self, packs: Sequence[Sequence[int]]) -> FeatureBatch:
        """Return the rows of all packs, one a row."""
        return self.source.batch([i for pack in packs for i in pack])


def losses(family: str, source: FeatureSource, precision: str, directory: Path) -> list[float]:
    """Train twenty steps on packs of 64 tokens and return the loss of each."""
    head = seeded(0, lambda: make_head(family, target("fp32"), **FAMILIES[family]))
    path = directory / "metrics.jsonl"
    path.unlink(missing_ok=True)
    config = TrainConfig(
        max_steps=20,
        batch_rows=2,
        accumulation=2,
        pack_tokens=64,
        log_every=1,
        precision=precision,
    )
    train_head(
        head.train(),
        source,
        config,
        parallel=make_parallel(ParallelConfig(), config, torch.device("cpu")),
        hooks=Hooks(lambda weights: {}, lambda weights, progress: None),
        tracker=JsonLines(path),
    )
    return [json.loads(line)["train/loss"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("precision", TOLERANCE)
@pytest.mark.parametrize("family", FAMILIES)
def test_online_stored_and_packed_runs_have_one_loss_curve(tmp_path, family, precision):
    taps = [1] if family == "eagle3" else []
    capture(target(precision), ROWS, tmp_path / "store", meta=RowsMeta("", "", {}), taps=taps)
    online = OnlineFeatures(target(precision), ROWS, taps)
    stored = FeatureStore(tmp_path / "store", taps)
    want = losses(family, Padded(online), precision, tmp_path)
    assert len(set(want)) == 20
    for source in (Padded(stored), PackedFeatures(online, 64), PackedFeatures(stored, 64)):
        have = losses(family, source, precision, tmp_path)
        assert have == pytest.approx(want, rel=TOLERANCE[precision])
