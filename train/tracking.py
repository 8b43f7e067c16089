"""Where the figures of a run go: a line of JSON each beside the checkpoint; rank 0 only."""

import json
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """Takes the figures of a run, by step."""

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Take figures of a step; a later call never has a lower step."""


class JsonLines:
    """Appends a line of JSON a call to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Append one line: the step and its figures."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | figures) + "\n")
