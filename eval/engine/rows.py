"""Requests, and the rows of the batch that carry them while they are decoded.

Shapes: F features a position that the drafter reads.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headstart.eval.engine.records import Completion
from headstart.eval.engine.sampling import prompt_key


@dataclass(frozen=True)
class Request:
    """One prompt to be continued."""

    prompt_id: str
    token_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass
class Row:
    """A request in flight."""

    request: Request
    limit: int
    started: float
    completion: Completion
    key: int
    root: int = -1
    finished: bool = False
    tokens: list[int] = field(default_factory=list)
    unseen: list[tuple[int, Tensor]] = field(default_factory=list)
    """Verified pairs (token, features_F) that the drafter has not been shown yet."""

    @classmethod
    def admit(cls, request: Request, context: int, started: float) -> "Row":
        """Make the row of a request that may fill a context of so many tokens."""
        limit = min(request.max_new_tokens, context - len(request.token_ids))
        reason = "length" if limit == request.max_new_tokens else "context"
        completion = Completion(request.prompt_id, [], reason)
        return cls(request, limit, started, completion, prompt_key(request.prompt_id))

    @property
    def room(self) -> int:
        """Tokens that may still be drafted before the bonus token fills the limit."""
        return self.limit - len(self.tokens) - 1

    def emit(self, tokens: list[int], stop_ids: frozenset[int]) -> int:
        """Add tokens up to a stop token or the limit; return how many were kept.

        Raises RuntimeError where the target's logits were not finite.
        """
        if tokens[-1] < 0:
            raise RuntimeError(
                f"prompt {self.request.prompt_id}: the target's logits are not finite at token "
                f"{len(self.tokens)}"
            )
        self.root = tokens[-1]
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in stop_ids:
                self.completion.stop_reason = "stop"
                self.finished = True
                return count
        self.finished = len(self.tokens) >= self.limit
        return len(tokens)


def check_request(request: Request, context: int) -> None:
    """Raise ValueError naming a prompt that is empty, wants nothing, or leaves no room."""
    length = len(request.token_ids)
    if length == 0:
        raise ValueError(f"prompt {request.prompt_id}: no tokens; remove the row")
    if request.max_new_tokens < 1:
        raise ValueError(
            f"prompt {request.prompt_id}: max_new_tokens={request.max_new_tokens}: need at least 1"
        )
    if length >= context:
        raise ValueError(
            f"prompt {request.prompt_id}: {length} tokens leave no room in a context of {context}; "
            "shorten the prompt or raise the limit"
        )


def padded(lists: Iterable[Iterable[int]], device: torch.device) -> Tensor:
    """Right-pad lists of ids with 0; padding is masked or not committed, never read."""
    lists = [list(values) for values in lists]
    width = max(len(values) for values in lists)
    rows = [values + [0] * (width - len(values)) for values in lists]
    return torch.tensor(rows, dtype=torch.int64, device=device)
