"""Write the learner's files so that a crash or another process does not damage them."""

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE = 10.0  # seconds to wait for another process that holds the lock
POLL = 0.01  # seconds between two attempts
# Errors of network folders that have no locks. There we write without a lock. Rarely an entry is
# lost, but never the whole file.
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let only one process at a time change a file, if all of them use this function.

    The lock is another file beside it.

    Raises OSError if the folder cannot be written, or if another process keeps the lock too long.
    """
    # It is imported here because the ranks of checks import this module and need no lock.
    from filelock import FileLock

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
    """Replace the text of a file. After a crash the file has either its old text or the new one.

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
    """Copy a file within its folder, and return the path of the copy.

    `name` is the name of the copy. Its {} becomes the first number that is not in use.

    Raises OSError if the folder cannot be written.
    """
    for number in itertools.count(1):
        copy = file.with_name(name.format(number))
        try:
            copy.open("x").close()  # mode "x" fails if another process has taken the name
        except FileExistsError:
            continue
        try:
            shutil.copy2(file, copy)
        except BaseException:
            copy.unlink()
            raise
        return copy
    raise AssertionError  # the numbers do not end
