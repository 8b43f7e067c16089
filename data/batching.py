"""Which rows go together in which order: shuffled every epoch, rows of like length side by side.

A step's rows do not depend on how they are dealt to ranks and micro-batches, nor on how a source
numbers them, so two ranks train as one does, and stored features as the target online.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from headstart.data.packing import pack_in_windows

WINDOW = 16  # steps whose rows are sorted by length together


@dataclass(frozen=True)
class Dealing:
    """How rows are dealt out: `batch_rows` a micro-batch, `accumulation` of these a rank and step.

    With pack_tokens a micro-batch holds that many packed rows instead, of pack_tokens tokens each.
    """

    batch_rows: int
    accumulation: int = 1
    seed: int = 0
    pack_tokens: int | None = None
    rank: int = 0
    """Of this process among the data-parallel ones."""
    ranks: int = 1


@dataclass(frozen=True)
class MicroBatch:
    """Rows of one pass, by index; lists of rows where these are packed.

    A filler is there so that every rank makes the same number of passes: its loss does not count.
    """

    rows: list[int] | list[list[int]]
    filler: bool = field(default=False, kw_only=True)


Step = list[list[int]] | list[list[list[int]]]
"""Micro-batches of one optimizer step, over all ranks; at most accumulation * ranks of them."""


def epoch_steps(lengths: Sequence[int], dealing: Dealing, epoch: int) -> list[Step]:
    """Return the steps of one epoch; every row is in exactly one micro-batch.

    The order depends on (seed, epoch) and the lengths alone. Rows are shuffled and, unless they are
    packed, sorted by length within windows of 16 steps: little padding, little bias, and ranks that
    wait little for each other. Steps are shuffled again.
    """
    random = np.random.default_rng([dealing.seed, epoch])
    sizes = np.asarray(lengths)
    # Shuffled from the order by length: sources number rows by id or by length.
    order = np.argsort(sizes, kind="stable")[random.permutation(len(sizes))]
    step_rows = dealing.batch_rows * dealing.accumulation * dealing.ranks
    if dealing.pack_tokens is None:
        windows = np.split(order, range(WINDOW * step_rows, len(order), WINDOW * step_rows))
        by_length = [window[np.argsort(sizes[window], kind="stable")] for window in windows]
        entries = np.concatenate(by_length).tolist()
    else:
        packs = pack_in_windows(order.tolist(), sizes[order].tolist(), dealing.pack_tokens)
        entries = [packs[i] for i in random.permutation(len(packs))]
    batches = [
        entries[start : start + dealing.batch_rows]
        for start in range(0, len(entries), dealing.batch_rows)
    ]
    width = dealing.accumulation * dealing.ranks
    steps = [batches[start : start + width] for start in range(0, len(batches), width)]
    return [steps[i] for i in random.permutation(len(steps))]


def steps_forever(
    lengths: Sequence[int], dealing: Dealing, epoch: int = 0, done: int = 0
) -> Iterator[tuple[int, list[MicroBatch]]]:
    """Yield (epoch, this rank's micro-batches of an optimizer step) without end.

    The first is the one after `done` steps of `epoch`: what went before is neither read nor dealt
    out. Every rank gets `accumulation` of them in every step; where an epoch's rows run out, fillers
    (the shortest row) make up the number.
    """
    shortest = min(range(len(lengths)), key=lambda row: lengths[row])
    filler = MicroBatch(
        [shortest] if dealing.pack_tokens is None else [[shortest]],
        filler=True,
    )
    for current in count(epoch):
        for step in epoch_steps(lengths, dealing, current)[done if current == epoch else 0 :]:
            mine = [MicroBatch(rows) for rows in step[dealing.rank :: dealing.ranks]]
            yield current, mine + [filler] * (dealing.accumulation - len(mine))
