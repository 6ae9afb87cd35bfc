"""The labs of lesson 11: experiments, their figures and their widgets."""

from gpulessons.lesson_11.labs.communication import collectives, plot_collectives
from gpulessons.lesson_11.labs.sharding import held_by_ranks, plot_held_by_ranks, rank_memory
from gpulessons.lesson_11.labs.strategies import StrategiesLab, strategy_steps

__all__ = [
    "StrategiesLab",
    "collectives",
    "held_by_ranks",
    "plot_collectives",
    "plot_held_by_ranks",
    "rank_memory",
    "strategy_steps",
]
