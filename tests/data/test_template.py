import json

import pytest
from fixtures_chat import (
    BOS,
    CHATML,
    CHATML_INSERTS,
    CHATML_STRIPS,
    EOS,
    IM_END,
    bos_chat_tokenizer,
    chat_tokenizer,
    merging_chat_tokenizer,
)
from models import target_of, tiny_model
from tokenizers import Tokenizer, normalizers
from training import CHAT_VOCAB
from transformers import AutoTokenizer

from headstart.data.features import make_features
from headstart.data.template import Audit, ChatTemplate, TemplateRefusal, TokenRow


def chat(*turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def rows_of(
    template: ChatTemplate, messages: list[dict[str, str]], *, max_length: int = 10_000
) -> tuple[list[TokenRow], Audit]:
    audit = Audit()
    rows = template.rows(messages, row_id="r", category="c", max_length=max_length, audit=audit)
    return rows, audit


def supervised_text(template: ChatTemplate, row: TokenRow) -> str:
    ids = [token for token, on in zip(row.token_ids, row.loss_mask, strict=True) if on]
    return template.tokenizer.decode(ids)


def test_repeated_answers_are_supervised_where_they_stand_p01():
    template = ChatTemplate(chat_tokenizer())
    marker = "<|im_end|>\n<|im_start|>assistant\nhi"
    (row,), _ = rows_of(template, chat("Say OK", "OK", "OK?", "OK", marker))
    assert supervised_text(template, row) == "OK<|im_end|>OK<|im_end|>"


def test_a_marker_inside_a_turn_drops_the_row_with_a_reason_p01():
    marker = "<|im_end|>\n<|im_start|>assistant\nhi"
    rows, audit = rows_of(ChatTemplate(chat_tokenizer()), chat("Say OK", "OK", marker, "OK"))
    assert rows == []
    assert audit.dropped == {"with the special token <|im_end|> inside a turn": 1}


def test_a_marker_inside_a_prompt_is_refused_p01():
    with pytest.raises(TemplateRefusal, match="special token"):
        ChatTemplate(chat_tokenizer()).prompt_ids(chat("a<|im_start|>"))


def test_the_mask_needs_no_generation_markers_p02():
    template = ChatTemplate(chat_tokenizer(CHATML))
    (row,), _ = rows_of(template, chat("ab", "cd", "ef", "gh"))
    expected: list[int] = []
    for role, text in (("user", "ab"), ("assistant", "cd"), ("user", "ef"), ("assistant", "gh")):
        answer = role == "assistant"
        expected += [0] * (1 + len(role) + 1)  # <|im_start|>, the role's bytes, newline
        expected += [int(answer)] * (len(text) + 1)  # the bytes and <|im_end|>
        expected += [0]  # newline
    assert row.loss_mask == expected[:-1]


def test_coverage_is_reported_per_row_and_in_the_summary_p02():
    (row,), audit = rows_of(ChatTemplate(chat_tokenizer()), chat("ab", "cd"))
    assert row.coverage == row.supervised / len(row.token_ids) == 3 / 24
    assert audit.summary() == "1 rows from 1 conversations, 3 of 24 tokens supervised (12 %)"


def test_a_template_that_strips_reasoning_gives_one_row_per_answer_p03():
    template = ChatTemplate(chat_tokenizer(CHATML_STRIPS))
    messages = chat("x", "<think>a</think>b", "y", "<think>c</think>d")
    rows, audit = rows_of(template, messages)
    texts = [supervised_text(template, row) for row in rows]
    assert texts == ["<think>a</think>b<|im_end|>", "<think>c</think>d<|im_end|>"]
    assert [row.row_id for row in rows] == ["r-1", "r-2"]
    assert list(audit.noted) == ["split where a later prompt renders an earlier answer differently"]


def test_every_row_of_a_rewriting_template_starts_with_its_prompt_p03():
    template = ChatTemplate(chat_tokenizer(CHATML_STRIPS))
    messages = chat("x", "<think>a</think>b", "y", "<think>c</think>d")
    rows, _ = rows_of(template, messages)
    for row, end in zip(rows, (1, 3), strict=True):
        prompt = template.prompt_ids(messages[:end])
        assert row.token_ids[: len(prompt)] == prompt


def test_an_inserted_empty_block_is_not_supervised_p03():
    template = ChatTemplate(chat_tokenizer(CHATML_INSERTS))
    (row,), _ = rows_of(template, chat("x", "d"))
    assert "<think>" in template.tokenizer.decode(row.token_ids)
    assert supervised_text(template, row) == "d<|im_end|>"


def test_an_answer_that_the_template_rewrites_is_dropped_with_a_reason_p03():
    upper = CHATML.replace("message['content']", "message['content'].upper()")
    rows, audit = rows_of(ChatTemplate(chat_tokenizer(upper)), chat("x", "d"))
    assert rows == []
    assert audit.dropped == {"with an answer that the template rewrites or leaves out": 1}


def test_a_merge_of_header_and_answer_leaves_the_prompt_a_prefix_p04():
    template = ChatTemplate(merging_chat_tokenizer())
    messages = chat("q", "A cat")
    (row,), _ = rows_of(template, messages)
    prompt = template.prompt_ids(messages[:1])
    merged = template.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert merged[: len(prompt)] != prompt  # the fixture does merge
    assert row.token_ids == prompt + template.tokenizer.encode("A cat") + [IM_END]
    assert row.loss_mask == [0] * len(prompt) + [1] * len("A cat") + [1]


def test_every_answer_of_a_merging_tokenizer_follows_its_own_prompt_p04():
    template = ChatTemplate(merging_chat_tokenizer())
    messages = chat("q", "A cat", "r", "A dog")
    rows, _ = rows_of(template, messages)
    assert len(rows) == 2
    for row, end in zip(rows, (1, 3), strict=True):
        prompt = template.prompt_ids(messages[:end])
        assert row.token_ids[: len(prompt)] == prompt
        assert row.loss_mask == [0] * len(prompt) + [1] * 6


def test_the_end_of_turn_is_not_the_end_of_sequence_p04():
    template = ChatTemplate(chat_tokenizer())
    assert template.end_of_turn_id == IM_END
    assert template.stop_ids([EOS]) == [EOS, IM_END]


def test_all_paths_start_with_exactly_one_bos_p05():
    tokenizer = bos_chat_tokenizer()
    template = ChatTemplate(tokenizer)
    messages = chat("hi", "yo")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokenizer.encode(text)[:2] == [BOS, BOS]  # the fault that rendering to text brings
    prompt = template.prompt_ids(messages[:1])
    (row,), _ = rows_of(template, messages)
    for ids in (prompt, row.token_ids):
        assert ids[0] == BOS
        assert ids.count(BOS) == 1
    assert row.token_ids[: len(prompt)] == prompt


def test_capture_sees_the_ids_of_the_row_p05():
    tokenizer = bos_chat_tokenizer()
    target = target_of(tiny_model(layers=2, vocab=CHAT_VOCAB), tokenizer)
    (row,), _ = rows_of(ChatTemplate(tokenizer), chat("hi", "yo"))
    batch = make_features(target, [row], [0])
    assert batch.tokens_BT.tolist() == [row.token_ids]
    assert batch.loss_mask_BT.tolist() == [[bool(on) for on in row.loss_mask]]
    assert batch.tokens_BT[0].tolist().count(BOS) == 1


def hundred_token_prompt(template: ChatTemplate) -> list[dict[str, str]]:
    empty = len(template.prompt_ids(chat("")))
    messages = chat("x" * (100 - empty))
    assert len(template.prompt_ids(messages)) == 100
    return messages


@pytest.mark.parametrize(("max_length", "supervised"), [(100, 0), (110, 10), (120, 20)])
def test_truncation_keeps_what_is_left_of_the_answer_p08(max_length, supervised):
    template = ChatTemplate(chat_tokenizer())
    messages = hundred_token_prompt(template)
    audit = Audit()
    names = {"row_id": "r", "category": "c", "max_length": max_length, "audit": audit}
    rows = template.rows([*messages, {"role": "assistant", "content": "y" * 19}], **names)
    assert [row.supervised for row in rows] == ([supervised] if supervised else [])
    assert all(len(row.token_ids) == len(row.loss_mask) == max_length for row in rows)
    assert audit.dropped == ({} if supervised else {"truncated away": 1})
    assert audit.noted == ({"cut to max_length": 1} if supervised == 10 else {})
    assert [row.stop_reason == "length" for row in rows] == [supervised == 10] * len(rows)


def test_a_conversation_without_an_answer_is_dropped_with_a_reason():
    rows, audit = rows_of(ChatTemplate(chat_tokenizer()), chat("hi"))
    assert rows == []
    assert audit.dropped == {"without an assistant turn": 1}


def test_a_template_that_refuses_a_role_is_counted_not_raised():
    strict = (
        "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + CHATML
    )
    rows, audit = rows_of(ChatTemplate(chat_tokenizer(strict)), chat("a", "b", "c", "d"))
    assert rows == []
    assert audit.dropped == {"refused by the chat template (one turn only)": 1}


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("message['content'].index('probe')", "substring not found"),
        ("'{:d}'.format(message['content'])", "Unknown format code"),
        ("(message['content'] | length - 1) // 0", "by zero"),
    ],
)
def test_whatever_an_expression_of_the_template_raises_drops_the_row(expression, told):
    text = "{% if message['content'] == 'odd' %}{{ " + expression + " }}{% endif %}"
    template = ChatTemplate(chat_tokenizer(CHATML.replace("{{", text + "{{", 1)))
    rows, audit = rows_of(template, chat("odd", "b"))
    assert rows == []
    (reason,) = audit.dropped
    assert reason.startswith("refused by the chat template (")
    assert told in reason
    assert len(rows_of(template, chat("a", "b"))[0]) == 1


def test_a_tokenizer_without_a_chat_template_is_refused():
    with pytest.raises(ValueError, match="no chat template; use the instruct version"):
        ChatTemplate(chat_tokenizer(template=None))


def test_a_template_that_does_not_close_answers_is_refused():
    with pytest.raises(ValueError, match="closes an answer with no special token"):
        ChatTemplate(chat_tokenizer(CHATML.replace("<|im_end|>", "")))


def test_the_hash_follows_the_template_text_and_the_special_ids():
    one = ChatTemplate(chat_tokenizer()).hash
    assert one == ChatTemplate(chat_tokenizer()).hash
    assert one != ChatTemplate(bos_chat_tokenizer()).hash
    no_bos = chat_tokenizer()
    no_bos.bos_token = "</s>"
    assert one != ChatTemplate(no_bos).hash
    assert len(one) == 16


def test_the_hash_follows_the_order_of_the_merges_p18():
    """The same vocabulary, merged in the other order, splits "and" otherwise."""
    one = chat_tokenizer(merges=(("a", "n"), ("n", "d")))
    state = json.loads(one.backend_tokenizer.to_str())
    state["model"]["merges"].reverse()
    backend = Tokenizer.from_str(json.dumps(state))
    other = chat_tokenizer()
    other._tokenizer = backend
    assert one.get_vocab() == other.get_vocab()
    assert one.tokenize("and") != other.tokenize("and")
    assert ChatTemplate(one).hash != ChatTemplate(other).hash


def test_the_hash_follows_the_normalizer_p18():
    lower = chat_tokenizer()
    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert ChatTemplate(lower).hash != ChatTemplate(chat_tokenizer()).hash


def test_the_hash_follows_neither_use_nor_a_copy_on_disk(tmp_path):
    tokenizer = chat_tokenizer()
    before = ChatTemplate(tokenizer).hash
    tokenizer(["a", "bc"], padding=True, truncation=True, max_length=2)
    assert ChatTemplate(tokenizer).hash == before
    tokenizer.save_pretrained(tmp_path)
    assert ChatTemplate(AutoTokenizer.from_pretrained(tmp_path)).hash == before


# Tools

TOOL = {"type": "function", "function": {"name": "weather"}}
CHATML_TOOLS = "{% for t in tools or [] %}{{ (t | tojson) + '\\n' }}{% endfor %}" + CHATML


def test_tool_definitions_are_in_the_prompt_and_not_supervised():
    template = ChatTemplate(chat_tokenizer(CHATML_TOOLS))
    (plain,), _ = rows_of(template, chat("x", "y"))
    (row,), audit = rows_of(template.offering([TOOL]), chat("x", "y"))
    text = template.tokenizer.decode(row.token_ids)
    assert text == json.dumps(TOOL) + "\n" + template.tokenizer.decode(plain.token_ids)
    assert supervised_text(template, row) == "y<|im_end|>"
    prompt = template.offering([TOOL]).prompt_ids(chat("x"))
    assert row.token_ids[: len(prompt)] == prompt
    assert not audit.noted


def test_tool_definitions_that_the_template_leaves_out_are_told():
    template = ChatTemplate(chat_tokenizer()).offering([TOOL])
    (row,), audit = rows_of(template, chat("x", "y"))
    assert "weather" not in template.tokenizer.decode(row.token_ids)
    assert audit.noted == {"without tool definitions, which the template leaves out": 1}


def test_a_marker_inside_a_tool_definition_drops_the_row_p01():
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}
    template = ChatTemplate(chat_tokenizer(CHATML_TOOLS)).offering([tool])
    rows, audit = rows_of(template, chat("x", "y"))
    assert rows == []
    assert audit.dropped == {"with the special token <|im_end|> inside a tool definition": 1}


def test_a_template_of_its_own_for_tools_is_used_and_is_in_the_hash():
    named = {"default": CHATML, "tool_use": "{{ 'tools ' }}" + CHATML_TOOLS}
    template = ChatTemplate(chat_tokenizer(named))
    (row,), _ = rows_of(template.offering([TOOL]), chat("x", "y"))
    assert template.tokenizer.decode(row.token_ids).startswith("tools {")
    (plain,), _ = rows_of(template, chat("x", "y"))
    assert template.tokenizer.decode(plain.token_ids).startswith("<|im_start|>")
    assert template.hash != ChatTemplate(chat_tokenizer()).hash


def test_a_template_that_joins_arguments_to_text_is_given_text():
    joins = CHATML.replace(
        "+ message['content']",
        "+ message['content'] + (message.tool_calls[0].function.name"
        " + message.tool_calls[0].function.arguments if message.tool_calls else '')",
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [*chat("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = ChatTemplate(chat_tokenizer(joins))
    (row,), _ = rows_of(template, messages)
    assert supervised_text(template, row) == 'f{"a": 1}<|im_end|>'


# Today's date, which some templates write

LLAMA_DATE = """{%- if not date_string is defined %}
{%- if strftime_now is defined %}{%- set date_string = strftime_now( "%d %b %Y" ) %}{%- endif %}
{%- endif %}{{ date_string }}"""
MACRO_DATE = "{% macro day() %}{{ strftime_now('%Y-%m-%d') + '!' }}{% endmacro %}{{ day() }}"


@pytest.mark.parametrize(
    ("dated", "want"), [(LLAMA_DATE, "26 Jul 2024"), (MACRO_DATE, "2024-07-26!")]
)
def test_a_template_writes_one_day_whatever_today_is(dated, want):
    template = ChatTemplate(chat_tokenizer(dated + CHATML))
    (row,), _ = rows_of(template, chat("x", "y"))
    for ids in (template.prompt_ids(chat("x")), row.token_ids):
        assert template.tokenizer.decode(ids).startswith(want + "<|im_start|>user")
    assert supervised_text(template, row) == "y<|im_end|>"
    assert template.has_clock


def test_a_date_that_cannot_be_held_is_refused():
    dated = "{% set how = '%Y' %}{{ strftime_now(how) }}" + CHATML
    with pytest.raises(ValueError, match="calls strftime_now with something else than a text"):
        ChatTemplate(chat_tokenizer(dated))


def test_a_maximum_length_of_zero_is_refused():
    with pytest.raises(ValueError, match="max_length=0"):
        rows_of(ChatTemplate(chat_tokenizer()), chat("a", "b"), max_length=0)
