"""Ctrl-C and SIGTERM end a run between two steps, and all of its ranks after the same one.

Raised in the middle of a step they would leave weights half updated, and no checkpoint of that is
the run.
"""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch

from headstart.train.parallel import Parallel

log = logging.getLogger(__name__)


class Stop:
    """Takes note of SIGINT and SIGTERM while it is entered; a second one ends the process at once.

    It leaves handlers alone outside the main thread, and a signal that the process ignores.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel, self._noted = parallel, False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._noted and kind is None:  # noted too late for a step to heed it
            raise KeyboardInterrupt

    def asked(self) -> bool:
        """Tell whether any rank was asked to stop; every rank calls it, after the same step."""
        noted = torch.tensor([float(self._noted)], device=self._parallel.device)
        return self._parallel.sum(noted).item() > 0

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._noted:
            raise KeyboardInterrupt
        self._noted = True
        log.warning("%s: stopping after this step", signal.Signals(number).name)
