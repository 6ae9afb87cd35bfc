"""Files of the learner: written whole or not at all, and by one process at a time."""

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 10.0  # seconds to wait for another process that holds the lock
POLL = 0.01  # seconds between two attempts
# What a network folder without locks answers. There we write without a lock: rarely an entry is lost, never the file.
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Keep other processes that use this function from changing the file. The lock is a file beside it.

    Raises OSError if the folder cannot be written, or if another process keeps the lock too long.
    """
    from filelock import FileLock  # ranks of checks import this module and need no lock

    lock = FileLock(file.with_suffix(".lock"), timeout=PATIENCE, poll_interval=POLL)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def write(file: Path, text: str) -> None:
    """Replace the file. After a crash it has either its old text or the new one.

    Raises OSError if the file cannot be written.
    """
    draft = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        with draft.open("w", encoding="utf-8") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        draft.replace(file)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def keep_copy(file: Path, name: str) -> Path:
    """Copy the file beside itself. `name` contains {}, for the first number that is free.

    Return the path of the copy. Raises OSError if the folder cannot be written.
    """
    for number in itertools.count(1):
        copy = file.with_name(name.format(number))
        try:
            copy.open("x").close()  # two processes never take the same name
        except FileExistsError:
            continue
        try:
            shutil.copy2(file, copy)
        except BaseException:
            copy.unlink()
            raise
        return copy
    raise AssertionError  # the numbers do not end
