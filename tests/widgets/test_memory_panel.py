"""The live memory panel, in a notebook's shell without a notebook."""

import asyncio

import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell

import labkit
from labkit.widgets import MemoryPanel, memory

MIB = 1 << 20


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


def test_its_text_in_a_stored_notebook_is_always_the_same(panel):
    assert repr(panel) == "MemoryPanel()"


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
    monkeypatch.setattr(memory, "PERIOD", 0.001)

    async def learner():
        panel = MemoryPanel()
        kept = torch.ones(MIB, device="cuda")
        while "4 MiB allocated" not in panel.message.value:
            await asyncio.sleep(0.001)
        panel.stop()
        return kept

    with labkit.use(virtual=True, quiet=True):
        assert asyncio.run(asyncio.wait_for(learner(), 10)).is_cuda
