"""The lab of lesson 5: the allocator by hand."""

from gpulessons.lesson_05.labs.allocator_by_hand import (
    AllocatorByHand,
    AllocatorLab,
    plot_allocator_by_hand,
)

__all__ = ["AllocatorByHand", "AllocatorLab", "plot_allocator_by_hand"]
