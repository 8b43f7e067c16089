"""The drafter of a trained head and a tree, for evaluation, training and generation alike."""

import warnings

from headstart.eval.engine.drafters.dynamic import DynamicHeadDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree_config import TreeConfig
from headstart.heads.base import DraftHead
from headstart.heads.parts import TargetParts


def head_drafter(
    head: DraftHead, parts: TargetParts, tree: TreeConfig, sampling: SamplingConfig
) -> HeadDrafter | DynamicHeadDrafter:
    """Make the drafter of a head and a tree. Raises ValueError where the two do not fit."""
    shape = tree.shape()
    if isinstance(shape, DynamicShape):
        return DynamicHeadDrafter(head, parts, shape)
    if tree.children == "sampled" and sampling.temperature == 0:
        warnings.warn(
            "tree.children=sampled has no effect with sampling.temperature=0; raise the "
            "temperature or use top_k",
            stacklevel=3,
        )
    return HeadDrafter(head, parts, shape, sampling=sampling, children=tree.children)
