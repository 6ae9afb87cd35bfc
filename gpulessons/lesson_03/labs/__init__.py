"""The lab of lesson 3: its experiment, its figure and its widget."""

from gpulessons.lesson_03.labs.data_parallel import (
    DataParallelLab,
    data_parallel_step,
    plot_data_parallel_step,
)

__all__ = ["DataParallelLab", "data_parallel_step", "plot_data_parallel_step"]
