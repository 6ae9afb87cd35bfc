"""Copies beside kernels, and two chains of kernels: measured and drawn."""

import pytest
import torch

import labkit
from labkit.labs import Result, collect, copy_overlap, plot_copy_overlap, plot_two_streams, two_streams
from labkit.labs.overlap import ALONE, COLUMNS, OVERLAP_COLUMNS, TOGETHER, WAYS, hidden_share, stream_gain


def seconds(result: Result) -> dict[str, float]:
    return dict(zip(result.column("way"), result.column("seconds"), strict=True))


@pytest.mark.parametrize("like", ["T4", "H200"])
def test_only_a_stream_of_its_own_hides_copies(like):
    with labkit.use(gpus=1, like=like, quiet=True):
        result = collect(copy_overlap(repeats=1))
        assert labkit.races() == []
    times = seconds(result)
    assert times["pinned memory"] == pytest.approx(times["copies alone"] + times["kernels alone"], rel=0.05)
    assert times["pageable memory"] > 1.2 * times["pinned memory"]
    assert hidden_share(result) > 0.7 and hidden_share(result, "pinned memory") < 0.1


def test_it_repeats_itself_and_leaves_nothing_behind():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        first, second = (collect(copy_overlap(batches=2, size=1 << 20, width=64, repeats=1)) for _ in range(2))
        assert torch.ones(2, device="cuda").tolist() == [1, 1]  # values are computed again
    assert first.column("way") == list(WAYS)
    assert first.column("seconds") == pytest.approx(second.column("seconds"))


def table(**times: float) -> Result:
    rows = [{"way": way.replace("_", " "), "seconds": value} for way, value in times.items()]
    return Result("copy_overlap", {}, OVERLAP_COLUMNS, rows, "measured on paper")


def test_the_share_is_of_the_shorter_of_the_two():
    assert hidden_share(table(copies_alone=2.0, kernels_alone=8.0, pinned_memory=9.0), "pinned memory") == 0.5
    assert hidden_share(table(copies_alone=8.0, kernels_alone=2.0, pinned_memory=8.0), "pinned memory") == 1.0
    assert hidden_share(table(copies_alone=8.0, kernels_alone=2.0, pinned_memory=12.0), "pinned memory") == 0.0
    assert hidden_share(table(copies_alone=8.0, pinned_memory=12.0), "pinned memory") is None


def test_some_of_the_ways_in_their_own_order():
    with labkit.use(gpus=1, virtual=True, quiet=True):
        run = copy_overlap(ways=[TOGETHER[1], ALONE[0]], batches=1, size=4096, width=8, repeats=1)
        assert run.total == 2
        assert collect(run).column("way") == [ALONE[0], TOGETHER[1]]


def test_bad_arguments_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        copy_overlap()
    with labkit.use(gpus=1, virtual=True, quiet=True):
        for arguments, message in (
            ({"ways": []}, "choose from 'copies alone'"),
            ({"ways": ["by hand"]}, "choose from 'copies alone'"),
            ({"batches": 0}, "batches=0: give a whole number, 1 or more"),
            ({"size": 1 << 30}, f"size={1 << 30}: give a whole number up to {1 << 28}"),
            ({"width": "wide"}, "width='wide'"),
        ):
            with pytest.raises(ValueError, match=message):
                copy_overlap(**arguments)


@pytest.mark.gpu
def test_a_real_gpu_says_the_same():
    with labkit.use(gpus=1, virtual=False, quiet=True):
        result = collect(copy_overlap())
    times = seconds(result)
    assert times[TOGETHER[2]] < times[TOGETHER[1]] < times[TOGETHER[0]]
    assert hidden_share(result) > 0.3  # 0.49 to 0.71 on H200s


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


def test_bad_chains_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        two_streams()
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


TIMES = {
    "copies alone": 0.004,
    "kernels alone": 0.008,
    "pageable memory": 0.02,
    "pinned memory": 0.012,
    "pinned, on a stream of its own": 0.009,
}


def copies(times: dict[str, float], badge: str = "measured on paper", **more) -> Result:
    rows = [{"way": way, "seconds": seconds} for way, seconds in times.items()]
    return Result("copy_overlap", {"ways": list(times)}, OVERLAP_COLUMNS, rows, badge, **more)


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
    assert plot_copy_overlap(copies(times)).title == title


def test_the_words_hold_all_times_recording_and_badge():
    assert plot_copy_overlap(copies(TIMES), copies({"copies alone": 0.001}, **RECORDED)).alt == (
        "A stream of its own for the copies hides 75% of the copying. Copies alone 4 ms; kernels alone 8 ms; pageable memory 20 ms; "
        "pinned memory 12 ms; pinned, on a stream of its own 9 ms. Recorded on NVIDIA H200: copies alone 1 ms. Measured on paper."
    )


def test_recorded_bars_are_dashed_and_below(drawn):
    plot_copy_overlap(copies(TIMES), copies(TIMES, **RECORDED))
    bars = drawn[-1].axes[0].patches
    assert [bar.get_linestyle() in ("--", "dashed") for bar in bars] == [False] * 5 + [True] * 5
    assert [bar.get_width() for bar in bars] == list(TIMES.values()) * 2
    assert bars[5].get_y() >= bars[0].get_y() + bars[0].get_height() - 1e-9


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
