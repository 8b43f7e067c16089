"""What is told of a step that is not finite: its number, the ranks and the rows."""

import math
from collections.abc import Sequence
from typing import NoReturn

from headstart.heads.base import FeatureBatch
from headstart.train.parallel import Parallel


def refuse_non_finite(
    step: int,
    loss: float,
    norm: float,
    own_loss: float,
    batches: Sequence[FeatureBatch],
    parallel: Parallel,
) -> NoReturn:
    """Raise ValueError for a step whose loss or gradient norm is not finite; collective.

    `own_loss` is this rank's share. Where a loss is to blame, its ranks and their rows are named;
    a gradient belongs to all of them. Every rank has the same loss and norm, so all come here.
    """
    rows = [int(row) for batch in batches for row in batch.row_ids_B]
    by_rank = parallel.gather((math.isfinite(own_loss), rows))
    # Finite shares may add up to infinity: then all are to blame.
    blamed = [rank for rank, (finite, _) in enumerate(by_rank) if not finite]
    blamed = blamed or list(range(len(by_rank)))
    where = [
        f"rows {by_rank[rank][1]}" if len(by_rank) == 1 else f"rank {rank}: rows {by_rank[rank][1]}"
        for rank in blamed
    ]
    raise ValueError(
        f"step {step}: loss {loss}, gradient norm {norm} ({'; '.join(where)}); lower train.lr"
    )
