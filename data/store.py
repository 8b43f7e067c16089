"""Features captured once: memory-mapped safetensors shards, for rows that are seen more than once.

`headstart capture rows=runs/rows out=runs/features`. A shard holds the rows' tokens end to end with
the target's states; index.json, written last, says what made them and where each row lies.
Tapped states hidden_states[s] lie beside the last state, under their s.
Shapes: B rows, T tokens, D width.
"""

import hashlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from headstart import __version__
from headstart.data.features import make_features
from headstart.data.rows import check_rows, read_rows, rows_hash
from headstart.data.template import TokenRow
from headstart.files import atomic_path, check_free_space, read_json, write_json
from headstart.heads.base import FeatureBatch
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.parts import TargetParts
from headstart.heads.target import AUX_CONVENTION, Target

log = logging.getLogger(__name__)
SHARD_ROWS = 256
STORED = ("tokens", "loss_mask", "hidden", "logsumexp", "argmax")
BATCH_TOKENS = 4096  # tokens of a capture pass, padding included


@dataclass
class CaptureRun:
    """`headstart capture`: rows -> feature store."""

    target: TargetConfig = MISSING
    rows: str = MISSING
    """Directory of rows, as generate and prepare write it."""
    out: str = MISSING
    """Directory that receives the shards and index.json."""
    aux: list[int] = field(default_factory=list)
    """hidden_states[s] stored beside the last one: those of every head to be trained."""


def run(config: CaptureRun) -> None:
    """Load rows and target, and capture (the command's entry)."""
    rows, meta = read_rows(Path(config.rows))
    target = load_target(config.target)
    capture(target, rows, Path(config.out), template_hash=meta.template_hash, taps=config.aux)


def capture_key(
    target: Target, rows: Sequence[TokenRow], template_hash: str, taps: Sequence[int] = ()
) -> dict[str, Any]:
    """Return everything that changes the features."""
    return {
        "target_fingerprint": target.fingerprint,
        "template_hash": template_hash,
        "rows_hash": rows_hash(rows),
        "dtype": str(target.dtype).removeprefix("torch."),
        "aux_convention": AUX_CONVENTION,
        "aux_features": sorted(set(taps)),
    }


def capture(
    target: Target,
    rows: Sequence[TokenRow],
    directory: Path,
    *,
    template_hash: str = "",
    taps: Sequence[int] = (),
) -> None:
    """Run the target over all rows and store its states; shards already there are kept.

    Rows are stored by length, so that a pass wastes little on padding. Raises ValueError when the
    disk cannot hold the features, and for token ids outside the target's vocabulary or taps outside
    its layers.
    """
    check_rows(rows, target.shape.vocab_size)
    key = capture_key(target, rows, template_hash, taps)
    taps = key["aux_features"]
    target.check_taps(taps)
    ordered = sorted(rows, key=lambda row: (len(row.token_ids), row.row_id))
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
    parts = [ordered[i : i + SHARD_ROWS] for i in range(0, len(ordered), SHARD_ROWS)]
    shards = {directory / f"{name}-{n:05d}.safetensors": part for n, part in enumerate(parts)}
    missing = {path: part for path, part in shards.items() if not path.exists()}
    tokens = sum(_tokens(part) for part in missing.values())
    size = tokens * bytes_per_token(target, taps)
    log.info("capture: %d rows, %d tokens, %.2f GB in %s", len(rows), tokens, size / 1e9, directory)
    check_free_space(directory, size, f"capture ({tokens} tokens)")
    directory.mkdir(parents=True, exist_ok=True)
    bar = tqdm(total=tokens, unit="token", unit_scale=True, desc="capture")
    started = time.perf_counter()
    for path, part in missing.items():
        _write_shard(path, target, part, taps, bar)
    bar.close()
    target.parts.save(directory / "parts.safetensors")
    write_json(
        directory / "index.json",
        {
            "headstart_version": __version__,
            "key": key,
            "target_name": target.name,
            "tokens": _tokens(rows),
            "shards": [
                {"file": path.name, "lengths": [len(row.token_ids) for row in part]}
                for path, part in shards.items()
            ],
            "seconds": round(time.perf_counter() - started, 1),
        },
    )


def bytes_per_token(target: Target, taps: Sequence[int]) -> int:
    """Return what a store holds for one token: its last and tapped states, and 21 bytes."""
    states = 1 + len(taps)
    return states * target.shape.hidden_size * target.dtype.itemsize + 21


def _tokens(rows: Sequence[TokenRow]) -> int:
    return sum(len(row.token_ids) for row in rows)


def _write_shard(
    path: Path, target: Target, rows: Sequence[TokenRow], taps: Sequence[int], bar: tqdm
) -> None:
    """Capture one shard; batches are runs of rows of like length."""
    pieces: dict[str, list[Tensor]] = {}
    for batch in _batches(rows):
        made = make_features(target, batch, range(len(batch)), taps)
        for row, length in enumerate(len(r.token_ids) for r in batch):
            for name, tensor in _stored(made).items():
                pieces.setdefault(name, []).append(tensor[row, :length].cpu())
        bar.update(_tokens(batch))
    tensors = {name: torch.cat(parts).contiguous() for name, parts in pieces.items()}
    if not all(t.isfinite().all() for name, t in tensors.items() if _is_state(name)):
        raise ValueError(f"{path.name}: the target's states are not finite; use another dtype")
    with atomic_path(path) as temporary:
        save_file(tensors, temporary)


def _batches(rows: Sequence[TokenRow]) -> list[list[TokenRow]]:
    batches: list[list[TokenRow]] = [[]]
    for row in rows:  # ascending length: the newest row sets the batch's width
        if batches[-1] and (len(batches[-1]) + 1) * len(row.token_ids) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(row)
    return batches


def _stored(batch: FeatureBatch) -> dict[str, Tensor]:
    columns = (
        batch.tokens_BT,
        batch.loss_mask_BT,
        batch.hidden_BTD,
        batch.logsumexp_BT,
        batch.argmax_BT,
    )
    tapped = {_aux_name(s): states_BTD for s, states_BTD in batch.aux.items()}
    return dict(zip(STORED, columns, strict=True)) | tapped


def _aux_name(s: int) -> str:
    return f"hidden_{s}"


def _is_state(name: str) -> bool:
    return name.startswith("hidden")


class FeatureStore:
    """A captured store, read through memory maps; it needs no target.

    Batches hold the tapped states `taps`, of those that were stored. Raises FileNotFoundError for a
    store that was never finished, ValueError for a damaged shard or a tap that is not stored.
    """

    def __init__(self, directory: Path, taps: Sequence[int] = ()) -> None:
        directory = Path(directory)
        index = read_json(directory / "index.json")
        self.key, self.target_name, self.taps = index["key"], index["target_name"], tuple(taps)
        self._require_taps(self.taps)
        self.parts = TargetParts.load(directory / "parts.safetensors")
        self.lengths: list[int] = []
        self._where: list[tuple[int, int]] = []
        self._files = [shard["file"] for shard in index["shards"]]
        self._shards: list[dict[str, Tensor]] = []
        for number, shard in enumerate(index["shards"]):
            tensors = _load_shard(directory / shard["file"])
            offset = 0
            for length in shard["lengths"]:
                self._where.append((number, offset))
                offset += length
            if offset != len(tensors["tokens"]):
                raise ValueError(
                    f"{directory / shard['file']}: {len(tensors['tokens'])} tokens, the index says "
                    f"{offset}; delete the store and capture again"
                )
            self.lengths += shard["lengths"]
            self._shards.append(tensors)

    def require(self, key: dict[str, Any]) -> None:
        """Raise ValueError naming the first field in which the store was made otherwise.

        More tapped states than a run needs may be stored, fewer may not.
        """
        self._require_taps(key["aux_features"])
        for name, value in key.items():
            if name != "aux_features" and self.key.get(name) != value:
                raise ValueError(
                    f"feature store: made with {name}={self.key.get(name)}, this run has "
                    f"{name}={value}; capture again"
                )

    def _require_taps(self, taps: Sequence[int]) -> None:
        stored = self.key["aux_features"]
        if not set(taps) <= set(stored):
            raise ValueError(
                f"feature store: made with aux_features={stored}, this run has "
                f"aux_features={list(taps)}; capture again, with aux={sorted({*stored, *taps})} "
                "into another directory"
            )

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return these rows with their stored features, right-padded to the longest."""
        columns: dict[str, list[Tensor]] = {}
        wanted = [*STORED, *(_aux_name(s) for s in self.taps)]
        for index in indices:
            number, offset = self._where[index]
            for name in wanted:
                part = self._shards[number][name][offset : offset + self.lengths[index]]
                columns.setdefault(name, []).append(part)
            if not all(columns[name][-1].isfinite().all() for name in wanted if _is_state(name)):
                raise ValueError(
                    f"{self._files[number]}: the states of row {index} are not finite; "
                    "delete the shard and capture again"
                )
        padding = {"argmax": -1}
        padded = {
            name: pad_sequence(parts, batch_first=True, padding_value=padding.get(name, 0))
            for name, parts in columns.items()
        }
        positions_T = torch.arange(padded["tokens"].shape[1])
        lengths_B = torch.tensor([self.lengths[i] for i in indices])
        return FeatureBatch(
            padded["tokens"],
            padded["loss_mask"],
            positions_T.expand_as(padded["tokens"]),
            torch.where(positions_T < lengths_B[:, None], 0, -1),
            torch.tensor(list(indices)),
            padded["hidden"],
            padded["logsumexp"],
            padded["argmax"],
            {s: padded[_aux_name(s)] for s in self.taps},
        )


def _load_shard(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such shard; capture again")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path}: damaged ({error}); delete it and capture again") from error
