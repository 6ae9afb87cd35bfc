"""A program that stays on one stream: as long as no other has work, races need not be looked for, which takes longer than the operators.

PyTorch's own tests are such programs: each runs on a stream of its own.
"""

from typing import Any

from virtualgpu.clock.machine_clock import StreamTime
from virtualgpu.hardware import Machine
from virtualgpu.ops.call import Call
from virtualgpu.streams.accesses import has_region
from virtualgpu.tensor import VirtualTensor, mark_written, memory_of

ALONE = 10_000  # operators in a row on one stream, after which a program is taken to stay there


class LoneStream:
    """`stream` is the one on which the program of a machine stays, None as long as it is not known to."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.stream: StreamTime | None = None
        self._latest: StreamTime | None = None  # which had work last
        self._in_a_row = 0

    def has_work(self, stream: StreamTime) -> bool:
        """A stream gets work. Returns whether the program stays on it, and all others have done theirs."""
        if stream is not self._latest:
            self._latest, self._in_a_row, self.stream = stream, 0, None
        elif self.stream is None:
            self._in_a_row += 1
            if self._in_a_row % ALONE == 0 and self._others_are_done(stream):
                self.stream = stream
        return self.stream is not None

    def _others_are_done(self, stream: StreamTime) -> bool:
        now = self.machine.clock.host
        return all(other.ready <= now for gpu in self.machine.gpus for other in gpu.streams.values() if other is not stream)

    def run(self, call: Call) -> Any:
        """Run an operator and note what it has written alone; what was done there before is done before it."""
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
                memory_of(x).touched = None
        return result
