"""Functions that child processes of the claims run.

A new process finds such a function by its module's name.
"""

import torch


def add_one(tensor: torch.Tensor) -> None:
    """Add 1 to a tensor that another process owns, and wait until it is done."""
    tensor.add_(1)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def note_allocated(tensor: torch.Tensor, allocated: torch.Tensor) -> None:
    """Use another process's tensor, and write this process's allocated bytes to `allocated`."""
    tensor.add_(1)
    torch.cuda.synchronize(tensor.device)
    allocated.fill_(torch.cuda.memory_allocated(tensor.device))
