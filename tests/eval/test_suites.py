import json
import logging

import pytest
from fixtures_chat import CHATML, IM_START, chat_tokenizer

from headstart.data.prompts import FAMILIES
from headstart.data.template import ChatTemplate
from headstart.eval.settings import EvalConfig
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


def test_later_turns_are_left_out_and_said_to_be(tmp_path, caplog):
    path = write(tmp_path / "q.jsonl", questions(4, turns=2))
    with caplog.at_level(logging.WARNING):
        suite = load(suite=path, num_prompts=2)
    assert suite.dropped == "later turns of 2 prompts are left out: only the first is answered"
    assert suite.dropped in caplog.text
    text = TEMPLATE.tokenizer.decode(suite.requests[0].token_ids)
    assert text.count("Question") == 1


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
    assert suite.dropped == "eval.num_prompts=5 but only 3 prompts are usable"


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
