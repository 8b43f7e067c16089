"""What a run says while it trains: a progress bar, lines of figures, and a word at evaluations."""

import logging
from types import TracebackType
from typing import Any

from tqdm import tqdm

from headstart.train.config import TrainConfig
from headstart.train.meters import Meter, peak_memory, time_shares
from headstart.train.parallel import Parallel
from headstart.train.progress import Progress
from headstart.train.tracking import Tracker

log = logging.getLogger(__name__)


class Report:
    """Tells the steps of a run from `progress` on; every rank calls it, rank 0 speaks."""

    def __init__(
        self,
        config: TrainConfig,
        parallel: Parallel,
        tracker: Tracker,
        meter: Meter,
        progress: Progress,
    ) -> None:
        self.config, self.parallel, self.tracker, self.meter = config, parallel, tracker, meter
        meter.start(progress)
        self._speed = 0.0
        self._bar = tqdm(
            total=1.0,
            initial=progress.fraction(config),
            desc="train",
            bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}",
            disable=not parallel.is_main,
        )

    def __enter__(self) -> "Report":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def due(self, step: int) -> bool:
        """Tell whether a step has a line of figures."""
        return step % self.config.log_every == 0

    def step(self, progress: Progress, figures: dict[str, float]) -> None:
        """Tell a step that was taken: its figures are written when it is due, and shown."""
        if self.due(progress.step):
            speeds = self.meter.figures(progress)
            self._speed = speeds["train/tokens_per_s"]
            self._track(progress, figures | speeds | peak_memory(self.parallel))
        # Not refreshed in every step: a terminal takes longer than a small one.
        self._bar.set_postfix_str(
            f"step {progress.step}, epoch {progress.epoch}, loss {figures['train/loss']:.3f}, "
            f"{self._speed or self.meter.speed(progress):.0f} tokens/s",
            refresh=False,
        )
        self._bar.update(progress.fraction(self.config) - self._bar.n)

    def evaluation(self, progress: Progress, figures: dict[str, float]) -> None:
        """Tell the figures of an evaluation."""
        if not figures:
            return
        shown = ", ".join(f"{name.split('/')[-1]} {value:.3f}" for name, value in figures.items())
        log.info("step %d: %s", progress.step, shown)
        self._track(progress, figures)

    def end(self, progress: Progress) -> None:
        """Tell where the time of the whole run went."""
        self._bar.refresh()
        log.info(
            "%d steps in %.0f s, %.0f tokens/s, MFU %s: %s",
            progress.step,
            progress.seconds,
            self.meter.speed(progress),
            self.meter.mfu_text(progress),
            time_shares(progress),
        )

    def _track(self, progress: Progress, figures: dict[str, Any]) -> None:
        counted = {"tokens": progress.tokens, "seconds": round(progress.seconds, 3)}
        if self.parallel.is_main:
            self.tracker.log(progress.step, counted | figures)
