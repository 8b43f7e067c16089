"""Reports over any number of results: one Markdown page and its plots."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from headstart.eval.checks import FEW_PROMPTS
from headstart.eval.leaderboard import (
    COLUMNS,
    SPEED,
    TAU,
    Named,
    by_setting,
    by_speed,
    leaderboard_rows,
    name_results,
    number,
    with_interval,
)
from headstart.eval.metrics import DEFINITIONS
from headstart.eval.result import Category, Equality, Result
from headstart.files import atomic_path, write_text

STAGES = (
    "ms_draft_per_round",
    "ms_verify_per_round",
    "ms_commit_per_round",
    "ms_prefill_per_turn",
    "ms_plain_per_token",
    "cost_ratio_c",
    "verify_ratio",
    "speedup_predicted",
    "predicted_gap",
)


def write_report(results: Sequence[Result], directory: Path) -> Path:
    """Write report.md and its plots into `directory`; return the path of report.md.

    Raises ValueError without results.
    """
    images = plot_report(results, directory)
    path = directory / "report.md"
    write_text(path, markdown_report(results, images=[image.name for image in images]))
    return path


def markdown_report(results: Sequence[Result], *, images: Sequence[str] = ()) -> str:
    """Return the whole report as Markdown; `images` are paths of plots relative to it.

    Raises ValueError without results.
    """
    if not results:
        raise ValueError("results=[]: a report needs at least one result")
    named = name_results(results)
    sections = [
        "# What each drafter buys",
        "\n".join(f"- {_headline(n, r)}" for n, r in named),
        "## Leaderboard",
        *_leaderboards(named),
        *(f"![{Path(image).stem.replace('_', ' ')}]({image})" for image in images),
        "## Acceptance by depth",
        *_acceptance(named),
        *_predicted(named),
        "## Accepted drafted tokens per round (share of rounds)",
        _histogram(named),
        "## Time by stage",
        _stages(named),
        *_grouped("By suite", "suite", [(n, r.suites) for n, r in named]),
        *_grouped("By category", "category", [(n, r.categories) for n, r in named]),
        *_grouped("By context length", "prompt tokens", [(n, r.context_lengths) for n, r in named]),
        "## Equality with plain decoding",
        "\n".join(f"- {n}: {_equality(r.equality)}" for n, r in named),
        *_loops(named),
        "## Warnings",
        _warnings(named),
        "## Provenance",
        *(_provenance(n, r) for n, r in named),
        "## Definitions",
        _definitions(),
    ]
    return "\n\n".join(sections) + "\n"


def _headline(name: str, result: Result) -> str:
    speed, interval = result.figures[SPEED], result.intervals.get(SPEED)
    parts = [f"**{_cell(name)}** ({_cell(result.drafter.tree)})"]
    if speed is None:
        parts.append("speed not measured;")
    else:
        parts.append(f"decodes {with_interval(speed, interval, 'x')} as fast as the target alone,")
    tau = with_interval(result.figures[TAU], result.intervals.get(TAU))
    parts.append(f"at {tau} tokens per round over {result.counts.prompts} prompts")
    if speed is not None and interval is not None and interval[0] <= 1 <= interval[1]:
        parts.append("(no speedup is shown: the interval contains 1)")
    if result.counts.prompts < FEW_PROMPTS:
        parts.append(f"(fewer than {FEW_PROMPTS} prompts: a rough interval)")
    if not result.drafter.lossless:
        parts.append("and is **lossy**: its outputs do not follow the target's distribution")
    return " ".join(parts) + "."


def _leaderboards(named: Sequence[Named]) -> list[str]:
    sections = []
    for setting, group in by_setting(named).items():
        sections += [f"{_cell(setting)}.", _table(list(COLUMNS), leaderboard_rows(group))]
    if not all(r.drafter.lossless for _, r in named):
        sections.append("Rows marked lossy change the output distribution and hold no rank.")
    return sections


def _acceptance(named: Sequence[Named]) -> list[str]:
    sections = []
    for figure in ("alpha_cond", "alpha_prefix"):
        depth = max(len(r.figures[figure]) for _, r in named)
        rows = []
        for name, result in named:
            values = result.figures[figure]
            intervals = result.intervals.get(figure) or [None] * len(values)
            cells = [with_interval(v, i) for v, i in zip(values, intervals, strict=True)]
            rows.append([name, *cells, *["-"] * (depth - len(cells))])
        header = [figure, *(f"d = {d}" for d in range(depth))]
        sections += [f"`{figure}`, {DEFINITIONS[figure]}:", _table(header, rows)]
    return sections


def _predicted(named: Sequence[Named]) -> list[str]:
    rows = []
    for name, result in named:
        measured = result.figures["tau_full_rounds"]
        if result.tau_predicted is not None and measured:
            gap = f"{100 * (result.tau_predicted / measured - 1):+.1f} %"
            rows.append([name, number(result.tau_predicted), number(measured), gap])
    text = "Chains, tau of full rounds: predicted by teacher-forced agreement on the target's own "
    header = ["drafter", "predicted", "measured", "gap"]
    return [f"{text}answers, and measured:", _table(header, rows)] if rows else []


def _histogram(named: Sequence[Named]) -> str:
    width = max(len(r.figures["accept_histogram"]) for _, r in named)
    rows = []
    for name, result in named:
        counts = result.figures["accept_histogram"]
        total = max(sum(counts), 1)
        cells = [f"{100 * count / total:.1f} %" for count in counts]
        rows.append([name, f"{sum(counts):.0f}", *cells, *["-"] * (width - len(cells))])
    return _table(["drafter", "rounds", *map(str, range(width))], rows)


def _stages(named: Sequence[Named]) -> str:
    rows = [[name, *(number(result.figures[stage]) for stage in STAGES)] for name, result in named]
    return _table(["drafter", *STAGES], rows)


def _grouped(
    title: str, column: str, groups: Sequence[tuple[str, dict[str, Category]]]
) -> list[str]:
    """Return a section that gives each drafter's prompts apart by what `column` names."""
    rows = [
        [name, label, str(category.counts.prompts), str(category.counts.rounds)]
        + [number(category.figures[figure]) for figure in (TAU, SPEED)]
        + [number(category.figures["tokens_per_s_decode"], 1)]
        for name, found in groups
        for label, category in found.items()
    ]
    header = ["drafter", column, "prompts", "rounds", "tau", "decode speedup", "tokens/s"]
    return [f"## {title}", _table(header, rows)] if rows else []


def _equality(equality: Equality | None) -> str:
    if equality is None:
        return "not compared (sampled outputs of the two arms differ rightly)"
    line = f"{100 * equality.fraction_identical:.1f} % of greedy outputs identical"
    shown = [
        f"{_cell(d.prompt_id)} at token {d.position} (plain top-2 margin {d.margin:.3g})"
        for d in equality.divergences[:5]
    ]
    hidden = len(equality.divergences) - len(shown)
    more = f" and {hidden} more" if hidden else ""
    return line + (f"; first divergences: {', '.join(shown)}{more}" if shown else "")


def _loops(named: Sequence[Named]) -> list[str]:
    rows = []
    for name, result in named:
        if result.loops:
            flagged = ", ".join(f"{p} ({share:.2f})" for p, share in sorted(result.loops.items()))
            without = result.figures_without_loops or dict.fromkeys(DEFINITIONS)
            pairs = [number(f[key]) for key in (TAU, SPEED) for f in (result.figures, without)]
            rows.append([name, flagged, *pairs])
    header = ["drafter", "prompts (share of repeated 8-grams)", "tau", "tau without them"]
    header += ["decode speedup", "decode speedup without them"]
    return ["## Looping prompts", _table(header, rows)] if rows else []


def _warnings(named: Sequence[Named]) -> str:
    lines = [f"- {_cell(n)}: {w}" for n, r in named for w in r.warnings]
    return "\n".join(lines) or "None."


def _provenance(name: str, result: Result) -> str:
    fields: dict[str, object] = {}
    for part in (result.drafter, result.sampling, result.counts, result.provenance):
        fields |= {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    config = json.dumps(fields.pop("config"), indent=1)
    fields |= {"repeats (median)": result.repeats, "bootstrap resamples": result.resamples}
    rows = [[key, "-" if value is None else str(value)] for key, value in fields.items()]
    table = _table(["field", "value"], rows)
    details = f"<details><summary>configuration</summary>\n\n```json\n{config}\n```\n\n</details>"
    return f"### {_cell(name)}\n\n{table}\n\n{details}"


def _definitions() -> str:
    columns = [f"- **{name}**: {text}" for name, text in COLUMNS.items()]
    return "\n".join(columns + [f"- `{name}`: {text}" for name, text in DEFINITIONS.items()])


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def plot_report(results: Sequence[Result], directory: Path) -> list[Path]:
    """Draw acceptance by depth and decode speedup as PNGs into `directory`; return their paths."""
    if not results:
        raise ValueError("results=[]: a report needs at least one result")
    named = name_results(results)
    return [
        _save(_plot_acceptance(named), directory / "acceptance_by_depth.png"),
        _save(_plot_speedup(named), directory / "speedup.png"),
    ]


def _save(canvas: Canvas, path: Path) -> Path:
    with atomic_path(path) as temporary:
        canvas.savefig(temporary, format="png", dpi=120)
    return path


def _plot_acceptance(named: Sequence[Named]) -> Canvas:
    canvas = Canvas(figsize=(10, 4), layout="constrained")
    for axes, figure in zip(canvas.subplots(1, 2), ("alpha_cond", "alpha_prefix"), strict=True):
        for name, result in named:
            values = [float("nan") if v is None else v for v in result.figures[figure]]
            axes.plot(range(len(values)), values, marker="o", label=name)
        axes.set(title=figure, xlabel="depth d (0 = first drafted token)", ylim=(0, 1.02))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small")
    return canvas


def _plot_speedup(named: Sequence[Named]) -> Canvas:
    """One panel a setting: bars of different settings do not compare."""
    groups = by_setting(named)
    bars = [len(group) + 2 for group in groups.values()]
    canvas = Canvas(figsize=(8, 0.4 * sum(bars) + 0.8 * len(bars)), layout="constrained")
    panels = canvas.subplots(len(groups), 1, squeeze=False, height_ratios=bars)[:, 0]
    for axes, (setting, group) in zip(panels, groups.items(), strict=True):
        _bars(axes, by_speed(group))
        axes.set_title(setting.split(";")[0], fontsize="small")
        axes.set_xlabel("decode speedup over the target alone")
    return canvas


def _bars(axes: Axes, ordered: Sequence[Named]) -> None:
    for place, (_, result) in enumerate(ordered):
        speed, interval = result.figures[SPEED] or 0.0, result.intervals.get(SPEED)
        # A percentile interval need not contain its point value.
        error = interval and [[max(speed - interval[0], 0.0)], [max(interval[1] - speed, 0.0)]]
        color = "tab:blue" if result.drafter.lossless else "lightgrey"
        axes.barh(place, speed, xerr=error, color=color)
    labels = [name + ("" if r.drafter.lossless else " (lossy)") for name, r in ordered]
    axes.set_yticks(range(len(ordered)), labels)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.invert_yaxis()
