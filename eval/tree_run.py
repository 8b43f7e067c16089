"""`headstart tree`: a head + prompts -> the draft tree that is fastest with it on this machine."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING
from rich.console import Console

from headstart.data.source import read_conversations
from headstart.data.template import ChatTemplate
from headstart.eval.acceptance import collect
from headstart.eval.arms import head_arms
from headstart.eval.bench import benchmark, provenance
from headstart.eval.engine.drafters.build import head_drafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.engine.sampling import SamplingConfig
from headstart.eval.leaderboard import print_leaderboard
from headstart.eval.report import write_report
from headstart.eval.result import Provenance
from headstart.eval.result_files import write_result
from headstart.eval.settings import EvalConfig, TreeConfig
from headstart.eval.step_time import PROBE_TOKENS, measure
from headstart.eval.suites import Suite, check_lengths, load_suite
from headstart.eval.tree_prompts import midway, plain_answers, split_suite
from headstart.eval.tree_report import Foretold, median_gap, plot, table, write_option
from headstart.eval.tree_search import Limits, Option, best, foretell, marginals, search
from headstart.files import write_json
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import check_pairing, load_head
from headstart.heads.load import TargetConfig, load_target
from headstart.heads.runtime import RuntimeConfig
from headstart.heads.target import Target

log = logging.getLogger(__name__)
KINDS = ("chain", "static", "dynamic")


@dataclass
class TreeSearchConfig:
    """What is searched, and on how much."""

    num_prompts: int = 40
    """Prompts on which acceptance is collected; none of them is measured afterwards."""
    max_nodes: int = 64
    """N of the largest tree, the root included."""
    max_depth: int = 6
    """Deepest draft, in tokens; less where the head's own limit is less."""
    max_rank: int = 10
    """Best candidates of a node that a static tree may hold."""
    top_k: list[int] = field(default_factory=lambda: [2, 3, 4, 5, 6, 8, 10])
    """Of the dynamic trees tried; each is grown once from every place."""
    prior: float = 20.0
    """Places that the accuracy of a depth counts as, beside those that took the very same path."""
    folds: int = 5
    """Parts of the prompts; a static tree is judged on the part that did not choose it."""
    timing_repeats: int = 5
    """Prompts that every probed shape continues for a few rounds."""
    presets_measured: int = 3
    """Most promising presets measured beside what was found."""

    def __post_init__(self) -> None:
        least = {
            "num_prompts": 2,
            "max_nodes": 3,
            "max_depth": 1,
            "max_rank": 1,
            "folds": 2,
            "timing_repeats": 1,
            "presets_measured": 0,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"search.{name}={getattr(self, name)}: need at least {minimum}")
        if self.folds > self.num_prompts:
            raise ValueError(
                f"search.folds={self.folds} but search.num_prompts={self.num_prompts}: every part "
                "needs a prompt; lower search.folds"
            )
        if not self.prior > 0:
            raise ValueError(f"search.prior={self.prior}: need more than 0 places")
        if min(self.top_k, default=2) < 2:
            raise ValueError(f"search.top_k={self.top_k}: need at least 2; 1 is a chain")


@dataclass
class TreeRun:
    """`headstart tree`: the chain, static and dynamic tree that emit most tokens a second."""

    target: TargetConfig = MISSING
    checkpoint: str = MISSING
    """Head checkpoint directory."""
    sampling: SamplingConfig = MISSING
    runtime: RuntimeConfig = MISSING
    presets: dict[str, TreeConfig] = field(default_factory=dict)
    """Shapes to compare with."""
    search: TreeSearchConfig = field(default_factory=TreeSearchConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    """How what was found is measured; eval.batch_size is also that of the step times."""
    name: str = "searched"
    """Name of the tree option that is written."""
    out: str = MISSING
    """Directory that receives tree/NAME.yaml, tree.json, tree.png, and results as eval writes."""


def run(config: TreeRun) -> None:
    """Search and measure (the command's entry)."""
    _refuse_what_is_missing(config)
    config.runtime.apply()
    target = load_target(config.target)
    config.runtime.attach(target)
    find_tree(target, ChatTemplate(target.tokenizer), config)


def _refuse_what_is_missing(config: TreeRun) -> None:
    """Raise for what can be told before the target is loaded."""
    if not (Path(config.checkpoint) / "config.json").is_file():
        raise FileNotFoundError(
            f"checkpoint={config.checkpoint}: no head checkpoint there; give a directory that "
            "holds config.json and model.safetensors"
        )
    if config.eval.suite is not None:
        read_conversations(config.eval.suite, need_answers=False, option="eval.suite")
    TreeConfig(config.name, depth=1)  # refuses a name that no file or table can carry


def find_tree(target: Target, template: ChatTemplate, config: TreeRun) -> list[Foretold]:
    """Collect, time, search, write the trees found, and measure them; return the measured rows.

    Raises ValueError, before anything is decoded, for a head, presets or prompts that do not fit.
    """
    head = _head(target, config)
    presets, skipped = _fitting(head, target, config)
    limits = limits_of(head, config.search)
    reach = _reach(limits, list(presets.values()))
    searched, held_out = _prompts(target, template, config)
    stop_ids = template.stop_ids(target.stop_ids)

    answers = plain_answers(target, searched.requests, config.sampling, stop_ids)
    found = collect(
        target,
        head,
        searched.requests,
        answers,
        depth=reach.depth,
        ranks=reach.ranks,
        top_k=reach.top_k,
    )
    times = measure(
        target,
        head,
        midway(searched.requests, answers, room=target.shape.max_positions - PROBE_TOKENS),
        sampling=config.sampling,
        nodes=reach.nodes,
        depth=reach.depth,
        top_k=reach.top_k,
        batch=config.eval.batch_size,
        repeats=config.search.timing_repeats,
    )
    options = search(found, times, limits, prior=config.search.prior, folds=config.search.folds)
    promised = {name: foretell(tree, found, times) for name, tree in presets.items()}

    out = Path(config.out)
    seeds = [config.eval.seed, config.sampling.seed]
    where = provenance(target, held_out, template.hash, asdict(config), seeds)
    chosen, rows = _write_found(options, config, where)
    rows += _best_presets(rows, promised, config.search.presets_measured)
    rows = _measured(target, config, rows, held_out, stop_ids, where)
    _tell(rows, chosen)
    tables = {
        "provenance": asdict(where),
        "searched_on": {"suite": searched.name, "hash": searched.hash, "places": found.num_places},
        "acceptance_by_depth_and_rank": marginals(found.ranks_PK, reach.ranks),
        "head_values": asdict(found.calibration),
        "times": asdict(times),
        "chosen": _row(chosen),
        "options": [_row(option) for option in options],
        "presets": {name: _row(option) for name, option in promised.items()},
        "presets_left_out": skipped,
        "measured": [row.figures() for row in rows],
        "median_difference": median_gap(rows),
    }
    write_json(out / "tree.json", tables)
    log.info("plot: %s", plot(options, rows, promised, times, out / "tree.png"))
    return rows


def _head(target: Target, config: TreeRun) -> DraftHead:
    """Load the head and check that it is this target's; results tell of a forced pairing."""
    path = Path(config.checkpoint)
    head, info = load_head(path)
    check_pairing(path, info, head, target, force=config.eval.force_pairing)
    target.adopt(head)
    return head


def _prompts(target: Target, template: ChatTemplate, config: TreeRun) -> tuple[Suite, Suite]:
    """Return the prompts to search on and those to measure."""
    counts = config.search.num_prompts, config.eval.num_prompts
    suite = load_suite(replace(config.eval, num_prompts=sum(counts)), template)
    check_lengths(suite, target.shape.max_positions)
    return split_suite(suite, *counts)


def _write_found(
    options: Sequence[Option], config: TreeRun, where: Provenance
) -> tuple[Option, list[Foretold]]:
    """Write the best tree of each kind, and the best of all; return that and the kinds' rows."""
    of_kind = {f"{config.name}-{kind}": best(options, kind) for kind in KINDS}
    found = {name: option for name, option in of_kind.items() if option is not None}
    chosen = best(options)
    assert chosen is not None, "a chain of one is always an option"
    told = (
        f"Found by headstart tree for {config.checkpoint} on {where.target}: {where.device}, "
        f"{where.threads} threads, {where.dtype}, batch {config.eval.batch_size}, temperature "
        f"{config.sampling.temperature:g}."
    )
    for name, option in {config.name: chosen, **found}.items():
        log.info("%s", write_option(Path(config.out) / "tree", name, option, told))
    return chosen, [Foretold(name, option) for name, option in found.items()]


def limits_of(head: DraftHead, config: TreeSearchConfig) -> Limits:
    """Return the search's limits, the head's own applied.

    Raises ValueError naming the option that asks for more candidates than the head has tokens.
    """
    depth = config.max_depth if head.max_depth is None else min(config.max_depth, head.max_depth)
    dynamic = tuple(sorted(set(config.top_k))) if head.depths_at_once == 1 else ()
    for name, most in (("max_rank", config.max_rank), ("top_k", max(dynamic, default=0))):
        if most > head.num_draft_tokens:
            raise ValueError(
                f"search.{name}={most} but the head drafts over {head.num_draft_tokens} tokens: "
                f"lower search.{name}"
            )
    return Limits(config.max_nodes, depth, config.max_rank, dynamic)


def _reach(limits: Limits, presets: Sequence[TreeConfig]) -> Limits:
    """Return the limits widened to what the presets need to be replayed and priced."""
    shapes = [tree.shape() for tree in presets]
    grown = [s for s in shapes if isinstance(s, DynamicShape)]
    fixed = [s for s in shapes if not isinstance(s, DynamicShape)]
    return Limits(
        max([limits.nodes, *(s.total for s in grown), *(s.num_nodes for s in fixed)]),
        max([limits.depth, *(s.levels for s in grown), *(s.max_depth for s in fixed)]),
        max([limits.ranks, *(s.max_rank + 1 for s in fixed)]),
        tuple(sorted({*limits.top_k, *(s.top_k for s in grown)})),
    )


def _fitting(
    head: DraftHead, target: Target, config: TreeRun
) -> tuple[dict[str, TreeConfig], dict[str, str]]:
    """Part the presets into those the head can draft and the others, with the reason."""
    fitting, skipped = {}, {}
    for name, tree in config.presets.items():
        if tree.children != "top_k":
            raise ValueError(
                f"presets.{name}.children={tree.children}: only top_k trees can be foretold, drawn "
                "children differ from draft to draft; drop the preset"
            )
        try:
            head_drafter(head, target.parts, tree, config.sampling)
        except ValueError as error:
            skipped[name] = str(error)
            log.warning("presets.%s is left out: %s", name, error)
        else:
            fitting[name] = replace(tree, name=name)
    return fitting, skipped


def _best_presets(
    rows: Sequence[Foretold], promised: Mapping[str, Option], count: int
) -> list[Foretold]:
    """Return the presets that promise most, without those that are a tree that was found."""
    found = [row.option.same_shape for row in rows]
    others = [name for name, option in promised.items() if option.same_shape not in found]
    fastest = sorted(others, key=lambda name: -promised[name].tokens_per_s)
    return [Foretold(name, promised[name]) for name in fastest[:count]]


def _measured(
    target: Target,
    config: TreeRun,
    rows: Sequence[Foretold],
    suite: Suite,
    stop_ids: Sequence[int],
    where: Provenance,
) -> list[Foretold]:
    """Decode the held-out prompts plainly and with every row's tree, taking turns."""
    arms = head_arms(
        [Path(config.checkpoint)],
        [row.option.tree(row.name) for row in rows],
        target,
        config.sampling,
        force=config.eval.force_pairing,
        template_hash=where.template_hash,
    )
    outcomes = benchmark(
        target,
        arms,
        suite,
        sampling=config.sampling,
        config=config.eval,
        stop_ids=stop_ids,
        provenance=where,
    )
    out, results = Path(config.out), [result for result, _ in outcomes]
    for arm, (result, prompt_rows) in zip(arms, outcomes, strict=True):
        write_result(out / arm.name, result, prompt_rows)
    print_leaderboard(results)
    log.info("report: %s", write_report(results, out))
    return [replace(row, result=result) for row, result in zip(rows, results, strict=True)]


def _tell(rows: Sequence[Foretold], chosen: Option) -> None:
    """Print what was predicted beside what was measured; warn where the two differ."""
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows, chosen))
    for row in rows:
        for message in row.warnings():
            log.warning("%s", message)
    gap = median_gap(rows)
    if gap is not None:
        log.info("predicted and measured speedup differ by %.1f %% in the median", 100 * gap)


def _row(option: Option) -> dict[str, Any]:
    """Return an option for tree.json, without the fields that its kind has not."""
    return {key: value for key, value in asdict(option).items() if value is not None}
