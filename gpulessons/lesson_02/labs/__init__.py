"""The lab of lesson 2: programs on three streams."""

from gpulessons.lesson_02.labs.stream_program import StreamsLab

__all__ = ["StreamsLab"]
