"""Exact enumeration of every verification rule over fractions: lossless means a distance of 0."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
import torch

from headstart.eval.engine.verify import SCHEMES, accept_ratio, condition, residual

Law = np.ndarray
Tries = list[tuple[int, Law, Law]]
"""Children in try order: token, q of the ratio, q of the residual."""
Drafts = Iterator[tuple[Fraction, Tries]]
"""Every draft of one node with its probability."""

ONE, ZERO = Fraction(1), Fraction(0)


def _law(weights: list[int]) -> Law:
    return np.array([Fraction(weight, sum(weights)) for weight in weights], dtype=object)


P = _law([2, 6, 6, 1])
Q = _law([8, 4, 1, 9])


def _one_hot(token: int, size: int) -> Law:
    return np.array([Fraction(int(i == token)) for i in range(size)], dtype=object)


def _mask(tokens: tuple[int, ...], size: int) -> np.ndarray:
    return np.isin(np.arange(size), tokens)


def _order(q: Law) -> list[int]:
    return sorted(range(len(q)), key=lambda token: -q[token])


def _conditional_tries(tokens: tuple[int, ...], q: Law) -> Tries:
    given = [condition(q, _mask(tokens[:i], len(q))) for i in range(len(tokens))]
    return [(token, law, law) for token, law in zip(tokens, given, strict=True)]


def _fixed_tries(tokens: tuple[int, ...], size: int) -> Tries:
    return [(token, _one_hot(token, size), _one_hot(token, size)) for token in tokens]


def _without_replacement(q: Law, k: int) -> Iterator[tuple[Fraction, tuple[int, ...]]]:
    """Every sequence of k distinct draws; fewer draws where fewer tokens have support."""
    support = [token for token in range(len(q)) if q[token] > 0]
    for tokens in permutations(support, min(k, len(support))):
        weight = ONE
        for i, token in enumerate(tokens):
            weight *= condition(q, _mask(tokens[:i], len(q)))[token]
        yield weight, tokens


def _with_replacement(q: Law, k: int) -> Iterator[tuple[Fraction, tuple[int, ...]]]:
    for tokens in product([token for token in range(len(q)) if q[token] > 0], repeat=k):
        yield np.prod(q[list(tokens)]), tokens


def _a(q: Law, k: int) -> Drafts:
    for weight, tokens in _with_replacement(q, 1):
        yield weight, [(tokens[0], q, q)]


def _a1(q: Law, k: int) -> Drafts:
    yield ONE, _fixed_tries((_order(q)[0],), len(q))


def _b(q: Law, k: int) -> Drafts:
    yield ONE, _fixed_tries(tuple(_order(q)[:k]), len(q))


def _c(q: Law, k: int) -> Drafts:
    for weight, tokens in _without_replacement(q, k):
        yield weight, _conditional_tries(tokens, q)


def _c1(q: Law, k: int) -> Drafts:
    for weight, tokens in _without_replacement(q, k):
        yield weight, _fixed_tries(tokens, len(q))


def _d(q: Law, k: int) -> Drafts:
    for weight, tokens in _with_replacement(q, k):
        yield weight, [(token, q, q) for token in tokens]


LOSSLESS = {"a": _a, "a1": _a1, "b": _b, "c": _c, "c1": _c1, "d": _d}


def _a_argmax_child(q: Law, k: int) -> Drafts:
    yield ONE, [(_order(q)[0], q, q)]


def _b_conditional_q(q: Law, k: int) -> Drafts:
    yield ONE, _conditional_tries(tuple(_order(q)[:k]), q)


def _c_raw_q(q: Law, k: int) -> Drafts:
    for weight, tokens in _without_replacement(q, k):
        yield weight, [(token, q, q) for token in tokens]


def _c_raw_q_in_residual(q: Law, k: int) -> Drafts:
    for weight, tokens in _without_replacement(q, k):
        yield weight, [(token, law, q) for token, law, _ in _conditional_tries(tokens, q)]


def _d_duplicates_dropped(q: Law, k: int) -> Drafts:
    for weight, tokens in _with_replacement(q, k):
        yield weight, [(token, q, q) for token in dict.fromkeys(tokens)]


def _e_most_confident_only(q: Law, k: int) -> Drafts:
    for weight, tokens in _without_replacement(q, k):
        yield weight, [(min(tokens, key=_order(q).index), q, q)]


def _f_sorted_again(q: Law, k: int) -> Drafts:
    for weight, tokens in _without_replacement(q, k):
        yield weight, _conditional_tries(tuple(sorted(tokens, key=_order(q).index)), q)


def _try_in_order(p: Law, tries: Tries) -> tuple[Law, Law]:
    """Return P(child accepted) by token, and the part of the law emitted as a correction."""
    accepted, reached = p * ZERO, ONE
    for token, ratio_q, residual_q in tries:
        share = reached * min(ONE, accept_ratio(p[token], ratio_q[token]))
        accepted[token] += share
        reached -= share
        if reached == 0:
            return accepted, p * ZERO
        p = residual(p, residual_q)
    return accepted, reached * p


def _emitted(p: Law, drafts: Drafts) -> tuple[Law, Fraction]:
    """Return the law of the token one node emits, and P(some child accepted)."""
    law, some = p * ZERO, ZERO
    for weight, tries in drafts:
        accepted, corrected = _try_in_order(p, tries)
        law = law + weight * (accepted + corrected)
        some += weight * accepted.sum()
    return law, some


def _distance(law: Law, other: Law) -> Fraction:
    return sum(abs(law - other), ZERO) / 2


def test_every_scheme_in_production_is_enumerated() -> None:
    assert set(SCHEMES) == set(LOSSLESS)
    assert all(scheme.lossless for scheme in SCHEMES.values())


@pytest.mark.parametrize(
    ("scheme", "accepted"),
    [
        ("a", Fraction(47, 110)),
        ("a1", Fraction(1, 15)),
        ("b", Fraction(3, 5)),
        ("c", Fraction(19, 25)),
        ("c1", Fraction(2015, 3213)),
        ("d", Fraction(35033, 53240)),
    ],
)
def test_p41_lossless_schemes_emit_the_golden_law_exactly(scheme: str, accepted: Fraction) -> None:
    law, some = _emitted(P, LOSSLESS[scheme](Q, 3))
    assert _distance(law, P) == 0
    assert some == accepted


@pytest.mark.parametrize(
    ("wrong", "distance"),
    [
        (_a_argmax_child, Fraction(608, 2835)),
        (_b_conditional_q, Fraction(9271, 22680)),
        (_c_raw_q, Fraction(6, 25)),
        (_c_raw_q_in_residual, Fraction(73418182, 1137482325)),
        (_d_duplicates_dropped, Fraction(84703, 1295910)),
        (_e_most_confident_only, Fraction(4445408, 21928725)),
        (_f_sorted_again, Fraction(30995605, 86837751)),
    ],
)
def test_p41_wrong_rules_are_detected_with_their_known_distance(
    wrong: Callable[[Law, int], Drafts], distance: Fraction
) -> None:
    law, _ = _emitted(P, wrong(Q, 3))
    assert law.sum() == 1
    assert _distance(law, P) == distance


def test_a_hand_picked_pair_hides_the_wrong_rules() -> None:
    """The golden vector is needed: on these round numbers three biased rules look lossless."""
    p, q = _law([10, 5, 3, 2]), _law([1, 3, 4, 2])
    for wrong in (_c_raw_q, _c_raw_q_in_residual, _d_duplicates_dropped):
        assert _distance(_emitted(p, wrong(q, 2))[0], p) == 0


def _random_law(generator: np.random.Generator, *, zeros: bool) -> Law:
    weights = generator.integers(0 if zeros else 1, 10, size=4)
    weights[generator.integers(4)] += 1
    return _law(weights.tolist())


def _instances(count: int) -> Iterator[tuple[Law, Law]]:
    generator = np.random.default_rng(0)
    for i in range(count):
        p = _random_law(generator, zeros=i % 2 == 1)
        yield p, _random_law(generator, zeros=i % 4 >= 2)
    p = _law([0, 3, 2, 1])
    yield p, p
    yield _law([1, 2, 0, 0]), _law([0, 0, 3, 1])


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("scheme", LOSSLESS)
def test_lossless_on_random_laws_with_zeros_on_either_side(scheme: str, k: int) -> None:
    for p, q in _instances(100):
        law, _ = _emitted(p, LOSSLESS[scheme](q, k))
        assert _distance(law, p) == 0, (p, q)


@pytest.mark.parametrize("scheme", ["a1", "b", "c1"])
def test_fixed_children_accept_exactly_what_one_draw_of_the_target_accepts(scheme: str) -> None:
    """Trying undrawn children in turn equals drawing once, the form the verifier runs."""
    for p, q in _instances(20):
        for _, tries in LOSSLESS[scheme](q, 3):
            accepted, corrected = _try_in_order(p, tries)
            children = _mask(tuple(token for token, _, _ in tries), 4)
            assert _distance(accepted, p * children) == 0
            assert _distance(corrected, p * ~children) == 0


Rows = list[Law]


def _continued(stream: dict, target: Rows) -> dict:
    """Let the target append one token to every stream."""
    longer: dict = defaultdict(Fraction)
    for tokens, weight in stream.items():
        for token, share in enumerate(target[tokens[-1]]):
            longer[(*tokens, token)] += weight * share
    return longer


def _two_level_stream(
    scheme: Callable[[Law, int], Drafts], target: Rows, drafter: Rows, k: int
) -> dict:
    """Return the law of the first three tokens after token 0, by a tree of two levels.

    Whatever a round leaves open is continued by the target; where both levels are accepted, the
    third token is the bonus drawn at the leaf.
    """
    kept, done = {(0,): ONE}, defaultdict(Fraction)
    for tokens_after in (2, 1):
        deeper: dict = defaultdict(Fraction)
        for path, reach in kept.items():
            for weight, tries in scheme(drafter[path[-1]], k):
                accepted, corrected = _try_in_order(target[path[-1]], tries)
                for token in range(len(accepted)):
                    deeper[(*path, token)] += reach * weight * accepted[token]
                stopped = {(*path, t): reach * weight * corrected[t] for t in range(len(corrected))}
                for _ in range(tokens_after):
                    stopped = _continued(stopped, target)
                for tokens, share in stopped.items():
                    done[tokens] += share
        kept = deeper
    for tokens, share in _continued(kept, target).items():
        done[tokens] += share
    return done


def _random_rows(generator: np.random.Generator) -> Rows:
    weights = generator.integers(0, 8, (3, 3)) + np.eye(3, dtype=int)
    return [_law(row) for row in weights.tolist()]


@pytest.mark.parametrize("scheme", ["a", "b", "c", "d"])
def test_two_levels_and_the_bonus_emit_the_stream_of_the_target(scheme: str) -> None:
    generator = np.random.default_rng(1)
    for _ in range(5):
        target, drafter = _random_rows(generator), _random_rows(generator)
        stream = _two_level_stream(LOSSLESS[scheme], target, drafter, 2)
        expected = {(0,): ONE}
        for _ in range(3):
            expected = _continued(expected, target)
        assert {k: v for k, v in stream.items() if v} == {k: v for k, v in expected.items() if v}


def test_rules_agree_on_tensors_and_fractions() -> None:
    for p, q in _instances(20):
        p_V, q_V = (torch.tensor(law.astype(float)) for law in (p, q))
        left = torch.tensor(residual(p, q).astype(float))
        assert torch.allclose(residual(p_V, q_V), left)
        tried = _mask((1, 3), 4)
        given = torch.tensor(condition(q, tried).astype(float))
        assert torch.allclose(condition(q_V, torch.from_numpy(tried)), given)
