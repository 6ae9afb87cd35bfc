"""Virtual GPUs lead to the same conclusions as the recordings of real GPUs."""

import pytest

from benchmarks import conclusions, measure, measured_report
from labkit.labs import recorded_result

RECORDED = [name for name in measure.EXPERIMENTS if recorded_result(name)]
# The tests of lesson 13 run all its claims on virtual GPUs.
TESTED_ELSEWHERE = {"articles_on_trial"}
VIRTUAL = [
    name for name in RECORDED if name not in {*measured_report.NOT_VIRTUAL, *TESTED_ELSEWHERE}
]


def test_every_experiment_has_conclusions():
    assert set(conclusions.CONCLUSIONS) == set(measure.EXPERIMENTS)
    assert all(conclusions.CONCLUSIONS.values())


@pytest.mark.parametrize("name", RECORDED)
def test_they_are_true_of_what_was_recorded(name):
    assert [
        sentence for sentence, true in conclusions.drawn(recorded_result(name)).items() if not true
    ] == []


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("name", VIRTUAL)
def test_they_are_true_of_virtual_gpus(name):
    experiment = measure.EXPERIMENTS[name]
    virtual = measured_report.virtually(name, experiment.function, experiment.gpus, "NVIDIA H200")
    assert [sentence for sentence, true in conclusions.drawn(virtual).items() if not true] == []


@pytest.mark.parametrize(
    ("name", "column", "change", "false"),
    [
        (
            "copy_speed",
            "seconds",
            {"memory": "pinned", "seconds": 1.0},
            "pinned memory is faster than pageable",
        ),
        (
            "data_parallel_step",
            "seconds",
            {"gpus": 4, "model": "large", "seconds": 1.0},
            "faster than one GPU for the large",
        ),
    ],
)
def test_they_are_not_true_of_everything(name, column, change, false):
    recording = recorded_result(name)
    for row in recording.rows:
        if all(row[key] == value for key, value in change.items() if key != column):
            row[column] = change[column]
    assert any(
        false in sentence for sentence, true in conclusions.drawn(recording).items() if not true
    )
