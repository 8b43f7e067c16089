"""Batches made ahead in a thread: the same ones in the same order, and errors are not lost."""

import threading
import time
from itertools import count

import pytest

from headstart.data.prefetch import made_ahead


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_items_come_in_order_each_with_what_was_made_of_it(ahead):
    assert list(made_ahead(iter(range(7)), lambda n: n * n, ahead)) == [
        (n, n * n) for n in range(7)
    ]


def test_no_thread_is_started_for_nothing_ahead():
    (pair,) = made_ahead(iter([1]), lambda _: threading.current_thread(), 0)
    assert pair[1] is threading.main_thread()


def test_things_are_made_while_the_first_is_in_use_and_no_more_than_asked_for():
    made: list[int] = []
    items = made_ahead(count(), lambda n: made.append(n), 2)
    assert next(items)[0] == 0
    wait_until(lambda: len(made) == 3)
    time.sleep(0.05)
    assert made == [0, 1, 2]
    items.close()


def test_an_error_comes_when_its_item_is_due():
    items = made_ahead(iter([2, 1, 0, 5]), lambda n: 2 // n, 2)
    assert [next(items), next(items)] == [(2, 1), (1, 2)]
    with pytest.raises(ZeroDivisionError):
        next(items)


def test_closing_ends_the_thread():
    items = made_ahead(count(), lambda n: n, 2)
    next(items)
    items.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("headstart-ahead")]


def wait_until(condition) -> None:
    for _ in range(200):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("waited two seconds")
