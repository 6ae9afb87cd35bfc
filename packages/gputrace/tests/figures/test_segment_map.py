"""The map of an allocator's segments: what it finds, says and shows."""

import pytest

from gputrace import figures as plots
from gputrace.events import ACTIVATIONS, PARAMETERS

MIB = 1 << 20
SIDE = 0x7F3A5C00  # a stream's handle, which is an address


@pytest.fixture
def fragmented(trace_of):
    """A trace with free blocks of 6 and 4 MiB, a waiting block, a small segment and a stream."""
    return trace_of(
        [
            (0.0, "segment_alloc", 100, 20),
            (0.1, "alloc", 100, 6, 0, 1, ACTIVATIONS),
            (0.2, "alloc", 106, 10, 0, 1, PARAMETERS),
            (0.3, "free_requested", 100, 6, 0, 2, ACTIVATIONS),
            (0.4, "free_completed", 100, 6, 0, 2, ACTIVATIONS),
            (0.5, "segment_alloc", 10, 2),
            (0.6, "alloc", 10, 1, 0, 1),
            (0.7, "segment_alloc", 300, 20, 0, 0, 5, SIDE),
            (0.8, "alloc", 300, 20, 0, 1, 5, SIDE),
            (0.9, "free_requested", 300, 20, 0, 1, 5, SIDE),
        ]
    )


def test_the_title_counts_the_free_pieces_and_the_words_prove_it(fragmented):
    figure = fragmented.plot_segments("end")
    assert figure.title == "At the end: 11 MiB free in 3 pieces, the largest 6 MiB"
    assert figure.alt == (
        "At the end: 11 MiB free in 3 pieces, the largest 6 MiB. "
        "Large, default stream: 1 segment, 20 MiB, of which 10 MiB free. "
        "Large, stream 1: 1 segment, 20 MiB, of which 0 B free. "
        "Small, default stream: 1 segment, 2 MiB, of which 1 MiB free. "
        "In use: 10 MiB parameters, 1 MiB other; 20 MiB freed, but another stream may use it. "
        "Measured on paper."
    )


@pytest.mark.parametrize(
    ("at", "title"),
    [
        ("start", "At the start nothing is reserved on cuda:0"),
        ("peak", "At the peak: 11 MiB free in 3 pieces, the largest 6 MiB"),
        (1, "After 1 event: 20 MiB free in one piece"),
        (3, "After 3 events: 4 MiB free in one piece"),
        (0.35, "After 350 ms: 4 MiB free in one piece"),
    ],
)
def test_the_moment_is_told(fragmented, at, title):
    assert fragmented.plot_segments(at).title == title


def test_another_moment_or_device_is_refused(fragmented):
    with pytest.raises(ValueError, match="at=.noon.: expected .start."):
        fragmented.plot_segments("noon")
    with pytest.raises(ValueError, match="device=4: expected one of the recorded devices 0"):
        plots.segment_map(fragmented, "end", 4)


def test_pools_and_streams_have_names_and_blocks_their_sizes_and_kinds(fragmented, drawn, texts):
    plots.segment_map(fragmented, "end")
    told = texts(drawn[-1])
    assert {"large, default stream", "large, stream 1", "small, default stream"} < {
        text.split("\n")[0] for text in told
    }
    assert {"6 MiB", "4 MiB", "1 MiB"} < set(told)
    assert {
        "parameters",
        "other",
        "free",
        "freed, but another stream may use it",
        "measured on paper",
    } < set(told)
    assert not any("activations" in text or str(SIDE) in text for text in told)
    large, small = drawn[-1].axes
    assert large.get_xlim() == (0, 20 * MIB) and small.get_xlim() == (0, 2 * MIB)


def test_words_lie_inside_the_picture_and_are_large_enough(fragmented, drawn, legible):
    plots.segment_map(fragmented, "end")
    legible(drawn[-1])


def test_a_refused_request_is_the_finding_at_its_moment(trace_of):
    rows = [
        (0.0, "segment_alloc", 100, 20),
        (0.1, "alloc", 106, 6, 0, 1),
        (0.2, "oom", 300, 500, 0, 2),
        (0.3, "alloc", 100, 2, 0, 1),
    ]
    trace = trace_of(rows)
    assert trace.plot_segments(3).title == trace.plot_segments(2).title
    assert trace.plot_segments(3).title.startswith("500 MiB refused: ")
    assert trace.plot_segments("end").title.startswith("At the end: ")


def test_everything_in_use(trace_of):
    full = trace_of([(0.0, "segment_alloc", 100, 20), (0.1, "alloc", 100, 20, 0, 1)])
    assert full.plot_segments().title == "At the peak all 20 MiB reserved are in use"


def test_several_devices_are_told_apart(trace_of):
    trace = trace_of(
        [(0.1, action, 100, size, 1, 1) for action, size in (("segment_alloc", 20), ("alloc", 12))]
    )
    assert plots.segment_map(trace).title == "At the peak on cuda:1: 8 MiB free in one piece"
    assert plots.segment_map(trace, "end", 0).title == "At the end nothing is reserved on cuda:0"


def test_hundreds_of_segments_are_all_there_and_thousands_are_cut(trace_of, drawn, texts):
    def segments(count):
        return trace_of([(0.0, "segment_alloc", 100 * n, 20) for n in range(1, count + 1)])

    plots.segment_map(segments(300), "end")
    assert not any("more segments" in text for text in texts(drawn[-1]))
    plots.segment_map(segments(5000), "end")
    assert any("bytes; and " in text and "more segments, " in text for text in texts(drawn[-1]))


def test_streams_are_numbered_as_they_were_met_and_on_virtual_gpus_as_they_were_made(trace_of):
    def names(*handles):
        return trace_of(
            [
                (0.1 * n, "segment_alloc", 200 * n, 20, 0, 0, 5, handle)
                for n, handle in enumerate(handles, 1)
            ]
        ).stream_names(0)

    assert names(0x5599, 0x5507, 0) == {0: "default stream", 0x5599: "stream 1", 0x5507: "stream 2"}
    assert names(2 << 5 | 3, 5, 3) == {
        0: "default stream",
        3: "stream 1",
        5: "stream 1 of priority -1",
        67: "stream 3",
    }


def test_a_moment_that_did_not_come_is_told(training):
    for ask in (training.segments, training.plot_segments):
        with pytest.raises(
            ValueError,
            match="at='oom': expected 'start', 'peak', .* Memory did not run out in this recording",
        ):
            ask("oom")
