"""What a signal that asks a process to end becomes, and the exit status that tells of it."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]
STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run that a signal ended."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """As a shell tells it: 130 for Ctrl-C, 143 for SIGTERM."""


@contextmanager
def handling(handler: Handler) -> Iterator[bool]:
    """Hand SIGINT and SIGTERM to a handler inside the block; yield whether any goes there.

    Outside the main thread none does, nor one that the process ignores, as of what a shell starts
    in the background.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        heard = [n for n in STOPPING if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in heard}
    try:
        yield bool(before)
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise Stopped, as Ctrl-C raises KeyboardInterrupt: what is open is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield
    finally:
        # A stop that is still being carried out has put its own in the place.
        if signal.getsignal(signal.SIGTERM) is _stop:
            signal.signal(signal.SIGTERM, before)


def _stop(number: int, _: FrameType | None) -> None:
    raise Stopped(number)
