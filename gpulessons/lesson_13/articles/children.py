"""What child processes of the claims do. A function sent to a new process must be found there by its module's name."""

import torch


def add_one(tensor: torch.Tensor) -> None:
    """Add 1 to a tensor that another process owns, and wait until it is done."""
    tensor.add_(1)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def note_allocated(tensor: torch.Tensor, allocated: torch.Tensor) -> None:
    """Write to `allocated` how many bytes this process's allocator has given out while it uses another process's tensor."""
    tensor.add_(1)
    torch.cuda.synchronize(tensor.device)
    allocated.fill_(torch.cuda.memory_allocated(tensor.device))
