"""Which evaluation of a run is its best: by the tokens a round that the real verifier gives."""

import math
from typing import Any

BEST_BY = {
    "tau": ("heldout/tau_with_bonus_micro", 1),
    "tau_predicted": ("heldout/tau_predicted", 1),
    "loss": ("heldout/loss", -1),
}
"""train.best_metric -> (figure of an evaluation, 1 where more of it is better)."""


def new_best(
    best: dict[str, Any] | None, figures: dict[str, float], metric: str, step: int
) -> dict[str, Any] | None:
    """Return the best evaluation after this one, the earlier of two alike; None before the first.

    A figure that was not evaluated, or is not a number, is never the best.
    """
    name, sign = BEST_BY[metric]
    value = figures.get(name, math.nan)
    if not math.isfinite(value) or (best is not None and sign * value <= sign * best["value"]):
        return best
    return {"name": name, "value": value, "step": step}
