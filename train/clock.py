"""Where the time of a run goes: seconds by stage on one timeline."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STAGES = ("data", "target", "head", "optimizer", "other")
"""Of training: reading rows or features, the target's forward, the head forth and back, the
update, and all else. Evaluation and saving are stages too, and not training."""


class StageClock:
    """Gives every second to the stage that was opened last and is still open.

    On a GPU the marks are events in its stream: nothing waits before `read`, and a second is given
    to the stage whose work the device did in it, or waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open = ["other"]
        self._marks = [(self._now(), "other")]

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Open a stage; what was open goes on when the block ends."""
        self._open.append(stage)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def read(self) -> dict[str, float]:
        """Return the seconds by stage since the last call; waits for the device."""
        self._mark()
        if self._on_gpu:
            self._marks[-1][0].synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (start, stage), (end, _) in zip(self._marks, self._marks[1:], strict=False):
            seconds[stage] += self._between(start, end)
        self._marks = self._marks[-1:]
        return seconds

    def _mark(self) -> None:
        self._marks.append((self._now(), self._open[-1]))

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1000 if self._on_gpu else end - start
