"""Two chains of kernels on one stream and on two."""

import pytest
import torch

import labkit
from labkit.experiments import collect, two_streams
from labkit.experiments.two_streams import stream_gain


@pytest.mark.parametrize("like", ["T4", "H200"])
def test_two_streams_help_neither_tiny_kernels_nor_a_full_gpu(like):
    with labkit.use(gpus=1, like=like, quiet=True):
        gain = stream_gain(collect(two_streams(repeats=1)))
        assert labkit.races() == []
    assert gain[64] < 1.1 and gain[4096] < 1.1
    assert max(gain.values()) > 1.2  # between them there is room


def test_it_repeats_itself_and_leaves_nothing_behind():
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


def test_bad_arguments_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        two_streams()
    with labkit.use(gpus=1, virtual=True, quiet=True):
        with pytest.raises(ValueError, match="widths=.*from 1 to 16384"):
            two_streams([0])
        with pytest.raises(ValueError, match="kernels=0: give a whole number, 1 or more"):
            two_streams(kernels=0)


@pytest.mark.gpu
def test_a_real_gpu_says_the_same():
    with labkit.use(gpus=1, virtual=False, quiet=True):
        gain = stream_gain(collect(two_streams([64, 4096])))
    assert gain[64] < 1.3 and gain[4096] < 1.3
