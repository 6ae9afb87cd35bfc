"""The recordings that ship with the kit."""

import datetime

import pytest

from labkit import courses
from labkit.labs.experiment import Result, recorded_result

RECORDINGS = sorted(file.stem for file in courses.files("recordings/*.json"))


@pytest.mark.parametrize("stem", RECORDINGS)
def test_each_recording_says_where_and_when_it_was_made(stem):
    name, gpu = stem.rsplit("_", 1)
    recording = recorded_result(name, gpu)
    assert recording.name == name
    assert recording.badge.startswith(
        f"recorded on {recording.origin['machine'].replace('x ', '× ')}, torch 2."
    )
    assert {"machine", "torch", "cuda", "driver", "date"} <= set(recording.origin)
    assert datetime.date.fromisoformat(recording.origin["date"]).year >= 2026
    assert all(row["seconds"] > 0 for row in recording.rows if "seconds" in row)


def test_the_copies_of_an_h200_are_there():
    recording = recorded_result("copy_speed")
    assert "copy_speed_h200" in RECORDINGS
    assert recording.column(
        "seconds", size=1 << 24, memory="pinned", direction="h2d"
    ) == pytest.approx([0.31e-3], rel=0.1)
    assert all(
        row["bytes_per_second"] == pytest.approx(row["size"] / row["seconds"])
        for row in recording.rows
    )


def test_what_was_not_recorded_is_none():
    assert recorded_result("copy_speed", "T4") is None
    assert recorded_result("nothing") is None


def asked(**parameters) -> Result:
    columns = {
        "size": "bytes",
        "memory": "",
        "direction": "",
        "seconds": "seconds",
        "bytes_per_second": "bytes per second",
    }
    return Result("copy_speed", parameters, columns, [], "measured on paper")


@pytest.mark.parametrize("stem", RECORDINGS)
def test_a_result_of_the_recorded_parameters_finds_the_whole_recording(stem):
    name, gpu = stem.rsplit("_", 1)
    recording = recorded_result(name, gpu)
    assert recording.recorded(gpu).rows == recording.rows


def test_a_result_finds_the_recorded_points_that_it_asked_for():
    recorded = asked(sizes=[4096, 5000, 1 << 24], repeats=7).recorded()
    assert set(recorded.column("size")) == {4096, 1 << 24}
    assert recorded.origin == recorded_result("copy_speed").origin


def test_other_points_parameters_or_experiments_find_none():
    assert asked(sizes=[5000]).recorded() is None
    assert asked(sizes=[4096], dtype="float16").recorded() is None
    assert Result("nothing", {}, {"size": ""}, [], "").recorded() is None
