"""The labs of lesson 4: experiments, their figures and their widgets."""

from gpulessons.lesson_04.labs.micro_batches import pipeline_splits, plot_pipeline_splits
from gpulessons.lesson_04.labs.pipeline import PipelineLab, pipeline_step, plot_pipeline_step

__all__ = [
    "PipelineLab",
    "pipeline_splits",
    "pipeline_step",
    "plot_pipeline_splits",
    "plot_pipeline_step",
]
