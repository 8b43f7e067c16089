"""`headstart train`: rows -> a head checkpoint, in one screen."""

import copy
import json
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from omegaconf import MISSING
from torch import Tensor

from headstart import __version__
from headstart.data.capture import capture
from headstart.data.features import FeatureSource, OnlineFeatures, PackedFeatures
from headstart.data.packing import check_fits
from headstart.data.rows import RowsMeta, check_rows, read_meta, read_rows, rows_hash
from headstart.data.store import FeatureStore
from headstart.data.store_key import capture_key
from headstart.data.template import ChatTemplate, TokenRow
from headstart.eval.arms import head_drafter
from headstart.eval.bench import quick_tau
from headstart.eval.engine.decode import Request
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.settings import TreeConfig
from headstart.files import write_json
from headstart.heads.base import DraftHead, HeadConfig, build_head, family_of
from headstart.heads.checkpoint import check_pairing, info_for, load_head, save_head
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.target import Target
from headstart.heads.vocab import DraftVocab
from headstart.launch_config import LaunchConfig
from headstart.train.backends import make_parallel
from headstart.train.checkpoint import Checkpoints, Snapshot
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.flops import head_flops, known_peak, target_flops
from headstart.train.heldout import heldout_figures
from headstart.train.loop import Hooks, train_head
from headstart.train.meters import Meter
from headstart.train.parallel import Parallel, leave_group
from headstart.train.progress import Progress
from headstart.train.resume import SUMMARY, finished, going_on
from headstart.train.sharded import Sharded
from headstart.train.tracking import LoggingConfig, make_tracker, tracked
from headstart.train.zero import Zero

log = logging.getLogger(__name__)


@dataclass
class TrainRun:
    """`headstart train`: token rows -> a trained head."""

    target: TargetConfig = MISSING
    head: HeadConfig = MISSING
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    tree: TreeConfig = MISSING
    """Draft used when tau is measured along the way."""
    rows: str = MISSING
    """Training rows, as generate or prepare wrote them."""
    heldout_rows: str | None = None
    """Rows of other prompts for the held-out loss and tau; null holds out none."""
    features: str | None = None
    """Directory of captured features; null puts them beside the rows."""
    out: str = MISSING
    """Directory that receives the head checkpoint and metrics.jsonl."""


def run(config: TrainRun) -> None:
    """Load the target and train (the command's entry)."""
    if _ended(config):
        return
    for directory in filter(None, (config.rows, config.heldout_rows)):
        read_meta(Path(directory))
    train(load_target(config.target), config)
    leave_group()


def train(target: Target, config: TrainRun) -> Progress:
    """Train one head: target, rows, head, features, loop; or go on with a run that was stopped."""
    if ended := _ended(config):
        return ended
    set_seed(config.train.seed)
    parallel = make_parallel(
        config.parallel, config.train, target.device, timeout=config.launch.timeout_seconds
    )
    refuse_parts(parallel, config.parallel, config.train)
    rows, meta = load_rows(config.rows, target)
    heldout, _ = load_rows(config.heldout_rows, target) if config.heldout_rows else ([], None)
    if heldout and target.tensor_ranks > 1:
        raise ValueError(
            f"heldout_rows={config.heldout_rows}: evaluation runs on one rank and a "
            "target.parallel=tensor target on all together; set heldout_rows=null"
        )
    if config.train.pack_tokens is not None:
        check_fits(rows, config.train.pack_tokens)
    head, start = new_head(config.head, target, rows)
    if config.train.activation_checkpointing:
        head.recompute_activations()
    if heldout and config.train.eval_prompts:  # refuse what cannot draft or decode now
        target.check_decodes()
        head_drafter(head, target.parts, config.tree, SamplingConfig())
    source = feature_source(target, rows, config, meta, head.aux_features)
    if config.train.pack_tokens is not None:
        source = PackedFeatures(source, config.train.pack_tokens)
    evaluate = _Evaluation(target, config, heldout, parallel, head)
    out = Path(config.out)
    checkpoints = _checkpoints(config)
    data = {
        "rows_hash": rows_hash(rows),
        "template_hash": meta.template_hash,
        "target_fingerprint": target.fingerprint,
        "draft_vocab": None if head.vocab is None else head.vocab.hash,
        "init_from": start,
    }
    own = _identity(config) | {"data": data, "device": parallel.device.type}
    own["heldout_hash"] = rows_hash(heldout)
    if parallel.is_main:
        out.mkdir(parents=True, exist_ok=True)
    resume = going_on(out, config.train, checkpoints, own, head, parallel)
    log.info(
        "training %s: %.2f M parameters on %d rows, %d tokens",
        config.head.__class__.__name__,
        sum(p.numel() for p in head.parameters()) / 1e6,
        len(rows),
        sum(source.lengths),
    )
    trained_on = {
        "rows": len(rows),
        "tokens": sum(source.lengths),
        "max_length": max(source.lengths),
        "rows_hash": rows_hash(rows),
        "rows_path": config.rows,
        "init_from": start,
    }

    def save(weights: dict[str, Tensor], progress: Progress, name: str = "head") -> None:
        trained = head_with(weights, head)
        info = info_for(
            trained,
            target.name,
            target.fingerprint,
            template_hash=meta.template_hash,
            step=progress.step,
            tokens_seen=progress.tokens,
            trained_on=trained_on | {"seconds": round(progress.seconds, 1)},
        )
        save_head(out / name, trained, info)

    def keep(snapshot: Snapshot) -> None:
        checkpoints.save(replace(snapshot, identity=own))

    tags = [family_of(config.head), target.name]
    tracker = make_tracker(config.logging, out, tags, main=parallel.is_main)
    with tracked(tracker, asdict(config), resume.progress.step if resume else 0):
        progress = train_head(
            head,
            source,
            config.train,
            parallel=parallel,
            hooks=Hooks(evaluate, save, keep, partial(save, name="best")),
            tracker=tracker,
            resume=resume,
            meter=_meter(config, target, head, parallel),
        )
    if parallel.is_main:
        ended = {"progress": asdict(progress), "figures": evaluate.figures}
        write_json(out / SUMMARY, ended)
    log.info("checkpoint: %s", out / "head")
    return progress


def refuse_parts(parallel: Parallel, config: ParallelConfig, settings: TrainConfig) -> None:
    """Raise ValueError for what needs whole weights where ranks hold parts of them."""
    kind = config.kind
    if settings.optimizer == "muon" and isinstance(parallel, Sharded | Zero):
        raise ValueError(
            f"train.optimizer=muon with parallel={kind}: Muon needs whole matrices, of which each "
            "rank has a part; use parallel=ddp, or train.optimizer=adamw"
        )
    if settings.ema is not None and isinstance(parallel, Zero):
        raise ValueError(
            f"train.ema={settings.ema} with parallel={kind}: the averages would not be those "
            "of DeepSpeed's own weights; use parallel=ddp or fsdp2, or train.ema=null"
        )


def _meter(config: TrainRun, target: Target, head: DraftHead, parallel: Parallel) -> Meter:
    """Return a meter that knows what use is made of the devices, where their peak is known."""
    given = config.train.peak_tflops
    peak = given * 1e12 if given else known_peak(parallel.device, config.train.precision)
    if peak is None:
        return Meter()
    flops = head_flops(head)
    if config.train.features == "online":
        try:
            flops += target_flops(target)
        except ValueError as error:  # a figure less is no reason not to train
            log.info("no MFU: %s", error)
            return Meter()
    return Meter(flops, peak * parallel.world)


def _ended(config: TrainRun) -> Progress | None:
    return finished(Path(config.out), config.train, _checkpoints(config), _identity(config))


def _checkpoints(config: TrainRun) -> Checkpoints:
    return Checkpoints(Path(config.out) / "checkpoints", config.train.keep_last)


def _identity(config: TrainRun) -> dict[str, Any]:
    """Return what can be said of a run before anything is loaded, as plain JSON."""
    versions = {"headstart": __version__, "torch": torch.__version__}
    known = {
        "config": asdict(config),
        "family": family_of(config.head),
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "versions": versions,
    }
    return json.loads(json.dumps(known))


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
    config: TrainRun,
    meta: RowsMeta,
    taps: Sequence[int] = (),
) -> FeatureSource:
    """Return stored features (captured now if they are not there yet) or the target online."""
    if config.train.features == "online":
        if config.features is not None:
            warnings.warn(
                f"features={config.features} has no effect with train.features=online; drop one",
                stacklevel=2,
            )
        return OnlineFeatures(target, rows, taps)
    directory = Path(config.features or f"{config.rows}-features")
    if (directory / "index.json").exists():
        log.info("features: %s is there already", directory)
    else:
        capture(target, rows, directory, meta=meta, taps=taps)
    store = FeatureStore(directory, taps)
    store.require(capture_key(target, rows, meta, taps))
    return store


def head_with(weights: dict[str, Tensor], like: DraftHead) -> DraftHead:
    """Return a head of its own with these weights: what is saved and measured."""
    with torch.random.fork_rng(devices=[]):  # its first weights must not move the run's chances
        head = build_head(like.config, like.shape, like.vocab)
    head.load_state_dict(weights)
    return head


class _Evaluation:
    """Held-out loss and the real verifier's tau, on the head as it will be served."""

    def __init__(
        self,
        target: Target,
        config: TrainRun,
        heldout: Sequence[TokenRow],
        parallel: Parallel,
        head: DraftHead,
    ) -> None:
        self.target, self.config, self.parallel, self.head = target, config, parallel, head
        self.stop_ids = ChatTemplate(target.tokenizer).stop_ids(target.stop_ids)
        self.figures: dict[str, float] = {}  # of the last evaluation
        settings = config.train
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
            figures |= heldout_figures(
                head, self.source, self.config.train.batch_rows, self.parallel
            )
        if self.requests:
            figures["heldout/tau_with_bonus_micro"] = self._tau(weights)
        return figures

    def _tau(self, weights: dict[str, Tensor]) -> float:
        served = head_with(weights, self.head)
        self.target.adopt(served)
        greedy = SamplingConfig()
        drafter = head_drafter(served, self.target.parts, self.config.tree, greedy)
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
