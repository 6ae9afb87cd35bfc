"""Figures: one finding each, said in the title and in the alternative text. The only package that imports matplotlib."""

from labkit.plots.allocator_by_hand import allocator_by_hand
from labkit.plots.articles import articles_on_trial
from labkit.plots.budget import memory_plan, training_memory
from labkit.plots.ddp import ddp_beside_data_parallel
from labkit.plots.devices import trace_devices
from labkit.plots.experiments import copy_speed, host_and_device, memory_over_time
from labkit.plots.figure import BLACK, BLUE, DOTS_PER_INCH, VERMILLION, Figure
from labkit.plots.format_speed import format_speed
from labkit.plots.formats import number_formats
from labkit.plots.four_ways import four_ways
from labkit.plots.fragmentation import fragmentation
from labkit.plots.leaks import leaky_training
from labkit.plots.memory import trace_memory
from labkit.plots.memory_for_time import memory_for_time
from labkit.plots.parallel import data_parallel_step, data_parallel_work
from labkit.plots.pipeline import pipeline_splits, pipeline_step
from labkit.plots.placement import placement
from labkit.plots.ranks import collectives, held_by_ranks
from labkit.plots.segments import segment_map
from labkit.plots.shared_model import shared_model
from labkit.plots.streams import copy_overlap, two_streams
from labkit.plots.timeline import trace_timeline

__all__ = [
    "BLACK",
    "BLUE",
    "DOTS_PER_INCH",
    "VERMILLION",
    "Figure",
    "allocator_by_hand",
    "articles_on_trial",
    "collectives",
    "copy_overlap",
    "copy_speed",
    "data_parallel_step",
    "data_parallel_work",
    "ddp_beside_data_parallel",
    "format_speed",
    "four_ways",
    "fragmentation",
    "held_by_ranks",
    "host_and_device",
    "leaky_training",
    "memory_for_time",
    "memory_over_time",
    "memory_plan",
    "number_formats",
    "pipeline_splits",
    "pipeline_step",
    "placement",
    "segment_map",
    "shared_model",
    "trace_devices",
    "trace_memory",
    "trace_timeline",
    "training_memory",
    "two_streams",
]
