"""Choose the GPUs that a lesson runs on.

They are the GPUs of this computer if there are enough, and virtual GPUs otherwise.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import virtualgpu
from labkit import nvidia
from virtualgpu import front_end, machines
from virtualgpu.driver import running
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
        self._server = running.answer()
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
        raise RuntimeError(
            "Races can be found only on virtual GPUs, and real GPUs are in use. "
            "labkit.use(gpus=1, virtual=True) gives you a virtual one."
        )

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
        if self._server is not None:
            self._server.close()
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
    """Give this process GPUs, print which ones, and return them.

    `labkit.use(gpus=2, like="H200")` is an example. Without enough real GPUs it gives two virtual
    H200s, and `torch.cuda.device_count()` then returns 2.

    The returned object is also a context manager, which takes the GPUs away at the end of its
    block. A second call with the same arguments returns the GPUs that are in use, so the first cell
    of a notebook can be run twice.

    Args:
        gpus: the number of GPUs, 1 to 16. None takes away the GPUs that are in use.
        like: the model that virtual GPUs imitate, such as "H200". The default is "T4".
        memory: the memory of each GPU, in bytes or as a text such as "16GiB". On real GPUs it
            limits what this process may allocate.
        virtual: True gives virtual GPUs. False gives real ones, and raises an error if there are
            too few. None gives real GPUs if there are enough, and virtual ones otherwise.
            LABKIT_VIRTUAL=1 in the environment turns None into True.
        values: False keeps shapes, memory, order and time on virtual GPUs, but computes no values.
        quiet: print nothing.
        heeds_environment: let CUDA_VISIBLE_DEVICES hide virtual GPUs, as it hides real ones.
            `labkit run` sets this. In a notebook the variable describes only the real GPUs.

    Raises:
        ValueError: an argument has a value that is not possible. The message names the choices.
        RuntimeError: there are too few real GPUs, or other GPUs are in use. Nothing has changed.
    """
    used = current()
    if gpus is None:
        if used is not None:
            used.take_away()
        return None
    request = checked_request(gpus, like, memory, values, heeds_environment)
    is_virtual = _is_virtual(request, virtual)
    if used is not None:  # only a command's --host chooses the host, so it stays the same
        request = replace(request, host=used.request.host)
    placed = machines.put_in_use(request, VirtualGPUs if is_virtual else RealGPUs)
    too_few = is_virtual and virtual is None and not _virtual_is_asked_for(request)
    _tell(placed, quiet, real_gpus() if too_few else 0)
    return placed


def _tell(used: GPUsInUse, quiet: bool, too_few: int) -> None:
    """Print a description of the GPUs in use, unless `quiet` is set.

    If there are virtual GPUs because this computer has only a few real ones, `too_few` is the
    number of real ones. Otherwise it is 0.
    """
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
    """Return the GPUs in use, real or virtual ones, or None if no GPUs are in use."""
    return machines.real_or_virtual()


def in_use() -> GPUsInUse:
    """Return the GPUs in use. Raises RuntimeError if no GPUs are in use."""
    used = current()
    if used is None:
        raise RuntimeError("no GPU is in use: labkit.use(gpus=1) gives you one, real or virtual")
    return used


def synchronize() -> None:
    """Wait for all work on the GPUs in use."""
    import torch

    for index in range(in_use().count):
        torch.cuda.synchronize(index)


def races() -> "list[Race]":
    """Return the races that were found so far on the virtual GPUs in use.

    A race is a pair of launches that use the same memory, while nothing makes one wait for the
    other. Its `kind` is "stale read", "overwritten too early" or "two writers". Its `first` and
    `second` are the two launches, in the order in which the program made them. Printing a race
    shows what happens and how to prevent it.

    Raises RuntimeError if no virtual GPUs are in use.
    """
    used = current()
    if used is None:
        raise RuntimeError(
            "Races can be found only on virtual GPUs, and no GPUs are in use. "
            "labkit.use(gpus=1, virtual=True) gives you a virtual one."
        )
    return used.races()


def gpus() -> "Table":
    """Return a table of the GPUs in use.

    It has a row for each GPU with its name, memory, compute capability, number of multiprocessors
    and driver, and the source of these figures. Without GPUs in use, the table says so.
    """
    from gputrace import Table

    used = current()
    if used is None:
        return Table(("device",), (), "No GPUs are in use: labkit.use(gpus=1) gives you one.")
    import torch

    header = ("device", "name", "memory", "capability", "multiprocessors", "driver", "source")
    virtual = virtualgpu.current()
    if virtual is None:
        driver, source = _real_source()
    else:
        driver, source = virtual.profile.driver_version, "labkit's profile of the model"
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
    """Return the driver's version and the source of the figures of real GPUs."""
    answer = nvidia.ask_nvml()
    if answer.driver:
        return answer.driver, "CUDA; driver: NVML"
    return f"unknown ({answer.trouble})", "CUDA"


def _is_virtual(request: Request, virtual: bool | None) -> bool:
    """Return whether to use virtual GPUs for this request.

    Raises ValueError if the GPUs cannot be as requested, and RuntimeError if real GPUs are
    requested and there are too few.
    """
    if not any(virtual is choice for choice in (True, False, None)):
        raise ValueError(f"virtual={virtual!r}: choose one of True, False, None")
    if virtual is None:
        virtual = _virtual_is_asked_for(request) or real_gpus() < request.gpus
    if virtual:
        if request.memory is not None:
            check_memory(request.memory)
        return True
    available = real_gpus()
    if available < request.gpus:
        raise RuntimeError(
            f"virtual=False asks for {request.gpus} real CUDA GPU(s), and PyTorch sees "
            f"{available}. Leave virtual out for virtual ones."
        )
    if request.like is not None or not request.values:
        raise ValueError(
            "like= and values= describe virtual GPUs. Leave them out with virtual=False."
        )
    return False


def _virtual_is_asked_for(request: Request) -> bool:
    """Return whether the environment, `like` or `values` asks for virtual GPUs."""
    return virtual_by_default() or request.like is not None or not request.values


def virtual_by_default() -> bool:
    """Return whether the environment variable LABKIT_VIRTUAL asks for virtual GPUs."""
    return os.environ.get("LABKIT_VIRTUAL", "") not in ("", "0")


def real_gpus() -> int:
    """Return the number of real CUDA GPUs that PyTorch sees on this computer."""
    virtual = virtualgpu.current()
    if virtual is not None:
        return virtual.real_gpus
    import torch

    if not torch.cuda.is_available():
        return 0
    return torch.cuda.device_count()
