"""What a run starts from: rows that fit the target, a head, and where its features come from."""

import copy
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from headstart.data.capture import capture
from headstart.data.features import FeatureSource
from headstart.data.rows import RowsMeta, check_rows, read_rows
from headstart.data.store import FeatureStore
from headstart.data.store_key import capture_key
from headstart.data.template import ChatTemplate, TokenRow
from headstart.heads.base import DraftHead, HeadConfig, build_head
from headstart.heads.checkpoint import check_pairing, load_head
from headstart.heads.target import Target
from headstart.heads.vocab import DraftVocab

log = logging.getLogger(__name__)


def load_rows(directory: str, target: Target) -> tuple[Sequence[TokenRow], RowsMeta]:
    """Read rows and refuse those of another tokenizer or chat template."""
    rows, meta = read_rows(Path(directory))
    check_rows(rows, target.shape.vocab_size)
    template = ChatTemplate(target.tokenizer).hash
    if meta.template_hash != template:
        raise ValueError(
            f"{directory}: rendered with chat template {meta.template_hash}, the target has "
            f"{template}; make the rows again"
        )
    if meta.target_fingerprint != target.fingerprint:
        warnings.warn(
            f"{directory}: rows made for target {meta.target_fingerprint}, training for "
            f"{target.fingerprint}: the answers are not this target's own",
            stacklevel=2,
        )
    return rows, meta


def draft_vocab(rows: Sequence[TokenRow], size: int | None, target: Target) -> DraftVocab | None:
    """Pick the draft vocabulary from the supervised tokens of the training rows.

    Rows of the model without a token of the tokenizer are never picked, whatever the rows hold.
    """
    if size is None:
        return None
    counts_V = torch.zeros(target.shape.vocab_size, dtype=torch.int64)
    for row in rows:
        ids = torch.tensor(row.token_ids)[torch.tensor(row.loss_mask).bool()]
        counts_V += ids.bincount(minlength=len(counts_V))
    stop_ids = ChatTemplate(target.tokenizer).stop_ids(target.stop_ids)
    vocab = DraftVocab.from_counts(counts_V, size, forced=stop_ids, below=target.tokenizer_size)
    covered = counts_V[vocab.ids_W].sum().item() / max(1, counts_V.sum().item())
    unseen = vocab.ids_W[counts_V[vocab.ids_W] == 0].tolist()
    fillers = len(set(unseen) - set(stop_ids))
    log.info(
        "draft vocabulary %s: %d of %d tokens cover %.2f %% of the answers (%d fillers)",
        vocab.hash,
        size,
        len(counts_V),
        100 * covered,
        fillers,
    )
    return vocab


def new_head(
    config: HeadConfig, target: Target, rows: Sequence[TokenRow]
) -> tuple[DraftHead, dict[str, Any] | None]:
    """Make the head, and say what it starts from: None for fresh weights and vocabulary.

    A head from `head.init_from` keeps its own draft vocabulary, whatever the rows: its rows mean
    those tokens. Raises ValueError for a checkpoint of another target or of other options.
    """
    wanted = _own_options(config, target)
    if config.init_from is None:
        vocab = draft_vocab(rows, wanted.draft_vocab_size, target)
        head = build_head(wanted, target.shape, vocab)
        head.initialise(target.parts)
        return head, None
    path = Path(config.init_from)
    head, info = load_head(path)
    check_pairing(path, info, head, target, force=False)
    if head.config != wanted:
        changed = [k for k, v in vars(head.config).items() if getattr(wanted, k, None) != v]
        raise ValueError(
            f"head.init_from={path}: its head differs in {', '.join(changed) or 'family'}; "
            "use the same head options"
        )
    kept = "the whole vocabulary" if head.vocab is None else f"draft vocabulary {head.vocab.hash}"
    log.info("starting from %s at step %d, with %s", path, info.step, kept)
    start = {"path": str(path), "step": info.step, "tokens_seen": info.tokens_seen}
    return head.requires_grad_(True).train(), start


def _own_options(config: HeadConfig, target: Target) -> HeadConfig:
    """Return the options a head is built with: where it starts from is not one of them.

    Where the model has more rows than the tokenizer has tokens, no draft vocabulary means that of
    the tokenizer: its padding rows are in no answer, and their logits are nobody's choice.
    """
    own = copy.copy(config)
    own.init_from = None
    if own.draft_vocab_size is None and target.tokenizer_size < target.shape.vocab_size:
        own.draft_vocab_size = target.tokenizer_size
        log.info(
            "the target has %d rows for the tokenizer's %d tokens: the others are never drafted",
            target.shape.vocab_size,
            target.tokenizer_size,
        )
    return own


def feature_source(
    target: Target,
    rows: Sequence[TokenRow],
    directory: Path,
    meta: RowsMeta,
    taps: Sequence[int],
) -> FeatureSource:
    """Return the features stored in a directory, captured now if they are not there yet."""
    if (directory / "index.json").exists():
        log.info("features: %s is there already", directory)
    else:
        capture(target, rows, directory, meta=meta, taps=taps)
    store = FeatureStore(directory, taps)
    store.require(capture_key(target, rows, meta, taps))
    return store
