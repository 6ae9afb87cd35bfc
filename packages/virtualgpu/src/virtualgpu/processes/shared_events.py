"""Events that several processes have (`torch.cuda.Event(interprocess=True)`): the last record of one, in memory that all of them map.

A process's clock is its own: no moment of one is before or after a moment of another. What a record says is how long its work lasted
when it was made; to another process it was made when that one first looks. There is one order between them: an event that one process
has found to have happened has happened for all.
"""

import os
from time import sleep

from virtualgpu.processes.shared_file import WORD, SharedFile

_RECORDS, _HAPPENED, _NANOSECONDS = range(3)  # words: how many records there were; the last that has happened; the work left at the last
HANDLE_BYTES = 64  # as CUDA's are
wait = sleep  # really, even where Python's `time` tells the model's


class SharedRecord:
    """The last record of an event: a new event's, or with a `handle` another process's.

    Raises OSError for a handle whose process has ended, and ValueError for one of this process.
    """

    def __init__(self, handle: bytes | None = None) -> None:
        address = None
        if handle is not None:
            process, _, address = handle.rstrip(b"\0").decode().partition(":")
            if process == str(os.getpid()):
                raise ValueError("an event's handle is opened in another process")
        self._file = SharedFile(3 * WORD, address)
        self._seen = 0  # the number of the record that this process knows

    @property
    def handle(self) -> bytes:
        return f"{os.getpid()}:{self._file.address}".encode().ljust(HANDLE_BYTES, b"\0")

    def record(self, seconds: float) -> None:
        """This process has recorded the event, behind work that lasts for so long from now on."""
        with self._file.locked():
            words = self._file.words
            words[_NANOSECONDS] = round(seconds * 1e9)
            words[_RECORDS] = self._seen = words[_RECORDS] + 1

    def of_another(self) -> float | None:
        """Seconds of work before the last record, if that is another process's and this one has not seen it yet."""
        words = self._file.words
        if words[_RECORDS] == self._seen:
            return None
        with self._file.locked():
            self._seen = words[_RECORDS]
            return words[_NANOSECONDS] / 1e9

    @property
    def happened(self) -> bool:
        """Whether some process has found that the record which this one knows has happened."""
        return bool(self._seen) and self._file.words[_HAPPENED] >= self._seen

    def note_happened(self) -> None:
        with self._file.locked():
            self._file.words[_HAPPENED] = max(self._file.words[_HAPPENED], self._seen)
