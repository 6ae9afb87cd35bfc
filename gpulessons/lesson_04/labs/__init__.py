"""The labs of lesson 4: the figure of what GPUs do when, the schedules, and the pipeline lab."""

from gpulessons.lesson_04.labs.pipeline import PipelineLab, pipeline_step, plot_pipeline_step
from gpulessons.lesson_04.labs.schedules import in_turn, orders
from gpulessons.lesson_04.labs.work import plot_work

__all__ = [
    "PipelineLab",
    "in_turn",
    "orders",
    "pipeline_step",
    "plot_pipeline_step",
    "plot_work",
]
