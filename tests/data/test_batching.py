"""The order of rows."""

from collections import Counter
from itertools import islice

import pytest

from headstart.data.batching import batches_forever, epoch_batches

LENGTHS = [1] * 16


def order(lengths: list[int], batch_rows: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    batches = epoch_batches(lengths, batch_rows, seed=seed, epoch=epoch)
    return [i for batch in batches for i in batch]


def test_p09_two_epochs_of_sixteen_rows_are_shuffled_and_shuffled_differently():
    first, second = (order(LENGTHS, 1, epoch=epoch) for epoch in (0, 1))
    in_file_order = list(range(16))
    assert sorted(first) == sorted(second) == in_file_order
    assert first != in_file_order
    assert second != in_file_order
    assert first != second


def test_p09_the_order_is_that_of_the_seed_and_the_epoch():
    assert order(LENGTHS, 1, epoch=1) == order(LENGTHS, 1, epoch=1)
    assert order(LENGTHS, 1, seed=1) != order(LENGTHS, 1, seed=0)


@pytest.mark.parametrize("batch_rows", [1, 3, 4, 16, 50])
def test_every_row_is_in_exactly_one_batch_of_an_epoch(batch_rows):
    lengths = [1 + 7 * i % 13 for i in range(50)]
    batches = epoch_batches(lengths, batch_rows, seed=3, epoch=2)
    assert Counter(i for batch in batches for i in batch) == Counter(range(50))
    assert [len(b) for b in batches if len(b) != batch_rows] in ([], [50 % batch_rows])


def test_p09_a_row_meets_other_rows_in_the_next_epoch():
    first, second = (epoch_batches(LENGTHS, 4, seed=0, epoch=epoch) for epoch in (0, 1))
    assert not {frozenset(batch) for batch in first} & {frozenset(batch) for batch in second}


def test_rows_of_like_length_are_side_by_side():
    lengths = [1 + 37 * i % 101 for i in range(128)]
    batches = epoch_batches(lengths, 8, seed=0, epoch=0)
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.15 * sum(lengths)


def test_the_longest_rows_do_not_always_come_last():
    lengths = list(range(1, 65))
    firsts = [order(lengths, 4, seed=seed)[0] for seed in range(8)]
    assert len(set(firsts)) > 4


def test_epochs_follow_each_other_and_their_last_batch_is_marked():
    seen = list(islice(batches_forever([1] * 5, 2, seed=0), 6))
    assert [epoch for epoch, _, _ in seen] == [0, 0, 0, 1, 1, 1]
    assert [last for _, last, _ in seen] == [False, False, True] * 2
    for epoch in (0, 1):
        assert sorted(i for e, _, rows in seen if e == epoch for i in rows) == list(range(5))
