from collections import Counter

import pytest

from headstart.data import prompts as module
from headstart.data.prompts import FAMILIES, Prompt, generate_prompts, split_of


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.messages[0]["content"] for prompt in prompts]


@pytest.fixture(scope="module")
def seven_thousand() -> list[Prompt]:
    return generate_prompts(7000, seed=0)


def test_seven_thousand_prompts_are_distinct(seven_thousand):
    assert len(set(texts(seven_thousand))) == 7000
    assert len({prompt.prompt_id for prompt in seven_thousand}) == 7000


def test_the_families_are_balanced_and_take_turns(seven_thousand):
    assert Counter(prompt.family for prompt in seven_thousand) == dict.fromkeys(FAMILIES, 1000)
    assert tuple(prompt.family for prompt in seven_thousand[7:14]) == FAMILIES


def test_every_prompt_is_one_filled_ascii_user_turn(seven_thousand):
    for prompt in seven_thousand:
        (message,) = prompt.messages
        assert message["role"] == "user"
        text = message["content"]
        assert text.isascii()
        assert text == text.strip()
        assert len(text.split()) >= 4
        assert "{" not in text


def test_the_splits_share_no_text_whatever_the_seeds(seven_thousand):
    held_out = [
        text for seed in (0, 1) for text in texts(generate_prompts(700, seed=seed, split="heldout"))
    ]
    assert not set(held_out) & set(texts(seven_thousand))
    assert {split_of(text) for text in held_out} == {"heldout"}
    assert {split_of(text) for text in texts(seven_thousand)} == {"train"}


def test_the_same_seed_gives_the_same_prompts_and_another_seed_others():
    assert generate_prompts(70, seed=5) == generate_prompts(70, seed=5)
    assert not set(texts(generate_prompts(70, seed=5))) & set(texts(generate_prompts(70, seed=6)))


def test_a_smaller_count_gives_the_first_prompts_of_a_larger_one(seven_thousand):
    assert generate_prompts(50, seed=0) == seven_thousand[:50]


def test_a_prompt_is_known_by_split_seed_family_and_number():
    ids = [prompt.prompt_id for prompt in generate_prompts(8, seed=3, split="heldout")]
    assert ids[0] == "heldout-3-writing-00000"
    assert ids[7] == "heldout-3-writing-00001"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_alone_gives_what_it_gives_among_others(family, seven_thousand):
    alone = generate_prompts(20, seed=0, families=[family])
    assert alone == seven_thousand[FAMILIES.index(family) :: len(FAMILIES)][:20]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_twenty_thousand_prompts(family):
    assert len(set(texts(generate_prompts(20_000, seed=0, families=[family])))) == 20_000


def test_a_question_is_asked_only_where_the_passage_answers_it():
    asked = texts(generate_prompts(4000, seed=0, families=["extraction"]))
    about = [text for text in asked if "How many trees are there?" in text]
    assert about
    assert all("trees stand on the hill" in t or "On the hill there are" in t for t in about)


def test_shared_quantities_divide_evenly():
    for text in texts(generate_prompts(2000, seed=0, families=["arithmetic"])):
        if "equally among" in text:
            total, friends = (int(word) for word in text.split() if word.isdigit())
            assert total % friends == 0


def test_a_family_that_runs_out_is_an_error_with_what_it_gives(monkeypatch):
    monkeypatch.setitem(module.MAKERS, "coin", lambda rng: rng.choice(["heads", "tails"]))
    available = sum(split_of(side) == "train" for side in ("heads", "tails"))
    with pytest.raises(ValueError, match=f"the family coin gives only {available} distinct train"):
        generate_prompts(3, seed=0, families=["coin"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count=0"),
        ({"count": 1, "split": "test"}, "split='test': expected train or heldout"),
        ({"count": 1, "families": ["poetry"]}, r"families=\['poetry'\]: expected some of writing"),
        ({"count": 1, "families": []}, r"families=\[\]"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_prompts(seed=0, **arguments)
