"""Settings of a draft's shape: the `tree` group."""

import re
from dataclasses import dataclass
from importlib.resources import files

from omegaconf import MISSING, OmegaConf

from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.tree import TreeShape


@dataclass
class TreeConfig:
    """The shape of a draft: a chain, a static tree of rank paths, or a dynamic tree."""

    name: str = MISSING
    """What tables and result directories call the shape."""
    depth: int | None = None
    """Drafted tokens of a chain; null for a tree."""
    choices: list[list[int]] | None = None
    """Rank paths of a static tree, [0, 1] the second-best child of the best; else null."""
    top_k: int | None = None
    """Dynamic tree: children of an expanded node, and nodes expanded a level; else null."""
    levels: int | None = None
    """Dynamic tree: depth of the deepest candidate, one head call a level; else null."""
    total: int | None = None
    """Dynamic tree: nodes verified a round, the root included; else null."""
    children: str = "top_k"
    """top_k: the head's best tokens; sampled: drawn from the head (at temperature > 0 only)."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise ValueError(f"tree.name={self.name}: need letters, digits, dots, dashes")
        self._check_kind()
        if self.choices is not None and len(self.choices) == 0:
            raise ValueError("tree.choices=[]: give at least one path, such as [0]")
        if self.children not in ("top_k", "sampled"):
            raise ValueError(f"tree.children={self.children}: expected top_k or sampled")
        if self.children == "sampled" and self.total is not None:
            raise ValueError(
                "tree.children=sampled with a dynamic tree: choosing among drawn children is not "
                "lossless; use top_k"
            )
        self.shape()  # a malformed path is refused here, not after the target has been loaded

    def _check_kind(self) -> None:
        dynamic = {"top_k": self.top_k, "levels": self.levels, "total": self.total}
        missing = [f"tree.{name}" for name, value in dynamic.items() if value is None]
        kinds = (self.depth is not None, self.choices is not None, len(missing) < 3)
        if sum(kinds) != 1:
            given = {"depth": self.depth, "choices": self.choices} | dynamic
            raise ValueError(
                f"{', '.join(f'tree.{name}={value}' for name, value in given.items())}: give a "
                "depth for a chain, choices for a static tree, or top_k, levels and total for a "
                "dynamic one, and the others as null"
            )
        if kinds[2] and missing:
            raise ValueError(
                f"tree: {' and '.join(missing)} not set; a dynamic tree needs top_k, levels and "
                "total"
            )

    def shape(self) -> TreeShape | DynamicShape:
        """Return the shape a drafter fills. Raises ValueError naming the field or path at fault."""
        if self.depth is not None:
            return TreeShape.chain(self.depth)
        if self.choices is not None:
            return TreeShape.from_choices(self.choices)
        return DynamicShape(self.top_k, self.levels, self.total)

    def label(self) -> str:
        """Return how result files write the shape: 'chain:<depth>' or '<kind>:<name>'."""
        if self.depth is not None:
            return f"chain:{self.depth}"
        return f"static:{self.name}" if self.choices is not None else f"dynamic:{self.name}"


def tree_option(name: str) -> TreeConfig:
    """Return an option of the `tree` group. Raises ValueError naming the options there are."""
    options = {
        p.name.removesuffix(".yaml"): p for p in (files("headstart.conf") / "tree").iterdir()
    }
    if name not in options:
        known = ", ".join(sorted(options))
        raise ValueError(f"tree={name}: no such option; expected one of {known}")
    fields = OmegaConf.to_container(OmegaConf.create(options[name].read_text()))
    return TreeConfig(**{key: value for key, value in fields.items() if key != "defaults"})
