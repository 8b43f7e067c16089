"""Answers on disk: whatever a kill tears, the whole lines are taken up."""

import json
from pathlib import Path

import pytest
from fixtures_chat import IM_END, chat_tokenizer

from headstart.data.answer_log import AnswerLog
from headstart.data.answering import Answer
from headstart.data.conversations import Conversation
from headstart.data.dialogue import Dialogue
from headstart.data.template import ChatTemplate
from headstart.files import BLOCK

TEMPLATE = ChatTemplate(chat_tokenizer())


def dialogues(*names: str, turns: int = 2) -> dict[str, Dialogue]:
    chat = tuple({"role": "user", "content": f"question {n}"} for n in range(turns))
    return {
        name: Dialogue(
            Conversation(name, "other", chat),
            TEMPLATE,
            longest=10**6,
            max_new_tokens=10**6,
            temperature=0.3,
        )
        for name in names
    }


def answer(log: AnswerLog, asked: Dialogue, length: int = 3) -> None:
    said = Answer(asked.ask.prompt_id, [*[100] * length, IM_END], "stop")
    log.add(asked, said)
    asked.take(said)


def test_a_dialogue_is_taken_up_in_the_middle(tmp_path: Path):
    log, before = AnswerLog(tmp_path / "log"), dialogues("a", "b")
    answer(log, before["a"])
    answer(log, before["b"])
    answer(log, before["b"])
    log.close()
    after = dialogues("a", "b")
    taken = [d.conversation.prompt_id for d in AnswerLog(tmp_path / "log").replay(after)]
    assert taken == ["a", "b", "b"]
    assert after["a"].ask == before["a"].ask
    assert after["b"].ask is None
    assert after["b"].rows() == before["b"].rows()


def test_each_answer_is_written_with_its_temperature_and_how_it_ended(tmp_path: Path):
    log, asked = AnswerLog(tmp_path / "log"), dialogues("a")
    answer(log, asked["a"])
    log.add(asked["a"], Answer("a#turn-2", [], "length", "whose text is odd"))
    first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert first == {
        "prompt_id": "a",
        "turn": 1,
        "temperature": 0.3,
        "stop_reason": "stop",
        "token_ids": [100, 100, 100, IM_END],
        "unusable": "",
    }
    assert (second["turn"], second["unusable"]) == (2, "whose text is odd")


@pytest.mark.parametrize("torn", [1, 40, 3 * BLOCK])
def test_a_torn_last_line_is_cut_off_and_written_again(tmp_path: Path, torn: int):
    path = tmp_path / "log"
    log, before = AnswerLog(path), dialogues("a", "b")
    answer(log, before["a"])
    whole = path.read_bytes()
    answer(log, before["b"], length=BLOCK)
    log.close()
    path.write_bytes(path.read_bytes()[:-torn])
    log, after = AnswerLog(path), dialogues("a", "b")
    assert path.read_bytes() == whole
    assert [d.conversation.prompt_id for d in log.replay(after)] == ["a"]
    answer(log, after["b"], length=BLOCK)
    assert after["b"].ask == before["b"].ask


def test_a_file_that_is_one_torn_line_is_emptied(tmp_path: Path):
    (tmp_path / "log").write_text('{"prompt_id": "a"')
    log = AnswerLog(tmp_path / "log")
    assert list(log.replay(dialogues("a"))) == []
    assert (tmp_path / "log").read_bytes() == b""


def test_an_answer_to_something_else_is_an_error_that_names_its_line(tmp_path: Path):
    log, asked = AnswerLog(tmp_path / "log"), dialogues("a", "b")
    answer(log, asked["a"])
    answer(log, asked["b"])
    log.close()
    with pytest.raises(ValueError, match="log: line 2 answers turn 1 of prompt b, which this run"):
        list(AnswerLog(tmp_path / "log").replay(dialogues("a")))


def test_a_line_that_is_no_answer_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "log").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="log: line 1 is not an answer"):
        list(AnswerLog(tmp_path / "log").replay(dialogues("a")))
