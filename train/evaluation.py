"""What is measured along the way, on the head as it will be served: held-out loss and tau."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from headstart.data.features import OnlineFeatures
from headstart.data.template import ChatTemplate, TokenRow
from headstart.eval.arms import head_drafter
from headstart.eval.bench import quick_tau
from headstart.eval.engine.decode import Request
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.settings import TreeConfig
from headstart.heads.base import DraftHead, build_head
from headstart.heads.target import Target
from headstart.train.config import TrainConfig
from headstart.train.heldout import heldout_figures
from headstart.train.parallel import Parallel

log = logging.getLogger(__name__)


def head_with(weights: dict[str, Tensor], like: DraftHead) -> DraftHead:
    """Return a head of its own with these weights: what is saved and measured."""
    with torch.random.fork_rng(devices=[]):  # its first weights must not move the run's chances
        head = build_head(like.config, like.shape, like.vocab)
    head.load_state_dict(weights)
    return head


class Evaluation:
    """Held-out loss and the real verifier's tau, on the head as it will be served."""

    def __init__(
        self,
        target: Target,
        settings: TrainConfig,
        tree: TreeConfig,
        heldout: Sequence[TokenRow],
        parallel: Parallel,
        head: DraftHead,
    ) -> None:
        self.target, self.parallel, self.head = target, parallel, head
        self.batch_rows, self.tree = settings.batch_rows, tree
        self.stop_ids = ChatTemplate(target.tokenizer).stop_ids(target.stop_ids)
        self.figures: dict[str, float] = {}  # of the last evaluation
        spread = _spread(heldout, settings.eval_rows)
        self.source = OnlineFeatures(target, spread, head.aux_features) if heldout else None
        self.requests = [
            _prompt_of(row, settings.eval_new_tokens)
            for row in _spread(heldout, settings.eval_prompts)
        ]
        if not heldout and (settings.eval_every or settings.eval_prompts):
            log.info("no heldout_rows: no held-out loss and no tau along the way")

    def __call__(self, weights: dict[str, Tensor]) -> dict[str, float]:
        self.figures = figures = {}
        if self.source is not None:
            head = head_with(weights, self.head).to(self.parallel.device)
            figures |= heldout_figures(head, self.source, self.batch_rows, self.parallel)
        if self.requests:
            figures["heldout/tau_with_bonus_micro"] = self._tau(weights)
        return figures

    def _tau(self, weights: dict[str, Tensor]) -> float:
        served = head_with(weights, self.head)
        self.target.adopt(served)
        greedy = SamplingConfig()
        drafter = head_drafter(served, self.target.parts, self.tree, greedy)
        return quick_tau(
            self.target,
            drafter,
            self.requests,
            sampling=greedy,
            stop_ids=self.stop_ids,
        )


def _spread(rows: Sequence[TokenRow], count: int) -> Sequence[TokenRow]:
    """Take `count` rows evenly over all of them: they are sorted by id, so by family."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def _prompt_of(row: TokenRow, max_new_tokens: int) -> Request:
    first = row.loss_mask.index(1)
    return Request(row.row_id, tuple(row.token_ids[:first]), max_new_tokens)
