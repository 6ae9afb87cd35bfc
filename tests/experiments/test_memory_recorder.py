"""What the memory recorder sees."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import labkit
from labkit.experiments.memory import MOST, MemoryRecorder, MemorySample, thinned

MIB = 1 << 20


@pytest.fixture
def recorder():
    recorder = MemoryRecorder()
    yield recorder
    recorder.stop()


def test_every_allocation_on_a_virtual_gpu_gives_a_sample(recorder):
    with labkit.use(virtual=True, quiet=True):
        recorder.start()
        tensor = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
        del tensor
        torch.cuda.empty_cache()
        samples = recorder.samples
        assert max(sample.allocated for sample in samples) == 30 * MIB
        assert samples[-1].allocated == samples[-1].reserved == 0
        context = samples[0].used
        assert context > 0
        assert max(sample.used for sample in samples) == context + 30 * MIB
        assert samples == sorted(samples, key=lambda sample: sample.seconds)
        free, total = torch.cuda.mem_get_info()
        assert samples[-1].used == total - free


def test_each_gpu_has_samples_of_its_own(recorder):
    with labkit.use(gpus=2, virtual=True, quiet=True):
        recorder.start()
        tensor = torch.ones(MIB, device="cuda:1")
        assert {sample.device for sample in recorder.samples} == {0, 1}
        assert max(sample.allocated for sample in recorder.samples if sample.device == 0) == 0
        assert max(sample.allocated for sample in recorder.samples if sample.device == 1) == tensor.nbytes


def test_after_stop_nothing_is_added_and_the_samples_stay(recorder):
    with labkit.use(virtual=True, quiet=True):
        recorder.start()
        recorder.stop()
        before = recorder.samples
        torch.empty(MIB, device="cuda")
    assert recorder.samples == before != []
    assert not recorder.running


def test_a_second_recorder_takes_over(recorder):
    second = MemoryRecorder()
    with labkit.use(virtual=True, quiet=True):
        recorder.start()
        second.start()
        assert (recorder.running, second.running) == (False, True)
        recorder.stop()
        torch.empty(MIB, device="cuda")
        assert max(sample.allocated for sample in second.samples) == 4 * MIB
        second.stop()


def test_without_a_gpu_it_says_so(recorder):
    with pytest.raises(RuntimeError, match="no GPU is in use"):
        recorder.start()
    assert not recorder.running
    assert recorder.samples == []


def test_many_samples_are_thinned_and_the_peak_stays(recorder):
    with labkit.use(virtual=True, quiet=True):
        recorder.start()
        torch.empty(78 * MIB, dtype=torch.uint8, device="cuda")
        for _ in range(2 * MOST):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert len(recorder.samples) <= MOST
    assert max(sample.allocated for sample in recorder.samples) == 78 * MIB


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=200))
def test_thinning_keeps_order_and_extremes(sizes):
    samples = [MemorySample(float(i), 0, size, size, size) for i, size in enumerate(sizes)]
    kept = thinned(samples)
    assert kept == sorted(kept, key=lambda sample: sample.seconds)
    assert len(kept) <= len(samples) / 2 + 2
    assert {max(sizes), min(sizes)} <= {sample.allocated for sample in kept}


@pytest.mark.gpu
def test_a_real_gpu_is_looked_at_from_a_thread(recorder):
    with labkit.use(virtual=False, quiet=True):
        recorder.start()
        tensor = torch.ones(64 * MIB, device="cuda")
        time.sleep(0.3)
        recorder.stop()
    assert max(sample.allocated for sample in recorder.samples) >= tensor.nbytes
