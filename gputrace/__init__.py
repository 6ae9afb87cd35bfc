"""One recording of what a block of code did to the GPUs, whoever made it: CUDA or a virtual GPU."""

from gputrace.recording import record
from gputrace.trace import Trace

__all__ = ["Trace", "record"]
