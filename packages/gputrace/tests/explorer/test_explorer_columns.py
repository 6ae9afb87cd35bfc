"""The explorer's columns: every span and block with its times, its line and its place."""

import numpy as np
import torch

import gputrace
from gputrace.events import ALLOC, CATEGORIES
from gputrace.explorer import columns

MIB = 1 << 20


def lane(told, name):
    return next(each for each in told["lanes"] if each["name"] == name)


def test_every_span_has_its_times_name_and_line(machine):
    with gputrace.record(timeline=True) as trace:
        x = torch.randn(256, 256, device="cuda")
        y = x @ x
        y.sum().item()
    told = columns.of(trace)
    stream = lane(told, "cuda:0 default" if len(trace.devices) > 1 else "default stream")
    mine = trace.spans.device == 0
    assert np.cumsum(stream["start"]).tolist() == np.round(trace.spans.start[mine] * 1e9).tolist()
    assert stream["duration"] == np.round(trace.spans.duration[mine] * 1e9).tolist()
    names = [told["names"][number] for number in stream["called"]]
    assert names == [trace.spans.names[number] for number in trace.spans.name[mine]]
    line = told["lines"][told["users"][stream["stack"][names.index("mm")]]]
    assert line[0].startswith("test_explorer_columns.py:") and line[2] == "y = x @ x"
    assert {told["looks"][number]["name"] for number in lane(told, "host")["look"]} == {
        "launch",
        "host waits",
    }
    assert told["end"] == round(trace.end * 1e9)


def test_an_allocation_names_the_operator_that_it_was_for(machine):
    with gputrace.record(timeline=True) as trace:
        x = torch.ones(256, 256, device="cuda")
        y = x + 1
        z = y @ x
    told = columns.of(trace)
    assert {told["names"][number] for number in told["lanes"][-1]["operator"] if number >= 0} == {
        "fill_",
        "add",
        "mm",
    } and z.is_cuda


def test_a_block_lies_where_it_lay_and_knows_who_made_and_freed_it(training):
    memory = columns.of(training)["lanes"][-1]
    blocks = memory["blocks"]
    assert blocks["bytes"] == 200 * MIB
    assert blocks["place"] == [0, 10 * MIB, 70 * MIB] and blocks["size"] == [
        10 * MIB,
        60 * MIB,
        20 * MIB,
    ]
    assert [CATEGORIES[number] for number in blocks["category"]] == [
        "parameters",
        "activations",
        "gradients",
    ]
    assert blocks["birth"] == [1, 2, 3] and blocks["death"] == [-1, 4, -1]
    assert np.cumsum(memory["time"])[blocks["birth"]].tolist() == [1_000_000, 2_000_000, 4_000_000]
    assert np.cumsum(memory["rise"]).max() == training.peak and memory["reserve"][0] == 200 * MIB


def test_what_was_there_before_is_there_from_the_start(machine):
    before = torch.ones(MIB, device="cuda")
    with gputrace.record(timeline=True) as trace:
        del before
        after = torch.ones(2 * MIB, device="cuda")
    memory = columns.of(trace)["lanes"][-1]
    blocks = memory["blocks"]
    assert (
        blocks["birth"][0] == -1
        and blocks["size"][0] == 4 * MIB
        and memory["rise"][blocks["death"][0]] == -4 * MIB
    )
    assert blocks["size"][-1] == after.nbytes and blocks["death"][-1] == -1
    assert sum(memory["base"]) == 4 * MIB


def test_without_a_timeline_there_is_the_memory_alone(training):
    assert [each["what"] for each in columns.of(training)["lanes"]] == ["memory"]


def test_nothing_happened(trace_of):
    assert columns.of(trace_of([]))["lanes"] == []


def test_both_ends_agree_on_how_many_there_are(machine):
    with gputrace.record(timeline=True) as trace:
        for device in range(2):
            torch.ones(1000, device=f"cuda:{device}")
    told = columns.of(trace)
    assert [each["name"] for each in told["lanes"] if each["what"] == "memory"] == [
        "cuda:0 ",
        "cuda:1 ",
    ]
    born = sum(len(each["blocks"]["size"]) for each in told["lanes"] if each["what"] == "memory")
    assert born == (trace.events.action == ALLOC).sum() == 2
