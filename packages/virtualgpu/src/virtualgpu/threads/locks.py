"""Locks and queues of a machine's threads: they serve the thread that has waited longest, and report it to the scheduler.

Python's own serve the thread that the operating system wakes first, or that asks just then: another one in every run.
"""

import _thread
import queue
from collections import deque
from typing import Any

from virtualgpu.threads.scheduler import Scheduler
from virtualgpu.threads.thread_state import BlockedWait


class Waiter:
    """The lock on which a `threading.Condition` keeps one thread."""

    item: Any  # that a queue has given it

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._lock = _thread.allocate_lock()
        self._wait: BlockedWait | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        with self._scheduler.blocked() as self._wait:
            return self._lock.acquire(True, timeout)

    def release(self) -> None:
        self._lock.release()
        if self._wait is not None:
            self._scheduler.unblock(self._wait)


class Lock:
    """`threading.Lock`: a release hands it to the thread that has waited longest."""

    scheduler: Scheduler  # set in a class of each machine's own

    def __init__(self) -> None:
        self._lock = _thread.allocate_lock()
        self._waiting: deque[Waiter] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not blocking or timeout == 0:
            return self._lock.acquire(blocking, timeout)  # Python says what is wrong with a time without blocking
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
        while True:
            try:
                waiter = self._waiting.popleft()
            except IndexError:
                self._lock.release()
                if not self._waiting or not self._lock.acquire(blocking=False):
                    return
                # A thread has begun to wait in between: the lock goes to it.
            else:
                return waiter.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exception: Any) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        """Called by Python in a forked child, where only the thread that forked may hold a lock."""
        self._lock, self._waiting = _thread.allocate_lock(), deque()


class SimpleQueue:
    """`queue.SimpleQueue`: an item goes to the thread that has waited longest. Like Python's, it may be put into by a finalizer."""

    scheduler: Scheduler  # set in a class of each machine's own

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


def _give_up(waiter: Waiter, waiting: deque[Waiter]) -> bool:
    """Stop waiting. Returns False if the waiter has got what it waited for meanwhile."""
    try:
        waiting.remove(waiter)
    except ValueError:
        return False
    return True
