"""Spans of a virtual GPU: what ran where and when, by which line, and which stream waited."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gputrace
import virtualgpu
from gputrace.sources.clock import EARLIER
from gputrace.spans import (
    COPIES,
    H2D,
    HOST,
    KERNEL,
    KINDS,
    LAUNCH,
    WAIT,
    Spans,
    seconds_of,
    seconds_of_both,
)
from virtualgpu import hardware
from virtualgpu.streams.race_reports import RaceWarning


@pytest.fixture
def cycles(machine) -> float:
    """The clock cycles per second of the virtual GPUs."""
    return hardware.machine().profile.sm_clock_khz * 1e3


def rows(trace, *kinds):
    """Return (device, stream, kind, name, line) of each span, in order of time."""
    spans = trace.spans
    told = []
    for i in range(len(spans)):
        if not kinds or spans.kind[i] in kinds:
            line = trace.line(int(spans.stack[i]))
            told.append(
                (
                    int(spans.device[i]),
                    int(spans.stream[i]),
                    KINDS[spans.kind[i]],
                    spans.names[spans.name[i]],
                    line and line.text,
                )
            )
    return told


def test_kernels_have_their_operators_names_and_lines(machine):
    x = torch.ones(64, 64, device="cuda")
    torch.cuda.synchronize()
    with gputrace.record() as trace:
        y = x @ x  # a product
        y.relu_()
        torch.nn.functional.dropout(y, 0.5)
    assert rows(trace, KERNEL) == [
        (0, 0, "kernel", "mm", "y = x @ x  # a product"),
        (0, 0, "kernel", "relu_", "y.relu_()"),
        (0, 0, "kernel", "native_dropout", "torch.nn.functional.dropout(y, 0.5)"),
    ]
    assert [name for *_, name, _ in rows(trace, LAUNCH)] == ["mm", "relu_", "native_dropout"]


def test_a_launch_lies_on_the_host_before_its_kernel(machine):
    x = torch.ones(64, device="cuda")
    torch.cuda.synchronize()
    with gputrace.record() as trace:
        x + x
    spans = trace.spans
    (kernel,) = np.flatnonzero(spans.kind == KERNEL)
    launch = spans.launch[kernel]
    assert spans.device[launch] == HOST and spans.kind[launch] == LAUNCH
    assert spans.end[launch] == pytest.approx(spans.start[kernel])
    assert spans.duration[launch] == pytest.approx(hardware.machine().profile.launch_seconds)


def test_a_replay_of_a_graph_is_one_launch_of_all_its_kernels(machine):
    x = torch.ones(64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.exp().sin()
    torch.cuda.synchronize()
    with gputrace.record() as trace:
        for _ in range(2):
            graph.replay()
    assert [name for *_, name, _ in rows(trace, LAUNCH)] == ["cudaGraphLaunch"] * 2
    assert [name for *_, name, _ in rows(trace, KERNEL)] == ["exp", "sin"] * 2
    spans = trace.spans
    launches = spans.launch[spans.kind == KERNEL].tolist()
    assert launches[0] == launches[1] != launches[2] == launches[3]
    seconds = hardware.machine().profile.launch_seconds
    assert spans.duration[launches] == pytest.approx(seconds)
    assert spans.end[launches[0]] == pytest.approx(spans.start[spans.kind == KERNEL][0])


def test_a_backward_belongs_to_the_line_that_called_it(machine):
    x = torch.ones(64, device="cuda", requires_grad=True)
    torch.cuda.synchronize()
    with gputrace.record() as trace:
        y = x.exp().sum()
        y.backward()
    lines = [text for *_, text in rows(trace, KERNEL)]
    assert (
        lines[:2] == ["y = x.exp().sum()"] * 2
        and set(lines[2:]) == {"y.backward()"}
        and len(lines) > 3
    )


def test_copies_run_on_their_engines_and_the_host_waits_for_those_that_block(machine):
    x, pinned = torch.ones(1 << 20), torch.ones(1 << 20).pin_memory()
    torch.cuda.synchronize()
    with gputrace.record() as trace:
        y = x.to("cuda")
        z = pinned.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        y.cpu()
        z.to("cuda:1")
        torch.cuda.synchronize(0)
    copies = [(kind, name) for _, _, kind, name, _ in rows(trace, *COPIES)]
    assert copies == [
        ("h2d", "copy, pageable"),
        ("h2d", "copy, pinned"),
        ("d2h", "copy, pageable"),
        ("p2p", "copy"),
    ]
    assert [name for *_, name, _ in rows(trace, WAIT)] == [
        "copy, pageable",
        "synchronize device",
        "copy, pageable",
        "synchronize device",
    ]
    waited = trace.spans.duration[trace.spans.kind == WAIT].sum()
    assert trace.host_waited == pytest.approx(waited) and 0 < waited < trace.end


def test_waits_name_both_streams(machine):
    side = torch.cuda.Stream()
    x = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with gputrace.record() as trace:
        y = x + x
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y + y
    waits, spans = trace.waits, trace.spans
    assert (
        waits.device.tolist(),
        waits.stream.tolist(),
        waits.to_device.tolist(),
        waits.to_stream.tolist(),
    ) == (
        [0],
        [0],
        [0],
        [side.stream_id],
    )
    first, second = np.flatnonzero(spans.kind == KERNEL)
    assert (
        waits.time[0] == pytest.approx(spans.end[first])
        and spans.start[second] >= waits.until[0] >= waits.time[0] - 1e-12
    )
    assert trace.line(int(waits.stack[0])).text == "side.wait_stream(torch.cuda.current_stream())"


def test_busy_idle_and_overlap_in_seconds(machine, cycles):
    """A kernel of 10 ms overlaps for half of its time with a copy on another stream."""
    side = torch.cuda.Stream()
    pinned = torch.ones(64 << 20, dtype=torch.uint8).pin_memory()
    torch.cuda.synchronize()
    with gputrace.record() as trace:
        torch.cuda._sleep(int(0.010 * cycles))
        with torch.cuda.stream(side):
            pinned.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
    copied = trace.busy(0, "copy")
    assert trace.busy(0, "kernel") == pytest.approx(0.010, rel=1e-6)
    assert 0 < copied < 0.010 and trace.busy(0, "h2d") == copied and trace.busy(0, "d2h") == 0
    assert trace.overlap(0) == pytest.approx(copied) and trace.busy(0) == pytest.approx(0.010)
    assert trace.idle("cuda:0") == pytest.approx(trace.end - 0.010) and trace.idle(0) > 0
    assert trace.busy(1) == 0 and trace.idle(1) == trace.end


def test_what_is_not_done_when_the_block_ends_is_counted_to_its_end(machine, cycles):
    with gputrace.record() as trace:
        torch.cuda._sleep(int(0.010 * cycles))
    assert (
        trace.seconds < 0.001
        and trace.end == pytest.approx(0.010, rel=1e-2)
        and trace.busy() == pytest.approx(0.010, rel=1e-6)
    )


def test_what_is_under_way_when_the_block_begins_is_work_too(machine, cycles):
    torch.cuda._sleep(int(0.010 * cycles))
    with gputrace.record() as trace:
        torch.cuda.synchronize()
    assert [name for *_, name, _ in rows(trace, KERNEL)] == [EARLIER]
    assert trace.busy() == pytest.approx(0.010, rel=1e-2) and trace.idle() < 1e-4


@pytest.mark.parametrize("kind", ["kernels", "", 1])
def test_a_kind_that_is_none_is_named(machine, kind):
    with gputrace.record() as trace:
        pass
    with pytest.raises(ValueError, match="expected 'kernel', 'copy', 'h2d', 'd2h', 'p2p', or None"):
        trace.busy(0, kind)


def test_a_recording_of_memory_alone_says_so(machine):
    with gputrace.record(timeline=False) as trace:
        torch.ones(8, device="cuda")
    assert len(trace.spans) == 0 and trace.peak == 512
    for ask in (
        trace.busy,
        trace.idle,
        trace.overlap,
        lambda: trace.host_waited,
        trace.plot_timeline,
        lambda: trace.export_chrome("x.json"),
    ):
        with pytest.raises(RuntimeError, match="has no timeline: it was asked for memory alone"):
            ask()


def test_recordings_lie_in_one_another(machine):
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with gputrace.record() as outer:
        x + 1
        with gputrace.record() as inner:
            x * 2
        x - 3
    assert [name for *_, name, _ in rows(outer, KERNEL)] == ["add", "mul", "sub"]
    assert [name for *_, name, _ in rows(inner, KERNEL)] == [EARLIER, "mul"]
    assert hardware.machine().clock._listeners == ()


def test_the_oldest_spans_are_forgotten_and_counted(machine):
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    with gputrace.record(max_events=3) as trace:
        for _ in range(10):
            x.neg_()
    assert len(rows(trace, KERNEL)) == 3 and trace.lost_spans == 7


def test_a_recording_changes_no_time(machine):
    def work():
        start = virtualgpu.host_time()
        x = torch.ones(100, device="cuda")
        (x + x).cpu()
        return virtualgpu.host_time() - start

    work()  # takes its memory from the driver
    plain = work()
    with gputrace.record():
        recorded = work()
    assert recorded == pytest.approx(plain, rel=1e-9)


def test_the_races_of_the_recording_are_told(machine):
    x, side = torch.ones(8, device="cuda"), torch.cuda.Stream()

    def race(write):
        write(x)
        with torch.cuda.stream(side):
            torch.sum(x)
        torch.cuda.synchronize()

    with pytest.warns(RaceWarning):
        race(torch.Tensor.zero_)
    with pytest.warns(RaceWarning), gputrace.record() as trace:
        race(torch.Tensor.normal_)
    (found,) = trace.races
    spans = trace.spans
    kernels = np.flatnonzero(spans.kind == KERNEL)
    assert [(s.name, s.stream) for s in (found.first, found.second)] == [
        ("normal_", 0),
        ("sum", side.stream_id),
    ]
    assert found.kind == "stale read" and found.second.line.startswith("test_spans.py:")
    for told, span in zip((found.first, found.second), kernels, strict=True):
        assert (told.start, told.end) == (
            pytest.approx(spans.start[span]),
            pytest.approx(spans.end[span]),
        )


def test_columns_are_in_order_and_launches_keep_their_span():
    spans = Spans.of(
        [
            (2.0, 1.0, HOST, 0, LAUNCH, "b", 1, -1),
            (1.0, 1.0, 0, 0, KERNEL, "a", 2, 0),
            (0.0, 0.5, 0, 0, H2D, "b", 3, -1),
        ]
    )
    assert spans.start.tolist() == [0, 1, 2] and spans.end.tolist() == [0.5, 2, 3]
    assert [spans.names[name] for name in spans.name] == [
        "b",
        "a",
        "b",
    ] and spans.launch.tolist() == [-1, 2, -1]
    assert len(Spans.of([])) == 0


def test_what_follows_one_another_overlaps_in_nothing():
    """The sums of these times are rounded in floating point."""
    generator = np.random.default_rng(0)
    for _ in range(50):
        edges = np.cumsum(generator.random(9) * 1e-3)
        spans = Spans.of(
            (start, end - start, 0, 0, (KERNEL, H2D)[index % 2], "x", 0, -1)
            for index, (start, end) in enumerate(pairwise(edges))
        )
        assert seconds_of_both(spans, spans.kind == KERNEL, spans.kind == H2D) == 0.0


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0.0),
        ([(1, 3)], 2.0),
        ([(0, 1), (2, 4)], 3.0),
        ([(0, 2), (1, 3)], 3.0),
        ([(0, 4), (1, 2), (5, 6)], 5.0),  # nothing is idle while the first still runs
    ],
)
def test_what_overlaps_counts_once(spans, seconds):
    start, end = np.array(spans, float).reshape(-1, 2).T
    told = SimpleNamespace(start=start, end=end)
    assert seconds_of(told, np.ones(len(start), bool)) == seconds
