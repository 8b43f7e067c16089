"""A separate draft model: a smaller causal LM of the same tokens (arXiv 2211.17192, 2302.01318).

It keeps a KV cache of its own. After a round the cache is rolled back to what was accepted of the
draft, which costs a number; a token that was accepted but never read, the last of a draft accepted
whole, is read with the next root. Shapes: B rows, R rows of a pass, U tokens read, N tree nodes,
V target vocabulary, D width of the draft model.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.eval.engine.drafters.base import FULL, DraftLimit
from headstart.eval.engine.drafters.head import best_log_prob, require_finite
from headstart.eval.engine.sampling import (
    DRAFT,
    SamplingConfig,
    best_ids,
    draw,
    processed_probs,
    uniforms,
)
from headstart.eval.engine.tree import DraftTree, TreeShape
from headstart.heads.target import Target, TargetOutput

CHUNK = 512  # tokens a pass of a prompt, as the target reads it


class ModelDrafter:
    """Drafts a chain of `tokens` from a draft model.

    At temperature > 0 each token is drawn from q, the model's law processed as the target's own is
    (scheme a); greedy drafts are its argmax (scheme a1). Raises ValueError for a model of other
    tokens than the target's, and for one whose state cannot be rolled back.
    """

    name, taps = "model", ()

    def __init__(
        self, model: Target, target: Target, *, tokens: int, sampling: SamplingConfig
    ) -> None:
        check_same_tokens(model, target)
        model.check_decodes()
        self.model, self.sampling, self.tokens = model, sampling, tokens
        self.vocab_size, self.device = target.shape.vocab_size, target.device
        self.scheme = "a" if sampling.temperature > 0 else "a1"
        self.num_nodes, self.max_depth, self.draft_calls = tokens + 1, tokens, tokens
        chain = TreeShape.chain(tokens).to(self.device)
        self._shapes = [chain.cut(depth) for depth in range(tokens)] + [chain]

    def start(self, batch: int, max_len: int) -> None:
        """Make room for `batch` rows and the drafts beyond their ends."""
        self._cache = None  # the new one may then lie where the old one lay
        self._cache = self.model.new_cache(batch, max_len + self.num_nodes, self.num_nodes)
        self._unread: list[list[int]] = [[] for _ in range(batch)]
        self._reading_prompt = [True] * batch
        # Tokens read for the draft being verified; on the device until the round has synchronised.
        self._drafted: list[Tensor | None] = [None] * batch

    def begin(self, row: int, first_token: int) -> None:
        """Start a row over."""
        self._cache.reset(row)
        self._unread[row], self._reading_prompt[row] = [first_token], True
        self._drafted[row] = None

    def observe(
        self,
        tokens_RM: Tensor,
        hidden_RMD: Tensor,
        counts: Sequence[int],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Keep the cache rows of drafted tokens that were right; read a prompt, but for its end."""
        places = list(range(len(counts)) if rows is None else rows)
        for row, tokens, count in zip(places, tokens_RM.tolist(), counts, strict=True):
            drafted, self._drafted[row] = self._drafted[row], None
            # One token at least is left to be read: the next draft starts from its logits.
            kept = 0 if drafted is None else _common(drafted.tolist(), tokens[: count - 1])
            self._cache.advance([kept], rows=[row])
            self._unread[row] += tokens[kept:count]
        self._catch_up([row for row in places if self._reading_prompt[row]], leave=1)

    def propose(self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor) -> DraftTree:
        """Read what is new, then draw token after token; past the model's own context, nothing."""
        return self.propose_within(root_B, positions_B, keys_B, FULL)

    def propose_within(
        self, root_B: Tensor, positions_B: Tensor, keys_B: Tensor, limit: DraftLimit
    ) -> DraftTree:
        """Draw as many tokens as the limit allows; rows end apart by survival, all by depth."""
        deepest = self.max_depth if limit.depth is None else min(limit.depth, self.max_depth)
        if deepest == 0:
            return self._shapes[0].fill(root_B[:, None])
        B, least = len(root_B), math.log(limit.survival) if limit.survival > 0 else -math.inf
        self._catch_up(range(B), leave=2)
        logits_BV = self._read_unread(B)
        committed = self._cache.lengths[:B]
        tokens, sent, laws = [root_B], [root_B], []
        survival_B = root_B.new_zeros(B, dtype=torch.float32)
        for depth in range(1, deepest + 1):
            if depth > 1:
                logits_BV = self._pass(tokens[-1][:, None])[:, -1]
                self._cache.advance([1] * B)
            require_finite(logits_BV, "the draft model's")
            if limit.survival > 0:
                survival_B += best_log_prob(logits_BV)
                if bool((survival_B < least).all()):
                    break
            token_B, law_BV = self._choose(logits_BV, positions_B + depth, keys_B)
            tokens.append(token_B)
            sent.append(token_B.masked_fill(survival_B < least, -1))
            laws.append(law_BV)
        read = self._cache.lengths[0] - committed[0]
        self._cache.lengths[:B] = committed  # drafted rows wait beyond it to be kept
        self._reading_prompt[:B] = [False] * B
        # A row that has ended reads its own next tokens on beside the others, and sends none.
        self._drafted[:B] = torch.stack(tokens, dim=1)[:, 1 : read + 1].unbind(0)
        sent_BN = self._within_context(torch.stack(sent, dim=1), positions_B)
        return self._shapes[len(laws)].fill(sent_BN, self._laws(root_B, laws))

    def _choose(
        self, logits_BV: Tensor, positions_B: Tensor, keys_B: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tokens for these positions and the law they were drawn from."""
        if self.sampling.temperature == 0:
            return best_ids(logits_BV), None
        law_BV = processed_probs(logits_BV, self.sampling)
        uniform_B = uniforms(self.sampling.seed, keys_B, positions_B, DRAFT)
        return draw(law_BV, uniform_B), law_BV

    def _laws(self, root_B: Tensor, laws: list[Tensor | None]) -> Tensor | None:
        """Return row n: the law of the child of node n; the last node has none."""
        if self.sampling.temperature == 0:
            return None
        none_BV = torch.zeros(len(root_B), self.vocab_size, device=self.device)
        return torch.stack([*laws, none_BV], dim=1)

    def _within_context(self, tokens_BN: Tensor, positions_B: Tensor) -> Tensor:
        """Mark tokens absent that the model drafted at positions which it does not know."""
        before_N = torch.arange(-1, tokens_BN.shape[1] - 1, device=self.device)
        read_BN = positions_B[:, None] + before_N
        beyond_BN = read_BN >= self.model.shape.max_positions
        beyond_BN[:, 0] = False  # the root is the target's
        return tokens_BN.masked_fill(beyond_BN, -1)

    def _catch_up(self, rows: Sequence[int], *, leave: int) -> None:
        """Read until no row has more than `leave` unread tokens; passes hold no padding."""
        while behind := [row for row in rows if len(self._unread[row]) > leave]:
            count = min(CHUNK, *(len(self._unread[row]) - 1 for row in behind))
            parts = [self._unread[row][:count] for row in behind]
            self._read(torch.tensor(parts, device=self.device), behind)
            self._cache.advance([count] * len(behind), rows=behind)
            for row in behind:
                del self._unread[row][:count]

    def _read_unread(self, B: int) -> Tensor:
        """Read the one or two unread tokens of each row; return the logits after the last."""
        counts = [len(unread) for unread in self._unread[:B]]
        width = max(counts)
        padded = [[*unread, *[0] * (width - len(unread))] for unread in self._unread[:B]]
        logits_BUV = self._pass(torch.tensor(padded, device=self.device))
        self._cache.advance(counts)
        self._unread[:B] = [[] for _ in range(B)]
        last_B = torch.tensor(counts, device=self.device) - 1
        return logits_BUV[torch.arange(B, device=self.device), last_B]

    def _pass(self, tokens_BU: Tensor) -> Tensor:
        """Run tokens after the first B rows' texts; return logits over the target's vocabulary.

        A pass that names no rows may run compiled, as the target's rounds do.
        """
        logits_BUV = self.model.readout(self._read(tokens_BU).hidden_BTD)
        # Rows of a read-out beyond the tokens are padding, and models pad to different sizes.
        missing = self.vocab_size - logits_BUV.shape[-1]
        return torch.nn.functional.pad(logits_BUV, (0, missing), value=-torch.inf)

    def _read(self, tokens_RU: Tensor, rows: Sequence[int] | None = None) -> TargetOutput:
        """Run tokens after the rows' texts."""
        R, U = tokens_RU.shape
        depth_RU = torch.arange(U, device=self.device).expand(R, U)
        causal_UU = torch.ones(U, U, dtype=torch.bool, device=self.device).tril()
        return self.model.pass_over(
            tokens_RU, depth_RU, causal_UU.expand(R, U, U), self._cache, rows=rows
        )

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row over another."""
        self._cache.move_row(source, destination)
        for kept in (self._unread, self._drafted, self._reading_prompt):
            kept[destination] = kept[source]

    def finish(self, row: int, token_ids: Sequence[int]) -> None:
        """Learn nothing from a whole answer."""

    def clear(self) -> None:
        """Hold nothing of earlier answers."""


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens two lists have in common at their start."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def check_same_tokens(model: Target, target: Target) -> None:
    """Raise ValueError naming the first token that the two models do not share an id for."""
    difference = _difference(model, target)
    if difference:
        raise ValueError(
            f"draft model {model.name} (fingerprint {model.fingerprint}) has other tokens than "
            f"{target.name} ({target.fingerprint}): {difference}; choose a draft model with the "
            "target's own tokenizer"
        )


def _difference(model: Target, target: Target) -> str:
    if model.tokenizer is None or target.tokenizer is None:
        sizes = model.shape.vocab_size, target.shape.vocab_size
        return "" if sizes[0] == sizes[1] else f"{sizes[0]} against {sizes[1]} ids"
    theirs, ours = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
    if theirs == ours:
        return ""
    unequal = (t for t in theirs.keys() | ours.keys() if theirs.get(t) != ours.get(t))
    token = min(unequal, key=lambda t: (ours.get(t, theirs.get(t)), t))
    ids = [str(vocab.get(token, "missing")) for vocab in (theirs, ours)]
    return f"{len(theirs)} against {len(ours)} tokens, and {token!r} is {ids[0]} against {ids[1]}"
