"""The lab of lesson 4: its experiment, its figure and its widget."""

from gpulessons.lesson_04.labs.pipeline import PipelineLab, pipeline_step, plot_pipeline_step

__all__ = ["PipelineLab", "pipeline_step", "plot_pipeline_step"]
