"""`use()` puts virtual GPUs in place, in this process and in the children that multiprocessing starts for it."""

import importlib
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, overload

from virtualgpu import front_end, profiles

if TYPE_CHECKING:
    from virtualgpu.streams.race_reports import Race

MAXIMUM = 16  # GPUs of one machine
LEAST_MEMORY = 1 << 30  # bytes of a virtual GPU
DEFAULT_MODEL = "T4"  # what Colab gives
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_IN_USE = "a machine is already in use ({}). Take it away first with {}.use(None), or leave its `with` block."

_current: "VirtualGPUs | None" = None
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


class VirtualGPUs:
    """The virtual GPUs in use. Also a context manager: at the end of a `with` block they are taken away."""

    def __init__(self, request: Request) -> None:
        """Where the environment names an equal machine of another process, the GPUs are the same (`processes.usage_table`)."""
        from virtualgpu import hardware
        from virtualgpu.install import Installation
        from virtualgpu.processes import usage_table

        self.request = request
        self.profile = profiles.load(request.like or DEFAULT_MODEL, request.host)
        shared = usage_table.join(
            self.profile.name, request.gpus, request.memory or self.profile.total_memory, os.environ.get(usage_table.ADDRESS)
        )
        self.machine = hardware.Machine(self.profile, request.gpus, request.memory, request.values, request.heeds_environment, shared)
        self._installation: Any = Installation(self.machine, in_child=_InChild(request), joins=shared is not None)
        self.real_gpus: int = self._installation.real_gpus  # those that PyTorch would see without these

    @property
    def count(self) -> int:
        """How many there are."""
        return self.request.gpus

    @property
    def name(self) -> str:
        """The model's name, as `torch.cuda.get_device_name` has it."""
        return self.profile.name

    @property
    def badge(self) -> str:
        """Where a figure made on these GPUs comes from."""
        return badge(self.name, virtual=True)

    def host_time(self) -> float:
        """Seconds on the clock that the kernels run on."""
        return self.machine.clock.host

    def races(self) -> "list[Race]":
        """The races found so far, each pair of lines once."""
        return list(self.machine.races.races)

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """In the block nothing is computed, as with `values=False`; what it makes must not outlive it.

        A copy into a tensor on the host takes its time, and brings NaN where the dtype has it.
        """
        machine = self.machine
        before = machine.values, machine.blanks_host
        machine.values, machine.blanks_host = False, True
        machine.was_without_values = True
        try:
            yield
        finally:
            machine.values, machine.blanks_host = before

    @contextmanager
    def new_workspaces_freed(self) -> Iterator[None]:
        """Free the workspaces that CUDA's libraries take in the block, and no others."""
        from virtualgpu import workspaces

        with workspaces.freed_afterwards(self.machine.gpus):
            yield

    def take_away(self) -> None:
        """What `use(None)` does: PyTorch is as it was. Doing it again changes nothing."""
        global _current
        if self._installation is not None:
            self._installation.remove()
        self._installation = None
        if _current is self:
            _current = None

    def __enter__(self) -> "VirtualGPUs":
        if _current is not self:
            raise RuntimeError("these virtual GPUs are not in use any more")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.take_away()

    def __repr__(self) -> str:
        some = "1 virtual GPU" if self.count == 1 else f"{self.count} virtual GPUs"
        return f"<{some}, modelled on {with_maker(self.name)}, {gibibytes(self.request.memory or self.profile.total_memory)} each>"


class _InChild:
    """Puts the machine of this process in place where it is unpickled: the first thing in a process that multiprocessing starts afresh."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __reduce__(self) -> tuple[Any, ...]:
        from virtualgpu.driver import smi
        from virtualgpu.processes import usage_table

        # A server of forks may be older than the machine: its children do not have this process's environment.
        environment = {name: os.environ[name] for name in (usage_table.ADDRESS, smi.ADDRESS, "PATH") if name in os.environ}
        blanks_host = _current is not None and _current.machine.blanks_host
        return inherit, (self._request, front_end.name(), environment, blanks_host)


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
        RuntimeError: other virtual GPUs are in use. Nothing is changed then.
    """
    global _current
    if gpus is None:
        if _current is not None:
            _current.take_away()
        return None
    request = checked_request(gpus, like, memory, values, heeds_environment, host)
    if request.memory is not None:
        check_memory(request.memory)
    if _current is None:
        _current = VirtualGPUs(request)
    elif _current.request != request:
        raise RuntimeError(_IN_USE.format(repr(_current)[1:-1], front_end.name()))
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
    global _current
    importlib.import_module(front)  # it registers itself
    if _current is None:
        os.environ.update(environment)
        _current = VirtualGPUs(request)
        _current.machine.blanks_host = blanks_host


def current() -> VirtualGPUs | None:
    """The virtual GPUs in use; None when there are none."""
    return _current


def host_time() -> float:
    """Seconds on the clock that the kernels run on; without virtual GPUs, the real one."""
    return time.perf_counter() if _current is None else _current.host_time()


def races() -> "list[Race]":
    """Pairs of launches on the same memory that nothing orders, as found so far on the virtual GPUs in use.

    Each has a `kind` ("stale read", "overwritten too early", "two writers") and two sides, `first` and `second`, in the order of their
    launch; printed, it says what happens and how to put it in order. Raises RuntimeError without virtual GPUs.
    """
    if _current is None:
        raise RuntimeError(f"races are found on virtual GPUs, and none is in use: {front_end.name()}.use(gpus=1) puts one in place")
    return _current.races()


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


def with_maker(name: str) -> str:
    """A GPU's name with that of its maker: not all have it, such as "Tesla T4"."""
    return name if name.startswith("NVIDIA") else f"NVIDIA {name}"
