"""A stream for which the allocator holds nothing: what lies free elsewhere cannot serve its requests."""

import torch

_POOL = 32  # streams of one priority that a device has; torch.cuda.Stream() hands them out in turn


def unused_stream() -> torch.cuda.Stream:
    """A stream of the current GPU without segments of its own, after emptying the cache. Raises RuntimeError where all have some."""
    torch.cuda.empty_cache()
    device = torch.cuda.current_device()
    used = {segment["stream"] for segment in torch.cuda.memory_snapshot() if segment["device"] == device}
    for _ in range(_POOL):
        stream = torch.cuda.Stream()
        if stream.cuda_stream not in used:
            return stream
    raise RuntimeError(f"tensors are alive on all {_POOL} streams of this GPU: free those of one stream, and try again")
