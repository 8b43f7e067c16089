"""Samples: the runs of an answer join up to its text, whatever bytes they cut through."""

import pytest
from fixtures_chat import chat_tokenizer
from traces import chain_round

from headstart.eval.engine.decode import Request
from headstart.eval.engine.records import Completion
from headstart.eval.samples import ANSWER_TOKENS, samples, token_runs

TOKENIZER = chat_tokenizer()


def answer(text: str, accepted: list[int], *, cut: bool = False, turns: int = 1) -> Completion:
    ids = TOKENIZER(text)["input_ids"]
    rounds = [chain_round(a, 4, cut=cut and i == len(accepted) - 1) for i, a in enumerate(accepted)]
    return Completion("p", ids, "stop", turns, rounds=rounds)


def shown(completion: Completion, prompt: str = "hello") -> list[tuple[str, str, int]]:
    request = Request("p", tuple(TOKENIZER(prompt)["input_ids"]), 99)
    (sample,) = samples(TOKENIZER, [request], [completion], {"p": "code"}, {})
    return [(run.origin, run.text, run.tokens) for run in sample.runs]


def test_runs_tell_drafted_tokens_from_the_targets_own():
    assert shown(answer("abcdefg", [3, 0, 0])) == [
        ("prefill", "a", 1),
        ("drafted", "bcd", 3),
        ("added", "e", 1),
        ("added", "f", 1),
        ("added", "g", 1),
    ]


def test_a_round_that_was_cut_adds_no_token_of_the_target():
    runs = [(origin, len(ids)) for origin, ids in token_runs(answer("abcd", [3], cut=True))]
    assert runs == [("prefill", 1), ("drafted", 3)]


def test_a_character_spread_over_runs_belongs_to_the_run_that_completes_it():
    # Two bytes: the first is drafted, the second the target's own.
    assert shown(answer("ab\u00e9", [2])) == [
        ("prefill", "a", 1),
        ("drafted", "b", 2),
        ("added", "\u00e9", 1),
    ]


def test_runs_join_up_to_the_text():
    text = "na\u00efve caf\u00e9 \u2014 d\u00e9j\u00e0 vu"
    ids = TOKENIZER(text)["input_ids"]
    rounds = [2] * ((len(ids) - 1) // 3)
    whole = TOKENIZER.decode(ids[: 1 + 3 * len(rounds)]).rstrip("\ufffd")
    assert "".join(t for _, t, _ in shown(answer(text, rounds))) == whole


def test_the_prompt_is_shown_without_special_tokens():
    request = Request("p", (3, *TOKENIZER("user\nhi")["input_ids"], 4), 99)
    (sample,) = samples(TOKENIZER, [request], [answer("abcd", [2])], {"p": "code"}, {})
    assert sample.prompt == "user\nhi"


def test_one_prompt_a_category_and_at_most_three():
    names = ["a", "a", "b", "c", "d"]
    done = [Completion(f"p{i}", [70], "stop") for i in range(5)]
    asked = [Request(f"p{i}", (70,), 9) for i in range(5)]
    found = samples(TOKENIZER, asked, done, {f"p{i}": n for i, n in enumerate(names)}, {})
    assert [s.prompt_id for s in found] == ["p0", "p2", "p3"]


def test_long_answers_are_cut():
    completion = answer("x" * 600, [4] * 119)
    assert ANSWER_TOKENS <= sum(n for _, _, n in shown(completion)) < ANSWER_TOKENS + 5


def test_every_suite_has_a_sample_before_any_has_a_second():
    names = ["a/x", "a/y", "a/z", "b/x", "c/x", "d/x"]
    done = [Completion(f"p{i}", [70], "stop") for i in range(6)]
    asked = [Request(f"p{i}", (70,), 9) for i in range(6)]
    categories = {f"p{i}": name for i, name in enumerate(names)}
    suites = {f"p{i}": name[0] for i, name in enumerate(names)}
    found = samples(TOKENIZER, asked, done, categories, suites)
    assert [s.prompt_id for s in found] == ["p0", "p3", "p4", "p5"]
    two = {f"p{i}": "a" if i < 3 else "b" for i in range(6)}
    found = samples(TOKENIZER, asked, done, categories, two)
    assert [s.prompt_id for s in found] == ["p0", "p1", "p3"]


def test_several_turns_and_missing_tokenizers_give_no_sample():
    request = Request("p", (70,), 9)
    many = Completion("p", [70, 71], "stop", turns=2)
    assert samples(TOKENIZER, [request], [many], {"p": "code"}, {}) == []
    assert samples(None, [request], [many], {"p": "code"}, {}) == []


def test_runs_of_several_turns_are_refused():
    with pytest.raises(AssertionError, match="several turns"):
        list(token_runs(Completion("p", [70, 71], "stop", turns=2)))
