"""Against prompt lookup: by the interval of the difference where one run measured both."""

from dataclasses import replace

import pytest
from traces import bench, make_result

from headstart.eval.result import Category, Counts, DrafterInfo, Equality, Lead, Result
from headstart.eval.standing import behind_on, fault, lookup_speeds, no_head_faster, standing

SPEED = "speedup_ratio_of_sums_decode"


def head(own: list[float] | None = None, **changes: object) -> Result:
    """A head at 1.5 times plain, with its own interval."""
    intervals = {SPEED: own or [1.4, 1.6]}
    return make_result("head", *bench(2, 4, seconds=0.2), intervals=intervals, **changes)


@pytest.mark.parametrize(
    ("difference", "found"),
    [([0.05, 0.5], "ahead"), ([-0.05, 0.5], "unclear"), ([0.0, 0.5], "unclear"), (None, "unclear")],
)
def test_the_interval_of_the_difference_decides_and_not_the_rows_own(difference, found):
    # The row's own interval would say the opposite of the first and of the second.
    own = [1.1, 1.9] if found == "ahead" else [1.4, 1.6]
    row = head(own, over_lookup=Lead("lookup", difference))
    assert standing(row, {"": 1.2}) == found


def test_of_separate_runs_the_rows_own_interval_decides():
    assert standing(head([1.3, 1.6]), {"": 1.2}) == "ahead"
    assert standing(head([1.1, 1.6]), {"": 1.2}) == "unclear"


def test_a_value_at_or_below_lookup_is_behind_whatever_the_interval():
    row = head(over_lookup=Lead("lookup", [0.1, 0.2]))
    assert standing(row, {"": row.figures[SPEED]}) == "behind"


@pytest.mark.parametrize(("prompts", "found"), [(19, []), (20, ["code"])])
def test_a_suite_of_few_prompts_calls_nothing_behind(prompts, found):
    row = head()
    row.suites = {"code": Category(Counts(prompts, 9, 9), row.figures)}
    lookups = {"": 1.2, "code": 1.6}
    assert behind_on(row, lookups) == found
    assert standing(row, lookups) == ("partly" if found else "ahead")


def test_prompt_lookup_is_behind_itself_nowhere():
    row = head(drafter=DrafterInfo("lookup", "lookup", "chain:4", "a1", True))
    row.suites = {"code": Category(Counts(20, 9, 9), row.figures)}
    assert behind_on(row, lookup_speeds([("lookup", row)])) == []


def test_no_head_is_faster_only_where_all_of_them_are_behind():
    slow, fast = ("slow", head()), ("fast", head())
    assert no_head_faster([slow], {"": 1.6})
    assert not no_head_faster([slow], {"": 1.2})
    fast[1].figures = fast[1].figures | {SPEED: 1.7}
    assert not no_head_faster([slow, fast], {"": 1.6})
    assert not no_head_faster([slow], {})


@pytest.mark.parametrize(
    ("dtype", "identical", "found"),
    [("float32", 0.5, "unequal"), ("float32", 1.0, ""), ("bfloat16", 0.5, "")],
)
def test_unequal_outputs_are_a_fault_in_full_precision_only(dtype, identical, found):
    row = head(equality=Equality(identical))
    row.provenance = replace(row.provenance, dtype=dtype)
    assert fault(row) == found
