"""Measure how fast a feature store is read, beside how fast training consumes it.

    python -m headstart.data.read_bench runs/rows-features --metrics runs/eagle/metrics.jsonl

An epoch of shuffled batches is read with its pages dropped from the page cache before (`cold`, as
far as the system drops them) and again at once (`warm`); nothing else runs meanwhile.
"""

import argparse
import json
import os
import time
from itertools import chain
from pathlib import Path

from headstart.data.batching import Dealing, epoch_steps
from headstart.data.shards import shards_of
from headstart.data.store import FeatureStore


def main() -> None:
    """Read the store twice and print tokens and bytes a second, and the ratio to training."""
    options = _options()
    directory = Path(options.store)
    consumed = _training_rate(Path(options.metrics)) if options.metrics else None
    if consumed:
        print(f"training consumed {consumed:.0f} tokens/s")
    for state in ("cold", "warm"):
        if state == "cold":
            _drop_pages(directory)
        tokens, size, seconds = read_epoch(directory, options.batch_rows, options.max_seconds)
        ratio = f", {tokens / seconds / consumed:.1f} times training" if consumed else ""
        rate = f"{tokens / seconds:.0f} tokens/s, {size / seconds / 1e6:.0f} MB/s"
        print(f"{state}: {tokens} tokens in {seconds:.2f} s: {rate}{ratio}")


def read_epoch(directory: Path, batch_rows: int, max_seconds: float) -> tuple[int, int, float]:
    """Return tokens and bytes read in the batches of an epoch, or of max_seconds of it."""
    store = FeatureStore(directory)
    store = FeatureStore(directory, store.key["aux_features"])
    tokens, size, start = 0, 0, time.perf_counter()
    for rows in chain.from_iterable(epoch_steps(store.lengths, Dealing(batch_rows), epoch=0)):
        batch = store.batch(rows)
        tokens += sum(store.lengths[row] for row in rows)
        for states_BTD in (batch.hidden_BTD, *batch.aux.values()):
            size += states_BTD.nbytes
        if time.perf_counter() - start > max_seconds:
            break
    return tokens, size, time.perf_counter() - start


def _drop_pages(directory: Path) -> None:
    for path, _ in shards_of(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not on disk yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _training_rate(metrics: Path) -> float:
    """Return the last train/tokens_per_s that a run logged."""
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    rates = [line["train/tokens_per_s"] for line in lines if "train/tokens_per_s" in line]
    if not rates:
        raise ValueError(f"{metrics}: no train/tokens_per_s; lower train.log_every")
    return rates[-1]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("store", help="a directory that capture wrote")
    parser.add_argument("--metrics", help="metrics.jsonl of a training run")
    parser.add_argument("--batch-rows", type=int, default=4, help="as train.batch_rows")
    parser.add_argument("--max-seconds", type=float, default=60.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
