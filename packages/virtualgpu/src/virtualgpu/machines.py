"""`use()` puts virtual GPUs in place, in this process and in the children that multiprocessing starts for it."""

import importlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from virtualgpu import front_end, profiles

if TYPE_CHECKING:
    from virtualgpu.streams.race_reports import Race

MAXIMUM = 16  # GPUs of one machine
LEAST_MEMORY = 1 << 30  # bytes of a virtual GPU
DEFAULT_MODEL = "T4"  # what Colab gives
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_IN_USE = "a machine is already in use ({}). Take it away first with {}.use(None), or leave its `with` block."

_current: "GPUsInUse | None" = None
_shared: list[Any] = []  # what keeps machines of other processes


@dataclass(frozen=True)
class Request:
    """What `use` was asked for, checked. `memory` in bytes."""

    gpus: int
    like: str | None
    memory: int | None
    values: bool
    heeds_environment: bool = False
    host: float = 1.0


class GPUsInUse:
    """The GPUs that this process uses, real or virtual ones.

    They are also a context manager. At the end of a `with` block they are taken away. A `with` block
    raises RuntimeError if they are not in use any more, or if another block has them already.

    Attributes:
        request: what was asked for.
        name: the model's name, as `torch.cuda.get_device_name` has it.
        virtual: whether the GPUs are virtual.
        memory: the bytes that the process may use on each GPU.
    """

    request: Request
    name: str
    virtual: bool
    memory: int
    told_in = 0  # number of the notebook's cell that printed last what these GPUs are
    _entered = False
    _kept = ""  # why they may not be taken away now

    def __init__(self, request: Request) -> None:
        """Put GPUs as requested in use."""
        self.request = request

    @property
    def count(self) -> int:
        """How many GPUs there are."""
        return self.request.gpus

    @property
    def badge(self) -> str:
        """Where a figure made on these GPUs comes from."""
        return badge(self.name, self.virtual)

    @property
    def description(self) -> str:
        """How many GPUs of which model they are, and their memory."""
        return described(self.count, self.name, self.memory, self.virtual)

    def check_same(self, request: Request, virtual: bool) -> None:
        """Raise RuntimeError unless these GPUs are what is asked for."""
        if self.request == request and self.virtual == virtual:
            return
        if self._kept:
            raise RuntimeError(self._kept)
        raise RuntimeError(_IN_USE.format(self.description, front_end.name()))

    def host_time(self) -> float:
        """Return the seconds on the clock that the kernels run on."""
        raise NotImplementedError

    def races(self) -> "list[Race]":
        """Return the races found so far, each pair of lines once.

        Raises RuntimeError on real GPUs, where races cannot be seen.
        """
        raise NotImplementedError

    def without_values(self) -> AbstractContextManager[None]:
        """Let virtual GPUs compute nothing in the block, as with `values=False`.

        What is made in the block must not outlive it. Real GPUs compute.
        """
        raise NotImplementedError

    def with_values(self) -> AbstractContextManager[None]:
        """Let virtual GPUs compute values in the block, also with `values=False`.

        Tensors from before the block still lack their values. Real GPUs compute anyway.
        """
        raise NotImplementedError

    def new_workspaces_freed(self) -> AbstractContextManager[None]:
        """Free the workspaces that CUDA's libraries take in the block, and no others."""
        raise NotImplementedError

    @contextmanager
    def kept(self, why: str) -> Iterator[None]:
        """Refuse in the block to take the GPUs away or to use others. The error says `why`."""
        before, self._kept = self._kept, why
        try:
            yield
        finally:
            self._kept = before

    def take_away(self) -> None:
        """Do what `use(None)` does. Doing it again changes nothing.

        Raises RuntimeError in a block of `kept`.
        """
        global _current
        if self._kept:
            raise RuntimeError(self._kept)
        self._remove()
        if _current is self:
            _current = None

    def _remove(self) -> None:
        """Make PyTorch as it was before."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        if _current is not self:
            raise RuntimeError("these GPUs are not in use any more")
        if self._entered:
            raise RuntimeError(_IN_USE.format(self.description, front_end.name()))
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._entered = False
        self.take_away()

    def __repr__(self) -> str:
        return f"<{self.description}>"

    def _ipython_display_(self) -> None:
        """Show nothing in the cell that has printed already what these GPUs are."""
        shell = front_end.ipython_shell()
        if shell is None or self.told_in != shell.execution_count:
            raise NotImplementedError  # which asks IPython to show the repr


class VirtualGPUs(GPUsInUse):
    """Virtual GPUs in use. At the end of a `with` block they are taken away."""

    virtual = True

    def __init__(self, request: Request) -> None:
        """Where the environment names an equal machine of another process, the GPUs are the same (`processes.usage_table`)."""
        from virtualgpu import hardware
        from virtualgpu.install import Installation
        from virtualgpu.processes import usage_table

        super().__init__(request)
        self.profile = profiles.load(request.like or DEFAULT_MODEL, request.host)
        self.name = self.profile.name
        self.memory = request.memory or self.profile.total_memory
        shared = usage_table.join(self.name, request.gpus, self.memory, os.environ.get(usage_table.ADDRESS))
        self.machine = hardware.Machine(self.profile, request.gpus, request.memory, request.values, request.heeds_environment, shared)
        self._installation: Any = Installation(self.machine, in_child=_InChild(request), joins=shared is not None)
        self.real_gpus: int = self._installation.real_gpus  # those that PyTorch would see without these

    def host_time(self) -> float:
        return self.machine.clock.host

    def races(self) -> "list[Race]":
        return list(self.machine.races.races)

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Compute nothing in the block. What is made in the block must not outlive it.

        A copy into a tensor on the host takes its time. It brings NaN if the dtype has NaN.
        """
        with self._computing(values=False, blanks_host=True):
            yield

    @contextmanager
    def with_values(self) -> Iterator[None]:
        with self._computing(values=True, blanks_host=False):
            yield

    @contextmanager
    def _computing(self, values: bool, blanks_host: bool) -> Iterator[None]:
        machine = self.machine
        before = machine.values, machine.blanks_host
        machine.values, machine.blanks_host = values, blanks_host
        if not values:
            machine.was_without_values = True
        try:
            yield
        finally:
            machine.values, machine.blanks_host = before

    @contextmanager
    def new_workspaces_freed(self) -> Iterator[None]:
        from virtualgpu import workspaces

        with workspaces.freed_afterwards(self.machine.gpus):
            yield

    def _remove(self) -> None:
        if self._installation is not None:
            self._installation.remove()
        self._installation = None


class _InChild:
    """Puts the machine of this process in place where it is unpickled: the first thing in a process that multiprocessing starts afresh."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __reduce__(self) -> tuple[Any, ...]:
        from virtualgpu.driver import smi
        from virtualgpu.processes import usage_table

        # A server of forks may be older than the machine: its children do not have this process's environment.
        environment = {name: os.environ[name] for name in (usage_table.ADDRESS, smi.ADDRESS, "PATH") if name in os.environ}
        virtual = current()
        blanks_host = virtual is not None and virtual.machine.blanks_host
        return inherit, (self._request, front_end.name(), environment, blanks_host)


AnyGPUs = TypeVar("AnyGPUs", bound=GPUsInUse)


@overload
def use(gpus: None) -> None: ...


@overload
def use(
    gpus: int = 1,
    like: str | None = None,
    memory: str | int | None = None,
    values: bool = True,
    *,
    heeds_environment: bool = False,
    host: float = 1.0,
) -> VirtualGPUs: ...


def use(
    gpus: int | None = 1,
    like: str | None = None,
    memory: str | int | None = None,
    values: bool = True,
    *,
    heeds_environment: bool = False,
    host: float = 1.0,
) -> VirtualGPUs | None:
    """Give this process virtual GPUs, which `torch.cuda` takes for real ones; `with virtualgpu.use(2, like="H200"):` for a block.

    Args:
        gpus: how many, 1 to 16. None takes those in use away.
        like: the GPU model, such as "T4" or "H200"; `virtualgpu.profiles.names()` has all. The default is "T4".
        memory: of each GPU, in bytes or as "16GiB". The default is the model's.
        values: False keeps shapes, memory, order and time, but computes nothing.
        heeds_environment: let CUDA_VISIBLE_DEVICES hide virtual GPUs, as it hides real ones.
        host: how many times as long the host takes for all that it does as the host of the recorded H200s.

    The same request again returns what is in use.

    Raises:
        ValueError: an argument is not one of the choices, which the message names.
        RuntimeError: other GPUs are in use. Nothing is changed then.
    """
    if gpus is None:
        if _current is not None:
            _current.take_away()
        return None
    request = checked_request(gpus, like, memory, values, heeds_environment, host)
    if request.memory is not None:
        check_memory(request.memory)
    return put_in_use(request, VirtualGPUs)


def put_in_use(request: Request, kind: type[AnyGPUs]) -> AnyGPUs:
    """Return GPUs of this kind that are as requested: those in use, or new ones if there are none.

    Raises RuntimeError if other GPUs are in use.
    """
    global _current
    if _current is None:
        _current = kind(request)
    _current.check_same(request, kind.virtual)
    assert isinstance(_current, kind)
    return _current


def checked_request(
    gpus: int,
    like: str | None,
    memory: str | int | None,
    values: bool,
    heeds_environment: bool = False,
    host: float = 1.0,
) -> Request:
    """Check what `use` is asked for.

    The memory may still be less than that of a virtual GPU. See `check_memory`.

    Raises ValueError for an argument that is not one of the choices, which the message names.
    """
    check_count(gpus)
    if not (values is True or values is False):
        raise ValueError(f"values={values!r}: choose one of True, False")
    if like is not None:
        profiles.load(like)
    limit = None if memory is None else parse_bytes(memory)
    check_host(host)
    return Request(gpus, like, limit, values, heeds_environment, float(host))


def check_host(host: float) -> None:
    """Raises ValueError for a speed that no host has."""
    if isinstance(host, bool) or not isinstance(host, int | float) or not 0.01 <= host <= 100:
        raise ValueError(f"host={host!r}: give how many times as long it takes as the recorded one, from 0.01 to 100")


def share(gpus: int, like: str, memory: int | None) -> None:
    """Let processes that this one starts, each of which calls `use` alike, have one machine, as long as this process lives."""
    from virtualgpu.processes import usage_table

    profile = profiles.load(like)
    _shared.append(usage_table.UsageTable(profile.name, gpus, memory or profile.total_memory))
    os.environ[usage_table.ADDRESS] = _shared[-1].address


def inherit(request: Request, front: str, environment: dict[str, str], blanks_host: bool) -> None:
    """Put the machine of the parent in place, in a process that multiprocessing starts.

    This happens before the process imports the main module.

    Args:
        request: what the parent's machine was asked for.
        front: the package that the parent's messages name.
        environment: the variables by which the parent's machine is found.
        blanks_host: whether copies to the host of values that were not kept bring NaN.
    """
    importlib.import_module(front)  # it registers itself
    if _current is None:
        os.environ.update(environment)
        put_in_use(request, VirtualGPUs).machine.blanks_host = blanks_host


def real_or_virtual() -> GPUsInUse | None:
    """Return the GPUs in use, real or virtual ones. None if there are none."""
    return _current


def current() -> VirtualGPUs | None:
    """Return the virtual GPUs in use. None if there are none."""
    if isinstance(_current, VirtualGPUs):
        return _current
    return None


def host_time() -> float:
    """Return the seconds on the clock that kernels run on. Without virtual GPUs it is the real clock."""
    if _current is None:
        return time.perf_counter()
    return _current.host_time()


def races() -> "list[Race]":
    """Pairs of launches on the same memory that nothing orders, as found so far on the virtual GPUs in use.

    Each has a `kind` ("stale read", "overwritten too early", "two writers") and two sides, `first` and `second`, in the order of their
    launch; printed, it says what happens and how to put it in order. Raises RuntimeError without virtual GPUs.
    """
    virtual = current()
    if virtual is None:
        raise RuntimeError(f"races are found on virtual GPUs, and none is in use: {front_end.name()}.use(gpus=1) puts one in place")
    return virtual.races()


def check_count(gpus: Any) -> None:
    """Raises ValueError unless it is a number of GPUs that a machine can have."""
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= MAXIMUM:
        raise ValueError(f"gpus={gpus!r}: choose a whole number from 1 to {MAXIMUM}, or None to take the machine away")


def check_memory(limit: int) -> None:
    """Raises ValueError for less memory than a virtual GPU has."""
    if limit < LEAST_MEMORY:
        least = gibibytes(LEAST_MEMORY)
        raise ValueError(f"memory={limit} bytes: a virtual GPU has at least {least}, of which its CUDA context takes some")


def parse_bytes(text: str | int) -> int:
    """Bytes of "16GiB", "500 MB" or a plain number. Raises ValueError naming the units."""
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise ValueError(f"memory={text!r}: give a positive number of bytes, or a size such as '16GiB' (units: KiB, MiB, GiB, KB, MB, GB)")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def gibibytes(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"


def badge(name: str, virtual: bool) -> str:
    """Return where a figure made on GPUs of that name comes from."""
    if virtual:
        return f"virtual GPU, modelled on {with_maker(name)}"
    return f"measured on {with_maker(name)}"


def described(count: int, name: str, memory: int, virtual: bool) -> str:
    """Return how many GPUs of which model there are, and the memory of each."""
    gpus = "GPU" if count == 1 else "GPUs"
    each = f"{with_maker(name)}, {gibibytes(memory)} each"
    if virtual:
        return f"{count} virtual {gpus}, modelled on {each}"
    return f"{count} {gpus} of this computer: {each}"


def with_maker(name: str) -> str:
    """A GPU's name with that of its maker: not all have it, such as "Tesla T4"."""
    return name if name.startswith("NVIDIA") else f"NVIDIA {name}"
