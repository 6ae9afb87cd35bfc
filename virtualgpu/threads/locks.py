"""Locks and queues of a machine's threads: who waits, and who is woken, is known at once, and who came first is served first.

Python's own go to whom the operating system wakes, or to who asks just then: another one in every run.
"""

import _thread
import queue
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from virtualgpu.threads.seats import Absence
    from virtualgpu.threads.turns import Turns


class Waiter:
    """Stands in for the lock on which a `threading.Condition` keeps one thread."""

    item: Any  # what it waited for, if that is a thing

    def __init__(self, turns: "Turns") -> None:
        self._turns = turns
        self._lock = _thread.allocate_lock()
        self._absence: Absence | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        with self._turns.away() as self._absence:
            return self._lock.acquire(True, timeout)

    def release(self) -> None:
        self._lock.release()
        if self._absence is not None:
            self._turns.expect(self._absence)


class Lock:
    """`threading.Lock`: a release hands it to the thread that has waited longest."""

    turns: "Turns"  # set in a class of each machine's own

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._waiting: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking or timeout == 0:
            return self._lock.acquire(blocking, timeout)  # Python says what is wrong with a time without blocking
        if self._lock.acquire(blocking=False):
            return True
        waiter = Waiter(self.turns)
        waiter.acquire()
        self._waiting.append(waiter)
        if self._lock.acquire(blocking=False):  # it was released in between
            self._waiting.remove(waiter)
            return True
        try:
            return waiter.acquire(True, timeout) or not _gives_up(waiter, self._waiting)
        except BaseException:
            if not _gives_up(waiter, self._waiting):
                self.release()
            raise

    def release(self) -> None:
        while True:
            try:
                waiter = self._waiting.popleft()
            except IndexError:
                self._lock.release()
                if not self._waiting or not self._lock.acquire(blocking=False):
                    return
                # Somebody has come to wait in between: the lock is his.
            else:
                return waiter.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: Any) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        """Python calls this in a forked child, where nobody holds a lock but who forked."""
        self._lock, self._waiting = _thread.allocate_lock(), deque()


class SimpleQueue:
    """`queue.SimpleQueue`: an item goes to the thread that has waited longest. Like Python's, it may be put into by a finalizer."""

    turns: "Turns"  # set in a class of each machine's own

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Waiter] = deque()
        self._guard = _thread.RLock()  # a finalizer may run within

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._guard:
            self._items.append(item)
            self._hand_out()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Raises queue.Empty if there is nothing, or nothing came in `timeout` seconds."""
        if timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        with self._guard:
            if self._items:
                return self._items.popleft()
            if not block or timeout == 0:
                raise queue.Empty
            waiter = Waiter(self.turns)
            waiter.acquire()
            self._waiting.append(waiter)
        try:
            waiter.acquire(True, -1 if timeout is None else timeout)
        except BaseException:
            with self._guard:
                if not _gives_up(waiter, self._waiting):
                    self._items.appendleft(waiter.item)
                    self._hand_out()
            raise
        with self._guard:
            if _gives_up(waiter, self._waiting):
                raise queue.Empty
        return waiter.item

    def _hand_out(self) -> None:
        while self._items and self._waiting:
            waiter = self._waiting.popleft()
            try:
                waiter.item = self._items.popleft()
            except IndexError:  # a finalizer has put something, and so handed this out
                self._waiting.appendleft(waiter)
            else:
                waiter.release()

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


def _gives_up(waiter: Waiter, waiting: deque[Waiter]) -> bool:
    """Is the waiter still there to be taken away? If not, it has got what it waited for."""
    try:
        waiting.remove(waiter)
    except ValueError:
        return False
    return True
