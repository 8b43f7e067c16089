"""Distillation losses: published numbers, gradients, what is counted, memory and precision.

Shapes: N positions, K depths, D width, W draft vocabulary, V target vocabulary, S loss terms.
"""

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import feature_batch, make_head, some_vocab
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headstart.heads import chunks, losses
from headstart.heads.base import FeatureBatch, HeadConfig, LossSums, loss_scale
from headstart.heads.eagle import EagleConfig
from headstart.heads.loss_kinds import NAMES, Draft, Law, best, loss_functions, parse_loss
from headstart.heads.losses import (
    Distillation,
    Selection,
    Teacher,
    distill,
    joint_agreement,
    loss_terms,
    select,
    token_denominators,
)
from headstart.heads.parts import ReadOut
from headstart.heads.target import Target
from headstart.heads.vocab import DraftVocab

P, Q = (0.5, 0.25, 0.15, 0.1), (0.2, 0.4, 0.1, 0.3)
SETTINGS = {"topk_hass": {"loss_top_k": 2}, "kl_topk_tail": {"loss_top_k": 2}}
MIXED = "ce_hard + 0.5*kl + 2*nla"


def selection(
    learned_NK: Tensor, learned_hard_NK: Tensor | None = None, label_N: Tensor | None = None
) -> Selection:
    """Select N positions of a batch that the test does without."""
    N, K = learned_NK.shape
    nowhere_N = torch.zeros(N, dtype=torch.int64)
    return Selection(
        nowhere_N,
        nowhere_N,
        nowhere_N[:, None].expand(N, K),
        nowhere_N if label_N is None else label_N,
        torch.ones(N, K, dtype=torch.bool),
        learned_NK,
        learned_NK if learned_hard_NK is None else learned_hard_NK,
    )


def of_laws(
    p: Sequence[tuple[float, ...]],
    q: Sequence[tuple[float, ...]],
    vocab: DraftVocab | None = None,
    **options: Any,
) -> tuple[float, dict[str, float]]:
    """Return the loss and metric sums of laws p against drafts q, read out as they are."""
    V, N = len(p[0]), len(p)
    teacher_NV, student_NW = torch.tensor(p).log(), torch.tensor(q).log()[:, None]
    learned_N = torch.ones(N, dtype=torch.bool)
    if vocab is not None and options.get("out_of_vocab", "drop") == "drop":
        learned_N = vocab.t2d[teacher_NV.argmax(-1)]
    picked = selection(learned_N[:, None])
    teacher = Teacher(teacher_NV, teacher_NV.logsumexp(-1), teacher_NV.argmax(-1), picked)
    readout = ReadOut(torch.eye(V))
    size = None if vocab is None else len(vocab)
    config = HeadConfig(draft_vocab_size=size, **options)
    task = Distillation(
        teacher, readout if vocab is None else readout.rows(vocab.ids_W), config, vocab
    )
    numerators, metrics = distill(student_NW, task, metrics=True)
    weights = loss_terms(config)
    loss = sum(weights[name] * value.item() for name, value in numerators.items())
    return loss, {name: value.item() for name, (value, _) in metrics.items()}


# Published numbers.


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("ce_hard", 1.609438),
        ("ce_soft", 1.499577),
        ("kl", 0.291603),
        ("rkl", 0.293780),
        ("jsd", 0.070619),
        ("tv", 0.35),
        ("nla", 0.430783),
        ("lk_hybrid", 0.341692),
        ("topk_hass", 1.033792),
        ("kl_topk_tail", 0.223144),
        ("kl + 0.1*tv", 0.291603 + 0.035),
    ],
)
def test_the_loss_of_two_laws_is_the_published_number(name: str, want: float) -> None:
    assert of_laws([P], [Q], loss=name, **SETTINGS.get(name, {}))[0] == pytest.approx(
        want, abs=1e-6
    )


def test_overlap_and_divergence_of_two_laws_are_reported() -> None:
    _, metrics = of_laws([P], [Q])
    assert metrics["alpha_overlap"] == pytest.approx(0.65, abs=1e-6)
    assert metrics["kl"] == pytest.approx(0.291603, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "policy", "want"),
    [
        ("ce_soft", "drop", 1.193754),
        ("ce_soft", "mass", 1.074378),
        # Overlap 0.65 with p as it is; 0.694444 with p scaled to the draft vocabulary.
        ("tv", "drop", 0.35),
        ("tv", "mass", 0.35),
        ("nla", "drop", 0.430783),
        ("nla", "mass", 0.430783),
    ],
)
def test_the_loss_over_three_of_four_tokens_is_the_published_number(
    name: str, policy: str, want: float
) -> None:
    vocab = DraftVocab(torch.tensor([0, 1, 2]), 4)
    draft = [(0.25, 0.5, 0.25, 1.0)]  # the last entry is read out by no row
    loss, metrics = of_laws([P], draft, vocab, loss=name, out_of_vocab=policy)
    assert loss == pytest.approx(want, abs=1e-6)
    assert metrics["alpha_overlap"] == pytest.approx(0.65, abs=1e-6)
    assert metrics["oov_mass"] == pytest.approx(0.1, abs=1e-6)


@pytest.mark.parametrize(("name", "want"), [("kl", 0.4293), ("kl_topk_tail", 0.4293)])
def test_p29_two_kept_tokens_and_a_tail_are_a_divergence(name: str, want: float) -> None:
    """The bare partial sum is -0.1699, the renormalised one 0.0008."""
    p, q = (0.5, 0.3, 0.2), (0.6, 0.39, 0.01)
    have, _ = of_laws([p], [q], loss=name, **SETTINGS.get(name, {}))
    assert have == pytest.approx(want, abs=5e-5)


def test_p53_overlap_counts_the_positions_that_cannot_be_drafted() -> None:
    """Overlaps 0.9 inside and 0.2 with the best token outside: 0.55, and half outside."""
    vocab = DraftVocab(torch.tensor([0, 1]), 3)
    p, q = [(0.9, 0.1, 1e-9), (0.1, 0.1, 0.8)], [(0.8, 0.2, 1.0), (0.5, 0.5, 1.0)]
    _, metrics = of_laws(p, q, vocab)
    assert metrics["alpha_overlap"] / 2 == pytest.approx(0.55, abs=1e-6)
    assert metrics["oov_argmax"] / 2 == 0.5
    assert metrics["top1_agreement"] / 2 == 0.5


# Properties of the losses.


def laws(count: int = 64, W: int = 12, seed: int = 0) -> tuple[Draft, Law]:
    """Draw random pairs of laws in fp64, one depth, the whole vocabulary."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    law = Law(draw(count, W), None, False, torch.randint(W, (count,), generator=generator))
    return Draft(draw(count, 1, W).requires_grad_()), law


def value(name: str, draft: Draft, law: Law, k: int = 4) -> Tensor:
    """Return a loss [N, K]."""
    return loss_functions(eta=3.0, top_k=k)[name](draft, law)


def gradient(name: str, draft: Draft, law: Law) -> Tensor:
    """Return the gradient with respect to the logits."""
    loss = value(name, draft, law).sum()
    return torch.autograd.grad(loss, draft.logits_NKW, retain_graph=True)[0]


@pytest.mark.parametrize("name", ["kl", "rkl", "jsd", "tv", "nla", "lk_hybrid", "kl_topk_tail"])
def test_divergences_are_zero_where_the_laws_agree(name: str) -> None:
    _, law = laws()
    same = Draft(law.logits_NW[:, None] + 1.5)  # logits are free up to a constant
    have = value(name, same, law)
    torch.testing.assert_close(have, torch.zeros_like(have), rtol=0, atol=1e-14)


def test_kl_has_the_gradient_of_soft_cross_entropy() -> None:
    draft, law = laws()
    torch.testing.assert_close(gradient("kl", draft, law), gradient("ce_soft", draft, law))


def test_the_gradient_of_nla_is_that_of_tv_divided_by_overlap() -> None:
    draft, law = laws()
    alpha_N11 = 1 - value("tv", draft, law)[..., None]
    torch.testing.assert_close(gradient("nla", draft, law), gradient("tv", draft, law) / alpha_N11)


def test_nla_of_a_one_hot_law_is_cross_entropy() -> None:
    draft, law = laws()
    one_hot_NW = torch.full_like(law.logits_NW, -1e3)
    one_hot_NW[torch.arange(len(one_hot_NW)), law.label_N] = 0
    certain = Law(one_hot_NW, None, False, law.label_N)
    torch.testing.assert_close(value("nla", draft, certain), value("ce_hard", draft, certain))


def test_laws_that_hardly_overlap_give_a_finite_nla_without_gradient() -> None:
    _, law = laws()
    elsewhere_N1 = law.logits_NW.logsumexp(-1, keepdim=True) + 30
    apart = Law(law.logits_NW, elsewhere_N1, False, law.label_N)
    draft = Draft(torch.zeros_like(law.logits_NW[:, None]).requires_grad_())
    have = value("nla", draft, apart)
    torch.testing.assert_close(have, torch.full_like(have, -math.log(1e-5)))
    assert torch.equal(gradient("nla", draft, apart), torch.zeros_like(draft.logits_NKW))


def test_jsd_of_laws_apart_is_ln_2_and_finite() -> None:
    draft = Draft(torch.tensor([[[0.0, -200.0]]]))
    law = Law(torch.tensor([[-200.0, 0.0]]), None, False, torch.zeros(1, dtype=torch.int64))
    assert value("jsd", draft, law).item() == pytest.approx(math.log(2), abs=1e-6)


def test_p29_a_truncated_divergence_never_exceeds_the_full_one() -> None:
    draft, law = laws()
    full = value("kl", draft, law)
    before = torch.zeros_like(full)
    for k in range(1, 15):
        have = value("kl_topk_tail", draft, law, k)
        assert (have >= before - 1e-12).all()
        assert (have <= full + 1e-12).all()
        before = have
    assert torch.equal(before, full)  # twelve tokens: nothing is left for the tail


def test_equal_probabilities_are_kept_from_the_lowest_id() -> None:
    logs = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    assert best(logs, 3).tolist() == [[False, True, True, True, False], [True] * 3 + [False] * 2]
    assert best(logs, 9).all()


def test_the_mass_of_a_law_is_at_most_1_whatever_the_precision_of_its_normaliser() -> None:
    logits_NW = torch.zeros(1, 4)
    for error in (0.0, 0.02):
        law = Law(logits_NW, torch.tensor([[math.log(4) - error]]), True, torch.zeros(1).long())
        assert law.mass_N1.item() == pytest.approx(1, abs=1e-6)


# Settings.


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("kl", {"kl": 1.0}),
        ("kl + 0.1*tv", {"kl": 1.0, "tv": 0.1}),
        ("2 * ce_soft+1e-2*topk_hass", {"ce_soft": 2.0, "topk_hass": 0.01}),
    ],
)
def test_a_loss_is_one_name_or_a_weighted_sum(text: str, terms: dict[str, float]) -> None:
    assert loss_terms(HeadConfig(loss=text)) == terms


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "mse",
            "head.loss=mse: unknown loss 'mse'; expected one of ce_hard, ce_soft, jsd, kl, kl_",
        ),
        ("kl + tw", r"head.loss=kl \+ tw: unknown loss 'tw'; expected .* such as kl \+ 0.1\*tv"),
        ("kl +", r"unknown loss ''"),
        ("kl + kl", r"head.loss=kl \+ kl: kl is named twice; give it one weight"),
        ("-1*kl", r"head.loss=-1\*kl: weight '-1'; expected a number above 0"),
        ("0*kl", "weight '0'; expected a number above 0"),
        ("x*kl", "weight 'x'; expected a number above 0"),
        ("nan*kl", "weight 'nan'; expected a number above 0"),
        ("*kl", "weight ''; expected a number above 0"),
    ],
)
def test_a_bad_loss_is_named_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_loss(text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": "mse"}, "head.loss=mse: unknown loss"),
        ({"loss": "lk_hybrid", "lk_eta": -1.0}, "head.lk_eta=-1.0: expected a number of at least"),
        ({"loss": "topk_hass", "loss_top_k": 0}, "head.loss_top_k=0: need at least 1 token"),
    ],
)
def test_bad_loss_settings_name_the_field(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EagleConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lk_eta": 2.0}, "head.lk_eta has no effect without lk_hybrid"),
        ({"loss_top_k": 5, "loss": "kl"}, "head.loss_top_k has no effect without topk_hass or kl_"),
        (
            {"draft_vocab_size": 8, "out_of_vocab": "mass", "loss": "ce_hard"},
            "head.out_of_vocab=mass has no effect .* head.loss other than ce_hard",
        ),
    ],
)
def test_a_setting_that_no_loss_uses_warns(values: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        EagleConfig(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"loss": "kl + 0.5*lk_hybrid", "lk_eta": 2.0},
        {"loss": "kl_topk_tail", "loss_top_k": 5},
        {"loss": "ce_hard + tv", "draft_vocab_size": 8, "out_of_vocab": "mass"},
    ],
)
def test_a_setting_that_a_loss_uses_does_not_warn(values: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EagleConfig(**values)


# Gradients against plain autograd.


def dense(
    name: str, logits_NKW: Tensor, p_NV: Tensor, ids: list[int], labels: list[int], policy: str
) -> Tensor:
    """Return one loss [N, K] in probabilities, over all logits at once, the slow way."""
    q_NKW, raw_N1W = logits_NKW.softmax(-1), p_NV[:, None, ids]
    mass_N1 = raw_N1W.sum(-1)
    p_N1W, weight_N1 = raw_N1W / mass_N1[..., None], mass_N1 if policy == "mass" else 1.0
    alpha_NK = torch.minimum(q_NKW, raw_N1W).sum(-1)
    m_NKW = (p_N1W + q_NKW) / 2
    kl_NK = (p_N1W * (p_N1W / q_NKW).log()).sum(-1)
    if name == "ce_hard":
        drafted = [ids.index(label) if label in ids else 0 for label in labels]
        return torch.stack([-q_NKW[n, :, w].log() for n, w in enumerate(drafted)])
    if name == "lk_hybrid":
        lam_NK = (-3 * alpha_NK.detach()).exp()
        return lam_NK * weight_N1 * kl_NK + (1 - lam_NK) * (1 - alpha_NK)
    if name == "topk_hass":
        top_N1k = raw_N1W.topk(2).indices.expand(-1, q_NKW.shape[1], -1)
        return -(raw_N1W.expand_as(q_NKW).gather(2, top_N1k) * q_NKW.gather(2, top_N1k).log()).sum(
            -1
        )
    if name == "kl_topk_tail":
        top_N1k = p_N1W.topk(2).indices.expand(-1, q_NKW.shape[1], -1)
        top_p, top_q = p_N1W.expand_as(q_NKW).gather(2, top_N1k), q_NKW.gather(2, top_N1k)
        rest_p, rest_q = 1 - top_p.sum(-1), 1 - top_q.sum(-1)
        kept_NK = (top_p * (top_p / top_q).log()).sum(-1)
        return weight_N1 * (kept_NK + rest_p * (rest_p / rest_q).log())
    simple = {
        "ce_soft": lambda: -weight_N1 * (p_N1W * q_NKW.log()).sum(-1),
        "kl": lambda: weight_N1 * kl_NK,
        "rkl": lambda: weight_N1 * (q_NKW * (q_NKW / p_N1W).log()).sum(-1),
        "jsd": lambda: (
            weight_N1 * (p_N1W * (p_N1W / m_NKW).log() + q_NKW * (q_NKW / m_NKW).log()).sum(-1) / 2
        ),
        # Half the L1 distance over all V tokens: q is 0 outside.
        "tv": lambda: ((q_NKW - raw_N1W).abs().sum(-1) + 1 - mass_N1) / 2,
        "nla": lambda: -alpha_NK.log(),
    }
    return simple[name]()


class Problem:
    """Seven random positions and three depths, with masks, labels and every kind of read-out."""

    N, K, D, V = 7, 3, 8, 20

    def __init__(
        self, loss: str, policy: str, vocab: DraftVocab | None, *, seed: int = 0, **options: Any
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.policy, self.vocab = policy, vocab
        self.ids = list(range(self.V)) if vocab is None else vocab.ids_W.tolist()
        N, K, D, V, W = self.N, self.K, self.D, self.V, len(self.ids)
        whole = ReadOut(self.draw(V, D), self.draw(V), scale=0.7, softcap=6.0)
        hidden_ND = self.draw(N, D)
        logits_NV = whole(hidden_ND)
        self.p_NV = logits_NV.double().softmax(-1)
        self.labels = torch.randint(V, (N,), generator=self.generator)
        learned_NK = torch.rand(N, K, generator=self.generator) > 0.3
        hard_NK = torch.rand(N, K, generator=self.generator) > 0.3
        if vocab is not None:
            hard_NK &= vocab.t2d[self.labels, None]
        self.picked = selection(learned_NK, hard_NK, self.labels)
        self.readout = whole if vocab is None else whole.rows(vocab.ids_W)
        used = SETTINGS.get(loss, {})
        size = None if vocab is None else len(vocab)
        self.config = HeadConfig(
            draft_vocab_size=size,
            out_of_vocab=policy,
            loss=loss,
            loss_chunk=3 * K * W,
            **used,
            **options,
        )
        teacher = Teacher(hidden_ND, logits_NV.logsumexp(-1), logits_NV.argmax(-1), self.picked)
        self.task = Distillation(teacher, self.readout, self.config, vocab)
        self.student_NKD = self.draw(N, K, D).requires_grad_()
        self.own = {
            "frozen": None,
            "own_KWD": self.draw(K, W, D).requires_grad_(),
            "own_WD": self.draw(W, D).requires_grad_(),
        }
        self.weights = {
            name: weight * torch.tensor([0.8, 0.64, 0.512])
            for name, weight in loss_terms(self.config).items()
        }

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    @property
    def counts(self) -> dict[str, Tensor]:
        return token_denominators(self.picked, self.config)

    def loss(self, kind: str, counts: dict[str, Tensor] | None = None) -> Tensor:
        """Return the loss by `distill`."""
        counts, own = counts or self.counts, self.own[kind]
        options = {} if own is None else {kind: own}
        if kind == "own_WD":
            options["scale_K"] = loss_scale(self.weights, counts)
        numerators, _ = distill(self.student_NKD, self.task, **options)
        return LossSums(numerators, self.weights).total(counts)

    def dense_loss(self, kind: str, counts: dict[str, Tensor] | None = None) -> Tensor:
        """Return the loss over whole logits in fp64."""
        counts, own, readout = counts or self.counts, self.own[kind], self.readout
        student = self.student_NKD.double()
        if own is None:
            logits = student @ readout.weight_WD.double().T + readout.bias_W.double()
        else:
            logits = (student[:, :, None] * own.double()).sum(-1)
        logits = torch.tanh(logits * 0.7 / 6) * 6
        total = torch.zeros((), dtype=torch.float64)
        for name, weight_K in self.weights.items():
            each_NK = dense(name, logits, self.p_NV, self.ids, self.labels.tolist(), self.policy)
            numerator_K = (each_NK * self.picked.learned(name)).sum(0)
            total = total + (weight_K * numerator_K / counts[name]).sum()
        return total

    def gradients(self, loss: Tensor, kind: str) -> list[Tensor]:
        leaves = [self.student_NKD, *([] if self.own[kind] is None else [self.own[kind]])]
        return list(torch.autograd.grad(loss, leaves))


KINDS = ["frozen", "own_KWD", "own_WD"]
HALF = DraftVocab(torch.arange(10) * 2, Problem.V)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("policy", "vocab"), [("drop", None), ("drop", HALF), ("mass", HALF)])
@pytest.mark.parametrize("loss", [*NAMES, MIXED])
@pytest.mark.filterwarnings("ignore:head.out_of_vocab=mass has no effect")  # ce_hard
def test_loss_and_gradients_equal_plain_autograd_in_fp64(
    loss: str, policy: str, vocab: DraftVocab | None, kind: str
) -> None:
    problem = Problem(loss, policy, vocab)
    have, want = problem.loss(kind), problem.dense_loss(kind)
    torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=0)
    pairs = zip(problem.gradients(have, kind), problem.gradients(want, kind), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_backward_multiplies_by_a_common_factor(kind: str) -> None:
    problem = Problem(MIXED, "drop", HALF)
    once = problem.gradients(problem.loss(kind), kind)
    for a, b in zip(problem.gradients(-8 * problem.loss(kind), kind), once, strict=True):
        torch.testing.assert_close(a, -8 * b)


def test_numerators_can_be_weighted_by_depth_after_the_fact() -> None:
    """Without scale_K each depth and loss keeps a gradient of its own."""
    problem = Problem(MIXED, "drop", HALF)
    before = problem.weights
    for name in before:
        problem.weights = {
            n: w * torch.tensor([1.0, 0.0, 3.0]) * (n == name) for n, w in before.items()
        }
        have, want = problem.loss("own_KWD"), problem.dense_loss("own_KWD")
        pairs = zip(*(problem.gradients(x, "own_KWD") for x in (have, want)), strict=True)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def test_a_shared_read_out_refuses_another_scale_than_it_was_given() -> None:
    problem = Problem("kl", "drop", HALF)
    numerators, _ = distill(
        problem.student_NKD,
        problem.task,
        own_WD=problem.own["own_WD"],
        scale_K=loss_scale(problem.weights, problem.counts),
    )
    other = {"kl": problem.counts["kl"] + torch.tensor([1.0, 0.0, 0.0])}
    with pytest.raises(AssertionError, match="other factors than scale_K"):
        LossSums(numerators, problem.weights).total(other).backward()


def test_p32_the_targets_rows_get_no_gradient() -> None:
    problem = Problem("kl", "drop", HALF)
    problem.readout.weight_WD.requires_grad_()
    problem.task.teacher.hidden_ND.requires_grad_()
    for kind in KINDS:
        problem.loss(kind).backward()
    assert problem.readout.weight_WD.grad is None
    assert problem.task.teacher.hidden_ND.grad is None
    assert problem.student_NKD.grad is not None


# What is counted.


def test_hard_and_soft_losses_count_what_each_can_learn(tiny: Target) -> None:
    batch = feature_batch(tiny, [list(range(20, 28))], [[1] * 8])
    vocab = DraftVocab(torch.tensor([22, 24, 26, 100]), 128)
    batch.argmax_BT[0, 1:7] = torch.tensor([100, 100, 100, 3, 3, 3])  # labels are 22 .. 27
    config = EagleConfig(draft_vocab_size=4, loss="ce_hard + 0.5*kl")
    picked = select(batch, 1, config, vocab)
    assert picked.label_N.tolist() == [22, 23, 24, 26]  # 25 and 27 are learned by neither
    assert picked.learned("kl")[:, 0].tolist() == [True, True, True, False]
    assert picked.learned("ce_hard")[:, 0].tolist() == [True, False, True, True]
    every = select(batch, 1, config, vocab, all_supervised=True)
    assert every.label_N.tolist() == [22, 23, 24, 25, 26, 27]
    for one in (picked, every):
        counts = token_denominators(one, config)
        assert {name: n.tolist() for name, n in counts.items()} == {"ce_hard": [3], "kl": [3]}


@pytest.mark.parametrize("loss", ["kl", "tv", "nla", "topk_hass"])
def test_under_mass_no_position_is_dropped(tiny: Target, loss: str) -> None:
    batch = feature_batch(tiny, [list(range(20, 28))], [[1] * 8])
    vocab = some_vocab(4)
    for policy, count in (("drop", 0), ("mass", 6)):
        batch.argmax_BT[:] = 0  # outside
        config = EagleConfig(draft_vocab_size=4, loss=loss, out_of_vocab=policy)
        counts = token_denominators(select(batch, 1, config, vocab), config)
        assert counts == {loss: torch.tensor([count])}


@pytest.mark.parametrize("family", ["medusa", "eagle"])
def test_a_head_trained_on_a_sum_loses_the_sum(tiny: Target, family: str) -> None:
    batch = feature_batch(tiny, [list(range(20, 32))], [[0, 0] + [1] * 10])

    def loss(text: str) -> float:
        options = {"feature_weight": 0.0} if family == "eagle" else {}
        head = make_head(family, tiny, vocab=some_vocab(64), loss=text, **options)
        return head(batch, tiny.parts).total(head.denominators(batch)).item()

    assert loss("kl + 0.1*ce_hard") == pytest.approx(loss("kl") + 0.1 * loss("ce_hard"), rel=1e-5)


# What a sum is divided by.


def given(values: Sequence[float], learned: Sequence[bool] | None = None) -> tuple[Tensor, Any]:
    """Make students of two tokens whose ce_hard are these values, read out as they are."""
    student_NKD = torch.tensor([[[0.0, math.expm1(x)]] for x in values]).log().clamp(min=-50)
    student_NKD[..., 0] = 0.0
    learned_NK = torch.tensor(learned or [True] * len(values))[:, None]
    nothing_N = torch.zeros(len(values))
    teacher = Teacher(student_NKD[:, 0], nothing_N, nothing_N.long(), selection(learned_NK))
    task = Distillation(teacher, ReadOut(torch.eye(2)), HeadConfig(loss="ce_hard"), None)
    return student_NKD.requires_grad_(), task


def step(micro_batches: list[tuple[Tensor, Any]]) -> tuple[float, list[Tensor]]:
    """Return the loss of an optimizer step over micro-batches, and each student's gradient."""
    counts = [token_denominators(t.teacher.selection, t.config) for _, t in micro_batches]
    whole = {"ce_hard": torch.stack([c["ce_hard"] for c in counts]).sum(0)}
    total, gradients = 0.0, []
    for student, task in micro_batches:
        loss = LossSums(distill(student, task)[0], {"ce_hard": torch.ones(1)}).total(whole)
        gradients.append(torch.autograd.grad(loss, student)[0])
        total += loss.item()
    return total, gradients


def test_p26_two_micro_batches_are_divided_by_the_count_of_both() -> None:
    """The mean of means is 6; P26's own numbers make 7/4."""
    assert step([given([1, 2, 3]), given([10])])[0] == pytest.approx(4.0, rel=1e-6)
    loss, gradients = step([given([4]), given([1, 1, 1])])
    assert loss == pytest.approx(1.75, rel=1e-6)
    _, (joined,) = step([given([4, 1, 1, 1])])
    torch.testing.assert_close(torch.cat(gradients), joined)


@pytest.mark.parametrize("padding", [1, 60])
def test_p25_positions_that_are_not_learned_change_nothing(padding: int) -> None:
    want, (gradient_NKD,) = step([given([1, 3])])
    have, (padded_NKD,) = step([given([1, 3] + [7] * padding, [True, True] + [False] * padding)])
    assert have == want
    assert torch.equal(padded_NKD[:2], gradient_NKD)
    assert not padded_NKD[2:].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("empty", [False, True], ids=["masked", "no positions"])
def test_nothing_to_learn_gives_zero_and_zero_gradients(kind: str, empty: bool) -> None:
    problem = Problem(MIXED, "drop", HALF)
    problem.picked.learned_NK[:] = False
    problem.picked.learned_hard_NK[:] = False
    if empty:
        for name, value in vars(problem.picked).items():
            setattr(problem.picked, name, value[:0])
        problem.student_NKD = torch.zeros(0, problem.K, problem.D, requires_grad=True)
    loss = problem.loss(kind)
    assert loss.item() == 0
    for gradient in problem.gradients(loss, kind):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_parts_has_the_gradient_of_the_whole(kind: str) -> None:
    """Four micro-batches of unequal counts, each scaled by the counts of all of them."""
    whole = Problem(MIXED, "mass", HALF)
    want_loss = whole.loss(kind)
    want = whole.gradients(want_loss, kind)
    total, have = 0.0, [torch.zeros_like(g) for g in want]
    for part in (slice(0, 1), slice(1, 2), slice(2, 6), slice(6, 7)):
        piece = Problem(MIXED, "mass", HALF)
        piece.own = whole.own
        teacher = piece.task.teacher
        for name, value in vars(piece.picked).items():
            setattr(piece.picked, name, value[part])
        for name in ("hidden_ND", "logsumexp_N", "argmax_N"):
            setattr(teacher, name, getattr(teacher, name)[part])
        piece.student_NKD = piece.student_NKD.detach()[part].requires_grad_()
        loss = piece.loss(kind, whole.counts)
        student, *own = piece.gradients(loss, kind)
        have[0][part] = student
        for sum_, more in zip(have[1:], own, strict=True):
            sum_ += more
        total += loss.item()
    assert total == pytest.approx(want_loss.item(), rel=1e-6)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_each_step_is_divided_by_its_own_count_before_it_is_weighted() -> None:
    """Sums 6 over 3 and 8 over 2, weights 1 and 0.8: 2 + 3.2, not (6 + 6.4) / 5."""
    sums = LossSums({"kl": torch.tensor([6.0, 8.0])}, {"kl": torch.tensor([1.0, 0.8])})
    assert sums.total({"kl": torch.tensor([3.0, 2.0])}).item() == pytest.approx(5.2)


# Memory and precision.


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_applied_to_a_few_positions_of_a_chunk_at_a_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = (Problem(MIXED, "mass", HALF) for _ in range(2))
    want = whole.loss(kind)
    wanted = whole.gradients(want, kind)
    monkeypatch.setattr(chunks, "PIECE_CPU", 1)
    monkeypatch.setattr(chunks, "READOUT_ROWS", 3)
    have = parts.loss(kind)
    torch.testing.assert_close(have, want, rtol=1e-6, atol=0)
    for a, b in zip(parts.gradients(have, kind), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_the_gradients_of_a_chunked_loss_can_be_taken_once() -> None:
    """They are handed over rather than copied: a read-out's is as large as the read-out."""
    problem = Problem("kl", "drop", HALF)
    loss = problem.loss("own_WD")
    torch.autograd.grad(loss, problem.own["own_WD"], retain_graph=True)
    with pytest.raises(AssertionError, match="can be taken once"):
        loss.backward()


class Memory(TorchDispatchMode):
    """Watches every tensor that is made: the largest, and the most alive at once, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self.alive: dict[int, weakref.ref] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and look at what came out."""
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.alive[id(tensor)] = weakref.ref(tensor)
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        self.alive = {key: ref for key, ref in self.alive.items() if ref() is not None}
        tensors = [t for t in (ref() for ref in self.alive.values()) if t is not None]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        self.peak = max(self.peak, sum(storages.values()))
        return out


CHUNK, WIDE = 8, 512


def wide_loss(kind: str, N: int, loss: str, D: int) -> Callable[[], Tensor]:
    """Return what computes a loss over N positions of two depths in bf16."""
    K = 2
    learned_NK = torch.ones(N, K, dtype=torch.bool)
    zero_N = torch.zeros(N)
    teacher = Teacher(torch.ones(N, D), zero_N, zero_N.long(), selection(learned_NK))
    config = HeadConfig(loss=loss, loss_chunk=CHUNK * K * WIDE)
    rows = ReadOut(torch.ones(WIDE, D, dtype=torch.bfloat16))
    task = Distillation(teacher, rows, config, None)
    own = {"own_KWD": (K, WIDE, D), "own_WD": (WIDE, D)}.get(kind)
    options = {} if own is None else {kind: torch.ones(own, requires_grad=True)}
    if kind == "own_WD":
        options["scale_K"] = {name: torch.ones(K) for name in loss_terms(config)}
    student_NKD = torch.ones(N, K, D, requires_grad=True)

    def compute() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return sum(n.sum() for n in distill(student_NKD, task, **options)[0].values())

    return compute


def memory(kind: str, N: int, loss: str, D: int = 4) -> Memory:
    """Watch a loss and its gradients."""
    compute = wide_loss(kind, N, loss, D)
    with Memory() as watched:
        compute().backward()
    return watched


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", NAMES)
def test_no_tensor_is_larger_than_a_chunk_of_logits(kind: str, loss: str) -> None:
    for N in (4 * CHUNK, 16 * CHUNK):
        assert memory(kind, N, loss).largest == 4 * CHUNK * 2 * WIDE


@pytest.mark.parametrize("kind", KINDS)
def test_memory_in_use_grows_with_the_students_gradients_only(kind: str) -> None:
    """One gradient a loss, or one in all when the scale is known; indices take the rest."""
    few, many = (memory(kind, N, MIXED).peak for N in (4 * CHUNK, 16 * CHUNK))
    students = 4 * (12 * CHUNK) * 2 * 4
    assert many - few < ((1 if kind == "own_WD" else 3) + 0.5) * students


def test_a_read_out_s_gradient_is_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loss beside bf16 copies of the read-outs; scaled in backward where it lies."""
    monkeypatch.setattr(chunks, "READOUT_ROWS", 16)
    gradient = 4 * WIDE * 256
    peak = memory("own_WD", 1, "kl", D=256).peak
    assert peak < 1.1 * (gradient + gradient // 2 + gradient // 2)
    single = torch.ones(1, 3, 4)
    assert losses._weighed(single, torch.full((1, 1, 1), 2.0)).data_ptr() == single.data_ptr()
    assert single.eq(2).all()


@pytest.mark.parametrize("name", NAMES)
def test_p27_a_loss_of_bf16_logits_is_computed_in_fp32(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target_NW = (2 * torch.randn(4, 100, generator=generator)).bfloat16()
    draft_NW = (target_NW.float() + 0.1 * torch.randn(4, 100, generator=generator)).bfloat16()
    teacher = Teacher(
        target_NW,
        target_NW.float().logsumexp(-1),
        target_NW.argmax(-1),
        selection(torch.ones(4, 1, dtype=torch.bool)),
    )
    config = HeadConfig(loss=name, **SETTINGS.get(name, {}))
    task = Distillation(teacher, ReadOut(torch.eye(100, dtype=torch.bfloat16)), config, None)
    numerators, _ = distill(draft_NW[:, None], task)
    assert numerators[name].dtype == torch.float32
    want = dense(
        name,
        draft_NW[:, None].double(),
        target_NW.double().softmax(-1),
        list(range(100)),
        [0] * 4,
        "drop",
    ).sum()
    assert numerators[name].item() == pytest.approx(want.item(), rel=1e-4)


@pytest.mark.parametrize("loss", ["ce_soft", "kl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p27_divergence_of_bf16_logits_is_taken_in_fp32(dtype: torch.dtype, loss: str) -> None:
    """Logits rounded to bf16 either way; in bf16 tensors one final cast of the gradient is left."""
    generator = torch.Generator().manual_seed(0)
    target_W = (2 * torch.randn(1000, generator=generator)).bfloat16()
    draft_W = (target_W.float() + 0.03 * torch.randn(1000, generator=generator)).bfloat16()
    p, log_q = target_W.double().softmax(-1), draft_W.double().log_softmax(-1)
    entropy = -(p * p.log()).sum()
    teacher = Teacher(
        target_W.to(dtype)[None],
        target_W.float().logsumexp(-1)[None],
        target_W.argmax()[None],
        selection(torch.ones(1, 1, dtype=torch.bool)),
    )
    readout = ReadOut(torch.eye(1000, dtype=dtype))
    task = Distillation(teacher, readout, HeadConfig(loss=loss), None)
    student = draft_W.to(dtype)[None, None].requires_grad_()
    value = distill(student, task)[0][loss]
    value.sum().backward()
    want = -(p * log_q).sum().item() - entropy.item()
    assert want == pytest.approx(5e-4, rel=0.25)
    if loss == "kl":
        assert value.item() == pytest.approx(want, abs=1e-6)
    else:  # cross-entropy and entropy are near 5: fp32
        assert value.item() - entropy.item() == pytest.approx(want, abs=3e-6)
    gradient = log_q.exp() - p
    error = ((student.grad[0, 0].double() - gradient).norm() / gradient.norm()).item()
    assert error < (1e-4 if dtype == torch.float32 else 2**-8)


def test_joint_agreement_counts_positions_that_agree_at_every_depth_so_far() -> None:
    # Six tokens, answer from 2 on: students 0..3 at depth 0, 0..2 at depth 1.
    batch = FeatureBatch(
        tokens_BT=torch.zeros(1, 6, dtype=torch.int64),
        loss_mask_BT=torch.tensor([[0, 0, 1, 1, 1, 1]]),
        positions_BT=torch.arange(6)[None],
        document_BT=torch.zeros(1, 6, dtype=torch.int64),
        row_ids_B=torch.zeros(1, dtype=torch.int64),
        hidden_BTD=torch.zeros(1, 6, 4),
        logsumexp_BT=torch.zeros(1, 6),
        argmax_BT=torch.zeros(1, 6, dtype=torch.int64),
    )
    picked = select(batch, 2, HeadConfig(), None, all_supervised=True)
    first = {0: True, 1: False, 2: True, 3: True}  # by student position
    second = {0: True, 1: True, 2: False}
    agree_NK = torch.zeros(picked.valid_NK.shape, dtype=torch.bool)
    for n, students in enumerate(picked.student_NK.tolist()):
        for k, (student, known) in enumerate(zip(students, (first, second), strict=True)):
            agree_NK[n, k] = bool(picked.valid_NK[n, k]) and known[student]
    joint_K, count_K = joint_agreement(agree_NK, picked)
    assert joint_K.tolist() == [3, 1]  # position 1 agrees at depth 1 only
    assert count_K.tolist() == [4, 3]


def test_joint_agreement_of_nothing_is_nothing() -> None:
    picked = selection(torch.zeros(0, 2, dtype=torch.bool))
    joint_K, count_K = joint_agreement(torch.zeros(0, 2, dtype=torch.bool), picked)
    assert joint_K.tolist() == count_K.tolist() == [0, 0]
