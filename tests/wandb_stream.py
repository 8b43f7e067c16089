"""What W&B writes to disk, read back without W&B's help."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2 as pb

BLOCK, FULL, FIRST, LAST = 32768, 1, 2, 4


def records(path: Path) -> Iterator[pb.Record]:
    """Yield the records of one run-*.wandb file (LevelDB log framing, 7-byte file header)."""
    data = path.read_bytes()
    if data[:4] != b":W&B":
        raise ValueError(f"{path}: not a wandb record stream")
    position, parts = 7, b""
    while position + 7 <= len(data):
        room = BLOCK - position % BLOCK
        if room < 7:
            position += room
            continue
        _crc, length, kind = struct.unpack("<IHB", data[position : position + 7])
        body = data[position + 7 : position + 7 + length]
        position += 7 + length
        parts = body if kind in (FULL, FIRST) else parts + body
        if kind in (FULL, LAST):
            record = pb.Record()
            record.ParseFromString(parts)
            yield record


class Stream:
    """One run on disk: the run itself, its configuration, its figures and how it ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.metrics: dict[str, pb.MetricRecord] = {}
        self.exit_code: int | None = None
        for record in records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    self.run = record.run
                    self.config |= _values(record.run.config.update)
                case "config":
                    self.config |= _values(record.config.update)
                case "history":
                    self.history.append(_values(record.history.item))
                case "metric":
                    self.metrics[record.metric.name or record.metric.glob_name] = record.metric
                case "exit":
                    self.exit_code = record.exit.exit_code

    def column(self, name: str) -> list[Any]:
        """Return a figure over the calls that had it."""
        return [row[name] for row in self.history if name in row]


def _values(items: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def streams(out: Path) -> list[Stream]:
    """Return all runs under a directory, the earlier first.

    Ends W&B's own process before: it goes on writing for a moment after a run has finished.
    """
    wandb.teardown()
    paths = sorted(out.rglob("run-*.wandb"), key=lambda path: path.stat().st_ctime_ns)
    return [Stream(path) for path in paths]
