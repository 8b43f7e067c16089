"""Our own engine as a back end: temperatures mixed over prompts, and heads that only save time."""

from collections import Counter
from pathlib import Path

import pytest
from models import make_head, requests, target_of, tiny_model

from headstart.data.answering import (
    Ask,
    EngineBackend,
    at_temperature,
    head_for,
    pick_temperature,
)
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.engine.tree_config import TreeConfig
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import info_for, save_head
from headstart.heads.target import Target

TREES = (
    TreeConfig("chain3", depth=3),
    TreeConfig("static", choices=[[0], [1], [0, 0], [0, 1]]),
    TreeConfig("dynamic8", top_k=4, levels=3, total=8),
)
MIXTURE = ([0.0, 0.6, 1.2], [2.0, 1.0, 1.0])


def asks(count: int = 9, *temperatures: float) -> list[Ask]:
    """Make random prompts that take the temperatures in turn."""
    given = temperatures or (0.0,)
    return [
        Ask(r.prompt_id, r.token_ids, r.max_new_tokens, given[number % len(given)])
        for number, r in enumerate(requests(count, 24))
    ]


def said(
    target: Target,
    asked: list[Ask],
    *,
    head: DraftHead | None = None,
    tree: TreeConfig | None = None,
    batch_size: int = 4,
    **sampling: float,
) -> dict[str, list[int]]:
    backend = EngineBackend(
        target,
        sampling=SamplingConfig(**sampling),
        stop_ids=[7],
        batch_size=batch_size,
        head=head,
        tree=tree,
    )
    answers = list(backend.answers(asked))
    assert sorted(a.prompt_id for a in answers) == sorted(a.prompt_id for a in asked)
    for answer in answers:
        assert (answer.stop_reason == "stop") == (answer.token_ids[-1] == 7)
    return {answer.prompt_id: answer.token_ids for answer in answers}


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_a_drafting_head_changes_no_answer(tiny, tree, batch_size):
    head = make_head("eagle", tiny, seed=None)
    plain = said(tiny, asks(), batch_size=batch_size)
    assert said(tiny, asks(), head=head, tree=tree, batch_size=batch_size) == plain


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.name)
def test_a_head_whose_best_tokens_are_drafted_changes_no_sampled_answer_either(tiny, tree):
    head = make_head("eagle", tiny, seed=None)
    asked = asks(9, 0.6, 1.2)
    assert said(tiny, asked, head=head, tree=tree, seed=3) == said(tiny, asked, seed=3)


def test_each_prompt_of_a_mixture_is_answered_as_at_its_temperature_alone(tiny):
    mixed = said(tiny, asks(9, 0.0, 0.7, 1.1), temperature=0.4, top_k=20, top_p=0.9, seed=5)
    for temperature, first in ((0.0, 0), (0.7, 1), (1.1, 2)):
        alone = {} if temperature == 0 else {"top_k": 20, "top_p": 0.9}
        own = said(tiny, asks(9, temperature), temperature=temperature, seed=5, **alone)
        names = [f"p{number}" for number in range(first, 9, 3)]
        assert [mixed[name] for name in names] == [own[name] for name in names]


@pytest.mark.filterwarnings("error")
def test_the_greedy_share_of_a_mixture_warns_of_nothing():
    sampling = SamplingConfig(temperature=0.8, top_k=5, top_p=0.9)
    assert at_temperature(sampling, 0.0) == SamplingConfig()
    assert at_temperature(sampling, 1.5) == SamplingConfig(temperature=1.5, top_k=5, top_p=0.9)


def test_temperatures_are_shared_out_by_weight():
    picked = Counter(pick_temperature(f"p{n}", *MIXTURE, seed=0) for n in range(4000))
    assert sum(picked.values()) == 4000
    for temperature, share in zip(MIXTURE[0], (0.5, 0.25, 0.25), strict=True):
        assert abs(picked[temperature] / 4000 - share) < 0.03  # 4 standard deviations


def test_a_prompts_temperature_is_its_own_and_changes_with_the_seed():
    first = [pick_temperature(f"p{n}", *MIXTURE, seed=0) for n in range(50)]
    assert first == [pick_temperature(f"p{n}", *MIXTURE, seed=0) for n in range(50)]
    assert first != [pick_temperature(f"p{n}", *MIXTURE, seed=1) for n in range(50)]


def test_a_tree_that_the_head_cannot_draft_is_refused_before_anything_is_asked(tiny):
    head = make_head("medusa", tiny, num_heads=2)
    with pytest.raises(ValueError, match="deep"):
        said(tiny, asks(), head=head, tree=TREES[0])


def test_a_head_of_another_target_drafts_with_a_warning_and_changes_nothing(tiny, tmp_path: Path):
    other = target_of(tiny_model(seed=1))
    head = make_head("eagle", other, seed=None)
    save_head(tmp_path / "head", head, info_for(head, other.name, other.fingerprint))
    with pytest.warns(UserWarning, match="trained for target tiny .fingerprint"):
        loaded = head_for(tmp_path / "head", tiny)
    assert said(tiny, asks(), head=loaded, tree=TREES[0]) == said(tiny, asks())
