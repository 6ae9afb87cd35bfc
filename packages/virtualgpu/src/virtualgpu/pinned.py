"""Page-locked memory of the host.

CUDA recognises page-locked memory by its address. So views and arrays of NumPy that share the
memory are page-locked, too. Copies from and to such memory take the time of pinned copies.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.clock import costs

registered: dict[int, int] = {}  # bytes that `cudaHostRegister` has locked, by address


_starts: list[int] = []  # the addresses of all page-locked blocks, sorted
_locked: dict[int, range] = {}  # the addresses of each block, by its first one


class LockedBlock:
    """The page-locked memory of a storage, which keeps this object.

    Python may delete the object of a storage after the memory has been given to another storage.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self.addresses = range(start, start + nbytes)
        if start not in _locked:
            insort(_starts, start)
        _locked[start] = self.addresses

    def __del__(
        self, starts: list[int] = _starts, locked: dict[int, range] = _locked
    ) -> None:  # the defaults are still there when Python ends
        start = self.addresses.start
        if locked.get(start) is self.addresses:
            del locked[start]
            del starts[bisect_left(starts, start)]


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    yield torch.Tensor, {"is_pinned": lambda self, device=None: is_pinned(self)}


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return a copy of the tensor in page-locked memory. It replaces `Tensor.pin_memory`."""
    if is_pinned(self):
        return self
    if self.layout in _PARTS:
        return _pin_sparse(self)
    machine = hardware.machine()
    if not machine.selected.untimed:
        machine.take_turn()
        machine.clock.advance_host(costs.pin_seconds(machine.profile, self.numel() * self.itemsize))
    with _DisableTorchDispatch():  # the time of the copy is already counted
        return pinned(self.clone())


_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _pin_sparse(x: torch.Tensor) -> torch.Tensor:
    """Return a copy of a sparse tensor whose parts are in page-locked memory."""
    parts = [pin_memory(getattr(x, name)()) for name in _PARTS[x.layout]]
    options: dict[str, Any] = {"layout": x.layout}
    make: Any = torch.sparse_compressed_tensor
    if x.layout is torch.sparse_coo:
        options = {"is_coalesced": x.is_coalesced()}
        make = torch.sparse_coo_tensor
    return make(*parts, x.size(), check_invariants=False, **options)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Note that the memory of a CPU tensor is page-locked, and return the tensor."""
    storage: Any = tensor.untyped_storage()
    if storage.nbytes():
        storage.pinned = LockedBlock(storage.data_ptr(), storage.nbytes())
    else:
        storage.pinned = None
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a CPU tensor is in page-locked memory."""
    if tensor.layout in _PARTS:
        return is_pinned(getattr(tensor, _PARTS[tensor.layout][-1])())
    if tensor.layout is not torch.strided:
        return False
    if not _starts and not registered:
        return False
    storage: Any = tensor.untyped_storage()
    if storage.device.type != "cpu" or not storage.nbytes():
        return False
    if getattr(storage, "pinned", None) is not None:
        return not storage.is_shared()  # `share_memory_` moves the memory
    # Reading the address of a lazy clone would copy the memory.
    if torch._C._is_cow_tensor(tensor):  # type: ignore[attr-defined]
        return False
    address = storage.data_ptr()
    position = bisect_right(_starts, address) - 1
    if position >= 0 and address in _locked[_starts[position]]:
        return True
    return bool(registered) and _is_registered(address)


def _is_registered(address: int) -> bool:
    """Return whether the address is in memory that `cudaHostRegister` has locked."""
    return any(start <= address < start + nbytes for start, nbytes in registered.items())
