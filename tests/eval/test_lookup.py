"""Prompt lookup: golden continuations, and an index that agrees with scanning the text."""

import random
from collections.abc import Sequence

import pytest
import torch
from models import requests, run, target_of, tau, tiny_model, tokens_of
from scripted import cycle

from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.config import LookupConfig
from headstart.eval.engine.drafters.lookup import LookupDrafter, NgramIndex
from headstart.eval.engine.drafters.text import Draft, tree_of


def continuation(
    ids: Sequence[int], count: int, *, order: str = "earliest", max_n: int = 3, min_n: int = 1
) -> list[int]:
    index = NgramIndex(min_n, max_n, order)
    index.extend(ids)
    return index.continuation(count)


GOLDEN = [5, 1, 2, 3, 4, 9, 1, 2, 8, 7, 1, 2]


@pytest.mark.parametrize(("order", "want"), [("earliest", [3, 4, 9]), ("latest", [8, 7, 1])])
def test_the_longest_ngram_that_stood_before_is_continued(order, want):
    """No three tokens at the end stood before; two did, at 1 and at 6."""
    assert continuation(GOLDEN, 3, order=order) == want


def test_a_continuation_stops_at_the_end_of_the_text():
    assert continuation([1, 2, 3, 1, 2, 3], 4) == [1, 2, 3]


def test_an_ngram_may_overlap_the_end_but_never_finds_itself():
    assert continuation([4, 4, 4], 5) == [4]
    assert continuation([4, 4, 4, 4], 5, max_n=2) == [4, 4]
    assert continuation([4, 4, 4, 4], 5, max_n=2, order="latest") == [4]
    assert continuation([1, 2, 3], 5) == []


@pytest.mark.parametrize("text", [[], [7]])
def test_a_text_without_a_past_has_no_continuation(text):
    assert continuation(text, 4) == []


def test_shorter_ngrams_than_the_least_are_not_looked_up():
    assert continuation(GOLDEN, 3, min_n=2) == [3, 4, 9]
    assert continuation(GOLDEN, 3, min_n=3) == []


def scanned(ids: list[int], count: int, order: str, max_n: int, min_n: int) -> list[int]:
    """Look through the whole text, as the method is written down."""
    for n in range(max_n, min_n - 1, -1):
        places = [i for i in range(len(ids) - n) if ids[i : i + n] == ids[len(ids) - n :]]
        if n <= len(ids) and places:
            start = places[0 if order == "earliest" else -1] + n
            return ids[start : start + count]
    return []


@pytest.mark.parametrize("order", ["earliest", "latest"])
@pytest.mark.parametrize(("max_n", "min_n"), [(1, 1), (3, 1), (4, 2), (5, 5)])
def test_an_index_that_grows_agrees_with_scanning_the_text(order, max_n, min_n):
    chosen = random.Random(0)
    for alphabet in (2, 5):
        index, text = NgramIndex(min_n, max_n, order), []
        for _ in range(120):
            new = [chosen.randrange(alphabet) for _ in range(chosen.randint(1, 3))]
            index.extend(new)
            text += new
            assert index.continuation(4) == scanned(text, 4, order, max_n, min_n)


def test_a_row_is_shown_its_prompt_from_the_first_token_on():
    """[5, 1, 5]: only a drafter that knows the first token finds what follows 5."""
    target = target_of(tiny_model())
    drafter = LookupDrafter(tokens=2, max_n=1, min_n=1, order="earliest")
    seen = []
    propose = drafter.propose
    drafter.propose = lambda *args: seen.append(drafter._rows[0].text.copy()) or propose(*args)
    done = run(target, drafter, [Request("p", (5, 1, 5), 6)])["p"]
    assert seen[0] == [5, 1, 5, done.token_ids[0]]
    for text, r in zip(seen, done.rounds, strict=True):
        assert text == [5, 1, 5, *done.token_ids][: len(text)]
        assert r.drafted == min(6 - (len(text) - 3) - 1, len(scanned(text, 2, "earliest", 1, 1)))


def test_a_repeated_text_is_drafted_to_the_full_length():
    drafter = LookupDrafter(tokens=7, max_n=3, min_n=1, order="earliest")
    prompt = [Request("p", tuple(range(8)) * 2, 1 + 8 * 5)]
    done = run(cycle(), drafter, prompt)["p"]
    assert done.token_ids == [i % 8 for i in range(41)]
    assert {(r.accepted, r.drafted) for r in done.rounds} == {(7, 7)}


def test_a_round_in_which_no_row_finds_anything_is_a_plain_step(tiny):
    drafter = LookupDrafter(tokens=6, max_n=8, min_n=8, order="earliest")
    widths, propose = [], drafter.propose

    def recorded(*args):
        tree = propose(*args)
        tree.check()
        widths.append((tree.tokens_BN.shape[1], tree.num_drafted_B.tolist()))
        return tree

    drafter.propose = recorded
    prompts = requests(4, 12)
    done = run(tiny, drafter, prompts)
    assert tokens_of(done) == tokens_of(run(tiny, None, prompts))
    assert (1, [0] * 4) in widths
    assert all((width == 1) == (sum(drafted) == 0) for width, drafted in widths)


@pytest.mark.parametrize(
    ("longest", "width"), [(0, 1), (1, 2), (2, 4), (3, 4), (4, 8), (7, 8), (8, 11), (10, 11)]
)
def test_trees_have_few_widths(longest, width):
    drafts = [Draft.chain(list(range(longest))), Draft([], [])]
    tree = tree_of(torch.tensor([5, 6]), drafts, 11)
    tree.check()
    assert tree.tokens_BN.shape == (2, width)
    assert tree.num_drafted_B.tolist() == [longest, 0]
    assert tree.max_depth == longest


def test_two_rows_each_read_their_own_text(tiny):
    prompts = [Request("a", (3, 4, 3), 10), Request("b", (9, 8, 7, 9, 8), 10)]
    drafter = LookupDrafter(tokens=3, max_n=3, min_n=1, order="latest")
    both = run(tiny, drafter, prompts, batch_size=2)
    for prompt in prompts:
        alone = run(tiny, drafter, [prompt])[prompt.prompt_id]
        assert both[prompt.prompt_id].rounds[0].drafted == alone.rounds[0].drafted
        assert tau({"x": both[prompt.prompt_id]}) == tau({"x": alone})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": 0}, "lookup.tokens=0: need at least 1"),
        ({"min_n": 0}, "lookup.min_n=0: need at least 1"),
        ({"max_n": 2, "min_n": 3}, "lookup.max_n=2 is below lookup.min_n=3"),
        ({"order": "last"}, "lookup.order=last: expected one of earliest, latest"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_field(fields, message):
    with pytest.raises(ValueError, match=message):
        LookupConfig(**fields)
