"""The labs of lesson 5: experiments, their figures and their widgets."""

from gpulessons.lesson_05.labs.allocator_by_hand import AllocatorByHand, AllocatorLab, plot_allocator_by_hand
from gpulessons.lesson_05.labs.fragmented_memory import fragmentation, plot_fragmentation

__all__ = [
    "AllocatorByHand",
    "AllocatorLab",
    "fragmentation",
    "plot_allocator_by_hand",
    "plot_fragmentation",
]
