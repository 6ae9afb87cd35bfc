"""For recorders of virtual GPUs: the machine in place, whose clock and allocators they listen to, and the types of what they hear; and
which errors come of refusals, or ask for values that were not kept."""

from virtualgpu.clock.machine_clock import Span as Span
from virtualgpu.errors import asks_for_values as asks_for_values
from virtualgpu.errors import refusal_behind as refusal_behind
from virtualgpu.hardware import machine as machine
from virtualgpu.memory import Memory as Memory
from virtualgpu.stream_numbers import stream_name as stream_name
