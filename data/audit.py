"""Account for the conversations that were rendered: what became rows, and what they hold.

Everything is a sum, a counter bounded by the vocabulary or the row length, or eight bytes a row,
so that a million rows fit and the audits of several workers add up.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import numpy as np

from headstart.data.conversations import Message, told_apart
from headstart.data.overlap import EvaluationPrompts, Overlap, words_of
from headstart.data.token_row import TokenRow

SAMPLES = 8


def _hashes() -> "array[int]":
    return array("Q")


@dataclass
class Audit:
    """Sums over the conversations that were rendered; every field adds over files and workers."""

    prompts: EvaluationPrompts | None = None
    """Evaluation prompts to look for in the conversations; null looks for none."""
    conversations: int = 0
    rows: int = 0
    tokens: int = 0
    supervised: int = 0
    cut_away: int = 0
    """Supervised tokens beyond the row length, in rows kept or dropped."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that are gone, by reason; a conversation that was never split is one row."""
    noted: Counter[str] = field(default_factory=Counter)
    """Rows kept but cut, and conversations that were split, by reason."""
    turns: Counter[int] = field(default_factory=Counter)
    """Conversations by their number of user turns; those that came tokenised are left out."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Rows by their number of tokens."""
    answers: Counter[int] = field(default_factory=Counter)
    """Rows by their number of supervised tokens."""
    shares: Counter[int] = field(default_factory=Counter)
    """Rows by their supervised share in whole percent."""
    stops: Counter[str] = field(default_factory=Counter)
    """Rows by their stop reason; "given" for answers that came with the data."""
    vocabulary: Counter[int] = field(default_factory=Counter)
    """Supervised tokens by id."""
    row_hashes: "array[int]" = field(default_factory=_hashes)
    prompt_hashes: "array[int]" = field(default_factory=_hashes)
    overlap: Overlap = field(default_factory=Overlap)
    samples: list[TokenRow] = field(default_factory=list)
    """A few rows, chosen by a hash of their id: the same ones in any order of writing."""
    listener: Callable[[str, str], None] | None = None
    """Called with "dropped" or "repaired" and the reason of every note."""

    def drop(self, reason: str) -> None:
        """Count a row that is gone."""
        self.dropped[told_apart(self.dropped, reason)] += 1
        self._tell("dropped", reason)

    def note(self, reason: str) -> None:
        """Count a row that was cut, or a conversation that was split or ended early."""
        self.noted[told_apart(self.noted, reason)] += 1
        self._tell("repaired", reason)

    def see(self, messages: Sequence[Message], row_id: str) -> None:
        """Count one conversation, whatever becomes of it."""
        self.conversations += 1
        users = [str(m.get("content") or "") for m in messages if m["role"] == "user"]
        self.turns[len(users)] += 1
        if users:
            self.prompt_hashes.append(_hash(" ".join(words_of(users[0])).encode()))
        if self.prompts is not None:
            said = [str(m.get("content") or "") for m in messages if m["role"] != "system"]
            self.overlap.see(self.prompts, said, row_id)

    def see_tokens(self, texts: Callable[[], Iterable[str]], row_id: str) -> None:
        """Count one row that came tokenised; `texts` decodes its turns, where they are looked at.

        It is in no count of user turns: what made it need not be the target's template.
        """
        self.conversations += 1
        if self.prompts is not None:
            self.overlap.see(self.prompts, texts(), row_id)

    def keep(self, row: TokenRow) -> None:
        """Count one row."""
        tokens, supervised = len(row.token_ids), row.supervised
        self.rows += 1
        self.tokens += tokens
        self.supervised += supervised
        self.lengths[tokens] += 1
        self.answers[supervised] += 1
        self.shares[100 * supervised // tokens] += 1
        self.stops[row.stop_reason or "given"] += 1
        self.vocabulary.update(compress(row.token_ids, row.loss_mask))
        self.row_hashes.append(_hash(array("q", row.token_ids).tobytes()))
        self._sample([row])

    def merge(self, other: "Audit") -> None:
        """Add the account of another worker."""
        self.prompts = self.prompts or other.prompts
        for name in ("conversations", "rows", "tokens", "supervised", "cut_away"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("turns", "lengths", "answers", "shares", "stops"):
            getattr(self, name).update(getattr(other, name))
        for mine, theirs in ((self.dropped, other.dropped), (self.noted, other.noted)):
            for reason, count in theirs.items():
                mine[told_apart(mine, reason)] += count
        self.vocabulary.update(other.vocabulary)
        self.row_hashes.extend(other.row_hashes)
        self.prompt_hashes.extend(other.prompt_hashes)
        self.overlap.merge(other.overlap)
        self._sample(other.samples)

    def empty(self) -> "Audit":
        """Return an audit of nothing that looks for the same prompts: what a worker starts with."""
        return Audit(self.prompts)

    @property
    def duplicate_rows(self) -> int:
        """Rows whose token ids are those of an earlier row."""
        return _repeated(self.row_hashes)

    @property
    def duplicate_prompts(self) -> int:
        """Conversations whose first user turn has the words of an earlier one's."""
        return _repeated(self.prompt_hashes)

    def coverage(self, size: int) -> float:
        """Return the share of supervised tokens that the `size` most frequent ids make up.

        This is the best that a draft vocabulary of that size can reach on these rows.
        """
        kept = sum(count for _, count in self.vocabulary.most_common(size))
        return kept / max(self.supervised, 1)

    def summary(self) -> str:
        """Return one line: rows, supervised tokens, and every reason with its count."""
        share = 100 * self.supervised / max(self.tokens, 1)
        text = f"{self.rows} rows from {self.conversations} conversations, "
        text += f"{self.supervised} of {self.tokens} tokens supervised ({share:.0f} %)"
        for title, counts in (("dropped", self.dropped), ("noted", self.noted)):
            if counts:
                reasons = (f"{count} {reason}" for reason, count in counts.most_common())
                text += f"; {title}: {', '.join(reasons)}"
        return text

    def _tell(self, what: str, reason: str) -> None:
        if self.listener is not None:
            self.listener(what, reason)

    def _sample(self, rows: Iterable[TokenRow]) -> None:
        for row in rows:
            if len(self.samples) == SAMPLES and _rank(row) >= _rank(self.samples[-1]):
                continue
            self.samples = sorted([*self.samples, row], key=_rank)[:SAMPLES]


def _rank(row: TokenRow) -> tuple[int, str]:
    return _hash(row.row_id.encode()), row.row_id


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _repeated(hashes: "array[int]") -> int:
    return len(hashes) - len(np.unique(np.frombuffer(hashes, dtype=np.uint64))) if hashes else 0
