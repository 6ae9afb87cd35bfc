"""Limits for an answer while a learner checks it.

An answer may print a screenful and may run as long as in grading. It may not ask questions or end
the kernel.
"""

import builtins
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any

from labkit.processes.time_limits import TimeLimit
from virtualgpu.front_end import ipython_shell

MOST_LINES = 40  # lines of an answer's output that are shown
MOST_CHARACTERS = 8000  # characters of an answer's output that are shown
PATIENCE = 10.0  # seconds until a message says which line runs
# Seconds that an answer may run, not counting the time in which it waits for a processor core.
# Grading has the same limit (labcourse.sandbox).
LIMIT = 30.0
NO_EXIT = "exit() and quit() end the kernel. Leave them out."
# Seconds between two attempts to stop an answer. An answer that catches all exceptions needs
# several attempts, and an answer that started processes needs time to end them.
AGAIN = 5.0


class TookTooLongError(BaseException):
    """Error that is raised in an answer at the time limit.

    It is not an Exception, so an answer's `except Exception` does not catch it.
    """


class CheckInterrupted(KeyboardInterrupt):
    """An interrupt of an answer. A notebook shows only its message, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


class _Screenful:
    """An output stream that passes on one screenful.

    Attributes:
        left_out: the number of lines that were not passed on.
    """

    def __init__(self, out: Any) -> None:
        self._out = out
        self._lines = 0
        self._characters = 0
        self.left_out = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            if self._lines < MOST_LINES and self._characters + len(line) <= MOST_CHARACTERS:
                self._out.write(line)
                self._characters += len(line)
                self._lines += line.endswith("\n")
            else:
                self._lines = MOST_LINES
                self.left_out += line.endswith("\n")
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write("".join(lines))


@contextmanager
def a_screenful() -> Iterator[None]:
    """Show one screenful of the block's output and one of its warnings.

    After the block, print how many lines were left out.
    """
    printed = _Screenful(sys.stdout)
    warned = _Screenful(sys.stderr)
    try:
        with redirect_stdout(printed), redirect_stderr(warned):
            yield
    finally:
        left_out = printed.left_out + warned.left_out
        if left_out:
            lines = "line" if left_out == 1 else "lines"
            print(f"… and {left_out:,} more {lines}, which labkit.check leaves out")


@contextmanager
def no_questions() -> Iterator[None]:
    """Let `input()` raise EOFError in the block.

    JupyterLab would run no other cell until the question is answered, even after the time limit.
    """

    def refused(prompt: object = "") -> str:
        raise EOFError("input() is not available while labkit.check runs your answer")

    before = builtins.input
    builtins.input = refused
    try:
        yield
    finally:
        builtins.input = before


@contextmanager
def no_exit() -> Iterator[None]:
    """Let `exit()` and `quit()` raise SystemExit in the block.

    In a notebook they would return, and the kernel would end after the cell.
    """
    shell = ipython_shell()
    if shell is None:
        yield
        return

    def refused() -> None:
        raise SystemExit(NO_EXIT)

    shell.ask_exit = refused
    try:
        yield
    finally:
        del shell.ask_exit  # the method of the shell's class is used again


@contextmanager
def in_time(number: str, answer: Any) -> Iterator[None]:
    """Raise TookTooLongError in the block at the time limit.

    Before that, print which line of the answer runs, and how to stop it. Signals reach only the
    main thread, so there is no time limit in other threads.
    """
    out = sys.stdout
    thread = threading.current_thread()
    done = threading.Event()
    limit = TimeLimit(LIMIT)
    ends = thread is threading.main_thread()

    def stop(*_: Any) -> None:
        if not done.is_set():
            raise TookTooLongError

    def watch() -> None:
        if done.wait(PATIENCE):
            return
        where = _where(sys._current_frames().get(thread.ident or 0), answer)
        end = f" It ends by itself after {LIMIT:g} s." if ends else ""
        out.write(
            f"{number} has run for {PATIENCE:g} s{where}. "
            f"To stop it, interrupt the kernel (■ in the toolbar).{end}\n"
        )
        out.flush()
        if not ends:
            return
        remaining = limit.remaining()
        while remaining > 0:
            if done.wait(remaining):
                return
            remaining = limit.remaining()  # the answer may have waited for a core
        while not done.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            done.wait(AGAIN)

    before: Callable[[int, FrameType | None], Any] | int | None = None
    if ends:
        before = signal.signal(signal.SIGALRM, stop)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()  # no signal comes after this
        if ends:
            signal.signal(signal.SIGALRM, before)


def _where(frame: FrameType | None, answer: Any) -> str:
    """Return a text with the line of the answer that runs in this frame, "" if it is unknown."""
    code = getattr(answer, "__code__", None)
    if code is None or frame is None:
        return ""
    for seen, line in traceback.walk_stack(frame):
        is_own = seen.f_code.co_filename == code.co_filename
        if is_own and seen.f_code.co_name != "<module>":
            [summary] = traceback.StackSummary.extract(iter([(seen, line)]))
            return f", and is in line {line} of its cell: {summary.line}"
    return ""
