"""The labs, a file each: an experiment, which gives a `Run` or a `Result`, its figure `plot_…` and its widget.

A name is imported when it is first used: to ask for one loads no other lab.
"""

from typing import TYPE_CHECKING

from virtualgpu import front_end

if TYPE_CHECKING:
    from labkit.lab_parts.experiment import Result as Result
    from labkit.lab_parts.experiment import Run as Run
    from labkit.lab_parts.experiment import collect as collect
    from labkit.lab_parts.experiment import recorded_result as recorded_result
    from labkit.lab_parts.networks import GPT as GPT
    from labkit.lab_parts.networks import MLP as MLP
    from labkit.lab_parts.networks import ResNet as ResNet
    from labkit.lab_parts.programs import rank_program as rank_program
    from labkit.lab_parts.training import Setting as Setting
    from labkit.labs.allocator_by_hand import AllocatorByHand as AllocatorByHand
    from labkit.labs.allocator_by_hand import AllocatorLab as AllocatorLab
    from labkit.labs.allocator_by_hand import plot_allocator_by_hand as plot_allocator_by_hand
    from labkit.labs.buckets import BucketsLab as BucketsLab
    from labkit.labs.claims import ClaimsPanel as ClaimsPanel
    from labkit.labs.claims import articles_on_trial as articles_on_trial
    from labkit.labs.claims import claims_table as claims_table
    from labkit.labs.claims import plot_articles_on_trial as plot_articles_on_trial
    from labkit.labs.claims import try_claim as try_claim
    from labkit.labs.communication import collectives as collectives
    from labkit.labs.communication import ddp_messages as ddp_messages
    from labkit.labs.communication import plot_collectives as plot_collectives
    from labkit.labs.data_parallel import DataParallelLab as DataParallelLab
    from labkit.labs.data_parallel import data_parallel_step as data_parallel_step
    from labkit.labs.data_parallel import data_parallel_work as data_parallel_work
    from labkit.labs.data_parallel import plot_data_parallel_step as plot_data_parallel_step
    from labkit.labs.data_parallel import plot_data_parallel_work as plot_data_parallel_work
    from labkit.labs.ddp_memory import plot_ddp_memory as plot_ddp_memory
    from labkit.labs.fitting import BudgetLab as BudgetLab
    from labkit.labs.fitting import memory_plan as memory_plan
    from labkit.labs.fitting import plot_memory_plan as plot_memory_plan
    from labkit.labs.formats import FormatLab as FormatLab
    from labkit.labs.formats import number_formats as number_formats
    from labkit.labs.formats import plot_number_formats as plot_number_formats
    from labkit.labs.fragmented_memory import fragmentation as fragmentation
    from labkit.labs.fragmented_memory import plot_fragmentation as plot_fragmentation
    from labkit.labs.layouts import LayoutsLab as LayoutsLab
    from labkit.labs.layouts import layout_steps as layout_steps
    from labkit.labs.layouts import plot_layout_steps as plot_layout_steps
    from labkit.labs.memory_panel import MemoryPanel as MemoryPanel
    from labkit.labs.micro_batches import pipeline_splits as pipeline_splits
    from labkit.labs.micro_batches import plot_pipeline_splits as plot_pipeline_splits
    from labkit.labs.mixed_precision import four_ways as four_ways
    from labkit.labs.mixed_precision import last_loss as last_loss
    from labkit.labs.mixed_precision import plot_four_ways as plot_four_ways
    from labkit.labs.mixed_precision import step_seconds as step_seconds
    from labkit.labs.model_sharing import SharingLab as SharingLab
    from labkit.labs.model_sharing import plot_shared_model as plot_shared_model
    from labkit.labs.model_sharing import shared_model as shared_model
    from labkit.labs.overlap import plot_two_streams as plot_two_streams
    from labkit.labs.overlap import two_streams as two_streams
    from labkit.labs.pinned_memory import CopySpeedLab as CopySpeedLab
    from labkit.labs.pinned_memory import copy_speed as copy_speed
    from labkit.labs.pinned_memory import plot_copy_speed as plot_copy_speed
    from labkit.labs.pipeline import PipelineLab as PipelineLab
    from labkit.labs.pipeline import pipeline_step as pipeline_step
    from labkit.labs.pipeline import plot_pipeline_step as plot_pipeline_step
    from labkit.labs.placements import plot_placement as plot_placement
    from labkit.labs.roofline import format_speed as format_speed
    from labkit.labs.roofline import plot_format_speed as plot_format_speed
    from labkit.labs.saving_memory import memory_for_time as memory_for_time
    from labkit.labs.saving_memory import plot_memory_for_time as plot_memory_for_time
    from labkit.labs.saving_memory import prices as prices
    from labkit.labs.scaling import plot_scaling_steps as plot_scaling_steps
    from labkit.labs.scaling import scaling_steps as scaling_steps
    from labkit.labs.sharding import held_by_ranks as held_by_ranks
    from labkit.labs.sharding import plot_held_by_ranks as plot_held_by_ranks
    from labkit.labs.sharding import rank_memory as rank_memory
    from labkit.labs.sizes import host_and_device as host_and_device
    from labkit.labs.sizes import plot_host_and_device as plot_host_and_device
    from labkit.labs.strategies import StrategiesLab as StrategiesLab
    from labkit.labs.strategies import strategy_steps as strategy_steps
    from labkit.labs.stream_program import StreamsLab as StreamsLab
    from labkit.labs.training_leaks import LeakLab as LeakLab
    from labkit.labs.training_leaks import leaky_training as leaky_training
    from labkit.labs.training_leaks import plot_leaky_training as plot_leaky_training
else:
    __getattr__, __dir__, __all__ = front_end.lazily(__name__)
