"""The labs of lesson 2: experiments, their figures and their widgets."""

from gpulessons.lesson_02.labs.overlap import plot_two_streams, two_streams
from gpulessons.lesson_02.labs.stream_program import StreamsLab

__all__ = [
    "StreamsLab",
    "plot_two_streams",
    "two_streams",
]
