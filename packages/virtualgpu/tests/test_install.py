"""A virtual machine is installed and removed without a trace."""

import gc
import importlib
import os
import queue
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.accelerator
import torch.cuda.nccl
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import virtualgpu
from virtualgpu.driver import cuda

WATCHED = (
    torch,
    torch._C,
    torch.Tensor,
    torch.cuda,
    torch.cuda.memory,
    torch.cuda.streams,
    torch.cuda.nccl,
    torch.accelerator,
    torch.version,
    torch.storage,
    torch.serialization,
    importlib.import_module("torch.optim.optimizer"),
    importlib.import_module("torch.utils._foreach_utils"),
    torch.nn.functional,
    torch.random,
    threading,
    threading.Thread,
    queue,
)
KERNELS = (
    "empty.memory_format",
    "empty_strided",
    "dropout",
    "scaled_dot_product_attention",
    "one_hot",
    "mm",
    "add.Tensor",
)


def fingerprint() -> dict[str, object]:
    """Return the identities of all watched attributes, and the dispatcher's tables of operators."""
    found: dict[str, object] = {}
    for owner in WATCHED:
        for name, value in vars(owner).items():
            found[f"{owner.__name__}.{name}"] = (
                tuple(map(id, value)) if isinstance(value, list) else id(value)
            )
    for name in KERNELS:
        found[f"dispatch {name}"] = torch._C._dispatch_dump(f"aten::{name}")
    found["modes"] = len(_get_current_dispatch_mode_stack())
    return found


def changed(before: dict[str, object], after: dict[str, object]) -> set[str]:
    return {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def work() -> None:
    model = torch.nn.Linear(3, 2).cuda(1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 3, device="cuda:1")).sum().backward()
    optimizer.step()
    torch.cuda.manual_seed_all(3)
    torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Let torch fill its caches and import its lazy submodules. These changes are not ours."""
    with virtualgpu.use(gpus=2):
        work()


def test_no_trace_after_a_with_block():
    before = fingerprint()
    with virtualgpu.use(gpus=2, like="H200"):
        assert changed(before, fingerprint())
        work()
    assert not changed(before, fingerprint())


def test_no_trace_after_an_exception():
    before = fingerprint()
    with pytest.raises(KeyError), virtualgpu.use(gpus=2):
        work()
        raise KeyError("mine")
    assert not changed(before, fingerprint())


def test_no_trace_after_a_failed_installation(monkeypatch):
    before = fingerprint()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no kernels today"):
        patch.setattr(
            torch.library,
            "Library",
            lambda *args: (_ for _ in ()).throw(RuntimeError("no kernels today")),
        )
        virtualgpu.use(gpus=1)
    assert not changed(before, fingerprint())
    assert virtualgpu.current() is None


def names_in_source() -> set[str]:
    """Return the driver's names in all of torch's Python code except its tests."""
    folder = Path(torch.__file__).parent
    files = (file for file in folder.rglob("*.py") if not file.is_relative_to(folder / "testing"))
    return {
        found[0]
        for file in files
        if b"_C._" in (text := file.read_bytes())
        for found in cuda.USES.findall(text.decode())
    }


def test_every_name_of_the_driver_is_served_or_refused_by_name():
    with virtualgpu.use(gpus=1):
        answers = {
            name: getattr(torch._C, name, None)
            for name in names_in_source() | cuda.names_in_torch()
        }
        asked = {
            name: answer.__new__ if isinstance(answer, type) else answer
            for name, answer in answers.items()
        }
        assert not [
            name
            for name, function in asked.items()
            if not getattr(function, "__module__", "").startswith("virtualgpu.")
        ]
        with pytest.raises(
            NotImplementedError,
            match="_cuda_tunableop_get_results is not supported by the virtual GPU",
        ):
            torch.cuda.tunable.get_results()


def test_a_tensor_of_a_machine_that_is_gone_raises():
    with virtualgpu.use(gpus=1):
        x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="this virtual GPU is gone"):
        x + 1
    with pytest.raises(RuntimeError, match="this virtual GPU is gone"):
        x.sum()


@pytest.mark.parametrize("values", [True, False])
def test_what_only_cycles_hold_is_freed_with_its_machine(values):
    gc.disable()
    try:
        with virtualgpu.use(gpus=1, values=values):
            kept = torch.ones(3, device="cuda")
            kept.itself = kept
            cycle = weakref.ref(kept)
            del kept
            assert cycle() is not None
        assert cycle() is None
    finally:
        gc.enable()


def test_without_memory_on_it_nothing_is_collected_when_it_goes():
    """Check this because a collection of half a million objects takes a third of a second."""
    collected: list[str] = []

    def note(phase, information):
        if phase == "start" and information["generation"] == 2:
            collected.append(phase)

    gc.disable()
    gc.callbacks.append(note)
    try:
        with virtualgpu.use(gpus=2):
            (torch.ones(100, 100, device="cuda") @ torch.ones(100, 100, device="cuda")).sum().item()
        assert not collected
    finally:
        gc.callbacks.remove(note)
        gc.enable()


def test_plain_tensors_and_threads_work_after_it():
    with virtualgpu.use(gpus=1):
        x = torch.ones(3).cuda().cpu()
    seen = []
    thread = threading.Thread(target=lambda: seen.append((x + 1).tolist()))
    thread.start()
    thread.join()
    assert seen == [[2.0, 2.0, 2.0]]
    assert type(x) is torch.Tensor
    assert torch.cuda.is_available() is (torch.cuda.device_count() > 0)


_FORKED = """
import os, torch, virtualgpu
from virtualgpu.ops import gradients
virtualgpu.use()
torch.ones(3, device="cuda").sin()
assert not gradients._ALONE  # found out by a backward
x = torch.ones(3, requires_grad=True)
if (child := os.fork()) == 0:
    x.sum().backward()
    os._exit(x.grad.tolist() != [1, 1, 1])
assert os.waitpid(child, 0)[1] == 0
x.cuda().sum().backward()
assert gradients._ALONE
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_no_backward_runs_before_the_programs_first():
    """Check this because on a computer with real GPUs autograd would start threads.

    A child that is forked later could not run a backward pass then.
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORKED], capture_output=True, text=True, timeout=280
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_the_compiler_can_be_imported_while_gpus_are_in_place():
    program = "import virtualgpu; virtualgpu.use(1); import torch._dynamo; print('imported')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "imported\n", result.stderr
