"""Training on the ranks of a job, in processes of their own: what every backend must agree on.

`torchrun --nproc-per-node 2 -m parallel_job KIND DIRECTORY`; without torchrun, KIND is single. Rank
0 writes DIRECTORY/KIND.json, and what it trained to DIRECTORY/KIND.pt. The others also take up what
the single process trained, which has to be there.
"""

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from models import make_head, some_vocab
from torch import Tensor
from training import CHAT_VOCAB, Line, chat_target, numbers_batch, random_rows, token_row

from headstart.data.features import OnlineFeatures
from headstart.heads.base import DraftHead, FeatureBatch, LossSums
from headstart.ranks import leave_group
from headstart.train.backends import make_parallel
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.loop import Hooks, train_head
from headstart.train.optimizer import make_optimizer
from headstart.train.parallel import Parallel
from headstart.train.step import train_step

FAMILIES: dict[str, dict[str, Any]] = {
    "medusa": {"readout": "own"},
    "eagle": {"feature_noise": 0.0},
    "eagle3": {"aux": [1], "ttt_steps": 2},
}
STEPS, WINDOW = 20, 4
"""Nine rows by fours: the last step of an epoch has one row, and rank 1 of two none."""
UNSUPERVISED = token_row("row-zzz", list(range(20, 33)), 13)
TEN = [[1 + i] * (1 + i % 3) for i in range(10)]
ROWS = [*(row for row in random_rows(30, seed=3) if row.supervised > 4)][:8] + [UNSUPERVISED]


class Losses:
    """Keeps what the loop reports."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Keep the figures of a step."""
        self.lines.append({"step": step} | figures)

    def of(self, name: str) -> list[float]:
        """Return a figure of every line that has it."""
        return [line[name] for line in self.lines if name in line]


def backend(kind: str, **options: Any) -> tuple[Parallel, TrainConfig]:
    options = {"precision": "fp32", "log_every": 1, "batch_rows": 1} | options
    config = TrainConfig(**options)
    return make_parallel(ParallelConfig(kind), config, torch.device("cpu")), config


def new_head(family: str, seed: int = 0) -> DraftHead:
    vocab = some_vocab(64, of=CHAT_VOCAB)
    return make_head(family, chat_target(), vocab=vocab, seed=seed, **FAMILIES[family])


def watched(parallel: Parallel) -> list[Any]:
    """Return a list that will hold what the loop's `prepare` returned."""
    kept, prepare = [], parallel.prepare

    def keeping(*arguments: Any) -> Any:
        kept.extend(prepare(*arguments))
        return kept

    parallel.prepare = keeping
    return kept


def trained(kind: str, world: int, family: str, state: dict[str, Any]) -> dict[str, Any]:
    """Train a head for STEPS steps; return its losses, and put what it came to into `state`."""
    parallel, config = backend(kind, max_steps=STEPS, accumulation=WINDOW // world)
    # Every rank starts from other weights: rank 0's count.
    head = new_head(family, seed=parallel.rank)
    if family == "eagle3" and world > 1:  # which must change nothing, whatever the backend
        head.recompute_activations()
    kept, losses = watched(parallel), Losses()
    names = {name: weight.shape for name, weight in head.named_parameters()}
    progress = train_head(
        head,
        OnlineFeatures(chat_target(), ROWS, head.aux_features),
        config,
        parallel=parallel,
        hooks=Hooks(lambda weights: {"held": 0.5}, lambda weights, progress: None),
        tracker=losses,
    )
    model, optimizer = kept
    weights, moments = parallel.weights(model), parallel.optimizer_state(model, optimizer)
    if parallel.is_main:
        # P32: the head's tensors, all of them and nothing else.
        assert {name: value.shape for name, value in weights.items()} == names
        assert {name: one["exp_avg"].shape for name, one in moments.items()} == names
    else:
        assert weights == moments == {}
    state[family] = {"weights": weights, "moments": moments}
    return {
        "losses": losses.of("train/loss"),
        "norms": losses.of("train/gradient_norm"),
        "counts": [progress.step, progress.rows, progress.tokens, progress.supervised_tokens],
    }


def taken_up(kind: str, world: int, family: str, state: dict[str, Any]) -> list[float]:
    """Load what a single process trained into a fresh head, and take two more steps."""
    parallel, config = backend(kind, accumulation=WINDOW // world)
    model, optimizer = parallel.prepare(
        new_head(family, seed=7), lambda head: make_optimizer(head, config)
    )
    mine = state if parallel.is_main else {"weights": {}, "moments": {}}
    parallel.load_weights(model, mine["weights"])
    parallel.load_optimizer_state(model, optimizer, mine["moments"])
    assert_equal(parallel.weights(model), mine["weights"])
    have = parallel.optimizer_state(model, optimizer)
    assert have.keys() == mine["moments"].keys()
    for name, one in have.items():
        assert_equal(one, mine["moments"][name])
    source = OnlineFeatures(chat_target(), ROWS, parallel.bare(model).aux_features)
    batches = [source.batch([row]) for row in range(WINDOW)][parallel.rank :: world]
    model.train()
    return [
        train_step(model, batches, source.parts, optimizer, parallel, lr=1e-3, clip=config.clip)[0]
        for _ in range(2)
    ]


def assert_equal(have: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert have.keys() == want.keys()
    for name, value in have.items():
        assert torch.equal(value, want[name]), name


def line_step(
    kind: str, world: int, rows: Sequence[Sequence[int]], clip: float = 10.0
) -> tuple[float, float, float]:
    """Return loss, norm and gradient of a step of SGD; row r is rank r's."""
    parallel, _ = backend(kind, accumulation=2 // world, clip=clip)
    model, sgd = parallel.prepare(Line(), lambda head: torch.optim.SGD(head.parameters(), lr=1.0))
    batches = [numbers_batch(row) for row in rows][parallel.rank :: world]
    parts = chat_target().parts
    loss, norm = train_step(model, batches, parts, sgd, parallel, lr=1.0, clip=clip)
    moved = parallel.weights(model)
    return loss, norm, 1.0 - moved["w"].item() if moved else 0.0


class Numbers:
    """A source of rows of which Line's losses can be read off."""

    parts = chat_target().parts

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.rows, self.lengths = rows, [len(row) for row in rows]

    def batch(self, indices: Sequence[int]) -> FeatureBatch:
        """Return the rows."""
        return numbers_batch(*(self.rows[i] for i in indices), row_id=indices[0])


def line_run(parallel: Parallel, config: TrainConfig, head: Line, rows: Any) -> list[float]:
    """Train on rows and return the losses."""
    hooks, losses = Hooks(lambda weights: {}, lambda weights, progress: None), Losses()
    train_head(head, Numbers(rows), config, parallel=parallel, hooks=hooks, tracker=losses)
    return losses.of("train/loss")


def ten_rows(kind: str, world: int) -> list[float]:
    """P26: ten micro-batches by fours."""
    parallel, config = backend(kind, max_steps=3, accumulation=WINDOW // world, lr=1e-12)
    return line_run(parallel, config, Line(), TEN)


class Multiplying(Line):
    """Takes note of the type that matrices are multiplied in."""

    def forward(self, *arguments: Any) -> LossSums:
        """Multiply, and go on."""
        self.dtype = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        return super().forward(*arguments)


def line_in_bf16(kind: str, world: int) -> list[Any]:
    """P28: a hundred small steps under bf16 autocast, and after loading a hundred more."""
    weights, moments, seen = {"w": torch.ones(1)}, None, []
    for _ in range(2):
        parallel, _ = backend(kind, precision="bf16", accumulation=2 // world)
        model, optimizer = parallel.prepare(
            Multiplying(),
            lambda head: torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.0),
        )
        parallel.load_weights(model, weights)
        if moments is not None:
            parallel.load_optimizer_state(model, optimizer, moments)
        batches = [numbers_batch([1]), numbers_batch([1])][parallel.rank :: world]
        for _ in range(100):
            train_step(model, batches, chat_target().parts, optimizer, parallel, lr=1e-3, clip=1.0)
        weights, moments = parallel.weights(model), parallel.optimizer_state(model, optimizer)
        seen.append(weights["w"].item() if parallel.is_main else 0.0)
    return [*seen, str(parallel.bare(model).dtype)]


def uneven(kind: str, world: int) -> list[float]:
    """P30: rows of 8 and 2000 tokens; return the losses of two steps, and the seconds."""
    parallel, config = backend(kind, accumulation=2 // world)
    rows = [token_row("a", list(range(20, 28)), 4), token_row("b", list(range(20, 220)) * 10, 1990)]
    head = new_head("eagle")
    source = OnlineFeatures(chat_target(), rows, head.aux_features)
    model, optimizer = parallel.prepare(head, lambda bare: make_optimizer(bare, config))
    batches = [source.batch([row]) for row in range(2)][parallel.rank :: world]
    model.train()
    start = time.perf_counter()
    losses = [
        train_step(model, batches, source.parts, optimizer, parallel, lr=1e-3, clip=1.0)[0]
        for _ in range(2)
    ]
    return [*losses, time.perf_counter() - start]


class Drawing(Line):
    """Takes note of what it draws."""

    def forward(self, *arguments: Any) -> LossSums:
        """Draw a number, and go on."""
        self.drawn = torch.rand((), generator=arguments[2]).item()
        return super().forward(*arguments)


def noise(kind: str) -> list[float]:
    """Return the number that every rank's noise generator draws first in a run."""
    parallel, config = backend(kind, max_steps=1)
    head = Drawing()
    line_run(parallel, config, head, [[1], [1]])
    return parallel.gather(head.drawn)


def target_hash() -> str:
    digest = hashlib.sha256()
    for name, value in sorted(chat_target().model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def main(kind: str, directory: Path) -> None:
    """Run everything and write what came of it."""
    torch.set_num_threads(1)
    before = target_hash()  # loaded before any backend is made
    parallel, _ = backend(kind)
    world, state = parallel.world, {}
    found: dict[str, Any] = {"world": world}
    found |= {family: trained(kind, world, family, state) for family in FAMILIES}
    if kind == "single":
        torch.save(state, directory / "single.pt")
    single = torch.load(directory / "single.pt")
    for family in FAMILIES:
        found[family]["taken up"] = taken_up(kind, world, family, single[family])
    parts: dict[str, Callable[[], Any]] = {
        "line": lambda: line_step(kind, world, [[4], [1, 1, 1]]),
        "line, clipped": lambda: line_step(kind, world, [[4], [1, 1, 1]], clip=0.5),
        "line, masked": lambda: line_step(kind, world, [[3], [0, 0]]),
        "ten rows": lambda: ten_rows(kind, world),
        "line in bf16": lambda: line_in_bf16(kind, world),
        "uneven": lambda: uneven(kind, world),
        "noise": lambda: noise(kind),
    }
    found |= {name: part() for name, part in parts.items()}
    model = chat_target().model
    assert target_hash() == before, "P32: the target was changed"
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    found["target's read-out"] = list(model.lm_head.weight.shape)
    if parallel.is_main:
        (directory / f"{kind}.json").write_text(json.dumps(found))
        torch.save(state, directory / f"{kind}.pt")
    leave_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
