"""Reading ahead: threads load what the next steps need while this one computes.

Threads, not processes: reading is memory-mapped copying, which lets go of the interpreter, and
threads share the maps, cannot be forked into a deadlock, and end with Ctrl-C.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Loaded = TypeVar("Loaded")


def read_ahead(
    jobs: Iterator[Job], load: Callable[[Job], Loaded], workers: int
) -> Iterator[tuple[Job, Loaded]]:
    """Yield (job, load(job)) in the order of the jobs, up to workers + 1 of them loaded ahead.

    workers=0 loads in the caller's thread. What `load` raises is raised here, at its job's turn.
    Closing the iterator ends the threads, after the loads that are running.
    """
    if workers == 0:
        yield from ((job, load(job)) for job in jobs)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read-ahead")
    waiting: deque[tuple[Job, Future[Loaded]]] = deque()
    try:
        for job in jobs:
            waiting.append((job, pool.submit(load, job)))
            if len(waiting) > workers:
                first, loaded = waiting.popleft()
                yield first, loaded.result()
        while waiting:
            first, loaded = waiting.popleft()
            yield first, loaded.result()
    finally:
        pool.shutdown(cancel_futures=True)
