"""Where an accepted path ran through a drafted tree, by places among siblings.

Node ids mean another place every round when the shape changes; the place among the siblings that
were offered, 0 the first tried, means the same in a chain, a static and a dynamic tree.
Shapes: B rows, N tree nodes, C most children of a node, K deepest node + 1.
"""

import torch
from torch import Tensor

from headstart.eval.engine.tree import DraftTree


def places(tree: DraftTree, path_BK: Tensor) -> tuple[Tensor, Tensor]:
    """Return place_BK and offered_BK of the node ids path_BK, the root first, padded with -1.

    place_BK is a node's place among its parent's children, -1 for the root and for padding;
    offered_BK the number of a node's children that carry a token, 0 for padding.
    """
    node_BK = path_BK.clamp(min=0)
    ids_BKC = node_BK[..., None].expand(-1, -1, tree.children_BNC.shape[2])
    children_BKC = tree.children_BNC.gather(1, ids_BKC)
    tokens_BKC = tree.tokens_BN.gather(1, children_BKC.clamp(min=0).flatten(1)).view_as(ids_BKC)
    offered_BK = ((children_BKC >= 0) & (tokens_BKC >= 0)).sum(-1).masked_fill(path_BK < 0, 0)
    place_BK = torch.full_like(path_BK, -1)
    place_BK[:, 1:] = (children_BKC[:, :-1] == path_BK[:, 1:, None]).byte().argmax(-1)
    return place_BK.masked_fill(path_BK < 0, -1), offered_BK
