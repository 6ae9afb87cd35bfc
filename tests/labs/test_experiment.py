"""Runs, results and their tables."""

import pytest

from benchmarks.measure import EXPERIMENTS
from labkit.labs.experiment import Result, Run, badge, checked_count, checked_sizes, collect

COLUMNS = {"size": "bytes", "memory": "", "seconds": "seconds"}
ROWS = [
    {"size": 4096, "memory": "pinned", "seconds": 1.16e-5},
    {"size": 4096, "memory": "pageable", "seconds": 1.8e-5},
    {"size": 3 << 20, "memory": "pinned", "seconds": 0.0024},
]


def result(**changes):
    fields = {"name": "copies", "parameters": {"sizes": [4096, 3 << 20]}, "columns": COLUMNS, "rows": ROWS, "badge": "measured on paper"}
    return Result(**(fields | changes))


def test_the_table_gives_units_and_the_badge():
    assert repr(result().table()).splitlines() == [
        "measured on paper",
        "size   memory    seconds",
        "4 KiB  pinned    11.6 µs",
        "4 KiB  pageable  18 µs",
        "3 MiB  pinned    2.4 ms",
    ]
    assert ">2.4 ms</td>" in result().table()._repr_html_()


def test_a_column_can_be_narrowed_to_some_rows():
    assert result().column("size") == [4096, 4096, 3 << 20]
    assert result().column("seconds", memory="pinned", size=4096) == [1.16e-5]


def test_a_column_that_is_not_there_names_those_that_are():
    with pytest.raises(KeyError, match="no column 'speed'; it has size, memory, seconds"):
        result().column("speed")
    with pytest.raises(KeyError, match="no column 'kind'"):
        result().column("size", kind="pinned")


def test_a_row_with_other_columns_is_refused():
    with pytest.raises(ValueError, match="a row has the columns size; expected size, memory, seconds"):
        result(rows=[{"size": 1}])


def test_json_gives_the_same_result_back():
    made = result(origin={"machine": "NVIDIA H200", "driver": None})
    assert Result.from_json(made.to_json()) == made


def test_the_text_of_a_result_is_one_line():
    assert repr(result()) == "Result of copies: 3 rows, measured on paper"


def run_of(points):
    return Run("copies", {}, {"size": "bytes"}, "measured on paper", 3, points)


def test_a_run_is_stepped_and_gives_what_it_has():
    run = run_of(iter([{"size": 1}, {"size": 2}, {"size": 3}]))
    assert next(run) == {"size": 1}
    assert run.result().column("size") == [1]
    assert collect(run).column("size") == [1, 2, 3]


def test_closing_a_run_ends_its_generator():
    let_go = []

    def points():
        try:
            yield {"size": 1}
            yield {"size": 2}
        finally:
            let_go.append(True)

    run = run_of(points())
    next(run)
    run.close()
    assert let_go == [True]
    assert list(run) == []


def test_without_a_machine_there_is_no_badge():
    with pytest.raises(RuntimeError, match=r"no GPU is in use: labkit.use\(gpus=1\)"):
        badge()


def test_sizes_are_sorted_and_each_taken_once():
    assert checked_sizes("sizes", (8, 2, 8), 8) == [2, 8]


@pytest.mark.parametrize("sizes", [(), 5, None, "12", [0], [-1], [9], [1.5], [True]])
def test_other_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="^sizes=.*one or more whole numbers from 1 to 8"):
        checked_sizes("sizes", sizes, 8)


@pytest.mark.parametrize("count", [0, -1, 1.0, "3", True, None])
def test_other_counts_are_refused(count):
    with pytest.raises(ValueError, match="^repeats=.*a whole number, 1 or more"):
        checked_count("repeats", count)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_without_a_gpu_says_so(name):
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        EXPERIMENTS[name].function()
