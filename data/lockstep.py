"""Passes that several ranks make together, as a tensor-parallel target needs: rank 0 says which.

The others follow, with the same rows, until it says that there are no more. A rank that fails ends
the job, so nobody waits for ever.
"""

from collections.abc import Callable, Iterator

import torch.distributed as dist


def announce(rows: list[int] | None) -> list[int] | None:
    """Return rank 0's rows of the next pass on every rank, or None for the end; collective."""
    said = [rows]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def announced(passes: Iterator[list[int]]) -> Iterator[list[int]]:
    """Yield the rows of passes, told to the other ranks just before; for rank 0."""
    for rows in passes:
        announce(rows)
        yield rows


def follow(make: Callable[[list[int]], object]) -> None:
    """Make the passes that rank 0 announces, until it announces the end; for the others."""
    while (rows := announce(None)) is not None:
        make(rows)
