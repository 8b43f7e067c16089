"""Suffix decoding: draft what most often followed the longest ends of the text (arXiv 2411.04975).

A trie a row counts its prompt and answer, one trie for all counts the answers that finished before.
The longer the match, the more is drafted; a draft's score is the number of its tokens that the
counts expect to be accepted.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headstart.eval.engine.drafters.suffix_trie import Node, SuffixTrie, Text
from headstart.eval.engine.drafters.text import Draft, TextDrafter


class Scored(NamedTuple):
    """A draft and the tokens of it that counts expect to be accepted."""

    draft: Draft
    score: float


@dataclass
class _Row:
    trie: SuffixTrie
    text: Text = field(default_factory=Text)

    def extend(self, tokens: Sequence[int]) -> None:
        self.trie.extend(self.text, tokens)


class SuffixDrafter(TextDrafter[_Row]):
    """Drafts from counts of what followed, as a chain (scheme a1) or a tree (scheme b).

    After a match of m tokens at most min(tokens, factor * m + offset) are drafted, each with an
    estimated probability of at least min_prob; a draft of a lower score than min_score is dropped.
    `responses` finished answers are remembered, the oldest forgotten first; keep_warm keeps them
    when a repeat of the same prompts begins, which then finds its own answers.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        tokens: int,
        tree: bool,
        factor: float,
        offset: float,
        min_prob: float,
        min_score: float,
        depth: int,
        responses: int,
        keep_warm: bool,
    ) -> None:
        self.tokens, self.num_nodes, self.tree = tokens, tokens + 1, tree
        self.scheme = "b" if tree else "a1"
        self.factor, self.offset = factor, offset
        self.min_prob, self.min_score = min_prob, min_score
        self.depth, self.responses, self.keep_warm = depth, responses, keep_warm
        self.remembers = responses > 0
        self._forget()

    def _forget(self) -> None:
        self._finished, self._answers = SuffixTrie(self.depth), deque[list[int]]()

    def new_row(self) -> _Row:
        """Return the counts of a row without text."""
        return _Row(SuffixTrie(self.depth))

    def finish(self, row: int, token_ids: Sequence[int]) -> None:
        """Count a finished answer; forget the oldest one beyond `responses`."""
        if not self.remembers:
            return
        if len(self._answers) == self.responses:
            self._finished.remove(self._answers.popleft())
        self._answers.append(list(token_ids))
        self._finished.extend(Text(), token_ids)

    def clear(self) -> None:
        """Forget finished answers, unless they are to be kept warm."""
        if not self.keep_warm:
            self._forget()

    def draft(self, row: _Row) -> Draft:
        """Return the draft of the best score: on ties the longer match, then the row's own."""
        # Only what occurred before can be followed by anything: the active nodes of a row.
        own = [self._best(row.trie, node, m) for m, node in enumerate(row.text.active, start=1)]
        ends = self._finished.matches(row.text.tokens[-self.depth :])
        other = [self._best(self._finished, node, m) for m, node in enumerate(ends, start=1)]
        found = [*reversed(own)], [*reversed(other)]
        best = Scored(Draft([], []), 0.0)
        for scored in (max(side, key=lambda s: s.score) for side in found if side):
            if scored.score > best.score:
                best = scored
        return best.draft if best.score >= self.min_score else Draft([], [])

    def _best(self, trie: SuffixTrie, node: Node, match: int) -> Scored:
        budget = min(self.tokens, int(match * self.factor + self.offset))
        grow = best_first if self.tree else most_frequent
        return grow(trie, node, match, budget=budget, min_prob=self.min_prob)


def most_frequent(
    trie: SuffixTrie, node: Node, depth: int, *, budget: int, min_prob: float
) -> Scored:
    """Follow the most frequent token below a node of `depth` tokens, ties to the lowest id.

    A token's estimated probability is the share of the node's suffixes that go on to it; the chain
    ends before a token below min_prob, or at `budget` tokens.
    """
    total, tokens, counts = node.count, [], []
    while len(tokens) < budget:
        following = trie.followers(node, depth + len(tokens))
        token, node = max(following, key=lambda pair: (pair[1].count, -pair[0]), default=(-1, None))
        if node is None or node.count / total < min_prob:
            break
        tokens.append(token)
        counts.append(node.count)
    return Scored(Draft.chain(tokens), sum(counts) / total)


def best_first(trie: SuffixTrie, node: Node, depth: int, *, budget: int, min_prob: float) -> Scored:
    """Grow the tree of the `budget` most probable strings below a node of `depth` tokens.

    Estimates as in `most_frequent`; ties go to the shallower, then to the lower id of the earlier
    parent. Siblings come in order of probability, so a chain's draft is the first path.
    """
    total, draft, counts = node.count, Draft([], []), []
    waiting: list[tuple[int, int, int, int, Node]] = []

    def add_children(node: Node, parent: int, below: int) -> None:
        for token, child in trie.followers(node, depth + below):
            if child.count / total >= min_prob:
                heapq.heappush(waiting, (-child.count, below + 1, parent, token, child))

    add_children(node, -1, 0)
    while waiting and len(draft.tokens) < budget:
        negative, below, parent, token, child = heapq.heappop(waiting)
        draft.tokens.append(token)
        draft.parents.append(parent)
        counts.append(-negative)
        add_children(child, len(draft.tokens) - 1, below)
    return Scored(draft, sum(counts) / total)
