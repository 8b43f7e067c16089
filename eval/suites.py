"""The prompts of a benchmark: generated held-out ones, or a user's JSON Lines file.

A suite's hash covers the ids and texts of exactly the prompts that are decoded.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.data.conversations import Message
from headstart.data.prompts import generate_prompts
from headstart.data.source import read_conversations
from headstart.data.template import LEFT_OUT_TOOLS, ChatTemplate, TemplateRefusal
from headstart.eval.engine.decode import Request
from headstart.eval.settings import EvalConfig

log = logging.getLogger(__name__)
Row = tuple[str, str, tuple[Message, ...]]
"""Prompt id, category, messages."""
Tools = dict[str, tuple[dict[str, Any], ...]]
"""Definitions of the tools that a prompt offers, by its id; prompts without are not in it."""


@dataclass(frozen=True)
class Suite:
    """The prompts of one benchmark, as requests to decode."""

    name: str
    hash: str
    """16 hex digits over ids and texts of the prompts."""
    requests: list[Request]
    categories: dict[str, str]
    """Category of every prompt id."""
    dropped: str = ""
    """One line on what was left out and why; empty when nothing was."""

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of every prompt, by its id."""
        return {request.prompt_id: len(request.token_ids) for request in self.requests}


def load_suite(config: EvalConfig, template: ChatTemplate) -> Suite:
    """Return the suite of a config, its prompts rendered and tokenised.

    Of a file with U usable rows, prompt i of n is usable row i * U // n: evenly over the file, so
    that a file sorted by category keeps its mix. Only the first user turn is answered. Raises
    FileNotFoundError, and ValueError when no prompt is usable.
    """
    if config.suite is None:
        name, notes = "generated-heldout", []
        prompts = generate_prompts(config.num_prompts, seed=config.seed, split="heldout")
        rows, tools = [(p.prompt_id, p.family, p.messages) for p in prompts], {}
    else:
        name = Path(config.suite).stem
        conversations, account = read_conversations(
            config.suite, need_answers=False, option="eval.suite"
        )
        notes = [account.summary()] if account.dropped or account.repaired else []
        rows = [(c.prompt_id, c.category, c.messages) for c in conversations]
        tools = {c.prompt_id: c.tools for c in conversations if c.tools}
        if any(template.offering(offered).drops_tools for offered in tools.values()):
            notes.append(f"{len(tools)} prompts {LEFT_OUT_TOOLS}")
    usable, refused = _render(rows, template, tools)
    if not usable:
        raise ValueError(f"suite {name}: no usable prompt, {_refusals(refused)}; replace the rows")
    chosen = _evenly(usable, config.num_prompts)
    notes += _left_out(rows, refused, [row for row, _ in chosen], config.num_prompts)
    suite = Suite(
        name,
        _hash([row for row, _ in chosen], tools),
        [Request(row[0], tuple(ids), config.max_new_tokens) for row, ids in chosen],
        {row[0]: row[1] for row, _ in chosen},
        "; ".join(notes),
    )
    log.info("suite %s: %d prompts, evenly of %d usable", name, len(chosen), len(usable))
    if suite.dropped:
        log.warning("suite %s: %s", name, suite.dropped)
    return suite


def check_lengths(suite: Suite, context: int) -> None:
    """Raise ValueError naming the first prompt that fills a context of that many tokens.

    Called before anything is decoded, so that a long row does not end a run half-way.
    """
    for request in suite.requests:
        if len(request.token_ids) >= context:
            raise ValueError(
                f"suite {suite.name}, prompt {request.prompt_id}: {len(request.token_ids)} tokens "
                f"leave no room in the target's context of {context}; shorten or remove the row"
            )


def _render(
    rows: Iterable[Row], template: ChatTemplate, tools: Tools
) -> tuple[list[tuple[Row, list[int]]], Counter[str]]:
    """Tokenise each row's opening; count the rows that the template refuses, by reason."""
    usable: list[tuple[Row, list[int]]] = []
    refused: Counter[str] = Counter()
    for prompt_id, category, messages in rows:
        opening = _opening(messages)
        try:
            offering = template.offering(tools.get(prompt_id, ()))
            usable.append(((prompt_id, category, opening), offering.prompt_ids(opening)))
        except TemplateRefusal as refusal:
            refused[str(refusal)] += 1
    return usable, refused


def _opening(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return the messages up to and with the first user turn."""
    first = next(i for i, message in enumerate(messages) if message["role"] == "user")
    return messages[: first + 1]


def _evenly(usable: list[tuple[Row, list[int]]], count: int) -> list[tuple[Row, list[int]]]:
    count = min(count, len(usable))
    return [usable[i * len(usable) // count] for i in range(count)]


def _left_out(rows: list[Row], refused: Counter[str], chosen: list[Row], asked: int) -> list[str]:
    notes = [_refusals(refused)] if refused else []
    if len(chosen) < asked:
        notes.append(f"eval.num_prompts={asked} but only {len(chosen)} prompts are usable")
    names = {prompt_id for prompt_id, _, _ in chosen}
    longer = sum(i in names and len(_opening(m)) < len(m) for i, _, m in rows)
    if longer:
        notes.append(f"later turns of {longer} prompts are left out: only the first is answered")
    return notes


def _refusals(refused: Counter[str]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return f"dropped {refused.total()} rows: {reasons}"


def _hash(rows: Sequence[Row], tools: Tools) -> str:
    said = [[prompt_id, messages] for prompt_id, _, messages in rows]
    offered = [[prompt_id, tools[prompt_id]] for prompt_id, _, _ in rows if prompt_id in tools]
    text = json.dumps(said + offered)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
