"""The memory of GPUs over time: the recorder, the figure, and the panel."""

import asyncio
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.interactiveshell import InteractiveShell

import labkit
from gpulessons.lesson_00 import labs
from gpulessons.lesson_00.labs import (
    MOST_SAMPLES,
    MemoryPanel,
    MemoryRecorder,
    MemorySample,
    plot_memory_over_time,
    thinned,
)

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
        assert (
            max(sample.allocated for sample in recorder.samples if sample.device == 1)
            == tensor.nbytes
        )


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
        for _ in range(2 * MOST_SAMPLES):
            torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert len(recorder.samples) <= MOST_SAMPLES
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


def memory(device=0):
    return [
        MemorySample(t / 1e4, device, a * MIB, (a + 2) * MIB, (a + 102) * MIB)
        for t, a in ((0, 0), (1, 20), (5, 80), (9, 20))
    ]


def test_memory_over_time_tells_the_peaks():
    figure = plot_memory_over_time(memory(), "virtual GPU, modelled on NVIDIA Tesla T4")
    assert figure.title == "Allocated memory peaks at 80 MiB, reserved memory at 82 MiB"
    assert figure.alt.endswith(
        "use at most 182 MiB of a device. 1 GPU, 4 samples. "
        "Virtual GPU, modelled on NVIDIA Tesla T4."
    )


def test_each_gpu_has_a_panel(drawn):
    plot_memory_over_time(memory(0) + memory(1), "measured on paper")
    assert [axes.get_ylabel() for axes in drawn[-1].axes] == ["cuda:0", "cuda:1"]


def test_one_sample_is_enough_and_none_is_refused(drawn):
    figure = plot_memory_over_time(memory()[:1], "measured on paper")
    assert "Allocated memory peaks at 0 B" in figure.alt
    for line in drawn[-1].axes[0].lines:
        assert line.get_xdata()[-1] > line.get_xdata()[0]
    with pytest.raises(ValueError, match="nothing was recorded"):
        plot_memory_over_time([], "measured on paper")


@pytest.fixture
def shell(monkeypatch, tmp_path):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


@pytest.fixture
def panel():
    with labkit.use(virtual=True, quiet=True):
        panel = MemoryPanel()
        yield panel
        panel.stop()


def test_it_shows_the_memory_at_once_and_after_a_refresh(panel):
    assert "cuda:0: 0 B allocated, 0 B reserved" in panel.message.value
    tensor = torch.ones(8 * MIB, device="cuda")
    panel.refresh()
    assert "cuda:0: 32 MiB allocated, 32 MiB reserved" in panel.message.value
    assert "Allocated memory peaks at 32 MiB" in panel.picture.value
    assert tensor.is_cuda


def test_it_draws_only_what_is_new(panel):
    panel.picture.value = "as it was"
    panel.refresh()
    assert panel.picture.value == "as it was"


def test_after_stop_the_figure_stays_and_nothing_is_added(panel):
    panel.stop_button.click()
    assert panel.stop_button.disabled
    before = panel.figure().alt
    torch.ones(8 * MIB, device="cuda")
    panel.refresh()
    assert panel.figure().alt == before


def test_start_forgets_what_was_seen(panel):
    torch.ones(8 * MIB, device="cuda")
    panel.start_button.click()
    assert not panel.stop_button.disabled
    assert "Allocated memory peaks at 0 B" in panel.figure().alt


def test_without_a_gpu_it_says_so_and_can_be_started_later():
    panel = MemoryPanel()
    assert "Not watching. no GPU is in use: labkit.use(gpus=1)" in panel.message.value
    with pytest.raises(ValueError, match="nothing was recorded"):
        panel.figure()
    with labkit.use(virtual=True, quiet=True):
        panel.start_button.click()
        assert "cuda:0: 0 B allocated" in panel.message.value
        panel.stop()


def test_it_redraws_after_each_cell(shell):
    with labkit.use(virtual=True, quiet=True):
        panel = MemoryPanel()
        shell.run_cell("import torch; kept = torch.ones(1 << 20, device='cuda')")
        assert "cuda:0: 4 MiB allocated" in panel.message.value
        panel.stop()
        shell.run_cell("kept = [kept, kept + 1]")
        assert "cuda:0: 4 MiB allocated" in panel.message.value
        shell.user_ns.clear()


def test_it_follows_when_the_lesson_changes_machines(shell):
    labkit.use(virtual=True, quiet=True)
    panel = MemoryPanel()
    labkit.use(None)
    labkit.use(gpus=2, virtual=True, quiet=True)
    shell.run_cell("1")
    assert "cuda:1: 0 B allocated" in panel.message.value
    labkit.use(None)
    shell.run_cell("1")
    assert "Not watching." in panel.message.value


def test_a_new_panel_takes_over(shell):
    with labkit.use(virtual=True, quiet=True):
        first, second = MemoryPanel(), MemoryPanel()
        shell.run_cell("1")
        assert first.stop_button.disabled
        assert not second.stop_button.disabled
        second.stop()


def test_on_an_event_loop_it_redraws_between_cells(monkeypatch):
    monkeypatch.setattr(labs, "DRAW_PERIOD", 0.001)

    async def learner():
        panel = MemoryPanel()
        kept = torch.ones(MIB, device="cuda")
        while "4 MiB allocated" not in panel.message.value:
            await asyncio.sleep(0.001)
        panel.stop()
        return kept

    with labkit.use(virtual=True, quiet=True):
        assert asyncio.run(asyncio.wait_for(learner(), 100)).is_cuda
