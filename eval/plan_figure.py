"""The plot of a plan: what drafting buys over batch size, and where a pass stops being free."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from headstart.eval.plan_make import Plan
from headstart.eval.roofline import step_time


def draw(plan: Plan, title: str) -> Canvas:
    """Return the plot: speedup over batch of each draft, and the time of a pass by its tokens."""
    canvas = Canvas(figsize=(11, 4.2), layout="constrained")
    left, right = canvas.subplots(1, 2)
    canvas.suptitle(title, fontsize="medium")
    _draw_speedup(plan, left)
    _draw_steps(plan, right)
    return canvas


def _draw_speedup(plan: Plan, axes: Axes) -> None:
    batches = [row.batch for row in plan.batches]
    for draft in plan.drafts:
        speeds = [row.rounds[draft.label].speedup for row in plan.batches]
        axes.plot(batches, speeds, marker="o", markersize=3, label=draft.label)
    best = [row.best_speedup for row in plan.batches]
    axes.plot(batches, best, color="black", linestyle=":", label="best, or none")
    axes.axhline(1.0, color="black", linewidth=1)
    if plan.largest_batch < batches[-1]:
        last = max(plan.largest_batch, batches[0])  # none fits: a scale by powers has no 0
        axes.axvspan(last, batches[-1], color="lightgrey", label="does not fit")
    axes.set(xlabel="batch (rows)", ylabel="speedup over plain decoding", ylim=(0, None))
    _powers_of_two(axes, batches)
    axes.legend(fontsize="small")


def _draw_steps(plan: Plan, axes: Axes) -> None:
    last = max(8 * plan.knee_tokens, 64)
    tokens = [2 ** (i / 4) for i in range(200) if 2 ** (i / 4) <= last]
    steps = [
        step_time(plan.target_work, n, plan.machine, rows=1, context=plan.context) for n in tokens
    ]
    terms = {
        "one row's pass": [step.total for step in steps],
        "reading weights": [step.weights for step in steps],
        "computing": [step.compute for step in steps],
    }
    for (label, seconds), style in zip(terms.items(), ("-", "--", "-."), strict=True):
        axes.plot(tokens, [1e3 * s for s in seconds], style, label=label)
    axes.axvline(plan.knee_tokens, color="black", linewidth=1)
    at_knee = f"knee: {plan.knee_tokens:.0f} tokens "
    axes.annotate(at_knee, (plan.knee_tokens, 0.94), xycoords=("data", "axes fraction"), ha="right")
    axes.set(xlabel="tokens of a pass", ylabel="milliseconds", yscale="log")
    axes.set_ylim(bottom=1e3 * min(step.total for step in steps) / 10)
    _powers_of_two(axes, [2**i for i in range(0, 20, 2) if 2**i <= last])
    axes.legend(fontsize="small", loc="lower right")


def _powers_of_two(axes: Axes, ticks: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
