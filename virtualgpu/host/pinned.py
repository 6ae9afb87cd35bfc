"""Page-locked memory of the host: here it is a mark on a storage, so that views have it too."""

import torch


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a CPU tensor as lying in page-locked memory."""
    tensor.untyped_storage().pinned = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and getattr(tensor.untyped_storage(), "pinned", False)
