"""Tensors sent to another process, which maps the same memory; the sender stays its owner.

`torch.multiprocessing` does the work (torch/multiprocessing/reductions.py). Here are the three functions of C++ that it calls for CUDA
tensors (torch/csrc/StorageSharing.cpp), and the names by which it sends our classes. On a real GPU a receiver opens the sender's memory
by a handle of the driver's. Here the values go into memory that both processes map, the way in which `torch.multiprocessing` shares CPU
tensors (`set_sharing_strategy`): with file descriptors nothing has a name, so nothing is left however a process ends; with file names
PyTorch's own torch_shm_manager clears up.

A process's clock is its own: no moment of one is before or after a moment of another. What is received is ready, and the receiver's
streams wait for nothing. On CUDA they wait for an event that the sender has recorded, whose moment hangs on the two processes' real speed.
Events that a program sends itself are `shared_events`.
"""

import itertools
import json
import multiprocessing.util
import os
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._C import _DisableTorchDispatch
from torch.multiprocessing import get_sharing_strategy, reductions

from virtualgpu import errors, hardware
from virtualgpu.hardware import Gpu, Machine
from virtualgpu.memory import Memory
from virtualgpu.processes.exported_blocks import LAST, ExportedBlock, decrement
from virtualgpu.processes.shared_file import address_of, has_proc, open_address
from virtualgpu.streams.cuda_streams import Event
from virtualgpu.tensor import VirtualStorage, VirtualTensor, empty_without_values, hang, plain_set

FIRST_ADDRESS, GRANULE = 0x7D0000000000, 2 << 20  # where a GPU's received memory begins, and what the driver rounds it up to
NO_VALUES, FILE, NAME = (
    "no values",
    "file",
    "name",
)  # how values are reached: not at all, for there are none; by a file; by PyTorch's manager
_storage_class: Any = torch.UntypedStorage
_open_file, _open_name = _storage_class._new_shared_fd_cpu, _storage_class._new_shared_filename_cpu
_received: "weakref.WeakSet[ReceivedMemory]" = weakref.WeakSet()
_serials = itertools.count()  # descriptor numbers are reused, and a receiver knows a storage by its handle


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    storage = torch.UntypedStorage
    yield storage, {"_new_shared": new_shared(storage._new_shared), "_share_cuda_": share_cuda}
    yield storage, {"_new_shared_cuda": staticmethod(new_shared_cuda), "_release_ipc_counter_cuda": staticmethod(release_ipc_counter)}


class ReceivedMemory(Memory):
    """A storage's memory that another process owns: the allocator of this process knows nothing of it."""

    __slots__ = ("_address", "_counter", "_nbytes", "_process")

    def __init__(self, gpu: Gpu, nbytes: int, kept: bool, counter: tuple[str, int]) -> None:
        """`counter` is the address of the counter's file, and its index there."""
        super().__init__(gpu, None, 0 if kept else None)  # its values count in their owner's budget
        self._nbytes = nbytes
        self._counter: tuple[str, int] | None = counter
        self._address = FIRST_ADDRESS + (gpu.index << 40) + gpu.received
        gpu.received += -(-nbytes // GRANULE) * GRANULE
        self._process = os.getpid()
        _received.add(self)

    shared = True

    @property
    def address(self) -> int:
        return self._address

    @property
    def requested(self) -> int:
        return self._nbytes

    def release(self) -> None:
        if self._counter is not None and self._process == os.getpid():  # not in a child that was forked
            decrement(*self._counter)
        self._counter = None

    def __del__(self) -> None:
        """As CUDA does it: the host waits for the current stream first, because the owner may reuse the memory then."""
        super().__del__()
        if self.gpu.machine.alive:
            self.gpu.machine.clock.synchronize_stream(self.gpu.stream, 0.0)
        self.release()


def _release_at_exit(received: "weakref.WeakSet[ReceivedMemory]") -> None:
    def release_all() -> None:
        for memory in list(received):
            memory.release()

    multiprocessing.util.Finalize(None, release_all, exitpriority=LAST)


_release_at_exit(_received)
multiprocessing.util.register_after_fork(_received, _release_at_exit)  # a child process starts without its parent's finalizers


# The functions that PyTorch has in C++


def share_cuda(storage: VirtualStorage) -> tuple[int, bytes | None, int, int, bytes | None, int, bytes | None, bool | None]:
    """`storage._share_cuda_()`: what a receiver needs, in PyTorch's order. Every call counts for one receiver.

    Raises RuntimeError for memory that was itself received.
    """
    if not isinstance(storage, VirtualStorage):
        raise RuntimeError("_share_cuda_: only available on CUDA")
    memory = storage.memory
    if isinstance(memory, ReceivedMemory):
        raise RuntimeError(
            "Attempted to send CUDA tensor received from another process; this is not currently supported. Consider cloning before sending."
        )
    machine, device = memory.gpu.machine, memory.gpu.index
    machine.require_alive()
    if memory.block is None:
        return device, None, storage.nbytes(), 0, None, 0, None, None
    machine.take_turn()  # another thread may be using the values, which move
    if memory.export is None:
        memory.export = ExportedBlock(*_export(storage))
    counter = machine.pending_frees.count(memory.export)
    return device, memory.export.handle, storage.nbytes(), 0, counter.file.address.encode(), counter.index, b"", False


def new_shared_cuda(
    device: int, handle: bytes, nbytes: int, offset: int, counter: bytes, index: int, event: bytes, waits: bool
) -> torch.UntypedStorage:
    """`UntypedStorage._new_shared_cuda`: the storage in this process.

    Raises AcceleratorError, as CUDA does, if the sender has ended, or is this very process.
    """
    gpu = hardware.machine().gpu(device)
    assert gpu is not None
    gpu.open_context()
    kind, sender, _, *where = json.loads(handle)
    if sender == os.getpid():
        raise errors.invalid_device_context()
    try:
        storage = _reach(kind, where, nbytes, gpu)
    except (OSError, RuntimeError):
        raise errors.invalid_resource_handle() from None
    hang(ReceivedMemory(gpu, nbytes, kind != NO_VALUES, (counter.decode(), index)), storage)
    return storage


def release_ipc_counter(counter: bytes, index: int) -> None:
    """`UntypedStorage._release_ipc_counter_cuda`: for a storage that this process has received before."""
    decrement(counter.decode(), index)


def new_shared(make: Callable[..., torch.UntypedStorage]) -> Any:
    """`UntypedStorage._new_shared`: DataLoader's workers gather a batch in it."""

    def _new_shared(cls: type, size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        return torch.UntypedStorage(size, device=device) if torch.device(device).type == "cuda" else make(size, device=device)

    return classmethod(_new_shared)


def _export(storage: VirtualStorage) -> tuple[bytes, Any]:
    """Moves the values to memory that other processes can map. Returns its handle, and the object that keeps the handle valid."""
    serial = next(_serials)
    if not storage.memory.gpu.machine.values:
        storage.memory.forget()  # values=False keeps single numbers, which the next operator may change
    if storage.memory.kept is None:
        return _handle(NO_VALUES, serial), None
    with _DisableTorchDispatch():
        if get_sharing_strategy() == "file_descriptor" and has_proc():
            keeper: Any = Descriptor(os.dup(storage._share_fd_cpu_()[0]))
            return _handle(FILE, serial, address_of(keeper.number)), keeper
        manager, name, nbytes = storage._share_filename_cpu_()
        return _handle(NAME, serial, manager.decode(), name.decode()), _open_name(manager, name, nbytes)


def _handle(kind: str, serial: int, *where: str) -> bytes:
    return json.dumps([kind, os.getpid(), serial, *where]).encode()


def _reach(kind: str, where: list[str], nbytes: int, gpu: Gpu) -> torch.UntypedStorage:
    if kind == NO_VALUES:
        return empty_without_values(gpu, (nbytes,), (1,), torch.uint8, allocated=False).untyped_storage()
    if kind == NAME:
        return _own_object(_open_name(where[0].encode(), where[1].encode(), nbytes))
    file = open_address(where[0])
    try:
        return _own_object(_open_file(file, nbytes))
    finally:
        os.close(file)


def _own_object(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """The object that tensors give as their storage: older versions of PyTorch open a file into another one, which C++ does not know."""
    with _DisableTorchDispatch():
        return plain_set(torch.empty(0, dtype=torch.uint8), storage).untyped_storage()


class Descriptor:
    """A file that is open as long as this object lives."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


# What torch.multiprocessing pickles


def reduce_tensor(tensor: VirtualTensor) -> tuple[Callable[..., torch.Tensor], tuple]:
    """PyTorch's own reduction, with torch.Tensor or Parameter in place of our class."""
    kind = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if rebuild is reductions.rebuild_cuda_tensor and arguments[8] == 0:
        return _rebuild_empty, (kind, tensor.size(), tensor.stride(), tensor.dtype, tensor.get_device(), tensor.requires_grad)
    return rebuild, _by_name(arguments, kind)


def _by_name(arguments: tuple, kind: type) -> tuple:
    """A sparse tensor's are those of its parts."""
    return tuple(kind if x is VirtualTensor else _by_name(x, kind) if type(x) is tuple else x for x in arguments)


def _rebuild_empty(kind: type, size: torch.Size, stride: tuple, dtype: torch.dtype, device: int, requires_grad: bool) -> torch.Tensor:
    """A tensor without elements: PyTorch would make its storage in C++, which has no CUDA."""
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=f"cuda:{device}")
    return torch.nn.Parameter(tensor, requires_grad) if kind is torch.nn.Parameter else tensor.requires_grad_(requires_grad)


def reduce_event(event: Event) -> tuple[Callable[..., Event], tuple]:
    """PyTorch's own reduction, which each version keeps under another name."""
    return reductions.rebuild_event, (event.device, event.ipc_handle())


ForkingPickler.register(VirtualTensor, reduce_tensor)
ForkingPickler.register(VirtualStorage, reductions.reduce_storage)
ForkingPickler.register(Event, reduce_event)
