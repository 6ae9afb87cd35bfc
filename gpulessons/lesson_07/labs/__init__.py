"""The lab of lesson 7: its experiment, its figure and its widget."""

from gpulessons.lesson_07.labs.formats import FormatLab, number_formats, plot_number_formats

__all__ = ["FormatLab", "number_formats", "plot_number_formats"]
