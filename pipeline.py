"""`headstart pipeline`: generate, capture, train, evaluate and report, from one config.

Every step leaves a finished.json with the settings that made it. A second run reuses a step whose
settings are the same; where they differ it says in what, moves the old result aside and makes it
again.
"""

import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING
from rich.console import Console
from rich.table import Table

from headstart import __version__
from headstart.data.capture import capture
from headstart.data.generate import GenerateConfig, generate
from headstart.data.rows import read_rows
from headstart.data.source import DataConfig, source_settings
from headstart.data.store_job import bytes_per_token
from headstart.data.template import ChatTemplate
from headstart.eval.arms import refuse_misfits
from headstart.eval.bench import evaluate_heads
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.files import read_json, write_json
from headstart.heads.base import HeadConfig
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.runtime import RuntimeConfig
from headstart.heads.target import Target
from headstart.train.config import TrainConfig
from headstart.train.run import TrainRun, train
from headstart.train.tracking import LoggingConfig

log = logging.getLogger(__name__)
FINISHED = "finished.json"


@dataclass
class PipelineRun:
    """`headstart pipeline`: from a target to measured heads."""

    target: TargetConfig = MISSING
    data: DataConfig = MISSING
    answers: SamplingConfig = MISSING
    """How the on-policy answers are sampled."""
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    heldout_prompts: int = 32
    """Held-out prompts answered for the held-out loss."""
    heads: dict[str, HeadConfig] = MISSING
    """Heads to train, by name: +head@heads.NAME=OPTION adds one, ~heads.NAME leaves one out."""
    train: TrainConfig = field(default_factory=TrainConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    trees: dict[str, TreeConfig] = MISSING
    """Drafts each head is measured with: tree@trees.NAME=OPTION."""
    sampling: SamplingConfig = MISSING
    """How the evaluation samples."""
    runtime: RuntimeConfig = MISSING
    eval: EvalConfig = field(default_factory=EvalConfig)
    out: str = MISSING
    """Directory of everything the run makes."""

    def __post_init__(self) -> None:
        if self.data.split != "train":
            raise ValueError(
                f"data.split={self.data.split}: the held-out prompts would be training prompts; "
                "use data.split=train, which keeps one text in eight for them"
            )


@dataclass
class Step:
    """One step: where its result lies, what determines it, and how to make it."""

    name: str
    directory: Path
    settings: dict[str, Any]
    estimate: float
    """Seconds it should take, from rates measured on this machine at the start."""
    work: Callable[[], Any]
    goes_on: bool = False
    """Whether the work itself takes up what an interrupted run left."""


def run(config: PipelineRun) -> None:
    """Run every step that is not there yet (the command's entry)."""
    config.runtime.apply()
    target = load_target(config.target)
    rates = measure_rates(target, config.generate.batch_size, Path(config.out))
    steps = plan(target, config, rates)
    _announce(steps)
    for step in steps:
        run_step(step)
    log.info("report: %s", Path(config.out) / "eval" / "report.html")


def plan(target: Target, config: PipelineRun, rates: dict[str, float]) -> list[Step]:
    """List the steps in order, each with the settings that determine its result."""
    out, trees = Path(config.out), list(config.trees.values())
    base = {
        "headstart": __version__,
        "target": target.fingerprint,
        "template": ChatTemplate(target.tokenizer).hash,
        "dtype": config.target.dtype,
    }
    heldout = replace(config.data, num_prompts=config.heldout_prompts, split="heldout")
    answer_tokens = (config.data.num_prompts or 1000) * config.generate.max_new_tokens
    row_settings = base | _flat(generate=config.generate, answers=config.answers)
    # Refused now rather than after the rows are made: taps and trees that do not fit.
    taps = sorted({s for head in config.heads.values() for s in head.taps(target.shape)})
    refuse_misfits(config.heads, config.trees, target, config.sampling)
    steps = []
    for name, data, tokens in (
        ("rows", config.data, answer_tokens),
        ("heldout", heldout, config.heldout_prompts * config.generate.max_new_tokens),
    ):
        steps.append(
            Step(
                f"generate {name}",
                out / name,
                row_settings | source_settings(data),
                tokens / rates["generate"],
                lambda name=name, data=data: generate(
                    target,
                    data=data,
                    sampling=config.answers,
                    config=config.generate,
                    directory=out / name,
                    tree=trees[0],
                ),
            )
        )
    rows_settings = steps[0].settings
    if config.train.features == "captured":
        steps.append(
            Step(
                "capture features",
                out / "features",
                rows_settings | {"aux": taps},
                _capture_seconds(1.6 * answer_tokens, bytes_per_token(target, taps), rates),
                lambda: _capture(target, out, taps),
            )
        )
    for name, head in config.heads.items():
        steps.append(_train_step(target, config, name, head, rows_settings, rates))
    steps.append(
        Step(
            "evaluate",
            out / "eval",
            {step.name: step.settings for step in steps if step.name.startswith("train ")}
            | _flat(sampling=config.sampling, eval=config.eval, trees=config.trees)
            | _flat(runtime=config.runtime)
            | {"device": str(target.device), "attention": config.target.attention},
            config.eval.repeats
            * sum(suite.num_prompts * suite.max_new_tokens for suite in config.eval.chosen_suites)
            * (1 + 0.75 * len(config.heads) * len(trees))
            / rates["decode"],
            lambda: _evaluate(target, config),
        )
    )
    return steps


def _train_step(
    target: Target,
    config: PipelineRun,
    name: str,
    head: HeadConfig,
    rows_settings: dict[str, Any],
    rates: dict[str, float],
) -> Step:
    out = Path(config.out)
    job = TrainRun(
        target=config.target,
        head=head,
        train=config.train,
        logging=replace(config.logging, group=config.logging.group or config.out),
        tree=next(iter(config.trees.values())),
        rows=str(out / "rows"),
        heldout_rows=str(out / "heldout"),
        features=str(out / "features") if config.train.features == "captured" else None,
        out=str(out / name),
    )
    seconds = config.train.max_seconds
    if seconds is None:
        seconds = config.train.max_steps * config.train.batch_rows * 150 / rates["train"]
    return Step(
        f"train {name}",
        out / name,
        rows_settings
        | _flat(head=head, train=replace(config.train, resume="never"), tree=job.tree)
        | {"heldout_prompts": config.heldout_prompts},
        seconds + 15,
        lambda: train(target, job),
        goes_on=config.train.resume == "auto",
    )


def _capture_seconds(tokens: float, size: int, rates: dict[str, float]) -> float:
    """Return seconds to run the target over this many tokens and to write `size` bytes of each."""
    return tokens * (1 / rates["capture"] + size / rates["write"])


def changed_settings(step: Step) -> list[str]:
    """Return the names of the settings in which a finished result differs from what is asked."""
    have = read_json(step.directory / FINISHED)["settings"]
    names = sorted({*have, *step.settings})
    return [name for name in names if have.get(name) != step.settings.get(name)]


def run_step(step: Step) -> None:
    """Make a step's result unless it is there with the same settings; say which and why."""
    marker = step.directory / FINISHED
    if marker.exists():
        changed = changed_settings(step)
        if not changed:
            log.info("%s: reused %s (same settings)", step.name, step.directory)
            return
        aside = _move_aside(step.directory)
        log.info("%s: %s changed; the earlier result is now %s", step.name, changed[0], aside)
    else:
        left = any((step.directory / name).exists() for name in ("head", "checkpoints"))
        if left and not step.goes_on:  # an interrupted training: what it made is kept
            log.info("%s: unfinished, moved to %s", step.name, _move_aside(step.directory))
        log.info("%s: to be made in %s", step.name, step.directory)
    start = time.perf_counter()
    step.work()
    seconds = round(time.perf_counter() - start, 1)
    write_json(marker, {"settings": step.settings, "seconds": seconds})
    log.info("%s: done in %.0f s", step.name, seconds)


def _move_aside(directory: Path) -> Path:
    number = 1
    while (aside := directory.with_name(f"{directory.name}.earlier-{number}")).exists():
        number += 1
    return directory.rename(aside)


def _capture(target: Target, out: Path, taps: list[int]) -> None:
    rows, meta = read_rows(out / "rows")
    capture(target, rows, out / "features", meta=meta, taps=taps)


def _evaluate(target: Target, config: PipelineRun) -> None:
    config.runtime.attach(target)  # here, so that the steps before it run as they would alone
    out = Path(config.out)
    evaluate_heads(
        target,
        ChatTemplate(target.tokenizer),
        [out / name / "head" for name in config.heads],
        list(config.trees.values()),
        sampling=config.sampling,
        config=config.eval,
        out=out / "eval",
        run_config=asdict(config),
    )


def _flat(**configs: Any) -> dict[str, Any]:
    """Return the fields of several configs as one flat dict of plain values."""
    flat: dict[str, Any] = {}
    for name, config in configs.items():
        fields = config if isinstance(config, dict) else asdict(config)
        for key, value in fields.items():
            plain = asdict(value) if hasattr(value, "__dataclass_fields__") else value
            flat[f"{name}.{key}"] = plain
        if not isinstance(config, dict):
            flat[name] = type(config).__name__
    return flat


def measure_rates(target: Target, batch_size: int, out: Path) -> dict[str, float]:
    """Return this machine's tokens per second of plain decoding, batched decoding, capture and
    training, and the bytes per second that the disk of `out` takes.
    """

    def seconds(rows: int, tokens: int) -> float:
        cache = target.new_cache(rows, 256, tokens)
        shape = (rows, tokens)
        ids = torch.zeros(shape, dtype=torch.int64, device=target.device)
        depth = torch.arange(tokens, device=target.device).expand(shape)
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=target.device).tril()
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            output = target.pass_over(ids, depth, causal.expand(rows, -1, -1), cache)
            target.readout(output.hidden_BTD[:, -1]).argmax(-1).tolist()
            best = min(best, time.perf_counter() - start)
        return best

    capture_rate = 512 / seconds(4, 128)
    return {
        "decode": 1 / seconds(1, 1),
        "generate": 0.8 * batch_size / seconds(batch_size, 1),
        "capture": 0.8 * capture_rate,
        "train": 3 * capture_rate,
        "write": _write_rate(out),
    }


def _write_rate(directory: Path) -> float:
    """Return the bytes per second at which 16 MiB reach the disk of a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory) as file:
        start = time.perf_counter()
        file.write(bytes(2**24))
        file.flush()
        os.fsync(file.fileno())
        return 2**24 / (time.perf_counter() - start)


def _announce(steps: list[Step]) -> None:
    table = Table(title="What this run does", title_justify="left")
    table.add_column("step")
    table.add_column("about", justify="right")
    table.add_column("result")
    total = 0.0
    for step in steps:
        known = (step.directory / FINISHED).exists() and not changed_settings(step)
        total += 0.0 if known else step.estimate
        about = "there already" if known else _minutes(step.estimate)
        table.add_row(step.name, about, str(step.directory))
    table.add_row("together", _minutes(total), "")
    Console().print(table)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
