"""The tensors that are alive on the GPUs, real or virtual, by the storage they lie on."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from gputrace.holders import autograd as graph
from virtualgpu.instruments import Memory

DeviceAddress = tuple[int, int]  # a device's index and an address on it
_RELEVANT = {Memory, torch.Tensor, torch.UntypedStorage, torch.nn.Module, torch.optim.Optimizer}
_PLAIN: Any = torch._C.TensorBase  # what C++ knows of a tensor: a subclass may answer anything


@dataclass(eq=False)
class DeviceStorage:
    """A stretch of a GPU's memory, in bytes, and the Python objects through which it is held: tensors, and storages taken by hand.

    It keeps them alive for as long as it is alive itself.
    """

    device: int
    address: int
    nbytes: int
    tensors: list[torch.Tensor] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)

    @property
    def place(self) -> DeviceAddress:
        return self.device, self.address

    @property
    def largest(self) -> torch.Tensor | None:
        """The tensor with the most bytes: the one that was made first, where views of it are alive."""
        return max(self.tensors, key=nbytes, default=None)


@dataclass(eq=False)
class Living:
    """All that was found: storages on GPUs by place, and what C++ holds for whom (`graph.Link`)."""

    storages: dict[DeviceAddress, DeviceStorage]
    links: list[graph.Link]


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
    return graph.of_classes(objects, lambda found: kind in graph.ancestry(found))


def all_objects() -> list[Any]:
    """What Python's garbage collector tracks, and the storages that are kept from its sight (see `virtualgpu.tensor.hang`)."""
    return _with_untracked(gc.get_objects())


def relevant_objects() -> list[Any]:
    """Of all objects those by which `alive` and `categories.held` tell what lies on the GPUs and what for."""
    return _with_untracked(graph.of_classes(gc.get_objects(), _is_relevant))


def _is_relevant(kind: type) -> bool:
    return not _RELEVANT.isdisjoint(graph.ancestry(kind)) or graph.is_node(kind)


def _with_untracked(objects: list[Any]) -> list[Any]:
    untracked = [memory.storage() for memory in of_kind(objects, Memory) if memory.storage is not None]
    return objects + [storage for storage in untracked if storage is not None]


def alive(objects: list[Any] | None = None) -> Living:
    """The storages on GPUs that are alive, with their tensors: those Python knows, gradients, and what autograd graphs keep.

    `objects` is what `all_objects` or `relevant_objects` tells, if that was asked already.
    """
    objects = relevant_objects() if objects is None else objects
    living = Living({}, [])
    with torch._C.DisableTorchFunction():  # a subclass, or a mode that is on, must not hear of this
        tensors, living.links = graph.walk(of_kind(objects, torch.Tensor), graph.nodes(objects))
        for tensor in tensors:
            for storage in _storages_of(tensor):
                _add(living.storages, storage, tensor)
        for storage in of_kind(objects, torch.UntypedStorage):
            _add(living.storages, storage, None)
    return living


def _storages_of(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """What a tensor lies on; nothing for one that has no memory of its own."""
    try:
        return [torch._C.TensorBase.untyped_storage(part) for part in _dense(tensor)]
    except (RuntimeError, NotImplementedError):  # a subclass without a storage: its inner tensors are found for themselves
        return []


def _dense(tensor: torch.Tensor) -> list[Any]:
    """The tensor, or the dense ones that make a sparse one; as plain tensors, for a subclass may answer anything."""
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
        place = storage.device.index, storage.data_ptr()
    except RuntimeError:  # a fake tensor: it has a device, and no memory
        return
    if place[1] == 0:
        return
    entry = found.get(place)
    if entry is None:
        entry = found[place] = DeviceStorage(*place, storage.nbytes())
    kept: list[Any] = entry.storages if tensor is None else entry.tensors
    thing = storage if tensor is None else tensor
    if not any(known is thing for known in kept):
        kept.append(thing)


def _in_use(storage: torch.UntypedStorage) -> bool:
    """Is its GPU there? What is left of a virtual machine that was taken away lies on no GPU."""
    memory = _memory(storage)
    return memory is None or memory.gpu.machine.alive


class Census:
    """Which storages were alive on the GPUs at one moment. It keeps none of them alive.

    An address may be used again: with a census, the tensor that lies there later is not taken for the one that was there then.
    """

    def __init__(self, living: Living) -> None:
        self._weak = {place: _weak(_any_storage(entry)) for place, entry in living.storages.items()}

    @classmethod
    def take(cls) -> "Census":
        return cls(alive())

    def __contains__(self, entry: DeviceStorage) -> bool:
        """Was this very storage alive then?"""
        weak = self._weak.get(entry.place)
        storage = _any_storage(entry)
        if isinstance(weak, StorageWeakRef):
            return weak.cdata == storage._cdata  # C++ gives its address to no other while a weak reference is there
        return weak is not None and weak() is _memory(storage)

    def alive_at(self, place: DeviceAddress) -> bool | None:
        """Is what lay there alive still? None if no tensor was there."""
        weak = self._weak.get(place)
        if isinstance(weak, StorageWeakRef):
            return not weak.expired()
        return None if weak is None else weak() is not None


def _weak(storage: torch.UntypedStorage) -> "StorageWeakRef | weakref.ref":
    """A reference that does not keep a storage alive. To what hangs on a virtual GPU's: in PyTorch 2.6 it would outlive the storage."""
    memory = _memory(storage)
    return StorageWeakRef(storage) if memory is None else weakref.ref(memory)


def _memory(storage: torch.UntypedStorage) -> Any:
    """What hangs on a storage on a virtual GPU; None on a real one."""
    return vars(storage).get("memory")


def _any_storage(entry: DeviceStorage) -> torch.UntypedStorage:
    if entry.storages:
        return entry.storages[0]
    with torch._C.DisableTorchFunction():
        return next(storage for storage in _storages_of(entry.tensors[0]) if storage.data_ptr() == entry.address)
