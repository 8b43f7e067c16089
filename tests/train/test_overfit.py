"""Heads overfitted on one answer of the target are accepted there by the real verifier.

Training, drafting, verification and figures in one: a shift between any two of them, a stale cache
or a wrong position shows as drafts that the target does not confirm. Which tokens Hydra heads are
fed shows less here, for in a single answer the context of a place tells what follows it: that is
for tests/heads/test_hydra_heads.py.
"""

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from models import make_head, run, target_of, tiny_model
from training import token_row

from headstart.data.features import OnlineFeatures
from headstart.data.template import TokenRow
from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.dynamic import DynamicHeadDrafter
from headstart.eval.engine.drafters.head import HeadDrafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree import TreeShape
from headstart.eval.metrics import Value, figures, prompt_sums
from headstart.heads.base import DraftHead
from headstart.heads.target import Target
from headstart.heads.vocab import DraftVocab
from headstart.train.backends import make_parallel
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.loop import Hooks, train_head
from headstart.train.tracking import JsonLines

PROMPT = (44, 47, 117, 64, 67, 123, 67, 103)
ANSWER = 64
CHAIN = TreeShape.chain(3)
STATIC = TreeShape.from_choices([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
DYNAMIC = DynamicShape(top_k=3, levels=3, total=8)


@cache
def target() -> Target:
    """Seven random layers, the fewest that EAGLE-3's own taps fit."""
    return target_of(tiny_model(layers=7))


@cache
def conversation() -> TokenRow:
    """A prompt and the target's own greedy answer."""
    answer = run(target(), None, [Request("chat", PROMPT, ANSWER)])["chat"].token_ids
    return token_row("chat", [*PROMPT, *answer], len(PROMPT))


def answers_vocab() -> DraftVocab:
    """Return the tokens of the answer and some that it never says, ids far apart."""
    counts = torch.zeros(128, dtype=torch.int64)
    counts[torch.tensor(conversation().token_ids[len(PROMPT) :])] = 1
    return DraftVocab.from_counts(counts, int(counts.sum()) + 8, forced=(127,))


@dataclass(frozen=True)
class Case:
    """A head to overfit; a draft vocabulary is made of the answer's own tokens and a few more."""

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    small_vocab: bool = False
    lr: float = 1e-2
    steps: int = 250


# The target's best token often leads by little, which ce_soft learns to tell in more steps.
HARD = {"loss": "ce_hard"}
EAGLE = {"feature_noise": 0.0}
EAGLE31 = HARD | {"fc_norm": True, "feedback": "post_norm"}
HYDRA = HARD | {"num_heads": 3}
PREFIX = HYDRA | {"arch": "prefix-mlp"}
MEDUSA = HYDRA | {"readout": "own"}  # tied rows of so narrow a target cannot express it
CASES = {
    "eagle": Case("eagle", EAGLE, lr=3e-3),
    "eagle, draft vocabulary": Case("eagle", EAGLE, small_vocab=True, lr=3e-3),
    "eagle, 3 steps": Case("eagle", EAGLE | {"ttt_steps": 3}),
    "eagle3": Case("eagle3", HARD),
    "eagle3, draft vocabulary": Case("eagle3", HARD, small_vocab=True),
    "eagle3.1": Case("eagle3", EAGLE31),
    "eagle3, two layers": Case("eagle3", HARD | {"num_layers": 2}),
    "hydra_heads": Case("hydra_heads", HYDRA),
    "hydra_heads, draft vocabulary": Case("hydra_heads", HYDRA, small_vocab=True),
    "hydra_heads, prefix": Case("hydra_heads", PREFIX),
    "hydra_heads, prefix, draft vocabulary": Case("hydra_heads", PREFIX, small_vocab=True),
    "medusa": Case("medusa", MEDUSA),
    "medusa, draft vocabulary": Case("medusa", MEDUSA, small_vocab=True),
}


@pytest.fixture(scope="module", params=CASES)
def overfitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train a head from its own start on the conversation alone, by the loop of every training."""
    case = CASES[request.param]
    vocab = answers_vocab() if case.small_vocab else None
    head = make_head(case.family, target(), vocab=vocab, seed=None, **case.options)
    source = OnlineFeatures(target(), [conversation()], head.aux_features)
    batch = source.batch([0])
    source.batch = lambda indices: batch  # the target is frozen: once is enough
    config = TrainConfig(lr=case.lr, max_steps=case.steps, batch_rows=1, precision="fp32")
    train_head(
        head,
        source,
        config,
        parallel=make_parallel(ParallelConfig(), config, torch.device("cpu")),
        hooks=Hooks(lambda weights: {}, lambda weights, progress: None),
        tracker=JsonLines(tmp_path_factory.mktemp("run") / "metrics.jsonl"),
    )
    return head.eval()


def decoded(drafter: HeadDrafter | DynamicHeadDrafter) -> dict[str, Value]:
    """Decode the prompt greedily: the output is the answer, and no round is cut.

    Nothing stops the answer but its limit, near which drafts are shorter instead.
    """
    done = run(target(), drafter, [Request("chat", PROMPT, ANSWER)])["chat"]
    assert done.token_ids == conversation().token_ids[len(PROMPT) :]
    found = figures([prompt_sums(done, None)])
    assert found["cut_rounds"] == 0
    return found


def chain(head: DraftHead) -> HeadDrafter:
    return HeadDrafter(head, target().parts, CHAIN, sampling=SamplingConfig())


def tree(head: DraftHead) -> HeadDrafter | DynamicHeadDrafter:
    """Grow a dynamic tree, or a static one from a head that gives all depths at once."""
    if head.depths_at_once > 1:
        return HeadDrafter(head, target().parts, STATIC, sampling=SamplingConfig())
    return DynamicHeadDrafter(head, target().parts, DYNAMIC)


def test_the_answer_is_no_loop_and_no_token_alone_tells_the_next() -> None:
    """Else a head that ignores its context would pass: no pair of tokens comes twice here."""
    answer = conversation().token_ids[len(PROMPT) - 1 :]
    pairs = set(pairwise(answer))
    assert len(pairs) == ANSWER
    followers = Counter(first for first, _ in pairs)
    assert sum(count for count in followers.values() if count > 1) > ANSWER / 2


def test_p54_98_percent_of_an_overfitted_heads_drafted_tokens_are_accepted(
    overfitted: DraftHead,
) -> None:
    """The figure is draft_token_acceptance, all tokens accepted over all drafted.

    It is the strictest one: a token below a rejected one counts as rejected too. It needs no
    allowance for cut rounds, of which a decoding without stop tokens has none.
    """
    found = decoded(chain(overfitted))
    assert found["draft_token_acceptance"] >= 0.98
    assert len(found["alpha_cond"]) == 3


def test_p54_a_tree_of_an_overfitted_head_is_accepted_at_every_depth(
    overfitted: DraftHead,
) -> None:
    """Siblings are rejected by design, so the figure is alpha_cond: 98 % of tries at each depth.

    A dynamic tree is as deep as the head is sure of itself.
    """
    found = decoded(tree(overfitted))
    assert len(found["alpha_cond"]) >= 2
    assert min(found["alpha_cond"]) >= 0.98


def test_a_head_before_its_training_is_not_accepted() -> None:
    """The figure tells: on this answer a head that has learned nothing falls far short."""
    for family in ("eagle", "eagle3"):
        found = decoded(chain(make_head(family, target(), seed=None)))
        assert found["draft_token_acceptance"] < 0.5
