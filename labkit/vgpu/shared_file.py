"""Memory that several processes of this computer map. It lasts as long as one of them has it open."""

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator

WORD = 8  # bytes of one number

try:
    import fcntl
except ImportError:  # no POSIX system: there its processes cannot map each other's memory
    fcntl = None  # type: ignore[assignment]


class SharedFile:
    """Whole numbers of 64 bits in `words`, all 0 at first, that other processes see as they are written.

    With an `address` it is the file of another process. On Linux it has no name in any folder: others open it through a process that
    has it open, by /proc, and the kernel takes it back when the last one ends, killed or not. Elsewhere it is a temporary file, which
    the process that made it removes; if that one is killed, the file stays.

    Raises OSError for an address that cannot be opened: the process behind it has ended, or belongs to another user.
    """

    def __init__(self, nbytes: int = 0, address: str | None = None) -> None:
        self._lock = threading.RLock()
        self._path, self._process = address, os.getpid()
        self._named = False
        if address is not None:
            self._file = os.open(address, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
        elif has_proc():
            self._file = os.memfd_create("labkit", os.MFD_CLOEXEC)
        else:
            self._file, self._path = tempfile.mkstemp(prefix="labkit-shared-")
            self._named = True
        if address is None:
            os.ftruncate(self._file, nbytes)
        self._map = mmap.mmap(self._file, 0)
        self.words = memoryview(self._map).cast("q")

    @property
    def address(self) -> str:
        """What another process opens it by."""
        return f"/proc/{os.getpid()}/fd/{self._file}" if has_proc() else self._path or ""

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """In the block no other process, and no other thread of this one, is in such a block. One that is killed there leaves it."""
        with self._lock:
            if fcntl is not None:
                fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if fcntl is not None:
                    fcntl.lockf(self._file, fcntl.LOCK_UN)

    def after_fork(self) -> None:
        """Called in a child that was forked: another thread may have held the lock."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Open it no longer. A second call does nothing."""
        if self._file < 0:
            return
        self.words.release()
        self._map.close()
        os.close(self._file)
        self._file = -1
        if self._named and self._process == os.getpid():
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def __del__(self) -> None:
        if getattr(self, "_map", None) is not None:
            self.close()


def has_proc() -> bool:
    """Can a file without a name be opened through the process that has it?"""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")
