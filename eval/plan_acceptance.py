"""The acceptance a plan is made with: assumed, given, or measured and read from a result.

Letters: d depth from 0, r rank of a candidate from 0; k drafted tokens of a chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.eval.result import Result
from headstart.eval.result_files import read_result
from headstart.eval.roofline import Draft, chain_draft, expected_tokens, tree_draft

ASSUMED, DEEPEST = 0.7, 16
SHOWN_KS = (1, 2, 3, 5, 7)
TOLERANCE = 0.1
"""Relative difference of a chain's yield by alpha_cond from the measured one that is accepted."""


@dataclass(frozen=True)
class Acceptance:
    """Shares of accepted candidates, by depth and rank, and where they come from."""

    accuracies: list[list[float]]
    """[d][r]; with rank 0 alone these are alpha_cond by depth."""
    source: str
    measured: bool = False

    @property
    def alphas(self) -> list[float]:
        """Acceptance of the best candidate by depth: a chain's alpha_cond."""
        return [row[0] for row in self.accuracies]


def acceptance(alphas: Any, alphas_from: str | None) -> Acceptance:
    """Read the options `alphas` and `alphas_from`.

    Raises ValueError for both at once, numbers that are no shares, and results whose alpha_cond is
    not that of a chain of fixed length.
    """
    if alphas is not None and alphas_from is not None:
        raise ValueError(
            f"alphas={alphas} and alphas_from={alphas_from}: acceptance is given or measured; drop "
            "one of them"
        )
    if alphas_from is not None:
        return _measured(alphas_from)
    if alphas is None:
        source = f"assumed: {ASSUMED:g} at every depth"
        return Acceptance([[ASSUMED]] * DEEPEST, source)
    if _is_number(alphas):
        rows, source = [[alphas]] * DEEPEST, f"given: {alphas:g} at every depth"
    elif isinstance(alphas, Sequence) and not isinstance(alphas, str) and len(alphas):
        rows = [list(row) if isinstance(row, Sequence) else [row] for row in alphas]
        ranks = "depth and rank" if max(map(len, rows)) > 1 else "depth"
        source = f"given by {ranks}: {_written(rows)}"
    else:
        rows, source = [[alphas]], ""
    _check(rows)
    return Acceptance([[float(value) for value in row] for row in rows], source)


def _check(rows: list[list[Any]]) -> None:
    for depth, row in enumerate(rows):
        if not row or not all(_is_number(value) and 0 <= value <= 1 for value in row):
            raise ValueError(
                f"alphas={row if len(row) != 1 else row[0]} at depth {depth}: expected shares in "
                "[0, 1]: a number, a list by depth, or a list by depth of lists by rank"
            )
        if sum(row) > 1 + 1e-6:
            raise ValueError(
                f"alphas at depth {depth} add up to {sum(row):.3f}: expected the share of each "
                "rank alone; take the difference of cumulative ones"
            )


def _measured(path: str) -> Acceptance:
    result = read_result(Path(path))
    _refuse_other_drafts(path, result)
    drafter, where = result.drafter, result.provenance
    tried = [value for value in result.figures["alpha_cond"] if value is not None]
    if not tried:
        raise ValueError(
            f"alphas_from={path}: {drafter.name} drafted nothing there; choose a result of a head"
        )
    _refuse_other_yield(path, result, expected_tokens(tried))
    rows = [[value] for value in tried]
    source = (
        f"measured: {drafter.name} ({drafter.tree}) on {where.target}, {result.counts.prompts} "
        f"prompts of {where.prompt_suite}: {_written(rows)}"
    )
    return Acceptance(rows, source, measured=True)


def _refuse_other_drafts(path: str, result: Result) -> None:
    """Raise for drafts that are no chain of one length, or not always."""
    drafter = result.drafter
    if not drafter.tree.startswith("chain:") or "+" in drafter.tree:
        raise ValueError(
            f"alphas_from={path}: measured with tree {drafter.tree}, whose conditional acceptance "
            "is not a chain's; evaluate the head with tree=chain5"
        )
    if drafter.policy != "fixed":
        raise ValueError(
            f"alphas_from={path}: measured with policy {drafter.policy}, which drafts deep only "
            "where that promises to pay; evaluate the head with policy=fixed"
        )


def _refuse_other_yield(path: str, result: Result, expected: float) -> None:
    """Raise where rounds of no draft, or a shorter one, keep the chain from its yield.

    A lookup without a match tries no depth, so that its alpha_cond is that of the rounds with one.
    """
    measured = result.figures["tau_full_rounds"]
    if measured is None or abs(expected / measured - 1) > TOLERANCE:
        told = "null" if measured is None else f"{measured:.2f}"
        raise ValueError(
            f"alphas_from={path}: as a chain's, alpha_cond of {result.drafter.name} would emit "
            f"{expected:.2f} tokens a round, but tau_full_rounds={told}: not every round drafted "
            "the whole chain; choose a result of a head measured with tree=chain5"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _written(rows: list[list[Any]]) -> str:
    return ", ".join("/".join(f"{v:.3g}" if _is_number(v) else str(v) for v in r) for r in rows)


def plan_drafts(
    given: Acceptance, ks: list[int] | None, trees: list[int], max_depth: int
) -> list[Draft]:
    """Return the drafts that tables show: chains of `ks` and static trees of `trees` nodes.

    Raises ValueError for drafts deeper than the drafter or than the acceptance is known.
    """
    deepest = min(len(given.accuracies), max_depth)
    shown = sorted({min(k, deepest) for k in SHOWN_KS})
    chosen = shown if ks is None else ks
    for k in chosen:
        if k > max_depth:
            raise ValueError(f"ks={ks}: the drafter goes {max_depth} tokens deep; lower {k}")
        if k > deepest:
            raise ValueError(
                f"ks={ks}: acceptance is known for {deepest} depths; lower {k} or give alphas for "
                "more depths"
            )
    known = given.accuracies[:deepest]
    return [chain_draft(known, k) for k in chosen] + [_tree(known, n, trees) for n in trees]


def _tree(known: list[list[float]], nodes: int, trees: list[int]) -> Draft:
    if max(map(len, known)) == 1:
        raise ValueError(
            f"trees={trees}: needs acceptance by rank too, such as "
            "alphas=[[.6,.12,.05],[.35,.1,.06]]; or drop trees"
        )
    width, most = 1, 1
    for row in known:
        width *= len(row)
        most += width
    if nodes > most:
        raise ValueError(
            f"trees={trees}: alphas by {len(known)} depths and their ranks make {most} nodes at "
            f"most; lower {nodes} or give more ranks"
        )
    return tree_draft(known, nodes)


def all_chains(given: Acceptance, max_depth: int) -> list[Draft]:
    """Return every chain that the drafter can make and the acceptance is known for."""
    deepest = min(len(given.accuracies), max_depth)
    return [chain_draft(given.accuracies, k) for k in range(1, deepest + 1)]
