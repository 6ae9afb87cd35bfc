"""Lines between the explorer's lanes: each race with both launches and the missing call."""

import pytest
import torch

import gputrace
from gputrace.events import CATEGORIES
from gputrace.explorer import columns, legend
from gputrace.figures.lanes import NAMES
from virtualgpu import RaceWarning


def lane_of(told, end):
    return told["lanes"][end[0]]["name"]


@pytest.mark.filterwarnings("ignore::virtualgpu.RaceWarning")
def test_a_race_has_both_launches_their_lines_and_the_missing_call(machine):
    side = torch.cuda.Stream()
    with gputrace.record(timeline=True) as trace:
        x = torch.ones(512, 512, device="cuda")
        with torch.cuda.stream(side):
            x + 1
    told = columns.of(trace)
    [race] = [link for link in told["links"] if link["kind"] == "race"]
    assert [lane_of(told, end) for end in race["ends"]] == ["default stream", "stream 1"]
    (_, start, end), (_, began, _) = race["ends"]
    assert start < end and began >= start
    rows = dict(race["told"])
    assert rows["race 1"] == "stale read"
    assert "test_links.py" in rows["first"] and "torch.ones(512, 512" in rows["first"]
    assert "stream 1 of cuda:0" in rows["second"] and "x + 1" in rows["second"]
    wanted = "torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()), before test_"
    assert rows["missing"].startswith(wanted)


@pytest.mark.filterwarnings("ignore::virtualgpu.RaceWarning")
def test_a_race_with_the_host_ends_in_the_hosts_lane(machine):
    pinned = torch.empty(1000, pin_memory=True)
    with gputrace.record(timeline=True) as trace:
        pinned.copy_(torch.ones(1000, device="cuda"), non_blocking=True)
        pinned.sum()
    told = columns.of(trace)
    [race] = [link for link in told["links"] if link["kind"] == "race"]
    assert lane_of(told, race["ends"][1]) == "host"
    assert "default_stream().synchronize()" in dict(race["told"])["missing"]


def test_the_missing_call_orders_the_two(machine, recwarn):
    side = torch.cuda.Stream()
    x = torch.ones(512, 512, device="cuda")
    with torch.cuda.stream(side):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
        x + 1
    assert not [each for each in recwarn if each.category is RaceWarning]


def test_a_wait_of_a_stream_is_a_line_between_two_lanes(machine):
    side = torch.cuda.Stream()
    with gputrace.record(timeline=True) as trace:
        x = torch.ones(512, 512, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x + 1
    told = columns.of(trace)
    waits = [link for link in told["links"] if link["kind"] == "wait"]
    lanes = [[lane_of(told, end) for end in link["ends"]] for link in waits]
    assert ["default stream", "stream 1"] in lanes
    assert not [link for link in told["links"] if link["kind"] == "race"]


def test_every_word_of_the_legend_is_explained(training):
    assert set(legend.SPANS) == {*NAMES.values(), "phase", "rank waits"}
    assert set(legend.CATEGORIES) == set(CATEGORIES)
    told = columns.of(training)
    for entry in told["looks"] + told["categories"] + told["lineLooks"] + told["memoryWords"]:
        assert entry["means"].endswith(".")
