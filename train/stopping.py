"""Ctrl-C and SIGTERM end a run between two steps, and all of its ranks after the same one.

Raised in the middle of a step they would leave weights half updated, and no checkpoint of that is
the run.
"""

import os
import signal
from types import FrameType, TracebackType

import torch

from headstart.signals import STOPPING, Stopped, handling
from headstart.train.parallel import Parallel


class Stop:
    """Takes note of SIGINT and SIGTERM while it is entered.

    A further Ctrl-C ends the process at once; a further SIGTERM changes nothing, as schedulers and
    launchers send several. It leaves handlers alone outside the main thread, and a signal that the
    process ignores.
    """

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._noted: int | None = None

    def __enter__(self) -> "Stop":
        self._handling = handling(self._note)
        self._hears = self._handling.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._handling.__exit__(None, None, None)
        if self._noted is not None and self._parallel.world > 1 and self._hears:
            # Once a rank is gone its launcher ends the others; this one may still be closing.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._noted is not None and kind is None:  # too late for a step to heed it
            raise self.error()

    def asked(self) -> bool:
        """Tell whether any rank was asked to stop; every rank calls it, after the same step."""
        noted = [float(self._noted == number) for number in STOPPING]
        ranks = self._parallel.sum(torch.tensor(noted, device=self._parallel.device)).tolist()
        told = [number for number, count in zip(STOPPING, ranks, strict=True) if count]
        if told and self._noted is None:
            self._noted = told[0]
        return bool(told)

    def error(self) -> Stopped:
        """Return what to raise once asked to stop."""
        assert self._noted is not None
        return Stopped(self._noted)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._noted is None:
            self._noted = number
            if self._parallel.is_main:  # not by print: that may be what the signal interrupted
                name = signal.Signals(number).name
                said = f"\n{name}: stopping after this step, then saving (Ctrl-C again: at once)\n"
                os.write(2, said.encode())
        elif number == signal.SIGINT:
            os._exit(128 + number)
