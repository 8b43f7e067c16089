"""Things made ahead of their use in a background thread: pages are read while a step computes."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def made_ahead(
    items: Iterator[Item], make: Callable[[Item], Made], ahead: int
) -> Iterator[tuple[Item, Made]]:
    """Yield (item, make(item)) in order, up to `ahead` of them made before they are asked for.

    One thread makes them, so that `make` is never run twice at a time; with ahead 0 there is none.
    What `make` raises is raised here, when its item's turn comes.
    """
    if ahead == 0:
        for item in items:
            yield item, make(item)
        return
    pending: deque[tuple[Item, Future[Made]]] = deque()
    pool = ThreadPoolExecutor(1, thread_name_prefix="headstart-ahead")
    try:
        for item in items:
            pending.append((item, pool.submit(make, item)))
            if len(pending) > ahead:
                yield _done(pending)
        while pending:
            yield _done(pending)
    finally:
        pool.shutdown(cancel_futures=True)


def _done(pending: "deque[tuple[Item, Future[Made]]]") -> tuple[Item, Made]:
    item, made = pending.popleft()
    return item, made.result()
