"""The labs of lesson 1: experiments, their figures and their widgets."""

from gpulessons.lesson_01.labs.pinned_memory import CopySpeedLab, copy_speed, plot_copy_speed
from gpulessons.lesson_01.labs.sizes import host_and_device, plot_host_and_device

__all__ = [
    "CopySpeedLab",
    "copy_speed",
    "host_and_device",
    "plot_copy_speed",
    "plot_host_and_device",
]
