"""Muon for matrices inside a head and AdamW for the rest, as one optimizer."""

import copy

import pytest
import torch
import train_job
from models import make_head, some_vocab
from training import chat_target

from headstart.heads.base import DraftHead
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.optimizer import MuonAndAdamW, inner_matrices, make_optimizer
from headstart.train.run import TrainRun, refuse_parts, train

CONFIG = TrainConfig(optimizer="muon", lr=0.01, weight_decay=0.1)


def head_of(family: str, **options: object) -> DraftHead:
    vocab = some_vocab(64, of=chat_target().shape.vocab_size)
    return make_head(family, chat_target(), vocab=vocab, **options).train()


def set_gradients(head: DraftHead, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        weight.grad = torch.randn(weight.shape, generator=generator)


def test_after_a_state_is_loaded_both_rules_still_follow_the_rate_of_the_step():
    head = head_of("eagle")
    optimizer = make_optimizer(head, CONFIG)
    set_gradients(head, 0)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: weight.detach().clone() for name, weight in head.named_parameters()}
    set_gradients(head, 1)
    optimizer.step()
    assert all(torch.equal(weight, before[name]) for name, weight in head.named_parameters())


@pytest.mark.parametrize(
    ("family", "options", "matrices", "others"),
    [
        ("eagle3", {"aux": [1]}, ["fc.weight"], ["lm_head.weight"]),
        ("eagle", {}, ["fc.weight"], []),
        ("medusa", {"readout": "own"}, [], ["lm_heads_KWD"]),
    ],
)
def test_matrices_go_to_muon_and_norms_and_read_outs_to_adamw(family, options, matrices, others):
    head = head_of(family, **options)
    named = dict(head.named_parameters())
    chosen = {name for name in named if any(named[name] is m for m in inner_matrices(head))}
    assert chosen >= set(matrices)
    assert {name for name in named if "norm" in name or named[name].ndim != 2} & chosen == set()
    assert not chosen & set(others)
    held = make_optimizer(head, CONFIG).param_groups
    assert [len(group["params"]) for group in held] == [len(chosen), len(named) - len(chosen)][
        : len(held)
    ]


def test_each_group_moves_as_its_own_rule_moves_it():
    """Two steps beside torch's own two optimizers over the same gradients: bit for bit."""
    ours, theirs = head_of("eagle"), head_of("eagle")
    optimizer = make_optimizer(ours, CONFIG)
    matrices = inner_matrices(theirs)
    rest = [p for p in theirs.parameters() if all(p is not m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for seed in (0, 1):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        optimizer.step()
        muon.step()
        adamw.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_an_update_of_an_orthogonal_gradient_is_that_gradient_scaled_as_adamw_would():
    """Of a 4 x 4 identity: Newton-Schulz leaves its direction, rms 0.2 * lr (arXiv 2502.16982)."""
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    weight.grad = torch.eye(4)
    optimizer = MuonAndAdamW([weight], [], TrainConfig(optimizer="muon", lr=0.1, weight_decay=0.0))
    optimizer.step()
    moved = -weight.detach() / (0.1 * 0.2 * 2)  # 0.2 * sqrt(max(A, B))
    assert moved.diagonal().sub(moved[0, 0]).abs().max() < 1e-2
    assert moved.sub(moved.diagonal().diag()).abs().max() < 1e-2
    assert 0.6 < moved[0, 0] < 1.3  # five iterations bring singular values near 1


def test_the_rate_set_in_every_step_is_that_of_both_rules():
    head = head_of("eagle")
    optimizer = make_optimizer(head, CONFIG)
    before = [p.detach().clone() for p in head.parameters()]
    set_gradients(head, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    pairs = zip(before, head.parameters(), strict=True)
    assert all(torch.equal(old, new) for old, new in pairs)


def test_its_state_can_be_taken_up():
    first, second = head_of("eagle"), head_of("eagle")
    one, two = make_optimizer(first, CONFIG), make_optimizer(second, CONFIG)
    set_gradients(first, 0)
    one.step()
    second.load_state_dict(first.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))  # else both would write the same buffers
    for head, optimizer in ((first, one), (second, two)):
        set_gradients(head, 1)
        optimizer.step()
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(mine, other) for mine, other in pairs)


def test_a_run_trains_with_it(tmp_path):
    train_job.write_rows(tmp_path)
    run = train_job.job(tmp_path, optimizer="muon", max_steps=3)
    assert train(chat_target(), run).step == 3


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"train\.optimizer=sgd: expected adamw or muon"):
        TrainConfig(optimizer="sgd")


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"optimizer": "muon"}, "fsdp2", r"train\.optimizer=muon with parallel=fsdp2: Muon needs"),
        ({"optimizer": "muon"}, "zero2", r"train\.optimizer=muon with parallel=zero2: Muon needs"),
        ({"ema": 0.9}, "zero1", r"train\.ema=0\.9 with parallel=zero1: the averages would not be"),
    ],
)
def test_what_needs_whole_weights_is_refused_where_ranks_hold_parts(options, kind, message):
    with pytest.raises(ValueError, match=message):
        TrainRun(parallel=ParallelConfig(kind=kind), train=TrainConfig(**options))
    TrainRun(parallel=ParallelConfig(kind=kind))
    with pytest.raises(ValueError, match="with parallel=from_env"):
        refuse_parts("from_env", TrainConfig(**options), zero=True)
