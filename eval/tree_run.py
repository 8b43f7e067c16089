"""`headstart tree`: a head + prompts -> the draft tree that is fastest with it on this machine."""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from headstart.data.template import ChatTemplate
from headstart.eval.acceptance import collect
from headstart.eval.arms import head_arms
from headstart.eval.bench import benchmark, provenance
from headstart.eval.engine.drafters.build import head_drafter
from headstart.eval.engine.dynamic_tree import DynamicShape
from headstart.eval.leaderboard import print_leaderboard
from headstart.eval.report import write_report
from headstart.eval.result import Provenance
from headstart.eval.result_files import write_result
from headstart.eval.settings import TreeConfig
from headstart.eval.step_time import PROBE_TOKENS, measure
from headstart.eval.suites import Suite, check_lengths, evenly, load_suite, refuse_unreadable
from headstart.eval.tree_prompts import midway, plain_answers, split_suite, with_more
from headstart.eval.tree_report import (
    Foretold,
    median_gap,
    overtaken,
    plot,
    table,
    write_option,
)
from headstart.eval.tree_search import Limits, Option, best, foretell, marginals, search
from headstart.eval.tree_settings import TreeRun as TreeRun
from headstart.eval.tree_settings import TreeSearchConfig
from headstart.files import write_json
from headstart.heads.base import DraftHead
from headstart.heads.checkpoint import check_pairing, load_head
from headstart.heads.load import load_target
from headstart.heads.target import Target

log = logging.getLogger(__name__)
KINDS = ("chain", "static", "dynamic")


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
    refuse_unreadable(config.eval)
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
    texts = midway(searched.requests, answers, room=target.shape.max_positions - PROBE_TOKENS)
    timed, batch = config.search.timing_repeats, config.eval.batch_size
    times = measure(
        target,
        head,
        evenly(texts, timed * batch),
        sampling=config.sampling,
        nodes=reach.nodes,
        depth=reach.depth,
        top_k=reach.top_k,
        batch=batch,
        repeats=timed,
    )
    options = search(found, times, limits, prior=config.search.prior, folds=config.search.folds)
    promised = {name: foretell(tree, found, times) for name, tree in presets.items()}

    out = Path(config.out)
    seeds = [config.eval.seed, config.sampling.seed]
    where = provenance(target, held_out, template.hash, asdict(config), seeds)
    chosen, kinds = best(options), _best_of_kinds(options, config.name)
    assert chosen is not None, "a chain of one is always an option"
    for path in _write_found(kinds, chosen, config, where):
        log.info("%s", path)
    rows = [*kinds, *_best_presets(kinds, promised, config.search.presets_measured)]
    rows = _measured(target, config, rows, chosen, held_out, stop_ids, where)
    _write_found(rows[: len(kinds)], chosen, config, where)  # with what was measured
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
    first = config.search.num_prompts
    suite = load_suite(with_more(config.eval, first), template)
    check_lengths(suite, target.shape.max_positions)
    return split_suite(
        suite, first, {chosen.label: chosen.num_prompts for chosen in config.eval.chosen_suites}
    )


def _best_of_kinds(options: Sequence[Option], name: str) -> list[Foretold]:
    """Return the best tree of each kind, called NAME-KIND."""
    of_kind = {f"{name}-{kind}": best(options, kind) for kind in KINDS}
    return [Foretold(name, option) for name, option in of_kind.items() if option is not None]


def _write_found(
    rows: Sequence[Foretold], chosen: Option, config: TreeRun, where: Provenance
) -> list[Path]:
    """Write the best tree of each kind, and the best of all under the name asked for."""
    told = (
        f"Found by headstart tree for {config.checkpoint} on {where.target}: {where.device}, "
        f"{where.threads} threads, {where.dtype}, batch {config.eval.batch_size}, temperature "
        f"{config.sampling.temperature:g}."
    )
    named = {config.name: _row_of(rows, chosen), **{row.name: row for row in rows}}
    directory = Path(config.out) / "tree"
    return [write_option(directory, name, row, told) for name, row in named.items()]


def _row_of(rows: Sequence[Foretold], option: Option) -> Foretold:
    return next(row for row in rows if row.option == option)


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
    chosen: Option,
    suite: Suite,
    stop_ids: Sequence[int],
    where: Provenance,
) -> list[Foretold]:
    """Decode the held-out prompts plainly and with every row's tree, taking turns; report it."""
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
    measured = [replace(row, result=result) for row, result in zip(rows, results, strict=True)]
    first = _row_of(measured, chosen)
    first.result.warnings += overtaken(first, measured)
    for arm, (result, prompt_rows) in zip(arms, outcomes, strict=True):
        write_result(out / arm.name, result, prompt_rows)
    print_leaderboard(results)
    log.info("report: %s", write_report(results, out))
    return measured


def _tell(rows: Sequence[Foretold], chosen: Option) -> None:
    """Print what was predicted beside what was measured; warn where measuring says otherwise."""
    Console(width=None if sys.stdout.isatty() else 160).print(table(rows, chosen))
    first = _row_of(rows, chosen)
    for message in [m for row in rows for m in row.warnings()] + overtaken(first, rows):
        log.warning("%s", message)
    gap = median_gap(rows)
    if gap is not None:
        log.info("predicted and measured speedup differ by %.1f %% in the median", 100 * gap)


def _row(option: Option) -> dict[str, Any]:
    """Return an option for tree.json, without the fields that its kind has not."""
    return {key: value for key, value in asdict(option).items() if value is not None}
