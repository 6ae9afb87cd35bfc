"""The labs of lesson 10: experiments, their figures and their widgets."""

from gpulessons.lesson_10.labs.buckets import BucketsLab
from gpulessons.lesson_10.labs.ddp_memory import plot_ddp_memory
from gpulessons.lesson_10.labs.messages import ddp_messages

__all__ = [
    "BucketsLab",
    "ddp_messages",
    "plot_ddp_memory",
]
