"""Recordings share one session of PyTorch's profiler, and the program's own session comes first.

A recording without a timeline says why.
"""

import json
import os
import subprocess
import sys
import threading
import time
from typing import ClassVar

import pytest
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity

import gputrace
from gputrace.sources import kineto
from gputrace.sources.kineto import KinetoSource


class FakeProfile:
    """Replacement of PyTorch's profiler, which records one kernel.

    Only the thread that started it may end it.
    """

    running: ClassVar[list["FakeProfile"]] = []
    made: ClassVar[int] = 0

    def __init__(self, **options):
        self.options = options
        self.number = FakeProfile.made
        FakeProfile.made += 1

    def _prepare_trace(self):
        assert FakeProfile.running == [], "Profiler is already enabled"

    def _start_trace(self):
        FakeProfile.running.append(self)
        self.thread = threading.get_ident()
        self.start = time.time_ns()

    def __enter__(self):
        self._prepare_trace()
        self._start_trace()
        return self

    def __exit__(self, *exception):
        assert FakeProfile.disable() is self

    @staticmethod
    def disable():
        (profile,) = FakeProfile.running
        assert threading.get_ident() == profile.thread
        FakeProfile.running.clear()
        return profile

    def save(self, path):
        at = {"ts": (time.time_ns() - self.start) / 1000, "dur": 1.0, "args": {"correlation": 1}}
        entries = [
            {"ph": "X", "cat": "kernel", "name": f"kernel {self.number}", "pid": 0, "tid": 7, **at},
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 9,
                "tid": 9,
                **at,
            },
        ]
        with open(path, "w") as file:
            json.dump({"baseTimeNanoseconds": self.start, "traceEvents": entries}, file)


@pytest.fixture
def synchronized(monkeypatch) -> list[int]:
    """A list that gets an entry for each wait for all GPUs. CUDA's profiler is replaced."""
    waits = []
    FakeProfile.running, FakeProfile.made = [], 0
    monkeypatch.setattr(profiler, "profile", FakeProfile)
    monkeypatch.setattr(profiler, "_disable_profiler", FakeProfile.disable)
    monkeypatch.setattr(
        torch.profiler,
        "supported_activities",
        lambda: {ProfilerActivity.CPU, ProfilerActivity.CUDA},
    )
    monkeypatch.setattr(kineto, "_synchronize", lambda: waits.append(1))
    yield waits
    assert (
        FakeProfile.running == []
        and FakeProfile._prepare_trace.__qualname__ == "FakeProfile._prepare_trace"
    )
    assert kineto._session._listeners == [] and kineto._session._profile is None


def names(work) -> list[str]:
    return [work.spans.names[name] for name in work.spans.name[work.spans.device == 0]]


def started() -> tuple[KinetoSource, int]:
    source = KinetoSource()
    source.start()
    return source, time.time_ns()


def test_one_recording(synchronized):
    source, origin = started()
    options = FakeProfile.running[0].options
    assert not options["use_cpu"] and options["use_device"] == "cuda" and len(synchronized) == 1
    work = source.finish(origin)
    assert names(work) == ["kernel 0"] and work.missing == "" and len(synchronized) == 2
    source.stop()
    source.stop()
    assert len(synchronized) == 2


def test_recordings_share_the_session_and_each_hears_its_own_part(synchronized):
    outer, start = started()
    inner, later = started()
    assert len(FakeProfile.running) == 1
    first = inner.finish(later)
    second = outer.finish(start)
    assert names(first) == ["kernel 0"] and names(second) == ["kernel 0", "kernel 1"]


def test_a_recording_may_end_before_the_one_inside_it_and_in_another_thread(synchronized):
    outer, start = started()
    inner, later = started()
    told = []
    thread = threading.Thread(target=lambda: told.append(outer.finish(start)))
    thread.start()
    thread.join()
    assert names(told[0]) == ["kernel 0"]
    assert names(inner.finish(later)) == ["kernel 0", "kernel 1"]


def test_the_programs_own_profiler_comes_first(synchronized):
    source, origin = started()
    own = FakeProfile()
    with own:
        assert FakeProfile.running == [own]
        assert source.finish(origin).missing == kineto.GAVE_WAY


def test_a_forked_child_has_no_session_to_end(synchronized, monkeypatch):
    source, origin = started()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: 1)
        kineto._session.give_way()
        source.stop()
    assert len(FakeProfile.running) == 1 and names(source.finish(origin)) == ["kernel 0"]


def test_a_profiler_that_runs_already_is_left_alone(synchronized, monkeypatch):
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    source, origin = started()
    assert FakeProfile.made == 0 and source.finish(origin).missing == kineto.WAS_RUNNING


def fail(*args):
    raise ZeroDivisionError("broken")


def test_a_session_that_cannot_start_is_said_and_leaves_nothing_behind(synchronized, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(FakeProfile, "_start_trace", fail)
        source, origin = started()
    assert source.finish(origin).missing == "PyTorch's profiler could not be started: broken"
    source, origin = started()
    assert names(source.finish(origin)) == ["kernel 1"]


@pytest.mark.parametrize("broken", [(FakeProfile, "save"), (kineto, "_synchronize")])
def test_a_session_that_cannot_be_read_is_said_to_all_and_leaves_nothing_behind(
    synchronized, monkeypatch, broken
):
    (first, origin), (second, _) = started(), started()
    monkeypatch.setattr(*broken, fail)
    for source in (first, second):
        assert (
            source.finish(origin).missing
            == "what PyTorch's profiler heard could not be read: broken"
        )
    assert not profiler._is_profiler_enabled


# The program runs in a process of its own, because a second session may crash the real profiler. It
# records the CPU here. With CUDA only the activities differ.
_ON_CPU = """
import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity
from gputrace.sources import kineto

class OnCpu(profiler.profile):
    def __init__(self, **options):
        super().__init__(use_cpu=True, use_kineto=True)

torch.profiler.supported_activities = lambda: {ProfilerActivity.CPU, ProfilerActivity.CUDA}
kineto._synchronize = lambda: None
profiler.profile = OnCpu
for _ in range(2):
    source = kineto.KinetoSource()
    source.start()
    assert kineto._session._profile is not None, source.missing
    assert source.finish(0).missing == "", source.missing
source = kineto.KinetoSource()
source.start()
with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as own:
    torch.ones(10).exp()
assert "aten::exp" in {event.key for event in own.key_averages()}
assert source.finish(0).missing == kineto.GAVE_WAY
assert not profiler._is_profiler_enabled
"""


@pytest.mark.slow
def test_pytorchs_own_profiler_runs_in_the_sessions_thread_and_gives_way():
    # torch 2.11 says "Warning: Profiler clears events at the end of each cycle".
    said_by_torch = "ignore:Warning"
    done = subprocess.run(
        [sys.executable, "-W", said_by_torch, "-c", _ON_CPU],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_build_without_cupti_says_so():
    if ProfilerActivity.CUDA in torch.profiler.supported_activities():
        pytest.skip("this build has a profiler for CUDA")
    source, origin = started()
    work = source.finish(origin)
    assert work.missing == kineto.UNAVAILABLE and len(work.spans) == 0


# On real GPUs


@pytest.mark.gpu
def test_kernel_time_of_each_stream_is_that_of_cuda_events():
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    x = torch.randn(4096, 4096, device="cuda")
    for stream in streams:  # the first product on a stream takes memory for cuBLAS
        with torch.cuda.stream(stream):
            x @ x
    torch.cuda.synchronize()
    with gputrace.record(timeline=True) as trace:
        marks = []
        for stream in streams:
            with torch.cuda.stream(stream):
                start, end = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                start.record()
                for _ in range(20):
                    y = x @ x
                end.record()
                marks.append((start, end))
            stream.synchronize()
        del y
    spans = trace.spans
    found = sorted(
        {int(stream) for stream in spans.stream[spans.kind == 0]}, key=lambda stream: stream != 0
    )
    assert len(found) == 2
    for (start, end), stream in zip(marks, found, strict=True):
        kernels = (spans.kind == 0) & (spans.stream == stream)
        assert spans.duration[kernels].sum() == pytest.approx(
            start.elapsed_time(end) / 1000, rel=0.02
        )


@pytest.mark.gpu
def test_lines_copies_and_waits_on_a_real_gpu():
    pinned, side = torch.ones(64 << 20, dtype=torch.uint8).pin_memory(), torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")
    with gputrace.record(timeline=True) as trace:
        y = x + x
        with torch.cuda.stream(side):
            z = pinned.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        z.sum().item()
        torch.cuda.synchronize()
    del y
    assert trace.busy(0, "h2d") > 0 and trace.busy(0, "d2h") > 0 and trace.host_waited > 0
    assert len(trace.waits) >= 1
    kernel = int((trace.spans.kind == 0).argmax())
    assert trace.line(int(trace.spans.stack[kernel])).text == "y = x + x"
    assert trace.plot_timeline(memory=True).png


@pytest.mark.gpu
def test_a_free_beside_a_timeline_belongs_to_the_line_that_allocated():
    x = torch.ones(1 << 20, device="cuda")
    with gputrace.record(timeline=True) as trace:
        y = x + x
        del y
    assert {entry.line.text: entry.delta for entry in trace.lines()} == {"y = x + x": 0}


@pytest.mark.gpu
def test_nested_recordings_and_the_users_profiler_on_a_real_gpu():
    x = torch.ones(1 << 20, device="cuda")
    with gputrace.record(timeline=True) as outer:
        x + 1
        with gputrace.record(timeline=True) as inner:
            x * 2
        x - 3
    assert [int((t.spans.kind == 0).sum()) for t in (outer, inner)] == [3, 1]
    with (
        gputrace.record(timeline=True) as gave_way,
        torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as own,
    ):
        x + 1
        torch.cuda.synchronize()
    assert (
        any(event.device_time > 0 for event in own.events())
        and gave_way.no_timeline == kineto.GAVE_WAY
    )
    with (
        torch.profiler.profile(activities=[ProfilerActivity.CUDA]),
        gputrace.record(timeline=True) as late,
    ):
        x + 1
    assert late.no_timeline == kineto.WAS_RUNNING and late.peak > 0


@pytest.mark.gpu
def test_memory_alone_starts_no_profiler():
    with gputrace.record(timeline=False) as trace:
        assert kineto._session._profile is None
        torch.ones(8, device="cuda")
    assert "memory alone" in trace.no_timeline
