"""Result files: written whole, read strictly."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from reporting import batch_point
from traces import bench, make_result, t1, timed

from headstart.eval.metrics import figures, prompt_sums
from headstart.eval.result import (
    Branch,
    Category,
    Counts,
    DrafterInfo,
    Run,
    Sample,
    prompt_row,
)
from headstart.eval.result_files import read_result, write_result


def result_and_rows():
    sums, done = bench(2, 4, seconds=0.2)
    category = Category(Counts(20, 100, 320), figures(sums))
    result = make_result(
        "eagle3", sums, done, categories={"code": category}, context_lengths={"33-64": category}
    )
    return result, [prompt_row(c, None, "code") for c in done]


def tampered(tmp_path: Path, change: Callable[[dict], object]) -> Path:
    path = write_result(tmp_path, *result_and_rows())
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def test_result_reads_back_equal(tmp_path):
    result, rows = result_and_rows()
    assert read_result(write_result(tmp_path / "new" / "run", result, rows)) == result


def test_result_is_found_in_its_directory(tmp_path):
    result, rows = result_and_rows()
    write_result(tmp_path, result, rows)
    assert read_result(tmp_path) == result


def test_result_with_nulls_reads_back_equal(tmp_path):
    done = [t1()]
    result = make_result("ngram", [prompt_sums(t1(), None)], done, equality=None)
    assert result.figures["speedup_geomean_e2e"] is None
    assert read_result(write_result(tmp_path, result, [])) == result


def test_rerun_replaces_both_files_and_leaves_nothing_else(tmp_path):
    result, rows = result_and_rows()
    write_result(tmp_path, result, rows)
    write_result(tmp_path, result, rows[:3])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["prompts.jsonl", "result.json"]
    assert len((tmp_path / "prompts.jsonl").read_text().splitlines()) == 3


def test_prompt_rows_hold_ids_rounds_and_both_clocks(tmp_path):
    result, _ = result_and_rows()
    write_result(tmp_path, result, [prompt_row(t1(), timed("t1", 9, 3.0, 0.5), "maths")])
    row = json.loads((tmp_path / "prompts.jsonl").read_text())
    assert row["token_ids"] == list(range(9))
    assert row["accepted"] == [2, 0, 3]
    assert row["stops"] == ["rejected"] * 3
    assert (row["plain_tokens"], row["plain_seconds"], row["category"]) == (9, 3.0, "maths")


def test_not_a_number_is_refused_and_nothing_is_replaced(tmp_path):
    result, rows = result_and_rows()
    path = write_result(tmp_path, result, rows)
    result.figures["verify_ratio"] = float("nan")
    before = path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_result(tmp_path, result, rows)
    assert path.read_text() == before


def test_missing_key_is_named(tmp_path):
    path = tampered(tmp_path, lambda d: d["sampling"].pop("top_p"))
    with pytest.raises(ValueError, match=r"result\.json: result\.sampling: missing top_p"):
        read_result(path)


def test_a_file_older_than_an_optional_field_is_read(tmp_path):
    path = tampered(tmp_path, lambda d: [d.pop(k) for k in ("branches", "samples", "suites")])
    assert read_result(path).branches == []


def test_branches_samples_and_batch_points_read_back_equal(tmp_path):
    result, rows = result_and_rows()
    result.branches = [Branch([0, 1], [4, 2], [3, 0])]
    result.samples = [Sample("p0", "code", "hello", [Run("drafted", " world", 2)])]
    result.batch_points = [batch_point(8, 1.4), batch_point(16, 1.1)]
    assert read_result(write_result(tmp_path, result, rows)) == result


def test_unknown_key_is_named(tmp_path):
    path = tampered(tmp_path, lambda d: d["drafter"].update(colour="red"))
    with pytest.raises(ValueError, match=r"result\.drafter: missing nothing, unknown colour"):
        read_result(path)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (3, "schema_version=3: written by an older headstart, this one reads 4; run headstart eva"),
        (5, "schema_version=5: written by a newer headstart, this one reads 4; upgrade headstart"),
        (None, "schema_version=None: not a result; give one that headstart eval wrote"),
        ("4", "schema_version='4': not a result"),
    ],
)
def test_another_schema_version_is_refused_with_its_cure(tmp_path, found, message):
    path = tampered(tmp_path, lambda d: d.update(schema_version=found))
    with pytest.raises(ValueError, match=rf"result\.json: {message}"):
        read_result(path)


def test_the_rows_of_this_schema_say_where_each_turn_begins(tmp_path):
    """What schema 3 added: a reader of `token_ids` alone cannot tell the turns apart."""
    write_result(tmp_path, *result_and_rows())
    row = json.loads((tmp_path / "prompts.jsonl").read_text().splitlines()[0])
    assert sum(row["turn_tokens"]) == len(row["token_ids"])


def test_wrong_type_is_named_with_its_value(tmp_path):
    path = tampered(tmp_path, lambda d: d["counts"].update(rounds="many"))
    with pytest.raises(ValueError, match=r"result\.counts\.rounds='many': expected int"):
        read_result(path)


def test_figure_without_a_definition_is_refused(tmp_path):
    path = tampered(tmp_path, lambda d: d["figures"].update(acc=0.9))
    with pytest.raises(ValueError, match="figures: missing nothing, unknown acc"):
        read_result(path)


def test_interval_of_an_unknown_figure_is_refused(tmp_path):
    path = tampered(tmp_path, lambda d: d["intervals"].update(acc=[0.1, 0.2]))
    with pytest.raises(ValueError, match="intervals: unknown acc"):
        read_result(path)


def test_a_file_that_is_no_result_is_refused(tmp_path):
    path = tmp_path / "result.json"
    path.write_text("[1, 2]")
    with pytest.raises(ValueError, match="found list"):
        read_result(path)


def test_lossy_scheme_cannot_be_labelled_lossless():
    with pytest.raises(ValueError, match="lossless=True but verify_scheme='typical' is lossy"):
        DrafterInfo("medusa", "medusa", "static:a", "typical", True)


def test_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="drafter.verify_scheme='e'"):
        DrafterInfo("medusa", "medusa", "static:a", "e", True)
