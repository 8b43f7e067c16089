"""A draft tree with what became of its edges: how often each was tried and accepted."""

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.eval.report_charts import Drawn
from headstart.eval.report_svg import HEAD, number, tag, text, tooltip
from headstart.eval.result import Branch

NODES = 32
"""Most nodes drawn: those that the most rounds accepted."""
ACROSS, DOWN, RADIUS = 86, 27, 8.5
Path = tuple[int, ...]


@dataclass(frozen=True)
class Edge:
    """A child in one place of the tree, over all rounds."""

    path: Path
    offered: int
    accepted: int

    @property
    def share(self) -> float:
        """Accepted of offered."""
        return self.accepted / self.offered if self.offered else 0.0


def edges(branches: Sequence[Branch]) -> list[Edge]:
    """Return the edges that were tried, the most accepted first, a parent before its children."""
    found = [
        Edge((*branch.path, place), offered, accepted)
        for branch in branches
        for place, (offered, accepted) in enumerate(
            zip(branch.offered, branch.accepted, strict=True)
        )
    ]
    return sorted(found, key=lambda e: (-e.accepted, len(e.path), e.path))


def by_depth(branches: Sequence[Branch]) -> list[list[Edge]]:
    """Add the edges of one depth and place up: [depth][place], whatever lies above them."""
    depths: list[list[Edge]] = []
    for edge in edges(branches):
        depth, place = len(edge.path) - 1, edge.path[-1]
        depths += [[] for _ in range(depth + 1 - len(depths))]
        row = depths[depth]
        row += [Edge((i,), 0, 0) for i in range(len(row), place + 1)]
        total = row[place]
        row[place] = Edge((place,), total.offered + edge.offered, total.accepted + edge.accepted)
    return depths


def tree(branches: Sequence[Branch], rounds: int) -> tuple[Drawn, float]:
    """Draw the tree from left to right; return it with its height, and its width."""
    kept = edges(branches)[:NODES]
    depth = max((len(e.path) for e in kept), default=0)
    heights = _heights([e.path for e in kept])
    parts = [_edge(e, heights, rounds) for e in reversed(kept)]
    parts += [_node(e, heights) for e in kept]
    root = text("root", 0, heights[()] + 22, "tick")
    dot = tag("circle", cx=12, cy=heights[()], r=6, class_="root")
    bottom = max(heights.values()) + RADIUS + 14
    return ("".join([*parts, dot, root]), bottom), 12 + depth * ACROSS + RADIUS + 4


def _heights(paths: Sequence[Path]) -> dict[Path, float]:
    """Give every leaf a line of its own; a parent stands level with its first child."""
    heights: dict[Path, float] = {}
    used = 0

    def place(path: Path) -> float:
        nonlocal used
        children = sorted(p for p in paths if p[:-1] == path and len(p) == len(path) + 1)
        levels = [place(child) for child in children]
        if not levels:
            levels = [HEAD + RADIUS + 8 + used * DOWN]
            used += 1
        heights[path] = levels[0]
        return heights[path]

    place(())
    return heights


def _spot(path: Path, heights: dict[Path, float]) -> tuple[float, float]:
    return 12 + len(path) * ACROSS, heights[path]


def _words(edge: Edge) -> str:
    return f"{100 * edge.share:.0f} %"


def _edge(edge: Edge, heights: dict[Path, float], rounds: int) -> str:
    (x, y), (to_x, to_y) = _spot(edge.path[:-1], heights), _spot(edge.path, heights)
    turn = x + 26
    path = f"M{number(x)} {number(y)}C{number(turn)} {number(y)} {number(x + 14)} {number(to_y)}"
    path += f" {number(x + 40)} {number(to_y)}H{number(to_x)}"
    width = 1 + 7 * edge.accepted / max(rounds, 1)
    curve = tag(
        "path", d=path, class_="edge" if edge.accepted else "edge never", stroke_width=width
    )
    return curve + text(_words(edge), to_x - RADIUS - 5, to_y - 6, "tick", "end")


def _node(edge: Edge, heights: dict[Path, float]) -> str:
    x, y = _spot(edge.path, heights)
    words = (
        f"path {list(edge.path)}: accepted in {edge.accepted} of the {edge.offered} rounds "
        f"that tried it ({_words(edge)})"
    )
    dot = tag("circle", cx=x, cy=y, r=RADIUS, class_="dot s0" if edge.accepted else "dot none")
    return tooltip(words, dot, text(str(edge.path[-1]), x, y + 3.8, "inside small", "middle"))
