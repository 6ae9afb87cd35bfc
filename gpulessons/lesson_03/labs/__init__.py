"""The labs of lesson 3: experiments, their figures and their widgets."""

from gpulessons.lesson_03.labs.data_parallel import (
    DataParallelLab,
    data_parallel_step,
    data_parallel_work,
    plot_data_parallel_step,
    plot_data_parallel_work,
)
from gpulessons.lesson_03.labs.placements import plot_placement

__all__ = [
    "DataParallelLab",
    "data_parallel_step",
    "data_parallel_work",
    "plot_data_parallel_step",
    "plot_data_parallel_work",
    "plot_placement",
]
