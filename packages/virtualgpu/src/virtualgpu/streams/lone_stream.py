"""Recognition of programs that stay on one stream.

Such a program cannot race, so its operators are not compared. Comparing takes longer than running
the operators. PyTorch's own tests are such programs, because each runs on a stream of its own.
"""

from typing import Any

from virtualgpu.clock.machine_clock import StreamTime
from virtualgpu.hardware import Machine
from virtualgpu.ops.call import Call
from virtualgpu.streams.accesses import has_region
from virtualgpu.tensor import VirtualTensor, mark_written, memory_of

ALONE = 10_000  # operators in a row on one stream, after which a program is expected to stay there


class LoneStream:
    """The only stream on which a program works. `stream` is None if there is no such stream."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stream: StreamTime | None = None
        self._latest: StreamTime | None = None  # the stream that got work last
        self._in_a_row = 0

    def has_work(self, stream: StreamTime) -> bool:
        """Note that a stream gets work, and return whether the program works on only one stream.

        All other streams must have finished, and the program must have used this one for long.
        """
        if stream is not self._latest:
            self._latest = stream
            self._in_a_row = 0
            self.stream = None
        elif self.stream is None:
            self._in_a_row += 1
            if self._in_a_row % ALONE == 0 and self._others_are_done(stream):
                self.stream = stream
        return self.stream is not None

    def _others_are_done(self, stream: StreamTime) -> bool:
        """Return whether all streams of all GPUs, except `stream`, have finished."""
        now = self.machine.clock.host
        for gpu in self.machine.gpus:
            for other in gpu.streams.values():
                if other is not stream and other.ready > now:
                    return False
        return True

    def run(self, call: Call) -> Any:
        """Run an operator without comparing it, and note only which memory it has written.

        All earlier work is done.
        """
        handler = call.op.handler
        assert handler is not None
        self.machine.selected.in_operator = True
        try:
            result = handler(call)
        finally:
            self.machine.selected.in_operator = False
        for x in call.written() if call.op.written else ():
            if type(x) is VirtualTensor and has_region(x):
                mark_written(x)
                memory_of(x).access_log = None
        return result
