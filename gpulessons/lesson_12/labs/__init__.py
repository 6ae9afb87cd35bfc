"""The labs of lesson 12: experiments, their figures and their widgets."""

from gpulessons.lesson_12.labs.layouts import LayoutsLab, layout_steps, plot_layout_steps
from gpulessons.lesson_12.labs.scaling import plot_scaling_steps, scaling_steps

__all__ = [
    "LayoutsLab",
    "layout_steps",
    "plot_layout_steps",
    "plot_scaling_steps",
    "scaling_steps",
]
