"""PyTorch's CUDA caching allocator in plain Python, without torch."""

from virtualgpu.allocator.caching import CachingAllocator
from virtualgpu.allocator.events import EventSource
from virtualgpu.allocator.oom import OutOfMemory
from virtualgpu.allocator.pool import Block
from virtualgpu.allocator.settings import Settings

__all__ = ["Block", "CachingAllocator", "EventSource", "OutOfMemory", "Settings"]
