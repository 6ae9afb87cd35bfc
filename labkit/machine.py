"""Which GPUs a lesson runs on: the machine's own when there are enough, virtual ones otherwise."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import virtualgpu
from labkit import nvidia
from virtualgpu import front_end, machines
from virtualgpu.machines import GPUsInUse as GPUsInUse
from virtualgpu.machines import Request, VirtualGPUs, check_memory, checked_request, gibibytes
from virtualgpu.machines import host_time as host_time

if TYPE_CHECKING:
    from gputrace import Table
    from virtualgpu import Race


class RealGPUs(GPUsInUse):
    """GPUs of this computer. `Request.memory` limits the memory that this process may use."""

    virtual = False

    def __init__(self, request: Request) -> None:
        """Limit the memory of the GPUs if the request asks for it."""
        import torch

        super().__init__(request)
        self.name = torch.cuda.get_device_name(0)
        self.memory = torch.cuda.get_device_properties(0).total_memory
        self._fractions: list[float] = []
        if request.memory is None:
            return
        self.memory = min(self.memory, request.memory)
        for index in range(request.gpus):
            self._fractions.append(torch.cuda.get_per_process_memory_fraction(index))
            total = torch.cuda.get_device_properties(index).total_memory
            fraction = min(1.0, request.memory / total)
            torch.cuda.set_per_process_memory_fraction(fraction, index)

    def host_time(self) -> float:
        return time.perf_counter()

    def races(self) -> "list[Race]":
        raise RuntimeError("races are found on virtual GPUs alone: labkit.use(gpus=1, virtual=True)")

    @contextmanager
    def without_values(self) -> Iterator[None]:
        yield

    @contextmanager
    def with_values(self) -> Iterator[None]:
        yield

    @contextmanager
    def new_workspaces_freed(self) -> Iterator[None]:
        """Free the workspaces that CUDA's libraries take in the block, such as those of cuBLAS.

        PyTorch can only free all of cuBLAS's workspaces at once. This happens if the block leaves
        more memory allocated. The next matrix product then takes its workspace again.
        """
        import torch

        before = [torch.cuda.memory_allocated(index) for index in range(self.count)]
        try:
            yield
        finally:
            now = [torch.cuda.memory_allocated(index) for index in range(self.count)]
            if any(bytes_now > held for bytes_now, held in zip(now, before, strict=True)):
                torch._C._cuda_clearCublasWorkspaces()

    def _remove(self) -> None:
        for index, fraction in enumerate(self._fractions):
            import torch

            torch.cuda.set_per_process_memory_fraction(fraction, index)
        self._fractions = []


@overload
def use(gpus: None) -> None: ...


@overload
def use(
    gpus: int = 1,
    like: str | None = None,
    memory: str | int | None = None,
    virtual: bool | None = None,
    values: bool = True,
    *,
    quiet: bool = False,
    heeds_environment: bool = False,
) -> GPUsInUse: ...


def use(
    gpus: int | None = 1,
    like: str | None = None,
    memory: str | int | None = None,
    virtual: bool | None = None,
    values: bool = True,
    *,
    quiet: bool = False,
    heeds_environment: bool = False,
) -> GPUsInUse | None:
    """Give this process GPUs, print what they are, and return them. They are also a context manager.

    Args:
        gpus: how many, 1 to 16. None takes those in use away.
        like: the GPU model that virtual GPUs are modelled on, such as "T4" or "H200". The default is "T4".
        memory: of each GPU, in bytes or as "16GiB". On real GPUs it is the process's limit.
        virtual: True for virtual GPUs; False for real ones, or an error; None for real ones where there are enough.
            LABKIT_VIRTUAL=1 in the environment turns None into True.
        values: False keeps shapes, memory, order and time on virtual GPUs, but computes nothing.
        quiet: print nothing.
        heeds_environment: let CUDA_VISIBLE_DEVICES hide virtual GPUs, as it hides real ones. `labkit run` asks for it; in a notebook
            the variable speaks of the computer's own.

    The same request again returns what is in use, so a notebook's first cell can be run twice.

    Raises:
        ValueError: an argument is not one of the choices, which the message names.
        RuntimeError: there are too few real GPUs, or other GPUs are in use. Nothing is changed then.
    """
    used = current()
    if gpus is None:
        if used is not None:
            used.take_away()
        return None
    request = checked_request(gpus, like, memory, values, heeds_environment)
    is_virtual = _is_virtual(request, virtual)
    if used is not None:  # a program does not choose its host
        request = replace(request, host=used.request.host)
    placed = machines.put_in_use(request, VirtualGPUs if is_virtual else RealGPUs)
    too_few = is_virtual and virtual is None and not _virtual_is_asked_for(request)
    _tell(placed, quiet, real_gpus() if too_few else 0)
    return placed


def _tell(used: GPUsInUse, quiet: bool, too_few: int) -> None:
    """Print what is in use, unless `quiet` is set. `too_few` real GPUs are why they are virtual."""
    shell = front_end.ipython_shell()
    if shell is not None:
        shell.extension_manager.load_extension("labkit")
    if quiet:
        return
    banner = f"labkit: {used.description}."
    if too_few:
        banner += f" This computer has only {too_few} of its own."
    if used.virtual:
        banner += " Times are the model's, not this computer's."
    print(banner)
    used.told_in = 0 if shell is None else shell.execution_count


def current() -> GPUsInUse | None:
    """Return the GPUs in use, real or virtual ones. None if there are none."""
    return machines.real_or_virtual()


def in_use() -> GPUsInUse:
    """Return the GPUs in use. Raises RuntimeError if there are none."""
    used = current()
    if used is None:
        raise RuntimeError("no GPU is in use: labkit.use(gpus=1) gives you one, real or virtual")
    return used


def races() -> "list[Race]":
    """Pairs of launches on the same memory that nothing orders, as found so far on the virtual machine in use.

    Each has a `kind` ("stale read", "overwritten too early", "two writers") and two sides, `first` and `second`, in the order of their
    launch; printed, it says what happens and how to put it in order. Raises RuntimeError without a virtual machine.
    """
    used = current()
    if used is None:
        raise RuntimeError("races are found on virtual GPUs, and none is in use: labkit.use(gpus=1, virtual=True)")
    return used.races()


def gpus() -> "Table":
    """A table of the GPUs in use: name, memory, driver, compute capability and multiprocessors, and the source of the figures."""
    from gputrace import Table

    used = current()
    if used is None:
        return Table(("device",), (), "No GPUs are in use: labkit.use(gpus=1) gives you one.")
    import torch

    header = ("device", "name", "memory", "capability", "multiprocessors", "driver", "source")
    virtual = virtualgpu.current()
    driver, source = _real_source() if virtual is None else (virtual.profile.driver_version, "labkit's profile of the model")
    rows = []
    for index in range(used.count):
        figures = torch.cuda.get_device_properties(index)
        rows.append(
            (
                f"cuda:{index}",
                figures.name,
                gibibytes(figures.total_memory),
                f"{figures.major}.{figures.minor}",
                str(figures.multi_processor_count),
                driver,
                source,
            )
        )
    return Table(header, tuple(rows), used.badge)


def _real_source() -> tuple[str, str]:
    answer = nvidia.ask_nvml()
    if answer.driver:
        return answer.driver, "CUDA; driver: NVML"
    return f"unknown ({answer.trouble})", "CUDA"


def _is_virtual(request: Request, virtual: bool | None) -> bool:
    """Whether the request is for virtual GPUs.

    Raises ValueError for what virtual GPUs or real ones cannot be, and RuntimeError if there are
    too few real ones.
    """
    if not any(virtual is choice for choice in (True, False, None)):
        raise ValueError(f"virtual={virtual!r}: choose one of True, False, None")
    if virtual is None:
        virtual = _virtual_is_asked_for(request) or real_gpus() < request.gpus
    if virtual:
        if request.memory is not None:
            check_memory(request.memory)
        return True
    there = real_gpus()
    if there < request.gpus:
        asked = f"virtual=False asks for {request.gpus} real CUDA GPU(s), and PyTorch sees {there}."
        raise RuntimeError(f"{asked} Leave virtual out for virtual ones.")
    if request.like is not None or not request.values:
        raise ValueError("like= and values= describe virtual GPUs; with virtual=False leave them out")
    return False


def _virtual_is_asked_for(request: Request) -> bool:
    """Whether anything but the number of GPUs asks for virtual ones."""
    return virtual_by_default() or request.like is not None or not request.values


def virtual_by_default() -> bool:
    """Whether the environment asks for virtual GPUs."""
    return os.environ.get("LABKIT_VIRTUAL", "") not in ("", "0")


def real_gpus() -> int:
    """How many CUDA GPUs PyTorch sees on this computer, the virtual ones aside."""
    virtual = virtualgpu.current()
    if virtual is not None:
        return virtual.real_gpus
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
