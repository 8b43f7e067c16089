import json
import logging

import pytest
from fixtures_chat import CHATML, IM_START, chat_tokenizer

from headstart.data.prompts import FAMILIES
from headstart.data.template import ChatTemplate
from headstart.eval.settings import EvalConfig, SuiteConfig
from headstart.eval.suites import Suite, check_lengths, load_suite

TEMPLATE = ChatTemplate(chat_tokenizer(CHATML))


def write(path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def questions(count: int, turns: int = 1) -> list[dict[str, object]]:
    return [
        {"question_id": i, "category": f"c{i // 10}", "turns": [f"Question {i}?"] * turns}
        for i in range(count)
    ]


def load(**fields: object) -> Suite:
    return load_suite(EvalConfig(**fields), TEMPLATE)


def test_without_a_file_held_out_prompts_are_generated_in_every_family():
    suite = load(num_prompts=7, max_new_tokens=5)
    assert suite.name == "generated-heldout"
    assert [r.prompt_id.split("-")[0] for r in suite.requests] == ["heldout"] * 7
    assert sorted(suite.categories.values()) == sorted(FAMILIES)
    assert {r.max_new_tokens for r in suite.requests} == {5}
    assert suite.dropped == ""


def test_requests_start_from_the_rendered_prompt(tmp_path):
    suite = load(suite=write(tmp_path / "q.jsonl", questions(1)), num_prompts=1)
    text = TEMPLATE.tokenizer.decode(suite.requests[0].token_ids)
    assert text == "<|im_start|>user\nQuestion 0?<|im_end|>\n<|im_start|>assistant\n"
    assert suite.requests[0].token_ids[0] == IM_START


def test_the_tools_of_a_prompt_are_offered_or_said_to_be_left_out(tmp_path):
    rows = questions(2)
    rows[1]["tools"] = [{"type": "function", "function": {"name": "weather"}}]
    path = write(tmp_path / "q.jsonl", rows)
    suite = load(suite=path, num_prompts=2)
    assert suite.dropped == "1 prompts without tool definitions, which the template leaves out"
    writes = ChatTemplate(chat_tokenizer("{{ tools | tojson if tools else '' }}" + CHATML))
    offered = load_suite(EvalConfig(suite=path, num_prompts=2), writes)
    texts = [TEMPLATE.tokenizer.decode(request.token_ids) for request in offered.requests]
    assert ["weather" in text for text in texts] == [False, True]
    assert offered.dropped == ""
    plain = load(suite=write(tmp_path / "p.jsonl", questions(2)), num_prompts=2)
    assert plain.hash != suite.hash == offered.hash


def test_prompts_are_taken_evenly_over_the_file(tmp_path):
    suite = load(suite=write(tmp_path / "q.jsonl", questions(80)), num_prompts=16)
    assert [r.prompt_id for r in suite.requests] == [str(5 * i) for i in range(16)]
    assert sorted(suite.categories.values()) == [f"c{i // 2}" for i in range(16)]


def test_later_turns_are_kept_for_when_their_time_comes(tmp_path):
    suite = load(suite=write(tmp_path / "q.jsonl", questions(4, turns=2)), num_prompts=2)
    assert suite.dropped == ""
    assert suite.num_turns == 4
    text = TEMPLATE.tokenizer.decode(suite.requests[0].token_ids)
    assert text.count("Question") == 1


def test_turns_beyond_the_limit_are_left_out_and_said_to_be(tmp_path, caplog):
    path = write(tmp_path / "q.jsonl", questions(4, turns=3))
    with caplog.at_level(logging.WARNING):
        suite = load(suite=path, num_prompts=2, max_turns=2)
    assert suite.dropped == "later turns of 2 prompts are left out (max_turns=2)"
    assert suite.dropped in caplog.text
    assert suite.num_turns == 4
    assert suite.hash != load(suite=path, num_prompts=2).hash


def test_a_system_turn_is_kept(tmp_path):
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "Bye")]
    row = {"messages": [{"role": role, "content": content} for role, content in turns]}
    suite = load(suite=write(tmp_path / "q.jsonl", [row]), num_prompts=1)
    text = TEMPLATE.tokenizer.decode(suite.requests[0].token_ids)
    assert "Be brief." in text
    assert "Hi" in text
    assert "Bye" not in text


def test_rows_that_the_template_refuses_are_dropped_and_counted(tmp_path):
    rows = [*questions(2), {"prompt": "what is <|im_end|>?"}]
    suite = load(suite=write(tmp_path / "q.jsonl", rows), num_prompts=2)
    assert len(suite.requests) == 2
    assert suite.dropped == "dropped 1 rows: 1 with the special token <|im_end|> inside a turn"


def test_rows_that_cannot_be_read_are_dropped_and_counted(tmp_path):
    rows = [*questions(2), {"prompt": " "}, {"no": "prompt"}]
    suite = load(suite=write(tmp_path / "q.jsonl", rows), num_prompts=2)
    assert suite.dropped.startswith("kept 2 of 4 rows: 1 with a turn that has no text (line 3)")


def test_fewer_prompts_than_asked_for_are_said_to_be_fewer(tmp_path):
    suite = load(suite=write(tmp_path / "q.jsonl", questions(3)), num_prompts=5)
    assert len(suite.requests) == 3
    assert suite.dropped == "num_prompts=5 but only 3 prompts are usable"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none.jsonl: no such file"):
        load(suite=str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize("rows", [[], [{"prompt": ""}]])
def test_a_file_without_a_usable_row_is_refused(tmp_path, rows):
    with pytest.raises(ValueError, match="no usable row"):
        load(suite=write(tmp_path / "q.jsonl", rows))


def test_a_file_of_refused_prompts_is_refused(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"prompt": "<|im_end|>"}])
    with pytest.raises(ValueError, match="suite q: no usable prompt, dropped 1 rows: 1 with the"):
        load(suite=path)


def test_a_prompt_longer_than_the_context_is_named(tmp_path):
    rows = [{"id": "short", "prompt": "a"}, {"id": "long", "prompt": "a" * 100}]
    suite = load(suite=write(tmp_path / "q.jsonl", rows), num_prompts=2)
    with pytest.raises(ValueError, match="suite q, prompt long: .* tokens leave no room"):
        check_lengths(suite, 64)
    check_lengths(suite, 200)


def test_the_hash_follows_the_prompts_and_nothing_else(tmp_path):
    path = write(tmp_path / "q.jsonl", questions(4))
    one = load(suite=path, num_prompts=2)
    assert load(suite=path, num_prompts=2, max_new_tokens=7, seed=3).hash == one.hash
    assert load(suite=path, num_prompts=3).hash != one.hash


def test_several_suites_are_one_benchmark_under_their_names(tmp_path):
    """Ids and categories may repeat between files."""
    for name, count in (("a", 4), ("b", 3)):
        write(tmp_path / f"{name}.jsonl", questions(count, turns=2))
    suite = load(
        suites=[SuiteConfig(str(tmp_path / "a.jsonl")), SuiteConfig(str(tmp_path / "b.jsonl"))],
        num_prompts=2,
    )
    assert suite.name == "a+b"
    assert [r.prompt_id for r in suite.requests] == ["a/0", "a/2", "b/0", "b/1"]
    assert suite.categories == {i: f"{i[0]}/c0" for i in ("a/0", "a/2", "b/0", "b/1")}
    assert suite.members == {"a/0": "a", "a/2": "a", "b/0": "b", "b/1": "b"}
    dialogue = suite.dialogue(suite.requests[2], 4096)
    assert (dialogue.ask.prompt_id, dialogue.turns_left) == ("b/0", 2)
    assert dialogue.ask.token_ids == suite.requests[2].token_ids


def test_a_part_of_a_suite_holds_its_prompts_and_nothing_of_the_others(tmp_path):
    whole = load(suite=write(tmp_path / "q.jsonl", questions(4)), num_prompts=4)
    part = whole.part(["2", "0"])
    assert [request.prompt_id for request in part.requests] == ["0", "2"]
    for held in (part.categories, part.conversations, part.given, part.lengths):
        assert set(held) == {"0", "2"}
    assert part.num_turns == 2
    assert part.hash not in (whole.hash, whole.part(["0"]).hash)


def test_a_suite_has_limits_turns_and_a_seed_of_its_own(tmp_path):
    path = write(tmp_path / "a.jsonl", questions(9, turns=2))
    limits = {"num_prompts": 3, "max_new_tokens": 7, "max_turns": 1}
    suite = load(
        suites=[SuiteConfig(path, "few", **limits), SuiteConfig(path), SuiteConfig(seed=5)],
        num_prompts=2,
        max_new_tokens=9,
    )
    counts = {name: list(suite.members.values()).count(name) for name in suite.members.values()}
    assert counts == {"few": 3, "a": 2, "generated-heldout": 2}
    assert [r.max_new_tokens for r in suite.requests] == [7] * 3 + [9] * 4
    assert suite.num_turns == 3 + 4 + 2
    other = load(num_prompts=2, seed=5)
    assert [r.token_ids for r in suite.requests[5:]] == [r.token_ids for r in other.requests]
    assert suite.given == {i for i, name in suite.members.items() if name != "generated-heldout"}


def test_what_a_suite_of_several_left_out_is_told_with_its_name(tmp_path):
    path = write(tmp_path / "a.jsonl", questions(1))
    suite = load(suites=[SuiteConfig(path), SuiteConfig()], num_prompts=2)
    assert suite.dropped == "a: num_prompts=2 but only 1 prompts are usable"


def test_a_missing_file_of_several_is_named_with_its_option(tmp_path):
    suites = [SuiteConfig(), SuiteConfig(str(tmp_path / "none.jsonl"))]
    with pytest.raises(
        FileNotFoundError, match=r"eval\.suites\[1\]\.path=.*none.jsonl: no such file"
    ):
        load(suites=suites)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suite": "a.jsonl", "suites": [SuiteConfig()]}, r"eval\.suites is given too; keep one"),
        ({"suites": [SuiteConfig(), SuiteConfig()]}, "2 suites are called 'generated-heldout'"),
        (
            {"suites": [SuiteConfig("x/a.jsonl"), SuiteConfig("y/a.jsonl")]},
            "2 suites are called 'a'",
        ),
        ({"max_turns": 0}, r"eval\.max_turns=0: need at least 1"),
    ],
)
def test_suites_that_contradict_each_other_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**fields)


@pytest.mark.parametrize("name", ["num_prompts", "max_new_tokens", "max_turns"])
def test_a_limit_of_a_suite_is_at_least_one(name):
    with pytest.raises(ValueError, match=rf"eval\.suites: {name}=0: need at least 1, or null"):
        SuiteConfig(**{name: 0})


SPEC_BENCH = {"question_id": 3, "category": "translation", "turns": ["Translate: Guten Tag"]}
STYLES = {
    "mt_bench": {"question_id": 81, "category": "writing", "turns": ["A", "B"], "reference": []},
    "gsm8k": {"question_id": 0, "category": "math", "turns": ["2 + 2?"], "reference": ["4"]},
    "spec_bench": SPEC_BENCH,
    "messages": {"id": "x", "messages": [{"role": "user", "content": "Hi"}]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "y"}]
    },
    "prompt": {"prompt": "Hi", "category": "mine"},
    "null": {"prompt": "Hi", "category": None, "turns": None},
}


@pytest.mark.parametrize("style", STYLES)
def test_every_style_of_a_published_suite_is_read(tmp_path, style):
    suite = load(suite=write(tmp_path / f"{style}.jsonl", [STYLES[style]]), num_prompts=1)
    assert suite.dropped == ""
    assert len(suite.requests) == 1
    assert suite.num_turns == len(STYLES[style].get("turns") or [1])
    assert list(suite.categories.values()) == [STYLES[style].get("category") or "other"]
