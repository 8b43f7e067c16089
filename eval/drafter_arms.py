"""Arms of a benchmark without a head: text drafters, draft models, and what falls back."""

from collections.abc import Mapping, Sequence

from headstart.eval.arms import Arm
from headstart.eval.engine.drafters.base import Drafter, NoDrafter
from headstart.eval.engine.drafters.build import model_drafter, text_drafter
from headstart.eval.engine.drafters.config import (
    HEAD,
    DrafterConfig,
    FallbackConfig,
    LookupConfig,
    ModelConfig,
    SuffixConfig,
)
from headstart.eval.engine.drafters.fallback import FallbackDrafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.result import DrafterInfo
from headstart.heads.target import Target


def drafter_arms(
    drafters: Mapping[str, DrafterConfig],
    heads: Sequence[Arm],
    target: Target,
    sampling: SamplingConfig,
) -> list[Arm]:
    """Make the arm of every named drafter; `heads` are the arms that fallbacks may end in.

    Raises ValueError for a fallback to a drafter that is not there or cannot stand in its place,
    and for a draft model of other tokens.
    """
    refuse_bad_fallbacks(drafters, num_heads=len(heads))
    made: dict[str, Arm] = {}
    for name, config in drafters.items():
        if isinstance(config, ModelConfig):
            made[name] = _model_arm(name, config, target, sampling)
        elif isinstance(config, LookupConfig | SuffixConfig):
            made[name] = _text_arm(name, config)
    arms = []
    for name, config in drafters.items():
        if isinstance(config, FallbackConfig):
            arms += _fallback_arms(name, config, drafters, made, heads, target)
        else:
            arms.append(made[name])
    return arms


def refuse_bad_fallbacks(drafters: Mapping[str, DrafterConfig], *, num_heads: int) -> None:
    """Raise ValueError naming the fallback and the member at fault."""
    for name, config in drafters.items():
        if not isinstance(config, FallbackConfig):
            continue
        for place, member in enumerate(config.members, start=1):
            where = f"drafters.{name}.members: {member}"
            if member == HEAD:
                if num_heads == 0:
                    raise ValueError(f"{where}: there is no head; give checkpoints")
            elif member not in drafters:
                known = ", ".join(sorted(set(drafters) - {name}))
                raise ValueError(f"{where}: no such drafter; expected {known or 'others'} or head")
            elif isinstance(drafters[member], FallbackConfig):
                raise ValueError(f"{where}: is a fallback itself; name its members")
            elif isinstance(drafters[member], ModelConfig) and place < len(config.members):
                raise ValueError(
                    f"{where}: a draft model always proposes something, so nothing after it "
                    "would; name it last"
                )


def _text_arm(name: str, config: LookupConfig | SuffixConfig) -> Arm:
    drafter = text_drafter(config)
    is_tree = isinstance(config, SuffixConfig) and config.tree
    tree = f"dynamic:{name}" if is_tree else f"chain:{config.tokens}"
    caches, notes = _memory(name, config)
    info = _describe(name, drafter, tree, caches=caches)
    return Arm(name, drafter, info, is_chain=False, notes=notes)


def _memory(name: str, config: DrafterConfig) -> tuple[str | None, tuple[str, ...]]:
    """Return what a result says of remembered answers, and the warning that it carries."""
    if not isinstance(config, SuffixConfig) or config.responses == 0:
        return None, ()
    if not config.keep_warm:
        return "cold", ()
    note = f"{name}: answers are kept warm between repeats, so that a repeat finds its own answers"
    return "warm", (note,)


def _model_arm(name: str, config: ModelConfig, target: Target, sampling: SamplingConfig) -> Arm:
    drafter = model_drafter(config, target, sampling, option=f"drafters.{name}")
    info = _describe(name, drafter, f"chain:{config.tokens}", checkpoint=config.path)
    context, needed = drafter.model.shape.max_positions, target.shape.max_positions
    notes = ()
    if context < needed:
        notes = (
            f"{config.path}: the draft model has a context of {context} tokens, the target of "
            f"{needed}: beyond, nothing is drafted",
        )
    return Arm(name, drafter, info, is_chain=True, notes=notes)


def _fallback_arms(
    name: str,
    config: FallbackConfig,
    drafters: Mapping[str, DrafterConfig],
    made: Mapping[str, Arm],
    heads: Sequence[Arm],
    target: Target,
) -> list[Arm]:
    """Make one arm, or one for every head where the members end in `head`.

    Heads and draft models are shared with their own arms, which decode at other times; text
    drafters are made anew, since those would remember the answers of both arms.
    """
    *first, end = config.members
    if end == HEAD:
        lasts = [(f"{name}-{head.name}", head) for head in heads]
    elif isinstance(drafters[end], ModelConfig):
        lasts = [(name, made[end])]
    else:
        first, lasts = config.members, [(name, None)]
    before = [made[member] for member in first]
    arms = []
    for arm_name, last in lasts:
        texts = [text_drafter(drafters[member]) for member in first]
        ending = NoDrafter(target.device) if last is None else last.drafter
        drafter = FallbackDrafter(texts, ending, vocab_size=target.shape.vocab_size)
        members = before if last is None else [*before, last]
        arms.append(_combined(arm_name, drafter, members))
    return arms


def _combined(name: str, drafter: FallbackDrafter, members: Sequence[Arm]) -> Arm:
    caches = {member.info.caches for member in members} - {None}
    last = members[-1].info
    info = _describe(
        name,
        drafter,
        "+".join(member.info.tree for member in members),
        caches="warm" if "warm" in caches else "cold" if caches else None,
        checkpoint=last.checkpoint,
        step=last.step,
        trained_tokens=last.trained_tokens,
    )
    notes = tuple(dict.fromkeys(note for member in members for note in member.notes))
    return Arm(name, drafter, info, is_chain=False, notes=notes)


def _describe(name: str, drafter: Drafter, tree: str, **extra: object) -> DrafterInfo:
    return DrafterInfo(
        name=name,
        family=drafter.name,
        tree=tree,
        verify_scheme=drafter.scheme,
        lossless=True,
        **extra,
    )
