"""Two chains of kernels on one stream and on two: measured and drawn."""

import pytest
import torch

import labkit
from gpulessons.lesson_02.labs import plot_two_streams, two_streams
from gpulessons.lesson_02.labs.overlap import COLUMNS, stream_gain
from labkit.labs import Result, collect


@pytest.mark.parametrize("like", ["T4", "H200"])
def test_two_streams_help_neither_tiny_kernels_nor_a_full_gpu(like):
    with labkit.use(gpus=1, like=like, quiet=True):
        gain = stream_gain(collect(two_streams(repeats=1)))
        assert labkit.races() == []
    assert gain[64] < 1.1 and gain[4096] < 1.1
    assert max(gain.values()) > 1.2  # between them there is room


def test_chains_repeat_themselves_and_leave_nothing_behind():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        first, second = (collect(two_streams([64, 32], kernels=2, repeats=2)) for _ in range(2))
        assert torch.ones(2, device="cuda").tolist() == [1, 1]  # values are computed again
    assert first.column("width") == [32, 32, 64, 64] and first.column("streams") == [1, 2, 1, 2]
    assert first.column("seconds") == pytest.approx(second.column("seconds"))


def test_a_stopped_run_gains_only_where_both_were_measured():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        run = two_streams([32, 64], kernels=2, repeats=1)
        for count in (1, 2, 3):
            next(run)
            assert len(stream_gain(run.result())) == count // 2
        run.close()


def test_bad_chains_are_refused():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        with pytest.raises(ValueError, match="widths=.*from 1 to 16384"):
            two_streams([0])
        with pytest.raises(ValueError, match="kernels=0: give a whole number, 1 or more"):
            two_streams(kernels=0)


@pytest.mark.gpu
def test_a_real_gpu_says_the_same_of_chains():
    with labkit.use(gpus=1, virtual=False, quiet=True):
        gain = stream_gain(collect(two_streams([64, 4096])))
    assert gain[64] < 1.3 and gain[4096] < 1.3


def chains(gains: dict[int, float], badge: str = "measured on paper", **more) -> Result:
    rows = [
        {"width": width, "streams": streams, "seconds": 0.01 / (gain if streams == 2 else 1)}
        for width, gain in gains.items()
        for streams in (1, 2)
    ]
    return Result("two_streams", {"widths": list(gains) or [64]}, COLUMNS, rows, badge, **more)


RECORDED = {"badge": "recorded on NVIDIA H200", "origin": {"machine": "NVIDIA H200"}}


@pytest.mark.parametrize(
    ("gains", "title"),
    [
        ({64: 1.0, 256: 1.9, 512: 1.3, 4096: 1.0}, "Two streams help most at width 256: 1.9 times faster"),
        ({64: 1.0, 256: 0.9}, "Two streams are no faster than one at any width"),
        ({}, "Not measured yet: one stream and two at one width"),
    ],
)
def test_the_title_says_where_two_streams_help(gains, title):
    assert plot_two_streams(chains(gains)).title == title


def test_solid_is_measured_dashed_is_recorded(drawn):
    figure = plot_two_streams(chains({64: 1.0, 256: 1.9}), chains({64: 1.0, 256: 1.5}, **RECORDED))
    assert figure.title == "Two streams help most at width 256: 1.9 times faster (recorded: 1.5 at 256)"
    assert [line.get_linestyle() for line in drawn[-1].axes[0].lines] == ["--", "-"]
    assert {"1.50", "1.90", "one stream", "two streams, recorded"} <= {text.get_text() for text in drawn[-1].axes[0].texts}
    assert figure.alt.endswith(
        "Faster on two streams, width 64: 1.00 times, width 256: 1.90 times. "
        "Recorded on NVIDIA H200: faster on two streams, width 64: 1.00 times, width 256: 1.50 times. Measured on paper."
    )
