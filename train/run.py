"""`headstart train`: rows -> a head checkpoint, in one screen."""

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
from headstart.data.features import FeatureSource, OnlineFeatures, PackedFeatures
from headstart.data.packing import check_fits
from headstart.data.rows import RowsMeta, read_meta, rows_hash
from headstart.data.template import TokenRow
from headstart.eval.arms import head_drafter
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.settings import TreeConfig
from headstart.files import write_json
from headstart.heads.base import DraftHead, HeadConfig, family_of
from headstart.heads.checkpoint import info_for, save_head
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.target import Target
from headstart.launch_config import LaunchConfig
from headstart.train.backends import make_parallel
from headstart.train.checkpoint import Checkpoints
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.evaluation import Evaluation, head_with
from headstart.train.flops import head_flops, known_peak, target_flops
from headstart.train.loop import Hooks, train_head
from headstart.train.meters import Meter
from headstart.train.parallel import Parallel
from headstart.train.progress import Progress
from headstart.train.resume import SUMMARY, finished, going_on
from headstart.train.starting import feature_source, load_rows, new_head
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

    def __post_init__(self) -> None:
        kind = self.parallel.kind
        refuse_parts(kind, self.train, zero=kind.startswith("zero"))


def run(config: TrainRun) -> None:
    """Load the target and train (the command's entry)."""
    if _ended(config):
        return
    for directory in filter(None, (config.rows, config.heldout_rows)):
        read_meta(Path(directory))
    train(load_target(config.target), config)


def train(target: Target, config: TrainRun) -> Progress:
    """Train one head: target, rows, head, features, loop; or go on with a run that was stopped."""
    if ended := _ended(config):
        return ended
    set_seed(config.train.seed)
    parallel = make_parallel(
        config.parallel, config.train, target.device, timeout=config.launch.timeout_seconds
    )
    refuse_parts(config.parallel.kind, config.train, zero=isinstance(parallel, Zero))
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
    source = _source(target, rows, config, meta, head)
    evaluate = Evaluation(target, config.train, config.tree, heldout, parallel, head)
    out, checkpoints = Path(config.out), _checkpoints(config)
    own = _identity(config) | {
        "data": {
            "rows_hash": rows_hash(rows),
            "template_hash": meta.template_hash,
            "target_fingerprint": target.fingerprint,
            "draft_vocab": None if head.vocab is None else head.vocab.hash,
            "init_from": start,
        },
        "device": parallel.device.type,
        "heldout_hash": rows_hash(heldout),
    }
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
    save = _Saver(out, target, head, meta, _trained_on(config, own, source, len(rows)))
    hooks = Hooks(
        evaluate,
        save,
        keep=lambda snapshot: checkpoints.save(replace(snapshot, identity=own)),
        save_best=partial(save, name="best"),
    )
    tags = [family_of(config.head), target.name]
    tracker = make_tracker(config.logging, out, tags, main=parallel.is_main)
    with tracked(tracker, asdict(config), resume.progress.step if resume else 0):
        progress = train_head(
            head,
            source,
            config.train,
            parallel=parallel,
            hooks=hooks,
            tracker=tracker,
            resume=resume,
            meter=_meter(config, target, head, parallel),
        )
    if parallel.is_main:
        ended = {"progress": asdict(progress), "figures": evaluate.figures}
        write_json(out / SUMMARY, ended)
    log.info("checkpoint: %s", out / "head")
    return progress


def _trained_on(
    config: TrainRun, own: dict[str, Any], source: FeatureSource, rows: int
) -> dict[str, Any]:
    """Return what a head says of its training rows."""
    return {
        "rows": rows,
        "tokens": sum(source.lengths),
        "max_length": max(source.lengths),
        "rows_hash": own["data"]["rows_hash"],
        "rows_path": config.rows,
        "init_from": own["data"]["init_from"],
    }


@dataclass
class _Saver:
    """Writes heads under `out` that say what they are and what they were trained on."""

    out: Path
    target: Target
    head: DraftHead
    meta: RowsMeta
    trained_on: dict[str, Any]

    def __call__(self, weights: dict[str, Tensor], progress: Progress, name: str = "head") -> None:
        trained = head_with(weights, self.head)
        info = info_for(
            trained,
            self.target.name,
            self.target.fingerprint,
            template_hash=self.meta.template_hash,
            step=progress.step,
            tokens_seen=progress.tokens,
            trained_on=self.trained_on | {"seconds": round(progress.seconds, 1)},
        )
        save_head(self.out / name, trained, info)


def _source(
    target: Target, rows: Sequence[TokenRow], config: TrainRun, meta: RowsMeta, head: DraftHead
) -> FeatureSource:
    """Return the target online or stored features, packed where that is asked for."""
    if config.train.features == "online":
        if config.features is not None:
            warnings.warn(
                f"features={config.features} has no effect with train.features=online; drop one",
                stacklevel=2,
            )
        source: FeatureSource = OnlineFeatures(target, rows, head.aux_features)
    else:
        directory = Path(config.features or f"{config.rows}-features")
        source = feature_source(target, rows, directory, meta, head.aux_features)
    return (
        source if (tokens := config.train.pack_tokens) is None else PackedFeatures(source, tokens)
    )


def refuse_parts(kind: str, settings: TrainConfig, *, zero: bool) -> None:
    """Raise ValueError for what needs whole weights where ranks hold parts of them.

    `kind` is that of `parallel`; `zero` tells whether DeepSpeed trains, which from_env may mean.
    """
    if settings.optimizer == "muon" and (zero or kind == "fsdp2"):
        raise ValueError(
            f"train.optimizer=muon with parallel={kind}: Muon needs whole matrices, of which each "
            "rank has a part; use parallel=ddp, or train.optimizer=adamw"
        )
    if settings.ema is not None and zero:
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
