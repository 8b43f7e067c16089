"""Prompts that a head was trained on are looked for, and told in its result."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import Script, arm
from training import chat_target

from headstart.data.rows import RowsMeta, RowsWriter, read_rows, rows_hash
from headstart.data.template import Audit, ChatTemplate
from headstart.eval.arms import Arm
from headstart.eval.contamination import with_contamination
from headstart.eval.settings import EvalConfig, SuiteConfig
from headstart.eval.suites import Suite, load_suite

TEMPLATE = ChatTemplate(chat_target().tokenizer)
SEEN = "Name three rivers of Europe that flow into the Black Sea and say how long each one is."
PARTLY = f"{SEEN[:70]} but this question goes on with many other words that nobody has seen before."
UNSEEN = "Explain to a child of five why the sky is blue at noon and red in the evening, please."


def rows_at(directory: Path, *questions: str) -> dict[str, str]:
    """Write training rows with these questions; return what a head says of them."""
    writer = RowsWriter(directory, RowsMeta("", TEMPLATE.hash, {}))
    for number, text in enumerate(questions):
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}]
        names = {"row_id": f"row-{number}", "category": "other", "max_length": 900}
        for row in TEMPLATE.rows(messages, audit=Audit(), **names):
            writer.add(row)
    writer.finish("made for a test", {})
    return {"rows_hash": rows_hash(read_rows(directory)[0]), "rows_path": str(directory)}


def suite_of(path: Path, *questions: str) -> Suite:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in questions))
    return load_suite(EvalConfig(suite=str(path), num_prompts=len(questions)), TEMPLATE)


def head(**trained_on: str) -> Arm:
    return replace(arm("head", Script([1])), trained_on=trained_on)


def notes(arms: list[Arm], suite: Suite, *given: str) -> list[tuple[str, ...]]:
    return [made.notes for made in with_contamination(arms, suite, TEMPLATE, list(given))]


@pytest.fixture
def suite(tmp_path) -> Suite:
    return suite_of(tmp_path / "q.jsonl", UNSEEN, SEEN, PARTLY)


def test_prompts_found_in_the_training_rows_are_counted_and_named(tmp_path, suite):
    trained_on = rows_at(tmp_path / "rows", SEEN, "Something else.")
    ((told,),) = notes([head(**trained_on)], suite)
    assert told.startswith("contamination: 2 of 3 prompts share a run of 13 words")
    assert "1 of them by four fifths or more (line-2):" in told
    assert str(tmp_path / "rows") in told


def test_every_head_is_held_against_its_own_rows(tmp_path, suite):
    clean, dirty = rows_at(tmp_path / "a", "Nothing."), rows_at(tmp_path / "b", SEEN)
    found = notes([head(**clean), head(**dirty), arm("lookup", Script([1]))], suite)
    assert [len(told) for told in found] == [0, 1, 0]


def test_a_short_prompt_counts_where_it_is_a_whole_turn(tmp_path):
    trained_on = rows_at(tmp_path / "rows", "Hi there!", "Why not?")
    suite = suite_of(tmp_path / "q.jsonl", "hi there", "Why")
    ((told,),) = notes([head(**trained_on)], suite)
    assert told.startswith("contamination: 1 of 2 prompts")


def test_a_later_turn_counts_too(tmp_path):
    trained_on = rows_at(tmp_path / "rows", SEEN)
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"question_id": 7, "turns": [UNSEEN, SEEN]}) + "\n")
    suite = load_suite(EvalConfig(suite=str(path)), TEMPLATE)
    assert len(notes([head(**trained_on)], suite)[0]) == 1


def test_rows_are_given_for_a_head_that_says_only_their_hash(tmp_path, suite):
    known = rows_at(tmp_path / "rows", SEEN)
    other = rows_at(tmp_path / "other", "Nothing.")
    made = head(rows_hash=known["rows_hash"])
    assert notes([made], suite) == [()]
    assert notes([made], suite, other["rows_path"]) == [()]
    assert len(notes([made], suite, other["rows_path"], known["rows_path"])[0]) == 1


def test_rows_that_are_gone_or_changed_leave_the_question_open(tmp_path, suite):
    known = rows_at(tmp_path / "rows", SEEN)
    ((gone,),) = notes([head(**known | {"rows_path": str(tmp_path / "none")})], suite)
    assert "are not there: whether they hold these prompts is unknown" in gone
    ((changed,),) = notes([head(**known | {"rows_hash": "0" * 16})], suite)
    assert "have changed since the head was trained" in changed


def test_given_rows_that_are_not_there_are_refused(tmp_path, suite):
    with pytest.raises(FileNotFoundError, match="none: no rows there"):
        notes([head()], suite, str(tmp_path / "none"))


def test_generated_prompts_are_not_looked_for(tmp_path):
    """They share sentences with generated training prompts, and are apart by construction."""
    known = rows_at(tmp_path / "rows", SEEN)
    path = str(tmp_path / "q.jsonl")
    suite_of(tmp_path / "q.jsonl", UNSEEN)
    suite = load_suite(EvalConfig(suites=[SuiteConfig(path), SuiteConfig()]), TEMPLATE)
    text = suite.user_texts(suite.requests[-1].prompt_id)[0]
    held = rows_at(tmp_path / "held", text)
    assert notes([head(**known), head(**held)], suite) == [(), ()]
