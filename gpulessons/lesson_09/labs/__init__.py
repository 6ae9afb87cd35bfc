"""The labs of lesson 9: experiments, their figures and their widgets."""

from gpulessons.lesson_09.labs.fitting import BudgetLab, memory_plan, plot_memory_plan
from gpulessons.lesson_09.labs.saving_memory import memory_for_time, plot_memory_for_time, prices

__all__ = [
    "BudgetLab",
    "memory_for_time",
    "memory_plan",
    "plot_memory_for_time",
    "plot_memory_plan",
    "prices",
]
