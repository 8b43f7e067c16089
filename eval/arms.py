"""Arms of a benchmark: trained heads, each paired with the tree it drafts, ready to decode."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from headstart.eval.engine.drafters.base import Drafter
from headstart.eval.engine.drafters.build import head_drafter
from headstart.eval.engine.policy import draft_policy
from headstart.eval.engine.policy_config import PolicyConfig
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.result import LOSSLESS_SCHEMES, DrafterInfo
from headstart.eval.settings import TreeConfig
from headstart.heads.base import HeadConfig, build_head
from headstart.heads.checkpoint import HeadInfo, check_pairing, load_head
from headstart.heads.target import Target
from headstart.heads.vocab import DraftVocab

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Arm:
    """One drafter under test."""

    name: str
    """Name of its table row and of its result directory."""
    drafter: Drafter
    info: DrafterInfo
    is_chain: bool
    """Every draft is one chain of a fixed length, unless a limit shortens it."""
    notes: tuple[str, ...] = ()
    """Warnings that its result must carry."""
    trained_on: dict[str, Any] = field(default_factory=dict)
    """What the checkpoint of its head says of the training rows; empty where nothing says."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """How deep its rounds draft."""

    @property
    def trained_length(self) -> int | None:
        """Tokens of the longest row that its head was trained on; null where nothing says."""
        return self.trained_on.get("max_length")


def head_arms(
    checkpoints: Sequence[Path],
    trees: Sequence[TreeConfig],
    target: Target,
    sampling: SamplingConfig,
    *,
    force: bool,
    template_hash: str = "",
    skip_misfits: bool = False,
) -> list[Arm]:
    """Load every checkpoint once, in the target's dtype, and pair it with every tree.

    Raises ValueError for a head of another target (unless `force`, which leaves a note in the
    results), a tree that the head cannot draft (with `skip_misfits`, a head that can draft none of
    them: what it cannot is left out, with a note), and no or repeated checkpoints or trees.
    """
    if not checkpoints or not trees:
        raise ValueError(
            f"eval: {len(checkpoints)} checkpoints with {len(trees)} trees leave nothing to "
            "measure; give at least one of each"
        )
    arms = []
    for path, label in zip(checkpoints, _labels(checkpoints), strict=True):
        head, info = load_head(path)
        note = check_pairing(path, info, head, target, force=force)
        target.adopt(head)
        label = label if info.family in label else f"{info.family}-{label}"
        notes = [n for n in (note, _other_template(path, info, template_hash)) if n]
        fitting = []
        for tree in trees:
            try:
                fitting.append((tree, head_drafter(head, target.parts, tree, sampling)))
            except ValueError as error:
                if not skip_misfits or (tree is trees[-1] and not fitting):
                    raise
                notes.append(f"{path}: {tree.name} is left out: {error}")
                log.warning(notes[-1])
        for tree, drafter in fitting:
            described = _describe(f"{label}-{tree.name}", path, info, tree, drafter)
            arms.append(
                Arm(
                    described.name,
                    drafter,
                    described,
                    drafter.shape.is_chain,
                    tuple(notes),
                    info.trained_on,
                )
            )
    refuse_repeats([arm.name for arm in arms])
    return arms


def paced(arm: Arm, policy: PolicyConfig, max_pass_tokens: int | None = None) -> Arm:
    """Return the arm with drafts that a policy, or a bound on a pass, may shorten.

    Raises ValueError for a drafter that cannot follow the policy.
    """
    draft_policy(policy).check(arm.drafter)
    if policy.kind == "fixed" and max_pass_tokens is None:
        return arm
    arm.drafter.draft_calls = 0  # they differ from round to round: cost_ratio_c is null
    name = arm.name if policy.kind == "fixed" else f"{arm.name}-{policy.kind}"
    info = replace(arm.info, name=name, policy=policy.kind)
    return replace(arm, name=name, info=info, is_chain=False, policy=policy)


def refuse_misfits(
    heads: Mapping[str, HeadConfig],
    trees: Mapping[str, TreeConfig],
    target: Target,
    sampling: SamplingConfig,
) -> None:
    """Raise ValueError naming the first head, not yet trained, that cannot draft one of the trees.

    Heads are laid out without memory for their weights, and over any draft vocabulary of the size
    asked for: which tokens are in it has no say in which trees fit.
    """
    for name, config in heads.items():
        size, seen_V = config.draft_vocab_size, torch.zeros(target.shape.vocab_size).long()
        vocab = None if size is None else DraftVocab.from_counts(seen_V, size, forced=())
        with torch.device("meta"):
            head = build_head(config, target.shape, vocab)
        for tree_name, tree in trees.items():
            try:
                head_drafter(head, target.parts, tree, sampling)
            except ValueError as error:
                raise ValueError(f"heads.{name} with trees.{tree_name}: {error}") from error


def _other_template(path: Path, info: HeadInfo, template_hash: str) -> str:
    if template_hash in ("", info.template_hash):
        return ""
    return (
        f"{path}: trained on chat template {info.template_hash or 'unknown'}, measured on "
        f"{template_hash}: acceptance suffers"
    )


def _labels(checkpoints: Sequence[Path]) -> list[str]:
    """Name each checkpoint by the shortest tail of its path that tells it from the others."""
    parts = [Path(path).absolute().parts[1:] for path in checkpoints]
    # `headstart train` writes OUT/head: OUT is the name worth showing.
    parts = [part[:-1] if part[-1] == "head" and len(part) > 1 else part for part in parts]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["-".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    repeated = next(path for path in checkpoints if list(checkpoints).count(path) > 1)
    raise ValueError(f"checkpoint {repeated} is given twice; drop one")


def _describe(
    name: str, path: Path, info: HeadInfo, tree: TreeConfig, drafter: Drafter
) -> DrafterInfo:
    return DrafterInfo(
        name=name,
        family=info.family,
        tree=tree.label(),
        verify_scheme=drafter.scheme,
        lossless=drafter.scheme in LOSSLESS_SCHEMES,
        checkpoint=str(path),
        step=info.step,
        trained_tokens=info.tokens_seen,
    )


def refuse_repeats(names: Sequence[str]) -> None:
    """Raise ValueError for two arms of one name: one result would overwrite the other."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two arms are called {name!r}; give their trees or heads other names")
