"""Which rows go together in which order: shuffled every epoch, rows of like length side by side."""

from collections.abc import Iterator, Sequence

import numpy as np

WINDOW = 16  # batches whose rows are sorted by length together


def epoch_batches(
    lengths: Sequence[int], batch_rows: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """Return the batches of one epoch; every row is in exactly one.

    The order depends on (seed, epoch) alone. Rows are shuffled, sorted by length within windows of
    16 batches, cut into batches, and the batches shuffled again: little padding, little bias.
    """
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))
    batches = []
    for start in range(0, len(order), WINDOW * batch_rows):
        window = sorted(order[start : start + WINDOW * batch_rows], key=lambda row: lengths[row])
        batches += [window[i : i + batch_rows] for i in range(0, len(window), batch_rows)]
    return [[int(row) for row in batches[i]] for i in random.permutation(len(batches))]


def batches_forever(
    lengths: Sequence[int], batch_rows: int, *, seed: int
) -> Iterator[tuple[int, bool, list[int]]]:
    """Yield (epoch, whether it is the epoch's last batch, row indices) without end."""
    epoch = 0
    while True:
        batches = epoch_batches(lengths, batch_rows, seed=seed, epoch=epoch)
        for number, batch in enumerate(batches):
            yield epoch, number == len(batches) - 1, batch
        epoch += 1
