"""`headstart report results=[...]`: any number of results -> one leaderboard and report."""

import logging
from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING

from headstart.eval.leaderboard import print_leaderboard
from headstart.eval.report import write_report
from headstart.eval.result_files import read_result

log = logging.getLogger(__name__)


@dataclass
class ReportRun:
    """`headstart report`: compare results; those of different settings get tables of their own."""

    results: list[str] = MISSING
    """result.json files, or directories that hold them at any depth."""
    out: str = MISSING
    """Directory that receives report.html, report.md and the plots of the latter."""


def run(config: ReportRun) -> None:
    """Read the results, print the leaderboard and write the report (the command's entry)."""
    results = [read_result(path) for path in find_results(config.results)]
    print_leaderboard(results)
    log.info("report: %s", write_report(results, Path(config.out)))


def find_results(paths: list[str]) -> list[Path]:
    """Return every result.json named by, or below, these paths."""
    found: list[Path] = []
    for name in paths:
        path = Path(name)
        below = [path] if path.is_file() else sorted(path.rglob("result.json"))
        if not below:
            raise FileNotFoundError(f"results={name}: no result.json there; run headstart eval")
        found += below
    if not found:
        raise ValueError("results=[]: give at least one result")
    return found
