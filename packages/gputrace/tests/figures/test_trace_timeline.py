"""The timeline: what the figure finds, says and shows."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgba

from gputrace.attribution import with_marks
from gputrace.figures.lanes import BACKWARD, COLLECTIVE, LOOKS, RACE
from gputrace.phases import NotedMark, Phase
from gputrace.spans import (
    D2H,
    H2D,
    HOST,
    KERNEL,
    KINDS,
    LAUNCH,
    P2P,
    WAIT,
    Execution,
    RacingSpan,
    RecordedRace,
    Spans,
    Waits,
)

MIB = 1 << 20
BASE = (
    (0.0, 0.2, HOST, 0, LAUNCH, "mm", 1, -1),
    (0.2, 4.0, 0, 0, KERNEL, "mm", 1, 0),
    (0.2, 0.2, HOST, 0, LAUNCH, "copy", 1, -1),
    (0.4, 2.0, 0, 3, H2D, "copy", 1, 2),
    (5.0, 1.0, 0, 0, KERNEL, "add", 2, -1),
    (6.0, 2.0, 0, 0, D2H, "copy", 2, -1),
    (0.4, 7.6, HOST, 0, WAIT, "synchronize device", 2, -1),
)


@pytest.fixture
def timeline(trace_of):
    """A function that returns a trace of spans given in seconds."""

    def make(rows=BASE, waits=(), races=(), devices=(0,), **more):
        work = Execution(
            Spans.of(rows),
            Waits.of(waits),
            list(races),
            more.pop("lost_spans", 0),
            more.pop("missing", ""),
        )
        work = with_marks(work, more.get("phases", []), more.pop("marks", []), 10.0)
        memory = [
            (0.5, "segment_alloc", 100, 200),
            (1.0, "alloc", 100, 60, 0, 1),
            (9.0, "free_requested", 100, 60),
            (9.0, "free_completed", 100, 60),
        ]
        totals = dict.fromkeys(devices, 1024 * MIB)
        return trace_of(memory, **{"seconds": 10.0, "execution": work, "totals": totals, **more})

    return make


def of_colour(axes, colour) -> list:
    return [
        drawn
        for drawn in axes.collections
        if type(drawn) is PolyCollection
        and len(drawn.get_facecolor())
        and tuple(drawn.get_facecolor()[0]) == to_rgba(colour)
    ]


def test_title_and_words_say_how_busy_and_how_much_overlapped(timeline):
    figure = timeline().plot_timeline()
    assert figure.title == "The GPU worked 70% of 10 s; kernels overlap 50% of its copying"
    assert figure.alt == (
        "The GPU worked 70% of 10 s; kernels overlap 50% of its copying. "
        "Cuda:0: kernels 5 s; copies 4 s, of which 2 s while kernels ran; idle 3 s of 10 s. "
        "The host waited 7.6 s; 0 waits of a stream for another. 4 kernels and copies. "
        "Measured on paper."
    )


def test_lanes_names_shares_legend_and_badge_are_there(timeline, drawn, texts):
    timeline().plot_timeline()
    shown = texts(drawn[-1])
    assert (
        shown.index("host")
        < shown.index("default stream")
        < shown.index("stream 1")
        < shown.index("h2d engine")
        < shown.index("d2h engine")
    )
    assert {
        "waits 76%",
        "busy 70%",
        "busy 20%, of which\n100% overlapped",
        "busy 20%, of which\n0% overlapped",
    } < set(shown)
    assert {
        "kernel",
        "copy host to GPU",
        "copy GPU to host",
        "launch",
        "host waits",
        "mm",
        "add",
    } < set(shown)
    assert (
        {"measured on paper", "time since the start, s"} < set(shown)
        and "stream waits" not in shown
        and "race" not in shown
    )


def test_boxes_lie_in_their_lanes_at_their_times(timeline, drawn):
    timeline().plot_timeline()
    axes = drawn[-1].axes[0]

    def boxes(kind):
        found = [
            path.get_extents()
            for shown in of_colour(axes, LOOKS[kind]["facecolor"])
            for path in shown.get_paths()
        ]
        return sorted((round(box.x0, 3), round(box.x1, 3), int(box.y0)) for box in found)

    assert boxes(KERNEL) == [(0.2, 4.2, 1), (5.0, 6.0, 1)]
    assert boxes(H2D) == [(0.4, 2.4, 2), (0.4, 2.4, 3)]  # on the stream and on the engine
    assert boxes(D2H) == [(6.0, 8.0, 1), (6.0, 8.0, 4)]
    assert boxes(WAIT) == [(0.4, 8.0, 0)]


def test_kinds_can_be_told_apart_without_colour():
    looks = {
        (kind if kind == KERNEL else LOOKS[kind].get("hatch"))
        for kind in range(len(KINDS))
        if kind != LAUNCH
    }
    # launches lie in the host's lane, and nothing else there is plain
    assert len(looks) == len(KINDS) - 1


def test_words_lie_inside_the_picture_and_are_large_enough(timeline, drawn, legible):
    race = RecordedRace(
        RacingSpan(0, 0, "mm", "train.py:11", 0.2, 0.2, 4.2),
        RacingSpan(0, 3, "copy", "train.py:12", 0.4, 0.4, 2.4),
        "stale read",
    )
    waits = [(2.4, 0, 3, 5.0, 0, 0, 1)]
    phases = [Phase("forward", 0, 1, 1), Phase("backward", 1, 2, 1)]
    for memory in (False, True):
        timeline(waits=waits, races=[race] * 5, phases=phases, lost_spans=7).plot_timeline(
            memory=memory
        )
        legible(drawn[-1])


def test_waits_are_arrows_from_the_event_to_the_stream_that_waits(timeline, drawn, texts):
    # a stream without work has no lane
    figure = timeline(waits=[(2.4, 0, 3, 5.0, 0, 0, 1), (1.0, 0, 99, 2.0, 0, 0, 1)]).plot_timeline()
    (arrows,) = [
        shown for shown in drawn[-1].axes[0].collections if isinstance(shown, LineCollection)
    ]
    assert [segment.tolist() for segment in arrows.get_segments()] == [[[2.4, 2.1], [5.0, 1.9]]]
    assert "stream waits" in texts(drawn[-1]) and "2 waits of a stream for another" in figure.alt


def test_races_are_red_and_name_both_lines(timeline, drawn, texts):
    race = RecordedRace(
        RacingSpan(0, 0, "mm", "train.py:11", 0.2, 0.2, 4.2),
        RacingSpan(0, 3, "copy", "train.py:12", 0.4, 0.4, 2.4),
        "stale read",
    )
    figure = timeline(races=[race]).plot_timeline()
    assert figure.title == "A race: nothing orders train.py:11 before train.py:12"
    assert "Race: stale read: mm (train.py:11) and copy (train.py:12)." in figure.alt
    assert "1  stale read: mm (train.py:11) and copy (train.py:12)" in texts(drawn[-1])
    frames = [
        shown
        for shown in drawn[-1].axes[0].collections
        if to_rgba(RACE) in [tuple(edge) for edge in shown.get_edgecolor()]
    ]
    assert len(frames) == 2
    figure = timeline(races=[race] * 5).plot_timeline()
    assert figure.title.startswith("5 races: ") and any(
        text.startswith("3  ") and text.endswith("; and 2 more") for text in texts(drawn[-1])
    )


def test_a_race_with_the_host_reaches_the_hosts_lane(timeline, drawn):
    race = RecordedRace(
        RacingSpan(0, 0, "mm", "a.py:1", 0.2, 0.2, 4.2),
        RacingSpan(HOST, 0, "numpy", "a.py:2", 3.0, 3.0, 3.0),
        "stale read",
    )
    timeline(races=[race]).plot_timeline()
    line = next(line for line in drawn[-1].axes[0].lines if line.get_color() == RACE)
    assert line.get_ydata()[1] < 1 < line.get_ydata()[0] + 1e-9


def test_several_devices_each_with_its_lanes(timeline, drawn, texts):
    rows = [*BASE, (1.0, 5.0, 1, 0, KERNEL, "mm", 1, -1), (6.0, 1.0, 1, 0, P2P, "copy", 1, -1)]
    trace = timeline(rows, devices=(0, 1))
    assert trace.plot_timeline().title == "cuda:0 worked 70%, cuda:1 60% of 10 s, both at once 52%"
    shown = texts(drawn[-1])
    assert {"cuda:0 default", "cuda:0 stream 1", "cuda:1 default"} < set(shown) and not any(
        "p2p" in text for text in shown
    )
    assert (
        trace.plot_timeline("cuda:1").title
        == "cuda:1 worked 60% of 10 s; kernels overlap 0% of its copying"
    )
    assert not any("cuda:0" in text for text in texts(drawn[-1]))


def test_with_collectives_the_finding_is_how_much_of_them_is_hidden(timeline):
    rows = [
        (0.0, 4.0, 0, 0, KERNEL, "mm", 1, -1),
        (2.0, 4.0, 0, 1, KERNEL, "nccl all_reduce", 1, -1),
    ]
    trace = timeline([*rows, (2.0, 4.0, 1, 1, KERNEL, "nccl all_reduce", 1, -1)], devices=(0, 1))
    assert (
        trace.plot_timeline().title
        == "Of the time in collectives, 25% is hidden behind other kernels"
    )
    assert (
        trace.plot_timeline(0).title
        == "Of the time in collectives, 50% is hidden behind other kernels"
    )


def test_many_devices_have_a_range(timeline):
    rows = [(0.0, 4.0 + device, device, 0, KERNEL, "mm", 1, -1) for device in range(4)]
    assert (
        timeline(rows, devices=range(4)).plot_timeline().title == "4 GPUs worked 40% to 70% of 10 s"
    )
    assert (
        timeline([(0.0, 5.0, *row[2:]) for row in rows], devices=range(4)).plot_timeline().title
        == "4 GPUs worked 50% of 10 s"
    )


def test_kernels_that_a_backward_launched_are_told_apart_however_late_they_run(
    timeline, drawn, texts
):
    timeline(phases=[Phase("forward", 0.1, 0.3, 1), Phase("backward", 4.9, 5.5, 1)]).plot_timeline()
    (box,) = [
        path.get_extents()
        for shown in of_colour(drawn[-1].axes[0], LOOKS[BACKWARD]["facecolor"])
        for path in shown.get_paths()
    ]
    assert (box.x0, box.x1) == (5.0, 6.0) and {"kernel", "kernel, backward", "add"} < set(
        texts(drawn[-1])
    )
    timeline(phases=[Phase("backward", 0.0, 0.3, 1)]).plot_timeline()
    (box,) = [
        path.get_extents()
        for shown in of_colour(drawn[-1].axes[0], LOOKS[BACKWARD]["facecolor"])
        for path in shown.get_paths()
    ]
    assert (box.x0, box.x1) == pytest.approx((0.2, 4.2))


def test_collectives_have_a_colour_of_their_own_also_in_a_backward_pass(timeline, drawn, texts):
    rows = [
        (0.0, 2.0, 0, 0, KERNEL, "mm", 1, -1),
        (2.0, 3.0, 0, 1, KERNEL, "nccl all_reduce", 1, -1),
    ]
    timeline(rows, phases=[Phase("backward", 0.0, 9.0, 1)]).plot_timeline()
    (box,) = [
        path.get_extents()
        for shown in of_colour(drawn[-1].axes[0], LOOKS[COLLECTIVE]["facecolor"])
        for path in shown.get_paths()
    ]
    assert (box.x0, box.x1) == (2.0, 5.0)
    assert {"kernel, backward", "collective"} < set(texts(drawn[-1])) and "kernel" not in texts(
        drawn[-1]
    )


STEPS = [NotedMark("step 0", 0.0, 0.3), NotedMark("step 1", 4.9, 6.5)]


def test_marked_parts_are_brackets_over_what_they_launched_however_late_it_ran(
    timeline, drawn, texts
):
    figure = timeline(marks=STEPS).plot_timeline()
    assert {"step 0", "step 1"} < set(texts(drawn[-1]))
    assert (
        "Marked: step 0 from 200 ms to 4.2 s, step 1 from 5 s to 8 s. Measured on paper."
        in figure.alt
    )
    edges = [line.get_xdata()[0] for line in drawn[-1].axes[0].lines if line.is_dashed()]
    assert edges == pytest.approx([0.2, 4.2, 5.0, 8.0])
    alone = timeline(marks=STEPS).plot_timeline(start=4.5)
    assert "step 0" not in texts(drawn[-1]) and "Marked: step 1" in alone.alt
    assert "Marked" not in timeline().plot_timeline().alt


def test_the_title_compares_the_collectives_of_the_marked_parts(timeline):
    rows = [
        (0.0, 1.0, 0, 0, KERNEL, "mm", 1, -1),
        (1.0, 1.0, 0, 1, KERNEL, "nccl all_reduce", 1, -1),
        (2.0, 2.0, 0, 0, KERNEL, "mm", 1, -1),
        (3.0, 2.0, 0, 1, KERNEL, "nccl all_reduce", 1, -1),
    ]
    marks = [NotedMark("step 0", 0.0, 1.5), NotedMark("step 1", 1.8, 3.5)]
    assert (
        timeline(rows, marks=marks).plot_timeline().title
        == "Hidden behind kernels: 0% of the collectives in step 0, 50% in step 1"
    )
    alone = timeline(rows, marks=marks[:1]).plot_timeline()
    assert alone.title == "Of the time in collectives, 33% is hidden behind other kernels"
    without = timeline(
        [*rows, (6.0, 1.0, 0, 0, KERNEL, "mm", 1, -1)], marks=[*marks, NotedMark("end", 5.5, 6.5)]
    ).plot_timeline()
    assert without.title == alone.title


def test_the_legend_has_no_kind_that_is_narrower_than_a_pixel(timeline, texts, drawn):
    rows = [(0.0, 9.0, 0, 0, KERNEL, "mm", 1, -1), (9.0, 0.001, 0, 0, H2D, "copy", 1, -1)]
    timeline(rows).plot_timeline()
    assert "kernel" in texts(drawn[-1]) and "copy host to GPU" not in texts(drawn[-1])


def test_a_marked_part_inside_another_is_left_out(timeline, drawn, texts):
    inner, outer = NotedMark("inner", 4.9, 5.5), NotedMark("outer", 0.0, 9.0)
    timeline(marks=[inner, outer]).plot_timeline()
    assert "outer" in texts(drawn[-1]) and "inner" not in texts(drawn[-1])


def test_a_marked_part_of_several_devices_is_one_bracket(timeline, drawn, texts):
    rows = [(0.0 + device, 4.0, device, 0, KERNEL, "mm", 1, -1) for device in range(2)]
    figure = timeline(rows, devices=range(2), marks=[NotedMark("step", 0.0, 9.0)]).plot_timeline()
    assert "Marked: step from 0 µs to 5 s" in figure.alt and texts(drawn[-1]).count("step") == 1


def test_marks_stand_between_the_lanes_and_the_memory(timeline, drawn, legible):
    timeline(marks=STEPS).plot_timeline(memory=True)
    lanes, memory = drawn[-1].axes[0], drawn[-1].axes[-1]
    [text] = [text for text in lanes.texts if text.get_text() == "step 0"]
    box = text.get_window_extent()
    assert lanes.get_window_extent().y1 <= box.y0 and box.y1 <= memory.get_window_extent().y0
    legible(drawn[-1])


def test_of_very_many_waits_only_those_are_drawn_that_held_a_stream_up(timeline, drawn):
    # the last: nothing had run
    waits = [(2.4, 0, 3, 5.0, 0, 0, 1)] * 40 + [
        (5.0, 0, 3, 5.0, 0, 0, 1),
        (0.1, 0, 3, 0.1, 0, 0, 1),
    ]
    timeline(waits=waits).plot_timeline()
    (arrows,) = [
        shown for shown in drawn[-1].axes[0].collections if isinstance(shown, LineCollection)
    ]
    assert [segment[0][0] for segment in arrows.get_segments()] == [5.0]


def test_lanes_for_which_there_is_no_room_are_counted(timeline, drawn, texts):
    rows = [(0.0, 1.0 + stream, 0, stream, KERNEL, "mm", 1, -1) for stream in range(30)] + [
        (0.0, 1.0, HOST, 0, LAUNCH, "mm", 1, -1)
    ]
    timeline(rows, seconds=40.0).plot_timeline()
    shown = texts(drawn[-1])
    left_out = next(text for text in shown if "left out" in text)
    names = [text for text in shown if text.startswith("stream ")]
    assert (
        left_out == f"{30 - len(names)} lanes left out"
        and "host" in shown
        and "default stream" not in shown
    )
    assert names[-1] == "stream 29"  # the busiest


def test_memory_stands_above_on_the_same_axis(timeline, drawn, texts):
    timeline().plot_timeline(memory=True)
    lanes, memory = drawn[-1].axes
    assert (
        memory.get_position().y0 > lanes.get_position().y1
        and memory.get_xlim() == lanes.get_xlim() == (0.0, 10.0)
    )
    (area,) = [patch for patch in memory.patches if patch.get_data().values.max() == 60 * MIB]
    held = area.get_data()
    assert held.edges[np.flatnonzero(held.values)[[0, -1]]] == pytest.approx([1.0, 9.0], abs=0.03)
    assert {"reserved", "other", "memory"} < set(texts(drawn[-1]))


def test_a_part_of_the_recording(timeline, drawn, texts):
    trace = timeline(phases=[Phase("forward", 0, 4, 1), Phase("backward", 4, 8, 1)])
    trace.plot_timeline(start=4.5, end=7.0, memory=True)
    lanes, strip, memory = drawn[-1].axes
    assert lanes.get_xlim() == strip.get_xlim() == memory.get_xlim() == (4.5, 7.0)
    shown = texts(drawn[-1])
    assert "backward" in shown and "forward" not in shown and "add" in shown and "mm" not in shown
    figure = trace.plot_timeline(start=4.5)
    assert drawn[-1].axes[0].get_xlim() == (4.5, 10.0)
    whole = trace.plot_timeline()
    assert "of 5.5 s" in figure.alt and "of 10 s" in whole.alt  # the words tell of what is drawn
    assert "2 kernels and copies" in figure.alt and "idle 2.5 s of 5.5 s" in figure.alt


def test_the_shares_beside_the_lanes_are_of_the_part_that_is_drawn(timeline, drawn, texts):
    """A collective is hidden, and the host waits, in only one half of the trace."""
    rows = [
        (0.0, 5.0, HOST, 0, WAIT, "synchronize device", 1, -1),
        (0.0, 2.0, 0, 0, KERNEL, "mm", 1, -1),
        (2.0, 3.0, 0, 1, KERNEL, "nccl all_reduce", 1, -1),
        (5.0, 5.0, 0, 0, KERNEL, "mm", 1, -1),
        (6.0, 2.0, 0, 1, KERNEL, "nccl all_reduce", 1, -1),
    ]
    for part, hidden, shares in (
        ({"end": 5.0}, "0%", {"waits 100%", "busy 40%", "busy 60%, of which\n0% overlapped"}),
        ({"start": 5.0}, "100%", {"waits 0%", "busy 100%", "busy 40%, of which\n100% overlapped"}),
        (
            {"start": 1.0, "end": 7.0},
            "25%",
            {"waits 67%", "busy 50%", "busy 67%, of which\n25% overlapped"},
        ),
        ({}, "40%", {"waits 50%", "busy 70%", "busy 50%, of which\n40% overlapped"}),
    ):
        figure = timeline(rows).plot_timeline(**part)
        assert (
            figure.title == f"Of the time in collectives, {hidden} is hidden behind other kernels"
        )
        assert {text for text in texts(drawn[-1]) if text.startswith(("busy", "waits "))} == shares


def test_the_legend_and_the_lanes_that_are_kept_are_of_the_part_that_is_drawn(
    timeline, drawn, texts
):
    timeline().plot_timeline(start=4.5, end=5.5)
    assert {"kernel", "host waits"} < set(texts(drawn[-1])) and not any(
        "copy" in text for text in texts(drawn[-1])
    )
    rows = [(0.0, 10.0 + stream, 0, stream, KERNEL, "mm", 1, -1) for stream in range(30)] + [
        (41.0, 9.0, 0, 0, KERNEL, "mm", 1, -1)
    ]
    timeline(rows, seconds=50.0).plot_timeline(start=40.0)
    shown = texts(drawn[-1])
    # busiest here, though not in the whole
    assert "default stream" in shown and any("left out" in text for text in shown)


def test_a_race_outside_the_part_that_is_drawn_is_not_its_finding(timeline):
    first, second = (
        RacingSpan(0, 0, "mm", "train.py:11", 0.2, 0.2, 4.2),
        RacingSpan(0, 3, "copy", "train.py:12", 0.4, 0.4, 2.4),
    )
    trace = timeline(races=[RecordedRace(first, second, "stale read")])
    assert "race" not in trace.plot_timeline(start=4.5).alt.lower()
    assert trace.plot_timeline(start=3.0).title.startswith("A race: ")


@pytest.mark.parametrize(("start", "end"), [(5, 5), (6, 5), (-1, 5), (float("nan"), 5), (11, None)])
def test_a_part_that_is_none_is_refused(timeline, start, end):
    with pytest.raises(ValueError, match=r"give seconds from 0 to 10, the start before the end"):
        timeline().plot_timeline(start=start, end=end)


def test_a_device_that_is_none_is_refused(timeline):
    with pytest.raises(ValueError, match="device=3: expected one of the recorded devices 0"):
        timeline().plot_timeline(3)


def test_without_a_timeline_there_is_one_clear_error(timeline):
    with pytest.raises(RuntimeError, match=r"^this recording has no timeline: no profiler here$"):
        timeline([], missing="no profiler here").plot_timeline()


def test_nothing_ran(timeline, drawn):
    figure = timeline([]).plot_timeline(memory=True)
    assert figure.title == "Nothing ran on cuda:0 in 10 s" and "0 kernels and copies" in figure.alt
    assert timeline([], seconds=0.0).plot_timeline().png


def test_lost_spans_are_told(timeline, drawn, texts):
    figure = timeline(lost_spans=9).plot_timeline()
    assert (
        "oldest 9 spans lost" in texts(drawn[-1])
        and "The oldest 9 spans and waits were lost." in figure.alt
    )


def test_a_crowd_of_spans_is_drawn_by_its_share_of_the_time_and_that_is_said(
    timeline, drawn, texts
):
    rows = [(i * 1e-3, 0.5e-3, 0, 0, KERNEL, "add", 1, -1) for i in range(10000)]
    timeline(rows).plot_timeline()
    axes = drawn[-1].axes[0]
    heights = [
        path.get_extents().height
        for shown in of_colour(axes, LOOKS[KERNEL]["facecolor"])
        for path in shown.get_paths()
    ]
    assert "low bars: share of time" in texts(drawn[-1]) and np.median(heights) == pytest.approx(
        0.5 * 0.8, rel=0.05
    )
    timeline().plot_timeline()
    assert "low bars: share of time" not in texts(drawn[-1])


def test_the_picture_is_the_same_every_time(timeline):
    assert timeline().plot_timeline(memory=True).png == timeline().plot_timeline(memory=True).png


def test_names_of_any_kind_are_written_as_they_are(timeline, drawn, texts):
    spans = timeline().spans
    odd = replace(spans, names=["$x$ 漢" if name == "mm" else name for name in spans.names])
    timeline(execution=Execution(odd, Waits.of([]), [])).plot_timeline()
    assert "$x$ □" in texts(drawn[-1])


def test_collectives_are_joined_from_gpu_to_gpu(timeline, drawn):
    rows = [
        (device, 5.0 - device, device, 1, KERNEL, "nccl all_reduce", 1, -1) for device in (0, 1)
    ]
    timeline(
        [*rows, (1.0, 1.0, 0, 1, KERNEL, "nccl broadcast", 1, -1)], devices=(0, 1)
    ).plot_timeline()
    joints = [
        shown
        for shown in drawn[-1].axes[0].collections
        if isinstance(shown, LineCollection) and len(shown.get_segments())
    ]
    assert [segment[:, 0].tolist() for shown in joints for segment in shown.get_segments()] == [
        [5.0, 5.0]
    ]
