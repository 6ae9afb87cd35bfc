"""The labs of lesson 7: experiments, their figures and their widgets."""

from gpulessons.lesson_07.labs.formats import FormatLab, number_formats, plot_number_formats
from gpulessons.lesson_07.labs.mixed_precision import four_ways, last_loss, plot_four_ways, step_seconds
from gpulessons.lesson_07.labs.roofline import format_speed, plot_format_speed

__all__ = [
    "FormatLab",
    "format_speed",
    "four_ways",
    "last_loss",
    "number_formats",
    "plot_format_speed",
    "plot_four_ways",
    "plot_number_formats",
    "step_seconds",
]
