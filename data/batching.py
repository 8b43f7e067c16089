"""Which rows go together in which order: shuffled every epoch, rows of like length side by side.

A step's rows do not depend on how they are dealt to ranks and micro-batches, nor on how a source
numbers them, so two ranks train as one does, and stored features as the target online. Within a
step, rows are cut into micro-batches of about as many tokens, so that no rank waits for another.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from headstart.data.packing import pack_in_windows

WINDOW = 16  # steps whose rows are sorted by length together


@dataclass(frozen=True)
class Dealing:
    """How rows are dealt out: `batch_rows` a micro-batch, `accumulation` of these a rank and step.

    batch_rows is a mean: a micro-batch of long rows has fewer, one of short rows more. With
    pack_tokens a micro-batch holds packed rows instead, of pack_tokens tokens each.
    """

    batch_rows: int
    accumulation: int = 1
    seed: int = 0
    pack_tokens: int | None = None
    rank: int = 0
    """Of this process among the data-parallel ones."""
    ranks: int = 1

    @property
    def width(self) -> int:
        """Micro-batches of a step, over all ranks."""
        return self.accumulation * self.ranks


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
    packed, sorted by length within windows of 16 steps: little padding, little bias. Steps are
    shuffled again; the micro-batches of a step come with the most tokens first.
    """
    random = np.random.default_rng([dealing.seed, epoch])
    sizes = np.asarray(lengths)
    # Shuffled from the order by length: sources number rows by id or by length.
    order = np.argsort(sizes, kind="stable")[random.permutation(len(sizes))]
    step_rows = dealing.batch_rows * dealing.width
    if dealing.pack_tokens is None:
        windows = np.split(order, range(WINDOW * step_rows, len(order), WINDOW * step_rows))
        by_length = [window[np.argsort(sizes[window], kind="stable")] for window in windows]
        entries = np.concatenate(by_length).tolist()
    else:
        packs = pack_in_windows(order.tolist(), sizes[order].tolist(), dealing.pack_tokens)
        entries = [packs[i] for i in random.permutation(len(packs))]
    steps = []
    for start in range(0, len(entries), step_rows):
        step = entries[start : start + step_rows]
        widths = [dealing.pack_tokens or lengths[row] for row in step]
        steps.append([step[run] for run in even_runs(widths, dealing.width)])
    return [steps[i] for i in random.permutation(len(steps))]


def even_runs(widths: Sequence[int], most: int) -> list[slice]:
    """Cut rows of ascending width into at most `most` runs, the widest rows' first.

    A run of n rows takes n times its widest row, as padding makes it. The largest run is as small
    as any grouping of these rows can have it.
    """
    if most == 1:
        return [slice(0, len(widths))]
    low, high = widths[-1], widths[-1] * -(-len(widths) // most)
    limits = range(low, high + 1)
    least = bisect_left(limits, True, key=lambda limit: len(_runs(widths, limit)) <= most)
    return _runs(widths, limits[least])


def _runs(widths: Sequence[int], limit: int) -> list[slice]:
    """Cut off the widest rows again and again, as many as fit the limit."""
    stop, runs = len(widths), []
    while stop > 0:
        start = max(0, stop - limit // widths[stop - 1])
        runs.append(slice(start, stop))
        stop = start
    return runs


def deal(step: Step, lengths: Sequence[int], dealing: Dealing) -> list[Step]:
    """Return each rank's micro-batches of a step: the next goes to who has the fewest tokens.

    No rank gets more than `accumulation`; equal choices go to the lower rank.
    """
    hands: list[Step] = [[] for _ in range(dealing.ranks)]
    tokens = [0] * dealing.ranks
    for batch in step:
        open_ranks = [r for r, hand in enumerate(hands) if len(hand) < dealing.accumulation]
        rank = min(open_ranks, key=lambda r: tokens[r])
        hands[rank].append(batch)
        tokens[rank] += _pass_tokens(batch, lengths, dealing)
    return hands


def _pass_tokens(batch: list, lengths: Sequence[int], dealing: Dealing) -> int:
    """Return the tokens of one pass over a micro-batch, padding included."""
    return len(batch) * (dealing.pack_tokens or max(lengths[row] for row in batch))


def steps_forever(
    lengths: Sequence[int], dealing: Dealing, epoch: int = 0, done: int = 0
) -> Iterator[tuple[int, list[MicroBatch]]]:
    """Yield (epoch, this rank's micro-batches of an optimizer step) without end.

    The first is the one after `done` steps of `epoch`: what went before is neither read nor dealt
    out. Every rank gets `accumulation` of them in every step; where an epoch's rows run out,
    fillers (the shortest row) make up the number.
    """
    shortest = min(range(len(lengths)), key=lambda row: lengths[row])
    filler = MicroBatch(
        [shortest] if dealing.pack_tokens is None else [[shortest]],
        filler=True,
    )
    for current in count(epoch):
        for step in epoch_steps(lengths, dealing, current)[done if current == epoch else 0 :]:
            hand = deal(step, lengths, dealing)[dealing.rank]
            mine = [MicroBatch(rows) for rows in hand]
            yield current, mine + [filler] * (dealing.accumulation - len(mine))
