"""The experiments: plain functions, parameters in, a `Run` out whose points can be stepped one by one or collected into a `Result`."""

from labkit.experiments.allocator_by_hand import AllocatorByHand
from labkit.experiments.budget import Setting
from labkit.experiments.claims import articles_on_trial, try_claim
from labkit.experiments.collectives import collectives
from labkit.experiments.copies import copy_speed
from labkit.experiments.data_parallel import data_parallel_step, data_parallel_work, traced_step
from labkit.experiments.ddp import ddp_beside_data_parallel
from labkit.experiments.format_speed import format_speed
from labkit.experiments.formats import number_formats
from labkit.experiments.four_ways import four_ways
from labkit.experiments.fragmentation import fragmentation
from labkit.experiments.leaks import leaky_training
from labkit.experiments.memory import MemoryRecorder, MemorySample
from labkit.experiments.memory_for_time import memory_for_time
from labkit.experiments.messages import ddp_messages
from labkit.experiments.networks import GPT, MLP, ResNet
from labkit.experiments.overlap import copy_overlap
from labkit.experiments.pipeline import pipeline_step
from labkit.experiments.placement import placement
from labkit.experiments.result import Result, Run, collect
from labkit.experiments.shards import held_by_ranks
from labkit.experiments.shared_model import shared_model
from labkit.experiments.sizes import host_and_device
from labkit.experiments.splits import pipeline_splits
from labkit.experiments.stages import pipelining
from labkit.experiments.stream_program import run_program
from labkit.experiments.training_memory import memory_plan, training_memory
from labkit.experiments.two_streams import two_streams

__all__ = [
    "GPT",
    "MLP",
    "AllocatorByHand",
    "MemoryRecorder",
    "MemorySample",
    "ResNet",
    "Result",
    "Run",
    "Setting",
    "articles_on_trial",
    "collect",
    "collectives",
    "copy_overlap",
    "copy_speed",
    "data_parallel_step",
    "data_parallel_work",
    "ddp_beside_data_parallel",
    "ddp_messages",
    "format_speed",
    "four_ways",
    "fragmentation",
    "held_by_ranks",
    "host_and_device",
    "leaky_training",
    "memory_for_time",
    "memory_plan",
    "number_formats",
    "pipeline_splits",
    "pipeline_step",
    "pipelining",
    "placement",
    "run_program",
    "shared_model",
    "traced_step",
    "training_memory",
    "try_claim",
    "two_streams",
]
