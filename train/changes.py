"""What makes a run that run: how the options and data of two starts are told apart.

Whatever is not known to say only how a run runs, or what it measures, would make it another one.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FREE = (
    "device",
    "features",
    "head.loss_chunk",
    "heldout_rows",
    "launch",
    "logging",
    "out",
    "parallel",
    "rows",
    "target.attention",
    "target.device",
    "target.device_map",
    "target.pack",
    "target.parallel",
    "target.path",
    "target.revision",
    "train.activation_checkpointing",
    "train.keep_last",
    "train.log_every",
    "train.peak_tflops",
    "train.resume",
    "train.save_every",
    "train.workers",
    "versions",
)
"""Say how and where a run runs. Paths are among them: hashes name what lies there."""
EVALUATION = (
    "heldout_hash",
    "train.best_metric",
    "train.eval_every",
    "train.eval_new_tokens",
    "train.eval_prompts",
    "train.eval_rows",
    "tree",
)
"""Change what is measured along the way, not what is trained."""
BUDGET = ("train.max_steps", "train.max_seconds")
BATCH = ("train.batch_rows", "train.accumulation", "processes")


@dataclass(frozen=True)
class Change:
    """An option or a key of the data that is not what it was."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} was {self.old} and is {self.new}"

    def among(self, names: tuple[str, ...]) -> bool:
        """Tell whether it is one of these options, or belongs to one of these groups."""
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """List what differs between two identities, by option name.

    Options that only one of the two knows are those of another version, which is told by itself.
    """
    before, after = dict(_options(old)), dict(_options(new))
    names = sorted(before.keys() & after.keys())
    return [Change(n, before[n], after[n]) for n in names if before[n] != after[n]]


def refuse_another_run(path: Path, old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Raise ValueError naming each change that would make it another run; return the others."""
    found = changes(old, new)
    refused = [c for c in found if not _allowed(c)]
    before, after = _rows_a_step(old), _rows_a_step(new)
    if before != after:
        refused += [c for c in found if c.among(BATCH)]
    if refused:
        cure = "set back what changed, or start a new run in another out"
        if before != after:
            cure = f"{_batch_cure(before, new)}; else {cure}"
        raise ValueError(
            f"train.resume: {path} was made by another run: {', '.join(map(str, refused))}; {cure}"
        )
    return found


def _options(identity: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of all plain values; options go without `config` before them."""
    for name, value in identity.items():
        if isinstance(value, dict):
            prefix = "" if name == "config" else f"{name}."
            yield from ((f"{prefix}{inner}", v) for inner, v in _options(value))
        else:
            yield name, value


def _allowed(change: Change) -> bool:
    if change.name in BUDGET:  # None is no bound
        return change.new is None or (change.old is not None and change.new >= change.old)
    return change.among(FREE + EVALUATION + BATCH)


def _rows_a_step(identity: dict[str, Any]) -> int:
    train = identity["config"]["train"]
    return train["batch_rows"] * train["accumulation"] * identity["processes"]


def _batch_cure(rows: int, identity: dict[str, Any]) -> str:
    """Say how the rows of a step become what they were with these processes."""
    batch, ranks = identity["config"]["train"]["batch_rows"], identity["processes"]
    told = f"a step had {rows} rows and has {_rows_a_step(identity)}"
    if rows % (batch * ranks) == 0:
        return f"{told}, use train.accumulation={rows // (batch * ranks)}"
    if rows % ranks == 0:
        return f"{told}, use train.batch_rows={rows // ranks} train.accumulation=1"
    return f"{told}, use a number of processes that divides {rows}"
