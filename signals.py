"""Ctrl-C and SIGTERM: one asks a run to stop where it can save, a second Ctrl-C ends it at once."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

import torch
from torch import Tensor

from headstart.ranks import place

STOPPING = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run that a signal ended."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """As a shell tells it: 130 for Ctrl-C, 143 for SIGTERM."""


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
        # StopRequest leaves a handler of its own where a stop is still being carried out.
        if signal.getsignal(signal.SIGTERM) is _stop:
            signal.signal(signal.SIGTERM, before)


def _stop(number: int, _: FrameType | None) -> None:
    raise Stopped(number)


class StopRequest:
    """Keeps the first SIGINT or SIGTERM until the loop asks for it, between two steps.

    A further Ctrl-C ends the process at once; a further SIGTERM changes nothing, as schedulers and
    launchers send several.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[int, signal.Handlers | Callable | int | None] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in STOPPING}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self.number is not None and place()[1] > 1:
            # A launcher ends the others when the first rank is gone; this one is still closing.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def check(self, sum_over_ranks: Callable[[Tensor], Tensor], device: torch.device) -> None:
        """Raise Stopped, on all ranks in the same step, when any of them was asked; collective."""
        asked = torch.tensor([float(self.number == number) for number in STOPPING], device=device)
        for number, ranks in zip(STOPPING, sum_over_ranks(asked).tolist(), strict=True):
            if ranks:
                self.number = self.number or number
                raise Stopped(number)

    def _take(self, number: int, _: FrameType | None) -> None:
        if self.number is not None:
            if number == signal.SIGINT:
                os._exit(128 + number)
            return
        self.number = number
        if place()[0] == 0:  # not by print: it may be what the signal interrupted
            name = signal.Signals(number).name
            told = f"\n{name}: stopping after this step, then saving (Ctrl-C again: at once)\n"
            os.write(2, told.encode())
