"""Spans and waits from a file of Kineto, written as libkineto/src/output_json.cpp writes it."""

import json
import time
from itertools import count

import numpy as np
import pytest
import torch
from torch.autograd import profiler

from gputrace.attribution import with_allocators_streams, with_lines
from gputrace.events import ALLOC, Events, MemoryEvent, SourceLine
from gputrace.phases import Phase
from gputrace.sources.activities import activities_of, work_of
from gputrace.spans import D2H, H2D, HOST, KERNEL, LAUNCH, P2P, WAIT

BASE = 1_790_000_000_000_000_000  # ns: what the times of a file are counted from
ORIGIN = BASE + 1_000_000  # ns: where the recording starts, 1 ms later


class File:
    """A file of Kineto that is being built. Times are in ms after the recording's start."""

    def __init__(self):
        self.entries, self.ids = [], count(1)

    def add(self, cat, name, start, duration, pid, tid, **args):
        entry = {
            "ph": "X",
            "cat": cat,
            "name": name,
            "pid": pid,
            "tid": tid,
            "ts": (start + 1) * 1000,
            "dur": duration * 1000,
        }
        self.entries.append(entry | {"args": args})

    def work(
        self,
        name,
        launched,
        start,
        duration,
        *,
        device=0,
        stream=7,
        cat="kernel",
        call="cudaLaunchKernel",
        thread=1,
    ):
        """Add work of a device, and the call that launched it."""
        number = next(self.ids)
        self.add("cuda_runtime", call, launched, 0.01, 4242, thread, cbid=211, correlation=number)
        self.add(
            cat,
            name,
            start,
            duration,
            device,
            stream,
            device=device,
            stream=stream,
            correlation=number,
        )

    def sync(self, kind, asked, duration, stream=7, device=0, **more):
        self.add(
            "cuda_sync",
            kind,
            asked,
            duration,
            device,
            stream,
            cuda_sync_kind=kind,
            stream=stream,
            correlation=next(self.ids),
            **more,
        )

    def told(self):
        others = [
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {}},
            {"ph": "f", "id": 1, "pid": 0, "tid": 7, "cat": "ac2g"},
        ]
        whole = {
            "schemaVersion": 1,
            "baseTimeNanoseconds": BASE,
            "traceEvents": [*others, *self.entries],
        }
        return work_of(activities_of(json.loads(json.dumps(whole))), ORIGIN)


@pytest.fixture
def file():
    return File()


def test_work_and_its_launches(file):
    file.work("void add<float>(int)", 1, 1.5, 2)
    file.work("Memcpy HtoD (Pinned -> Device)", 2, 4, 1, cat="gpu_memcpy", stream=13)
    file.work("Memcpy DtoH (Device -> Pageable)", 3, 6, 1, cat="gpu_memcpy", thread=2)
    file.work("Memcpy PtoP (Device -> Device)", 4, 8, 1, cat="gpu_memcpy", device=1)
    file.work("Memcpy DtoD (Device -> Device)", 5, 10, 1, cat="gpu_memcpy")
    file.work("Memset (Device)", 6, 12, 1, cat="gpu_memset")
    spans = file.told().spans
    device = spans.device != HOST
    assert spans.kind[device].tolist() == [KERNEL, H2D, D2H, P2P, KERNEL, KERNEL]
    assert spans.device[device].tolist() == [0, 0, 0, 1, 0, 0] and spans.stream[
        device
    ].tolist() == [0, 13, 0, 0, 0, 0]
    assert spans.start[device] == pytest.approx(
        [0.0015, 0.004, 0.006, 0.008, 0.010, 0.012], abs=1e-9
    )
    assert spans.duration[device] == pytest.approx(
        [0.002, 0.001, 0.001, 0.001, 0.001, 0.001], abs=1e-9
    )
    launches = spans.launch[device]
    assert spans.kind[launches].tolist() == [LAUNCH] * 6 and spans.stream[launches].tolist() == [
        0,
        0,
        1,
        0,
        0,
        0,
    ]
    assert spans.start[launches] == pytest.approx(np.arange(1, 7) / 1000, abs=1e-9)
    assert spans.names[spans.name[launches[0]]] == "void add<float>(int)"


def test_waits_of_the_host(file):
    file.add("cuda_runtime", "cudaDeviceSynchronize", 1, 3, 4242, 1, correlation=next(file.ids))
    file.add("cuda_runtime", "cudaEventSynchronize", 5, 1, 4242, 1, correlation=500)
    file.sync("Event Sync", 5, 1, wait_on_stream=7)
    file.entries[-1]["args"]["correlation"] = 500  # the same wait, told twice
    file.sync("Event Sync", 7, 1, wait_on_stream=7)  # its call is left out by some versions
    file.add("cuda_runtime", "cudaMalloc", 9, 1, 4242, 1, correlation=next(file.ids))
    spans = file.told().spans
    assert spans.kind.tolist() == [WAIT] * 3 and spans.start == pytest.approx(
        [0.001, 0.005, 0.007], abs=1e-9
    )


def test_a_stream_waits_until_what_was_launched_before_is_done(file):
    file.work("a", 1, 2, 5, stream=7)
    file.work("b", 4, 8, 1, stream=7)  # launched after the wait
    file.sync("Stream Wait Event", 3, 0.01, stream=13, wait_on_stream=7, wait_on_cuda_event_id=1)
    file.work("c", 3.5, 7, 1, stream=13)
    file.sync("Stream Wait Event", 20, 0.01, stream=7, wait_on_stream=13, wait_on_cuda_event_id=2)
    waits = file.told().waits
    assert (waits.stream.tolist(), waits.to_stream.tolist()) == ([0, 13], [13, 0])
    assert waits.time == pytest.approx([0.007, 0.008], abs=1e-9) and waits.until == pytest.approx(
        [0.007, 0.020], abs=1e-9
    )


def test_an_event_of_an_untold_stream_is_that_of_the_stream_that_was_given_work_last(file):
    """On an H200 (torch 2.11), CUPTI of CUDA 13 reports such an event with stream -1."""
    file.work("a", 1, 2, 5, stream=7)
    file.work("b", 1.5, 2, 3, stream=17)
    file.work("mine", 1.8, 2, 1, stream=13)
    file.add("cuda_runtime", "cudaEventRecordWithFlags", 2.5, 0.01, 1, 1, correlation=900)
    file.sync("Stream Wait Event", 3, 0.01, stream=13, wait_on_stream=-1, wait_on_cuda_event_id=1)
    file.work("later", 4, 8, 1, stream=7)
    waits = file.told().waits
    assert (waits.stream.tolist(), waits.to_stream.tolist()) == ([17], [13])
    assert waits.time == pytest.approx([0.005], abs=1e-9)


def test_a_wait_for_a_stream_without_work_is_none(file):
    file.add("cuda_runtime", "cudaEventRecordWithFlags", 2.5, 0.01, 1, 1, correlation=900)
    file.work("mine", 1.8, 2, 1, stream=13)
    file.sync("Stream Wait Event", 3, 0.01, stream=13, wait_on_stream=-1, wait_on_cuda_event_id=1)
    assert len(file.told().waits) == 0


def test_what_ran_before_the_recording_and_what_is_no_cuda_are_left_out(file):
    file.work("early", -0.5, -0.4, 0.1)
    file.add("cpu_op", "aten::add", 1, 1, 4242, 1)
    file.add("overhead", "Buffer Flush", 1, 1, -1, 0)
    assert len(file.told().spans) == 0


def test_times_of_a_file_of_this_versions_profiler(tmp_path):
    """Check that times count from the moment that the file names, on the system's clock."""
    before = time.time_ns()
    with profiler.profile(use_cpu=True, use_kineto=True) as profile:
        torch.ones(10).exp()
    after = time.time_ns()
    profile.kineto_results.save(str(tmp_path / "trace.json"))
    told = json.loads((tmp_path / "trace.json").read_text())
    for entry in told["traceEvents"]:
        entry["cat"] = "cuda_runtime" if entry.get("cat") == "cpu_op" else entry.get("cat")
    found = activities_of(told)
    assert "aten::exp" in [activity.name for activity in found]
    assert all(
        before - 1e6 <= activity.start <= activity.start + activity.duration <= after + 1e6
        for activity in found
    )


def events_of(*rows) -> Events:
    """Return allocations on device 0, given as rows (ms, stream, stack)."""
    return Events.of(
        MemoryEvent(ms / 1000, 0, stream, ALLOC, 512, 512, 512, stack) for ms, stream, stack in rows
    )


def test_streams_have_the_names_that_the_allocator_gives_them(file):
    for start in (1, 2, 3):
        file.work("a", start, start + 0.1, 0.1, stream=20)
        file.work("b", start + 0.5, start + 0.6, 0.1, stream=24)
    file.work("never allocates", 0.1, 0.2, 0.1, stream=28)
    file.sync("Stream Wait Event", 4, 0.01, stream=24, wait_on_stream=20, wait_on_cuda_event_id=1)
    handle = 0x55_0000_0000
    events = events_of(
        *((start - 0.05, 0, 1) for start in (1, 2, 3)),
        *((start + 0.45, handle, 1) for start in (1, 2, 3)),
    )
    work = with_allocators_streams(file.told(), events)
    spans = work.spans
    streams = {
        spans.names[spans.name[i]]: int(spans.stream[i])
        for i in np.flatnonzero(spans.kind == KERNEL)
    }
    assert streams == {"a": 0, "b": handle, "never allocates": 28}
    assert (work.waits.stream.tolist(), work.waits.to_stream.tolist()) == ([0], [handle])


def test_launches_belong_to_the_line_of_the_allocation_before_or_of_their_phase(file):
    stacks = [
        (),
        (SourceLine("/home/me/train.py", 1, "f", "y = x + x"),),
        (SourceLine("/home/me/train.py", 2, "f", "y.backward()"),),
    ]
    stacks.append((SourceLine("/usr/lib/python3/dist-packages/lib.py", 2, "f"),))
    for launched in (1.1, 5.5, 7.0, 9.5):
        file.work("k", launched, launched + 1, 0.1)
    events = events_of((1.0, 0, 1), (6.0, 0, 3))
    work = with_lines(file.told(), events, [Phase("backward", 0.005, 0.008, 2)], stacks)
    spans = work.spans
    kernels = np.flatnonzero(spans.kind == KERNEL)
    assert spans.stack[kernels].tolist()[:3] == [1, 2, 2]
    assert spans.stack[spans.launch[kernels]].tolist() == spans.stack[kernels].tolist()
