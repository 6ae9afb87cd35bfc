"""The Chrome trace follows the format that Chrome and Perfetto document, and is complete."""

import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch

import gputrace
from gputrace.files import archive as files
from gputrace.files import chrome
from gputrace.files.chrome import ENGINES
from gputrace.spans import (
    H2D,
    HOST,
    KERNEL,
    LAUNCH,
    Execution,
    RacingSpan,
    RecordedRace,
    Spans,
    Waits,
)
from virtualgpu.streams.race_reports import RaceWarning


@pytest.fixture
def trace(machine):
    """A trace of two streams that wait for each other, copies of three kinds, and a race."""
    side = torch.cuda.Stream()
    pinned = torch.ones(1 << 20).pin_memory()
    with pytest.warns(RaceWarning), gputrace.record() as trace:
        x = torch.ones(1 << 20, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + x
            z = pinned.to("cuda", non_blocking=True)
        y + 1  # nothing orders this after y = x + x
        torch.cuda.current_stream().wait_stream(side)
        (z + z).to("cuda:1").cpu()
        torch.cuda.synchronize()
    return trace


@pytest.fixture
def told(trace, tmp_path):
    trace.export_chrome(tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text("utf-8"))


def of(told, *phases):
    return [event for event in told["traceEvents"] if event["ph"] in phases]


def test_every_entry_has_what_its_kind_needs(told):
    assert told["displayTimeUnit"] in ("ms", "ns") and all(
        isinstance(value, str) for value in told["otherData"].values()
    )
    needs = {
        "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
        "M": {"name", "pid", "tid", "args"},
        "s": {"name", "cat", "id", "ts", "pid", "tid"},
        "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
        "C": {"name", "ts", "pid", "tid", "args"},
        "i": {"name", "cat", "ts", "pid", "tid", "s"},
    }
    for event in told["traceEvents"]:
        assert set(event) - {"ph"} == needs[event["ph"]], event
        assert type(event["pid"]) is int and type(event["tid"]) is int and event["pid"] > 0
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0
    assert {event["bp"] for event in of(told, "f")} == {"e"} and {
        event["s"] for event in of(told, "i")
    } <= {"g", "p", "t"}


def test_every_process_and_thread_has_a_name_and_a_place(told):
    names = defaultdict(set)
    for event in of(told, "M"):
        names[event["name"]].add((event["pid"], event["tid"]))
    used = {(event["pid"], event["tid"]) for event in of(told, "X", "i")}
    assert used <= names["thread_name"] == names["thread_sort_index"]
    assert {(pid, 0) for pid, _ in used} <= names["process_name"] == names["process_sort_index"]
    said = {event["args"]["name"] for event in of(told, "M") if event["name"].endswith("_name")}
    assert {
        "host",
        "cuda:0",
        "cuda:1",
        "thread 1",
        "default stream",
        "stream 1",
        "copy engine, host to device",
    } <= said


def test_slices_of_a_thread_do_not_overlap(told):
    threads = defaultdict(list)
    for event in of(told, "X"):
        threads[event["pid"], event["tid"]].append(
            (round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000))
        )
    assert len(threads) >= 6
    for slices in threads.values():
        slices.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(slices)), slices


def test_arrows_have_two_ends_each_at_the_start_of_a_slice(told):
    starts = {(event["pid"], event["tid"], event["ts"]) for event in of(told, "X")}
    ends = defaultdict(list)
    for event in of(told, "s", "f"):
        ends[event["id"]].append(event)
        assert (event["pid"], event["tid"], event["ts"]) in starts
    for first, second in ends.values():
        assert (first["ph"], second["ph"]) == ("s", "f") and (first["cat"], first["name"]) == (
            second["cat"],
            second["name"],
        )
        assert first["ts"] <= second["ts"] or first["cat"] == "race"
    assert {first["cat"] for first, _ in ends.values()} == {"launch", "wait", "race"}


def test_it_says_what_the_trace_says(trace, told):
    slices = of(told, "X")
    assert Counter(
        event["cat"] for event in slices if event["cat"] in ("kernel", "h2d", "p2p", "d2h")
    ) == {
        "kernel": int((trace.spans.kind == KERNEL).sum()),
        "h2d": 1,
        "p2p": 1,
        "d2h": 1,
    }
    (copy,) = [
        event for event in slices if event["cat"] == "copy engine" and event["tid"] == ENGINES + H2D
    ]
    (queued,) = [event for event in slices if event["cat"] == "h2d"]
    assert (copy["ts"], copy["dur"], copy["pid"]) == (queued["ts"], queued["dur"], queued["pid"])
    assert queued["args"]["source"] == 'z = pinned.to("cuda", non_blocking=True)'
    assert sum(event["dur"] for event in slices if event["cat"] == "wait") * 1e-6 == pytest.approx(
        trace.host_waited, abs=1e-8
    )
    (race,) = of(told, "i")
    assert race["name"].startswith("race: add (test_chrome.py:")
    counted = [event["args"] for event in of(told, "C") if event["pid"] == 2]
    line = trace.timeline(0)
    assert [point["allocated"] for point in counted] == line.allocated.tolist()
    assert [point["reserved"] for point in counted] == line.reserved.tolist()


def test_an_arrow_of_a_wait_leads_from_the_last_before_to_the_first_after(trace_of_work, tmp_path):
    spans = Spans.of(
        [
            (0.0, 1.0, 0, 0, KERNEL, "a", 0, -1),
            (1.0, 1.0, 0, 0, KERNEL, "b", 0, -1),
            (2.5, 1.0, 0, 3, KERNEL, "c", 0, -1),
        ]
    )
    waits = Waits.of(
        [(1.0, 0, 0, 1.5, 0, 3, 0), (0.0, 0, 3, 0.0, 0, 0, 0), (9.0, 0, 0, 9.0, 0, 3, 0)]
    )
    trace = trace_of_work(Execution(spans, waits, []))
    arrows = [event for event in chrome.events_of(trace) if event["ph"] in "sf"]
    assert [(event["id"], event["ts"]) for event in arrows] == [("wait 1", 0.0), ("wait 1", 2.5e6)]


def test_times_are_rounded_without_overlap(trace_of_work):
    rows = [(i * 1.1e-9, 1.1e-9, 0, 0, KERNEL, "k", 0, -1) for i in range(50)]
    slices = [
        event
        for event in chrome.events_of(trace_of_work(Execution(Spans.of(rows), Waits.of([]), [])))
        if event["ph"] == "X"
    ]
    ends = [
        (round(event["ts"] * 1000), round(event["ts"] * 1000) + round(event["dur"] * 1000))
        for event in slices
    ]
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))


def test_a_race_with_the_host_is_marked_at_the_launch(trace_of_work):
    first, second = (
        RacingSpan(0, 0, "mm", "a.py:1", 0.0, 1.0, 2.0),
        RacingSpan(HOST, 0, "numpy", "a.py:2", 1.5, 1.5, 1.5),
    )
    spans = Spans.of(
        [(0.0, 0.5, HOST, 0, LAUNCH, "mm", 0, -1), (1.0, 1.0, 0, 0, KERNEL, "mm", 0, 0)]
    )
    (mark,) = [
        event
        for event in chrome.events_of(
            trace_of_work(Execution(spans, Waits.of([]), [RecordedRace(first, second)]))
        )
        if event["ph"] == "i"
    ]
    assert mark["name"] == "race: mm (a.py:1) and numpy (a.py:2)" and mark["ts"] == 1e6


@pytest.fixture
def trace_of_work(machine):
    def make(work):
        with gputrace.record() as trace:
            pass
        trace.execution = work
        trace.spans, trace.waits, trace.races = work.spans, work.waits, work.races
        return trace

    return make


@pytest.mark.parametrize("write", ["save", "export_chrome"])
def test_a_file_is_written_whole_or_not_at_all(trace, tmp_path, monkeypatch, write):
    path = tmp_path / "trace"
    getattr(trace, write)(path)
    before = path.read_bytes()

    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.np, "savez_compressed", fail)
    monkeypatch.setattr(chrome._Lanes, "waits", fail)
    with pytest.raises(OSError, match="No space left"):
        getattr(trace, write)(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", ["save", "export_chrome"])
def test_a_place_without_a_folder_or_a_name_is_told(trace, tmp_path, write):
    with pytest.raises(FileNotFoundError, match=r"there is no folder: '.*absent'"):
        getattr(trace, write)(tmp_path / "absent" / "trace")
    with pytest.raises(IsADirectoryError, match="that is a folder: give the name of a file"):
        getattr(trace, write)(tmp_path)
    assert not list(tmp_path.iterdir())


def test_idle_time_is_never_less_than_none(trace_of_work):
    edges = [step / 10 for step in range(12)]  # whose differences do not add up to the last
    spans = Spans.of(
        [(start, end - start, 0, 0, KERNEL, "mm", 0, -1) for start, end in pairwise(edges)]
    )
    assert trace_of_work(Execution(spans, Waits.of([]), [])).idle(0) == 0


def test_a_saved_trace_has_the_same_timeline(trace, tmp_path):
    trace.save(tmp_path / "trace.npz")
    loaded = gputrace.Trace.load(tmp_path / "trace.npz")
    assert (loaded.busy(0), loaded.overlap(0), loaded.host_waited, loaded.races) == (
        trace.busy(0),
        trace.overlap(0),
        trace.host_waited,
        trace.races,
    )
    assert list(chrome.events_of(loaded)) == list(chrome.events_of(trace))


def test_a_saved_trace_of_memory_alone_still_says_why(machine, tmp_path):
    with gputrace.record(timeline=False) as trace:
        pass
    trace.save(tmp_path / "trace.npz")
    with pytest.raises(RuntimeError, match="asked for memory alone"):
        gputrace.Trace.load(tmp_path / "trace.npz").busy()
