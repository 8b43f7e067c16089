"""Rows as they are shown: supervised text coloured, and nothing that steers the terminal."""

import io

from fixtures_chat import chat_tokenizer
from rich.console import Console

from headstart.data.show import SUPERVISED, row_text, segments, show_rows
from headstart.data.template import Audit, ChatTemplate
from headstart.data.token_row import TokenRow

TOKENIZER = chat_tokenizer()


def row_of(question: str, answer: str) -> TokenRow:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    names = {"row_id": "r", "category": "c", "max_length": 1000, "audit": Audit()}
    (row,) = ChatTemplate(TOKENIZER).rows(messages, **names)
    return row


def printed(row: TokenRow, **how: object) -> str:
    file = io.StringIO()
    show_rows([row], TOKENIZER, Console(file=file, width=200, **how))
    return file.getvalue()


def test_the_coloured_text_is_the_supervised_text():
    text = row_text(row_of("hi", "caf\u00e9"), TOKENIZER)
    coloured = [text.plain[s.start : s.end] for s in text.spans if s.style == SUPERVISED]
    assert coloured == ["caf\u00e9<|im_end|>"]
    assert text.plain == TOKENIZER.decode(row_of("hi", "caf\u00e9").token_ids)


def test_runs_join_up_to_the_whole_row():
    row = row_of("hi", "there")
    assert segments(row, TOKENIZER) == [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("there<|im_end|>", True),
    ]


def test_without_colours_supervised_text_stands_in_brackets():
    assert "assistant\n[[there<|im_end|>]]" in printed(row_of("hi", "there"))


def test_with_colours_there_are_no_brackets():
    shown = printed(row_of("hi", "there"), force_terminal=True, color_system="standard")
    assert "[[" not in shown
    assert "\x1b[" in shown


def test_markup_and_escape_codes_inside_a_row_are_text():
    shown = printed(row_of("[bold]x[/bold]", "\x1b[2J\x07y"))
    assert "[bold]x[/bold]" in shown
    assert "[[\\x1b[2J\\x07y<|im_end|>]]" in shown
    assert "\x1b" not in shown
