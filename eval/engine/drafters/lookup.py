"""Prompt lookup: what followed the last n tokens when they stood in the text before.

Costs no model and is right wherever an answer quotes its prompt or repeats itself; a head must beat
it. The method of prompt lookup decoding, n-gram speculation in the serving engines.
"""

from collections.abc import Sequence

from headstart.eval.engine.drafters.text import Draft, TextDrafter

ORDERS = ("earliest", "latest")


class NgramIndex:
    """A growing text, and where each of its n-grams was followed by something.

    Reading a token costs one entry an n-gram length, however long the text is.
    """

    def __init__(self, min_n: int, max_n: int, order: str) -> None:
        self.min_n, self.max_n, self.latest = min_n, max_n, order == "latest"
        self.text: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Read the tokens that follow."""
        for token in tokens:
            here = len(self.text)
            # Entered only now that a token follows: the end of the text never finds itself.
            for n in range(self.min_n, min(self.max_n, here) + 1):
                ngram = tuple(self.text[here - n :])
                if self.latest or ngram not in self._next:
                    self._next[ngram] = here
            self.text.append(token)

    def continuation(self, count: int) -> list[int]:
        """Return up to `count` tokens that followed the longest n-gram which ends the text.

        The occurrence may overlap the end of the text, where its continuation stops.
        """
        for n in range(min(self.max_n, len(self.text)), self.min_n - 1, -1):
            place = self._next.get(tuple(self.text[-n:]))
            if place is not None:
                return self.text[place : place + count]
        return []


class LookupDrafter(TextDrafter[NgramIndex]):
    """Drafts the continuation of the longest earlier n-gram, max_n tokens down to min_n.

    order="earliest" takes its first occurrence in the text, "latest" the most recent one. The
    chain is not drawn: scheme a1.
    """

    name, scheme = "lookup", "a1"

    def __init__(self, *, tokens: int, max_n: int, min_n: int, order: str) -> None:
        assert 1 <= min_n <= max_n and order in ORDERS
        self.tokens, self.num_nodes = tokens, tokens + 1
        self.max_n, self.min_n, self.order = max_n, min_n, order

    def new_row(self) -> NgramIndex:
        """Return an index without text."""
        return NgramIndex(self.min_n, self.max_n, self.order)

    def draft(self, row: NgramIndex) -> Draft:
        """Return the continuation as a chain."""
        return Draft.chain(row.continuation(self.tokens))
