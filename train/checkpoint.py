"""Training checkpoints on disk: all that a run needs to go on as if it had never stopped.

OUT/checkpoints/step-00000123 holds safetensors and JSON, of which nothing is unpickled:
weights.safetensors    the head's tensors by name, fp32
optimizer.safetensors  PARAMETER/STATE in fp32, whole, whatever the parallel kind
random.safetensors     RANK/GENERATOR: the states of every rank's random generators
ema.safetensors        averaged weights by name, where the run keeps them
state.json             how far the run is, of which the learning rate follows, its best figure, and
                       what the run is
manifest.json          size and SHA-256 of each of these
A directory of that name is whole: it is written beside, flushed to disk and renamed. What is read
is checked all the same: disks and copies are not as careful.
"""

import hashlib
import logging
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from headstart.files import atomic_directory, check_free_space, read_json, write_json
from headstart.train.progress import Progress

log = logging.getLogger(__name__)

MANIFEST, STATE = "manifest.json", "state.json"
FORMAT, FORMAT_VERSION = "headstart-training", 1
TENSORS = ("weights", "optimizer", "random")
PIECE = 1 << 24  # bytes hashed at once
UNFINISHED = ".step-*"
"""What a killed save leaves behind; see `atomic_directory`."""


@dataclass
class Snapshot:
    """A run at the end of a step; all tensors are whole and on the CPU.

    Where several ranks train, rank 0 has it and the others do not.
    """

    progress: Progress
    weights: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    """By parameter name and name of the state."""
    random: list[dict[str, Tensor]]
    """Of each rank; see randomness.py."""
    ema: dict[str, Tensor] = field(default_factory=dict)
    """Averaged weights by name; empty where the run keeps none."""
    identity: dict[str, Any] = field(default_factory=dict)
    """What the run is, as plain JSON; see resume.py."""


@dataclass
class State:
    """What state.json says, to be read without the tensors."""

    progress: Progress
    identity: dict[str, Any]


class Checkpoints:
    """The training checkpoints of one run. Only rank 0 uses it.

    The last `keep_last` whole ones and the best one are kept, others removed when a newer one is
    complete.
    """

    def __init__(self, directory: Path, keep_last: int) -> None:
        self.directory, self.keep_last = directory, keep_last
        self._passed_over: set[int] = set()
        self._known: set[int] = set()  # written or read by this process

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step is or would be."""
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints there, ascending, whole or not."""
        names = [path.name for path in self.directory.glob("step-*")]
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name))

    def newest(self) -> Path | None:
        """Return the newest checkpoint that looks whole; see `looks_whole`."""
        whole = [step for step in self.steps() if looks_whole(self.path(step))]
        return self.path(whole[-1]) if whole else None

    def read_newest(self) -> tuple[Path, Snapshot] | None:
        """Read the newest checkpoint that is whole.

        Each newer one is passed over with a warning that says why, and removed at the next save.
        """
        for step in reversed(self.steps()):
            try:
                snapshot = read_snapshot(self.path(step))
                self._known.add(step)
                return self.path(step), snapshot
            except (OSError, ValueError) as error:
                self._passed_over.add(step)
                warnings.warn(f"passed over a training checkpoint: {error}", stacklevel=2)
        return None

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint and, when it is complete, remove those that are not kept.

        A step is written once: to replace what is whole would be to lose it for a moment.
        """
        step, best = snapshot.progress.step, snapshot.progress.best
        path = self.path(step)
        if step not in self._known:
            write_snapshot(path, snapshot)
            log.info("step %d: training checkpoint %s", step, path)
        self._known.add(step)
        self._passed_over.discard(step)
        self._prune(None if best is None else best["step"])
        return path

    def _prune(self, best: int | None) -> None:
        steps = self.steps()
        whole = [s for s in steps if s not in self._passed_over and looks_whole(self.path(s))]
        keep = {*whole[-self.keep_last :], *[s for s in whole if s == best]}
        for step in set(steps) - keep:
            # Renamed first: what a kill leaves of it is no checkpoint any more.
            self.path(step).rename(self.directory / f".step-{step:08d}.removed")
        for path in self.directory.glob(UNFINISHED):
            shutil.rmtree(path, ignore_errors=True)


def write_snapshot(directory: Path, snapshot: Snapshot) -> None:
    """Write a checkpoint so that a kill or a power cut leaves all of it or nothing under its name.

    Raises ValueError for tensors that are not finite and for a disk without room.
    """
    tensors = {
        "weights": snapshot.weights,
        "optimizer": _flat(snapshot.optimizer),
        "random": _flat({str(rank): states for rank, states in enumerate(snapshot.random)}),
    }
    if snapshot.ema:
        tensors["ema"] = snapshot.ema
    for kind, named in tensors.items():
        _refuse_non_finite(f"{directory}: {kind}", named)
    size = sum(t.numel() * t.element_size() for named in tensors.values() for t in named.values())
    check_free_space(directory, size, "a training checkpoint")
    with atomic_directory(directory) as temporary:
        for kind, named in tensors.items():
            whole = {name: tensor.contiguous() for name, tensor in named.items()}
            save_file(whole, temporary / f"{kind}.safetensors")
        state = State(snapshot.progress, snapshot.identity)
        write_json(temporary / STATE, asdict(state))
        files = {path.name: _measured(path) for path in sorted(temporary.iterdir())}
        manifest = {"format": FORMAT, "format_version": FORMAT_VERSION, "files": files}
        write_json(temporary / MANIFEST, manifest)
        for path in (*temporary.iterdir(), temporary):
            _flush(path)
    _flush(directory.parent)


def read_snapshot(directory: Path) -> Snapshot:
    """Read a checkpoint.

    Raises FileNotFoundError, or a ValueError naming what is torn, foreign, misshapen or not finite.
    """
    check_whole(directory)
    state = read_state(directory)
    tensors = {kind: _read_tensors(directory / f"{kind}.safetensors") for kind in TENSORS}
    ema_path = directory / "ema.safetensors"
    ema = _read_tensors(ema_path) if ema_path.exists() else {}
    optimizer, ranks = _nested(tensors["optimizer"]), _nested(tensors["random"])
    snapshot = Snapshot(
        state.progress,
        tensors["weights"],
        optimizer,
        [ranks[str(rank)] for rank in range(len(ranks))],
        ema,
        state.identity,
    )
    _check_shapes(directory, snapshot)
    for kind, named in (*tensors.items(), ("ema", ema)):
        _refuse_non_finite(f"{directory}: {kind}", named)
    return snapshot


def read_state(directory: Path) -> State:
    """Read state.json alone; seconds matter where a finished run is started again."""
    path = directory / STATE
    values = read_json(path)
    if not isinstance(values, dict) or set(values) != {f.name for f in fields(State)}:
        raise ValueError(f"{path}: not what a run writes; restore the checkpoint from a copy")
    known = {f.name for f in fields(Progress)}
    if set(values["progress"]) != known:
        raise ValueError(
            f"{path}: progress has the fields {sorted(values['progress'])}, expected "
            f"{sorted(known)}; it was written by another version"
        )
    return State(Progress(**values["progress"]), values["identity"])


def looks_whole(directory: Path) -> bool:
    """Tell whether all files are there in full size and state.json is right; no tensor is read."""
    try:
        return _measured(directory / STATE) == _check_sizes(directory)[STATE]
    except (OSError, ValueError):
        return False


def check_whole(directory: Path) -> None:
    """Raise FileNotFoundError or a ValueError that names what is torn, changed or foreign."""
    for name, stored in _check_sizes(directory).items():
        if _measured(directory / name) != stored:
            raise ValueError(
                f"{directory}: {name} is not what was written (its SHA-256 differs); restore it "
                "from a copy"
            )


def _check_sizes(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest's files when all are there in full size and no other is."""
    manifest = read_json(directory / MANIFEST)
    kind = (manifest.get("format"), manifest.get("format_version"), "files" in manifest)
    if kind != (FORMAT, FORMAT_VERSION, True):
        raise ValueError(
            f"{directory}: format {kind[0]!r} version {kind[1]!r}, expected {FORMAT} version "
            f"{FORMAT_VERSION}; is this a training checkpoint of headstart?"
        )
    files = manifest["files"]
    needed = {STATE, *(f"{kind}.safetensors" for kind in TENSORS)}
    there = {path.name for path in directory.iterdir()} - {MANIFEST}
    if not needed <= set(files) <= needed | {"ema.safetensors"} or there != set(files):
        raise ValueError(
            f"{directory}: files {sorted(there)}, in the manifest {sorted(files)}; copy the whole "
            "directory"
        )
    for name, stored in files.items():
        size = (directory / name).stat().st_size
        if size != stored["bytes"]:
            raise ValueError(
                f"{directory}: {name} has {size} bytes of {stored['bytes']}; restore it from a copy"
            )
    return files


def _measured(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flat(nested: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{name}/{key}": t for name, named in nested.items() for key, t in named.items()}


def _nested(flat: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    nested: dict[str, dict[str, Tensor]] = {}
    for name, tensor in flat.items():
        outer, _, inner = name.rpartition("/")
        nested.setdefault(outer, {})[inner] = tensor
    return nested


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error})") from error


def _check_shapes(directory: Path, snapshot: Snapshot) -> None:
    """Refuse averages and moments that are not of these weights."""
    shapes = {name: tensor.shape for name, tensor in snapshot.weights.items()}
    of_states = {
        f"optimizer {name}/{key}": (name, tensor)
        for name, states in snapshot.optimizer.items()
        for key, tensor in states.items()
        if tensor.numel() > 1  # a count of steps has no shape
    }
    of_ema = {f"ema {name}": (name, tensor) for name, tensor in snapshot.ema.items()}
    for what, (name, tensor) in (of_states | of_ema).items():
        if tensor.shape != shapes.get(name):
            raise ValueError(
                f"{directory}: {what} has shape {tuple(tensor.shape)}, the weight "
                f"{tuple(shapes[name]) if name in shapes else 'is missing'}"
            )


def _refuse_non_finite(where: str, tensors: Mapping[str, Tensor]) -> None:
    bad = [n for n, t in tensors.items() if t.is_floating_point() and not t.isfinite().all()]
    if bad:
        more = "" if len(bad) <= 4 else f" and {len(bad) - 4} more"
        raise ValueError(f"{where}: not finite: {', '.join(sorted(bad)[:4])}{more}")
