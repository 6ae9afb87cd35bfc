"""Tensors that are alive on real or virtual GPUs, grouped by their storage."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gputrace.holders import autograd
from virtualgpu.instruments import Memory

DeviceAddress = tuple[int, int]  # (device index, address)
_RELEVANT = {
    Memory,
    torch.Tensor,
    torch.UntypedStorage,
    torch.nn.Module,
    torch.optim.Optimizer,
}
_PLAIN: Any = torch._C.TensorBase  # its methods run no code of a subclass


@dataclass(eq=False)
class DeviceStorage:
    """Memory of a GPU and the Python objects that hold it.

    This object keeps them alive, too. `storages` are held without a tensor.
    """

    device: int
    address: int
    nbytes: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)

    @property
    def key(self) -> DeviceAddress:
        """The device and the address."""
        return self.device, self.address

    @property
    def largest(self) -> torch.Tensor | None:
        """The tensor with the most bytes, of which the others are usually views, or None."""
        return max(self.tensors, key=nbytes, default=None)


@dataclass(eq=False)
class Living:
    """The storages that are alive on the GPUs, and the references in C++ (`autograd.Link`)."""

    storages: dict[DeviceAddress, DeviceStorage]
    links: list[autograd.Link]


def nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    with torch._C.DisableTorchFunction():
        return _PLAIN.numel(tensor) * _PLAIN.itemsize.__get__(tensor)


def shape_and_dtype(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """Return a tensor's shape and dtype, such as (64, 1024) and "float32"."""
    with torch._C.DisableTorchFunction():
        shape, dtype = _PLAIN.shape.__get__(tensor), _PLAIN.dtype.__get__(tensor)
    return tuple(shape), str(dtype).removeprefix("torch.")


def of_kind(objects: list[Any], kind: type) -> list[Any]:
    """Return the objects whose class is `kind` or is derived from it."""
    return autograd.of_classes(objects, lambda found: kind in autograd.ancestry(found))


def all_objects() -> list[Any]:
    """Return all objects that Python's garbage collector tracks."""
    return gc.get_objects()


def relevant_objects() -> list[Any]:
    """Return the objects that `alive` and `categories.held` need."""
    return autograd.of_classes(gc.get_objects(), _is_relevant)


def _is_relevant(kind: type) -> bool:
    """Return whether objects of a class belong to `relevant_objects`."""
    return not _RELEVANT.isdisjoint(autograd.ancestry(kind)) or autograd.is_node(kind)


def alive(objects: list[Any] | None = None) -> Living:
    """Find the storages that are alive on the GPUs, with their tensors.

    The tensors are Python's own, gradients, and tensors that autograd graphs keep.

    Args:
        objects: the result of `all_objects` or `relevant_objects`, if it is already known.
    """
    if objects is None:
        objects = relevant_objects()
    living = Living({}, [])
    with torch._C.DisableTorchFunction():  # no code of a subclass or of a mode may run
        tensors, living.links = autograd.walk(
            of_kind(objects, torch.Tensor), autograd.nodes(objects)
        )
        for tensor in tensors:
            for storage in _storages_of(tensor):
                _add(living.storages, storage, tensor)
        for storage in of_kind(objects, torch.UntypedStorage):
            _add(living.storages, storage, None)
    return living


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor. The list is empty if the tensor has no memory of its own."""
    try:
        return [torch._C.TensorBase.untyped_storage(part) for part in _dense(tensor)]
    except (RuntimeError, NotImplementedError):  # a subclass whose inner tensors are found anyway
        return []


def _dense(tensor: torch.Tensor) -> list[Any]:
    """Return the dense tensors that a sparse tensor consists of, or a dense tensor itself."""
    plain, layout = _PLAIN, _PLAIN.layout.__get__(tensor)
    with torch.no_grad():
        if layout is torch.sparse_coo:
            parts = [plain._indices(tensor), plain._values(tensor)]
        elif layout in (torch.sparse_csr, torch.sparse_bsr):
            parts = [plain.crow_indices(tensor), plain.col_indices(tensor), plain.values(tensor)]
        elif layout in (torch.sparse_csc, torch.sparse_bsc):
            parts = [plain.ccol_indices(tensor), plain.row_indices(tensor), plain.values(tensor)]
        else:
            parts = [tensor]
    return parts


def _add(
    found: dict[DeviceAddress, DeviceStorage],
    storage: torch.UntypedStorage,
    tensor: torch.Tensor | None,
) -> None:
    """Add a storage and its tensor to `found`, unless the storage is not on a GPU."""
    if storage.device.type != "cuda" or not _in_use(storage):
        return
    try:
        key = storage.device.index, storage.data_ptr()
    except RuntimeError:  # a fake tensor has a device but no memory
        return
    if key[1] == 0:
        return
    entry = found.get(key)
    if entry is None:
        entry = found[key] = DeviceStorage(*key, storage.nbytes())
    kept: list[Any] = entry.tensors
    thing: Any = tensor
    if tensor is None:
        kept, thing = entry.storages, storage
    if not any(known is thing for known in kept):
        kept.append(thing)


def _in_use(storage: torch.UntypedStorage) -> bool:
    """Return whether the GPU of a storage exists. A virtual GPU may have been removed."""
    memory = _memory(storage)
    return memory is None or memory.gpu.machine.alive


class Census:
    """The storages that were alive on the GPUs at one moment, known by weak references.

    An address may be used again. A census distinguishes a later tensor at the same address.
    """

    def __init__(self, living: Living) -> None:
        self._weak = {key: _weak(_any_storage(entry)) for key, entry in living.storages.items()}

    def __contains__(self, entry: DeviceStorage) -> bool:
        """Return whether the storage of `entry` was alive at that moment.

        A later storage at the same address does not count.
        """
        weak = self._weak.get(entry.key)
        storage = _any_storage(entry)
        if isinstance(weak, StorageWeakRef):
            # C++ does not use this address again while a weak reference exists.
            return weak.cdata == storage._cdata
        return weak is not None and weak() is _memory(storage)

    def alive_at(self, key: DeviceAddress) -> bool | None:
        """Return whether the storage at an address is still alive, or None if there was none."""
        weak = self._weak.get(key)
        if weak is None:
            return None
        if isinstance(weak, StorageWeakRef):
            return not weak.expired()
        return weak() is not None


def _weak(storage: torch.UntypedStorage) -> "StorageWeakRef | weakref.ref":
    """Return a weak reference to a storage, or to the `Memory` of a storage on a virtual GPU.

    A StorageWeakRef of PyTorch 2.6 would still be valid after the virtual memory is freed.
    """
    memory = _memory(storage)
    if memory is None:
        return StorageWeakRef(storage)
    return weakref.ref(memory)


def _memory(storage: torch.UntypedStorage) -> Any:
    """Return the `Memory` of a storage on a virtual GPU, or None for a real one."""
    return vars(storage).get("memory")


def _any_storage(entry: DeviceStorage) -> torch.UntypedStorage:
    """Return one of the storage objects that refer to the memory of `entry`."""
    if entry.storages:
        return entry.storages[0]
    with torch._C.DisableTorchFunction():
        found = _storages_of(entry.tensors[0])
        return next(storage for storage in found if storage.data_ptr() == entry.address)
