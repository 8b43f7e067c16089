"""Suffix decoding: golden drafts, and drafts and counts that agree with counting by hand."""

import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
import torch
from models import requests, run, tau, tokens_of
from scripted import cycle

from headstart.eval.engine.decode import Request
from headstart.eval.engine.drafters.config import SuffixConfig
from headstart.eval.engine.drafters.suffix import Scored, SuffixDrafter, best_first, most_frequent
from headstart.eval.engine.drafters.suffix_trie import SuffixTrie, Text
from headstart.eval.engine.drafters.text import Draft

String = tuple[int, ...]


def counted(texts: Iterable[Sequence[int]], depth: int) -> Counter[String]:
    """Count every string of up to `depth` tokens."""
    return Counter(
        tuple(text[start : start + length])
        for text in texts
        for start in range(len(text))
        for length in range(1, min(depth, len(text) - start) + 1)
    )


def spelled_out(trie: SuffixTrie) -> Counter[String]:
    """Read every string and its count out of a trie."""
    found: Counter[String] = Counter()
    waiting: list[tuple[String, object]] = [((), trie.root)]
    while waiting:
        string, node = waiting.pop()
        for token, child in trie.followers(node, len(string)):
            found[(*string, token)] = child.count
            waiting.append(((*string, token), child))
    return found


def random_text(chosen: random.Random, length: int, alphabet: int) -> list[int]:
    return [chosen.randrange(alphabet) for _ in range(length)]


# The trie


@pytest.mark.parametrize("depth", [2, 4, 9])
@pytest.mark.parametrize("alphabet", [1, 2, 6])
def test_a_trie_counts_what_counting_by_hand_counts(depth, alphabet):
    chosen, trie, texts = random.Random(1), SuffixTrie(depth), []
    for length in (1, 2, 30, 17, 0, 25):
        texts.append(random_text(chosen, length, alphabet))
        trie.extend(Text(), texts[-1])
        assert spelled_out(trie) == counted(texts, depth)


@pytest.mark.parametrize("alphabet", [1, 2, 6])
def test_a_text_that_grows_is_counted_at_every_length(alphabet):
    text, trie, depth = Text(), SuffixTrie(5), 5
    for token in random_text(random.Random(2), 40, alphabet):
        trie.extend(text, [token])
        counts = counted([text.tokens], depth)
        assert spelled_out(trie) == counts
        ends = [tuple(text.tokens[-m:]) for m in range(1, min(depth, len(text.tokens)) + 1)]
        # Ends that stood before; the whole text did not.
        assert [node.count for node in text.active] == [counts[s] for s in ends if counts[s] > 1]


def test_a_text_taken_out_leaves_no_trace():
    chosen, trie, depth = random.Random(3), SuffixTrie(6), 6
    texts = [random_text(chosen, chosen.randrange(12), 3) for _ in range(30)]
    for number, text in enumerate(texts):
        trie.extend(Text(), text)
        if number >= 5:
            trie.remove(texts[number - 5])
        assert spelled_out(trie) == counted(texts[max(0, number - 4) : number + 1], depth)
    for text in texts[-5:]:
        trie.remove(text)
    assert spelled_out(trie) == {}


def test_matches_are_the_ends_that_occur():
    trie = SuffixTrie(4)
    trie.extend(Text(), [1, 2, 3, 1, 2, 9])
    assert [node.count for node in trie.matches([7, 1, 2])] == [2, 2]
    assert [node.count for node in trie.matches([3, 1, 2])] == [2, 2]  # not the whole context
    assert [node.count for node in trie.matches([0, 0, 2, 3, 1, 2])] == [2, 2, 1]  # depth 4
    assert trie.matches([5]) == trie.matches([5, 5]) == []


def test_a_trie_has_nodes_for_repeated_strings_only():
    """A text without repeats costs a node a token, however deep the trie is."""
    trie = SuffixTrie(64)
    trie.extend(Text(), list(range(200)))
    assert len(trie.root.children) == 200
    assert all(node.children is None for node in trie.root.children.values())


# Drafts


GOLDEN = [[1, 2, 3, 4, 6]] * 3 + [[1, 2, 3, 4, 7]] + [[1, 2, 3, 5, 6]] * 2


def drafter(**options: object) -> SuffixDrafter:
    return SuffixDrafter(**vars(SuffixConfig(**{"depth": 24, **options})))


def with_answers(answers: Iterable[Sequence[int]], **options: object) -> SuffixDrafter:
    made = drafter(**options)
    for answer in answers:
        made.finish(0, answer)
    return made


def drafted(made: SuffixDrafter, context: Sequence[int]) -> Draft:
    made.start(1, 64)
    made.begin(0, context[0])
    made._rows[0].extend(context[1:])
    return made.drafts(1)[0]


@pytest.mark.parametrize(
    ("options", "want"),
    [
        ({}, Draft([4, 6], [-1, 0])),
        ({"tree": True}, Draft([4, 6, 5], [-1, 0, -1])),
        ({"tree": True, "min_prob": 0.4}, Draft([4, 6], [-1, 0])),
    ],
    ids=["chain", "tree", "tree, min_prob .4"],
)
def test_golden_drafts_from_past_answers(options, want):
    assert drafted(with_answers(GOLDEN, **options), [9, 1, 2, 3]) == want


@pytest.mark.parametrize(
    ("grow", "min_prob", "score"),
    [(most_frequent, 0.1, 1.1667), (best_first, 0.1, 1.5), (best_first, 0.4, 1.1667)],
)
def test_golden_scores(grow, min_prob, score):
    made = with_answers(GOLDEN)
    ends = made._finished.matches([9, 1, 2, 3])
    assert len(ends) == 3
    found = grow(made._finished, ends[-1], 3, budget=3, min_prob=min_prob)
    assert found.score == pytest.approx(score, abs=1e-4)


def test_the_golden_tree_with_the_root_as_node_0():
    made = with_answers(GOLDEN, tree=True)
    drafted(made, [9, 1, 2, 3])
    tree = made.propose(torch.tensor([3]), torch.tensor([3]), torch.tensor([0]))
    tree.check()
    assert tree.tokens_BN.tolist() == [[3, 4, 6, 5]]
    assert tree.parents_BN.tolist() == [[-1, 0, 1, 0]]


def by_hand(context: list[int], answers: list[list[int]], config: SuffixConfig) -> Draft:
    """Draft as the method is written down, over strings and their counts."""
    best = Scored(Draft([], []), 0.0)
    for texts in ([context], answers):
        counts = counted(texts, config.depth)
        mine = Scored(Draft([], []), 0.0)
        for m in range(1, len(context)):
            end = tuple(context[-m:])
            if counts[end] == 0:
                break
            budget = min(config.tokens, int(m * config.factor + config.offset))
            scored = _grown(counts, end, budget, config)
            if scored.score >= mine.score:
                mine = scored
        if mine.score > best.score:
            best = mine
    return best.draft if best.score >= config.min_score else Draft([], [])


def _grown(counts: Counter[String], end: String, budget: int, config: SuffixConfig) -> Scored:
    tokens, parents, total, score = [], [], counts[end], 0
    paths: list[String] = [()]
    open_ = [-1]
    while len(tokens) < budget:
        found = [
            (-counts[(*end, *paths[p + 1], x)], len(paths[p + 1]), p, x)
            for p in open_
            for x in range(8)
            if counts[(*end, *paths[p + 1], x)] / total >= config.min_prob
            and (*paths[p + 1], x) not in paths
        ]
        if not found:
            break
        count, _, p, x = min(found)
        tokens.append(x)
        parents.append(p)
        paths.append((*paths[p + 1], x))
        score -= count
        open_ = [*open_, len(tokens) - 1] if config.tree else [len(tokens) - 1]
    return Scored(Draft(tokens, parents), score / total)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tree": True},
        {"depth": 5, "tokens": 4},
        {"depth": 5, "tokens": 6, "tree": True, "factor": 2.0},
        {"offset": 1.5, "factor": 0.5, "min_prob": 0.3},
        {"min_score": 1.2, "responses": 0},
    ],
)
def test_drafts_are_those_of_counting_by_hand(options):
    chosen = random.Random(4)
    config = SuffixConfig(**options)
    found = Counter()
    for alphabet in (2, 4, 8):
        for _ in range(25):
            answers = [random_text(chosen, chosen.randrange(16), alphabet) for _ in range(4)]
            context = random_text(chosen, chosen.randint(1, 30), alphabet)
            made = SuffixDrafter(**vars(config))
            for answer in answers:
                made.finish(0, answer)
            want = by_hand(context, answers if config.responses else [], config)
            assert drafted(made, context) == want
            found[len(want.tokens) > 0] += 1
    assert found[True] > 10


def test_a_rows_own_text_wins_a_tie_with_past_answers():
    """Half of what followed 1, 2 was 3, 1 in the row and 5, 6 in the past: both score 1."""
    made = with_answers([[1, 2, 5, 6], [1, 2]])
    assert drafted(made, [1, 2, 3, 1, 2]) == Draft([3, 1], [-1, 0])


def test_the_longer_of_two_matches_wins_a_tie():
    """After 7, 2 came 5, 6 half the time; after 2 alone 9, 4 half the time."""
    made = with_answers([[7, 2, 5, 6], [7, 2], [2, 9, 4], [2, 9, 4]], factor=2.0)
    assert drafted(made, [0, 7, 2]) == Draft([5, 6], [-1, 0])


def test_answers_beyond_the_limit_push_the_oldest_out():
    made = with_answers([[1, 2, 3], [1, 2, 4], [1, 2, 5]], responses=2)
    assert spelled_out(made._finished) == counted([[1, 2, 4], [1, 2, 5]], 24)
    assert len(made._answers) == 2


def test_clear_forgets_answers_unless_they_are_kept_warm():
    for keep_warm, want in ((False, []), (True, [4, 6])):
        made = with_answers(GOLDEN, keep_warm=keep_warm)
        made.clear()
        assert drafted(made, [9, 1, 2, 3]).tokens == want


def test_a_finished_answer_is_drafted_for_the_next_prompt(tiny):
    """The same prompt twice: the second finds the first one's answer, cut where it ended."""
    made = drafter()
    prompt = requests(1, 30, seed=5)
    first = run(tiny, made, prompt)
    second = run(tiny, made, prompt)
    assert tokens_of(first) == tokens_of(second) == tokens_of(run(tiny, None, prompt))
    assert list(made._answers) == [first["p0"].token_ids] * 2
    assert tau(second) > tau(first)
    made.clear()
    assert tau(run(tiny, made, prompt)) == tau(first)


def test_an_answer_that_ended_in_a_stop_token_is_remembered_to_it():
    made = drafter()
    run(cycle(), made, [Request("p", tuple(range(8)) * 2, 20)], stop_ids=[3])
    assert list(made._answers) == [[0, 1, 2, 3]]


def test_nothing_is_remembered_with_no_responses(tiny):
    made = drafter(responses=0)
    assert not made.remembers
    run(tiny, made, requests(2, 6))
    assert spelled_out(made._finished) == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": 0}, "suffix.tokens=0: need at least 1"),
        ({"depth": 1}, "suffix.depth=1: need at least 2"),
        ({"responses": -1}, "suffix.responses=-1: need at least 0"),
        ({"factor": -0.5}, "suffix.factor=-0.5: need at least 0"),
        ({"min_score": -1.0}, "suffix.min_score=-1.0: need at least 0"),
        (
            {"factor": 0.0},
            r"suffix.factor=0.0 with suffix.offset=0.0: not even a match of 63 tokens",
        ),
        ({"offset": -100.0}, r"suffix.factor=1.0 with suffix.offset=-100.0: not even a match"),
        ({"min_prob": 0.0}, r"suffix.min_prob=0.0: need a probability in \(0, 1\]"),
        ({"keep_warm": True, "responses": 0}, "suffix.responses=0: nothing is kept"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_field(fields, message):
    with pytest.raises(ValueError, match=message):
        SuffixConfig(**fields)
