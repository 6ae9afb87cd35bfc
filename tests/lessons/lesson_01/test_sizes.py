"""A training step on CPU and GPU by its size, measured and drawn."""

import pytest

import labkit
from gpulessons.lesson_01.labs import host_and_device, plot_host_and_device
from gpulessons.lesson_01.labs.sizes import gpu_gain
from labkit.labs import Result, collect


def test_the_gpu_gains_with_the_width_and_repeats_itself():
    with labkit.use(virtual=True, quiet=True):
        first, second = (collect(host_and_device(widths=[16, 512], repeats=2)) for _ in range(2))
    assert first.column("seconds") == pytest.approx(second.column("seconds"))
    gain = gpu_gain(first)
    assert gain[16] < 1.2  # a small step is all launches
    assert gain[512] > 2


def test_a_stopped_run_gains_only_where_both_were_measured():
    with labkit.use(virtual=True, quiet=True):
        run = host_and_device(widths=[16, 32], repeats=1)
        assert run.total == 4
        next(run), next(run), next(run)
    assert list(gpu_gain(run.result())) == [16]


def test_bad_arguments_are_refused():
    with labkit.use(virtual=True, quiet=True):
        with pytest.raises(ValueError, match="widths=.*from 1 to 16384"):
            host_and_device(widths=[0])
        with pytest.raises(ValueError, match="batch=0"):
            host_and_device(batch=0)


@pytest.mark.gpu
def test_a_real_gpu_wins_a_wide_step():
    with labkit.use(virtual=False, quiet=True):
        assert gpu_gain(collect(host_and_device(widths=[2048])))[2048] > 1


def steps(seconds):
    """A result from {width: (CPU seconds, GPU seconds)}."""
    rows = [
        {"width": width, "device": device, "seconds": value}
        for width, pair in seconds.items()
        for device, value in zip(("cpu", "cuda"), pair, strict=True)
    ]
    columns = {"width": "neurons", "device": "", "seconds": "seconds"}
    return Result("host_and_device", {"widths": list(seconds)}, columns, rows, "measured on paper")


@pytest.mark.parametrize(
    ("seconds", "title"),
    [
        ({16: (1e-4, 4e-4), 512: (1e-3, 4e-4)}, "The CPU wins up to a width of 16; at 512 the GPU is 2.5 times faster"),
        ({16: (1e-4, 4e-4)}, "The CPU wins at every width up to 16"),
        ({16: (1e-3, 4e-4)}, "The GPU wins at every width; at 16 it is 2.5 times faster"),
        ({}, "Not measured yet: CPU and GPU at one width"),
    ],
)
def test_the_winner_stands_in_the_title(seconds, title):
    assert plot_host_and_device(steps(seconds)).title == title


def test_the_words_of_the_steps_hold_both_ends():
    assert "At a width of 16 a step takes 100 µs on the CPU, 400 µs on the GPU; at a width of 512 a step takes 1 ms" in (
        plot_host_and_device(steps({16: (1e-4, 4e-4), 512: (1e-3, 4e-4)})).alt
    )
