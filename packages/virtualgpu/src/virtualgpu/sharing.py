"""Sending tensors to another process, which maps the same memory. The sender remains the owner.

`torch.multiprocessing` does the work (torch/multiprocessing/reductions.py). This module has the
three C++ functions that it calls for CUDA tensors (torch/csrc/StorageSharing.cpp), and the names by
which it sends our classes.

On a real GPU a receiver opens the sender's memory by a handle of the driver. Here the values are
put into memory that both processes map, as `torch.multiprocessing` shares CPU tensors
(`set_sharing_strategy`). With file descriptors the memory has no name, so nothing is left behind
however a process ends. With file names, PyTorch's own torch_shm_manager cleans up.

Each process has its own clock, and their times cannot be compared. A received tensor is ready, and
the receiver's streams wait for nothing. On CUDA they wait for an event of the sender, whose time
depends on the real speed of the two processes. Events that a program sends itself are in
`shared_events`.
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

# The first address of memory received on a GPU, and the driver's granularity in bytes.
FIRST_ADDRESS, GRANULE = 0x7D0000000000, 2 << 20
# How a receiver gets the values: there are none, by a file, or by PyTorch's manager.
NO_VALUES, FILE, NAME = "no values", "file", "name"
_storage_class: Any = torch.UntypedStorage
_open_file, _open_name = _storage_class._new_shared_fd_cpu, _storage_class._new_shared_filename_cpu
_received: "weakref.WeakSet[ReceivedMemory]" = weakref.WeakSet()
# A receiver knows a storage by its handle, and the numbers of descriptors are reused.
_serials = itertools.count()


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    storage = torch.UntypedStorage
    yield (
        storage,
        {
            "_new_shared": new_shared(storage._new_shared),
            "_share_cuda_": share_cuda,
            "_new_shared_cuda": staticmethod(new_shared_cuda),
            "_release_ipc_counter_cuda": staticmethod(release_ipc_counter),
        },
    )


class ReceivedMemory(Memory):
    """Memory of a storage that another process owns. This process's allocator does not know it."""

    __slots__ = ("_address", "_counter", "_nbytes", "_process")

    def __init__(self, gpu: Gpu, nbytes: int, kept: bool, counter: tuple[str, int]) -> None:
        """Store what this process knows about memory that another process owns.

        `kept` says whether it has values. `counter` is the address of a counter's file and an index
        in it.
        """
        super().__init__(gpu, None, 0 if kept else None)  # the owner's budget counts the values
        self._nbytes = nbytes
        self._counter: tuple[str, int] | None = counter
        self._address = FIRST_ADDRESS + (gpu.index << 40) + gpu.received
        gpu.received += -(-nbytes // GRANULE) * GRANULE
        self._process = os.getpid()
        _received.add(self)

    shared = True

    @property
    def address(self) -> int:
        """The address of the received memory on this process's virtual GPU.

        Its allocator uses other addresses.
        """
        return self._address

    @property
    def requested(self) -> int:
        """The size of the received storage in bytes."""
        return self._nbytes

    def release(self) -> None:
        """Tell the owner of the memory that this process does not use it any more."""
        # A forked child must not do this for its parent.
        if self._counter is not None and self._process == os.getpid():
            decrement(*self._counter)
        self._counter = None

    def __del__(self) -> None:
        """Release the memory when the storage is deleted.

        As on CUDA, the host first waits for the current stream, because the owner may reuse the
        memory afterwards.
        """
        super().__del__()
        if self.gpu.machine.alive:
            self.gpu.machine.clock.synchronize_stream(self.gpu.stream, 0.0)
        self.release()


def _release_at_exit(received: "weakref.WeakSet[ReceivedMemory]") -> None:
    """Release all memory received from other processes when this process ends."""

    def release_all() -> None:
        for memory in list(received):
            memory.release()

    multiprocessing.util.Finalize(None, release_all, exitpriority=LAST)


_release_at_exit(_received)
# A child process starts without its parent's finalizers.
multiprocessing.util.register_after_fork(_received, _release_at_exit)


# Replacements of PyTorch's C++ functions


def share_cuda(
    storage: VirtualStorage,
) -> tuple[int, bytes | None, int, int, bytes | None, int, bytes | None, bool | None]:
    """Export a storage, and return the arguments of `new_shared_cuda` for another process.

    It replaces `storage._share_cuda_`. Every call counts one more receiver. Raises RuntimeError for
    memory that was itself received.
    """
    if not isinstance(storage, VirtualStorage):
        raise RuntimeError("_share_cuda_: only available on CUDA")
    memory = storage.memory
    if isinstance(memory, ReceivedMemory):
        raise RuntimeError(
            "Attempted to send CUDA tensor received from another process; this is not currently "
            "supported. Consider cloning before sending."
        )
    machine, device = memory.gpu.machine, memory.gpu.index
    machine.require_alive()
    if memory.block is None:
        return device, None, storage.nbytes(), 0, None, 0, None, None
    machine.take_turn()  # another thread may be using the values, which are moved now
    if memory.export is None:
        memory.export = ExportedBlock(*_export(storage))
    counter = machine.pending_frees.count(memory.export)
    file = counter.file.address.encode()
    return device, memory.export.handle, storage.nbytes(), 0, file, counter.index, b"", False


def new_shared_cuda(
    device: int,
    handle: bytes,
    nbytes: int,
    offset: int,
    counter: bytes,
    index: int,
    event: bytes,
    waits: bool,
) -> torch.UntypedStorage:
    """Return a storage for memory that another process has exported with `share_cuda`.

    It replaces `UntypedStorage._new_shared_cuda`. Raises AcceleratorError, as CUDA does, if the
    sender has ended or is this process.
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
    memory = ReceivedMemory(gpu, nbytes, kind != NO_VALUES, (counter.decode(), index))
    hang(memory, storage)
    return storage


def release_ipc_counter(counter: bytes, index: int) -> None:
    """Decrement the counter of a storage that this process has received before."""
    decrement(counter.decode(), index)


def new_shared(make: Callable[..., torch.UntypedStorage]) -> Any:
    """Return a replacement of `UntypedStorage._new_shared`, which is the method `make`.

    DataLoader's workers collect a batch with it. On a CUDA device it makes a new storage there.
    """

    def _new_shared(cls: type, size: int, *, device: Any = "cpu") -> torch.UntypedStorage:
        if torch.device(device).type == "cuda":
            return torch.UntypedStorage(size, device=device)
        return make(size, device=device)

    return classmethod(_new_shared)


def _export(storage: VirtualStorage) -> tuple[bytes, Any]:
    """Move the values of a storage to memory that other processes can map.

    Returns (handle of this memory, object that keeps the handle valid).
    """
    serial = next(_serials)
    if not storage.memory.gpu.machine.values:
        # values=False keeps single numbers, which the next operator may change.
        storage.memory.forget()
    if storage.memory.kept is None:
        return _handle(NO_VALUES, serial), None
    with _DisableTorchDispatch():
        if get_sharing_strategy() == "file_descriptor" and has_proc():
            keeper: Any = Descriptor(os.dup(storage._share_fd_cpu_()[0]))
            return _handle(FILE, serial, address_of(keeper.number)), keeper
        manager, name, nbytes = storage._share_filename_cpu_()
        handle = _handle(NAME, serial, manager.decode(), name.decode())
        return handle, _open_name(manager, name, nbytes)


def _handle(kind: str, serial: int, *where: str) -> bytes:
    """Return a handle with which another process can open the values of a storage.

    `kind` says how, `serial` makes the handle unique, and `where` are the addresses for `_reach`.
    """
    return json.dumps([kind, os.getpid(), serial, *where]).encode()


def _reach(kind: str, where: list[str], nbytes: int, gpu: Gpu) -> torch.UntypedStorage:
    """Open the storage that a handle describes, and return it. It belongs on `gpu`.

    `kind` and `where` are parts of the handle (see `_handle`). Raises OSError or RuntimeError if
    the storage is gone.
    """
    if kind == NO_VALUES:
        empty = empty_without_values(gpu, (nbytes,), (1,), torch.uint8, allocated=False)
        return empty.untyped_storage()
    if kind == NAME:
        return _own_object(_open_name(where[0].encode(), where[1].encode(), nbytes))
    file = open_address(where[0])
    try:
        return _own_object(_open_file(file, nbytes))
    finally:
        os.close(file)


def _own_object(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the Python object by which tensors refer to a storage.

    `storage` may be another object for it. Older versions of PyTorch open a file into an object
    that C++ does not know.
    """
    with _DisableTorchDispatch():
        return plain_set(torch.empty(0, dtype=torch.uint8), storage).untyped_storage()


class Descriptor:
    """A file descriptor that is open as long as this object lives."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


# What torch.multiprocessing pickles


def reduce_tensor(tensor: VirtualTensor) -> tuple[Callable[..., torch.Tensor], tuple]:
    """Return what pickle needs to rebuild the tensor: PyTorch's own function and its arguments.

    They name torch.Tensor or Parameter in place of our class.
    """
    kind: type = torch.Tensor
    if isinstance(tensor, torch.nn.Parameter):
        kind = torch.nn.Parameter
    rebuild, arguments = reductions.reduce_tensor(tensor)
    if rebuild is reductions.rebuild_cuda_tensor and arguments[8] == 0:
        size, stride = tensor.size(), tensor.stride()
        device, requires_grad = tensor.get_device(), tensor.requires_grad
        return _rebuild_empty, (kind, size, stride, tensor.dtype, device, requires_grad)
    return rebuild, _by_name(arguments, kind)


def _by_name(arguments: tuple, kind: type) -> tuple:
    """Return the arguments of a rebuilding function with `kind` in place of our tensor class.

    The arguments for parts of sparse tensors are changed, too.
    """
    found: list[Any] = []
    for x in arguments:
        if x is VirtualTensor:
            found.append(kind)
        elif type(x) is tuple:
            found.append(_by_name(x, kind))
        else:
            found.append(x)
    return tuple(found)


def _rebuild_empty(
    kind: type,
    size: torch.Size,
    stride: tuple,
    dtype: torch.dtype,
    device: int,
    requires_grad: bool,
) -> torch.Tensor:
    """Return a tensor without elements on the GPU number `device`, after unpickling.

    PyTorch would create its storage in C++, which does not have CUDA.
    """
    tensor = torch.empty_strided(size, stride, dtype=dtype, device=f"cuda:{device}")
    if kind is torch.nn.Parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def reduce_event(event: Event) -> tuple[Callable[..., Event], tuple]:
    """Return what pickle needs to rebuild an event: a function and its arguments.

    The function's name differs between versions of PyTorch.
    """
    return reductions.rebuild_event, (event.device, event.ipc_handle())


ForkingPickler.register(VirtualTensor, reduce_tensor)
ForkingPickler.register(VirtualStorage, reductions.reduce_storage)
ForkingPickler.register(Event, reduce_event)
