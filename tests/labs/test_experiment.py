"""Runs of experiments."""

import pytest

from benchmarks.measure import EXPERIMENTS
from labkit.labs.experiment import Run, badge, checked_count, checked_sizes, collect


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
