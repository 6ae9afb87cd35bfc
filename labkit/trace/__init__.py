"""One recording of what a block of code did to the GPUs, whoever made it: CUDA or a virtual GPU."""

from labkit.trace.recording import record
from labkit.trace.trace import Trace

__all__ = ["Trace", "record"]
