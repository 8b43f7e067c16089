"""`python -m headstart.train.communication`: what ranks send each other in a step, on paper.

Weights and gradients travel in fp32, whatever the precision of the passes. Of a collective over N
ranks that moves S bytes in rings, an all-gather or a reduce-scatter makes every rank send
(N - 1) / N * S, and an all-reduce is one of each (ZeRO, arXiv 1910.02054, section 7).
The tables of docs/communication.md are printed by `main`.
"""

from dataclasses import dataclass
from importlib.resources import files

import torch
import yaml

from headstart.eval.plan_model import ModelConfig, ModelSize, model_size
from headstart.heads.base import DraftHead
from headstart.heads.eagle3 import Eagle3Config, Eagle3Head
from headstart.heads.vocab import DraftVocab
from headstart.train.flops import StepFlops, head_flops

BYTES = 4
"""Of a weight, and of its gradient."""
KINDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
LINKS = {
    "NVLink 4 (H100)": 450.0,
    "PCIe 5.0 x16": 63.0,
    "InfiniBand NDR, 400 Gb/s a GPU": 50.0,
    "Ethernet, 100 Gb/s a GPU": 12.5,
}
"""10^9 bytes a second in one direction, by the standards' and vendors' figures."""
LINK_USE = 0.75
"""Fraction of a link's figure that a collective is taken to reach; not measured here."""
PEAK, MFU = 989.4e12, 0.4
"""FLOPs a second of an H100 in bf16 by its datasheet, and the fraction taken to be reached."""


@dataclass(frozen=True)
class Step:
    """An optimizer step of one rank: micro-batches, their tokens together, those that teach."""

    ranks: int = 8
    accumulation: int = 1
    tokens: int = 16_384
    supervised: int = 8_192


def collectives(kind: str, accumulation: int) -> tuple[int, int]:
    """Return the all-gathers of weights and the reduce-scatters of gradients in one step.

    Raises ValueError for a kind that is not known.
    """
    A = accumulation
    counts = {
        "ddp": (1, 1),  # one all-reduce, after the last micro-batch
        "fsdp2": (A, 1),  # gathered for a micro-batch's passes, let go of after them
        "zero1": (1, 1),  # each rank updates its part of the weights, and gives it to the others
        "zero2": (1, A),  # gradients are split as they come
        "zero3": (2 * A, A),  # let go of after the pass forth, gathered again for the one back
    }
    if kind not in counts:
        raise ValueError(f"parallel.kind={kind}: expected one of {', '.join(counts)}")
    return counts[kind]


def sent_bytes(kind: str, num_weights: int, step: Step) -> float:
    """Return the bytes that each rank sends, and receives, in an optimizer step."""
    share = (step.ranks - 1) / step.ranks
    return sum(collectives(kind, step.accumulation)) * share * BYTES * num_weights


def state_bytes(kind: str, num_weights: int, ranks: int) -> float:
    """Return what a rank keeps between passes: weights, gradients, AdamW's two moments."""
    whole = {"ddp": 4, "fsdp2": 0, "zero1": 2, "zero2": 1, "zero3": 0}[kind]
    return BYTES * num_weights * (whole + (4 - whole) / ranks)


def seconds_on(link: str, sent: float) -> float:
    """Return how long so many bytes take on a link, one way."""
    return sent / (LINKS[link] * 1e9 * LINK_USE)


def computing(flops: StepFlops, step: Step) -> float:
    """Return the seconds that a rank computes in a step."""
    return flops.of(step.tokens, step.supervised) / (PEAK * MFU)


def example() -> tuple[DraftHead, ModelSize]:
    """Return an EAGLE-3 head of Llama-3.1-8B over 32,000 draft tokens, without weights."""
    preset = files("headstart.conf").joinpath("model", "llama3_8b.yaml")
    size = model_size(ModelConfig(config=yaml.safe_load(preset.read_text("utf-8"))["config"]))
    vocab = DraftVocab(torch.arange(32_000), size.shape.vocab_size)
    with torch.device("meta"):
        head = Eagle3Head(Eagle3Config(draft_vocab_size=len(vocab)), size.shape, vocab)
    return head, size


def tables(step: Step | None = None) -> list[str]:
    """Return the lines of the tables, in Markdown."""
    step = step or Step()
    head, size = example()
    num_weights = sum(weight.numel() for weight in head.parameters())
    readout = size.shape.vocab_size * size.shape.hidden_size
    target = StepFlops(2.0 * (size.active_parameters - readout), 2.0 * readout)
    alone = computing(head_flops(head), step)
    online = alone + computing(target, step)
    lines = [
        f"{num_weights / 1e6:.1f} M trained weights, {step.ranks} ranks, {step.tokens} tokens a "
        f"rank and step, {step.supervised} of them supervised; a rank computes "
        f"{1e3 * alone:.0f} ms a step on captured features and {1e3 * online:.0f} ms with the "
        "target in the loop.",
        "",
        "| `parallel` | keeps | sends a step | with 4 micro-batches |",
        "|---|---|---|---|",
    ]
    four = Step(step.ranks, 4, step.tokens, step.supervised)
    for kind in KINDS:
        kept = state_bytes(kind, num_weights, step.ranks) / 1e9
        sent, more = (sent_bytes(kind, num_weights, s) / 1e9 for s in (step, four))
        lines.append(f"| {kind} | {kept:.1f} GB | {sent:.2f} GB | {more:.2f} GB |")
    lines += [
        "",
        "| link | ddp | of the head's step | of an online step | zero3 |",
        "|---|---|---|---|---|",
    ]
    for link in LINKS:
        ddp, zero3 = (
            seconds_on(link, sent_bytes(kind, num_weights, step)) for kind in ("ddp", "zero3")
        )
        lines.append(
            f"| {link} | {1e3 * ddp:.0f} ms | {ddp / alone:.0%} | {ddp / online:.0%} | "
            f"{1e3 * zero3:.0f} ms |"
        )
    return lines


def main() -> None:
    """Print the tables."""
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
