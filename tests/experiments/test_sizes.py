"""Training steps on the CPU and on the GPU."""

import pytest

import labkit
from labkit.experiments import collect, host_and_device
from labkit.experiments.sizes import gpu_gain


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


def test_bad_arguments_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        host_and_device()
    with labkit.use(virtual=True, quiet=True):
        with pytest.raises(ValueError, match="widths=.*from 1 to 16384"):
            host_and_device(widths=[0])
        with pytest.raises(ValueError, match="batch=0"):
            host_and_device(batch=0)


@pytest.mark.gpu
def test_a_real_gpu_wins_a_wide_step():
    with labkit.use(virtual=False, quiet=True):
        assert gpu_gain(collect(host_and_device(widths=[2048])))[2048] > 1
