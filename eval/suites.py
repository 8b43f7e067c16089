"""The prompts of a benchmark: generated held-out ones, and users' JSON Lines files.

A suite's hash covers the ids and texts of exactly the turns that are asked. Where several suites
are measured together, ids and categories carry the name of theirs: mt_bench/81, mt_bench/writing.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from headstart.data.conversations import Conversation, Message
from headstart.data.dialogue import Dialogue
from headstart.data.prompts import generate_prompts
from headstart.data.source import read_conversations
from headstart.data.template import LEFT_OUT_TOOLS, ChatTemplate, TemplateRefusal
from headstart.eval.engine.decode import Request
from headstart.eval.settings import EvalConfig, SuiteConfig

log = logging.getLogger(__name__)
Item = TypeVar("Item")
Usable = tuple[Conversation, list[int]]
"""A conversation cut to the turns that are asked, and the tokens of its first prompt."""


@dataclass(frozen=True)
class Suite:
    """The prompts of one benchmark, as requests to decode."""

    name: str
    hash: str
    """16 hex digits over ids and texts of the prompts."""
    requests: list[Request]
    """The first turn of every prompt."""
    categories: dict[str, str]
    """Category of every prompt id."""
    dropped: str = ""
    """One line on what was left out and why; empty when nothing was."""
    members: dict[str, str] = field(default_factory=dict)
    """Suite of every prompt id where several are measured together; else empty."""
    conversations: dict[str, Conversation] = field(default_factory=dict)
    """The text of every prompt, by its id."""
    given: frozenset[str] = frozenset()
    """Ids of the prompts that came from a file, and not from our generator."""
    template: ChatTemplate | None = None
    """Renders later turns; null where no prompt has any."""

    @property
    def lengths(self) -> dict[str, int]:
        """Tokens of every prompt, by its id; of a conversation, its first turn."""
        return {request.prompt_id: len(request.token_ids) for request in self.requests}

    @property
    def num_turns(self) -> int:
        """Turns to be answered, over all prompts."""
        return sum(
            len(self.user_texts(r.prompt_id)) if r.prompt_id in self.conversations else 1
            for r in self.requests
        )

    def part(self, ids: Iterable[str]) -> "Suite":
        """Return these prompts alone, in the order of the suite, under a hash of their own."""
        kept = set(ids)

        def of(values: Mapping[str, Item]) -> dict[str, Item]:
            return {prompt_id: value for prompt_id, value in values.items() if prompt_id in kept}

        requests = [request for request in self.requests if request.prompt_id in kept]
        return replace(
            self,
            hash=_digest([self.hash, [request.prompt_id for request in requests]]),
            requests=requests,
            categories=of(self.categories),
            members=of(self.members),
            conversations=of(self.conversations),
            given=self.given & kept,
        )

    def user_texts(self, prompt_id: str) -> list[str]:
        """Return what the user says in every turn that is asked."""
        messages = self.conversations[prompt_id].messages
        return [m["content"] for m in messages if m["role"] == "user"]

    def dialogue(self, request: Request, context: int) -> Dialogue | None:
        """Return the dialogue that asks a prompt's turns one by one; None when it has but one.

        An answer cut by the limit is answered to all the same: short limits are what a benchmark
        uses, and a second turn has its own prompt and cache to measure.
        """
        conversation = self.conversations.get(request.prompt_id)
        if conversation is None or len(self.user_texts(request.prompt_id)) < 2:
            return None
        return Dialogue(
            conversation,
            self.template,
            longest=context,
            max_new_tokens=request.max_new_tokens,
            temperature=0.0,
            after_cuts=True,
        )


def load_suite(config: EvalConfig, template: ChatTemplate) -> Suite:
    """Return the prompts of every chosen suite as one, rendered and tokenised.

    Of a file with U usable rows, prompt i of n is usable row i * U // n: evenly over the file, so
    that a file sorted by category keeps its mix. Raises FileNotFoundError, and ValueError when a
    suite has no usable prompt.
    """
    parts = [
        _load(chosen, config.option_of(number), template)
        for number, chosen in enumerate(config.chosen_suites)
    ]
    return parts[0] if len(parts) == 1 else _together(parts)


def refuse_unreadable(config: EvalConfig) -> None:
    """Raise for a file of prompts that cannot be read: asked before the target is loaded."""
    for number, suite in enumerate(config.chosen_suites):
        if suite.path is not None:
            option = config.option_of(number)
            read_conversations(suite.path, need_answers=False, option=option)


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


def _load(chosen: SuiteConfig, option: str, template: ChatTemplate) -> Suite:
    name, notes = chosen.label, []
    if chosen.path is None:
        prompts = generate_prompts(chosen.num_prompts, seed=chosen.seed, split="heldout")
        rows = [Conversation(p.prompt_id, p.family, p.messages) for p in prompts]
    else:
        rows, account = read_conversations(chosen.path, need_answers=False, option=option)
        notes = [account.summary()] if account.dropped or account.repaired else []
        offering = [row.tools for row in rows if row.tools]
        if any(template.offering(tools).drops_tools for tools in offering):
            notes.append(f"{len(offering)} prompts {LEFT_OUT_TOOLS}")
    usable, refused = _render(rows, chosen.max_turns, template)
    if not usable:
        raise ValueError(f"suite {name}: no usable prompt, {_refusals(refused)}; replace the rows")
    kept = evenly(usable, chosen.num_prompts)
    notes += _left_out(rows, refused, kept, chosen)
    conversations = {c.prompt_id: c for c, _ in kept}
    suite = Suite(
        name,
        _hash(conversations.values()),
        [Request(c.prompt_id, tuple(ids), chosen.max_new_tokens) for c, ids in kept],
        {prompt_id: c.category for prompt_id, c in conversations.items()},
        "; ".join(notes),
        conversations=conversations,
        given=frozenset() if chosen.path is None else frozenset(conversations),
        template=template,
    )
    log.info("suite %s: %d prompts, evenly of %d usable", name, len(kept), len(usable))
    if suite.dropped:
        log.warning("suite %s: %s", name, suite.dropped)
    return suite


def _together(parts: Sequence[Suite]) -> Suite:
    """Join suites into one, their names before ids and categories."""
    named = [_prefixed(part) for part in parts]
    return Suite(
        "+".join(part.name for part in parts),
        _hash(c for part in named for c in part.conversations.values()),
        [request for part in named for request in part.requests],
        {i: category for part in named for i, category in part.categories.items()},
        "; ".join(f"{part.name}: {part.dropped}" for part in parts if part.dropped),
        members={i: part.name for part in named for i in part.categories},
        conversations={i: c for part in named for i, c in part.conversations.items()},
        given=frozenset().union(*(part.given for part in named)),
        template=parts[0].template,
    )


def _prefixed(part: Suite) -> Suite:
    def name(text: str) -> str:
        return f"{part.name}/{text}"

    return replace(
        part,
        requests=[replace(r, prompt_id=name(r.prompt_id)) for r in part.requests],
        categories={name(i): name(category) for i, category in part.categories.items()},
        conversations={
            name(i): replace(c, prompt_id=name(i)) for i, c in part.conversations.items()
        },
        given=frozenset(map(name, part.given)),
    )


def _render(
    rows: Iterable[Conversation], max_turns: int | None, template: ChatTemplate
) -> tuple[list[Usable], Counter[str]]:
    """Tokenise each row's opening; count the rows that the template refuses, by reason."""
    usable: list[Usable] = []
    refused: Counter[str] = Counter()
    for row in rows:
        try:
            ids = template.offering(row.tools).prompt_ids(_up_to(row.messages, 1))
        except TemplateRefusal as refusal:
            refused[str(refusal)] += 1
            continue
        usable.append((replace(row, messages=_up_to(row.messages, max_turns)), ids))
    return usable, refused


def _up_to(messages: tuple[Message, ...], turns: int | None) -> tuple[Message, ...]:
    """Return the messages up to and with so many user turns; all of them when null."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return messages[: users[:turns][-1] + 1]


def evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return `count` of the items at equal distances, the first among them; all where fewer."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def _left_out(
    rows: list[Conversation], refused: Counter[str], kept: list[Usable], chosen: SuiteConfig
) -> list[str]:
    notes = [_refusals(refused)] if refused else []
    if len(kept) < chosen.num_prompts:
        notes.append(f"num_prompts={chosen.num_prompts} but only {len(kept)} prompts are usable")
    whole = {row.prompt_id: len(_up_to(row.messages, None)) for row in rows}
    shorter = sum(len(c.messages) < whole[c.prompt_id] for c, _ in kept)
    if shorter:
        notes.append(
            f"later turns of {shorter} prompts are left out (max_turns={chosen.max_turns})"
        )
    return notes


def _refusals(refused: Counter[str]) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return f"dropped {refused.total()} rows: {reasons}"


def _hash(conversations: Iterable[Conversation]) -> str:
    listed = list(conversations)
    said = [[c.prompt_id, c.messages] for c in listed]
    offered = [[c.prompt_id, c.tools] for c in listed if c.tools]
    return _digest(said + offered)


def _digest(values: list[object]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
