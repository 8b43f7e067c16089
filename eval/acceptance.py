"""What a head's candidates are worth: at every place of an answer, which of them the target takes.

Rounds emit the text of plain decoding: at temperature 0, and with the same uniforms above, whatever
is drafted, verification descends exactly where a child carries the token that the target takes
there. A head's drafts depend on the verified text alone. So the round that would start at a place
accepts the same tokens whichever rounds came before it, and drafting from every place of the plain
text, by the drafters' own code, tells all that decoding with any tree would. (In half precision a
pass of another shape may round a close call the other way.)
Shapes: P places where a round may start, B rows in lockstep, T tokens, F features a position, K
draft depth, R candidates a node, C candidates of a dynamic tree, L levels.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.dynamic import DynamicHeadDrafter
from headstart.eval.engine.drafters.head import HeadBacked, top_ids
from headstart.eval.engine.dynamic_tree import Candidates, DynamicShape
from headstart.heads.base import DraftHead
from headstart.heads.parts import TargetParts
from headstart.heads.target import Target, pick_features

UNKNOWN = -1
"""Rank at a depth where the answer has ended: the target's token is not known."""
FAR = 2**31 - 1
"""Order of a node that is not among the candidates."""
BATCH_ROWS = 16
BINS = 10


@dataclass
class Calibration:
    """How honest a head is: candidates of dynamic trees by the product of its probabilities."""

    candidates: list[int] = field(default_factory=lambda: [0] * BINS)
    """In each tenth of the values from 0 to 1."""
    promised: list[float] = field(default_factory=lambda: [0.0] * BINS)
    """Sum of their values: how many the head expects the target to take."""
    taken: list[int] = field(default_factory=lambda: [0] * BINS)
    """How many lie on the target's path."""


@dataclass(frozen=True)
class Acceptance:
    """What was accepted where. Places of a prompt: after each token of its answer but the last."""

    lengths: list[int]
    """Places of each prompt."""
    ranks_PK: np.ndarray
    """Rank of the target's token among the candidates after its own path to there, R if lower."""
    dynamic_PLK: dict[int, np.ndarray]
    """By top_k: place of the target's node, depth by depth, among the candidates of 1 .. L levels,
    the best by value first; a tree of n drafted nodes keeps the first n. FAR where it is none."""
    calibration: Calibration
    """Of the candidates of the largest top_k."""

    @property
    def num_places(self) -> int:
        """P."""
        return len(self.ranks_PK)


@torch.no_grad()
def collect(
    target: Target,
    head: DraftHead,
    requests: Sequence[Request],
    answers: Sequence[Sequence[int]],
    *,
    depth: int,
    ranks: int,
    top_k: Sequence[int] = (),
) -> Acceptance:
    """Draft from every place of the target's own answers to the requests, one answer a request.

    `depth` and `ranks` bound static trees, `top_k` are the dynamic trees grown, `depth` levels
    deep; all within what the head can draft. Raises ValueError when there is no place to draft.
    """
    total = sum(len(answer) - 1 for answer in answers)
    if total == 0:
        raise ValueError(
            f"every one of {len(answers)} answers ended with its first token, so nothing can be "
            "drafted; choose other prompts or raise eval.max_new_tokens"
        )
    calibration = Calibration()
    watchers: list[TruePath | Grown] = [TruePath(head, target.parts, depth, ranks)]
    for k in sorted(top_k):
        record = calibration if k == max(top_k) else None
        watchers.append(Grown(head, target.parts, k, depth, record))
    # The longest first, so that rows which have ended are the last ones of a group.
    by_length = sorted(range(len(answers)), key=lambda i: -len(answers[i]))
    seen: list[list[list[np.ndarray]]] = [[[] for _ in answers] for _ in watchers]
    with tqdm(total=total, desc="drafting", unit="place", mininterval=1.0) as bar:
        for first in range(0, len(answers), BATCH_ROWS):
            group = by_length[first : first + BATCH_ROWS]
            prompts = [requests[i].token_ids for i in group]
            walk = _Walk(target, head, prompts, [answers[i] for i in group], watchers)
            for place in range(len(answers[group[0]]) - 1):
                for of_watcher, found in zip(seen, walk.draft_at(place), strict=True):
                    for row, value in enumerate(found):
                        of_watcher[group[row]].append(value)
                bar.update(len(found))
    lengths = [len(answer) - 1 for answer in answers]
    ranks_PK, *grown = (np.stack([v for of_prompt in rows for v in of_prompt]) for rows in seen)
    return Acceptance(lengths, ranks_PK, dict(zip(sorted(top_k), grown, strict=True)), calibration)


class _Walk:
    """Some answers read side by side, place by place, as a drafter is shown them in decoding."""

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Sequence[int]],
        watchers: Sequence["TruePath | Grown"],
    ) -> None:
        self.watchers, self.prompts, self.answers = watchers, prompts, answers
        texts = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
        T = max(map(len, texts))
        padded = [text + [0] * (T - len(text)) for text in texts]
        self.tokens_BT = torch.tensor(padded, device=target.device)
        output = target.forward(self.tokens_BT, taps=head.aux_features)
        self.features_BTF = pick_features(output.hidden_BTD, output.aux, head.aux_features)
        counts = [len(prompt) for prompt in prompts]
        longest = max(counts)
        for watcher in watchers:
            watcher.start(len(prompts), T)
            watcher.observe(
                self.tokens_BT[:, 1 : longest + 1], self.features_BTF[:, :longest], counts
            )

    def draft_at(self, place: int) -> list[np.ndarray]:
        """Return what every watcher sees where `place` + 1 tokens of the answers are known."""
        B = sum(len(answer) - 1 > place for answer in self.answers)
        if place > 0:  # the pair that decoding shows after the place before: its token came true
            rows = torch.arange(B, device=self.tokens_BT.device)
            at_B = torch.tensor([len(p) + place for p in self.prompts[:B]], device=rows.device)
            tokens_B1 = self.tokens_BT[rows, at_B][:, None]
            features_B1F = self.features_BTF[rows, at_B - 1][:, None]
            for watcher in self.watchers:
                watcher.observe(tokens_B1, features_B1F, [1] * B)
        return [watcher.look(self._truth(place, B, watcher.depth)) for watcher in self.watchers]

    def _truth(self, place: int, B: int, depth: int) -> Tensor:
        """Return the next tokens [B, K] of the answers, -1 past their ends."""
        coming = [answer[place + 1 : place + 1 + depth] for answer in self.answers[:B]]
        padded = [[*tokens, *[-1] * (depth - len(tokens))] for tokens in coming]
        return torch.tensor(padded, device=self.tokens_BT.device)


class TruePath(HeadBacked):
    """Feeds the head the target's own continuation and ranks each of its tokens."""

    def __init__(self, head: DraftHead, parts: TargetParts, depth: int, ranks: int) -> None:
        assert head.max_depth is None or depth <= head.max_depth, "deeper than the head"
        super().__init__(head, parts, max_pending=max(depth, 2))
        self.depth, self.ranks = depth, ranks

    def look(self, truth_BK: Tensor) -> np.ndarray:
        """Return the rank of each token [B, K]: R where it is not among the candidates."""
        ranks = [self._rank(self._logits(truth_BK, d), truth_BK[:, d]) for d in range(self.depth)]
        return torch.stack(ranks, dim=1).cpu().numpy()

    def _logits(self, truth_BK: Tensor, depth: int) -> Tensor:
        if depth < self._logits_BKW.shape[1]:
            return self._logits_BKW[: len(truth_BK), depth]
        tokens_B1 = truth_BK[:, depth - 1 : depth].clamp(min=0)
        slot_B1 = torch.full_like(tokens_B1, depth - 1)  # of the node above; the root's is 0
        return self.head.step(self._state, tokens_B1, slot_B1, self.parts)[:, 0]

    def _rank(self, logits_BW: Tensor, truth_B: Tensor) -> Tensor:
        hit_BR = self._to_target(top_ids(logits_BW, self.ranks)) == truth_B[:, None]
        rank_B = hit_BR.byte().argmax(-1).masked_fill(~hit_BR.any(-1), self.ranks)
        return rank_B.masked_fill(truth_B < 0, UNKNOWN)


class Grown(DynamicHeadDrafter):
    """Grows all candidates of a dynamic tree and finds the target's path among them."""

    def __init__(
        self,
        head: DraftHead,
        parts: TargetParts,
        top_k: int,
        levels: int,
        calibration: Calibration | None,
    ) -> None:
        candidates = top_k + (levels - 1) * top_k**2
        super().__init__(head, parts, DynamicShape(top_k, levels, candidates + 1))
        self.depth, self.calibration = levels, calibration

    def look(self, truth_BK: Tensor) -> np.ndarray:
        """Return the orders [B, L, K] of the target's nodes among candidates of 1 .. L levels."""
        candidates = self.grow(len(truth_BK))
        nodes_BK = true_nodes(candidates, truth_BK)
        if self.calibration is not None:
            _count(self.calibration, candidates, nodes_BK, truth_BK)
        k = self.shape.top_k
        sizes = [k + level * k**2 for level in range(self.depth)]
        values_BC = candidates.log_values_BC
        found = [value_orders(values_BC[:, :size], nodes_BK) for size in sizes]
        return torch.stack(found, dim=1).cpu().numpy()


def true_nodes(candidates: Candidates, truth_BK: Tensor) -> Tensor:
    """Return the candidates [B, K] on the target's path, -1 from the first one missing."""
    at_B, nodes = torch.full_like(truth_BK[:, 0], -1), []  # the root, as its children name it
    for truth_B in truth_BK.unbind(1):
        hit_BC = candidates.parents_BC == at_B[:, None]
        hit_BC &= candidates.tokens_BC == truth_B[:, None]
        found_B = hit_BC.any(-1)
        at_B = hit_BC.byte().argmax(-1).masked_fill(~found_B, -2)  # nobody's parent
        nodes.append(at_B.clamp(min=-1))
    return torch.stack(nodes, dim=1)


def value_orders(log_values_BC: Tensor, nodes_BK: Tensor) -> Tensor:
    """Return how many candidates `best_first` puts before each node [B, K]; FAR for none."""
    C = log_values_BC.shape[1]
    present_BK = (nodes_BK >= 0) & (nodes_BK < C)
    node_BK1 = nodes_BK.clamp(0, C - 1)[..., None]
    value_BK1 = log_values_BC.gather(1, node_BK1[..., 0])[..., None]
    others_B1C = log_values_BC[:, None]
    earlier_BKC = torch.arange(C, device=nodes_BK.device) < node_BK1
    before_BKC = (others_B1C > value_BK1) | ((others_B1C == value_BK1) & earlier_BKC)
    return before_BKC.sum(-1).masked_fill(~present_BK, FAR)


def _count(
    calibration: Calibration, candidates: Candidates, nodes_BK: Tensor, truth_BK: Tensor
) -> None:
    """Add the candidates whose depth the answer still reaches, by tenth of their value."""
    values_BC = candidates.log_values_BC.double().exp()
    index_C = torch.arange(values_BC.shape[1], device=values_BC.device)
    taken_BC = (nodes_BK[..., None] == index_C).any(1)
    depth_BC = _depths(candidates.parents_BC)
    known_BC = depth_BC <= (truth_BK >= 0).sum(1)[:, None]
    bin_BC = (values_BC * BINS).long().clamp(max=BINS - 1)
    for number in range(BINS):
        here_BC = known_BC & (bin_BC == number)
        calibration.candidates[number] += int(here_BC.sum())
        calibration.promised[number] += float((values_BC * here_BC).sum())
        calibration.taken[number] += int((taken_BC & here_BC).sum())


def _depths(parents_BC: Tensor) -> Tensor:
    depth_BC = torch.ones_like(parents_BC)
    for _ in range(parents_BC.shape[1]):
        above_BC = depth_BC.gather(1, parents_BC.clamp(min=0)).masked_fill(parents_BC < 0, 0)
        if torch.equal(above_BC + 1, depth_BC):
            break
        depth_BC = above_BC + 1
    return depth_BC
