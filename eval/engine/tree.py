"""Draft trees: static shapes and a batch of drafted trees.

Node 0 is the root, the newest emitted token; every other node is a drafted token that continues the
path to its parent. Only tokens and parents are primary, the rest is derived by `topology`.
Shapes: B rows, N tree nodes (root included), C most children of a node, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Path = tuple[int, ...]
"""Ranks from the root down: (1, 0) is the best continuation of the second-best first token."""


def topology(
    parents_BN: Tensor, present_BN: Tensor, max_children: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Derive depth_BN, ancestors_BNN (self included) and children_BNC from the parents.

    parents_BN[:, 0] = -1 and parents point backwards. Children are the present nodes in order of
    their ids, padded with -1; no node may have more than max_children of them.
    """
    B, N = parents_BN.shape
    nodes_N = torch.arange(N, device=parents_BN.device)
    links_BNN = (nodes_N[:, None] == nodes_N) | (parents_BN[..., None] == nodes_N)
    reach_BNN = links_BNN.float()
    for _ in range((N - 1).bit_length()):  # each product doubles the length of the paths covered
        reach_BNN = (reach_BNN @ reach_BNN).clamp(max=1)
    ancestors_BNN = reach_BNN > 0

    siblings_BNN = parents_BN[..., None] == parents_BN[:, None, :]
    slot_BN = (siblings_BNN & present_BN[:, None, :]).tril(-1).sum(-1)
    spare = N * max_children  # one slot more takes the root and the absent nodes
    target_BN = (parents_BN * max_children + slot_BN).masked_fill(
        ~present_BN | (parents_BN < 0), spare
    )
    children = nodes_N.new_full((B, spare + 1), -1)
    children.scatter_(1, target_BN, nodes_N.expand(B, N))
    return ancestors_BNN.sum(-1) - 1, ancestors_BNN, children[:, :spare].view(B, N, max_children)


@dataclass
class DraftTree:
    """One drafted tree a row; made by a drafter, read by the target pass and by verification."""

    tokens_BN: Tensor
    """int64; column 0 the root. -1 marks an absent node: equal to no token, seen by no other."""
    parents_BN: Tensor
    """Parent of each node, below the node's own id; -1 for the root."""
    depth_BN: Tensor
    """Distance from the root; a node's position is the root's plus its depth."""
    ancestors_BNN: Tensor
    """bool: [b, i, j] where node j lies on the path root..i, i included; the attention mask."""
    children_BNC: Tensor
    """Children in the order they are tried, padded with -1; a repeated id is tried again."""
    max_depth: int
    """Depth of the shape, known without asking the device; no node lies deeper."""
    draft_probs_BNV: Tensor | None = None
    """Row n: the exact law node n's children were drawn from; None: children not drawn."""

    @classmethod
    def from_parents(
        cls,
        tokens_BN: Tensor,
        parents_BN: Tensor,
        *,
        max_depth: int,
        max_children: int,
        draft_probs_BNV: Tensor | None = None,
    ) -> "DraftTree":
        """Build a tree whose shape differs from row to row; siblings are tried in id order."""
        derived = topology(parents_BN, tokens_BN >= 0, max_children)
        return cls(tokens_BN, parents_BN, *derived, max_depth, draft_probs_BNV)

    @property
    def num_drafted_B(self) -> Tensor:
        """Drafted tokens a row: present nodes, the root not counted."""
        return (self.tokens_BN[:, 1:] >= 0).sum(-1)

    @property
    def depth_max_B(self) -> Tensor:
        """Depth of the deepest present node a row."""
        return self.depth_BN.masked_fill(self.tokens_BN < 0, 0).amax(-1)

    @property
    def child_tokens_BNC(self) -> Tensor:
        """Token of each child, -1 where there is none to try."""
        B, N, C = self.children_BNC.shape
        ids = self.children_BNC.clamp(min=0).reshape(B, N * C)
        tokens_BNC = self.tokens_BN.gather(1, ids).view(B, N, C)
        return tokens_BNC.masked_fill(self.children_BNC < 0, -1)

    def limit_depth(self, max_depth_B: Tensor) -> "DraftTree":
        """Return the tree with nodes deeper than a row's room (in tokens) marked absent."""
        too_deep_BN = self.depth_BN > max_depth_B[:, None]
        return replace(self, tokens_BN=self.tokens_BN.masked_fill(too_deep_BN, -1))

    def limit_nodes(self, num_drafted_B: Tensor) -> "DraftTree":
        """Return the tree with only the first drafted nodes of each row, in the order of their ids.

        Parents come before their children, and children that were drawn go last drawn first: what
        is left is lossless under every scheme.
        """
        before_BN = (self.tokens_BN >= 0).cumsum(-1) - 1  # the root stands first
        beyond_BN = before_BN > num_drafted_B[:, None]
        return replace(self, tokens_BN=self.tokens_BN.masked_fill(beyond_BN, -1))

    def trimmed(self) -> "DraftTree":
        """Return the tree without the last nodes where all rows lack them; reads the device."""
        N = 1 + int((self.tokens_BN >= 0).any(0).nonzero().max())
        if N == self.tokens_BN.shape[1]:
            return self
        children_BNC = self.children_BNC[:, :N]
        return DraftTree(
            self.tokens_BN[:, :N],
            self.parents_BN[:, :N],
            self.depth_BN[:, :N],
            self.ancestors_BNN[:, :N, :N],
            children_BNC.masked_fill(children_BNC >= N, -1),
            min(self.max_depth, N - 1),
            None if self.draft_probs_BNV is None else self.draft_probs_BNV[:, :N],
        )

    def merge_repeats(self) -> "DraftTree":
        """Return the tree with repeated tokens among siblings as repeated tries of one node.

        Children drawn with replacement repeat; the first node that carries a token stands for all,
        the others and what hangs below them become absent.
        """
        child_tokens_BNC = self.child_tokens_BNC
        same_BNCC = child_tokens_BNC[..., None] == child_tokens_BNC[..., None, :]
        first_BNC = same_BNCC.byte().argmax(-1)
        children_BNC = self.children_BNC.gather(-1, first_BNC)
        children_BNC = children_BNC.masked_fill(child_tokens_BNC < 0, -1)
        nodes_N = torch.arange(self.tokens_BN.shape[1], device=self.tokens_BN.device)
        listed_BN = (children_BNC.flatten(1)[..., None] == nodes_N).any(1) | (nodes_N == 0)
        tokens_BN = _absent_below(self.tokens_BN.masked_fill(~listed_BN, -1), self.ancestors_BNN)
        return replace(self, tokens_BN=tokens_BN, children_BNC=children_BNC)

    def check(self) -> None:
        """Assert every invariant of the tree; reads the device, so for tests and debugging."""
        B, N = self.tokens_BN.shape
        present_BN = self.tokens_BN >= 0
        node_N = torch.arange(N, device=self.tokens_BN.device)
        assert present_BN[:, 0].all(), "the root is absent"
        assert (self.parents_BN[:, 0] == -1).all(), "the root has a parent"
        assert ((self.parents_BN < node_N) & (self.parents_BN >= 0))[:, 1:].all(), "parent order"
        assert (self.depth_BN[:, 0] == 0).all(), "the root is deep"
        up_BN = self.parents_BN[:, 1:]
        assert (self.depth_BN[:, 1:] == self.depth_BN.gather(1, up_BN) + 1).all(), "depth"
        assert (self.depth_BN <= self.max_depth).all(), "deeper than max_depth"
        parent_rows = self.ancestors_BNN.gather(1, up_BN[..., None].expand(-1, -1, N))
        own_NN = node_N[:, None] == node_N
        assert torch.equal(self.ancestors_BNN[:, 0], own_NN[:1].expand(B, N)), "root mask"
        assert torch.equal(self.ancestors_BNN[:, 1:], parent_rows | own_NN[1:]), "mask"
        assert (present_BN.gather(1, up_BN) | ~present_BN[:, 1:]).all(), "absent parent"
        self._check_children(present_BN)

    def _check_children(self, present_BN: Tensor) -> None:
        tokens_BNC, children_BNC = self.child_tokens_BNC, self.children_BNC
        tried_BNC = tokens_BNC >= 0
        node_N = torch.arange(tokens_BNC.shape[1], device=tokens_BNC.device)
        parents_BNC = self.parents_BN[:, None].expand(-1, len(node_N), -1)
        parents_BNC = parents_BNC.gather(-1, children_BNC.clamp(min=0))
        assert (~tried_BNC | (parents_BNC == node_N[:, None])).all(), "child of another node"
        twins = tried_BNC[..., None] & (tokens_BNC[..., None] == tokens_BNC[..., None, :])
        one_node = children_BNC[..., None] == children_BNC[..., None, :]
        assert (~twins | one_node).all(), "siblings carry one token"
        listed_BN = (children_BNC.flatten(1)[..., None] == node_N).any(1)
        assert (listed_BN | ~present_BN)[:, 1:].all(), "a present node is never tried"
        if self.draft_probs_BNV is not None:
            drawn_BNC = self.draft_probs_BNV.gather(-1, tokens_BNC.clamp(min=0)) > 0
            assert (~tried_BNC | drawn_BNC).all(), "child drawn with probability 0"


@dataclass(frozen=True, eq=False)
class TreeShape:
    """A fixed tree shape in ranks, as Medusa lists it; a drafter fills it with tokens."""

    choices: tuple[Path, ...]
    """Path of every drafted node, sorted by (length, lexicographic); node i is choices[i - 1]."""
    parents_N: Tensor
    """Parent of each node, -1 for the root."""
    ranks_N: Tensor
    """Rank of each node among its parent's candidates, 0 the best; -1 for the root."""
    depth_N: Tensor
    ancestors_NN: Tensor
    children_NC: Tensor
    """Children by rank, padded with -1."""

    @classmethod
    def from_choices(cls, choices: Sequence[Sequence[int]]) -> "TreeShape":
        """Build the shape from rank paths in any order.

        Raises ValueError that names the path for one given twice, without its parent, empty, or
        with a negative rank.
        """
        paths = sorted((tuple(path) for path in choices), key=lambda path: (len(path), path))
        _check_choices(paths)
        node = {path: i for i, path in enumerate([(), *paths])}
        parents_N = torch.tensor([-1, *(node[path[:-1]] for path in paths)])
        counts_N = parents_N[1:].bincount(minlength=1)
        derived = topology(
            parents_N[None], torch.ones(1, len(node), dtype=torch.bool), max(1, int(counts_N.max()))
        )
        ranks_N = torch.tensor([-1, *(path[-1] for path in paths)])
        return cls(tuple(paths), parents_N, ranks_N, *(tensor[0] for tensor in derived))

    @classmethod
    def chain(cls, depth: int) -> "TreeShape":
        """Build the chain of `depth` drafted tokens."""
        if depth < 1:
            raise ValueError(f"tree.depth={depth}: a chain needs at least one drafted token")
        return cls.from_choices([(0,) * length for length in range(1, depth + 1)])

    @classmethod
    def root_only(cls) -> "TreeShape":
        """Build the shape that drafts nothing: plain decoding."""
        return cls.from_choices([])

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, the root included."""
        return len(self.choices) + 1

    @property
    def max_depth(self) -> int:
        return max((len(path) for path in self.choices), default=0)

    @property
    def is_chain(self) -> bool:
        """True for one branch: every draft then is a chain of the same length."""
        return self.num_nodes == self.max_depth + 1

    @property
    def max_rank(self) -> int:
        """Highest rank on any path; -1 for the root alone."""
        return max((rank for path in self.choices for rank in path), default=-1)

    def check(self, *, max_depth: int, top_k: int, depth_field: str = "head.num_heads") -> None:
        """Raise ValueError naming the first path deeper than max_depth or of a rank >= top_k."""
        for path in self.choices:
            if len(path) > max_depth:
                raise ValueError(
                    f"tree.depth={self.max_depth} but {depth_field}={max_depth}: path {list(path)} "
                    "is deeper than the head can draft; lower tree.depth"
                )
            if max(path) >= top_k:
                raise ValueError(
                    f"tree.top_k={top_k} but path {list(path)} asks for rank {max(path)}: "
                    f"raise tree.top_k to {self.max_rank + 1} or drop the path"
                )

    def cut(self, depth: int) -> "TreeShape":
        """Return the shape without the nodes deeper than `depth`; the others keep their ids."""
        shape = TreeShape.from_choices([path for path in self.choices if len(path) <= depth])
        return shape.to(self.parents_N.device)

    def to(self, device: torch.device | str) -> "TreeShape":
        """Return the shape with its tensors on `device`."""
        tensors = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **tensors)

    def fill(self, tokens_BN: Tensor, draft_probs_BNV: Tensor | None = None) -> DraftTree:
        """Return the tree of this shape with these tokens; below an absent node all are absent."""
        B = len(tokens_BN)
        ancestors_BNN = self.ancestors_NN.expand(B, -1, -1)
        return DraftTree(
            _absent_below(tokens_BN, ancestors_BNN),
            self.parents_N.expand(B, -1),
            self.depth_N.expand(B, -1),
            ancestors_BNN,
            self.children_NC.expand(B, -1, -1),
            self.max_depth,
            draft_probs_BNV,
        )


def _absent_below(tokens_BN: Tensor, ancestors_BNN: Tensor) -> Tensor:
    absent_BN = (ancestors_BNN & (tokens_BN < 0)[:, None, :]).any(-1)
    return tokens_BN.masked_fill(absent_BN, -1)


def _check_choices(paths: Sequence[Path]) -> None:
    known: set[Path] = {()}
    for path in paths:
        if not path or min(path) < 0:
            raise ValueError(f"tree.choices: path {list(path)} is not a list of ranks >= 0; fix it")
        if path in known:
            raise ValueError(f"tree.choices: path {list(path)} is given twice; drop one")
        if path[:-1] not in known:
            raise ValueError(
                f"tree.choices: path {list(path)} has no parent; add {list(path[:-1])}"
            )
        known.add(path)
