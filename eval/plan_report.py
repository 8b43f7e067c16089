"""How a plan is told: tables for a terminal, plan.md, plan.json and a plot."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from headstart.eval.plan_costs import sizes
from headstart.eval.plan_figure import draw
from headstart.eval.plan_make import BatchRow, Plan
from headstart.eval.roofline import StepTime, knee_batch, step_time, weight_bytes
from headstart.files import atomic_path, write_json, write_text

WIDTH = 120
"""Columns of the printout where the terminal has no width of its own."""


@dataclass(frozen=True)
class Section:
    """A heading, sentences and a table; any of the latter two may be empty."""

    title: str
    lines: list[str] = field(default_factory=list)
    columns: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def print_plan(plan: Plan) -> None:
    """Print the plan."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    console.print(f"\n[bold]{escape(title(plan))}[/bold]\n")
    for section in sections(plan):
        if section.rows:
            table = Table(title=escape(section.title), title_justify="left", title_style="bold")
            for column in section.columns:
                table.add_column(escape(column), justify="right")
            for row in section.rows:
                table.add_row(*map(escape, row))
            console.print(table)
        else:
            console.print(f"[bold]{escape(section.title)}[/bold]")
        for line in section.lines:
            console.print(f"- {escape(line)}" if not section.rows else escape(line))
        console.print()


def write_plan(plan: Plan, directory: Path) -> list[Path]:
    """Write plan.json, plan.md and plan.png into `directory`; return their paths."""
    paths = [directory / name for name in ("plan.json", "plan.md", "plan.png")]
    write_json(paths[0], plan_json(plan))
    with atomic_path(paths[2]) as temporary:
        draw(plan, title(plan)).savefig(temporary, format="png", dpi=120)
    write_text(paths[1], markdown(plan, paths[2].name))
    return paths


def title(plan: Plan) -> str:
    """Name what was planned."""
    return f"{plan.target.name} on {plan.hardware.name}, drafting with {plan.drafter.name}"


def markdown(plan: Plan, image: str) -> str:
    """Return the plan as Markdown; `image` is the plot's path beside it."""
    parts = [f"# {title(plan)}"]
    for number, section in enumerate(sections(plan)):
        parts.append(f"## {section.title}")
        if section.rows:
            head = [section.columns, ["---:"] * len(section.columns)]
            parts.append("\n".join(f"| {' | '.join(row)} |" for row in [*head, *section.rows]))
            parts += section.lines
        else:
            parts.append("\n".join(f"- {line}" for line in section.lines))
        if number == 0:
            parts.append(f"![speedup over batch, and the time of a pass]({image})")
    return "\n\n".join(parts) + "\n"


def sections(plan: Plan) -> list[Section]:
    """Return what the plan says, the conclusion first."""
    return [
        Section("In short", list(_in_short(plan))),
        _speed(plan),
        _drafts(plan),
        _steps(plan),
        _memory(plan),
        *([] if plan.training is None else [_training(plan)]),
        Section("What this rests on", list(_rests_on(plan))),
    ]


def _in_short(plan: Plan) -> Iterator[str]:
    fitting = [row for row in plan.batches if row.batch <= plan.largest_batch]
    yield _buys(fitting) if fitting else _too_large(plan)
    yield _reading(plan)
    drafting = f"Drafting a token costs c = {plan.cost_ratio_c:.3f} of a decoding step (batch 1)."
    yield drafting if plan.target.num_experts > 1 else f"{drafting} {_worth(plan)}"
    yield from _caches(plan)
    last = plan.memory[-1]
    yield (
        f"Memory: {_size(last.total)} of {_size(plan.memory_bytes)} at batch {last.batch} with "
        f"{plan.config.context} tokens a row; the largest batch that fits is {plan.largest_batch}."
    )
    if not plan.acceptance.measured:
        yield (
            f"Acceptance is not measured ({plan.acceptance.source}) and every speedup rests on it: "
            "headstart eval tree=chain5 measures it, alphas_from=runs/eval/NAME plans with that."
        )


def _too_large(plan: Plan) -> str:
    least = plan.memory[0]
    return (
        f"{title(plan)}, does not fit: batch {least.batch} takes {_size(least.total)} of "
        f"{_size(plan.memory_bytes)}. What follows is as if it did; choose another device, a "
        "smaller dtype or a shorter context."
    )


def _worth(plan: Plan) -> str:
    """Say how long a chain pays while verifying is free, and what is known no further."""
    k, known = plan.rule_depth, len(plan.acceptance.alphas)
    if k == 0:
        return "That is more than the first drafted token yields: no chain is worth drafting."
    free = "While verifying is free a chain of"
    if k == known:
        return f"{free} at least k={k} is worth drafting; no acceptance is known beyond."
    if k == plan.drafter.work.max_depth:
        return f"{free} k={k} is worth drafting, which is as deep as the drafter goes."
    return f"{free} k={k} is worth drafting, and no longer one."


def _buys(batches: Sequence[BatchRow]) -> str:
    """Say where drafting pays, of the batches that fit."""
    first, last = batches[0], batches[-1]
    paying = [row for row in batches if row.best is not None]
    if not paying:
        return "Drafting pays at no batch that fits: plain decoding is faster."
    text = (
        f"At batch {first.batch} {_best(first)}"
        if first.best is not None
        else f"At batch {first.batch} no draft pays; at batch {paying[0].batch} {_best(paying[0])}"
    )
    losing = [row.batch for row in batches if row.batch > paying[-1].batch]
    if losing:
        return f"{text}. From batch {losing[0]} on no draft pays: switch speculation off there."
    return f"{text}; at batch {last.batch} {_best(last)}." if last is not first else f"{text}."


def _caches(plan: Plan) -> Iterator[str]:
    """Say where reading the caches decides, which drafts do not add to."""
    bound = [row.batch for row in plan.batches if _bound(row.plain) == "KV"]
    if bound:
        yield (
            f"From batch {bound[0]} on, reading the KV caches takes most of a step. Drafts do not "
            "add to that, which keeps them worthwhile at larger batches."
        )


def _best(row: BatchRow) -> str:
    return (
        f"drafting {row.best.label} is {row.best_speedup:.2f}x as fast as plain decoding "
        f"({row.best.expected:.2f} tokens a round)"
    )


def _reading(plan: Plan) -> str:
    one = weight_bytes(plan.target_work, 1)
    step = step_time(plan.target_work, 1, plan.machine, rows=0)
    text = f"A pass over one token reads {_size(one)} of weights in {_ms(step.weights)} ms"
    if plan.target.num_experts > 1:
        many = weight_bytes(plan.target_work, 64)
        return (
            f"{text}, one over 64 tokens {_size(many)}, as they are sent to more of the "
            f"{plan.target.num_experts} experts: verifying is never quite free. From "
            f"{plan.knee_tokens:.0f} tokens a pass on (the knee: batch times nodes verified) "
            "computing takes longer than reading."
        )
    return (
        f"{text}, and one over more tokens no more. From {plan.knee_tokens:.0f} tokens a pass on "
        "(the knee: batch times nodes verified) computing takes longer than reading, and verifying "
        "is no longer free."
    )


def _speed(plan: Plan) -> Section:
    labels = [draft.label for draft in plan.drafts]
    rows = [
        [
            str(row.batch) + (" *" if row.batch > plan.largest_batch else ""),
            *(f"{row.rounds[label].speedup:.2f}" for label in labels),
            "none" if row.best is None else row.best.label,
            f"{row.best_speedup:.2f}",
            f"{row.plain_tokens_per_s:,.0f}",
            f"{row.plain_tokens_per_s * row.best_speedup:,.0f}",
        ]
        for row in plan.batches
    ]
    lines = [
        "Under 1.00 a draft loses. best is over chains of every length and the trees shown; "
        "tokens/s are of all rows."
    ]
    if plan.batches[-1].batch > plan.largest_batch:
        lines.append(f"* does not fit the memory of {plan.hardware.name}.")
    columns = ["batch", *labels, "best", "speedup", "plain tokens/s", "best tokens/s"]
    return Section("Speedup over plain decoding at the same batch", lines, columns, rows)


def _drafts(plan: Plan) -> Section:
    rows = [
        [
            draft.label,
            str(draft.nodes),
            f"{draft.expected:.2f}",
            f"{draft.expected / draft.nodes:.2f}",
            str(knee_batch(plan.knee_tokens, draft.nodes)),
        ]
        for draft in plan.drafts
    ]
    columns = ["draft", "nodes verified", "tokens a round", "limit", "knee at batch"]
    lines = [
        "tokens a round include the bonus; they are the speedup while drafting and verifying are "
        "free. limit: what the speedup falls to far past the knee."
    ]
    return Section("Drafts", lines, columns, rows)


def _steps(plan: Plan) -> Section:
    rows = []
    for row in plan.batches:
        verify = row.best_round.verify if row.best_round is not None else None
        draft = None if row.best_round is None else row.best_round.draft
        rows.append(
            [
                str(row.batch),
                *(_ms(value) for value in vars(row.plain).values()),
                _ms(row.plain.total),
                _bound(row.plain),
                "-" if draft is None else _ms(draft),
                "-" if verify is None else _ms(verify.total),
                "-" if verify is None else _bound(verify),
            ]
        )
    columns = ["batch", "weights", "compute", "KV", "launch", "plain step", "bound by"]
    columns += ["best: draft", "best: verify", "bound by"]
    lines = [
        "A pass takes the longer of weights and compute, and KV (attention over the caches, which "
        "a longer draft leaves as it is) and launch on top."
    ]
    return Section("Where the time of a pass goes, in milliseconds", lines, columns, rows)


def _memory(plan: Plan) -> Section:
    rows = [
        [
            str(row.batch),
            *(_size(value) for name, value in vars(row).items() if name != "batch"),
            _size(row.total),
            "yes" if row.total <= plan.memory_bytes else "no",
        ]
        for row in plan.memory
    ]
    columns = ["batch", "target weights", "drafter weights", "read-out copy", "target KV"]
    columns += ["drafter KV", "logits", "total", f"fits {_size(plan.memory_bytes)}"]
    nodes = max(draft.nodes for draft in plan.drafts)
    lines = [
        f"KV of {plan.config.context} tokens a row in {plan.config.kv_dtype}; logits of {nodes} "
        "nodes a row in fp32; a draft vocabulary copies its rows of the target's read-out. Without "
        "activations and what the serving engine keeps for itself."
    ]
    return Section("Memory", lines, columns, rows)


def _training(plan: Plan) -> Section:
    made, asked = plan.training, plan.config.training
    rows = [
        ["target forward", f"{made.target_flops_per_token / 1e9:.2f} GFLOPs a token"],
        [
            f"head forth and back, {made.depths} depths",
            f"{made.head_flops_per_token / 1e9:.2f} GFLOPs a token",
        ],
        ["capturing features", f"{made.capture_tokens_per_s:,.0f} tokens/s"],
        ["training on captured features", f"{made.captured_tokens_per_s:,.0f} tokens/s"],
        ["training with the target in every step", f"{made.online_tokens_per_s:,.0f} tokens/s"],
        ["capture once and train", f"{made.captured_hours:.2f} hours"],
        ["train with the target in every step", f"{made.online_hours:.2f} hours"],
        ["features of 1000 rows", _size(made.stored_bytes_per_1000_rows)],
        [f"features of {asked.rows} rows", _size(made.stored_bytes)],
        ["head, gradients, optimizer in fp32", _size(made.trained_bytes)],
    ]
    lines = [
        f"{asked.rows} rows of {asked.row_tokens} tokens, {asked.epochs} epochs, at "
        f"{asked.utilisation:.0%} of the peak (training.utilisation). Answers are to be generated "
        "first: at the speed of plain decoding above."
    ]
    return Section("Training the head on one such device", lines, ["what", "budget"], rows)


def _rests_on(plan: Plan) -> Iterator[str]:
    target, drafter, hardware = plan.target, plan.drafter, plan.hardware
    active = (
        ""
        if target.num_experts == 1
        else f", {target.active_parameters / 1e9:.2f} B of them for a token "
        f"({target.top_k} of {target.num_experts} experts, picked evenly)"
    )
    yield (
        f"Target: {target.name}, {target.num_parameters / 1e9:.3f} B weights in "
        f"{plan.config.dtype}{active}."
    )
    yield (
        f"Drafter: {drafter.name}, {drafter.num_parameters / 1e6:.1f} M weights in "
        f"{plan.config.draft_dtype}."
    )
    yield f"Acceptance: {plan.acceptance.source}. The same at every batch and context."
    efficiency = (hardware.compute_efficiency, hardware.bandwidth_efficiency)
    source = "measured now" if hardware.measured else "the vendor's peaks"
    if efficiency != (1.0, 1.0):
        source += f", {efficiency[0]:.0%} of the products and {efficiency[1]:.0%} of the bandwidth"
    yield (
        f"Device: {hardware.name}, {plan.machine.flops / 1e12:.4g} TFLOPS in {plan.config.dtype}, "
        f"{plan.machine.bandwidth / 1e9:.4g} GB/s, {hardware.launch_us:g} us to start an operation "
        f"({source})."
    )
    if not hardware.measured and efficiency == (1.0, 1.0):
        yield (
            "Real kernels stay under the peaks and their knees come earlier: for a cautious plan "
            "set hardware.compute_efficiency=0.6 hardware.bandwidth_efficiency=0.8, and "
            "hardware.launch_us=5 for a runtime without CUDA graphs."
        )


def _bound(step: StepTime) -> str:
    """Name what takes most of a pass."""
    matrix = "weights" if step.weights >= step.compute else "compute"
    parts = {matrix: max(step.weights, step.compute), "KV": step.attention, "launch": step.launch}
    return max(parts, key=lambda name: parts[name])


def _size(count: float) -> str:
    """Write bytes in the unit that fits; '-' for none."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            value = count / scale
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}"
    return "-" if count == 0 else f"{count:.0f} B"


def _ms(seconds: float) -> str:
    """Write seconds in milliseconds; '-' for none."""
    value = 1e3 * seconds
    return "-" if value == 0 else f"{value:.{1 if value >= 10 else 2 if value >= 0.1 else 4}f}"


# plan.json


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return the whole plan as plain values: seconds, bytes, tokens."""
    target = {k: v for k, v in asdict(plan.target).items() if k not in ("shape", "windows")}
    return {
        "config": json.loads(json.dumps(asdict(plan.config))),
        "hardware": asdict(plan.hardware),
        "target": target | {"active_parameters": plan.target.active_parameters},
        "drafter": asdict(plan.drafter),
        "acceptance": asdict(plan.acceptance),
        "drafts": [asdict(draft) for draft in plan.drafts],
        "knee_tokens": plan.knee_tokens,
        "cost_ratio_c": plan.cost_ratio_c,
        "rule_depth": plan.rule_depth,
        "batches": [_batch_json(row) for row in plan.batches],
        "memory": sizes(plan.memory),
        "memory_bytes": plan.memory_bytes,
        "largest_batch": plan.largest_batch,
        "training": None if plan.training is None else asdict(plan.training),
    }


def _batch_json(row: BatchRow) -> dict[str, Any]:
    return {
        "batch": row.batch,
        "plain": asdict(row.plain) | {"total": row.plain.total},
        "plain_tokens_per_s": row.plain_tokens_per_s,
        "drafts": {
            label: {"draft": r.draft, "verify": r.verify.total, "speedup": r.speedup}
            for label, r in row.rounds.items()
        },
        "best": None if row.best is None else row.best.label,
        "best_speedup": row.best_speedup,
    }
