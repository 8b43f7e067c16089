"""The decoding loop, for every drafter and for none: draft, target pass, verify, keep, observe.

B rows go in lockstep; the last row takes the place of a finished one, and the next prompt joins at
the end. One host synchronisation a round.
Shapes: B rows, R rows of a prefill, P prompt tokens, N tree nodes, M verified pairs, D width, F
features a position that the drafter reads.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.eval.engine.drafters.base import Drafter
from headstart.eval.engine.places import places
from headstart.eval.engine.records import Completion, Round
from headstart.eval.engine.sampling import (
    ACCEPT,
    VERIFY,
    SamplingConfig,
    best_ids,
    draw,
    processed_probs,
    prompt_key,
    uniforms,
)
from headstart.eval.engine.tree import DraftTree
from headstart.eval.engine.verify import Verdict, verify_draw, verify_greedy, verify_ratio
from headstart.heads.target import Target, TargetOutput, pick_features

PREFILL_CHUNK = 512  # prompt tokens a pass: bounds the mask at chunk x context


@dataclass(frozen=True)
class Request:
    """One prompt to be continued."""

    prompt_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass
class _Row:
    """A request in flight."""

    request: Request
    limit: int
    started: float
    completion: Completion
    key: int
    root: int = -1
    finished: bool = False
    tokens: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """Tokens that may still be drafted before the bonus token fills the limit."""
        return self.limit - len(self.tokens) - 1


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
) -> Iterator[Completion]:
    """Continue every request; completions come in the order they finish.

    max_len bounds prompt and answer together, in tokens (default and at most: the target's own
    context). Raises ValueError that names a prompt that is empty or leaves no room.
    """
    requests = list(requests)
    context = min(max_len or target.shape.max_positions, target.shape.max_positions)
    for request in requests:
        _check(request, context)
    if not requests:
        return
    longest = max(min(context, len(r.token_ids) + r.max_new_tokens) for r in requests)
    batch_size = min(batch_size, len(requests))
    loop = _Loop(target, drafter, sampling, frozenset(stop_ids), batch_size, context, longest)
    queue = deque(requests)
    while queue or loop.rows:
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
        longest: int,
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.stop_ids, self.batch_size, self.context = stop_ids, batch_size, context
        self.cache = target.new_cache(batch_size, longest, drafter.num_nodes)
        drafter.start(batch_size, longest)
        self.rows: list[_Row] = []

    def refill(self, queue: deque[Request]) -> Iterator[Completion]:
        """Prefill waiting prompts, once enough rows are free, until the batch is full.

        Some may end right there. A prefill of one prompt costs a large batch more than a few rows
        that stay empty for some rounds, so an eighth of the rows must be free.
        """
        if self.rows and self.batch_size - len(self.rows) < self.batch_size / 8:
            return
        while queue and len(self.rows) < self.batch_size:
            start, first = self._clock(), len(self.rows)
            fresh = list(range(first, min(self.batch_size, first + len(queue))))
            for index in fresh:
                self.rows.append(self._admit(queue.popleft(), start))
                self.cache.reset(index)
                self.drafter.begin(index, self.rows[index].request.token_ids[0])
            for group in self._of_like_length(fresh):
                self._prefill(group, self._clock())
            yield from self._retire()

    def _of_like_length(self, fresh: list[int]) -> list[list[int]]:
        """Split rows into groups whose padding is at most a third of their prompts."""
        lengths = {index: len(self.rows[index].request.token_ids) for index in fresh}
        groups: list[list[int]] = [[]]
        for index in sorted(fresh, key=lambda i: lengths[i]):  # the newest is the longest
            group = groups[-1]
            real = sum(lengths[i] for i in group) + lengths[index]
            if 3 * (len(group) + 1) * lengths[index] > 4 * real:
                groups.append([])
            groups[-1].append(index)
        return groups

    def _admit(self, request: Request, start: float) -> _Row:
        limit = min(request.max_new_tokens, self.context - len(request.token_ids))
        reason = "length" if limit == request.max_new_tokens else "context"
        completion = Completion(request.prompt_id, [], reason)
        return _Row(request, limit, start, completion, prompt_key(request.prompt_id))

    def _prefill(self, fresh: list[int], start: float) -> None:
        """Run the prompts of these rows through the target and pick their first tokens."""
        prompts = [self.rows[i].request.token_ids for i in fresh]
        hidden_RPD, features_RPF = self._prefill_passes(prompts, fresh)
        ends = torch.tensor([len(p) for p in prompts], device=self.target.device)
        last_RD = hidden_RPD[torch.arange(len(fresh), device=ends.device), ends - 1]
        keys_R = self._tensor([self.rows[i].key for i in fresh])
        first = self._pick(self.target.readout(last_RD), keys_R, ends).tolist()
        for index, token in zip(fresh, first, strict=True):
            self._emit(self.rows[index], [token])
        if not all(self.rows[i].finished for i in fresh):
            shifted = [[*p[1:], t] for p, t in zip(prompts, first, strict=True)]
            tokens_RP = self._padded(shifted)
            for chunk in range(0, tokens_RP.shape[1], PREFILL_CHUNK):
                part = slice(chunk, chunk + PREFILL_CHUNK)
                self._observe_chunk(
                    tokens_RP[:, part], features_RPF[:, part], prompts, fresh, chunk
                )
        seconds = (self._clock() - start) / len(fresh)
        for index in fresh:
            self.rows[index].completion.prefill_seconds = seconds

    def _prefill_passes(
        self, prompts: list[tuple[int, ...]], fresh: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Return the last states and what the drafter reads, which is often the same."""
        tokens_RP = self._padded(prompts)
        hidden, features = [], []
        for chunk in range(0, tokens_RP.shape[1], PREFILL_CHUNK):
            # A row that is already complete runs along on padding, which is never committed.
            part_RC = tokens_RP[:, chunk : chunk + PREFILL_CHUNK]
            R, C = part_RC.shape
            depth_RC = torch.arange(C, device=part_RC.device).expand(R, C)
            causal_CC = torch.ones(C, C, dtype=torch.bool, device=part_RC.device).tril()
            output = self.target.pass_over(
                part_RC,
                depth_RC,
                causal_CC.expand(R, C, C),
                self.cache,
                rows=fresh,
                taps=self.drafter.taps,
            )
            self.cache.advance([min(C, max(0, len(p) - chunk)) for p in prompts], rows=fresh)
            hidden.append(output.hidden_BTD)
            features.append(self._features(output))
        hidden_RPD = torch.cat(hidden, dim=1)
        return hidden_RPD, torch.cat(features, dim=1) if self.drafter.taps else hidden_RPD

    def _features(self, output: TargetOutput) -> Tensor:
        return pick_features(output.hidden_BTD, output.aux, self.drafter.taps)

    def _observe_chunk(
        self,
        tokens_RC: Tensor,
        features_RCF: Tensor,
        prompts: list[tuple[int, ...]],
        fresh: list[int],
        chunk: int,
    ) -> None:
        counts = [min(tokens_RC.shape[1], len(p) - chunk) for p in prompts]
        active = [i for i, count in enumerate(counts) if count > 0]
        self.drafter.observe(
            tokens_RC[active],
            features_RCF[active],
            [counts[i] for i in active],
            rows=[fresh[i] for i in active],
        )

    def round(self) -> Iterator[Completion]:
        """Draft, verify in one target pass, keep what was accepted, and show it to the drafter."""
        rows, clock = self.rows, self._clock
        t0 = clock()
        positions_B = self._tensor(self.cache.lengths[: len(rows)])
        keys_B = self._tensor([row.key for row in rows])
        root_B = self._tensor([row.root for row in rows])
        tree = self.drafter.propose(root_B, positions_B, keys_B)
        tree = tree.limit_depth(self._tensor([row.room for row in rows]))
        t1 = clock()
        output = self.target.pass_over(
            tree.tokens_BN, tree.depth_BN, tree.ancestors_BNN, self.cache, taps=self.drafter.taps
        )
        logits_BNV = self.target.readout(output.hidden_BTD)
        t2 = clock()
        verdict = self._verify(tree, logits_BNV, keys_B, positions_B)
        paths, new_tokens = self._commit(tree, verdict)
        if not all(row.finished for row in rows):
            self._observe(self._features(output), paths, new_tokens)
        t3 = clock()
        for row in rows:
            last = row.completion.rounds[-1]
            last.t_draft, last.t_verify, last.t_commit = t1 - t0, t2 - t1, t3 - t2
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
            emitted = self._emit(row, tokens)
            drafted, depth, leaf, *walk = values[2 * width + 1 :]
            stop = "cut" if emitted < len(tokens) else "leaf" if leaf else "rejected"
            accepted = min(emitted, len(tokens) - 1)
            walked = {
                "places": walk[1 : accepted + 1],
                "offered": walk[width : width + accepted + (stop != "cut")],
            }
            row.completion.rounds.append(
                Round(accepted, emitted, drafted, depth, drafted + 1, stop, **walked)
            )
            paths.append(path)
            new_tokens.append(tokens)
        self.cache.keep(paths)
        return paths, new_tokens

    def _observe(
        self, features_BNF: Tensor, paths: list[list[int]], new_tokens: list[list[int]]
    ) -> None:
        path_BM = self._padded(paths)
        index = path_BM[..., None].expand(-1, -1, features_BNF.shape[2])
        self.drafter.observe(
            self._padded(new_tokens), features_BNF.gather(1, index), [len(p) for p in paths]
        )

    def _emit(self, row: _Row, tokens: list[int]) -> int:
        """Add tokens up to a stop token or the limit; return how many were kept."""
        if tokens[-1] < 0:
            raise RuntimeError(
                f"prompt {row.request.prompt_id}: the target's logits are not finite at token "
                f"{len(row.tokens)}"
            )
        row.root = tokens[-1]
        for count, token in enumerate(tokens, start=1):
            row.tokens.append(token)
            if token in self.stop_ids:
                row.completion.stop_reason = "stop"
                row.finished = True
                return count
        row.finished = len(row.tokens) >= row.limit
        return len(tokens)

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
                self.cache.move_row(len(self.rows), index)
                self.drafter.move_row(len(self.rows), index)
                self.rows[index] = last

    def _pick(self, logits_BV: Tensor, keys_B: Tensor, positions_B: Tensor) -> Tensor:
        """Pick the token at these absolute positions from the processed distribution."""
        if self.sampling.temperature == 0:
            return best_ids(logits_BV)
        uniform_B = uniforms(self.sampling.seed, keys_B, positions_B, VERIFY)
        return draw(processed_probs(logits_BV, self.sampling), uniform_B)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.target.device)

    def _padded(self, lists: Iterable[Iterable[int]]) -> Tensor:
        """Right-pad lists of ids with 0; padding is masked or not committed, never read."""
        lists = [list(values) for values in lists]
        width = max(len(values) for values in lists)
        return self._tensor([values + [0] * (width - len(values)) for values in lists])

    def _clock(self) -> float:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)
        return time.perf_counter()


def _check(request: Request, context: int) -> None:
    length = len(request.token_ids)
    if length == 0:
        raise ValueError(f"prompt {request.prompt_id}: no tokens; remove the row")
    if request.max_new_tokens < 1:
        raise ValueError(
            f"prompt {request.prompt_id}: max_new_tokens={request.max_new_tokens}: need at least 1"
        )
    if length >= context:
        raise ValueError(
            f"prompt {request.prompt_id}: {length} tokens leave no room in a context of {context}; "
            "shorten the prompt or raise the limit"
        )
