"""`headstart capture`: run the target once over rows, and store what it makes of them.

`headstart capture rows=runs/rows out=runs/features launch.num_processes=8` runs one process a
device. With `cache` the states come from files that speculators wrote.
Shapes: B rows, T tokens, D width, N tokens of a pass without its padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from omegaconf import MISSING
from torch import Tensor

from headstart.data.codec import KINDS, LAST, Codec, aux_name
from headstart.data.features import make_features
from headstart.data.import_cache import import_cache
from headstart.data.lockstep import announce, announced, follow
from headstart.data.rows import RowsMeta, read_rows
from headstart.data.store_job import Pass, StoreJob
from headstart.data.store_writer import write_store
from headstart.data.template import TokenRow
from headstart.heads.base import FeatureBatch
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.target import Target
from headstart.launch_config import LaunchConfig
from headstart.ranks import place

BATCH_TOKENS = 4096  # tokens of a capture pass, padding included


@dataclass
class CaptureRun:
    """`headstart capture`: rows -> feature store."""

    target: TargetConfig = MISSING
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    rows: str = MISSING
    """Directory of rows, as generate and prepare write it; with `cache` it receives them."""
    out: str = MISSING
    """Directory that receives the shards and index.json."""
    aux: list[int] = field(default_factory=list)
    """hidden_states[s] stored beside the last one: those of every head to be trained."""
    dtype: str = "target"
    """Type of the stored states: target (as it runs), fp32, bf16, fp16, or fp8 for those of aux."""
    cache: str | None = None
    """Directory of hidden states that speculators stored, to be imported; null runs the target."""

    def __post_init__(self) -> None:
        if self.dtype not in KINDS:
            raise ValueError(f"dtype={self.dtype}: expected one of {', '.join(KINDS)}")


def run(config: CaptureRun) -> None:
    """Load rows and target, and capture (the command's entry)."""
    options = {"taps": config.aux, "dtype": config.dtype}
    if config.cache is not None:
        target = load_target(config.target)
        import_cache(target, Path(config.cache), Path(config.rows), Path(config.out), **options)
        return
    rows, meta = read_rows(Path(config.rows))
    capture(load_target(config.target), rows, Path(config.out), meta=meta, **options)


def capture(
    target: Target,
    rows: Sequence[TokenRow],
    directory: Path,
    *,
    meta: RowsMeta,
    taps: Sequence[int] = (),
    dtype: str = "target",
) -> None:
    """Run the target over all rows and store its states; shards already there are kept.

    Under torchrun each process makes its share, a target that they run together counting as one,
    and all return when the store is complete. Raises
    ValueError when the disk cannot hold the features, when the directory holds others, and for
    token ids outside the target's vocabulary, taps outside its layers or states outside dtype.
    """
    taps = sorted(set(taps))
    rounded, together = Codec.of(dtype, target.dtype).stored(LAST), target.tensor_ranks > 1

    def features(some: list[int]) -> FeatureBatch:
        return make_features(target, [rows[i] for i in some], some, taps, rounded=rounded)

    def passes(shard: list[int]) -> Iterator[Pass]:
        cut = batches(shard, job.lengths)
        for some in announced(cut) if together else cut:
            yield some, columns(features(some), [job.lengths[i] for i in some])

    job = StoreJob.of(target, rows, meta, taps, dtype, passes)
    if together and place()[0] > 0:
        follow(features)
        return
    write_store(job, directory)
    if together:
        announce(None)


def batches(rows: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Cut rows of ascending length into passes of at most BATCH_TOKENS, or of one row."""
    some: list[int] = []
    for row in rows:  # the newest row sets the width
        if some and (len(some) + 1) * lengths[row] > BATCH_TOKENS:
            yield some
            some = []
        some.append(row)
    if some:
        yield some


def columns(batch: FeatureBatch, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Return what is stored of a batch, its rows end to end without padding."""
    T = batch.tokens_BT.shape[1]
    place_N = torch.cat([b * T + torch.arange(n) for b, n in enumerate(lengths)])
    place_N = place_N.to(batch.tokens_BT.device)  # not a mask: finding its places would wait

    def real(padded: Tensor) -> Tensor:
        return padded.flatten(0, 1).index_select(0, place_N)

    made = {
        "tokens": batch.tokens_BT,
        "loss_mask": batch.loss_mask_BT,
        LAST: batch.hidden_BTD,
        "logsumexp": batch.logsumexp_BT,
        "argmax": batch.argmax_BT,
    }
    made |= {aux_name(s): states_BTD for s, states_BTD in batch.aux.items()}
    return {name: real(padded) for name, padded in made.items()}
