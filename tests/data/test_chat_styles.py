"""Golden masks: for each style of template, what is supervised is exactly the answers' text."""

import pytest
from chat_styles import R1, STYLES, style_tokenizer

from headstart.data.audit_prompts import user_texts
from headstart.data.template import Audit, ChatTemplate, TokenRow

MERGES = (("\u010a", "O"), ("\u0120", "O"))
"""Newline and space with the first letter of OK: they join headers and answers."""
TOOL_CHAT = [
    {"role": "user", "content": "Is it warm?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
        ],
    },
    {"role": "tool", "content": '{"celsius": 31}'},
    {"role": "assistant", "content": "OK, yes"},
]


def chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def rows_of(template: ChatTemplate, messages: list[dict]) -> tuple[list[TokenRow], Audit]:
    audit = Audit()
    rows = template.rows(messages, row_id="r", category="c", max_length=10_000, audit=audit)
    return rows, audit


def texts_of(template: ChatTemplate, messages: list[dict]) -> list[str]:
    """Return the supervised text of each row, having checked that no row was lost."""
    rows, audit = rows_of(template, messages)
    assert audit.dropped == {}
    for row in rows:
        assert len(row.token_ids) == len(row.loss_mask)
    return [template.tokenizer.decode(taught(row)) for row in rows]


def taught(row: TokenRow) -> list[int]:
    return [token for token, on in zip(row.token_ids, row.loss_mask, strict=True) if on]


def expected(name: str, *answers: str) -> list[str]:
    texts = [STYLES[name].answer.format(answer) for answer in answers]
    return texts if STYLES[name].split else ["".join(texts)]


@pytest.fixture(params=sorted(STYLES))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def template(name: str) -> ChatTemplate:
    return ChatTemplate(style_tokenizer(name))


def test_every_answer_of_several_turns_is_supervised_and_nothing_else(name, template):
    found = texts_of(template, chat("Hi", "Hello there", "And?", "Bye", "Well", "OK\n\nthen"))
    assert found == expected(name, "Hello there", "Bye", "OK\n\nthen")


def test_identical_answers_are_each_supervised_where_they_stand(name, template):
    found = texts_of(template, chat("Say OK", "OK", "OK?", "OK"))
    assert found == expected(name, "OK", "OK")


def test_markers_quoted_after_the_last_answer_change_nothing(name, template):
    found = texts_of(template, chat("Say OK", "OK", "OK?", "OK", STYLES[name].quote))
    assert found == expected(name, "OK", "OK")


@pytest.mark.parametrize("at", [0, 1])
def test_markers_quoted_inside_a_turn_drop_the_row_with_a_reason(name, template, at):
    turns = ["Say OK", "OK", "OK?", "OK"]
    turns[at] = f"as in {STYLES[name].quote}"
    rows, audit = rows_of(template, chat(*turns))
    assert rows == []
    (reason,) = audit.dropped
    assert reason.startswith("with the special token ")
    assert reason.split()[4] in STYLES[name].quote


def test_markers_that_are_plain_text_in_a_style_stay_plain_text():
    template = ChatTemplate(style_tokenizer("llama2"))
    found = texts_of(template, chat("a [/INST] hi [INST] b", "OK", "<<SYS>>", "no [/INST] here"))
    assert found == expected("llama2", "OK", "no [/INST] here")


def test_an_empty_answer_is_not_supervised_and_the_others_are(name, template):
    messages = chat("Hi", "  ", "And?", "Bye")
    assert texts_of(template, messages) == expected(name, "Bye")
    _, audit = rows_of(template, messages)
    assert audit.noted == {"with an empty answer, which is not supervised": 1}


def test_a_conversation_of_empty_answers_is_dropped_with_a_reason(template):
    rows, audit = rows_of(template, chat("Hi", "", "And?", ""))
    assert rows == []
    assert audit.dropped == {"with an empty answer": 1}


def test_a_tool_call_is_supervised_and_its_result_is_not(name, template):
    style = STYLES[name]
    rows, audit = rows_of(template, TOOL_CHAT)
    if style.call is None:
        assert rows == []
        assert audit.dropped == {style.no_tools: 1}
        return
    texts = [style.call, style.answer.format("OK, yes")]
    assert texts_of(template, TOOL_CHAT) == (texts if style.split else ["".join(texts)])


def test_an_answer_of_text_and_a_tool_call_is_supervised_whole():
    template = ChatTemplate(style_tokenizer("qwen3"))
    messages = [*TOOL_CHAT[:1], TOOL_CHAT[1] | {"content": "Let me look."}]
    (text,) = texts_of(template, messages)
    assert text == "Let me look.\n" + STYLES["qwen3"].call


def test_a_tool_call_that_the_template_does_not_write_drops_the_row():
    template = ChatTemplate(style_tokenizer("phi3"))
    rows, audit = rows_of(template, TOOL_CHAT[:2])
    assert rows == []
    assert audit.dropped == {"with a tool call that the template rewrites or leaves out": 1}


def test_a_merging_tokenizer_supervises_the_same_text_p04(name):
    template = ChatTemplate(style_tokenizer(name, merges=MERGES))
    found = texts_of(template, chat("Say OK", "OK", "OK?", "OK"))
    assert "".join(found) == "".join(expected(name, "OK", "OK"))


@pytest.mark.parametrize("merges", [(), MERGES])
def test_every_row_begins_with_the_prompt_of_each_answer_it_supervises_p04(name, merges):
    template = ChatTemplate(style_tokenizer(name, merges=merges))
    messages = chat("Say OK", "OK", "OK?", "OK then")
    rows, _ = rows_of(template, messages)
    starts = {0: rows[0], 1: rows[-1]}
    for number, row in starts.items():
        prompt = template.prompt_ids(messages[: 2 * number + 1])
        assert row.token_ids[: len(prompt)] == prompt
        assert sum(row.loss_mask[len(prompt) :]) > 0


def test_prompts_are_the_ids_that_transformers_itself_makes(template):
    messages = chat("Say OK", "OK", "OK?")
    own = template.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert template.prompt_ids(messages) == own["input_ids"]


def test_bos_stands_where_the_template_writes_it_p05(name, template):
    bos = template.tokenizer.bos_token_id
    (row, *_), _ = rows_of(template, chat("Say OK", "OK"))
    if bos is not None:
        assert row.token_ids[0] == bos
        assert row.token_ids.count(bos) == 1


def test_the_text_of_a_users_turn_is_found_in_a_prompt(template):
    prompt = template.prompt_ids(chat("Say\nOK now"))
    assert user_texts(template, prompt) == ["Say\nOK now"]


def test_a_system_turn_is_in_the_prompt_or_the_row_is_dropped_with_a_reason(name, template):
    messages = [{"role": "system", "content": "be brief"}, *chat("Hi", "OK", "And?", "Bye")]
    rows, audit = rows_of(template, messages)
    if name == "gemma":
        assert audit.dropped == {"refused by the chat template (no system turn)": 1}
        return
    assert all("be brief" in template.tokenizer.decode(row.token_ids) for row in rows)
    whole = "".join(template.tokenizer.decode(taught(row)) for row in rows)
    assert whole == "".join(expected(name, "OK", "Bye"))
    # Mistral's system text moves to the last user turn: no row can hold both answers.
    assert len(rows) == (2 if STYLES[name].split or name == "mistral" else 1)


def test_an_answer_that_came_cut_is_not_taught_to_end_p08(name, template):
    for reason, taught_text in (("length", "The answer is fo"), ("stop", None), (None, None)):
        rows = template.rows(
            chat("Hi", "OK", "Well?", "The answer is fo"),
            row_id="r",
            category="c",
            max_length=10_000,
            audit=Audit(),
            stop_reason=reason,
        )
        texts = [template.tokenizer.decode(taught(row)) for row in rows]
        want = expected(name, "OK", "The answer is fo")
        if taught_text:
            whole = STYLES[name].answer.format(taught_text)
            want[-1] = want[-1].removesuffix(whole) + whole.split(taught_text)[0] + taught_text
        assert texts == want
        assert [row.stop_reason for row in rows] == [*[None] * (len(rows) - 1), reason]


def test_an_empty_answer_that_was_cut_leaves_the_one_before_its_end_p08(name, template):
    (row,) = template.rows(
        chat("Hi", "OK", "Well?", " "),
        row_id="r",
        category="c",
        max_length=10_000,
        audit=Audit(),
        stop_reason="length",
    )
    assert template.tokenizer.decode(taught(row)) == expected(name, "OK")[0]


# Reasoning


def test_reasoning_is_supervised_as_the_last_answer_shows_it_p03():
    template = ChatTemplate(style_tokenizer("qwen3"))
    found = texts_of(template, chat("x", "<think>a</think>b", "y", "<think>c</think>d"))
    assert found == [
        "<think>\na\n</think>\n\nb<|im_end|>",
        "<think>\nc\n</think>\n\nd<|im_end|>",
    ]


def test_reasoning_in_a_field_of_its_own_is_supervised_too_p03():
    template = ChatTemplate(style_tokenizer("qwen3"))
    messages = [*chat("x"), {"role": "assistant", "content": "b", "reasoning_content": "a"}]
    assert texts_of(template, messages) == ["<think>\na\n</think>\n\nb<|im_end|>"]


def test_an_inserted_empty_block_is_in_the_row_and_not_supervised_p03():
    template = ChatTemplate(style_tokenizer("qwen3"))
    (row,), _ = rows_of(template, chat("x", "d"))
    assert "<think>\n\n</think>\n\nd" in template.tokenizer.decode(row.token_ids)
    assert template.tokenizer.decode(taught(row)) == "d<|im_end|>"


def test_an_empty_block_of_the_answers_own_is_supervised_p03():
    template = ChatTemplate(style_tokenizer("qwen3"))
    (text,) = texts_of(template, chat("x", "<think>\n\n</think>\n\nd"))
    assert text == "<think>\n\n</think>\n\nd<|im_end|>"


def test_reasoning_that_a_template_leaves_out_drops_the_row_p03():
    template = ChatTemplate(style_tokenizer("chatml"))
    messages = [*chat("x"), {"role": "assistant", "content": "b", "reasoning_content": "a"}]
    rows, audit = rows_of(template, messages)
    assert rows == []
    assert audit.dropped == {"with an answer that the template rewrites or leaves out": 1}


def test_an_answer_goes_on_where_the_prompt_opens_the_reasoning_p03():
    template = ChatTemplate(style_tokenizer("deepseek_r1"))
    messages = chat("x", "<think>\nhm\n</think>\n\nOK", "y", "<think>\nhm\n</think>\n\nBye")
    assert texts_of(template, messages) == [R1.answer.format("OK"), R1.answer.format("Bye")]
    rows, _ = rows_of(template, messages)
    for row, end in zip(rows, (1, 3), strict=True):
        prompt = template.prompt_ids(messages[:end])
        assert row.token_ids[: len(prompt)] == prompt
        assert row.loss_mask.index(1) == len(prompt)


def thinking_template() -> ChatTemplate:
    """Qwen3-Thinking: the prompt opens the reasoning, and past answers are shown with theirs."""
    tokenizer = style_tokenizer("qwen3")
    head, prompt = tokenizer.chat_template.rsplit("assistant\\n", 1)
    tokenizer.chat_template = head + "assistant\\n<think>\\n" + prompt
    template = ChatTemplate(tokenizer)
    opening = template.tokenizer.decode(template.prompt_ids(chat("x")))
    assert opening.endswith("<|im_start|>assistant\n<think>\n")
    return template


@pytest.mark.parametrize(
    ("answer", "want"),
    [
        ({"content": "<think>\nhm\n</think>\n\nOK"}, "hm\n</think>\n\nOK<|im_end|>"),
        ({"content": "OK", "reasoning_content": "hm"}, "hm\n</think>\n\nOK<|im_end|>"),
        ({"content": "OK"}, "OK<|im_end|>"),
        (
            {"content": "<think>\nhm\n</think>\n\n", "tool_calls": TOOL_CHAT[1]["tool_calls"]},
            "hm\n</think>\n\n" + STYLES["qwen3"].call,
        ),
    ],
)
def test_reasoning_that_prompt_and_template_both_open_is_supervised_from_its_text_p03(answer, want):
    messages = [*chat("x"), {"role": "assistant"} | answer]
    assert texts_of(thinking_template(), messages) == [want]


def test_an_answer_without_the_reasoning_that_the_prompt_opens_is_dropped_p03():
    rows, audit = rows_of(ChatTemplate(style_tokenizer("deepseek_r1")), chat("x", "OK"))
    assert rows == []
    assert audit.dropped == {"with an answer that does not follow the generation prompt": 1}


# Markers


def test_a_marked_template_gives_the_mask_of_transformers_p02():
    template = ChatTemplate(style_tokenizer("chatml_marked"))
    assert template.mask_mode == "markers"
    messages = chat("Hi", "Hello there", "And?", "Bye")
    (row,), _ = rows_of(template, messages)
    whole = template.tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert row.token_ids == whole["input_ids"][: len(row.token_ids)]
    assert row.loss_mask == whole["assistant_masks"][: len(row.loss_mask)]


def test_markers_decide_what_of_an_answer_is_supervised_p02():
    tokenizer = style_tokenizer("chatml_marked")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- generation -%}\n{{ message.content }}",
        "{{ message.content[:2] }}\n{%- generation -%}\n{{ message.content[2:] }}",
    )
    assert texts_of(ChatTemplate(tokenizer), chat("Hi", "abcd")) == ["cd<|im_end|>"]


def test_an_end_of_turn_just_outside_the_markers_is_supervised_p04():
    tokenizer = style_tokenizer("chatml_marked")
    moved = tokenizer.chat_template.replace("{{ '<|im_end|>' }}\n{%- endgeneration -%}", "END")
    assert "END" in moved
    tokenizer.chat_template = moved.replace("END", "{%- endgeneration -%}{{ '<|im_end|>' }}")
    assert texts_of(ChatTemplate(tokenizer), chat("Hi", "OK")) == ["OK<|im_end|>"]


def test_markers_without_an_answer_inside_drop_the_row_p02():
    tokenizer = style_tokenizer("chatml_marked")
    tokenizer.chat_template = tokenizer.chat_template.replace("== 'assistant'", "== 'tool'")
    rows, audit = rows_of(ChatTemplate(tokenizer), chat("Hi", "OK"))
    assert rows == []
    assert audit.dropped == {"with an answer that the template does not mark": 1}


def test_a_template_that_begins_with_two_bos_is_refused_p05():
    tokenizer = style_tokenizer("gemma")
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    with pytest.raises(ValueError, match="begins with two BOS tokens; remove one"):
        ChatTemplate(tokenizer)
