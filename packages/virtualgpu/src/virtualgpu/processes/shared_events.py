"""Events that several processes share (`torch.cuda.Event(interprocess=True)`).

The last record of an event is in memory that all processes map. Each process has its own clock, and
their times cannot be compared. A record therefore says how long the work before it lasted when the
event was recorded. For another process, this time starts when that process first looks. There is
one order between processes. An event that one process has seen happen has happened for all.
"""

import os
from time import sleep

from virtualgpu.processes.shared_file import WORD, SharedFile

# Words: the number of records, the last record that has happened, and the nanoseconds of work
# before the last record.
_RECORDS, _HAPPENED, _NANOSECONDS = range(3)
HANDLE_BYTES = 64  # the size of CUDA's handles
wait = sleep  # in real time, even if Python's `time` shows the model's time


class SharedRecord:
    """The last record of an event. Without a `handle` the event is new.

    Raises OSError if the handle's process has ended, and ValueError if it is this process.
    """

    def __init__(self, handle: bytes | None = None) -> None:
        address = None
        if handle is not None:
            process, _, address = handle.rstrip(b"\0").decode().partition(":")
            if process == str(os.getpid()):
                raise ValueError("expected an event of another process, got one of this process")
        self._file = SharedFile(3 * WORD, address)
        self._seen = 0  # the number of the last record that this process knows

    @property
    def handle(self) -> bytes:
        """The bytes with which another process opens the event."""
        return f"{os.getpid()}:{self._file.address}".encode().ljust(HANDLE_BYTES, b"\0")

    def record(self, seconds: float) -> None:
        """Store a record of the event, which happens after `seconds` of work from now on."""
        with self._file.locked():
            words = self._file.words
            words[_NANOSECONDS] = round(seconds * 1e9)
            words[_RECORDS] = self._seen = words[_RECORDS] + 1

    def of_another(self) -> float | None:
        """Return the seconds of work before a record that another process has made.

        Returns None if this process has seen the last record before.
        """
        words = self._file.words
        if words[_RECORDS] == self._seen:
            return None
        with self._file.locked():
            self._seen = words[_RECORDS]
            return words[_NANOSECONDS] / 1e9

    @property
    def happened(self) -> bool:
        """Whether some process has noticed that the last known record has happened."""
        return bool(self._seen) and self._file.words[_HAPPENED] >= self._seen

    def note_happened(self) -> None:
        """Note for all processes that the last known record has happened."""
        with self._file.locked():
            self._file.words[_HAPPENED] = max(self._file.words[_HAPPENED], self._seen)
