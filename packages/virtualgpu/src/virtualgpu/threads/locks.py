"""Locks and queues of a machine's threads. They serve the thread that has waited longest.

They also report waiting threads to the scheduler. Python's own locks serve the thread that the
operating system wakes up first, or that asks at the right moment, which differs from run to run.
"""

import _thread
import queue
from collections import deque
from typing import Any

from virtualgpu.threads.scheduler import Scheduler
from virtualgpu.threads.thread_state import BlockedWait


class Waiter:
    """The lock on which a `threading.Condition` keeps one thread waiting."""

    item: Any  # the item that a queue has given to the thread

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = _thread.allocate_lock()
        self._wait: BlockedWait | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait for this lock, and return whether it was acquired within `timeout` seconds."""
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        with self._scheduler.blocked() as self._wait:
            return self._lock.acquire(True, timeout)

    def release(self) -> None:
        """Release this lock, and let the waiting thread ask for its turn."""
        self._lock.release()
        if self._wait is not None:
            self._scheduler.unblock(self._wait)


class Lock:
    """Replacement of `threading.Lock`. A release gives it to the thread that has waited longest."""

    scheduler: Scheduler  # set in a subclass for each machine

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._waiting: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Wait for this lock, and return whether it was acquired within `timeout` seconds."""
        if not blocking or timeout == 0:
            # Python reports a timeout that is given without blocking.
            return self._lock.acquire(blocking, timeout)
        if self._lock.acquire(blocking=False):
            return True
        waiter = Waiter(self.scheduler)
        waiter.acquire()
        self._waiting.append(waiter)
        if self._lock.acquire(blocking=False):  # it was released in between
            self._waiting.remove(waiter)
            return True
        try:
            return waiter.acquire(True, timeout) or not _give_up(waiter, self._waiting)
        except BaseException:
            if not _give_up(waiter, self._waiting):
                self.release()
            raise

    def release(self) -> None:
        """Give this lock to the thread that has waited longest, or release it if none waits."""
        while True:
            try:
                waiter = self._waiting.popleft()
            except IndexError:
                self._lock.release()
                if not self._waiting or not self._lock.acquire(blocking=False):
                    return
                # A thread has started to wait in the meantime. The lock goes to this thread.
            else:
                return waiter.release()

    def locked(self) -> bool:
        """Return whether a thread holds this lock."""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: Any) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        """Reset the lock in a forked child, where only the forking thread exists."""
        self._lock, self._waiting = _thread.allocate_lock(), deque()


class SimpleQueue:
    """Replacement of `queue.SimpleQueue`. An item goes to the thread that has waited longest.

    As in Python's own class, a finalizer may put an item.
    """

    scheduler: Scheduler  # set in a subclass for each machine

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Waiter] = deque()
        self._guard = _thread.RLock()  # a finalizer may run inside

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Append an item to the queue. It never waits, so `block` and `timeout` have no effect."""
        with self._guard:
            self._items.append(item)
            self._hand_out()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Remove and return the first item, after waiting for one.

        Raises queue.Empty if there is none in `timeout` seconds, or at once without `block`.
        """
        if timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        with self._guard:
            if self._items:
                return self._items.popleft()
            if not block or timeout == 0:
                raise queue.Empty
            waiter = Waiter(self.scheduler)
            waiter.acquire()
            self._waiting.append(waiter)
        try:
            waiter.acquire(True, -1 if timeout is None else timeout)
        except BaseException:
            with self._guard:
                if not _give_up(waiter, self._waiting):
                    self._items.appendleft(waiter.item)
                    self._hand_out()
            raise
        with self._guard:
            if _give_up(waiter, self._waiting):
                raise queue.Empty
        return waiter.item

    def _hand_out(self) -> None:
        """Give items to waiting threads until there are no more items or no more threads."""
        while self._items and self._waiting:
            waiter = self._waiting.popleft()
            try:
                waiter.item = self._items.popleft()
            except IndexError:  # a finalizer has put an item and given this one to a thread
                self._waiting.appendleft(waiter)
            else:
                waiter.release()

    def put_nowait(self, item: Any) -> None:
        """Append an item to the queue without waiting."""
        self.put(item)

    def get_nowait(self) -> Any:
        """Remove and return the first item of the queue. Raises queue.Empty if there is none."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Return whether the queue has no items."""
        return not self._items

    def qsize(self) -> int:
        """Return the number of items in the queue."""
        return len(self._items)


def _give_up(waiter: Waiter, waiting: deque[Waiter]) -> bool:
    """Remove `waiter` from the threads that wait for a lock or an item.

    Returns False if it has already received one.
    """
    try:
        waiting.remove(waiter)
    except ValueError:
        return False
    return True
