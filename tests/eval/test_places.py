"""Places of accepted nodes among their siblings: golden trees, absent nodes, real decoding."""

import pytest
import torch
from models import GREEDY, make_head, requests, run, target_of, tiny_model
from scripted import Script, cycle

from headstart.eval.branches import branches
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.build import head_drafter
from headstart.eval.engine.places import places
from headstart.eval.engine.records import Completion, Round
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import TreeShape
from headstart.eval.engine.tree_config import TreeConfig
from headstart.eval.metrics import figures, prompt_sums

# Nodes 1..6: the golden tree of three depths.
SHAPE = TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [0, 1, 0], [0, 1, 1]])


def filled():
    return SHAPE.fill(torch.tensor([[9, 1, 2, 3, 4, 5, 6]]))


@pytest.mark.parametrize(
    ("path", "place", "offered"),
    [
        ([0, 1, 4, 6], [-1, 0, 1, 1], [2, 2, 2, 0]),
        ([0, 2, -1, -1], [-1, 1, -1, -1], [2, 0, 0, 0]),
        ([0, -1, -1, -1], [-1, -1, -1, -1], [2, 0, 0, 0]),
    ],
)
def test_a_path_is_told_by_places_and_by_how_many_children_were_offered(path, place, offered):
    found = places(filled(), torch.tensor([path]))
    assert [t.tolist() for t in found] == [[place], [offered]]


def test_children_that_a_limit_cut_off_are_not_offered():
    short = filled().limit_depth(torch.tensor([1]))
    _, offered_BK = places(short, torch.tensor([[0, 1, -1, -1]]))
    assert offered_BK.tolist() == [[2, 0, 0, 0]]


def test_branches_count_offers_and_acceptances_by_path():
    rounds = [
        Round(2, 3, 6, 3, 7, "rejected", places=[0, 1], offered=[2, 2, 2]),
        Round(1, 2, 6, 3, 7, "leaf", places=[1], offered=[2, 0]),
        Round(0, 1, 6, 3, 7, "rejected", places=[], offered=[2]),
    ]
    found = branches([Completion("p", [1] * 7, "stop", rounds=rounds)])
    assert [(b.path, b.offered, b.accepted) for b in found] == [
        ([], [3, 3], [1, 1]),
        ([0], [1, 1], [0, 1]),
        ([0, 1], [1, 1], [0, 0]),
    ]


def test_a_cut_round_does_not_count_as_a_rejection_where_it_was_cut():
    cut = Round(1, 1, 6, 3, 7, "cut", places=[0], offered=[2])
    found = branches([Completion("p", [1, 1], "stop", rounds=[cut])])
    assert [(b.path, b.offered, b.accepted) for b in found] == [([], [1, 1], [1, 0])]


TREES = {
    "chain": TreeConfig("chain", depth=3),
    "static": TreeConfig("static", choices=[[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]),
    "dynamic": TreeConfig("dynamic", top_k=3, levels=3, total=8),
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("tree", TREES)
def test_accepted_branches_of_a_depth_add_up_to_its_prefix_acceptance(tree, temperature):
    target = target_of(tiny_model(layers=2))
    sampling = SamplingConfig(temperature=temperature)
    drafter = head_drafter(make_head("eagle", target), target.parts, TREES[tree], sampling)
    done = list(run(target, drafter, requests(4, 24), sampling=sampling, batch_size=2).values())
    sums = [prompt_sums(completion, None) for completion in done]
    rounds = sum(s.rounds for s in sums)
    found = branches(done)
    assert rounds > 20
    for r in (r for completion in done for r in completion.rounds):
        assert len(r.places) == r.accepted
        assert len(r.offered) == r.accepted + (r.stop != "cut")
    for depth, share in enumerate(figures(sums)["alpha_prefix"]):
        accepted = sum(sum(b.accepted) for b in found if len(b.path) == depth)
        assert accepted == pytest.approx(share * rounds)
    tried = [b for b in found if b.path == []]
    assert max(tried[0].offered) <= rounds


def test_p46_a_stop_token_inside_the_path_leaves_the_node_behind_it_out():
    # From 0 the target emits 1; 2, 3, 4 are drafted and right, and 3 ends the answer.
    request = Request("p", (0,), 9)
    done = run(cycle(), Script([1, 2, 3]), [request], stop_ids=[3])["p"]
    (cut,) = done.rounds
    assert (cut.stop, cut.places, cut.offered) == ("cut", [0, 0], [1, 1])


def test_plain_decoding_has_no_branches():
    target = target_of(tiny_model(layers=2))
    assert branches(list(run(target, None, requests(1, 8), sampling=GREEDY).values())) == []
