"""Tables of speedups by group of prompts: what is marked, in which order, and how many prompts."""

import pytest
from traces import bench, make_result

from headstart.eval.compare import Named, settings_of
from headstart.eval.report_matrix import Column, columns_of_prompts, columns_of_settings, matrix
from headstart.eval.report_sections import grouped
from headstart.eval.result import Category, Counts, DrafterInfo, Result

SPEED = "speedup_ratio_of_sums_decode"


def row(name: str, family: str = "eagle3", scheme: str = "a1") -> Named:
    info = DrafterInfo(name, family, "chain:4", scheme, scheme != "typical")
    return name, make_result(name, *bench(2, 4, seconds=0.2), drafter=info)


def parted(named: Named, speeds: dict[str, float], prompts: int) -> Named:
    name, result = named
    result.categories = {
        label: Category(
            Counts(prompts, 90, 90),
            result.figures | {SPEED: speed},
            {SPEED: [speed - 0.125, speed + 0.125]},
        )
        for label, speed in speeds.items()
    }
    return name, result


def categories(result: Result) -> dict[str, Category]:
    return result.categories


def test_a_column_says_of_how_many_prompts_it_is_and_few_give_no_verdict():
    for prompts, below in ((19, ""), (20, " BELOW")):
        group = [
            parted(row("head"), {"code": 1.2}, prompts),
            parted(row("lookup", "lookup"), {"code": 1.2}, prompts),
        ]
        table = matrix(columns_of_prompts(group, categories), group, "category")
        assert table.header == ["drafter", f"code (n={prompts})"]
        assert table.rows == [["head", f"1.20{below}"], ["lookup", "1.20"]]
        assert "of 20 prompts or more" in table.caption


def test_a_slower_prompt_lookup_is_not_below_another():
    columns = [Column("code", 30, {"lookup8": 1.4, "lookup3": 1.1}, 1.4)]
    rows = [row("lookup8", "lookup"), row("lookup3", "lookup")]
    assert matrix(columns, rows, "suite").rows == [["lookup8", "1.40"], ["lookup3", "1.10"]]


def test_lossy_rows_are_marked_unshaded_and_last():
    columns = [Column("code", 30, {"typical": 3.0, "exact": 1.6, "slow": 0.9}, None)]
    rows = [row("typical", scheme="typical"), row("exact"), row("slow")]
    table = matrix(columns, rows, "suite")
    assert [line[0] for line in table.rows] == ["exact", "slow", "typical (lossy)"]
    assert table.kinds == ["", "", "lossy"]
    assert table.shades == [[1.0], [0.0], [None]]
    assert "BELOW" not in table.caption


def test_rows_known_in_more_columns_come_first():
    speeds = {"everywhere": 1.2, "once": 2.0}
    columns = [Column("a", 30, speeds, None), Column("b", 30, {"everywhere": 1.3}, None)]
    table = matrix(columns, [row("once"), row("everywhere")], "setting")
    assert table.rows == [["everywhere", "1.20", "1.30"], ["once", "2.00", "-"]]


def test_a_lossy_lookup_is_no_rival():
    rows = [row("lookup", "lookup", "typical"), row("head")]
    group = [
        parted(named, {"code": speed}, 30) for named, speed in zip(rows, (2.0, 1.5), strict=True)
    ]
    assert columns_of_prompts(group, categories)[0].lookup is None


def test_columns_of_settings_count_their_prompts():
    (column,) = columns_of_settings(settings_of([row("head")[1]]))
    assert (column.prompts, column.lookup) == (20, None)
    assert column.speeds == pytest.approx({"head": 1.5})


def test_tables_of_groups_print_the_intervals_that_there_are():
    *_, table = grouped([parted(row("head"), {"code": 1.5}, 20)], "s", "category", categories)
    assert table.rows[0][5] == "1.50 [1.38, 1.62]"
    assert table.rows[0][4] == "3.00"
