"""Which GPUs a lesson runs on: the machine's own when there are enough, virtual ones otherwise."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

import virtualgpu
from labkit import nvidia
from virtualgpu.machines import Request, badge, check_memory, checked_request, gibibytes, with_maker
from virtualgpu.machines import host_time as host_time

if TYPE_CHECKING:
    from gputrace import Table
    from virtualgpu import Race, VirtualGPUs

_current: "MachineInUse | None" = None


class MachineInUse:
    """The GPUs in use. Also a context manager: at the end of a `with` block the machine is taken away.

    A `with` block raises RuntimeError where the machine is not in use any more, or in another block already.
    """

    def __init__(self, request: Request, virtual: "VirtualGPUs | None") -> None:
        """`virtual` are the GPUs, which are in place already. None for this computer's own."""
        self.request = request
        self._entered = False
        self._kept = False  # while an answer is checked
        self._too_few = 0  # the real GPUs that there are, where virtual ones take their place
        self._fractions: list[float] = []
        self._told_in = 0  # the number of the notebook's cell in which the banner was printed last
        self._virtual = virtual
        if virtual is None:
            self._limit_real()
        else:
            self.name = virtual.name

    def _limit_real(self) -> None:
        import torch

        self.name = torch.cuda.get_device_name(0)
        if self.request.memory is not None:
            for index in range(self.request.gpus):
                self._fractions.append(torch.cuda.get_per_process_memory_fraction(index))
                total = torch.cuda.get_device_properties(index).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, self.request.memory / total), index)

    @property
    def virtual(self) -> bool:
        """Whether the GPUs are virtual ones."""
        return self._virtual is not None

    @property
    def count(self) -> int:
        """How many GPUs a lesson may use: the first `count`."""
        return self.request.gpus

    @property
    def badge(self) -> str:
        """Where a figure made on this machine comes from."""
        return badge(self.name, self.virtual)

    @property
    def banner(self) -> str:
        """What `use` prints: how many GPUs of which model, with how much memory, and whose the times are."""
        some = "1 GPU" if self.count == 1 else f"{self.count} GPUs"
        name = with_maker(self.name)
        if self.virtual:
            some = some.replace("GPU", "virtual GPU")
            why = f" This computer has only {self._too_few} of its own." if self._too_few else ""
            return f"labkit: {some}, modelled on {name}, {gibibytes(self._total())} each.{why} Times are the model's, not this computer's."
        return f"labkit: {some} of this computer: {name}, {gibibytes(self._total())} each."

    def _total(self) -> int:
        import torch

        total = torch.cuda.get_device_properties(0).total_memory
        return total if self.request.memory is None else min(total, self.request.memory)

    def host_time(self) -> float:
        """Seconds on the clock that this machine's kernels run on."""
        return time.perf_counter() if self._virtual is None else self._virtual.host_time()

    def races(self) -> "list[Race]":
        """The races found so far, each pair of lines once. Raises RuntimeError on real GPUs, where nobody can see them."""
        if self._virtual is None:
            raise RuntimeError("races are found on virtual GPUs alone: labkit.use(gpus=1, virtual=True)")
        return self._virtual.races()

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """In the block, virtual GPUs compute nothing, as with `values=False`; what it makes must not outlive it. Real ones compute."""
        if self._virtual is None:
            yield
            return
        with self._virtual.without_values():
            yield

    @contextmanager
    def new_workspaces_freed(self) -> Iterator[None]:
        """Free the workspaces that CUDA's libraries take in the block, such as those of cuBLAS.

        PyTorch can only free all of cuBLAS's workspaces at once. On real GPUs this happens if the
        block leaves more memory allocated. The next matrix product then takes its workspace again.
        """
        if self._virtual is not None:
            with self._virtual.new_workspaces_freed():
                yield
            return
        import torch

        before = [torch.cuda.memory_allocated(index) for index in range(self.count)]
        try:
            yield
        finally:
            now = [torch.cuda.memory_allocated(index) for index in range(self.count)]
            if any(bytes_now > held for bytes_now, held in zip(now, before, strict=True)):
                torch._C._cuda_clearCublasWorkspaces()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Refuse `use(None)`, and `use` for other GPUs, in the block."""
        before, self._kept = self._kept, True
        try:
            yield
        finally:
            self._kept = before

    def take_away(self) -> None:
        """What `use(None)` does: no virtual GPUs any more, or no limit on the memory of real ones. Doing it again changes nothing.

        Raises RuntimeError while an answer is checked.
        """
        global _current
        if self._kept:
            raise RuntimeError(_KEPT)
        if self._virtual is not None:
            self._virtual.take_away()
        for index, fraction in enumerate(self._fractions):
            import torch

            torch.cuda.set_per_process_memory_fraction(fraction, index)
        self._fractions = []
        if _current is self:
            _current = None

    def __enter__(self) -> "MachineInUse":
        if self._entered or current() is not self:
            raise RuntimeError(_IN_USE.format(self.banner if current() is self else "another machine"))
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered = False
        self.take_away()

    def __repr__(self) -> str:
        return f"<{self.banner}>"

    def _ipython_display_(self) -> None:
        """Nothing in the cell that has printed the banner already."""
        shell = _shell()
        if shell is None or self._told_in != shell.execution_count:
            raise NotImplementedError  # which asks IPython to show the repr


_IN_USE = "a machine is already in use ({}). Take it away first with labkit.use(None), or leave its `with` block."
_KEPT = (
    "labkit.use cannot change the GPUs while labkit.check runs your answer. Remove the call: the lesson's first cell has chosen the GPUs."
)


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
) -> MachineInUse: ...


def use(
    gpus: int | None = 1,
    like: str | None = None,
    memory: str | int | None = None,
    virtual: bool | None = None,
    values: bool = True,
    *,
    quiet: bool = False,
    heeds_environment: bool = False,
) -> MachineInUse | None:
    """Give this process GPUs, print what they are, and return the machine, which is also a context manager.

    Args:
        gpus: how many, 1 to 16. None takes the machine in use away.
        like: the GPU model that virtual GPUs are modelled on, such as "T4" or "H200". The default is "T4".
        memory: of each GPU, in bytes or as "16GiB". On real GPUs it is the process's limit.
        virtual: True for virtual GPUs; False for real ones, or an error; None for real ones where there are enough.
            LABKIT_VIRTUAL=1 in the environment turns None into True.
        values: False keeps shapes, memory, order and time on virtual GPUs, but computes nothing.
        quiet: print nothing.
        heeds_environment: let CUDA_VISIBLE_DEVICES hide virtual GPUs, as it hides real ones. `labkit run` asks for it; in a notebook
            the variable speaks of the computer's own.

    The same request again returns the machine that is in use, so a notebook's first cell can be run twice.

    Raises:
        ValueError: an argument is not one of the choices, which the message names.
        RuntimeError: there are too few real GPUs, or another machine is in use. Nothing is changed then.
    """
    global _current
    used = current()
    if gpus is None:
        if used is not None:
            used.take_away()
        return None
    request = checked_request(gpus, like, memory, values, heeds_environment)
    is_virtual = _is_virtual(request, virtual)
    if used is None:
        gpus_in_place = None
        if is_virtual:
            gpus_in_place = virtualgpu.use(
                request.gpus,
                request.like,
                request.memory,
                request.values,
                heeds_environment=heeds_environment,
            )
        used = _current = MachineInUse(request, gpus_in_place)
        if is_virtual and virtual is None and not _virtual_is_asked_for(request):
            used._too_few = real_gpus()
        return _told(used, quiet)
    asked_before = replace(used.request, host=request.host)  # a program does not choose its host
    same = asked_before == request and used.virtual == is_virtual
    if used._kept and not same:
        raise RuntimeError(_KEPT)
    if not same or used._entered:
        raise RuntimeError(_IN_USE.format(used.banner))
    return _told(used, quiet)


def _told(used: MachineInUse, quiet: bool) -> MachineInUse:
    """Print what is in use, unless `quiet` is set."""
    shell = _shell()
    if shell is not None:
        shell.extension_manager.load_extension("labkit")
    if not quiet:
        print(used.banner)
        used._told_in = 0 if shell is None else shell.execution_count
    return used


def _shell() -> Any:
    """IPython's, in a notebook; None elsewhere."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def current() -> MachineInUse | None:
    """The machine in use; None when there is none.

    Virtual GPUs are also in use where a process has inherited them, and where `virtualgpu.use` put them in place.
    """
    global _current
    virtual = virtualgpu.current()
    if _current is not None and _current.virtual and _current._virtual is not virtual:
        _current = None  # they were taken away without us
    if _current is None and virtual is not None:
        _current = MachineInUse(virtual.request, virtual)
    return _current


def in_use() -> MachineInUse:
    """The machine in use. Raises RuntimeError when there is none."""
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
    if answer.gpus:
        return answer.gpus[0].driver, "CUDA; driver: NVML"
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
