"""The environment is read when CUDA is first used, as on a real GPU."""

import os
import subprocess
import sys

import pytest
import torch

import virtualgpu
from virtualgpu import hardware

NAMES = "CUDA_VISIBLE_DEVICES"


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.delenv(NAMES, raising=False)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    with virtualgpu.use(2, like="H100", heeds_environment=True):
        yield hardware.machine()


# The answers of a machine with two H100s (torch 2.11, 2026-11-26). The variable was set to "1"
# after is_available() and after device_count().
def test_is_available_fixes_the_gpus_that_tensors_go_to(machine, monkeypatch):
    assert torch.cuda.is_available()
    monkeypatch.setenv(NAMES, "1")
    assert torch.cuda.device_count() == 1
    torch.ones(1, device="cuda")
    assert machine.current.number == 0
    assert len(machine.gpus) == 2


def test_the_variable_works_after_a_count(machine, monkeypatch):
    assert torch.cuda.device_count() == 2
    monkeypatch.setenv(NAMES, "1")
    assert torch.cuda.device_count() == 1
    torch.ones(1, device="cuda")
    assert machine.current.number == 1


def test_the_check_by_nvml_fixes_nothing(machine, monkeypatch):
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    assert torch.cuda.is_available()
    monkeypatch.setenv(NAMES, "1")
    torch.ones(1, device="cuda")
    assert machine.current.number == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.slow
def test_a_forked_child_cannot_use_cuda_after_is_available(machine):
    assert torch.cuda.is_available()
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.ones(1, device="cuda")
            message = "no error"
        except RuntimeError as error:
            message = str(error)
        os.write(writer, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert "Cannot re-initialize CUDA in forked subprocess" in os.read(reader, 4096).decode()
    os.close(reader)
    os.close(writer)


def test_the_allocator_is_configured_at_the_first_use(machine, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    x = torch.ones(1, device="cuda")
    assert machine.gpus[1].allocator.settings.expandable_segments
    assert torch.cuda.memory_reserved() == 2 << 20
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    torch.ones(1 << 20, device="cuda")
    assert machine.current.allocator.settings.expandable_segments
    del x


def test_the_share_of_memory_is_read_at_the_first_use(machine, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "per_process_memory_fraction:0.5")
    torch.ones(1, device="cuda")
    assert torch.cuda.get_per_process_memory_fraction() == 0.5


def test_settings_of_the_program_stay_at_the_first_use(machine, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    torch._C._accelerator_setAllocatorSettings("max_split_size_mb:128")
    torch.ones(1, device="cuda")
    assert machine.current.allocator.settings.max_split_size == 128 << 20


def test_a_wrong_setting_is_an_error_of_the_first_use(machine, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_splitt:64")
    with pytest.raises(RuntimeError, match="max_splitt"):
        torch.ones(1, device="cuda")


@pytest.mark.slow
def test_the_kit_itself_fixes_nothing_before_a_script_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0,2'\n"
        "torch.cuda.init()\n"
        "print(torch.cuda.device_count())\n"
    )
    command = [sys.executable, "-m", "virtualgpu", "run", "--gpus", "4", str(script)]
    environment = {name: value for name, value in os.environ.items() if name != NAMES}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.stdout == "2\n", result.stderr


def test_set_device_refuses_a_gpu_that_is_hidden(machine, monkeypatch):
    monkeypatch.setenv(NAMES, "1")
    with pytest.raises(torch.AcceleratorError, match="invalid device ordinal"):
        torch.cuda.set_device(1)
    torch.cuda.set_device(0)
    assert torch.ones(1, device="cuda").device.index == 0
