"""The decoding loop, for every drafter and for none: draft, target pass, verify, keep, observe.

B rows go in lockstep; the last row takes the place of a finished one, and the next prompt joins at
the end. One host synchronisation a round, and more where a policy or a budget cuts drafts or a
drafter works on the host.
Shapes: B rows, N tree nodes, V target vocabulary, K path nodes.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from headstart.eval.engine.drafters.base import Drafter
from headstart.eval.engine.drafting import Drafting
from headstart.eval.engine.places import places
from headstart.eval.engine.policy import DraftPolicy
from headstart.eval.engine.prefill import Prefill
from headstart.eval.engine.records import Completion, Round
from headstart.eval.engine.rows import Request as Request
from headstart.eval.engine.rows import Row, check_request
from headstart.eval.engine.sampling import (
    ACCEPT,
    VERIFY,
    SamplingConfig,
    best_ids,
    processed_probs,
    uniforms,
)
from headstart.eval.engine.tree import DraftTree
from headstart.eval.engine.verify import Verdict, verify_draw, verify_greedy, verify_ratio
from headstart.heads.target import Target, pick_features


@torch.no_grad()
def decode(
    target: Target,
    drafter: Drafter,
    requests: Iterable[Request],
    *,
    sampling: SamplingConfig,
    stop_ids: Iterable[int],
    batch_size: int = 1,
    max_len: int | None = None,
    policy: DraftPolicy | None = None,
    max_pass_tokens: int | None = None,
) -> Iterator[Completion]:
    """Continue every request; completions come in the order they finish.

    max_len bounds prompt and answer together, in tokens (default and at most: the target's own
    context). A policy says how deep each round drafts (default: as deep as the drafter goes), and
    learns from the rounds. max_pass_tokens bounds the tokens that one pass of the target reads:
    drafts get shorter, and prompts are read in passes of their own between rounds. Raises
    ValueError that names a prompt that is empty or leaves no room, and for a bound below the rows.
    """
    requests = list(requests)
    context = min(max_len or target.shape.max_positions, target.shape.max_positions)
    for request in requests:
        check_request(request, context)
    if not requests:
        return
    longest = max(min(context, len(r.token_ids) + r.max_new_tokens) for r in requests)
    batch_size = min(batch_size, len(requests))
    _check_budget(max_pass_tokens, batch_size)
    loop = _Loop(target, drafter, sampling, frozenset(stop_ids), batch_size, context)
    loop.begin(longest, policy or DraftPolicy(), max_pass_tokens)
    queue = deque(requests)
    while queue or loop.rows or loop.prefill.num_rows:
        yield from loop.refill(queue)
        if loop.rows:
            yield from loop.round()


class _Loop:
    """What the rounds of one run share."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        sampling: SamplingConfig,
        stop_ids: frozenset[int],
        batch_size: int,
        context: int,
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.stop_ids, self.batch_size, self.context = stop_ids, batch_size, context
        self.rows: list[Row] = []
        self._clock = _clock_of(target.device)

    def begin(self, longest: int, policy: DraftPolicy, max_pass_tokens: int | None) -> None:
        """Make room for rows of up to `longest` tokens."""
        target, drafter, clock = self.target, self.drafter, self._clock
        self.drafting = Drafting(drafter, policy, clock, target.device, max_pass_tokens)
        self.cache = target.new_cache(self.batch_size, longest, drafter.num_nodes)
        drafter.start(self.batch_size, longest)
        self.max_pass_tokens = max_pass_tokens
        self.began: float | None = None
        self.prefill = Prefill(
            target, drafter, self.cache, self.sampling, self.stop_ids, clock, max_pass_tokens
        )

    def refill(self, queue: deque[Request]) -> Iterator[Completion]:
        """Admit waiting prompts and read them; some may end right there.

        All of them before the next round, or one pass of them where a pass is bounded.
        """
        self._admit(queue)
        while self.prefill.num_rows:
            for slot, row in self.prefill.step(len(self.rows)):
                self._join(slot, row)
            yield from self._retire()
            if self.max_pass_tokens is not None:
                return
            self._admit(queue)

    def _admit(self, queue: deque[Request]) -> None:
        """Give free rows to the prompts that wait.

        A prefill of one prompt costs a large batch more than a few rows that stay empty for some
        rounds, so an eighth of the rows must be free.
        """
        free = self.batch_size - len(self.rows) - self.prefill.num_rows
        if queue and free > 0 and (free >= self.batch_size / 8 or not self.rows):
            now = self._clock()
            self.began = now if self.began is None else self.began
            fresh = [queue.popleft() for _ in range(min(free, len(queue)))]
            rows = [Row.admit(request, self.context, now) for request in fresh]
            for row in rows:
                row.completion.waited = now - self.began
            self.prefill.add(rows)

    def _join(self, slot: int, row: Row) -> None:
        """Let a row whose prompt was read into a slot run behind the others."""
        self._move(slot, len(self.rows))
        self.rows.append(row)

    def round(self) -> Iterator[Completion]:
        """Draft, verify in one target pass, keep what was accepted, and show it to the drafter."""
        rows, clock = self.rows, self._clock
        t0 = clock()
        positions_B = self._tensor(self.cache.lengths[: len(rows)])
        keys_B = self._tensor([row.key for row in rows])
        root_B = self._tensor([row.root for row in rows])
        tree = self.drafting.draft(rows, root_B, positions_B, keys_B)
        t1 = clock()
        output = self.target.pass_over(
            tree.tokens_BN, tree.depth_BN, tree.ancestors_BNN, self.cache, taps=self.drafter.taps
        )
        logits_BNV = self.target.readout(output.hidden_BTD)
        t2 = clock()
        verdict = self._verify(tree, logits_BNV, keys_B, positions_B)
        paths, new_tokens = self._commit(tree, verdict)
        if not all(row.finished for row in rows):
            features_BNF = pick_features(output.hidden_BTD, output.aux, self.drafter.taps)
            self.drafting.show(rows, features_BNF, paths, new_tokens)
        t3 = clock()
        for row in rows:
            last = row.completion.rounds[-1]
            last.t_draft, last.t_verify, last.t_commit = t1 - t0, t2 - t1, t3 - t2
        self.drafting.learn(rows, t3 - t0)
        yield from self._retire()

    def _verify(
        self, tree: DraftTree, logits_BNV: Tensor, keys_B: Tensor, positions_B: Tensor
    ) -> Verdict:
        if self.sampling.temperature == 0:
            return verify_greedy(tree, best_ids(logits_BNV))
        probs_BNV = processed_probs(logits_BNV, self.sampling)
        # The token decided at a node stands one position after it.
        decided_BN = positions_B[:, None] + tree.depth_BN + 1
        seed = self.sampling.seed
        final_BN = uniforms(seed, keys_B, decided_BN, VERIFY)
        if tree.draft_probs_BNV is None:
            return verify_draw(tree, probs_BNV, final_BN)
        tries_C = torch.arange(tree.children_BNC.shape[2], device=keys_B.device)
        accept_BNC = uniforms(seed, keys_B, decided_BN[..., None], ACCEPT, tries_C)
        return verify_ratio(tree, probs_BNV, accept_BNC, final_BN, replacement=False)

    def _commit(self, tree: DraftTree, verdict: Verdict) -> tuple[list[list[int]], list[list[int]]]:
        """Read the verdict (the round's one synchronisation), keep cache rows, emit tokens."""
        columns = (
            verdict.path_BK,
            tree.tokens_BN.gather(1, verdict.path_BK.clamp(min=0)),
            verdict.next_B[:, None],
            tree.num_drafted_B[:, None],
            tree.depth_max_B[:, None],
            verdict.stopped_at_leaf_B[:, None],
            *places(tree, verdict.path_BK),
        )
        width = verdict.path_BK.shape[1]
        paths, new_tokens = [], []
        for row, values in zip(self.rows, torch.cat(columns, dim=1).tolist(), strict=True):
            path = [node for node in values[:width] if node >= 0]
            tokens = [*values[width + 1 : width + len(path)], values[2 * width]]
            emitted = row.emit(tokens, self.stop_ids)
            drafted, depth, leaf, *walk = values[2 * width + 1 :]
            stop = "cut" if emitted < len(tokens) else "leaf" if leaf else "rejected"
            accepted = min(emitted, len(tokens) - 1)
            counts = (accepted, emitted, drafted, depth, drafted + 1)
            walked = {
                "places": walk[1 : accepted + 1],
                "offered": walk[width : width + accepted + (stop != "cut")],
            }
            row.completion.rounds.append(Round(*counts, stop, rows=len(self.rows), **walked))
            paths.append(path)
            new_tokens.append(tokens)
        self.cache.keep(paths)
        return paths, new_tokens

    def _retire(self) -> Iterator[Completion]:
        """Hand out finished rows; the last row moves into the place of each."""
        done = [i for i, row in enumerate(self.rows) if row.finished]
        for index in done:
            self.drafter.finish(index, self.rows[index].tokens)
        now = self._clock()
        for index in done:
            row = self.rows[index]
            row.completion.token_ids, row.completion.seconds = row.tokens, now - row.started
            yield row.completion
        for index in reversed(done):
            last = self.rows.pop()
            if index < len(self.rows):
                self._move(len(self.rows), index)
                self.rows[index] = last

    def _move(self, source: int, destination: int) -> None:
        if source != destination:
            self.cache.move_row(source, destination)
            self.drafter.move_row(source, destination)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)


def _clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock that waits for the device.

    No method of the loop, which would then hold itself: its cache is free as soon as it is done.
    """

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def _check_budget(max_pass_tokens: int | None, batch_size: int) -> None:
    if max_pass_tokens is not None and max_pass_tokens < batch_size:
        raise ValueError(
            f"max_pass_tokens={max_pass_tokens}: a batch of {batch_size} rows verifies at least "
            "one token a row and pass; raise it or lower the batch size"
        )
