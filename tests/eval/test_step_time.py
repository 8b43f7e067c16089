"""The price of a round: monotone curves, what is probed, and tables from the real loop."""

from dataclasses import replace

import pytest
import torch
from models import make_head, requests, some_vocab, target_of, tiny_model
from scripted import Clock

from headstart.eval.engine import decode as loop
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import TreeShape
from headstart.eval.step_time import Curve, StepTimes, measure, never_falling, probes, turn_order

GREEDY = SamplingConfig()
TIMES = StepTimes(
    batch=1,
    contexts=[10],
    plain=30.0,
    verify={2: 30.0, 8: 36.0, 16: 52.0},
    commit={2: 5.0, 16: 5.0},
    chain={1: 1.0, 2: 6.0, 3: 11.5},
    first=2.0,
    step={1: 5.0, 4: 8.0},
    dynamic={4: {1: 3.0, 3: 19.0}},
)


# Curves.


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]),
        ([1.0, 3.0, 2.0, 4.0], [1.0, 2.5, 2.5, 4.0]),
        ([3.0, 2.0, 1.0], [2.0, 2.0, 2.0]),
        ([2.0, 4.0, 4.0, 1.0], [2.0, 3.0, 3.0, 3.0]),
        ([5.0], [5.0]),
    ],
)
def test_falling_neighbours_become_their_mean(values: list[float], want: list[float]) -> None:
    assert never_falling(values) == pytest.approx(want)


def test_a_curve_is_straight_between_points_and_goes_on_beyond_the_last() -> None:
    curve = Curve({8: 36.0, 2: 30.0, 16: 52.0})
    assert [curve(n) for n in (1, 2, 5, 8, 12, 16, 20)] == [30, 30, 33, 36, 44, 52, 60]
    assert Curve({3: 7.0})(9) == 7.0


# Prices.


def test_a_round_costs_the_pass_the_commit_and_the_draft() -> None:
    assert TIMES.after_draft(5) == 33.0 + 5.0
    assert TIMES.draft_static(TreeShape.chain(3).choices) == 11.5
    assert TIMES.draft_dynamic(4, 1) == 3.0
    assert TIMES.draft_dynamic(4, 2) == 11.0


def test_a_static_tree_pays_a_step_a_level_by_the_nodes_it_expands() -> None:
    paths = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]
    assert TIMES.draft_static(paths[:3]) == 2.0
    assert TIMES.draft_static(paths[:5]) == 2.0 + 5.0
    assert TIMES.draft_static(paths) == 2.0 + 6.0 + 5.0  # two nodes expanded, then one


def test_a_head_that_knows_all_depths_at_once_pays_no_step() -> None:
    times = replace(TIMES, step={}, known_depths=3)
    assert times.draft_static([(0,), (1,), (0, 0), (1, 1), (0, 0, 2)]) == 2.0


# Probes.


@pytest.mark.parametrize("family", ["medusa", "hydra_heads", "eagle"])
def test_every_size_is_probed_and_every_probe_fits_the_head(family: str) -> None:
    target = target_of(tiny_model())
    options = {} if family == "eagle" else {"num_heads": 3}
    head = make_head(family, target, vocab=some_vocab(64), **options)
    grown = () if family == "medusa" else (2, 4)
    found = probes(head, nodes=20, depth=3, top_k=grown)
    assert [p.key for p in found if p.kind == "fan"] == [2, 4, 8, 12, 16, 20]
    assert [p.key for p in found if p.kind == "chain"] == [1, 2, 3]
    steps = [] if family == "medusa" else [1, 2, 4, 8, 9]
    assert [p.key for p in found if p.kind == "step"] == steps
    levels = [p.key for p in found if p.kind == "dynamic 4"]
    assert levels == ([1, 3] if grown else [])
    times = measure(
        target,
        head,
        requests(3, 1),
        sampling=GREEDY,
        nodes=20,
        depth=3,
        top_k=grown,
        batch=2,
        repeats=2,
    )
    assert set(times.chain) == {1, 2, 3}
    assert {2, 4, 8, 12, 16, 20} <= set(times.verify) == set(times.commit)
    assert set(times.step) == set(steps)
    assert set(times.dynamic) == set(grown)
    assert times.batch == 2
    assert times.known_depths == (3 if family == "medusa" else 1)
    shortest = min(times.plain, *times.verify.values(), times.first)
    assert shortest > 0


def test_every_probe_has_its_turn_once_and_plain_decoding_all_along() -> None:
    assert turn_order(8, 3) == [0, 4, 5, 6, 7, 8, 1, 0, 2, 3]
    assert sorted(turn_order(37, 11)) == [0] * 7 + list(range(1, 38))


def test_a_small_vocabulary_bounds_the_fans() -> None:
    target = target_of(tiny_model())
    found = probes(make_head("eagle", target, vocab=some_vocab(4)), nodes=20, depth=1, top_k=())
    assert [p.key for p in found if p.kind == "fan"] == [2, 4, 5]


def test_times_are_those_of_the_loops_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by 1 ms at every look: a stage of any round takes 1 ms, a round 3 ms."""
    monkeypatch.setattr(loop.time, "perf_counter", Clock().perf_counter)
    target = target_of(tiny_model())
    times = measure(
        target,
        make_head("eagle", target),
        requests(2, 1),
        sampling=GREEDY,
        nodes=8,
        depth=2,
        top_k=(2,),
        repeats=2,
    )
    assert times.plain == pytest.approx(3e-3)
    assert set(map(lambda t: round(t, 6), times.verify.values())) == {1e-3}
    assert times.first == pytest.approx(1e-3)
    assert all(step == pytest.approx(0, abs=1e-9) for step in times.step.values())
    assert torch.is_grad_enabled()
