"""Policies: pure rules, what they do to a run, and that they never change what is decoded."""

import itertools
import warnings
from collections import Counter

import pytest
import torch
from laws import LAWS, chi_square_of_answers
from models import markov, oracle, requests, target_of, tokens_of
from paced import (
    CHAIN,
    FAMILIES,
    GREEDY,
    POLICIES,
    TREE,
    Watched,
    Whim,
    adaptive,
    drafter_of,
    rounds_of,
    run,
)
from torch import Tensor
from traces import chain_round

from headstart.eval.engine import drafting
from headstart.eval.engine.adaptive import (
    PRIOR,
    PRIOR_WEIGHT,
    Acceptance,
    RoundSeconds,
    best_depth,
)
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters import head as head_drafters
from headstart.eval.engine.drafters.base import FULL, DraftLimit
from headstart.eval.engine.drafters.head import best_log_prob
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.policy import (
    AdaptivePolicy,
    DraftPolicy,
    SurvivalPolicy,
    TablePolicy,
    draft_policy,
)
from headstart.eval.engine.policy_config import PolicyConfig
from headstart.eval.engine.records import Round
from headstart.eval.engine.sampling import SamplingConfig, processed_probs
from headstart.heads.target import Target, pick_features
from headstart.heads.vocab import DraftVocab

OPTIMA = {
    (0.6, 0.02): (6, 2.17),
    (0.6, 0.05): (4, 1.92),
    (0.6, 0.1): (3, 1.67),
    (0.7, 0.02): (8, 2.76),
    (0.7, 0.05): (6, 2.35),
    (0.7, 0.1): (4, 1.98),
    (0.8, 0.02): (11, 3.82),
    (0.8, 0.05): (8, 3.09),
    (0.8, 0.1): (6, 2.47),
    (0.9, 0.02): (19, 6.36),
    (0.9, 0.05): (13, 4.67),
    (0.9, 0.1): (10, 3.43),
}
"""Best depth and speedup by acceptance a and cost c, of i.i.d. acceptance."""


def survival(a: float, deepest: int = 40) -> list[float]:
    return [a ** (depth + 1) for depth in range(deepest)]


def line(c: float, deepest: int = 40) -> list[float]:
    return [1 + c * depth for depth in range(deepest + 1)]


# The rules


@pytest.mark.parametrize(("a", "c"), OPTIMA)
def test_the_best_depth_of_constant_acceptance_and_cost_is_the_tabulated_one(a, c):
    depth, speedup = OPTIMA[a, c]
    assert best_depth(survival(a), line(c)) == depth
    assert (1 + sum(survival(a)[:depth])) / (1 + c * depth) == pytest.approx(speedup, abs=0.006)


@pytest.mark.parametrize("a", [0.05, 0.3, 0.55, 0.81, 0.95])
@pytest.mark.parametrize("c", [0.01, 0.04, 0.13, 0.4, 0.9])
def test_the_best_depth_is_where_extending_stops_to_pay(a, c):
    depth, tokens = 0, 1.0
    while depth < 40 and a ** (depth + 1) > c * tokens / (1 + depth * c):
        depth, tokens = depth + 1, tokens + a ** (depth + 1)
    assert best_depth(survival(a), line(c)) == depth


def test_nothing_is_drafted_where_no_depth_pays():
    assert best_depth(survival(0.3), line(0.31)) == 0
    assert best_depth(survival(0.3), line(0.29)) == 1


def test_rates_of_drafts_within_the_slack_are_ties_that_the_shallowest_wins():
    rates = [0.99, 0.98, 1.0]  # of 1, 2 and 3 tokens a round
    seconds = [tokens / rate for tokens, rate in zip((1, 2, 3), rates, strict=True)]
    found = [best_depth([1.0, 1.0], seconds, slack=slack) for slack in (0.0, 0.01, 0.03, 0.5)]
    assert found == [2, 2, 1, 1]
    assert best_depth([1.0], [1.0, 2.0], slack=0.5) == 0


def test_a_depth_beyond_one_that_does_not_pay_may_be_the_best():
    assert best_depth([0.9, 0.9, 0.9], [1.0, 2.0, 2.1, 2.2]) == 3


def test_acceptance_counts_the_rows_that_came_to_a_depth():
    found = Acceptance(memory=10**9)
    for accepted in (2, 0, 3):
        found.add(4, [chain_round(accepted, 4)])
    assert found.came_K == pytest.approx([3, 2, 2, 1])
    assert found.passed_K == pytest.approx([2, 2, 1, 0])


def test_acceptance_counts_what_was_gained_to_a_stop_token_and_within_a_rows_room():
    found = Acceptance(memory=10**9)
    found.add(3, [chain_round(2, 3, cut=True), Round(2, 3, 2, 2, 3, "leaf")])
    assert found.came_K == pytest.approx([2, 2, 2])
    assert found.passed_K == pytest.approx([2, 2, 0])


def test_a_depth_that_the_drafter_had_nothing_for_is_not_accepted():
    found = Acceptance(memory=10**9)
    found.add(2, [Round(0, 1, 0, 0, 1, "leaf")])
    assert (found.came_K, found.passed_K) == ([1, 0], [0, 0])


def test_acceptance_fades_with_every_round_plain_ones_too_until_few_rows_are_left():
    found = Acceptance(memory=2)
    found.add(1, [chain_round(i % 2, 1) for i in range(80)])
    seen = []
    for _ in range(4):
        found.add(0, [Round(0, 1, 0, 0, 1, "leaf")])
        seen.append((found.came_K, found.passed_K))
    assert seen == [([40], [20]), ([20], [10]), ([10], [5]), ([10], [5])]


def test_a_depth_never_tried_is_taken_to_be_accepted_as_often_as_the_others():
    found = Acceptance(memory=10**9)
    for _ in range(1000):
        found.add(1, [chain_round(1, 1)])
    for _ in range(1000):
        found.add(1, [chain_round(0, 1)])
    assert found.survival(3) == pytest.approx([0.5, 0.25, 0.125], abs=0.01)
    assert Acceptance(memory=8).survival(2) == pytest.approx([PRIOR, PRIOR**2])
    assert PRIOR_WEIGHT > 0


def seconds_of(rows: int, depth: int) -> float:
    return 30 + 0.8 * rows * (1 + depth) + 2.5 * depth + 1.5 * (depth > 0)


def times_of(shapes) -> RoundSeconds:
    found = RoundSeconds()
    for rows, depth in shapes:
        found.add(rows, depth, seconds_of(rows, depth))
    return found


def test_the_fit_finds_the_time_of_shapes_never_tried():
    found = times_of([(1, 0), (8, 0), (1, 1), (1, 4), (8, 2)])
    for rows, depth in ((3, 0), (3, 2), (16, 5)):
        assert found.of(rows, depth) == pytest.approx(seconds_of(rows, depth))


def test_the_fit_over_one_batch_size_interpolates_the_depths_there():
    found = times_of([(8, 0), (8, 1), (8, 5)])
    for depth in range(6):
        assert found.of(8, depth) == pytest.approx(seconds_of(8, depth))


def test_the_fit_is_never_below_half_of_what_was_ever_measured():
    found = RoundSeconds()
    found.add(1, 0, 4.0)
    found.add(1, 1, 1.0)
    assert found.of(1, 9) >= 0.5


def test_the_first_round_of_a_shape_does_not_count_and_the_median_does():
    found = RoundSeconds()
    for seconds in (1000.0, 3.0, 1.0, 50.0):
        found.add(2, 1, seconds)
    assert found.of(2, 1) == 3.0
    assert found.last(2, 1) == 4
    assert found.last(2, 0) == 0


def test_one_plain_round_is_enough_to_tell_what_drafts_cost_at_other_rows():
    found = RoundSeconds()
    for rows, depth, times in ((16, 0, 1), (16, 1, 3), (16, 2, 3), (16, 3, 3), (15, 3, 5)):
        for _ in range(times):
            found.add(rows, depth, seconds_of(rows, depth))
    assert found.of(14, 0) == pytest.approx(seconds_of(14, 0), rel=0.05)


def test_only_the_newest_rounds_of_a_shape_count():
    found = RoundSeconds()
    for seconds in [1.0] * 50 + [9.0] * 3:
        found.add(1, 0, seconds)
    assert found.of(1, 0) == 9.0


def test_a_table_gives_the_depth_of_the_last_rows_reached():
    policy = TablePolicy([[1, 5], [4, 2], [16, 0]])
    found = [policy.limit(rows, 5).depth for rows in (1, 3, 4, 15, 16, 99)]
    assert found == [5, 5, 2, 2, 0, 0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "clever"}, "policy.kind=clever: expected one of fixed, table, survival, adaptiv"),
        ({"kind": "table"}, r"policy.depths=None: need pairs \[rows, depth\] with rising rows"),
        ({"kind": "table", "depths": [[2, 3]]}, r"policy.depths=\[\[2, 3\]\]: .* begin at 1"),
        ({"kind": "table", "depths": [[1, 3], [1, 2]]}, "rising rows that begin at 1"),
        ({"kind": "table", "depths": [[1, -1]]}, r"policy.depths=\[\[1, -1\]\]: need pairs"),
        ({"kind": "table", "depths": [[1]]}, r"policy.depths=\[\[1\]\]: need pairs"),
        ({"kind": "survival", "survival": 0.0}, r"policy.survival=0.0: need a probability in \(0"),
        ({"kind": "adaptive", "cost": 0.0}, "policy.cost=0.0: need a share above 0, or null"),
        ({"kind": "adaptive", "memory": 1}, "policy.memory=1: need at least 2 rounds"),
        ({"kind": "adaptive", "probe_every": 1}, "policy.probe_every=1: need at least 2 rounds"),
    ],
)
def test_a_bad_policy_is_refused_by_field(fields, message):
    with pytest.raises(ValueError, match=message):
        PolicyConfig(**fields)


def test_settings_of_another_kind_warn():
    with pytest.warns(UserWarning, match="policy.cost=0.1 has no effect with policy=fixed; drop"):
        PolicyConfig(cost=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PolicyConfig(kind="adaptive", cost=0.1, memory=32)


def test_every_kind_makes_its_policy():
    kinds = {"fixed": DraftPolicy, "survival": SurvivalPolicy, "adaptive": AdaptivePolicy}
    assert all(type(draft_policy(PolicyConfig(kind))) is made for kind, made in kinds.items())
    table = draft_policy(PolicyConfig("table", [[1, 2]]))
    assert table.limit(1, 5) == DraftLimit(depth=2)
    assert draft_policy(PolicyConfig()).limit(1, 5) == FULL


# The adaptive policy, on rounds that are made up


class Machine:
    """Rounds whose acceptance and time are known: chains of up to 5 on a batch."""

    deepest = 5

    def __init__(self, a: float, rows: int, *, slope: float, noise: float = 0.03) -> None:
        self.a, self.rows, self.slope, self.noise = a, rows, slope, noise
        self._generator = torch.Generator().manual_seed(1)
        self.tokens = self.seconds = 0.0

    def time(self, depth: int) -> float:
        drafting = 0.05 * (depth > 0) + 0.07 * depth
        return 1 + self.slope * (self.rows * (1 + depth) - 1) + drafting

    def rate(self, depth: int) -> float:
        return self.rows * sum(self.a**d for d in range(depth + 1)) / self.time(depth)

    def round(self, policy: AdaptivePolicy) -> int:
        depth = policy.limit(self.rows, self.deepest).depth
        chances = torch.rand(self.rows, depth + 1, generator=self._generator).tolist()
        accepted = [
            len(list(itertools.takewhile(lambda u: u < self.a, of_row[:depth])))
            for of_row in chances
        ]
        late = float(torch.rand(1, generator=self._generator)) * self.noise
        seconds = self.time(depth) * (1 + late)
        policy.learn(depth, [chain_round(n, depth) for n in accepted], seconds)
        # What the depth is worth, not what luck made of it: decisions are judged.
        self.tokens += self.rate(depth) * self.time(depth)
        self.seconds += self.time(depth)
        return depth


@pytest.mark.parametrize("slope", [0.003, 0.027, 0.1])
@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("a", [0.3, 0.6, 0.8])
def test_adaptive_depth_comes_near_the_best_fixed_one_and_never_far_below_plain(a, rows, slope):
    machine, policy = Machine(a, rows, slope=slope), adaptive()
    for _ in range(600):
        machine.round(policy)
    rate = machine.tokens / machine.seconds
    best = max(machine.rate(depth) for depth in range(6))
    assert rate > 0.97 * machine.rate(0)
    assert rate > 0.95 * best


def test_drafting_ends_where_it_does_not_pay_but_for_a_probe_now_and_then():
    machine, policy = Machine(0.3, 16, slope=0.1), adaptive()
    depths = [machine.round(policy) for _ in range(600)][100:]
    assert Counter(depths)[0] > 0.95 * len(depths)
    assert sum(depth > 0 for depth in depths) >= 3


def test_drafting_comes_back_when_it_pays_again():
    machine, policy = Machine(0.1, 1, slope=0.027), adaptive()
    before = [machine.round(policy) for _ in range(300)]
    machine.a = 0.9
    after = [machine.round(policy) for _ in range(600)]
    assert before[-50:].count(0) >= 48
    assert after[-50:].count(0) <= 2


def test_the_policy_tries_depths_anew_when_the_rows_have_doubled():
    policy, asked = adaptive(), []
    for rows in [4] * 8 + [7] * 2 + [8] * 7:
        depth = policy.limit(rows, 5).depth
        asked.append(depth)
        policy.learn(depth, [chain_round(0, depth)] * rows, seconds_of(rows, depth))
    assert asked[:6] == [5, 0, 1, 5, 0, 1]
    assert asked[10:16] == [5, 0, 1, 5, 0, 1]


def test_a_given_cost_reads_no_clock():
    policies = []
    for slope in (0.0, 5.0):
        machine, policy = Machine(0.7, 2, slope=slope), adaptive(cost=0.1)
        policies.append([machine.round(policy) for _ in range(200)])
    assert policies[0] == policies[1]
    assert Counter(policies[0]).most_common(1)[0][0] in (3, 4, 5)


# Decoding under a policy


@pytest.fixture(scope="module")
def prompts() -> list[Request]:
    return requests(6, 18)


@pytest.fixture(scope="module")
def plain(tiny: Target, prompts: list[Request]) -> dict[str, list[int]]:
    return tokens_of(run(tiny, None, prompts))


SHAPES = {"chain": CHAIN(4), "tree": TREE, "dynamic": DynamicShape(2, 3, 6)}


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize(
    ("family", "shape"),
    # A dynamic tree needs an autoregressive head.
    [pair for pair in itertools.product(FAMILIES, SHAPES) if pair != ("medusa", "dynamic")],
)
def test_p47_greedy_output_is_the_plain_one_at_any_depth(
    tiny, prompts, plain, family, shape, batch_size
):
    options = {} if family.startswith("eagle") else {"num_heads": 4}
    drafter = drafter_of(tiny, family, SHAPES[shape], **options)
    done = run(tiny, drafter, prompts, policy=Whim(), batch_size=batch_size)
    assert tokens_of(done) == plain
    assert {r.drafted > 0 for r in rounds_of(done)} == {True, False}


SAMPLED = SamplingConfig(temperature=0.8, top_k=50, top_p=0.95, seed=11)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fixed_children_leave_the_text_the_same_under_every_policy(
    tiny, prompts, policy, shape, sampling
):
    drafter = drafter_of(tiny, "eagle", SHAPES[shape], sampling)
    assert drafter.scheme == ("a1" if shape == "chain" else "b")
    done = run(tiny, drafter, prompts, policy=POLICIES[policy](), sampling=sampling)
    assert tokens_of(done) == tokens_of(run(tiny, None, prompts, sampling=sampling))


@pytest.mark.parametrize("family", FAMILIES)
def test_p49_a_drafter_that_was_not_shown_every_round_drafts_as_one_that_was(tiny, family):
    prompts = requests(7, 30)
    shape = CHAIN(3)
    whole, part = (Watched(drafter_of(tiny, family, shape)) for _ in range(2))
    run(tiny, part, prompts, policy=Whim(3), batch_size=3)  # with refill and rows that move
    run(tiny, whole, prompts, policy=DraftPolicy(), batch_size=3)
    both = part.drafts.keys() & whole.drafts.keys()
    assert len(both) > 60
    for place in both:
        length = len(part.drafts[place])
        assert part.drafts[place] == whole.drafts[place][:length]


class Off(DraftPolicy):
    """Drafts nothing."""

    def limit(self, rows: int, deepest: int) -> DraftLimit:
        """Return depth 0."""
        return DraftLimit(depth=0)


def test_while_nothing_is_drafted_the_drafter_is_not_called_and_passes_are_plain(
    tiny, prompts, plain, monkeypatch
):
    drafter, widths = Watched(drafter_of(tiny, "eagle3", TREE)), []
    pass_over = tiny.pass_over

    def spy(tokens_RN: Tensor, *arguments, rows=None, **options):
        widths.append((rows is None, tokens_RN.shape[1]))
        return pass_over(tokens_RN, *arguments, rows=rows, **options)

    monkeypatch.setattr(tiny, "pass_over", spy)
    done = run(tiny, drafter, prompts, policy=Off(), batch_size=len(prompts))
    assert tokens_of(done) == plain
    assert drafter.drafts == {}
    prefills = sum(not is_round for is_round, _ in widths)
    assert drafter.shown == prefills
    assert {width for is_round, width in widths if is_round} == {1}


def test_pairs_that_wait_are_shown_before_they_take_too_much_memory(tiny, prompts, monkeypatch):
    monkeypatch.setattr(drafting, "MOST_UNSEEN", 5)
    drafter = Watched(drafter_of(tiny, "eagle", CHAIN(2)))
    run(tiny, drafter, prompts[:1], policy=Off())
    assert drafter.shown == 1 + 16 // 5  # prefill; 17 rounds, of which the last shows nothing


def test_a_table_holds_for_the_rows_that_are_left(tiny):
    prompts = [Request(f"p{n}", (n, 5), n) for n in (6, 12, 18, 24)]
    table = TablePolicy([[1, 3], [2, 0], [3, 1], [4, 2]])
    done = run(tiny, drafter_of(tiny, "eagle", CHAIN(4)), prompts, policy=table)
    found = {(r.rows, r.depth_max) for r in rounds_of(done)}
    most = {rows: max(depth for r, depth in found if r == rows) for rows in range(1, 5)}
    assert most == {1: 3, 2: 0, 3: 1, 4: 2}


def test_a_drafter_that_cannot_stop_early_is_cut_afterwards(tiny, prompts, plain):
    drafter = oracle(tiny, prompts, 5)
    done = run(tiny, drafter, prompts, policy=TablePolicy([[1, 2]]))
    assert tokens_of(done) == plain
    assert {r.accepted for r in rounds_of(done)} <= {0, 1, 2}
    assert max(r.depth_max for r in rounds_of(done)) == 2


def test_adaptive_depth_learns_how_deep_any_drafter_goes(tiny):
    prompts = requests(3, 60)
    policy = adaptive(cost=0.01)
    done = run(tiny, oracle(tiny, prompts, 5), prompts, policy=policy)
    assert Counter(r.depth_max for r in rounds_of(done)).most_common(1)[0][0] == 5


@pytest.mark.parametrize("shape", [CHAIN(4), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_limited_draft_is_the_beginning_of_the_whole_one(tiny, family, shape):
    options = {} if family.startswith("eagle") else {"num_heads": 4}
    drafter = drafter_of(tiny, family, shape, **options)
    text = torch.tensor([[5, 77, 3, 41, 9]])
    output = tiny.forward(text, taps=drafter.taps)
    features = pick_features(output.hidden_BTD, output.aux, drafter.taps)[:, :-1]

    def drafted(limit: DraftLimit) -> list[int]:
        drafter.start(1, 32)
        drafter.observe(text[:, 1:], features, [4])
        tree = drafter.propose_within(text[:, -1], torch.tensor([4]), torch.tensor([0]), limit)
        tree.check()
        return tree.tokens_BN[0].tolist()

    whole, depths = drafted(FULL), shape.depth_N.tolist()
    assert drafted(DraftLimit(99)) == whole
    for depth in (1, 2):
        assert drafted(DraftLimit(depth)) == whole[: sum(d <= depth for d in depths)]


# Survival


def test_a_row_drafts_the_levels_that_survive_and_no_more(tiny):
    """Chains of a Medusa head: its levels' probabilities are known without a step."""
    prompts, least = requests(5, 20), 0.01
    inner = drafter_of(tiny, "medusa", CHAIN(4), num_heads=4)
    drafter, expected = Watched(inner), {}
    propose_within = inner.propose_within

    def spy(root_B, positions_B, keys_B, limit):
        survival_BK = best_log_prob(inner._logits_BKW[: len(root_B)]).cumsum(-1).exp()
        survived_B = (survival_BK[:, : limit.depth] >= least).sum(-1)  # it only ever falls
        places = zip(keys_B.tolist(), positions_B.tolist(), strict=True)
        expected.update(dict(zip(places, survived_B.tolist(), strict=True)))
        return propose_within(root_B, positions_B, keys_B, limit)

    inner.propose_within = spy
    run(tiny, drafter, prompts, policy=SurvivalPolicy(least))
    found = {place: sum(t >= 0 for t in tokens) - 1 for place, tokens in drafter.drafts.items()}
    assert found == expected
    assert len(set(found.values())) > 1


def test_survival_ends_the_levels_of_a_dynamic_tree(tiny, prompts, plain):
    drafter = Watched(drafter_of(tiny, "eagle", DynamicShape(3, 4, 12)))
    done = run(tiny, drafter, prompts, policy=SurvivalPolicy(0.03))
    assert tokens_of(done) == plain
    drafted = Counter(r.drafted for r in rounds_of(done))
    assert len(drafted) > 3
    assert min(drafted) < 11


def test_a_drafter_without_probabilities_cannot_follow_survival(tiny, prompts):
    with pytest.raises(ValueError, match="policy=survival: scripted cannot stop by probabilities"):
        run(tiny, oracle(tiny, prompts, 2), prompts, policy=SurvivalPolicy(0.3))


# Children that are drawn: the law stays, whatever the depth

WARM = SamplingConfig(temperature=0.7, seed=2)


def _answers(policy, shape, count=6_000):
    target = target_of(markov(LAWS.tolist()))
    vocab = DraftVocab(torch.tensor([0, 1, 3, 4, 6, 7]), 8)
    drafter = drafter_of(target, "eagle", shape, WARM, children="sampled", vocab=vocab)
    made = [Request(f"p{i}", (5, 3), 4) for i in range(count)]
    return drafter, run(target, drafter, made, policy=policy, sampling=WARM, batch_size=1_000)


@pytest.mark.parametrize("shape", [CHAIN(3), TREE], ids=["a", "c"])
@pytest.mark.parametrize("policy", [Whim, lambda: SurvivalPolicy(0.1)], ids=["whim", "survival"])
def test_drawn_children_keep_the_law_under_a_policy(policy, shape):
    drafter, done = _answers(policy(), shape)
    assert drafter.scheme in "ac"
    assert len({r.depth_max for r in rounds_of(done)}) > 2
    chi_square_of_answers(done, processed_probs(LAWS.log(), WARM), 3)


def test_stopping_by_the_probability_of_a_drawn_token_itself_would_change_the_law(monkeypatch):
    """The requirement on truncation: a level may not be dropped for what was drawn there."""
    monkeypatch.setattr(head_drafters.HeadDrafter, "propose_within", _anticipating)
    _, done = _answers(SurvivalPolicy(0.2), CHAIN(3))
    with pytest.raises(AssertionError):
        chi_square_of_answers(done, processed_probs(LAWS.log(), WARM), 3)


def _anticipating(self, root_B, positions_B, keys_B, limit):
    """Draft whole, then drop a row's tokens from the first unlikely one on, itself included."""
    if limit.is_open:
        return _whole(self, root_B, positions_B, keys_B, limit)
    tree = _whole(self, root_B, positions_B, keys_B, FULL)
    q_BK = tree.draft_probs_BNV[:, :-1].gather(-1, tree.tokens_BN[:, 1:, None].clamp(min=0))[..., 0]
    kept_B = (q_BK.cumprod(-1) >= limit.survival).int().cumprod(-1).sum(-1)
    return tree.limit_depth(kept_B)


_whole = head_drafters.HeadDrafter.propose_within
