"""Find evaluation prompts inside training text, by n-grams of words.

A prompt is known by all runs of 13 words in it; one of fewer words by the whole of it, and one of
fewer than 5 words only where it is a whole turn, since short runs are everywhere. Words are letters
and digits in lower case; a character of a script without spaces is a word of its own. The size 13
follows the contamination study of GPT-3 (arXiv 2005.14165, appendix C).
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

NGRAM = 13
FEWEST = 5
MOSTLY = 0.8
EXAMPLES = 5
# Thai, kana, Chinese characters and Hangul: one character is one word.
_UNSPACED = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")
Gram = tuple[str, ...]


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case, or the text itself where it holds none."""
    return _WORD.findall(text.lower()) or [text.strip()]


class EvaluationPrompts:
    """An index of prompts that training text is held against; immutable, made once."""

    def __init__(self, prompts: Mapping[str, Iterable[str]]) -> None:
        """Take the user turns of every prompt, by the prompt's name."""
        self.names = list(prompts)
        self.grams: dict[Gram, int] = {}
        """The number of every n-gram."""
        self.of_prompt: list[set[int]] = [set() for _ in self.names]
        self.whole: dict[Gram, int] = {}
        self._starts: defaultdict[Gram, set[int]] = defaultdict(set)
        for owner, turns in zip(self.of_prompt, prompts.values(), strict=True):
            for turn in turns:
                owner |= self._known(words_of(turn))

    def found_in(self, turns: Iterable[str]) -> set[int]:
        """Return the numbers of the n-grams that some turn holds."""
        found: set[int] = set()
        for turn in turns:
            words = words_of(turn)
            if tuple(words) in self.whole:
                found.add(self.whole[tuple(words)])
            starts = list(zip(*(words[i:] for i in range(FEWEST)), strict=False))
            if self._starts.keys().isdisjoint(starts):
                continue
            for place, start in enumerate(starts):
                for size in self._starts.get(start, ()):
                    number = self.grams.get(tuple(words[place : place + size]))
                    found |= set() if number is None else {number}
        return found

    def _known(self, words: list[str]) -> set[int]:
        size = min(NGRAM, len(words))
        if size < FEWEST:
            return {self.whole.setdefault(tuple(words), len(self.whole) + len(self.grams))}
        numbers = set()
        for place in range(len(words) - size + 1):
            gram = tuple(words[place : place + size])
            numbers.add(self.grams.setdefault(gram, len(self.whole) + len(self.grams)))
            self._starts[gram[:FEWEST]].add(size)
        return numbers


@dataclass
class Overlap:
    """What of the evaluation prompts was found in training; adds over workers."""

    found: set[int] = field(default_factory=set)
    """Numbers of the n-grams that were found."""
    conversations: int = 0
    """Training conversations that hold an n-gram of a prompt."""
    examples: list[str] = field(default_factory=list)
    """Ids of the first such conversations."""

    def see(self, prompts: EvaluationPrompts, turns: Iterable[str], row_id: str) -> None:
        """Hold one training conversation against the prompts."""
        found = prompts.found_in(turns)
        if found:
            self.found |= found
            self.conversations += 1
            self.examples = sorted([*self.examples, row_id])[:EXAMPLES]

    def merge(self, other: "Overlap") -> None:
        """Add what another worker found."""
        self.found |= other.found
        self.conversations += other.conversations
        self.examples = sorted([*self.examples, *other.examples])[:EXAMPLES]

    def prompts(self, index: EvaluationPrompts) -> tuple[list[str], list[str]]:
        """Return the names of the prompts with an n-gram found, and with four fifths of them."""
        shares = {
            name: len(grams & self.found) / max(len(grams), 1)
            for name, grams in zip(index.names, index.of_prompt, strict=True)
        }
        some = [name for name, share in shares.items() if share > 0]
        return some, [name for name in some if shares[name] >= MOSTLY]
