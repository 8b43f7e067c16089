"""What the tests of policies and of the token budget share."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from models import make_head
from torch import Tensor

from headstart.eval.engine.decode import Request, decode
from headstart.eval.engine.drafters.base import Drafter, DraftLimit, NoDrafter
from headstart.eval.engine.drafters.dynamic import DynamicHeadDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.policy import (
    AdaptivePolicy,
    DraftPolicy,
    SurvivalPolicy,
    TablePolicy,
)
from headstart.eval.engine.records import Completion, Round
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.heads.target import Target

GREEDY = SamplingConfig()
CHAIN = TreeShape.chain
TREE = TreeShape.from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
FAMILIES = ("medusa", "eagle", "eagle3", "hydra_heads")


def drafter_of(
    target: Target,
    family: str,
    shape: TreeShape | DynamicShape,
    sampling: SamplingConfig = GREEDY,
    *,
    children: str = "top_k",
    **options: Any,
) -> HeadDrafter | DynamicHeadDrafter:
    """Make a random head and its drafter; EAGLE-3 taps every state that there is."""
    if family == "eagle3":
        options = {"aux": list(range(1, target.shape.num_layers))} | options
    head = make_head(family, target, **options)
    if isinstance(shape, DynamicShape):
        return DynamicHeadDrafter(head, target.parts, shape)
    return HeadDrafter(head, target.parts, shape, sampling=sampling, children=children)


def run(
    target: Target,
    drafter: Drafter | None,
    prompts: Iterable[Request],
    *,
    policy: DraftPolicy | None = None,
    max_pass_tokens: int | None = None,
    sampling: SamplingConfig = GREEDY,
    stop_ids: Sequence[int] = (),
    batch_size: int = 4,
) -> dict[str, Completion]:
    """Decode and return the completions by prompt id."""
    done = decode(
        target,
        drafter or NoDrafter(),
        prompts,
        sampling=sampling,
        stop_ids=stop_ids,
        batch_size=batch_size,
        policy=policy,
        max_pass_tokens=max_pass_tokens,
    )
    return {completion.prompt_id: completion for completion in done}


def rounds_of(done: dict[str, Completion]) -> list[Round]:
    """Return all rounds of all rows."""
    return [r for completion in done.values() for r in completion.rounds]


class Whim(DraftPolicy):
    """A depth at random every round, nothing for a while among them: as a clock might decide."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def limit(self, rows: int, deepest: int) -> DraftLimit:
        """Draw a depth; two in five rounds draft nothing."""
        drawn = int(torch.randint(-deepest, deepest + 1, (1,), generator=self._generator))
        return DraftLimit(depth=max(0, drawn))


class Watched:
    """Passes everything on to a drafter; notes, by prompt and position, its drafts and limits."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.drafts, self.depths, self.shown = inner, {}, {}, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def observe(self, *arguments: Any, **options: Any) -> None:
        """Count the calls."""
        self.shown += 1
        self.inner.observe(*arguments, **options)

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Note a whole draft."""
        return self._noted(self.inner.propose(root_B, positions_B, keys_B), positions_B, keys_B)

    def propose_within(
        self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor, limit: DraftLimit
    ) -> DraftTree:
        """Note a limited draft."""
        tree = self.inner.propose_within(root_B, positions_B, keys_B, limit)
        places = zip(keys_B.tolist(), positions_B.tolist(), strict=True)
        self.depths |= dict.fromkeys(places, limit.depth)
        return self._noted(tree, positions_B, keys_B)

    def _noted(self, tree: DraftTree, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        places = zip(keys_B.tolist(), positions_B.tolist(), strict=True)
        self.drafts |= dict(zip(places, tree.tokens_BN.tolist(), strict=True))
        return tree


def adaptive(cost: float | None = None) -> AdaptivePolicy:
    """Make the policy that measures, with its usual memory."""
    return AdaptivePolicy(cost, memory=128, probe_every=64)


POLICIES = {
    "fixed": DraftPolicy,
    "whim": Whim,
    "table": lambda: TablePolicy([[1, 4], [2, 0], [3, 1], [4, 2]]),
    "survival": lambda: SurvivalPolicy(0.02),
    "adaptive": adaptive,
}
