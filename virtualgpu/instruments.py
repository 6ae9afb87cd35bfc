"""What a recorder of virtual GPUs listens to: the machine in place, with its clock and its GPUs' allocators, and what they tell of."""

from virtualgpu.clock.machine_clock import Span as Span
from virtualgpu.hardware import Memory as Memory
from virtualgpu.hardware import machine as machine
