"""The flame graph: the bytes of the calls add up, and wrappers and small calls are left out."""

import torch
from torch import nn

import gputrace
from gputrace.events import SourceLine
from gputrace.explorer.flames import UNKNOWN, flame_of

MIB = 1 << 20


def line(name, number, function, text=""):
    return SourceLine(name, number, function, text)


def test_calls_are_wide_as_their_memory(trace_of):
    outer = line("/home/me/train.py", 9, "<module>", "train()")
    stacks = [
        (),
        (line("/home/me/train.py", 3, "train", "a = make()"), outer),
        (line("/home/me/train.py", 4, "train", "b = make()"), outer),
    ]
    rows = [
        (0.0, "segment_alloc", 100, 200),
        (0.1, "alloc", 100, 10, 0, 1, 0),
        (0.2, "alloc", 110, 30, 0, 2, 0),
        (0.3, "alloc", 140, 2, 0, 0, 0),
    ]
    root = flame_of(trace_of(rows, stacks=stacks), 0)
    assert root["bytes"] == 42 * MIB
    first, unknown = root["calls"]
    assert (first["name"], first["bytes"]) == ("train.py:9  train()", 40 * MIB)
    assert [(call["name"], call["bytes"] // MIB) for call in first["calls"]] == [
        ("train.py:4  b = make()", 30),
        ("train.py:3  a = make()", 10),
    ]
    assert (unknown["name"], unknown["bytes"], unknown["yours"]) == (UNKNOWN, 2 * MIB, False)


def test_code_that_runs_the_script_is_left_out(trace_of):
    stacks = [
        (),
        (line("/home/me/train.py", 3, "<module>", "x = make()"), line("<string>", 6, "<module>")),
    ]
    rows = [(0.0, "segment_alloc", 100, 200), (0.1, "alloc", 100, 10, 0, 1, 0)]
    (first,) = flame_of(trace_of(rows, stacks=stacks), 0)["calls"]
    assert first["name"] == "train.py:3  x = make()"


def test_small_calls_are_left_out(trace_of):
    stacks = [(), (line("/home/me/a.py", 1, "f", "f()"),), (line("/home/me/a.py", 2, "f", "g()"),)]
    rows = [
        (0.0, "segment_alloc", 100, 3000),
        (0.1, "alloc", 100, 2000, 0, 1, 0),
        (0.2, "alloc", 2100, 1, 0, 2, 0),
    ]
    root = flame_of(trace_of(rows, stacks=stacks), 0)
    assert [call["name"] for call in root["calls"]] == ["a.py:1  f()"]
    assert root["bytes"] == 2001 * MIB


def test_a_module_is_below_the_line_that_calls_it(machine):
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU()).cuda()
    with gputrace.record() as trace:
        model(torch.ones(64, 256, device="cuda"))

    def names(call):
        yield call["name"]
        for inner in call["calls"]:
            yield from names(inner)

    found = list(names(flame_of(trace, 0)))
    assert any("model(torch.ones(64" in name for name in found)
    assert any(name.startswith("forward in") for name in found)
    assert not any("_call_impl" in name for name in found)
