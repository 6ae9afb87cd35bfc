"""The names that recorders of virtual GPUs need.

`machine()` returns the machine in use, whose clock and allocators accept listeners. `Span` and
`Memory` are what these report. Two functions tell which errors come from refusals, or from a
request for values that were not kept.
"""

from virtualgpu.clock.machine_clock import Span as Span
from virtualgpu.errors import asks_for_values as asks_for_values
from virtualgpu.errors import refusal_behind as refusal_behind
from virtualgpu.hardware import machine as machine
from virtualgpu.memory import Memory as Memory
from virtualgpu.stream_numbers import stream_name as stream_name
