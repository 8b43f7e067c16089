"""Drafters from their settings: of a trained head and a tree, of text alone, of a draft model."""

import warnings

from headstart.eval.engine.drafters.config import LookupConfig, ModelConfig, SuffixConfig
from headstart.eval.engine.drafters.draft_model import ModelDrafter
from headstart.eval.engine.drafters.dynamic import DynamicHeadDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.drafters.lookup import LookupDrafter
from headstart.eval.engine.drafters.suffix import SuffixDrafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree_config import TreeConfig
from headstart.heads.base import DraftHead
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.parts import TargetParts
from headstart.heads.target import Target


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


def text_drafter(config: LookupConfig | SuffixConfig) -> LookupDrafter | SuffixDrafter:
    """Make a drafter that reads nothing but text."""
    kind = LookupDrafter if isinstance(config, LookupConfig) else SuffixDrafter
    return kind(**vars(config))


def model_drafter(
    config: ModelConfig, target: Target, sampling: SamplingConfig, *, option: str
) -> ModelDrafter:
    """Load a draft model onto the target's device, with its attention, packed and compiled alike.

    `option` is what messages call the config. Raises FileNotFoundError for a path that is not
    there, and ValueError for other tokens than the target's.
    """
    dtype = config.dtype or str(target.dtype).removeprefix("torch.")
    where = TargetConfig(
        config.path,
        config.revision,
        dtype,
        device=str(target.device),
        # Models of one family need the same: soft-capped attention is known to eager only.
        attention="eager" if target.model.config._attn_implementation == "eager" else "sdpa",
        pack=False,
    )
    model = load_target(where, option=option)
    drafter = ModelDrafter(model, target, tokens=config.tokens, sampling=sampling)
    target.adopt_model(model)
    return drafter
