"""`headstart verify`: is a feature store whole, and is it what the target makes of its rows?

`headstart verify store=runs/rows-features recompute=8`; recompute=0 needs no target.
Shapes: T tokens, D width.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import MISSING
from torch import Tensor
from tqdm import tqdm

from headstart.data.codec import FP8, LAST, aux_name
from headstart.data.features import make_features
from headstart.data.shards import (
    PARTS,
    content_hash,
    parts_hash,
    read_index,
    read_parts,
    read_shard,
)
from headstart.data.store import FeatureStore
from headstart.data.template import TokenRow
from headstart.files import write_json
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.target import Target

log = logging.getLogger(__name__)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05, FP8: 0.1}
"""Relative error of a stored state: rows of a batch round otherwise than a row alone."""


@dataclass
class VerifyRun:
    """`headstart verify`: a feature store -> whether it can be trusted."""

    target: TargetConfig = MISSING
    store: str = MISSING
    """Directory of the feature store, as capture writes it."""
    recompute: int = 4
    """Rows that the target makes again, spread over the store; 0 reads the checksums only."""
    out: str = MISSING
    """Directory that receives verified.json."""

    def __post_init__(self) -> None:
        if self.recompute < 0:
            raise ValueError(f"recompute={self.recompute}: need 0 or more rows")


def run(config: VerifyRun) -> None:
    """Verify a store and write what was found (the command's entry)."""
    directory = Path(config.store)
    found = verify_files(directory)
    errors = {}
    if config.recompute:
        errors = verify_rows(directory, load_target(config.target), config.recompute)
    write_json(Path(config.out) / "verified.json", {"store": config.store, **found, **errors})


def verify_files(directory: Path) -> dict[str, int]:
    """Hash every shard and the parts, and return how many shards and rows there are.

    Raises ValueError naming the files that are gone or damaged, the first five of them.
    """
    index, faults, rows = read_index(directory), [], 0
    for shard in tqdm(index["shards"], unit="shard", desc="verify"):
        path, rows = directory / shard["file"], rows + len(shard["rows"])
        faults += _faults(
            path, shard["sha256"], lambda path=path: content_hash(read_shard(path)[0])
        )
    faults += _faults(
        directory / PARTS, index["parts_sha256"], lambda: parts_hash(read_parts(directory))
    )
    if faults:
        raise ValueError(
            f"{len(faults)} files of {directory} are damaged: {'; '.join(faults[:5])}; delete them "
            "and capture again"
        )
    count = len(index["shards"])
    log.info("%s: %d shards, %d rows: every checksum holds", directory, count, rows)
    return {"shards": count, "rows": rows}


def _faults(path: Path, want: str, made: Callable[[], str]) -> list[str]:
    """Return what is wrong with a file: that it cannot be read, or that its hash differs."""
    try:
        same = made() == want
    except (ValueError, FileNotFoundError) as error:
        return [str(error)]
    return [] if same else [f"{path}: content differs from its checksum in the index"]


def verify_rows(directory: Path, target: Target, count: int) -> dict[str, dict[str, float]]:
    """Make a few rows again and return the largest relative error of each stored state.

    Raises ValueError for a store of another target or type, naming the field, and for a state that
    the target does not make.
    """
    taps = read_index(directory)["key"]["aux_features"]
    store = FeatureStore(directory, taps)
    store.require(
        {
            "target_fingerprint": target.fingerprint,
            "dtype": str(target.dtype).removeprefix("torch."),
            "aux_features": taps,
        }
    )
    count = min(count, len(store.lengths))
    worst: dict[str, float] = {}
    for index in (i * len(store.lengths) // count for i in range(count)):
        for name, error in _errors(store, target, index).items():
            worst[name] = max(worst.get(name, 0.0), error)
            limit = TOLERANCES[store.codec.stored(name)]
            if not error <= limit:
                raise ValueError(
                    f"{directory}: row {store.row_ids[index]}: {name} differs from the target's by "
                    f"{error:.1e} relative (limit {limit}); capture again"
                )
    log.info("%d rows made again; largest relative errors: %s", count, worst)
    return {"relative_errors": worst}


def _errors(store: FeatureStore, target: Target, index: int) -> dict[str, float]:
    held = store.row(index)
    tokens, mask = held["tokens"].tolist(), held["loss_mask"].int().tolist()
    row = TokenRow(store.row_ids[index], "", tokens, mask, "")
    made = make_features(target, [row], [index], store.taps)
    want = {LAST: made.hidden_BTD[0]} | {aux_name(s): a[0] for s, a in made.aux.items()}
    return {name: _error(held[name], state_TD.cpu()) for name, state_TD in want.items()}


def _error(have: Tensor, want: Tensor) -> float:
    have, want = have.float(), want.float()
    return ((have - want).norm() / want.norm().clamp(min=1e-12)).item()
