"""Test the step of DistributedDataParallel: the experiment, the figure and the lab."""

import pytest

from gpulessons.lesson_10.labs import BucketsLab
from gpulessons.lesson_10.labs.buckets import (
    ALL_REDUCE,
    COLUMNS,
    bucket_step,
    plot_bucket_step,
    recorded_seconds,
)
from labkit.labs import Result, collect

from ...learner import predict_and_run as run

WORK = [
    ["forward", 0.0, 1e-3],
    ["backward", 1e-3, 3e-3],
    ["optimizer", 6e-3, 2e-3],
    [ALL_REDUCE, 2e-3, 1e-3],
    [ALL_REDUCE, 4e-3, 2e-3],
]


def step(count=2, work=WORK, **parameters) -> Result:
    """Return a made-up step of 8 ms on `count` ranks.

    Each rank computes for 6 ms and sends for 3 ms. It also computes during 1 ms of the sending.
    """
    rows = [
        {
            "rank": rank,
            "seconds": 8e-3,
            "computing": 6e-3,
            "sending": 3e-3,
            "hidden": 1e-3,
            "work": work,
        }
        for rank in range(count)
    ]
    parameters = {"width": 4096, "bucket": "25 MiB", "ranks": 2, "link": "NVLink"} | parameters
    return Result("bucket_step", parameters, COLUMNS, rows, "measured on paper")


@pytest.mark.slow
def test_buckets_hide_what_one_bucket_cannot_and_the_slow_link_hides_least():
    def measured(**chosen):
        [first, second] = collect(bucket_step(**chosen)).rows
        assert first["seconds"] == pytest.approx(second["seconds"], rel=0.01)
        return first

    many, one, slow = measured(), measured(bucket="one bucket"), measured(link="PCIe")
    assert [sum(what == ALL_REDUCE for what, *_ in row["work"]) for row in (many, one, slow)] == [
        8,
        1,
        8,
    ]
    assert many["seconds"] < one["seconds"] < slow["seconds"]
    assert one["hidden"] == 0
    assert many["hidden"] > 0.8 * many["sending"]
    assert slow["hidden"] < 0.3 * slow["sending"]
    ends = [start + took for _, start, took in many["work"]]
    assert min(start for _, start, _ in many["work"]) >= 0
    assert max(ends) == pytest.approx(many["seconds"], rel=0.01)
    recorded = recorded_seconds(collect(bucket_step()))
    assert len(recorded) == 12 and 0.8 * min(recorded) < many["seconds"] < 1.2 * max(recorded)


def test_what_is_no_choice_is_refused_before_a_rank_starts():
    for bad, there in (
        ({"width": 5}, "1024, 2048, 4096"),
        ({"bucket": "2 MiB"}, "one bucket"),
        ({"ranks": 3}, "2, 4, 8"),
        ({"link": ""}, "PCIe"),
    ):
        with pytest.raises(ValueError, match=rf"is not available\. Choose one of .*{there}"):
            bucket_step(**bad)


@pytest.mark.parametrize(
    "other", [{"width": 2048}, {"ranks": 4}, {"bucket": "1 MiB"}, {"link": "PCIe"}]
)
def test_a_recording_belongs_to_its_own_choices(other):
    assert len(recorded_seconds(step())) == 12
    assert recorded_seconds(step(**other)) == []


def test_the_words_hold_finding_ranks_prediction_recording_and_badge():
    assert plot_bucket_step(step(), 5).alt == (
        "The step takes 8 ms: 33% of the sending is hidden behind computing. "
        "Each rank computes for 6 ms; of 3 ms in which it sends "
        "2 messages, it computes 1 ms too. Predicted: 5 ms. "
        "Recorded on two H200s, 12 runs: 13.5 to 13.9 ms. Measured on paper."
    )
    assert "This was not recorded on real GPUs." in plot_bucket_step(step(link="PCIe")).alt


def test_each_rank_has_two_lanes_and_prediction_and_recording_stand_above(drawn):
    plot_bucket_step(step(), 5)
    (axes,) = drawn[-1].axes
    bars = [(bar.get_x(), bar.get_width()) for bar in axes.patches[: 2 * len(WORK)]]
    assert bars == [pytest.approx((start, took)) for _ in range(2) for _, start, took in WORK]
    middles = {
        round(bar.get_y() + bar.get_height() / 2, 2) for bar in axes.patches[: 2 * len(WORK)]
    }
    assert len(middles) == 4
    band = axes.patches[-1]
    assert (band.get_x(), band.get_x() + band.get_width()) == pytest.approx((13.537e-3, 13.854e-3))
    (marker,) = axes.lines
    assert marker.get_markerfacecolor() == "none" and list(marker.get_xdata()) == [5e-3]
    assert (
        drawn[-1].texts[-1].get_text() == "measured on paper  ·  grey: recorded on 2× NVIDIA H200"
    )


def test_a_stopped_run_is_drawn_without_a_finding():
    assert (
        plot_bucket_step(step(count=0), 5).title
        == "Not measured yet: a step under DistributedDataParallel"
    )


@pytest.fixture
def lab(monkeypatch):
    """A lab whose experiment is replaced, so that it starts no processes."""
    lab = BucketsLab()
    monkeypatch.setattr(
        "gpulessons.lesson_10.labs.buckets._points",
        lambda width, bucket, ranks, nvlink: iter(step(ranks).rows),
    )
    return lab


def test_prediction_and_result_come_together(lab):
    said = run(lab, "16")
    assert (
        "The step takes 8 ms; you predicted 16, which is 2.0 times too high. "
        "Each rank computes for 6 ms" in said
    )
    assert "Recorded on two H200s, 12 runs: 13.5 to 13.9 ms." in said
    assert "Predicted: 16 ms." in lab.picture.value and len(lab.result.rows) == 2
    assert "A good prediction!" in run(lab, "8")


def test_choices_change_the_experiment_and_ask_for_a_new_prediction(lab):
    run(lab, "8")
    lab.link.value = "PCIe"
    assert lab.run_button.disabled and "First predict" in lab.message.value
    lab.ranks.value, lab.width.value, lab.bucket.value = 4, 1024, "one bucket"
    assert "This was not recorded on real GPUs." in run(lab, "8")
    assert lab.result.parameters == {
        "width": 1024,
        "bucket": "one bucket",
        "ranks": 4,
        "link": "PCIe",
    }
    assert len(lab.result.rows) == 4


def test_a_run_that_stops_before_its_first_rank_leaves_the_prediction_open(lab):
    assert (
        lab.verdict(step(count=0), 3)
        == "No rank was measured, so your prediction of 3 ms stays open. Press Run to try again."
    )
