"""What the tests of the benchmark share: chains on CYCLE, arms, suites and a clock to move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import models
import torch
from models import target_of
from torch import Tensor

from headstart.eval.arms import Arm
from headstart.eval.bench import provenance
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.eval.result import DrafterInfo, Provenance
from headstart.eval.suites import Suite
from headstart.heads.target import Target

V = 8


def cycle(dtype: torch.dtype = torch.float32) -> Target:
    """CYCLE: after token i comes i + 1 mod 8."""
    return target_of(models.cycle().to(dtype))


def law(law_VV: Tensor, dtype: torch.dtype = torch.float32) -> Target:
    """MARKOV: the next-token distribution is the row of the last token."""
    return target_of(models.markov(law_VV.tolist()).to(dtype))


class Script(NoDrafter):
    """Drafts a chain whose token d is the root plus steps[d], mod 8: on CYCLE 1, 2, 3 is right."""

    name = "script"

    def __init__(self, steps: Sequence[int], *, on_propose: Callable[[], None] = int) -> None:
        self._shape = TreeShape.chain(len(steps))
        self.num_nodes, self.draft_calls = len(steps) + 1, len(steps)
        self._steps_K = torch.tensor(list(steps))
        self._on_propose = on_propose

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        self._on_propose()
        drafted_BK = (root_B[:, None] + self._steps_K) % V
        return self._shape.fill(torch.cat([root_B[:, None], drafted_BK], dim=1))


def arm(name: str, drafter: Drafter) -> Arm:
    tree = f"chain:{drafter.num_nodes - 1}"
    return Arm(name, drafter, DrafterInfo(name, drafter.name, tree, "a1", True), is_chain=True)


def suite(starts: Sequence[int], *, max_new_tokens: int) -> Suite:
    """One prompt of one token a start; categories even and odd."""
    requests = [Request(f"p{i}", (start,), max_new_tokens) for i, start in enumerate(starts)]
    names = ("even", "odd")
    return Suite(
        "hand", "0" * 16, requests, {r.prompt_id: names[r.token_ids[0] % 2] for r in requests}
    )


def where(target: Target, prompts: Suite) -> Provenance:
    return provenance(target, prompts, "0" * 16, {"tree": {"depth": 3}}, [0, 0])


@dataclass
class Clock:
    """Counts its own reads as milliseconds; a test may add to it."""

    now: float = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-3
        return self.now
