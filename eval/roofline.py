"""What drafting can buy: the yield of drafts, and a roofline of the passes that make them.

A pass takes the longer of two times, reading its weights and multiplying by them; attention over
the KV caches and the starting of operations come on top. Below the knee, verifying a draft costs
what decoding one token costs; past it, time grows with the tokens and speculation loses.
Numbers in, numbers out. Units: seconds, bytes, FLOPs (a multiply-add counts two). A pass has
`tokens` tokens over all its `rows` (sequences) together; k is the drafted tokens of a chain.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headstart.eval.tree_search import best_paths, expected_accepted, independent

# Yield


def expected_tokens(alphas: Sequence[float]) -> float:
    """Return tokens a round of a chain, bonus included: 1 + sum over d of prod of alphas[:d + 1].

    alphas[d] is alpha_cond[d], the acceptance at depth d given that all before were accepted; for k
    equal ones the sum is (1 - a^(k+1)) / (1 - a) (arXiv 2211.17192, eq. 1).
    """
    return 1.0 + sum(math.prod(alphas[: d + 1]) for d in range(len(alphas)))


def simple_speedup(alphas: Sequence[float], cost_ratio: float) -> float:
    """Return E / (1 + k c) of a chain: c is a draft step over a target step, verification free."""
    return expected_tokens(alphas) / (1.0 + len(alphas) * cost_ratio)


def worth_extending(alphas: Sequence[float], cost_ratio: float) -> bool:
    """Whether drafting the last of these depths pays: a chain of k + 1 is faster than one of k.

    That is prod(alphas) > c E / (1 + k c), with E and k of the chain without its last depth.
    """
    shorter = alphas[:-1]
    return math.prod(alphas) > cost_ratio * simple_speedup(shorter, cost_ratio)


def best_depth(alphas: Sequence[float], cost_ratio: float) -> int:
    """Return the k at which extending stops paying, at most len(alphas); 0 when it never pays."""
    k = 0
    while k < len(alphas) and worth_extending(alphas[: k + 1], cost_ratio):
        k += 1
    return k


@dataclass(frozen=True)
class Draft:
    """The shape of a draft and what it yields a round."""

    label: str
    nodes: int
    """Tokens verified a row, the root included."""
    expected: float
    """Tokens a round, the bonus included."""
    stepped: tuple[int, ...]
    """Nodes whose children are drafted, depth by depth, the root first: (1, 1, 1) of chain 3."""


def chain_draft(accuracies: Sequence[Sequence[float]], k: int) -> Draft:
    """Return the chain of k; accuracies[d][0] is alpha_cond[d]. 0 < k <= len(accuracies)."""
    assert 0 < k <= len(accuracies), f"k={k} of {len(accuracies)} depths"
    return Draft(f"k={k}", k + 1, expected_tokens([row[0] for row in accuracies[:k]]), (1,) * k)


def tree_draft(accuracies: Sequence[Sequence[float]], nodes: int) -> Draft:
    """Return the best static tree of `nodes` nodes, root included.

    accuracies[d][r] is the share of positions where rank r of depth d is right, independently of
    other depths. Raises ValueError when the accuracies know fewer nodes.
    """
    shares = independent(accuracies)
    paths = best_paths(shares, nodes - 1, len(accuracies))
    if len(paths) < nodes - 1:
        raise ValueError(
            f"a tree of {nodes} nodes, but the accuracies know {len(paths) + 1}; lower its nodes"
        )
    parents = {path[:-1] for path in paths}
    depths = range(max(map(len, paths)))
    stepped = tuple(sum(len(parent) == depth for parent in parents) for depth in depths)
    return Draft(f"tree {nodes}", nodes, 1.0 + expected_accepted(paths, shares), stepped)


# Time


@dataclass(frozen=True)
class Machine:
    """A device as a roofline sees it."""

    flops: float
    """FLOPs a second in the dtype of the products."""
    bandwidth: float
    """Bytes a second from the memory that holds the weights."""
    launch: float = 0.0
    """Seconds to start one operation."""


@dataclass(frozen=True)
class Work:
    """What a pass of a network reads and multiplies, attention over the cache left out."""

    read_bytes: float
    """Weights read by every pass; experts apart, embedding rows (looked up) not counted."""
    flops_per_token: float
    flops_per_row: float = 0.0
    """Of what is done once a row, whatever its tokens: reading out the last one."""
    expert_bytes: float = 0.0
    """Weights of all experts of all layers."""
    num_experts: int = 1
    """Experts of a layer."""
    top_k: int = 1
    """Experts a token is sent to."""
    operations: int = 0
    """Operations started one after the other."""


@dataclass(frozen=True)
class Context:
    """What attention to one row's cache costs: independent of the tokens, but for its products."""

    row_bytes: float = 0.0
    flops_per_token: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """The seconds of one pass by cause; weights and compute overlap, the others add up."""

    weights: float
    compute: float
    attention: float
    launch: float

    @property
    def total(self) -> float:
        """Seconds of the pass."""
        return max(self.weights, self.compute) + self.attention + self.launch


def touched_share(num_experts: int, top_k: int, tokens: float) -> float:
    """Return the expected share of a layer's experts that `tokens` tokens are sent to.

    1 - (1 - top_k/E)^n: every token picks its top_k of E evenly and by itself. Tokens of one text
    agree more than that, so a real pass reads a little less.
    """
    return 1.0 - (1.0 - top_k / num_experts) ** tokens


def weight_bytes(work: Work, tokens: float) -> float:
    """Return the weights that a pass over `tokens` tokens reads, in bytes."""
    return work.read_bytes + work.expert_bytes * touched_share(work.num_experts, work.top_k, tokens)


def step_time(
    work: Work, tokens: float, machine: Machine, *, rows: float, context: Context = Context()
) -> StepTime:
    """Return the time of a pass over `tokens` tokens, all rows together."""
    products = work.flops_per_token * tokens + work.flops_per_row * rows
    reading = context.row_bytes * rows / machine.bandwidth
    # A wide tree over a long context multiplies each cached row so often that products take longer.
    attending = context.flops_per_token * tokens / machine.flops
    return StepTime(
        weights=weight_bytes(work, tokens) / machine.bandwidth,
        compute=products / machine.flops,
        attention=max(reading, attending),
        launch=work.operations * machine.launch,
    )


def knee(work: Work, machine: Machine) -> float:
    """Return the tokens of a pass from which on computing takes longer than reading weights.

    For a dense model that is bytes a weight * FLOPs / (2 * bandwidth), whatever its size. Experts
    put it further out: more tokens read more of them.
    """

    def over(tokens: float) -> bool:
        step = step_time(work, tokens, machine, rows=0)
        return step.compute >= step.weights

    high = 1.0
    while not over(high):
        high *= 2
    low = 0.0
    for _ in range(60):  # a double has 53 bits
        middle = (low + high) / 2
        low, high = (low, middle) if over(middle) else (middle, high)
    return high


def knee_batch(knee_tokens: float, nodes: int) -> int:
    """Return the smallest batch whose drafts of `nodes` nodes reach the knee."""
    return math.ceil(knee_tokens / nodes)


# A round


@dataclass(frozen=True)
class DrafterWork:
    """What drafting costs: a first call a round, and one more for every depth it did not give."""

    first: Work
    deeper: tuple[Work, ...] = ()
    """The call for each further depth, in order."""
    depths_at_once: int = 1
    """Depths that the first call gives."""
    reads_verified: bool = True
    """Whether the first call reads all tokens of the last round, and not only the newest."""
    context: Context = Context()

    @property
    def max_depth(self) -> int:
        """Deepest draft these calls make."""
        return self.depths_at_once + len(self.deeper)


FREE = DrafterWork(Work(0.0, 0.0), depths_at_once=1 << 30)
"""A drafter that costs nothing: the bound of any."""


def draft_seconds(drafter: DrafterWork, draft: Draft, rows: int, machine: Machine) -> float:
    """Return the seconds of drafting one round for `rows` rows."""
    assert len(draft.stepped) <= drafter.max_depth, f"{draft.label} of {drafter.max_depth} depths"
    read = draft.expected if drafter.reads_verified else 1.0
    calls = [(drafter.first, read)]
    calls += zip(drafter.deeper, draft.stepped[drafter.depths_at_once :], strict=False)
    return sum(
        step_time(work, rows * tokens, machine, rows=rows, context=drafter.context).total
        for work, tokens in calls
    )


@dataclass(frozen=True)
class RoundTime:
    """A round of drafting and verifying beside one step of plain decoding, in seconds."""

    draft: float
    verify: StepTime
    plain: StepTime
    expected: float

    @property
    def speedup(self) -> float:
        """Tokens a second over those of plain decoding at the same batch."""
        return self.expected * self.plain.total / (self.draft + self.verify.total)


def round_time(
    target: Work,
    drafter: DrafterWork,
    draft: Draft,
    machine: Machine,
    *,
    rows: int,
    context: Context = Context(),
    draft_machine: Machine | None = None,
) -> RoundTime:
    """Return the times of a round of `rows` rows; `draft_machine` is for another dtype there."""
    return RoundTime(
        draft=draft_seconds(drafter, draft, rows, draft_machine or machine),
        verify=step_time(target, rows * draft.nodes, machine, rows=rows, context=context),
        plain=step_time(target, rows, machine, rows=rows, context=context),
        expected=draft.expected,
    )
