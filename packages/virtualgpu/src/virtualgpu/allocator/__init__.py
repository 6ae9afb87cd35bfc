"""PyTorch's CUDA caching allocator in plain Python, without torch.

`CachingAllocator` is the allocator of one device.
"""

from virtualgpu.allocator.caching import CachingAllocator
from virtualgpu.allocator.events import EventSource
from virtualgpu.allocator.oom import OutOfMemory, size_text
from virtualgpu.allocator.pool import Block
from virtualgpu.allocator.settings import (
    LARGE_SEGMENT,
    MIN_BLOCK,
    MIN_LARGE_ALLOC,
    SMALL_SEGMENT,
    SMALL_SIZE,
    UNLIMITED,
    VARIABLES,
    MiB,
    Settings,
)

__all__ = [
    "LARGE_SEGMENT",
    "MIN_BLOCK",
    "MIN_LARGE_ALLOC",
    "SMALL_SEGMENT",
    "SMALL_SIZE",
    "UNLIMITED",
    "VARIABLES",
    "Block",
    "CachingAllocator",
    "EventSource",
    "MiB",
    "OutOfMemory",
    "Settings",
    "size_text",
]
