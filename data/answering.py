"""Where answers come from: asks go in, answers come out in the order they finish.

Two back ends meet one protocol: our own engine, plain or drafting with a trained head (which is
lossless, so answers keep their distribution), and an OpenAI-compatible server (server.py).
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.drafters.build import head_drafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree_config import TreeConfig
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import check_pairing, load_head
from headstart.heads.target import Target

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ask(Request):
    """One turn to be answered; its prompt_id is unique among the asks of one call."""

    temperature: float = 0.0
    """Temperature of this answer; top-k and top-p are the back end's, the same for all."""


@dataclass(frozen=True)
class Answer:
    """What came back for an ask."""

    prompt_id: str
    token_ids: list[int]
    """New tokens, the stop token included where there was one."""
    stop_reason: str
    """'stop', else 'length' or 'context': the answer was cut, no stop token is there."""
    unusable: str = ""
    """Why the answer cannot be trained on; empty when it can."""


class Backend(Protocol):
    """Answers asks. Raises rather than skip one: every ask gets exactly one answer."""

    def answers(self, asks: Sequence[Ask]) -> Iterator[Answer]:
        """Answer every ask; answers come in the order they finish."""


class EngineBackend:
    """Our own decoding loop; `head` and `tree` make it draft.

    Asks of one temperature are decoded together, the coolest first. Raises ValueError for a tree
    that the head cannot draft.
    """

    def __init__(
        self,
        target: Target,
        *,
        sampling: SamplingConfig,
        stop_ids: Sequence[int],
        batch_size: int,
        head: DraftHead | None = None,
        tree: TreeConfig | None = None,
    ) -> None:
        assert (head is None) or (tree is not None), "a head drafts a tree"
        self.target, self.sampling, self.stop_ids = target, sampling, list(stop_ids)
        self.batch_size, self.head, self.tree = batch_size, head, tree
        self._drafter(sampling)  # a tree that does not fit is refused now

    def answers(self, asks: Sequence[Ask]) -> Iterator[Answer]:
        """Answer every ask; answers come in the order they finish."""
        passes = emitted = 0
        for temperature in sorted({ask.temperature for ask in asks}):
            sampling = at_temperature(self.sampling, temperature)
            for completion in decode(
                self.target,
                self._drafter(sampling),
                [ask for ask in asks if ask.temperature == temperature],
                sampling=sampling,
                stop_ids=self.stop_ids,
                batch_size=self.batch_size,
            ):
                passes += len(completion.rounds)
                emitted += sum(r.emitted for r in completion.rounds)
                yield Answer(completion.prompt_id, completion.token_ids, completion.stop_reason)
        if self.head is not None and passes:
            log.info("drafted %s: %.2f tokens a target pass", self.tree.name, emitted / passes)

    def _drafter(self, sampling: SamplingConfig) -> Drafter:
        if self.head is None:
            return NoDrafter(self.target.device)
        return head_drafter(self.head, self.target.parts, self.tree, sampling)


def head_for(path: Path, target: Target) -> DraftHead:
    """Load a head to generate with, in the target's dtype.

    A head of another target of the same shape is allowed, with a warning: whatever it drafts, the
    answers are the target's; a bad one only costs time. Raises FileNotFoundError or ValueError.
    """
    head, info = load_head(path)
    check_pairing(path, info, head, target, force=True)
    target.adopt(head)
    return head


def at_temperature(sampling: SamplingConfig, temperature: float) -> SamplingConfig:
    """Return the settings at another temperature; at 0 nothing is left for top-k and top-p."""
    if temperature == sampling.temperature:
        return sampling
    if temperature == 0:
        return replace(sampling, temperature=0.0, top_k=0, top_p=1.0)
    return replace(sampling, temperature=temperature)


def pick_temperature(
    prompt_id: str, temperatures: Sequence[float], weights: Sequence[float], *, seed: int
) -> float:
    """Return the temperature of a prompt, by a hash of its id and the seed.

    Neither the order of the prompts nor what else is asked changes it.
    """
    digest = hashlib.blake2b(json.dumps([seed, prompt_id]).encode(), digest_size=8).digest()
    left = int.from_bytes(digest, "big") / 2**64 * sum(weights)
    for temperature, weight in zip(temperatures, weights, strict=True):
        left -= weight
        if left < 0:
            return temperature
    return temperatures[-1]  # the sum of the weights rounds below its parts
