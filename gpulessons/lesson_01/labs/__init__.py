"""The labs of lesson 1: experiments, their figures and their widgets."""

from gpulessons.lesson_01.labs.pinned_memory import CopySpeedLab, copy_speed, plot_copy_speed

__all__ = ["CopySpeedLab", "copy_speed", "plot_copy_speed"]
