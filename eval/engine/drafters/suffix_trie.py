"""A trie of every suffix of some texts, with counts: what followed these tokens, and how often.

A node stands for a string of tokens; its count is the number of suffixes that pass through it. A
string that occurs once is a leaf, which points into its text instead of spelling the rest out: the
trie then has a node a repeated string, whatever its depth. Text that grows makes leaves grow too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


class Node:
    """A string of tokens in a trie: explicit with children, or a leaf that points into a text."""

    __slots__ = ("children", "count", "place", "text")

    def __init__(self, text: Sequence[int], place: int) -> None:
        self.count = 1
        self.children: dict[int, Node] | None = None
        self.text, self.place = text, place  # a leaf's string ends at text[place]


@dataclass
class Text:
    """A text in a trie, growing at its end."""

    tokens: list[int] = field(default_factory=list)
    active: list[Node] = field(default_factory=list)
    """Nodes of its last 1, 2, .. tokens, as far as they occurred before."""


class SuffixTrie:
    """Counts all strings of up to `depth` tokens in the texts it was given."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.root = Node((), -1)
        self.root.children = {}

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Append tokens to a text of this trie; only one text may be growing at a time."""
        for token in tokens:
            self._append(text, token)

    def _append(self, text: Text, token: int) -> None:
        text.tokens.append(token)
        active = []
        above = [self.root, *text.active[: self.depth - 1]]
        for depth, node in enumerate(above, start=1):
            child = node.children.get(token)
            if child is None:  # new: from here on this suffix is read in the text itself
                node.children[token] = Node(text.tokens, len(text.tokens) - 1)
                continue
            if child.children is None:
                self._spell_out(child, depth)
            child.count += 1
            active.append(child)
        text.active = active

    def _spell_out(self, leaf: Node, depth: int) -> None:
        """Turn a leaf, whose string has `depth` tokens, into a node with the one child it has."""
        leaf.children = dict(self.followers(leaf, depth))
        leaf.text = ()  # which lets go of a text that may be removed before the node is

    def remove(self, tokens: Sequence[int]) -> None:
        """Take a text that is no longer growing out of the counts."""
        for start in range(len(tokens)):
            node = self.root
            for token in tokens[start : start + self.depth]:
                child = node.children[token]
                child.count -= 1
                if child.count == 0:  # no other suffix passes: what lies below goes with it
                    del node.children[token]
                    break
                node = child

    def followers(self, node: Node, depth: int) -> Iterator[tuple[int, Node]]:
        """Yield each token that followed a node's string of `depth` tokens, with its node."""
        if node.children is not None:
            yield from node.children.items()
        elif depth < self.depth and node.place + 1 < len(node.text):
            yield node.text[node.place + 1], Node(node.text, node.place + 1)

    def matches(self, tokens: Sequence[int]) -> list[Node]:
        """Return the nodes of the last 1, 2, .. tokens, as far as they occur in the trie.

        Not all of them: that, and strings of the trie's whole depth, have nothing that follows.
        """
        found: list[Node] = []
        for length in range(1, min(len(tokens), self.depth)):
            node = self._find(tokens[-length:])
            if node is None:
                break
            found.append(node)
        return found

    def _find(self, tokens: Sequence[int]) -> Node | None:
        node = self.root
        for depth, token in enumerate(tokens):
            if node.children is not None:
                child = node.children.get(token)
            else:
                child = next((c for t, c in self.followers(node, depth) if t == token), None)
            if child is None:
                return None
            node = child
        return node
