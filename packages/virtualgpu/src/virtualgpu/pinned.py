"""Page-locked memory of the host. Here it is a mark on a storage, so that views have it too; copies take the time of pinned ones."""

from collections.abc import Iterator
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.clock import costs

registered: dict[int, int] = {}  # by address, the bytes that `cudaHostRegister` has locked


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    yield torch.Tensor, {"is_pinned": lambda self, device=None: is_pinned(self)}


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """`Tensor.pin_memory`: a copy in page-locked memory."""
    if is_pinned(self):
        return self
    machine = hardware.machine()
    if not machine.selected.untimed:
        machine.take_turn()
        machine.clock.advance_host(costs.pin_seconds(machine.profile, self.numel() * self.itemsize))
    with _DisableTorchDispatch():  # its time has been taken
        return pinned(self.clone())


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a CPU tensor as page-locked."""
    tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return False
    return getattr(tensor.untyped_storage(), "pinned", False) or (bool(registered) and _is_registered(tensor.data_ptr()))


def _is_registered(address: int) -> bool:
    return any(start <= address < start + nbytes for start, nbytes in registered.items())
