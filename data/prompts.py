"""Generate distinct prompts in seven families, so that a run needs no data of the user's own.

A prompt is a template of its family with every slot filled from the tables of `prompt_words`.
Passages are built sentence by sentence from facts, and the questions asked about a passage are
those that its own sentences answer. Which split a prompt belongs to is decided by a hash of its
text: train and held-out prompts never coincide, whatever the seeds.
"""

import hashlib
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headstart.data.conversations import Message
from headstart.data.prompt_words import DRAFTS, PASSAGES, TEMPLATES, WORDS

HELD_OUT_ONE_IN = 8
"""One text in so many, by its hash, is held out."""
MAX_MISSES = 5000
"""Draws in a row without a new prompt after which a family counts as exhausted."""

# A template may begin with its numbers, "a=3-9 b=10-90/10 ": name, range, step.
_NUMBERS = re.compile(r"(?:\w=\d+-\d+(?:/\d+)? )*")
_NUMBER = re.compile(r"(\w)=(\d+)-(\d+)(?:/(\d+))?")
_SLOT = re.compile(r"\{([^{}]+)\}")
# Before what sounds like a vowel "a" becomes "an": honest, hour, 8, 11, 18, but not one or user.
_ARTICLE = re.compile(r"\b([Aa]) (?=(?!one|uni|us)[aeiouAEIOU]|hon|hour|8|1[18]\b)")
_DIGITS = "0123456789"


@dataclass(frozen=True)
class Prompt:
    """One generated prompt: a single user turn."""

    prompt_id: str
    """Such as "train-0-writing-00012": split, seed, family, number within the family."""
    family: str
    messages: tuple[Message, ...]


def generate_prompts(
    count: int, *, seed: int, split: str = "train", families: Sequence[str] | None = None
) -> list[Prompt]:
    """Return `count` prompts with distinct texts, the families (all of them by default) in turn.

    The same arguments give the same prompts, and a smaller count the first of them. Raises
    ValueError for an unknown split or family, and when a family has no more distinct prompts.
    """
    families = FAMILIES if families is None else tuple(families)
    if count < 1:
        raise ValueError(f"count={count}: need at least one prompt")
    if split not in ("train", "heldout"):
        raise ValueError(f"split={split!r}: expected train or heldout")
    unknown = sorted(set(families) - set(MAKERS))
    if unknown or not families:
        raise ValueError(f"families={list(families)}: expected some of {', '.join(FAMILIES)}")
    streams = {name: _distinct_texts(name, seed=seed, split=split) for name in families}
    prompts = []
    for position in range(count):
        number, which = divmod(position, len(families))
        family = families[which]
        text = next(streams[family], None)
        if text is None:
            raise ValueError(
                f"count={count}: the family {family} gives only {number} distinct {split} "
                "prompts; ask for fewer or for more families"
            )
        prompt_id = f"{split}-{seed}-{family}-{number:05d}"
        prompts.append(Prompt(prompt_id, family, ({"role": "user", "content": text},)))
    return prompts


def split_of(text: str) -> str:
    """Return the split that a prompt text belongs to: "train" or "heldout"."""
    digest = hashlib.sha256(text.encode()).digest()
    return "train" if int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN else "heldout"


def _distinct_texts(family: str, *, seed: int, split: str) -> Iterator[str]:
    rng = random.Random(f"{seed}/{split}/{family}")
    seen: set[str] = set()
    misses = 0
    while misses < MAX_MISSES:
        text = _ARTICLE.sub(r"\1n ", MAKERS[family](rng))
        misses += 1
        if text not in seen and split_of(text) == split:
            seen.add(text)
            misses = 0
            yield text


def _from_template(family: str) -> Callable[[random.Random], str]:
    return lambda rng: _fill(rng.choice(TEMPLATES[family]), rng, {})


def _about_passage(rng: random.Random, family: str, *, sentences: tuple[int, int]) -> str:
    passage, questions = _passage(rng, rng.randint(*sentences))
    values = {"passage": passage, "question": rng.choice(questions)}
    return _fill(rng.choice(TEMPLATES[family]), rng, values)


def _summarization(rng: random.Random) -> str:
    return _about_passage(rng, "summarization", sentences=(6, 8))


def _extraction(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return _about_passage(rng, "extraction", sentences=(5, 8))
    # As retrieval gives it: several short passages, one of which answers the question.
    found = [_passage(rng, 3) for _ in range(2)]
    values = {"question": rng.choice(rng.choice(found)[1])}
    values |= {f"source{i}": passage for i, (passage, _) in enumerate(found, start=1)}
    return _fill(rng.choice(TEMPLATES["retrieval"]), rng, values)


def _rewriting(rng: random.Random) -> str:
    kind = rng.choice(sorted(DRAFTS))
    draft = _fill(rng.choice(DRAFTS[kind]), rng, {})
    return _fill(rng.choice(TEMPLATES["rewriting"]), rng, {"kind": kind, "draft": draft})


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "writing": _from_template("writing"),
    "qa": _from_template("qa"),
    "arithmetic": _from_template("arithmetic"),
    "code": _from_template("code"),
    "summarization": _summarization,
    "extraction": _extraction,
    "rewriting": _rewriting,
}
FAMILIES = tuple(MAKERS)


def _passage(rng: random.Random, sentences: int) -> tuple[str, list[str]]:
    """Return a passage of that many sentences and the questions that it answers."""
    beats = rng.choice(PASSAGES)
    # The first beat introduces the subject; the others may be left out, in their order.
    chosen = [0, *sorted(rng.sample(range(1, len(beats)), sentences - 1))]
    values: dict[str, str] = {}
    text = " ".join(_fill(rng.choice(beats[i][1:]), rng, values) for i in chosen)
    return text, [_fill(beats[i][0], rng, values) for i in chosen]


def _fill(template: str, rng: random.Random, values: dict[str, str]) -> str:
    """Return the template with its slots filled; `values` remembers what each name stands for.

    {name} draws from the table of that name, {name2} a second entry of it, {Name} capitalised;
    {a} is a declared number, {a*b} a product of such, {3-7} a number drawn on the spot.
    """
    head = _NUMBERS.match(template)[0]
    for name, low, high, step in _NUMBER.findall(head):
        if name not in values:
            values[name] = str(rng.randrange(int(low), int(high) + 1, int(step or 1)))
    return _SLOT.sub(lambda match: _slot(match[1], rng, values), template[len(head) :])


def _slot(slot: str, rng: random.Random, values: dict[str, str]) -> str:
    if "*" in slot:
        return str(math.prod(int(values[name]) for name in slot.split("*")))
    if slot[0].isdigit():
        low, high = slot.split("-")
        return str(rng.randint(int(low), int(high)))
    name = slot[0].lower() + slot[1:]
    if name not in values:
        table = name.rstrip(_DIGITS)
        taken = {value for key, value in values.items() if key.rstrip(_DIGITS) == table}
        free = [entry for entry in WORDS[table] if entry not in taken]
        values[name] = _fill(rng.choice(free), rng, values)
    value = values[name]
    return value[0].upper() + value[1:] if slot[0].isupper() else value
