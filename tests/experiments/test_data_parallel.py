"""Training steps under DataParallel: what a small and a large network make of more GPUs."""

import pytest
import torch

import labkit
from labkit import recordings
from labkit.experiments import collect, data_parallel_step, data_parallel_work, traced_step
from labkit.experiments.data_parallel import computing_shares, parallel_gain


@pytest.mark.parametrize("like", ["T4", "H200"])
def test_the_small_model_is_slower_and_the_large_faster_as_recorded(like):
    with labkit.use(gpus=4, like=like, quiet=True):
        result = collect(data_parallel_step(gpus=[1, 4], repeats=1))
    for source in (result, recordings.load("data_parallel_step")):
        assert parallel_gain(source, "small")[4] < 0.5
        assert parallel_gain(source, "large")[4] > 1.5
    assert result.recorded() is not None


def test_it_repeats_itself_and_leaves_nothing_behind():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        first, second = (collect(data_parallel_step([1, 2], {"tiny": (8, 6)}, repeats=2)) for _ in range(2))
        assert torch.ones(2, device="cuda").tolist() == [1, 1]  # values are computed again
    assert first.column("seconds") == pytest.approx(second.column("seconds"))
    assert first.recorded() is None


def test_a_stopped_run_gains_only_where_both_were_measured():
    with labkit.use(gpus=2, virtual=True, quiet=True):
        run = data_parallel_step([1, 2], {"a": (8, 6), "b": (4, 2)}, repeats=1)
        assert run.total == 4
        next(run)
        assert parallel_gain(run.result(), "a") == {}
        next(run)
        run.close()
    assert list(parallel_gain(run.result(), "a")) == [2]
    assert parallel_gain(run.result(), "b") == {}


def test_bad_arguments_and_no_gpu_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        data_parallel_step()
    with labkit.use(gpus=2, virtual=True, quiet=True):
        with pytest.raises(ValueError, match=r"gpus=\(1, 2, 4\).*from 1 to 2"):
            data_parallel_step()
        with pytest.raises(ValueError, match="model 'wide' has the size 4096: give its width and batch"):
            data_parallel_step([1], {"wide": 4096})
        with pytest.raises(ValueError, match="from 1 to 65536"):
            data_parallel_step([1], {"empty": (0, 5)})
        with pytest.raises(ValueError, match="models={}: give at least one"):
            data_parallel_step([1], {})


@pytest.mark.gpu(4)
@pytest.mark.filterwarnings("ignore:.*Attempting to run cuBLAS, but there was no current CUDA context")  # DataParallel's threads are new
def test_four_real_gpus_say_the_same():
    with labkit.use(gpus=4, virtual=False, quiet=True):
        result = collect(data_parallel_step())
    assert parallel_gain(result, "small")[4] < 1 < parallel_gain(result, "large")[4]


# What each GPU does in a step


def test_in_a_small_models_step_the_gpus_wait_for_launches():
    with labkit.use(gpus=4, like="H200", virtual=True, quiet=True):
        result = collect(data_parallel_work())
        small, large = (computing_shares(result, model) for model in ("small", "large"))
        assert list(small) == list(large) == [0, 1, 2, 3]
        assert max(small.values()) < 0.2 < 0.6 < min(large.values()) < 1
        assert torch.ones(2, device="cuda").tolist() == [1, 1]  # values are computed again
        again = traced_step(1024, 512)
    assert again.busy(1, "kernel") / again.end == pytest.approx(small[1])
    assert again.host_waited < 0.1 * again.end


def test_bad_arguments_of_a_traced_step_are_refused():
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        traced_step(8, 8)
    with labkit.use(gpus=2, virtual=True, quiet=True):
        with pytest.raises(ValueError, match="from 1 to 2"):
            traced_step(8, 8)
        with pytest.raises(ValueError, match="from 1 to 65536"):
            traced_step(0, 8, gpus=2)
        with pytest.raises(ValueError, match="from 1 to 2"):
            data_parallel_work()


@pytest.mark.gpu(4)
@pytest.mark.filterwarnings("ignore:.*Attempting to run cuBLAS, but there was no current CUDA context")
def test_four_real_gpus_wait_for_launches_too():
    with labkit.use(gpus=4, virtual=False, quiet=True):
        result = collect(data_parallel_work())
    assert max(computing_shares(result, "small").values()) < min(computing_shares(result, "large").values())
