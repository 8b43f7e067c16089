"""Tiny chat targets, rows and commands for the tests of data, training and the pipeline.

Shapes: B rows, T tokens, V vocabulary.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from fixtures_chat import IM_END, chat_tokenizer
from models import target_of, tiny_model
from torch import Tensor, nn

from headstart import cli
from headstart.data.template import TokenRow
from headstart.heads.base import FeatureBatch, LossSums
from headstart.heads.parts import TargetParts
from headstart.heads.target import Target

CHAT_VOCAB = 261
"""Entries of the CHAT tokenizer: five markers and the bytes."""


@cache
def chat_target(layers: int = 2) -> Target:
    """Wrap a random Llama that speaks CHAT; frozen, so one serves all tests."""
    model = tiny_model(layers=layers, vocab=CHAT_VOCAB, max_position_embeddings=2048)
    return target_of(model, chat_tokenizer(), name="tiny-chat")


@cache
def talking_target(seed: int = 0) -> Target:
    """Wrap a random Llama that, greedily, says printable ASCII and ends most answers by itself.

    Its text therefore tokenises back to the tokens it emitted.
    """
    tokenizer = chat_tokenizer()
    model = tiny_model(seed=seed, layers=2, vocab=CHAT_VOCAB, max_position_embeddings=2048)
    says = [tokenizer.convert_tokens_to_ids(chr(byte)) for byte in range(ord("!"), ord("~") + 1)]
    with torch.no_grad():
        # A logit of 0 is never the best of many; a longer row wins more often.
        silent = torch.ones(CHAT_VOCAB, dtype=torch.bool)
        silent[[*says, IM_END]] = False
        model.lm_head.weight[silent] = 0.0
        model.lm_head.weight[IM_END] *= 2.0
    return target_of(model, tokenizer, name="tiny-talking")


def save_target(directory: Path, layers: int = 2, target: Target | None = None) -> Path:
    """Write chat_target, or another, as `target=hf target.path=DIRECTORY` reads it."""
    target = target or chat_target(layers)
    target.model.save_pretrained(directory)
    target.tokenizer.save_pretrained(directory)
    return directory


def saved(directory: Path) -> list[str]:
    """Return the overrides that choose a saved target, in the type that tests compare in."""
    return ["target=hf", f"target.path={directory}", "target.dtype=float32", "target.device=cpu"]


def command(*arguments: str) -> None:
    """Run `headstart ARGUMENTS` in this process, through Hydra and all."""
    with _own_logging(), _argv(["headstart", *arguments]):
        cli.main()


@contextmanager
def _argv(argv: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, argv
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _own_logging() -> Iterator[None]:
    """Undo what Hydra does to the root logger, whose handlers the next test still needs."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        for handler in set(root.handlers) - set(handlers):
            handler.close()
        root.handlers, root.level = handlers, level
        logging.captureWarnings(False)


def token_row(row_id: str, tokens: Sequence[int], supervised_from: int) -> TokenRow:
    """Make a row whose tokens from a position on are its answer."""
    mask = [int(t >= supervised_from) for t in range(len(tokens))]
    return TokenRow(row_id, "other", list(tokens), mask, "stop")


def random_rows(count: int, *, seed: int = 0, longest: int = 24) -> list[TokenRow]:
    """Make rows of 4 to `longest` random tokens, an answer of random length in each."""
    generator = torch.Generator().manual_seed(seed)

    def below(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    rows = []
    for number in range(count):
        length = below(4, longest + 1)
        tokens = torch.randint(5, CHAT_VOCAB, (length,), generator=generator).tolist()
        rows.append(token_row(f"row-{number:03d}", tokens, below(1, length)))
    return rows


class Line(nn.Module):
    """A head of one weight w: the loss of a supervised token is w times its id."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start]))  # a dimension: FSDP2 shards no scalar

    def denominators(self, batch: FeatureBatch) -> dict[str, Tensor]:
        """Count the supervised tokens."""
        return {"line": batch.loss_mask_BT.sum()[None].float()}

    def forward(
        self,
        batch: FeatureBatch,
        parts: TargetParts,
        generator: torch.Generator | None = None,
        denominators: dict[str, Tensor] | None = None,
    ) -> LossSums:
        """Return the sum of w times the id, over supervised tokens."""
        total = (batch.tokens_BT * batch.loss_mask_BT).sum() * self.w
        return LossSums({"line": total}, {"line": torch.ones(1)})


def numbers_batch(*rows: Sequence[int], row_id: int = 0) -> FeatureBatch:
    """Make a batch of which Line's losses can be read off: id 0 is padding, all else supervised."""
    T = max(map(len, rows))
    tokens_BT = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows])
    nothing_BT = torch.zeros(len(rows), T)
    return FeatureBatch(
        tokens_BT,
        tokens_BT > 0,
        torch.arange(T).expand(len(rows), T),
        torch.where(tokens_BT > 0, 0, -1),
        torch.arange(row_id, row_id + len(rows)),
        nothing_BT[..., None],
        nothing_BT,
        nothing_BT.long(),
    )
