"""What a plan costs beside time a round: memory when serving, and the budget of training a head.

Units: bytes, seconds, FLOPs. Letters: V vocabulary, W draft vocabulary, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headstart.data.codec import Codec
from headstart.data.store_job import stored_bytes
from headstart.eval.plan_drafter import PlannedDrafter
from headstart.eval.plan_model import ModelSize
from headstart.eval.roofline import Machine
from headstart.heads.base import HeadConfig
from headstart.heads.load import DTYPES

LOGIT_BYTES = 4
"""Logits are verified in fp32."""
TRAINED_BYTES = 16
"""fp32 weights, gradients and AdamW's two moments of a trained weight."""
BACKWARD = 3
"""A pass forth and back, in passes forth."""


@dataclass(frozen=True)
class MemoryRow:
    """Bytes in use at one batch, by what they hold; weights are the same in every row."""

    batch: int
    target_weights: int
    draft_weights: int
    readout_copy: int
    """The target's read-out rows of a draft vocabulary."""
    target_cache: float
    draft_cache: float
    logits: int
    """Of the largest draft shown."""

    @property
    def total(self) -> float:
        """Bytes of all of it."""
        return sum(value for name, value in vars(self).items() if name != "batch")


def memory_row(
    batch: int,
    target: ModelSize,
    drafter: PlannedDrafter,
    *,
    nodes: int,
    target_bytes: int,
    draft_bytes: int,
    row_cache: float,
) -> MemoryRow:
    """Return the memory of serving `batch` rows of which `nodes` tokens are verified at once.

    target_bytes and draft_bytes are those of one weight, row_cache those of the target's KV cache
    for one row. Activations and the runtime's own needs are not counted.
    """
    return MemoryRow(
        batch=batch,
        target_weights=target.num_parameters * target_bytes,
        draft_weights=drafter.num_parameters * draft_bytes,
        readout_copy=drafter.readout_rows * draft_bytes,
        target_cache=batch * row_cache,
        draft_cache=batch * drafter.kv_bytes,
        logits=batch * nodes * target.shape.vocab_size * LOGIT_BYTES,
    )


def largest_batch(one: MemoryRow, memory: float) -> int:
    """Return the most rows that fit, from the row of batch 1; 0 when not even one does."""
    assert one.batch == 1
    each = one.target_cache + one.draft_cache + one.logits
    return max(0, int((memory - (one.total - each)) // each))


@dataclass
class TrainingConfig:
    """The training that a budget is wanted for."""

    rows: int = 10_000
    """Conversations."""
    row_tokens: int = 1024
    """Mean tokens of one, all of them taken as trained on."""
    epochs: int = 3
    """Times each is seen."""
    utilisation: float = 0.4
    """Fraction of the peak that training reaches; a guess that holds for large batches."""

    def __post_init__(self) -> None:
        for name in ("rows", "row_tokens", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"training.{name}={getattr(self, name)}: need at least 1")
        if not 0 < self.utilisation <= 1:
            raise ValueError(
                f"training.utilisation={self.utilisation}: expected a fraction in (0, 1]"
            )


@dataclass(frozen=True)
class Training:
    """The budget of training a head; a step of it is forth and back through every depth."""

    depths: int
    """Depths trained at once: training-time-test steps, or heads."""
    target_flops_per_token: float
    head_flops_per_token: float
    """Forth and back, over all depths, the teacher's read-out included."""
    capture_tokens_per_s: float
    captured_tokens_per_s: float
    """Of training on captured features, where the target does not run."""
    online_tokens_per_s: float
    """Of training with the target in every step."""
    captured_hours: float
    """Capturing once and training all epochs."""
    online_hours: float
    stored_bytes_per_token: int
    stored_bytes_per_1000_rows: int
    stored_bytes: int
    trained_bytes: int
    """Of the head's weights, gradients and optimizer state."""


def plan_training(
    config: TrainingConfig,
    target: ModelSize,
    head: HeadConfig,
    drafter: PlannedDrafter,
    *,
    dtype: str,
    machine: Machine,
) -> Training:
    """Return the training budget of a head on one device; attention's products are left out."""
    depths = _depths(head, drafter)
    calls = [drafter.work.first, *drafter.work.deeper][: 1 + depths - drafter.work.depths_at_once]
    forward = sum(call.flops_per_token + call.flops_per_row for call in calls)
    num_drafted = head.draft_vocab_size or target.shape.vocab_size
    teacher = 2.0 * num_drafted * target.shape.hidden_size
    head_flops = BACKWARD * forward + teacher
    target_flops = 2.0 * target.active_parameters
    rate = machine.flops * config.utilisation
    tokens = config.rows * config.row_tokens
    per_token = stored_bytes(
        Codec.of("target", DTYPES[dtype]), target.shape.hidden_size, head.taps(target.shape)
    )
    seen = tokens * config.epochs
    return Training(
        depths=depths,
        target_flops_per_token=target_flops,
        head_flops_per_token=head_flops,
        capture_tokens_per_s=rate / target_flops,
        captured_tokens_per_s=rate / head_flops,
        online_tokens_per_s=rate / (target_flops + head_flops),
        captured_hours=(tokens * target_flops + seen * head_flops) / rate / 3600,
        online_hours=seen * (target_flops + head_flops) / rate / 3600,
        stored_bytes_per_token=per_token,
        stored_bytes_per_1000_rows=per_token * 1000 * config.row_tokens,
        stored_bytes=per_token * tokens,
        trained_bytes=TRAINED_BYTES * drafter.num_parameters,
    )


def _depths(head: HeadConfig, drafter: PlannedDrafter) -> int:
    """Return the depths of one training pass: unrolled steps where the head is unrolled."""
    return getattr(head, "ttt_steps", drafter.work.max_depth)


def sizes(rows: Sequence[MemoryRow]) -> list[dict[str, Any]]:
    """Return memory as plan.json holds it."""
    return [vars(row) | {"total": row.total} for row in rows]
