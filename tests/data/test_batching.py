"""The order of rows, and how they are dealt to steps, ranks and micro-batches."""

from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from headstart.data.batching import Dealing, epoch_steps, steps_forever

LENGTHS = [1] * 16
UNEVEN = [1 + 7 * i % 13 for i in range(50)]


def order(lengths: list[int], batch_rows: int = 1, *, seed: int = 0, epoch: int = 0) -> list[int]:
    steps = epoch_steps(lengths, Dealing(batch_rows, seed=seed), epoch)
    return [i for step in steps for batch in step for i in batch]


def one_epoch(lengths: list[int], dealing: Dealing) -> list[list[list[int]]]:
    """Return this rank's micro-batches of epoch 0, by step, without the fillers."""
    steps = len(epoch_steps(lengths, dealing, 0))
    return [
        [micro.rows for micro in window if not micro.filler]
        for _, window in islice(steps_forever(lengths, dealing), steps)
    ]


def test_p09_two_epochs_of_sixteen_rows_are_shuffled_and_shuffled_differently():
    first, second = (order(LENGTHS, epoch=epoch) for epoch in (0, 1))
    in_file_order = list(range(16))
    assert sorted(first) == sorted(second) == in_file_order
    assert first != in_file_order
    assert second != in_file_order
    assert first != second


def test_p09_the_order_is_that_of_the_seed_and_the_epoch():
    assert order(LENGTHS, epoch=1) == order(LENGTHS, epoch=1)
    assert order(LENGTHS, seed=1) != order(LENGTHS, seed=0)


@pytest.mark.parametrize("batch_rows", [1, 3, 4, 16, 50])
def test_every_row_is_in_exactly_one_batch_of_an_epoch(batch_rows):
    steps = epoch_steps(UNEVEN, Dealing(batch_rows, seed=3), 2)
    batches = [batch for step in steps for batch in step]
    assert Counter(i for batch in batches for i in batch) == Counter(range(50))
    assert [len(b) for b in batches if len(b) != batch_rows] in ([], [50 % batch_rows])


def test_p09_a_row_meets_other_rows_in_the_next_epoch():
    first, second = (epoch_steps(LENGTHS, Dealing(4), epoch) for epoch in (0, 1))
    assert not {frozenset(s[0]) for s in first} & {frozenset(s[0]) for s in second}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_rows_of_like_length_are_side_by_side(accumulation):
    lengths = [1 + 37 * i % 101 for i in range(128)]
    steps = epoch_steps(lengths, Dealing(8 // accumulation, accumulation), 0)
    padded = sum(len(b) * max(lengths[i] for i in b) for step in steps for b in step)
    assert padded < 1.15 * sum(lengths)


def test_the_longest_rows_do_not_always_come_last():
    lengths = list(range(1, 65))
    firsts = [order(lengths, 4, seed=seed)[0] for seed in range(8)]
    assert len(set(firsts)) > 4


def test_the_order_does_not_depend_on_how_a_source_numbers_rows_of_different_length():
    by_id = [3, 1, 5, 2, 4] * 40
    by_length = sorted(range(200), key=lambda row: by_id[row])
    dealing = Dealing(3)
    want = epoch_steps(by_id, dealing, 0)
    have = epoch_steps([by_id[row] for row in by_length], dealing, 0)
    assert [[[by_length[i] for i in batch] for batch in step] for step in have] == want


def test_epochs_follow_each_other():
    seen = list(islice(steps_forever([1] * 5, Dealing(2)), 6))
    assert [epoch for epoch, _ in seen] == [0, 0, 0, 1, 1, 1]
    for epoch in (0, 1):
        assert sorted(i for e, w in seen if e == epoch for m in w for i in m.rows) == [*range(5)]


# Ranks and windows


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("pack_tokens", [None, 20])
def test_p09_every_row_comes_once_an_epoch_over_all_ranks(ranks, accumulation, pack_tokens):
    dealing = Dealing(2, accumulation, 1, pack_tokens, ranks=ranks)
    parts = [one_epoch(UNEVEN, replace(dealing, rank=rank)) for rank in range(ranks)]
    entries = [row for part in parts for step in part for batch in step for row in batch]
    rows = [i for e in entries for i in e] if pack_tokens else entries
    assert sorted(rows) == list(range(50))


@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_rank_makes_the_same_number_of_passes_in_every_step(accumulation):
    # 50 rows are 25 batches: the last step of an epoch is not full.
    for rank in range(2):
        steps = islice(steps_forever(UNEVEN, Dealing(2, accumulation, rank=rank, ranks=2)), 40)
        assert {len(window) for _, window in steps} == {accumulation}


def test_a_filler_is_the_shortest_row_and_comes_after_what_counts():
    windows = [window for _, window in islice(steps_forever([4, 2, 3], Dealing(1, 2)), 2)]
    (short,) = [window for window in windows if any(micro.filler for micro in window)]
    assert [micro.filler for micro in short] == [False, True]
    assert short[1].rows == [1]


def test_two_ranks_take_the_steps_that_one_takes_in_two_micro_batches():
    alone = one_epoch(UNEVEN, Dealing(2, 2))
    first, second = (one_epoch(UNEVEN, Dealing(2, rank=rank, ranks=2)) for rank in (0, 1))
    assert alone == [a + b for a, b in zip(first, second, strict=True)]


def test_packs_hold_no_more_than_they_may_and_little_less():
    lengths = [1 + 37 * i % 101 for i in range(500)]
    steps = epoch_steps(lengths, Dealing(2, pack_tokens=256), 0)
    sizes = [sum(lengths[i] for i in pack) for step in steps for batch in step for pack in batch]
    assert max(sizes) <= 256
    assert len(sizes) * 256 < 1.1 * sum(lengths)


def test_p09_packs_change_from_epoch_to_epoch_and_not_from_run_to_run():
    dealing = Dealing(1, pack_tokens=8)
    first, again, second = (epoch_steps([2] * 64, dealing, epoch) for epoch in (0, 0, 1))
    assert first == again
    assert not {frozenset(s[0][0]) for s in first} & {frozenset(s[0][0]) for s in second}
