"""The tensors that are alive on the GPUs, real or virtual, by the storage they lie on."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gputrace.holders import autograd
from virtualgpu.instruments import Memory

DeviceAddress = tuple[int, int]  # a device's index, and an address on it
_RELEVANT = {Memory, torch.Tensor, torch.UntypedStorage, torch.nn.Module, torch.optim.Optimizer}
_PLAIN: Any = torch._C.TensorBase  # C++'s own view of a tensor: a subclass may override anything


@dataclass(eq=False)
class DeviceStorage:
    """Memory of a GPU, in bytes, and the Python objects that hold it: tensors, and storages without a tensor. It keeps them alive."""

    device: int
    address: int
    nbytes: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)

    @property
    def key(self) -> DeviceAddress:
        return self.device, self.address

    @property
    def largest(self) -> torch.Tensor | None:
        """The tensor with the most bytes: where views are alive, the one that they are views of."""
        return max(self.tensors, key=nbytes, default=None)


@dataclass(eq=False)
class Living:
    """The storages alive on the GPUs, and the references that C++ holds (`autograd.Link`)."""

    storages: dict[DeviceAddress, DeviceStorage]
    links: list[autograd.Link]


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    with torch._C.DisableTorchFunction():
        return _PLAIN.numel(tensor) * _PLAIN.itemsize.__get__(tensor)


def shape_and_dtype(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """As in (64, 1024), "float32"."""
    with torch._C.DisableTorchFunction():
        shape, dtype = _PLAIN.shape.__get__(tensor), _PLAIN.dtype.__get__(tensor)
    return tuple(shape), str(dtype).removeprefix("torch.")


def of_kind(objects: list[Any], kind: type) -> list[Any]:
    """The objects whose class descends from `kind`."""
    return autograd.of_classes(objects, lambda found: kind in autograd.ancestry(found))


def all_objects() -> list[Any]:
    """What Python's garbage collector tracks."""
    return gc.get_objects()


def relevant_objects() -> list[Any]:
    """Those of all objects that `alive` and `categories.held` look at."""
    return autograd.of_classes(gc.get_objects(), _is_relevant)


def _is_relevant(kind: type) -> bool:
    return not _RELEVANT.isdisjoint(autograd.ancestry(kind)) or autograd.is_node(kind)


def alive(objects: list[Any] | None = None) -> Living:
    """The storages alive on the GPUs, with their tensors: those that Python knows, gradients, and what autograd graphs keep.

    `objects` is what `all_objects` or `relevant_objects` returned, if that was called already.
    """
    objects = relevant_objects() if objects is None else objects
    living = Living({}, [])
    with torch._C.DisableTorchFunction():  # no code of a subclass, or of a mode that is on, must run
        tensors, living.links = autograd.walk(of_kind(objects, torch.Tensor), autograd.nodes(objects))
        for tensor in tensors:
            for storage in _storages_of(tensor):
                _add(living.storages, storage, tensor)
        for storage in of_kind(objects, torch.UntypedStorage):
            _add(living.storages, storage, None)
    return living


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages of a tensor; none of one that has no memory of its own."""
    try:
        return [torch._C.TensorBase.untyped_storage(part) for part in _dense(tensor)]
    except (RuntimeError, NotImplementedError):  # a subclass without a storage: its inner tensors are found for themselves
        return []


def _dense(tensor: torch.Tensor) -> list[Any]:
    """The tensor, or the dense ones that make a sparse one."""
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


def _add(found: dict[DeviceAddress, DeviceStorage], storage: torch.UntypedStorage, tensor: torch.Tensor | None) -> None:
    if storage.device.type != "cuda" or not _in_use(storage):
        return
    try:
        key = storage.device.index, storage.data_ptr()
    except RuntimeError:  # a fake tensor: it has a device, and no memory
        return
    if key[1] == 0:
        return
    entry = found.get(key)
    if entry is None:
        entry = found[key] = DeviceStorage(*key, storage.nbytes())
    kept: list[Any] = entry.storages if tensor is None else entry.tensors
    thing = storage if tensor is None else tensor
    if not any(known is thing for known in kept):
        kept.append(thing)


def _in_use(storage: torch.UntypedStorage) -> bool:
    """Is its GPU there? What is left of a virtual machine that was taken away is on no GPU."""
    memory = _memory(storage)
    return memory is None or memory.gpu.machine.alive


class Census:
    """Which storages were alive on the GPUs at one moment, by weak references.

    An address may be used again: a census can tell a later tensor at an address from the earlier one.
    """

    def __init__(self, living: Living) -> None:
        self._weak = {key: _weak(_any_storage(entry)) for key, entry in living.storages.items()}

    def __contains__(self, entry: DeviceStorage) -> bool:
        """Was this very storage alive then?"""
        weak = self._weak.get(entry.key)
        storage = _any_storage(entry)
        if isinstance(weak, StorageWeakRef):
            return weak.cdata == storage._cdata  # C++ gives its address to no other while a weak reference is there
        return weak is not None and weak() is _memory(storage)

    def alive_at(self, key: DeviceAddress) -> bool | None:
        """Is the storage that was there still alive? None if there was none."""
        weak = self._weak.get(key)
        if isinstance(weak, StorageWeakRef):
            return not weak.expired()
        return None if weak is None else weak() is not None


def _weak(storage: torch.UntypedStorage) -> "StorageWeakRef | weakref.ref":
    """A weak reference to a storage; for a virtual GPU's to its `Memory`, as a StorageWeakRef of PyTorch 2.6 would outlive it."""
    memory = _memory(storage)
    return StorageWeakRef(storage) if memory is None else weakref.ref(memory)


def _memory(storage: torch.UntypedStorage) -> Any:
    """The `Memory` of a storage on a virtual GPU; None on a real one."""
    return vars(storage).get("memory")


def _any_storage(entry: DeviceStorage) -> torch.UntypedStorage:
    if entry.storages:
        return entry.storages[0]
    with torch._C.DisableTorchFunction():
        return next(storage for storage in _storages_of(entry.tensors[0]) if storage.data_ptr() == entry.address)
