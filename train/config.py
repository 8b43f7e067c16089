"""How a head is trained."""

from dataclasses import dataclass, field

from headstart.train.best import BEST_BY

PRECISIONS = ("bf16", "fp32")
OPTIMIZERS = ("adamw", "muon")
KINDS = ("single", "ddp", "fsdp2", "zero1", "zero2", "zero3", "from_env")


@dataclass
class ParallelConfig:
    """How the ranks of a job train one head; the target is never wrapped."""

    kind: str = "single"
    """single: one process; ddp: a whole head on every rank; fsdp2: weights, gradients and optimizer
    state in parts, by torch; zero1, zero2, zero3: optimizer state, gradients too, weights too in
    parts, by DeepSpeed; from_env: what `accelerate launch` was configured for."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"parallel.kind={self.kind}: expected one of {', '.join(KINDS)}")


@dataclass
class TrainConfig:
    """Optimisation, budget and what happens along the way."""

    optimizer: str = "adamw"
    """adamw, or muon: Muon for the matrices inside the head, AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate, of both optimizers."""
    weight_decay: float = 0.1
    """Weight decay, of both optimizers."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW moment decays."""
    warmup: float = 0.05
    """Fraction of the run in which the rate rises linearly."""
    decay: float = 0.8
    """Fraction at the end in which the rate falls linearly to zero; between, it is constant."""
    clip: float = 1.0
    """Largest global gradient norm."""
    ema: float | None = None
    """Decay of an average of the weights, such as 0.999, which is then evaluated and saved in their
    place; null keeps none."""
    batch_rows: int = 4
    """Rows a micro-batch, on average: long rows share one with fewer, short ones with more."""
    accumulation: int = 1
    """Micro-batches an optimizer step."""
    pack_tokens: int | None = None
    """Tokens of a packed row, in which short rows lie end to end; batch_rows then counts packed
    rows. null pads rows of like length instead."""
    max_steps: int | None = 1000
    """Optimizer steps; null when only time bounds the run."""
    max_seconds: float | None = None
    """Seconds of training, evaluation and saving not counted; null when only steps bound it. Where
    a clock sets the learning rate, no two runs are alike to the bit, resumed or not."""
    precision: str = "bf16"
    """bf16: autocast over fp32 master weights; fp32: everything in fp32."""
    features: str = "captured"
    """captured: the target runs once over all rows; online: in every step."""
    workers: int = 1
    """Threads that read captured features ahead; 0, or features=online: read in the step."""
    eval_every: int = 0
    """Optimizer steps between held-out evaluations; 0 evaluates at the end only."""
    eval_rows: int = 64
    """Held-out rows of the held-out loss."""
    eval_prompts: int = 4
    """Held-out prompts decoded by the real verifier for tau; 0 skips it."""
    eval_new_tokens: int = 48
    """Tokens decoded a prompt."""
    best_metric: str = "tau"
    """Whose best evaluation is kept as OUT/best: tau of the real verifier, tau_predicted by teacher
    forcing, or loss, all held out."""
    activation_checkpointing: bool = False
    """Compute a decoder layer's activations again in the backward pass instead of keeping them."""
    save_every: int = 0
    """Optimizer steps between checkpoints; 0 saves at the end (and when interrupted)."""
    keep_last: int = 2
    """Newest training checkpoints that are kept, beside the best one."""
    resume: str = "never"
    """auto: go on from the newest whole training checkpoint in out, if there is one; never: refuse
    an out that holds one; or the directory of a training checkpoint."""
    log_every: int = 10
    """Optimizer steps between lines of metrics.jsonl; each takes a pass forth of its own, for the
    acceptance by depth that teacher forcing predicts."""
    peak_tflops: float | None = None
    """Peak of one device in 10^12 FLOPs a second, for the use made of it (MFU); null takes it from
    conf/hardware where the device is known."""
    seed: int = 0
    """Seed of initial weights, order of rows and noise."""

    def __post_init__(self) -> None:
        _positive(self, "lr", "clip", "batch_rows", "accumulation", "log_every")
        _positive(self, "eval_rows", "eval_new_tokens", "keep_last")
        if self.pack_tokens is not None:
            _positive(self, "pack_tokens")
        _not_negative(self, "workers")
        _not_negative(
            self, "weight_decay", "eval_every", "save_every", "eval_prompts", "warmup", "decay"
        )
        if self.warmup + self.decay > 1:
            raise ValueError(
                f"train.warmup={self.warmup} and train.decay={self.decay} add up to more than 1; "
                "lower one"
            )
        if self.max_steps is None and self.max_seconds is None:
            raise ValueError("train.max_steps=null and train.max_seconds=null: set one of them")
        for name in ("max_steps", "max_seconds"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"train.{name}={value}: need more than 0")
        if self.precision not in PRECISIONS:
            raise ValueError(f"train.precision={self.precision}: expected bf16 or fp32")
        if self.features not in ("captured", "online"):
            raise ValueError(f"train.features={self.features}: expected captured or online")
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(f"train.optimizer={self.optimizer}: expected adamw or muon")
        if self.best_metric not in BEST_BY:
            raise ValueError(
                f"train.best_metric={self.best_metric}: expected one of {', '.join(BEST_BY)}"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"train.ema={self.ema}: expected a decay in (0, 1), or null")
        if self.peak_tflops is not None:
            _positive(self, "peak_tflops")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"train.betas={self.betas}: expected two numbers in [0, 1)")


def _positive(config: TrainConfig, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"train.{name}={getattr(config, name)}: need more than 0")


def _not_negative(config: TrainConfig, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= 0:
            raise ValueError(f"train.{name}={getattr(config, name)}: need 0 or more")


def rate(progress: float, config: TrainConfig) -> float:
    """Return the learning rate at `progress` in [0, 1]: warm-up, stable, linear decay to zero."""
    rising = 1.0 if config.warmup == 0 else min(1.0, progress / config.warmup)
    falling = 1.0 if config.decay == 0 else min(1.0, (1 - progress) / config.decay)
    return config.lr * max(0.0, min(rising, falling))
