"""A plan: what drafting would buy on a device, and cost, from a configuration and an acceptance.

Nothing is loaded, trained or downloaded, and nothing written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.eval.hardware import BYTES, HardwareConfig
from headstart.eval.plan_acceptance import Acceptance, acceptance, all_chains, plan_drafts
from headstart.eval.plan_costs import MemoryRow, Training, largest_batch, memory_row, plan_training
from headstart.eval.plan_drafter import PlannedDrafter, plan_draft_model, plan_head
from headstart.eval.plan_model import ModelSize, model_size
from headstart.eval.plan_settings import PlanRun
from headstart.eval.roofline import (
    Context,
    Draft,
    Machine,
    RoundTime,
    StepTime,
    Work,
    best_depth,
    draft_seconds,
    knee,
    round_time,
)


@dataclass(frozen=True)
class BatchRow:
    """Decoding at one batch: plainly, with each draft shown, and with the best chain or tree."""

    batch: int
    plain: StepTime
    rounds: dict[str, RoundTime]
    """By the draft's label."""
    best: Draft | None
    """null where nothing beats plain decoding."""
    best_round: RoundTime | None

    @property
    def plain_tokens_per_s(self) -> float:
        """Of all rows together."""
        return self.batch / self.plain.total

    @property
    def best_speedup(self) -> float:
        """1 where nothing beats plain decoding."""
        return 1.0 if self.best_round is None else self.best_round.speedup


@dataclass(frozen=True)
class Plan:
    """Everything that was predicted, and from what; times in seconds, sizes in bytes."""

    config: PlanRun
    hardware: HardwareConfig
    machine: Machine
    target: ModelSize
    target_work: Work
    context: Context
    drafter: PlannedDrafter
    acceptance: Acceptance
    drafts: list[Draft]
    knee_tokens: float
    cost_ratio_c: float
    """Drafting one token at batch 1, over a step of plain decoding."""
    rule_depth: int
    """Longest chain worth drafting while verification is free, by roofline.worth_extending."""
    batches: list[BatchRow]
    memory: list[MemoryRow]
    memory_bytes: float
    largest_batch: int
    training: Training | None
    """null for a separate draft model."""


def make_plan(config: PlanRun) -> Plan:
    """Predict; nothing is written. Raises ValueError for what does not fit together."""
    given = acceptance(config.alphas, config.alphas_from)
    target = model_size(config.model)
    drafter = _plan_drafter(config, target, len(given.accuracies))
    deepest = drafter.work.max_depth
    drafts = plan_drafts(given, config.ks, config.trees, deepest)
    hardware = config.hardware.filled(config.dtype, config.draft_dtype)
    machine, draft_machine = (hardware.machine(d) for d in (config.dtype, config.draft_dtype))
    work = target.work(BYTES[config.dtype])
    context = target.context(config.context, BYTES[config.kv_dtype])

    def round_of(draft: Draft, rows: int) -> RoundTime:
        return round_time(
            work,
            drafter.work,
            draft,
            machine,
            rows=rows,
            context=context,
            draft_machine=draft_machine,
        )

    chains = all_chains(given, deepest)
    batches = [_batch_row(batch, drafts, chains, round_of) for batch in config.batch_sizes]
    longest = chains[-1]
    cost_ratio = draft_seconds(drafter.work, longest, 1, draft_machine) / (
        len(longest.stepped) * round_of(longest, 1).plain.total
    )
    memory, fits = _plan_memory(config, target, drafter, drafts, context, hardware)
    return Plan(
        config=config,
        hardware=hardware,
        machine=machine,
        target=target,
        target_work=work,
        context=context,
        drafter=drafter,
        acceptance=given,
        drafts=drafts,
        knee_tokens=knee(work, machine),
        cost_ratio_c=cost_ratio,
        rule_depth=best_depth(given.alphas[: len(chains)], cost_ratio),
        batches=batches,
        memory=memory,
        memory_bytes=hardware.memory_gb * 1e9,
        largest_batch=fits,
        training=_plan_training(config, target, drafter, draft_machine),
    )


def _plan_drafter(config: PlanRun, target: ModelSize, depths: int) -> PlannedDrafter:
    sizes = {
        "weight_bytes": BYTES[config.draft_dtype],
        "kv_bytes": BYTES[config.kv_dtype],
        "context": config.context,
    }
    if config.draft_model is None:
        deep = max(depths, getattr(config.head, "ttt_steps", 1))
        return plan_head(config.head, target.shape, max_depth=deep, **sizes)
    model = model_size(config.draft_model, option="draft_model")
    if model.shape.vocab_size != target.shape.vocab_size:
        raise ValueError(
            f"draft_model {model.name}: vocab_size={model.shape.vocab_size}, but {target.name} has "
            f"{target.shape.vocab_size}; a draft model needs the target's own tokenizer"
        )
    return plan_draft_model(model, max_depth=depths, **sizes)


def _batch_row(
    batch: int,
    drafts: Sequence[Draft],
    chains: Sequence[Draft],
    round_of: Callable[[Draft, int], RoundTime],
) -> BatchRow:
    rounds = {draft.label: round_of(draft, batch) for draft in drafts}
    timed = [(draft, round_of(draft, batch)) for draft in (*chains, *drafts)]
    best, best_round = max(timed, key=lambda pair: pair[1].speedup)  # the first of equals
    if best_round.speedup <= 1:
        return BatchRow(batch, timed[0][1].plain, rounds, None, None)
    return BatchRow(batch, timed[0][1].plain, rounds, best, best_round)


def _plan_memory(
    config: PlanRun,
    target: ModelSize,
    drafter: PlannedDrafter,
    drafts: Sequence[Draft],
    context: Context,
    hardware: HardwareConfig,
) -> tuple[list[MemoryRow], int]:
    """Return the memory by batch, and the largest batch that fits."""
    nodes = max(draft.nodes for draft in drafts)
    one, *rows = (
        memory_row(
            batch,
            target,
            drafter,
            nodes=nodes,
            target_bytes=BYTES[config.dtype],
            draft_bytes=BYTES[config.draft_dtype],
            row_cache=context.row_bytes,
        )
        for batch in (1, *config.batch_sizes)
    )
    return rows, largest_batch(one, hardware.memory_gb * 1e9)


def _plan_training(
    config: PlanRun, target: ModelSize, drafter: PlannedDrafter, machine: Machine
) -> Training | None:
    if config.draft_model is not None:
        return None
    return plan_training(
        config.training, target, config.head, drafter, dtype=config.draft_dtype, machine=machine
    )
