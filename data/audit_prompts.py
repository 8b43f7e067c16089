"""The evaluation prompts that an audit looks for in training: `audit.against=[suite.jsonl]`."""

from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from headstart.data.audit import Audit
from headstart.data.overlap import EvaluationPrompts
from headstart.data.rows import read_rows
from headstart.data.source import read_conversations
from headstart.data.template import ChatTemplate
from headstart.data.turns import PROBE, WORD, content_of


@dataclass
class AuditConfig:
    """What the audit beside the rows looks for."""

    against: list[str] = field(default_factory=list)
    """Evaluation prompts that training should not hold: JSON Lines suites, or directories of
    held-out rows."""


def new_audit(config: AuditConfig, template: ChatTemplate) -> Audit:
    """Return an audit that looks for the configured prompts.

    Raises FileNotFoundError for a missing suite, ValueError for one without a usable prompt.
    """
    prompts: dict[str, list[str]] = {}
    for source in config.against:
        given = _of_rows(source, template) if Path(source).is_dir() else _of_suite(source)
        prompts |= {f"{source}#{name}": turns for name, turns in given.items()}
    return Audit(EvaluationPrompts(prompts) if prompts else None)


def user_texts(template: ChatTemplate, prompt_ids: list[int]) -> list[str]:
    """Return the turns inside a prompt, without what the template writes around a user's.

    A turn of another role is among them where the template frames it like the user's.
    """
    frame = _segments(template, template.prompt_ids([PROBE]))
    around = next(text for text in frame if WORD in text)
    before, after = around.split(WORD, 1)
    texts = [
        text[len(before) : len(text) - len(after)].strip()
        for text in _segments(template, prompt_ids)
        if text not in frame and text.startswith(before) and text.endswith(after)
    ]
    return [text for text in texts if text]


def texts_of_row(template: ChatTemplate, token_ids: list[int]) -> list[str]:
    """Return what a tokenised row says: the text between special tokens, and each user's turn."""
    return [*_segments(template, token_ids), *user_texts(template, token_ids)]


def _of_suite(path: str) -> dict[str, list[str]]:
    conversations, _ = read_conversations(path, need_answers=False, option="audit.against")
    return {
        c.prompt_id: [content_of(m) for m in c.messages if m["role"] == "user"]
        for c in conversations
    }


def _of_rows(directory: str, template: ChatTemplate) -> dict[str, list[str]]:
    prompts = {}
    for row in read_rows(Path(directory))[0]:
        length = sum(1 for _ in takewhile(lambda on: not on, row.loss_mask))
        prompts[row.row_id] = user_texts(template, row.token_ids[:length])
    return prompts


def _segments(template: ChatTemplate, ids: list[int]) -> list[str]:
    """Return the text between special tokens."""
    segments: list[list[int]] = [[]]
    for token in ids:
        if token in template.special:
            segments.append([])
        else:
            segments[-1].append(token)
    return [template.tokenizer.decode(segment) for segment in segments if segment]
