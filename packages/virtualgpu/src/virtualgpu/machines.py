"""The function `use()`, which puts virtual GPUs in use.

The GPUs belong to this process and to the children that multiprocessing starts for it.
"""

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

MAXIMUM = 16  # the most GPUs of one machine
LEAST_MEMORY = 1 << 30  # the least memory of a virtual GPU, in bytes
DEFAULT_MODEL = "T4"  # the GPU that Colab offers
_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_IN_USE = (
    "a machine is already in use ({}). Take it away first with {}.use(None), or leave its `with` "
    "block."
)

_current: "GPUsInUse | None" = None
_shared: list[Any] = []  # the tables of machines that other processes share


@dataclass(frozen=True)
class Request:
    """The checked arguments of `use`. `memory` is in bytes."""

    gpus: int
    like: str | None
    memory: int | None
    values: bool
    heeds_environment: bool = False
    host: float = 1.0


class GPUsInUse:
    """The GPUs that this process uses, real or virtual ones.

    This is also a context manager, which takes the GPUs away at the end of a `with` block. The
    block raises RuntimeError if the GPUs are not in use any more, or if another block uses them
    already.

    Attributes:
        request: the checked arguments of `use`
        name: the model's name, as `torch.cuda.get_device_name` returns it
        virtual: whether the GPUs are virtual
        memory: the bytes that the process may use on each GPU
    """

    request: Request
    name: str
    virtual: bool
    memory: int
    told_in = 0  # number of the notebook's cell that last printed a description of these GPUs
    _entered = False
    _kept = ""  # the reason why they may not be taken away now

    def __init__(self, request: Request) -> None:
        """Put the GPUs that `request` describes in use."""
        self.request = request

    @property
    def count(self) -> int:
        """The number of GPUs in use."""
        return self.request.gpus

    @property
    def badge(self) -> str:
        """The label for figures made on these GPUs, such as "measured on NVIDIA H200"."""
        return badge(self.name, self.virtual)

    @property
    def description(self) -> str:
        """The number of GPUs, their model and their memory, as text."""
        return described(self.count, self.name, self.memory, self.virtual)

    def check_same(self, request: Request, virtual: bool) -> None:
        """Raise RuntimeError unless these GPUs are those that `request` and `virtual` describe."""
        if self.request == request and self.virtual == virtual:
            return
        if self._kept:
            raise RuntimeError(self._kept)
        raise RuntimeError(_IN_USE.format(self.description, front_end.name()))

    def host_time(self) -> float:
        """Return the present time in seconds on the clock that the kernels use."""
        raise NotImplementedError

    def races(self) -> "list[Race]":
        """Return the races found so far, each pair of lines once.

        Raises RuntimeError on real GPUs, where races cannot be observed.
        """
        raise NotImplementedError

    def without_values(self) -> AbstractContextManager[None]:
        """Let virtual GPUs compute no values in the block, as with `values=False`.

        Tensors made in the block must not be used after it. Real GPUs compute anyway.
        """
        raise NotImplementedError

    def with_values(self) -> AbstractContextManager[None]:
        """Let virtual GPUs compute values in the block, even with `values=False`.

        Tensors from before the block still have no values. Real GPUs compute anyway.
        """
        raise NotImplementedError

    def new_workspaces_freed(self) -> AbstractContextManager[None]:
        """Free the workspaces that CUDA's libraries allocate in the block, and no others."""
        raise NotImplementedError

    @contextmanager
    def kept(self, why: str) -> Iterator[None]:
        """Forbid the block to take these GPUs away or to use others.

        A forbidden call raises RuntimeError with the text `why`.
        """
        before, self._kept = self._kept, why
        try:
            yield
        finally:
            self._kept = before

    def take_away(self) -> None:
        """Take the GPUs away, as `use(None)` does. A second call changes nothing.

        Raises RuntimeError in a block of `kept`.
        """
        global _current
        if self._kept:
            raise RuntimeError(self._kept)
        self._remove()
        if _current is self:
            _current = None

    def _remove(self) -> None:
        """Restore PyTorch as it was before these GPUs were put in use."""
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
        """Show nothing, because the cell has already printed a description of these GPUs."""
        shell = front_end.ipython_shell()
        if shell is None or self.told_in != shell.execution_count:
            raise NotImplementedError  # asks IPython to show the repr


class VirtualGPUs(GPUsInUse):
    """Virtual GPUs that this process uses. They are taken away at the end of a `with` block."""

    virtual = True

    def __init__(self, request: Request) -> None:
        """Put the virtual GPUs that `request` describes in use.

        If the environment names an equal machine of another process, both processes share the GPUs
        (see `processes.usage_table`).
        """
        from virtualgpu import hardware
        from virtualgpu.install import Installation
        from virtualgpu.processes import usage_table

        super().__init__(request)
        self.profile = profiles.load(request.like or DEFAULT_MODEL, request.host)
        self.name = self.profile.name
        self.memory = request.memory or self.profile.total_memory
        address = os.environ.get(usage_table.ADDRESS)
        shared = usage_table.join(self.name, request.gpus, self.memory, address)
        self.machine = hardware.Machine(
            self.profile,
            request.gpus,
            request.memory,
            request.values,
            request.heeds_environment,
            shared,
        )
        self._installation: Any = Installation(
            self.machine, in_child=_InChild(request), joins=shared is not None
        )
        self.real_gpus: int = self._installation.real_gpus  # the real GPUs, which are hidden

    def host_time(self) -> float:
        """Return the present time in seconds on the machine's clock."""
        return self.machine.clock.host

    def races(self) -> "list[Race]":
        """Return the races found so far, each pair of lines once."""
        return list(self.machine.races.races)

    @contextmanager
    def without_values(self) -> Iterator[None]:
        """Compute no values in the block. Tensors made in the block must not be used after it.

        A copy to a tensor on the host takes its time and writes NaN if the dtype has NaN.
        """
        with self._computing(values=False, blanks_host=True):
            yield

    @contextmanager
    def with_values(self) -> Iterator[None]:
        """Compute values in the block, even with `values=False`."""
        with self._computing(values=True, blanks_host=False):
            yield

    @contextmanager
    def _computing(self, values: bool, blanks_host: bool) -> Iterator[None]:
        """Switch the computing of values on or off in the block, as `values` says.

        With `blanks_host`, copies to the host write NaN where values are missing.
        """
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
        """Free the workspaces that CUDA's libraries allocate in the block, and no others."""
        from virtualgpu import workspaces

        with workspaces.freed_afterwards(self.machine.gpus):
            yield

    def _remove(self) -> None:
        """Remove the virtual machine and restore PyTorch."""
        if self._installation is not None:
            self._installation.remove()
        self._installation = None


class _InChild:
    """Object that puts this process's machine in use in the process where it is unpickled.

    It is the first object that a process spawned by multiprocessing unpickles.
    """

    def __init__(self, request: Request) -> None:
        self._request = request

    def __reduce__(self) -> tuple[Any, ...]:
        from virtualgpu.driver import smi
        from virtualgpu.processes import usage_table

        # A fork server may be older than the machine. Its children then lack this environment.
        names = (usage_table.ADDRESS, smi.ADDRESS, "PATH")
        environment = {name: os.environ[name] for name in names if name in os.environ}
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
    """Give this process virtual GPUs, which `torch.cuda` treats as real ones.

    `with virtualgpu.use(2, like="H200"):` uses them only in the block. The same arguments again
    return the GPUs in use.

    Args:
        gpus: the number of GPUs, 1 to 16. None takes those in use away.
        like: the GPU model, such as "T4" (the default) or "H200". `virtualgpu.profiles.names()`
            lists all models.
        memory: the memory of each GPU, in bytes or as text such as "16GiB". The default is the
            model's memory.
        values: with False, shapes, memory, order and time are kept, but no values are computed.
        heeds_environment: whether CUDA_VISIBLE_DEVICES hides virtual GPUs, as it hides real ones.
        host: the time that the host takes for its work, relative to the recorded H200s' host.

    Raises:
        ValueError: an argument is not one of the choices, which the message lists.
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
    """Return GPUs of the class `kind` for the request.

    These are the GPUs in use, or new ones if there are none. Raises RuntimeError if other GPUs are
    in use.
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
    """Check the arguments of `use` and return them as a Request.

    The memory can still be less than the least memory of a virtual GPU (see `check_memory`). Raises
    ValueError for an argument that is not one of the choices, which the message lists.
    """
    check_count(gpus)
    if not (values is True or values is False):
        raise ValueError(f"values={values!r}: choose one of True, False")
    if like is not None:
        profiles.load(like)
    limit = None
    if memory is not None:
        limit = parse_bytes(memory)
    check_host(host)
    return Request(gpus, like, limit, values, heeds_environment, float(host))


def check_host(host: float) -> None:
    """Raise ValueError unless `host` is a number from 0.01 to 100."""
    is_number = isinstance(host, int | float) and not isinstance(host, bool)
    if not is_number or not 0.01 <= host <= 100:
        raise ValueError(
            f"host={host!r}: give the time of the host's work relative to the recorded host, "
            "from 0.01 to 100"
        )


def share(gpus: int, like: str, memory: int | None) -> None:
    """Let the processes that this process starts share one machine, as long as this process lives.

    Each of them must call `use` with the same `gpus`, `like` and `memory`.
    """
    from virtualgpu.processes import usage_table

    profile = profiles.load(like)
    _shared.append(usage_table.UsageTable(profile.name, gpus, memory or profile.total_memory))
    os.environ[usage_table.ADDRESS] = _shared[-1].address


def inherit(request: Request, front: str, environment: dict[str, str], blanks_host: bool) -> None:
    """Put the parent's machine in use, in a process that multiprocessing starts.

    This happens before the process imports the main module.

    Args:
        request: the arguments of the parent's `use`
        front: the package that the parent's messages name
        environment: the variables that lead to the parent's machine
        blanks_host: whether copies to the host write NaN if the values were not kept
    """
    importlib.import_module(front)  # the import registers the package
    if _current is None:
        os.environ.update(environment)
        put_in_use(request, VirtualGPUs).machine.blanks_host = blanks_host


def real_or_virtual() -> GPUsInUse | None:
    """Return the GPUs in use, real or virtual ones, or None."""
    return _current


def current() -> VirtualGPUs | None:
    """Return the virtual GPUs in use, or None."""
    if isinstance(_current, VirtualGPUs):
        return _current
    return None


def host_time() -> float:
    """Return the present time in seconds on the clock that kernels use.

    Without GPUs in use this is the real clock.
    """
    if _current is None:
        return time.perf_counter()
    return _current.host_time()


def races() -> "list[Race]":
    """Return the races found so far on the virtual GPUs in use.

    A race is a pair of launches on the same memory without an order between them. It has a `kind`
    ("stale read", "overwritten too early" or "two writers") and the two launches `first` and
    `second`, in the order of their launch. Its text says what can happen and how to order the two.

    Raises RuntimeError without virtual GPUs.
    """
    virtual = current()
    if virtual is None:
        raise RuntimeError(
            "races can only be found on virtual GPUs, and none are in use. "
            f"Call {front_end.name()}.use(gpus=1) first."
        )
    return virtual.races()


def check_count(gpus: Any) -> None:
    """Raise ValueError unless `gpus` is a number of GPUs that a machine can have."""
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= MAXIMUM:
        raise ValueError(
            f"gpus={gpus!r}: choose a whole number from 1 to {MAXIMUM}, or None to take the "
            "machine away"
        )


def check_memory(limit: int) -> None:
    """Raise ValueError if `limit` bytes are less memory than a virtual GPU must have."""
    if limit < LEAST_MEMORY:
        least = gibibytes(LEAST_MEMORY)
        raise ValueError(
            f"memory={limit} bytes: a virtual GPU needs at least {least}, because its CUDA context "
            "takes some of it"
        )


def parse_bytes(text: str | int) -> int:
    """Convert a size such as "16GiB", "500 MB" or a plain number to bytes.

    Raises ValueError for anything else. The message lists the units.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text > 0:
        return text
    match = None
    if isinstance(text, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS or float(match[1]) == 0:
        raise ValueError(
            f"memory={text!r}: give a positive number of bytes, or a size such as '16GiB' (units: "
            "KiB, MiB, GiB, KB, MB, GB)"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def gibibytes(nbytes: int) -> str:
    """Return a number of bytes as text in GiB, such as "16.0 GiB"."""
    return f"{nbytes / (1 << 30):.1f} GiB"


def badge(name: str, virtual: bool) -> str:
    """Return the label for figures made on GPUs of this name, such as "measured on NVIDIA H200"."""
    if virtual:
        return f"virtual GPU, modelled on {with_maker(name)}"
    return f"measured on {with_maker(name)}"


def described(count: int, name: str, memory: int, virtual: bool) -> str:
    """Return the number of GPUs, their model, and the memory of each as text."""
    gpus = "GPU" if count == 1 else "GPUs"
    each = f"{with_maker(name)}, {gibibytes(memory)} each"
    if virtual:
        return f"{count} virtual {gpus}, modelled on {each}"
    return f"{count} {gpus} of this computer: {each}"


def with_maker(name: str) -> str:
    """Return a GPU's name with its maker in front.

    Some names, such as "Tesla T4", lack the maker.
    """
    if name.startswith("NVIDIA"):
        return name
    return f"NVIDIA {name}"
