"""Figures of a trace, and the style of all figures. Only this folder imports matplotlib."""

from gputrace.figures.devices import trace_devices as trace_devices
from gputrace.figures.figure import Figure as Figure
from gputrace.figures.memory import trace_memory as trace_memory
from gputrace.figures.segments import segment_map as segment_map
from gputrace.figures.timeline import trace_timeline as trace_timeline
