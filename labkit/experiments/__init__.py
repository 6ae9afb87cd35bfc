"""The experiments: plain functions, parameters in, a `Run` out whose points can be stepped one by one or collected into a `Result`."""

from labkit.experiments.copies import copy_speed
from labkit.experiments.memory import MemoryRecorder, MemorySample
from labkit.experiments.result import Result, Run, collect
from labkit.experiments.sizes import host_and_device

__all__ = ["MemoryRecorder", "MemorySample", "Result", "Run", "collect", "copy_speed", "host_and_device"]
