"""The best paths of published and of counted shares, replayed rounds, and the search over them."""

import itertools
import math

import numpy as np
import pytest

from headstart.eval.acceptance import FAR, UNKNOWN, Acceptance, Calibration
from headstart.eval.engine.tree import Path, TreeShape
from headstart.eval.step_time import StepTimes
from headstart.eval.tree_search import (
    Limits,
    PathShares,
    best,
    best_paths,
    differences,
    expected_accepted,
    foretell,
    independent,
    marginals,
    orders,
    replay,
    search,
)

CUMULATIVE = {
    "7B": """.560 .672 .727 .760 .780 | .316 .424 .485 .528 .562 | .201 .288 .348 .383 .417
             .147 .225 .274 .311 .340 | .118 .187 .235 .272 .300""",
    "13B": """.594 .705 .758 .792 .816 | .340 .440 .507 .546 .580 | .216 .309 .361 .403 .436
              .150 .232 .288 .323 .354 | .122 .196 .243 .279 .307""",
    "33B": """.605 .716 .765 .798 .822 | .356 .469 .529 .569 .596 | .225 .320 .379 .421 .446
              .160 .249 .307 .348 .376 | .137 .207 .262 .298 .326""",
}
SIZES = [4, 7, 10, 15, 25, 31, 63]
EXPECTED = {
    "7B": [0.9094, 1.0354, 1.1266, 1.2106, 1.2890, 1.3168, 1.3841],
    "13B": [0.9664, 1.1028, 1.1985, 1.2915, 1.3787, 1.4071, 1.4808],
    "33B": [0.9997, 1.1367, 1.2302, 1.3238, 1.4164, 1.4456, 1.5220],
}
CHAIN_OF_5 = {"7B": 0.7784, "13B": 0.8469, "33B": 0.8777}


def _cumulative(model: str) -> list[list[float]]:
    """Top-1..5 accuracies by head: training data of FasterDecoding/Medusa (Apache-2.0)."""
    numbers = [float(word) for word in CUMULATIVE[model].replace("|", "").split()]
    return [numbers[5 * head : 5 * head + 5] for head in range(5)]


# The best paths.


def test_the_most_valuable_nodes_come_first() -> None:
    shares = independent(differences(_cumulative("7B")))
    paths = best_paths(shares, 10, 5)
    expected = [(0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (0, 3)]
    assert paths == expected
    values = [expected_accepted([path], shares) for path in paths]
    published = [0.56, 0.17696, 0.112, 0.06048, 0.055, 0.035569, 0.035392, 0.03416, 0.033, 0.02408]
    assert values == pytest.approx(published, abs=5e-7)


@pytest.mark.parametrize("model", CUMULATIVE)
def test_the_best_trees_accept_what_the_published_accuracies_give(model: str) -> None:
    shares = independent(differences(_cumulative(model)))
    accepted = [expected_accepted(best_paths(shares, n, 5), shares) for n in SIZES]
    assert accepted == pytest.approx(EXPECTED[model], abs=5e-5)
    chain = TreeShape.chain(5).choices
    assert expected_accepted(chain, shares) == pytest.approx(CHAIN_OF_5[model], abs=5e-5)


def test_the_best_paths_are_a_valid_shape() -> None:
    shares = independent(differences(_cumulative("13B")))
    for count in SIZES:
        shape = TreeShape.from_choices(best_paths(shares, count, 5))
        shape.check(max_depth=5, top_k=5)
        assert shape.num_nodes == count + 1


@pytest.mark.parametrize("seed", range(6))
def test_no_tree_of_its_size_is_worth_more_than_the_best_paths(seed: int) -> None:
    """Shares after a path of any kind, not falling with rank; every tree of up to 5 nodes tried."""
    draws = np.random.default_rng(seed)
    paths = [p for d in (0, 1, 2) for p in itertools.product(range(3), repeat=d)]
    table = {path: draws.dirichlet([0.5] * 4)[:3].tolist() for path in paths}
    trees = [frozenset()]
    for count in range(1, 6):
        trees = list({tree | {new} for tree in trees for new in _next_paths(tree)})
        worth = max(expected_accepted(sorted(tree), table.__getitem__) for tree in trees)
        mine = best_paths(table.__getitem__, count, 3)
        assert expected_accepted(mine, table.__getitem__) == pytest.approx(worth)


def _next_paths(tree: frozenset[Path]) -> set[Path]:
    grown = {(*path, rank) for path in [(), *tree] if len(path) < 3 for rank in range(3)}
    return grown - tree


def test_ties_go_to_the_shallower_then_the_lower_ranks() -> None:
    shares = independent([[0.5, 0.5], [1.0, 0.0]])
    assert best_paths(shares, 4, 2) == [(0,), (1,), (0, 0), (1, 0)]


def test_the_depth_limit_holds_and_fewer_paths_are_all_of_them() -> None:
    shares = independent([[0.9, 0.05]] * 3)
    assert max(map(len, best_paths(shares, 4, 2))) == 2
    assert len(best_paths(shares, 99, 2)) == 6


def test_cumulative_accuracies_are_refused() -> None:
    with pytest.raises(ValueError, match=r"accuracies of depth 0 sum to 3.499.*differences"):
        independent(_cumulative("7B"))


# Shares that were counted.

RANKS = np.array([[0, 1], [0, 1], [0, 0], [1, 0], [2, 0], [0, UNKNOWN]])
"""Two candidates a node: rank 2 is none of them."""


def test_marginals_count_every_place_whose_token_is_known() -> None:
    assert marginals(RANKS, 2) == [[4 / 6, 1 / 6], [3 / 5, 2 / 5]]


def test_shares_after_a_path_are_counted_where_it_was_taken_and_drawn_to_the_marginals() -> None:
    shares = PathShares(RANKS, 2, prior=1.0)
    assert shares(()) == pytest.approx([(4 + 4 / 6) / 7, (1 + 1 / 6) / 7])
    assert shares((0,)) == pytest.approx([(1 + 0.6) / 4, (2 + 0.4) / 4])
    assert shares((1,)) == pytest.approx([(1 + 0.6) / 2, (0 + 0.4) / 2])


def test_a_path_never_taken_has_the_marginals_and_a_frequent_one_its_own_shares() -> None:
    many = np.tile(RANKS, (10_000, 1))
    assert PathShares(RANKS[:3], 2, prior=5.0)((1,)) == pytest.approx([1 / 3, 2 / 3])
    assert PathShares(many, 2, prior=5.0)((0,)) == pytest.approx([1 / 3, 2 / 3], abs=1e-3)


def test_a_path_that_is_often_right_after_a_rare_token_is_found() -> None:
    """Rank 1 at depth 1 is right after rank 0 alone: accuracies without the path cannot tell."""
    ranks = np.array([[0, 1]] * 60 + [[1, 0]] * 40)
    assert best_paths(PathShares(ranks, 2, prior=1e-6), 4, 2) == [(0,), (0, 1), (1,), (1, 0)]
    alone = independent(marginals(ranks, 2))
    assert best_paths(alone, 4, 2) == [(0,), (1,), (0, 1), (0, 0)]


# Replayed rounds.


def test_orders_are_the_places_of_the_targets_nodes() -> None:
    paths = [(0,), (0, 0), (1,), (0, 1)]
    assert orders(RANKS, paths).tolist() == [
        [0, 3],
        [0, 3],
        [0, 1],
        [2, FAR],
        [FAR, FAR],
        [0, FAR],
    ]


def test_a_replay_walks_from_round_to_round_and_is_cut_at_the_end() -> None:
    """Places 0, 3, 4 of seven, then one round of a prompt with one place: 8 tokens in 4 rounds."""
    accepted = [2, 9, 9, 0, 5, 9, 9, 3]
    assert replay(accepted, [7, 1]) == 8 / 4
    assert replay([0, 0, 0], [3]) == 1.0
    assert replay([1, 0, 1, 0], [0, 4, 0]) == 2.0
    assert math.isnan(replay([], [0]))


# The search.


def _times(**changes: object) -> StepTimes:
    """A pass of N nodes takes 1 + N / 16, a draft step 0.25, whatever its width."""
    verify = {n: 1 + n / 16 for n in (2, 4, 8, 16)}
    values: dict[str, object] = {
        "batch": 1,
        "contexts": [10],
        "plain": 1.0,
        "verify": verify,
        "commit": dict.fromkeys(verify, 0.0),
        "chain": {d: 0.25 * (d - 1) for d in (1, 2, 3)},
        "first": 0.0,
        "step": {1: 0.25, 2: 0.25, 4: 0.25},
        "dynamic": {2: {1: 0.0, 3: 0.5}},
    }
    return StepTimes(**(values | changes))


def _acceptance(ranks: np.ndarray, lengths: list[int], **dynamic: np.ndarray) -> Acceptance:
    return Acceptance(lengths, ranks, {int(k[1:]): v for k, v in dynamic.items()}, Calibration())


def _sampled(places: int = 400, prompts: int = 10, depth: int = 3) -> Acceptance:
    draws = np.random.default_rng(0)
    ranks = draws.choice(4, size=(places, depth), p=[0.5, 0.25, 0.15, 0.1])  # 3: none of three
    orders_PLK = np.sort(draws.integers(0, 12, size=(places, depth, depth)), axis=-1)
    return _acceptance(ranks, [places // prompts] * prompts, k2=orders_PLK)


def test_the_search_finds_the_fastest_of_all_that_it_prices() -> None:
    found, limits = _sampled(), Limits(nodes=12, depth=3, ranks=3, top_k=(2,))
    options = search(found, _times(), limits, prior=20.0, folds=5)
    assert {option.kind for option in options} == {"chain", "static", "dynamic"}
    assert max(option.nodes for option in options) <= 12
    top = best(options)
    assert top.tokens_per_s == max(option.tokens_per_s for option in options)
    for kind in ("chain", "static", "dynamic"):
        assert best(options, kind).kind == kind


def test_a_promise_is_tau_over_the_price_of_the_round() -> None:
    found = _sampled()
    options = search(found, _times(), Limits(8, 3, 3, ()), prior=20.0, folds=5)
    chain = next(o for o in options if (o.kind, o.levels) == ("chain", 3))
    accepted = (found.ranks_PK == 0).cumprod(1).sum(1)
    assert chain.tau == replay(accepted.tolist(), found.lengths)
    assert chain.seconds == pytest.approx(0.5 + 1 + 4 / 16)
    assert chain.tokens_per_s == pytest.approx(chain.tau / chain.seconds) == chain.speedup
    static = next(o for o in options if o.kind == "static" and o.levels == 2)
    assert static.seconds == pytest.approx(0.25 + 1 + static.nodes / 16)


def test_the_price_decides_between_wide_and_deep() -> None:
    found, limits = _sampled(), Limits(12, 3, 3, ())
    dear = _times(step={1: 9.0}, chain={1: 0.0, 2: 9.0, 3: 18.0})
    assert best(search(found, dear, limits, prior=20.0, folds=5)).levels == 1
    free = _times(step={1: 0.0}, chain={1: 0.0, 2: 0.0, 3: 0.0}, verify={2: 1.0, 16: 1.0})
    assert best(search(found, free, limits, prior=20.0, folds=5)).nodes > 8


def test_a_static_tree_is_judged_by_prompts_that_did_not_choose_it() -> None:
    """Every prompt takes a rank of its own: what the others chose never helps it."""
    ranks = np.array([[prompt] for prompt in range(4) for _ in range(30)])
    found, times = _acceptance(ranks, [30] * 4), _times()
    options = search(found, times, Limits(3, 1, 4, ()), prior=1.0, folds=4)
    static = next(o for o in options if o.kind == "static" and o.nodes == 3)
    assert static.choices == ((0,), (1,))
    assert static.tau == 1.0
    assert foretell(static.tree("t"), found, times).tau == 120 / (15 + 15 + 30 + 30)


def test_any_shape_within_reach_can_be_foretold() -> None:
    found, times = _sampled(), _times()
    options = search(found, times, Limits(12, 3, 3, (2,)), prior=20.0, folds=5)
    for option in options[::7]:
        told = foretell(option.tree("t"), found, times)
        assert told.seconds == option.seconds
        assert told.nodes == option.nodes
        if option.kind != "static":  # a static one was judged fold by fold
            assert told == option


def test_more_drafts_never_lower_what_is_accepted() -> None:
    found = _sampled()
    options = search(found, _times(), Limits(12, 3, 3, (2,)), prior=20.0, folds=5)
    for levels in (2, 3):
        by_nodes = [o for o in options if o.kind == "dynamic" and o.levels == levels]
        places = [(found.dynamic_PLK[2][:, levels - 1] < o.nodes - 1).sum() for o in by_nodes]
        assert places == sorted(places)
