"""Prefill: prompts are read into their rows of the caches, pass by pass, and yield a first token.

Shapes: R rows of a prefill, P prompt tokens, C tokens of one pass (padding included), D width, F
features a position that the drafter reads.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.eval.engine.drafters.base import Drafter
from headstart.eval.engine.rows import Row, padded
from headstart.eval.engine.sampling import (
    VERIFY,
    SamplingConfig,
    best_ids,
    draw,
    processed_probs,
    uniforms,
)
from headstart.heads.cache import KVCache
from headstart.heads.target import Target, pick_features

PREFILL_CHUNK = 512  # prompt tokens a pass: bounds the mask at chunk x context


@dataclass
class _Group:
    """Rows whose prompts are read together, right-padded to the longest."""

    rows: list[Row]
    chunk: int
    """C, prompt tokens of each row a pass."""
    tokens_RP: Tensor
    slots: list[int] = field(default_factory=list)
    """The caches' rows they are read into, once they have begun."""
    read: int = 0

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [row.request.token_ids for row in self.rows]

    @property
    def num_passes(self) -> int:
        return -(-self.tokens_RP.shape[1] // self.chunk)


class Prefill:
    """Reads the prompts of admitted rows, a pass a call.

    With max_pass_tokens a pass reads at most that many tokens of all its rows together, and the
    caller decodes other rows between two passes; without, PREFILL_CHUNK tokens of each row.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        cache: KVCache,
        sampling: SamplingConfig,
        stop_ids: frozenset[int],
        clock: Callable[[], float],
        max_pass_tokens: int | None,
    ) -> None:
        self.target, self.drafter, self.cache = target, drafter, cache
        self.sampling, self.stop_ids, self.clock = sampling, stop_ids, clock
        self.max_pass_tokens = max_pass_tokens
        self._groups: deque[_Group] = deque()

    @property
    def num_rows(self) -> int:
        """Rows whose prompts are not read to the end."""
        return sum(len(group.rows) for group in self._groups)

    def add(self, rows: Sequence[Row]) -> None:
        """Queue admitted rows."""
        lengths = [len(row.request.token_ids) for row in rows]
        budget = self.max_pass_tokens
        groups = of_like_length(lengths) if budget is None else within(lengths, budget)
        for group in groups:
            chunk = PREFILL_CHUNK if budget is None else max(1, budget // len(group))
            tokens_RP = padded([rows[i].request.token_ids for i in group], self.target.device)
            self._groups.append(_Group([rows[i] for i in group], chunk, tokens_RP))

    def step(self, num_running: int) -> list[tuple[int, Row]]:
        """Run one pass; return the rows that are now ready, with the slot each was read into.

        Slots below num_running are in use.
        """
        start, group = self.clock(), self._groups[0]
        if not group.slots:
            self._begin(group, num_running)
        self._pass(group)
        seconds = (self.clock() - start) / len(group.rows)
        for row in group.rows:
            row.completion.prefill_seconds += seconds
        if group.read < group.tokens_RP.shape[1]:
            return []
        self._groups.popleft()
        return list(zip(group.slots, group.rows, strict=True))

    def _begin(self, group: _Group, num_running: int) -> None:
        R = len(group.rows)
        # Rounds between the passes of a group move the rows that run: it is read in behind them.
        interrupted = self.max_pass_tokens is not None and group.num_passes > 1
        first = self.cache.batch - R if interrupted else num_running
        group.slots = list(range(first, first + R))
        for slot, prompt in zip(group.slots, group.prompts, strict=True):
            self.cache.reset(slot)
            self.drafter.begin(slot, prompt[0])

    def _pass(self, group: _Group) -> None:
        """Read the next tokens of each prompt, and show the drafter what the target made of them.

        A row that is already complete runs along on padding, which is never committed.
        """
        part_RC = group.tokens_RP[:, group.read : group.read + group.chunk]
        R, C = part_RC.shape
        counts = [min(C, max(0, len(prompt) - group.read)) for prompt in group.prompts]
        causal_CC = torch.ones(C, C, dtype=torch.bool, device=part_RC.device).tril()
        output = self.target.pass_over(
            part_RC,
            torch.arange(C, device=part_RC.device).expand(R, C),
            causal_CC.expand(R, C, C),
            self.cache,
            rows=group.slots,
            taps=self.drafter.taps,
        )
        self.cache.advance(counts, rows=group.slots)
        self._emit_first(group, output.hidden_BTD)
        if not all(row.finished for row in group.rows):
            features_RCF = pick_features(output.hidden_BTD, output.aux, self.drafter.taps)
            self._show(group, features_RCF, counts)
        group.read += C

    def _emit_first(self, group: _Group, hidden_RCD: Tensor) -> None:
        """Pick the first token of the rows whose prompts end in this pass."""
        C, device = hidden_RCD.shape[1], hidden_RCD.device
        lengths = [len(prompt) for prompt in group.prompts]
        ending = [i for i, n in enumerate(lengths) if group.read < n <= group.read + C]
        if not ending:
            return
        ends_E = torch.tensor([lengths[i] for i in ending], device=device)
        last_ED = hidden_RCD[torch.tensor(ending, device=device), ends_E - 1 - group.read]
        keys_E = torch.tensor([group.rows[i].key for i in ending], device=device)
        picked = self._pick(self.target.readout(last_ED), keys_E, ends_E).tolist()
        for i, token in zip(ending, picked, strict=True):
            group.rows[i].emit([token], self.stop_ids)

    def _pick(self, logits_EV: Tensor, keys_E: Tensor, positions_E: Tensor) -> Tensor:
        """Pick the token at these absolute positions from the processed distribution."""
        if self.sampling.temperature == 0:
            return best_ids(logits_EV)
        uniform_E = uniforms(self.sampling.seed, keys_E, positions_E, VERIFY)
        return draw(processed_probs(logits_EV, self.sampling), uniform_E)

    def _show(self, group: _Group, features_RCF: Tensor, counts: list[int]) -> None:
        """Show the drafter the features of this pass, each with the token after it."""
        place = slice(group.read + 1, group.read + 1 + group.chunk)
        following = [(*row.request.token_ids, *row.tokens)[place] for row in group.rows]
        active = [i for i, count in enumerate(counts) if count > 0]
        tokens_RC = padded([following[i][: counts[i]] for i in active], features_RCF.device)
        self.drafter.observe(
            tokens_RC,
            features_RCF[active, : tokens_RC.shape[1]],
            [counts[i] for i in active],
            rows=[group.slots[i] for i in active],
        )


def of_like_length(lengths: Sequence[int]) -> list[list[int]]:
    """Split rows into groups whose padding is at most a third of their prompts, shortest first."""
    groups: list[list[int]] = [[]]
    real = 0  # tokens of the last group, without padding
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if 3 * (len(groups[-1]) + 1) * lengths[index] > 4 * (real + lengths[index]):
            groups.append([])
            real = 0
        groups[-1].append(index)
        real += lengths[index]
    return groups


def within(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Split rows, in order, into groups that one pass of `budget` tokens reads, padding included.

    A prompt longer than the budget is a group of its own, read in several passes.
    """
    groups: list[list[int]] = [[]]
    longest = 0  # tokens of the last group's longest prompt
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if groups[-1] and (len(groups[-1]) + 1) * longest > budget:
            groups.append([])
            longest = length
        groups[-1].append(index)
    return groups
