"""How the rows of a step are dealt to ranks: about as many tokens each, whatever their number."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, product

import pytest

from headstart.data.batching import Dealing, deal, epoch_steps, even_runs, steps_forever

Hands = list[list[list[int]]]
"""Micro-batches of a step, rank by rank."""


def skewed(count: int, seed: int = 0) -> list[int]:
    """Return lengths as answers have them: most short, a few twenty times as long."""
    draw = random.Random(seed)
    return [min(2048, 16 + int(draw.lognormvariate(5, 1))) for _ in range(count)]


def by_turns(step: list[list[int]], dealing: Dealing) -> Hands:
    """Deal without a look at tokens: micro-batches of equal rows, one rank after the other."""
    rows = [row for batch in reversed(step) for row in batch]
    starts = range(0, len(rows), dealing.batch_rows)
    batches = [rows[start : start + dealing.batch_rows] for start in starts]
    return [batches[rank :: dealing.ranks] for rank in range(dealing.ranks)]


def waiting(
    lengths: list[int], dealing: Dealing, deal_out: Callable[[list[list[int]]], Hands]
) -> float:
    """Return the busiest rank's padded tokens over the mean rank's, averaged over an epoch."""
    found = []
    for step in epoch_steps(lengths, dealing, 0):
        tokens = [
            sum(len(batch) * max(lengths[i] for i in batch) for batch in hand)
            for hand in deal_out(step)
        ]
        found.append(max(tokens) * len(tokens) / sum(tokens))
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("ranks", "accumulation", "batch_rows", "before", "after"),
    [(2, 1, 8, 1.07, 1.045), (8, 1, 8, 1.15, 1.06), (8, 4, 4, 1.035, 1.018), (64, 1, 4, 1.2, 1.11)],
)
def test_ranks_wait_half_as_long_for_each_other_where_lengths_are_skewed(
    ranks, accumulation, batch_rows, before, after
):
    lengths = skewed(4000)
    dealing = Dealing(batch_rows, accumulation, ranks=ranks)
    assert waiting(lengths, dealing, lambda step: by_turns(step, dealing)) > before
    assert waiting(lengths, dealing, lambda step: deal(step, lengths, dealing)) < after


@pytest.mark.parametrize("seed", range(20))
def test_no_other_grouping_of_a_few_rows_has_a_smaller_largest_pass(seed):
    draw = random.Random(seed)
    widths = sorted(draw.randint(1, 30) for _ in range(draw.randint(1, 7)))

    def largest(groups: list[list[int]]) -> int:
        return max(len(group) * max(group) for group in groups if group)

    for most in (1, 2, 3):
        runs = even_runs(widths, most)
        assert [w for run in reversed(runs) for w in widths[run]] == widths
        every = (
            [[w for w, k in zip(widths, places, strict=True) if k == g] for g in range(most)]
            for places in product(range(most), repeat=len(widths))
        )
        assert len(runs) <= most
        assert largest([widths[run] for run in runs]) == min(map(largest, every))


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 2), (4, 1)])
@pytest.mark.parametrize("pack_tokens", [None, 2048])
def test_p30_a_step_has_the_same_micro_batches_however_many_ranks_take_them(
    ranks, accumulation, pack_tokens
):
    lengths = skewed(300)
    alone = Dealing(2, 4, pack_tokens=pack_tokens)
    shared = Dealing(2, accumulation, pack_tokens=pack_tokens, ranks=ranks)
    for step in epoch_steps(lengths, alone, 0):
        (mine,) = deal(step, lengths, alone)
        hands = deal(step, lengths, shared)
        assert sorted(batch for hand in hands for batch in hand) == sorted(mine)
    assert epoch_steps(lengths, alone, 0) == epoch_steps(lengths, shared, 0)


def windows(lengths: list[int], dealing: Dealing, rank: int, steps: int) -> list[list]:
    mine = replace(dealing, rank=rank)
    return [window for _, window in islice(steps_forever(lengths, mine), steps)]


def test_p30_nine_rows_in_batches_of_one_are_five_steps_on_both_ranks():
    dealing = Dealing(1, ranks=2)
    assert len(epoch_steps([7] * 9, dealing, 0)) == 5
    both = [windows([7] * 9, dealing, rank, 5) for rank in (0, 1)]
    assert all(len(window) == 1 for rank in both for window in rank)
    counted = [m.rows[0] for rank in both for (m,) in rank if not m.filler]
    assert sorted(counted) == list(range(9))


def test_p30_a_row_of_8_and_one_of_2000_tokens_go_to_a_rank_each():
    both = [windows([8, 2000], Dealing(1, ranks=2), rank, 1) for rank in (0, 1)]
    assert [[m.rows for m in window] for (window,) in both] == [[[1]], [[0]]]


def test_a_long_row_lies_alone_where_short_ones_share_a_pass():
    step = epoch_steps([10, 10, 10, 10, 10, 10, 10, 80], Dealing(4, ranks=2), 0)[0]
    assert [len(batch) for batch in step] == [1, 7]


def test_rows_left_at_an_epochs_end_are_spread_over_the_ranks():
    dealing = Dealing(4, ranks=2)
    assert sorted(sorted(map(len, s)) for s in epoch_steps([5] * 14, dealing, 0)) == [
        [3, 3],
        [4, 4],
    ]


def test_no_rank_gets_more_passes_than_a_step_has_for_it():
    lengths = [100, 1, 1, 1]
    dealing = Dealing(1, 2, ranks=2)
    hands = deal([[0], [1], [2], [3]], lengths, dealing)
    assert hands == [[[0], [3]], [[1], [2]]]
