"""Page-locked memory of the host.

A mark on a storage says that its memory is page-locked, so that views have the mark, too. Copies
from and to such memory take the time of pinned copies.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.clock import costs

registered: dict[int, int] = {}  # bytes that `cudaHostRegister` has locked, by address


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (owner, replaced names) for what this module replaces in PyTorch."""
    yield torch.Tensor, {"is_pinned": lambda self, device=None: is_pinned(self)}


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Return a copy of the tensor in page-locked memory. It replaces `Tensor.pin_memory`."""
    if is_pinned(self):
        return self
    machine = hardware.machine()
    if not machine.selected.untimed:
        machine.take_turn()
        machine.clock.advance_host(costs.pin_seconds(machine.profile, self.numel() * self.itemsize))
    with _DisableTorchDispatch():  # the time of the copy is already counted
        return pinned(self.clone())


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a CPU tensor as page-locked, and return it."""
    tensor.untyped_storage().pinned = True  # type: ignore[attr-defined]
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Return whether a CPU tensor is in page-locked memory."""
    if tensor.layout is not torch.strided:
        return False
    if getattr(tensor.untyped_storage(), "pinned", False):
        return True
    return bool(registered) and _is_registered(tensor.data_ptr())


def _is_registered(address: int) -> bool:
    """Return whether `cudaHostRegister` has locked the memory at this address."""
    return any(start <= address < start + nbytes for start, nbytes in registered.items())
