"""A conversation answered turn by turn: each row holds what the target saw and said, no more."""

from collections.abc import Sequence

import pytest
from fixtures_chat import (
    BOS,
    CHATML,
    CHATML_STRIPS,
    IM_END,
    IM_START,
    bos_chat_tokenizer,
    chat_tokenizer,
)
from transformers import PreTrainedTokenizerBase

from headstart.data.answering import Answer
from headstart.data.conversations import Conversation
from headstart.data.dialogue import Dialogue
from headstart.data.template import Audit, ChatTemplate, TokenRow

QUESTIONS = ({"role": "user", "content": "Say OK"}, {"role": "user", "content": "OK?"})


def dialogue(
    messages: Sequence[dict[str, str]] = QUESTIONS,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    longest: int = 500,
    max_new_tokens: int = 100,
    only_first: bool = False,
    taken: tuple[str, ...] = (),
) -> Dialogue:
    return Dialogue(
        Conversation("a", "talk", tuple(messages)),
        ChatTemplate(tokenizer or chat_tokenizer()),
        longest=longest,
        max_new_tokens=max_new_tokens,
        temperature=0.5,
        only_first=only_first,
        taken=taken,
    )


def say(asked: Dialogue, text: str, *, stop: bool = True, unusable: str = "") -> None:
    """Answer the turn that is asked."""
    ids = chat_tokenizer().encode(text, add_special_tokens=False) + [IM_END] * stop
    reason = "stop" if stop else "length"
    asked.take(Answer(asked.ask.prompt_id, ids, reason, unusable))


def supervised(row) -> str:
    ids = [t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m]
    return chat_tokenizer().decode(ids)


def summary(asked: Dialogue) -> str:
    audit = Audit()
    asked.account(audit)
    return audit.summary()


def test_both_answers_of_a_conversation_are_supervised_in_one_row():
    asked = dialogue()
    say(asked, "OK")
    assert chat_tokenizer().decode(asked.ask.token_ids) == (
        "<|im_start|>user\nSay OK<|im_end|>\n<|im_start|>assistant\nOK<|im_end|>\n"
        "<|im_start|>user\nOK?<|im_end|>\n<|im_start|>assistant\n"
    )
    say(asked, "OK")
    (row,) = asked.rows()
    assert (row.row_id, row.category, row.stop_reason) == ("a", "talk", "stop")
    assert supervised(row) == "OK<|im_end|>OK<|im_end|>"
    assert asked.ask is None
    assert summary(asked).endswith("6 of 54 tokens supervised (11 %)")


@pytest.mark.parametrize("template", [CHATML, CHATML_STRIPS])
def test_generation_makes_the_rows_that_preparation_makes_of_the_same_conversation(template):
    tokenizer = chat_tokenizer(template)
    asked = dialogue(tokenizer=tokenizer)
    answers = ["<think>a</think>b", "<think>c</think>d"]
    messages = []
    for question, answer in zip(QUESTIONS, answers, strict=True):
        say(asked, answer)
        messages += [question, {"role": "assistant", "content": answer}]
    names = {"row_id": "a", "category": "talk", "max_length": 500, "audit": Audit()}
    prepared = ChatTemplate(tokenizer).rows(messages, **names)
    made = asked.rows()
    assert [(r.row_id, r.token_ids, r.loss_mask) for r in made] == [
        (r.row_id, r.token_ids, r.loss_mask) for r in prepared
    ]


def test_p03_a_template_that_strips_reasoning_gives_one_row_an_answer():
    asked = dialogue(tokenizer=chat_tokenizer(CHATML_STRIPS))
    say(asked, "<think>a</think>b")
    first = asked.ask
    say(asked, "<think>c</think>d")
    rows = asked.rows()
    assert [row.row_id for row in rows] == ["a-1", "a-2"]
    assert [supervised(row) for row in rows] == [
        "<think>a</think>b<|im_end|>",
        "<think>c</think>d<|im_end|>",
    ]
    assert rows[1].token_ids[: len(first.token_ids)] == list(first.token_ids)
    assert "1 split where a later prompt does not repeat" in summary(asked)


def test_a_part_is_not_named_like_another_conversation():
    taken = ("a", "a-1", "a-2", "a-2-again")
    asked = dialogue(tokenizer=chat_tokenizer(CHATML_STRIPS), taken=taken)
    say(asked, "<think>a</think>b")
    say(asked, "<think>c</think>d")
    assert [row.row_id for row in asked.rows()] == ["a-1-again", "a-2-again-again"]


def test_an_answer_that_its_text_tokenises_otherwise_starts_a_new_row():
    """The target says h and i; the text "hi" is one token for this tokenizer."""
    tokenizer = chat_tokenizer(merges=(("h", "i"),))
    asked = dialogue(tokenizer=tokenizer)
    say(asked, "hi")
    say(asked, "ho")
    first, second = asked.rows()
    assert first.token_ids[-3:-1] == tokenizer.convert_tokens_to_ids(["h", "i"])
    assert tokenizer.convert_tokens_to_ids("hi") in second.token_ids
    assert [supervised(row) for row in (first, second)] == ["hi<|im_end|>", "ho<|im_end|>"]


def test_p08_a_cut_answer_teaches_no_end_of_turn_and_ends_its_conversation():
    asked = dialogue()
    say(asked, "OK, wh", stop=False)
    assert asked.ask is None
    (row,) = asked.rows()
    assert supervised(row) == "OK, wh"
    assert row.token_ids[-1] != IM_END
    assert row.stop_reason == "length"
    assert "noted: 1 ended before a turn after an answer cut by length" in summary(asked)


def hundred_token_prompt() -> list[dict[str, str]]:
    empty = len(dialogue([{"role": "user", "content": ""}]).ask.token_ids)
    return [{"role": "user", "content": "x" * (100 - empty)}]


@pytest.mark.parametrize("longest", [110, 120])
def test_p08_an_answer_longer_than_the_room_is_cut_there(longest):
    """100 prompt tokens and 20 answer tokens at 110: exactly 10 are supervised."""
    asked = dialogue(hundred_token_prompt(), longest=longest)
    assert len(asked.ask.token_ids) == 100
    room = asked.ask.max_new_tokens
    ids = [9] * 19 + [IM_END]
    asked.take(Answer("a", ids[:room], "stop" if room >= 20 else "length"))
    (row,) = asked.rows()
    assert (len(row.token_ids), row.supervised) == (longest, longest - 100)
    assert row.token_ids[100:] == ids[: longest - 100]
    assert row.stop_reason == ("length" if longest == 110 else "stop")


def test_p08_a_prompt_that_fills_the_row_is_never_asked():
    asked = dialogue(hundred_token_prompt(), longest=100)
    assert asked.ask is None
    assert asked.rows() == []
    assert "dropped: 1 with a prompt of 100 tokens or more" in summary(asked)


def test_p05_a_generated_row_has_one_bos_and_the_ids_of_a_prepared_one():
    tokenizer = bos_chat_tokenizer()
    asked = dialogue(QUESTIONS[:1], tokenizer=tokenizer)
    prompt = list(asked.ask.token_ids)
    say(asked, "yo")
    (made,) = asked.rows()
    (prepared,) = ChatTemplate(tokenizer).rows(
        [QUESTIONS[0], {"role": "assistant", "content": "yo"}],
        row_id="a",
        category="talk",
        max_length=500,
        audit=Audit(),
    )
    for ids in (prompt, made.token_ids, prepared.token_ids):
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
    assert (made.token_ids, made.loss_mask) == (prepared.token_ids, prepared.loss_mask)


def test_p08_a_cut_last_answer_keeps_the_ends_of_those_before():
    asked = dialogue()
    say(asked, "OK")
    say(asked, "and s", stop=False)
    (row,) = asked.rows()
    assert supervised(row) == "OK<|im_end|>and s"
    assert row.stop_reason == "length"
    assert "noted" not in summary(asked)


def test_only_the_first_turn_is_answered_where_that_is_asked_for():
    asked = dialogue(only_first=True)
    say(asked, "OK")
    assert asked.ask is None
    assert supervised(asked.rows()[0]) == "OK<|im_end|>"
    assert "noted" not in summary(asked)


def test_a_system_turn_belongs_to_the_first_question():
    asked = dialogue([{"role": "system", "content": "be brief"}, *QUESTIONS])
    assert asked.turns_left == 2
    assert chat_tokenizer().decode(asked.ask.token_ids).startswith("<|im_start|>system\nbe brief")


def test_no_answer_is_longer_than_the_room_there_is():
    asked = dialogue(max_new_tokens=10)
    prompt = len(asked.ask.token_ids)
    assert asked.ask.max_new_tokens == 10
    assert dialogue(longest=prompt + 4).ask.max_new_tokens == 4
    assert dialogue(longest=prompt).ask is None


def test_a_first_prompt_without_room_drops_the_conversation():
    asked = dialogue(longest=20)
    assert asked.rows() == []
    assert "dropped: 1 with a prompt of 20 tokens or more (data.max_length)" in summary(asked)


def test_a_later_prompt_without_room_keeps_what_was_answered():
    asked = dialogue(longest=50)
    say(asked, "OK")
    assert asked.ask is None
    assert supervised(asked.rows()[0]) == "OK<|im_end|>"
    assert "noted: 1 ended before a turn with a prompt of 50 tokens" in summary(asked)


def test_an_answer_with_a_marker_in_it_is_not_put_before_a_model():
    """Rendered, its text would read as a turn that nobody wrote."""
    asked = dialogue()
    ids = [IM_START, *chat_tokenizer().encode("user", add_special_tokens=False), IM_END]
    asked.take(Answer("a", ids, "stop"))
    assert asked.ask is None
    assert len(asked.rows()) == 1
    assert "ended before a turn with the special token <|im_start|> inside" in summary(asked)


def test_a_turn_after_a_tools_is_not_answered():
    tool = {"role": "tool", "content": "42"}
    asked = dialogue([QUESTIONS[0], tool, QUESTIONS[1]])
    say(asked, "OK")
    assert asked.ask is None
    assert "1 ended before a turn that follows a tool's" in summary(asked)


@pytest.mark.parametrize("answered", [0, 1])
def test_an_unusable_answer_is_counted_and_what_came_before_kept(answered):
    asked = dialogue()
    for _ in range(answered):
        say(asked, "OK")
    say(asked, "", unusable="whose text is odd")
    assert asked.ask is None
    assert len(asked.rows()) == answered
    want = "noted: 1 ended before a turn whose text" if answered else "dropped: 1 whose text is odd"
    assert want in summary(asked)


TOOL = {"type": "function", "function": {"name": "weather"}}
CHATML_TOOLS = "{% for t in tools or [] %}{{ (t | tojson) + '\\n' }}{% endfor %}" + CHATML


@pytest.mark.parametrize("template", [CHATML, CHATML_TOOLS])
def test_tool_definitions_are_in_every_prompt_or_told_to_be_left_out(template):
    given = Conversation("a", "talk", QUESTIONS, tools=(TOOL,))
    one = ChatTemplate(chat_tokenizer(template))
    asked = Dialogue(given, one, longest=900, max_new_tokens=9, temperature=0.0)
    say(asked, "OK")
    text = chat_tokenizer().decode(asked.ask.token_ids)
    writes = template == CHATML_TOOLS
    assert text.count('"weather"') == writes
    told = "without tool definitions, which the template leaves out"
    assert (told in summary(asked)) == (not writes)


def test_a_conversation_without_a_user_turn_is_dropped():
    asked = dialogue([{"role": "system", "content": "be brief"}])
    assert asked.ask is None
    assert "dropped: 1 without a user turn" in summary(asked)


def test_a_row_that_came_tokenised_is_dropped_with_a_reason_of_its_own():
    given = Conversation("a", "talk", (), TokenRow("a", "talk", [5, 6], [0, 1], None))
    asked = Dialogue(
        given, ChatTemplate(chat_tokenizer()), longest=9, max_new_tokens=9, temperature=0.0
    )
    assert "dropped: 1 tokenised already" in summary(asked)


def test_every_turn_is_asked_under_a_name_of_its_own():
    asked = dialogue()
    names = [asked.ask.prompt_id]
    say(asked, "OK")
    names.append(asked.ask.prompt_id)
    assert names == ["a", "a#turn-2"]
    assert asked.ask.temperature == 0.5
