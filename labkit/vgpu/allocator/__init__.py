"""PyTorch's CUDA caching allocator in plain Python, without torch."""

from labkit.vgpu.allocator.caching import CachingAllocator
from labkit.vgpu.allocator.events import EventSource
from labkit.vgpu.allocator.oom import OutOfMemory
from labkit.vgpu.allocator.pool import Block
from labkit.vgpu.allocator.settings import Settings

__all__ = ["Block", "CachingAllocator", "EventSource", "OutOfMemory", "Settings"]
