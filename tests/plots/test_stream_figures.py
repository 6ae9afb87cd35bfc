"""The figures of streams."""

import pytest

from labkit import plots
from labkit.experiments import overlap
from labkit.experiments.result import Result
from labkit.experiments.two_streams import COLUMNS

TIMES = {
    "copies alone": 0.004,
    "kernels alone": 0.008,
    "pageable memory": 0.02,
    "pinned memory": 0.012,
    "pinned, on a stream of its own": 0.009,
}


def copies(times: dict[str, float], badge: str = "measured on paper", **more) -> Result:
    rows = [{"way": way, "seconds": seconds} for way, seconds in times.items()]
    return Result("copy_overlap", {"ways": list(times)}, overlap.COLUMNS, rows, badge, **more)


def chains(gains: dict[int, float], badge: str = "measured on paper", **more) -> Result:
    rows = [
        {"width": width, "streams": streams, "seconds": 0.01 / (gain if streams == 2 else 1)}
        for width, gain in gains.items()
        for streams in (1, 2)
    ]
    return Result("two_streams", {"widths": list(gains) or [64]}, COLUMNS, rows, badge, **more)


RECORDED = {"badge": "recorded on NVIDIA H200", "origin": {"machine": "NVIDIA H200"}}


@pytest.mark.parametrize(
    ("times", "title"),
    [
        (TIMES, "A stream of its own for the copies hides 75% of the copying"),
        (TIMES | {"copies alone": 0.01, "kernels alone": 0.002}, "A stream of its own for the copies hides 100% of the computing"),
        ({"copies alone": 0.01}, "Not measured yet: copies, kernels, and both on two streams"),
        ({}, "Not measured yet: copies, kernels, and both on two streams"),
    ],
)
def test_the_title_says_how_much_is_hidden(times, title):
    assert plots.copy_overlap(copies(times)).title == title


def test_the_words_hold_all_times_recording_and_badge():
    assert plots.copy_overlap(copies(TIMES), copies({"copies alone": 0.001}, **RECORDED)).alt == (
        "A stream of its own for the copies hides 75% of the copying. Copies alone 4 ms; kernels alone 8 ms; pageable memory 20 ms; "
        "pinned memory 12 ms; pinned, on a stream of its own 9 ms. Recorded on NVIDIA H200: copies alone 1 ms. Measured on paper."
    )


def test_recorded_bars_are_dashed_and_below(drawn):
    plots.copy_overlap(copies(TIMES), copies(TIMES, **RECORDED))
    bars = drawn[-1].axes[0].patches
    assert [bar.get_linestyle() in ("--", "dashed") for bar in bars] == [False] * 5 + [True] * 5
    assert [bar.get_width() for bar in bars] == list(TIMES.values()) * 2
    assert bars[5].get_y() >= bars[0].get_y() + bars[0].get_height() - 1e-9


@pytest.mark.parametrize(
    ("gains", "title"),
    [
        ({64: 1.0, 256: 1.9, 512: 1.3, 4096: 1.0}, "Two streams are 1.9 times faster at width 256, no faster at 64 and 4096"),
        ({64: 1.0, 256: 1.9}, "Two streams are 1.9 times faster at width 256, no faster at 64"),
        ({64: 1.2, 256: 1.9}, "Two streams are 1.9 times faster at width 256"),
        ({64: 1.0, 256: 0.9}, "Two streams are no faster than one at any width"),
        ({}, "Not measured yet: one stream and two at one width"),
    ],
)
def test_the_title_says_where_two_streams_help(gains, title):
    assert plots.two_streams(chains(gains)).title == title


def test_solid_is_measured_dashed_is_recorded(drawn):
    figure = plots.two_streams(chains({64: 1.0, 256: 1.9}), chains({64: 1.0, 256: 1.5}, **RECORDED))
    assert [line.get_linestyle() for line in drawn[-1].axes[0].lines] == ["--", "-"]
    assert figure.alt.endswith(
        "Faster on two streams, width 64: 1.00 times, width 256: 1.90 times. "
        "Recorded on NVIDIA H200: faster on two streams, width 64: 1.00 times, width 256: 1.50 times. Measured on paper."
    )
