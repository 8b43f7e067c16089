"""Where the figures of a run go: metrics.jsonl beside the checkpoint, always, and W&B if asked for.

Rank 0 only. A tracker never stops training: without a key or an answer from the server the run is
kept on disk, which a warning says once, with the command that sends it. It holds training up for
`logging.timeout` seconds when nothing answers, for W&B's own ten seconds more when something does
but is of no use, and for FINISH_SECONDS at the end, at most.
"""

import http.client
import json
import logging
import os
import secrets
import ssl
import threading
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headstart.files import read_json, write_json

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
KINDS = ("none", "wandb", "wandb_offline")
FINISH_SECONDS = 60.0
"""Longest wait for what is still to be sent when a run ends."""
LONGEST_NAME = 128
"""Characters that W&B takes in a name."""
PROXY_FAILED = (502, 503, 504)
"""What a proxy answers in place of a server that it cannot reach."""
SUMMARIES = {"heldout/tau_with_bonus_micro": "max", "heldout/loss": "min"}
"""What W&B's table of runs shows of a figure, where that is not its last value."""


@dataclass
class LoggingConfig:
    """Where the figures of a run go beside metrics.jsonl."""

    kind: str = "none"
    """none: nowhere; wandb: a server, or the disk when it cannot be reached; wandb_offline: the
    disk, for `wandb sync`."""
    project: str = "headstart"
    """W&B project."""
    entity: str | None = None
    """W&B user or team; null means the key's own."""
    group: str | None = None
    """What runs are shown together by; null: the jobs of a sweep, or the parts of one run."""
    name: str | None = None
    """What the run is called; null takes the last part of `out`."""
    tags: list[str] = field(default_factory=list)
    """Tags beside the head's family and the target."""
    timeout: float = 5.0
    """Seconds the server has to answer at the start."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"logging.kind={self.kind}: expected one of {', '.join(KINDS)}")
        if not self.timeout > 0:
            raise ValueError(f"logging.timeout={self.timeout}: need more than 0 seconds")
        if not self.project:
            raise ValueError("logging.project is empty: give a name")
        ignored = {"entity": self.entity, "name": self.name, "tags": self.tags}
        for name in [name for name, value in ignored.items() if value and self.kind == "none"]:
            warnings.warn(
                f"logging.{name} has no effect with logging=none; use logging=wandb", stacklevel=3
            )


class Tracker(Protocol):
    """Takes the figures of a run, by step; no call raises for a server's sake."""

    def start(self, config: dict[str, Any], step: int) -> None:
        """Begin, or go on after `step` steps, with the resolved configuration."""

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Take figures of a step; a later call never has a lower step."""

    def finish(self, *, failed: bool = False) -> None:
        """End the run."""


class NoTracker:
    """Takes nothing anywhere."""

    def start(self, config: dict[str, Any], step: int) -> None:
        """Do nothing."""

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Do nothing."""

    def finish(self, *, failed: bool = False) -> None:
        """Do nothing."""


class JsonLines(NoTracker):
    """Appends a line of JSON a call to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Append one line: the step and its figures."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | figures) + "\n")


class Both:
    """Hands everything to two trackers, the first of which is the one that matters."""

    def __init__(self, first: Tracker, second: Tracker) -> None:
        self.first, self.second = first, second

    def start(self, config: dict[str, Any], step: int) -> None:
        """Start both."""
        self.first.start(config, step)
        self.second.start(config, step)

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Hand the figures to both."""
        self.first.log(step, figures)
        self.second.log(step, figures)

    def finish(self, *, failed: bool = False) -> None:
        """End both."""
        self.first.finish(failed=failed)
        self.second.finish(failed=failed)


class WandbTracker:
    """One W&B run, on the server or on disk.

    Its id lies in OUT/wandb.json and outlives an interruption. On the server the run goes on under
    it; a part kept on disk has an id of its own, since syncing a second part under the same one
    would replace the first. The parts share a group, and one x-axis: train/step.
    """

    def __init__(self, config: LoggingConfig, out: Path, tags: Sequence[str]) -> None:
        self.config, self.out, self.tags = config, out, [*tags, *config.tags]
        self._run: Any = None

    def start(self, config: dict[str, Any], step: int) -> None:
        """Begin the run, or the next part of it."""
        try:
            self._start(config, step)
        except Exception as error:  # whatever it is: the figures are in metrics.jsonl too
            log.warning("W&B: %s; the figures go to metrics.jsonl only", _sentence(error))

    def _start(self, config: dict[str, Any], step: int) -> None:
        import wandb

        run_id = _run_id(self.out / "wandb.json", new=step == 0)
        mode, run, why = self._mode(), None, None
        if mode == "online":
            why = _why_not_online(self.config.timeout)
            try:
                run = self._begin("online", run_id, run_id, config) if why is None else None
            except (wandb.Error, OSError) as error:  # a TimeoutError is one of OSError
                why = _sentence(error)
        if run is None:
            mode = "offline" if mode == "online" else mode
            run = self._begin(mode, f"{run_id}-from-{step}", run_id, config)
        for name, summary in SUMMARIES.items():
            run.define_metric(name, summary=summary, step_metric="train/step")
        run.define_metric("*", step_metric="train/step")
        self._run = run
        self._tell(mode, why)

    def _mode(self) -> str:
        """Return offline, or what WANDB_MODE says, which a user may have set for the machine."""
        if self.config.kind == "wandb_offline":
            return "offline"
        return os.environ.get("WANDB_MODE", "online")

    def _begin(self, mode: str, part_id: str, run_id: str, config: dict[str, Any]) -> Any:
        import wandb

        name = self.config.name or self.out.name
        # A run that a W&B sweep starts has an id already.
        own = {} if "WANDB_SWEEP_ID" in os.environ else {"id": part_id}
        return wandb.init(
            project=self.config.project,
            entity=self.config.entity,
            name=name[-LONGEST_NAME:],
            group=(self.config.group or f"{name}-{run_id}")[-LONGEST_NAME:],
            job_type="train",
            tags=sorted({tag[-64:] for tag in self.tags if tag}),
            config=config | {"run_id": run_id},
            dir=str(self.out),
            mode=mode,
            resume="allow" if mode == "online" else None,
            reinit="finish_previous",
            settings=wandb.Settings(
                silent=True,
                init_timeout=self.config.timeout,
                finish_timeout=FINISH_SECONDS,
                finish_timeout_raises=True,
            ),
            **own,
        )

    def _tell(self, mode: str, why: str | None) -> None:
        if mode == "online":
            log.info("W&B: %s", self._run.url)
            return
        sync = f"send it with: wandb sync {self._run.settings.sync_dir}"
        if why is None:
            log.info("W&B: the run is kept on disk; %s", sync)
        else:
            log.warning("W&B: %s; training goes on, the run is kept on disk; %s", why, sync)

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Hand the figures to W&B's own process, which does not wait for the network."""
        if self._run is None:
            return
        named = {name if "/" in name else f"train/{name}": v for name, v in figures.items()}
        try:
            self._run.log({"train/step": step} | named)
        except Exception as error:  # whatever it is: the figures are in metrics.jsonl too
            log.warning("W&B: %s; no more figures go there", _sentence(error))
            self._run = None

    def finish(self, *, failed: bool = False) -> None:
        """End the run, waiting a bounded time for what is still to be sent."""
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.finish(exit_code=int(failed))
        except Exception as error:  # as above
            log.warning(
                "W&B: %s; send the rest with: wandb sync %s",
                _sentence(error),
                run.settings.sync_dir,
            )


def make_tracker(config: LoggingConfig, out: Path, tags: Sequence[str], *, main: bool) -> Tracker:
    """Return what takes a run's figures: nothing on ranks other than the main one."""
    if not main:
        return NoTracker()
    lines = JsonLines(out / METRICS)
    return lines if config.kind == "none" else Both(lines, WandbTracker(config, out, tags))


@contextmanager
def tracked(tracker: Tracker, config: dict[str, Any], step: int) -> Iterator[Tracker]:
    """Start a tracker and end its run, as failed when the block raises."""
    tracker.start(config, step)
    try:
        yield tracker
    except BaseException:
        tracker.finish(failed=True)
        raise
    tracker.finish()


def _run_id(path: Path, *, new: bool) -> str:
    """Return the id of the run in a directory, made and written down when it is new."""
    if not new and path.exists():
        return read_json(path)["id"]
    run_id = secrets.token_hex(4)  # not of the run's seed: two runs alike are two runs
    write_json(path, {"id": run_id})
    return run_id


def _why_not_online(timeout: float) -> str | None:
    """Say what keeps a run from the server, or return None; takes `timeout` seconds at most."""
    import wandb

    url = wandb.setup().settings.base_url
    if not answers(url, timeout):
        return f"{url} did not answer within {timeout:g} s"
    try:
        # Neither asks for a key nor sends it: starting the run does the latter.
        known = wandb.login(prompt=False, verify=False)
    except (wandb.Error, OSError, ValueError) as error:
        return _sentence(error)
    return None if known else f"no API key for {url}: run wandb login, or set WANDB_API_KEY"


def answers(url: str, timeout: float) -> bool:
    """Tell whether anything answers at a URL within so many seconds, be it with an error.

    Goes through the proxies of the environment. In a thread, since looking up a name knows no
    limit of time.
    """
    heard = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=timeout).close()
        except urllib.error.HTTPError as error:
            if error.code not in PROXY_FAILED:
                heard.set()
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLError):  # a certificate that W&B may know of
                heard.set()
        except (OSError, http.client.HTTPException):
            pass
        else:
            heard.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout)
    return heard.is_set()


def _sentence(error: BaseException) -> str:
    """Return the first line of an error, or its name when it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
