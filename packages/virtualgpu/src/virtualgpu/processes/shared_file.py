"""Memory that several processes of this computer map. It exists while one of them has it open."""

import contextlib
import errno
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator

WORD = 8  # bytes per number

try:
    import fcntl
except ImportError:  # without POSIX, processes cannot map each other's memory
    fcntl = None  # type: ignore[assignment]


class SharedFile:
    """An array `words` of 64-bit integers that several processes can read and write.

    All are 0 at first. With an `address`, the file of another process is opened. On Linux the
    file has no name. Other processes open it through /proc and a process that has it open, and
    the kernel removes it when the last process ends or is killed. On other systems it is a
    temporary file that its creator removes. If the creator is killed, the file remains.

    Raises OSError for an address that cannot be opened, because its process has ended or belongs
    to another user.
    """

    def __init__(self, nbytes: int = 0, address: str | None = None) -> None:
        self._lock, self._depth = threading.RLock(), 0
        self._path = None
        if address is not None:
            self._path = address.rpartition(":")[0]
        self._process = os.getpid()
        self._named = False
        if address is not None:
            self._file = open_address(address)
        elif has_proc():
            self._file = _nameless()
        else:
            self._file, self._path = tempfile.mkstemp(prefix="labkit-shared-")
            self._named = True
        if address is None:
            os.ftruncate(self._file, nbytes)
        self._map = mmap.mmap(self._file, 0)
        self.words = memoryview(self._map).cast("q")

    @property
    def address(self) -> str:
        """The address with which another process opens the file."""
        return address_of(self._file, self._path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold a lock in the block that excludes all other processes and threads from such blocks.

        The lock is released if the process is killed in the block.
        """
        with self._lock:
            self._depth += 1  # the system's lock is not reentrant
            try:
                if fcntl is not None and self._depth == 1:
                    fcntl.lockf(self._file, fcntl.LOCK_EX)
                yield
            finally:
                self._depth -= 1
                if fcntl is not None and not self._depth:
                    fcntl.lockf(self._file, fcntl.LOCK_UN)

    def after_fork(self) -> None:
        """Create a new lock in a forked child, because another thread may have held the old one."""
        self._lock, self._depth = threading.RLock(), 0

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._file < 0:
            return
        self.words.release()
        self._map.close()
        os.close(self._file)
        self._file = -1
        if self._named and self._path is not None and self._process == os.getpid():
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def __del__(self) -> None:
        if getattr(self, "_map", None) is not None:
            self.close()


def _nameless() -> int:
    """Open a new file without a name and return its descriptor.

    The file is in memory, or in the folder for temporary files if that is forbidden, as it is where
    exercises are graded.
    """
    try:
        return os.memfd_create("labkit", os.MFD_CLOEXEC)
    except PermissionError:
        file, path = tempfile.mkstemp(prefix="labkit-shared-")
        os.unlink(path)
        return file


def address_of(file: int, path: str | None = None) -> str:
    """Return an address with which another process can open the file descriptor `file`.

    The address has a path and the inode's number. `path` is used on systems without /proc.
    """
    where = path
    if has_proc():
        where = f"/proc/{os.getpid()}/fd/{file}"
    return f"{where}:{os.fstat(file).st_ino}"


def open_address(address: str) -> int:
    """Open the file at an address of `address_of`, and return its descriptor.

    Raises OSError if the file is gone, or if another file has its path now.
    """
    path, _, inode = address.rpartition(":")
    file = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    if str(os.fstat(file).st_ino) != inode:
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "the path belongs to another file now", path)
    return file


def has_proc() -> bool:
    """Return whether a file without a name can be opened through /proc."""
    return hasattr(os, "memfd_create") and os.path.exists("/proc/self/fd")
