"""What an answer may take while a learner checks it: a screenful of output, and the time that grading would give it."""

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

MOST_LINES = 40  # of an answer's output that are shown,
MOST_CHARACTERS = 8000  # and as long as they may be
PATIENCE = 10.0  # seconds until it is said what runs
LIMIT = 30.0  # seconds, without those that it waits for a core; grading gives as many (labcourse.sandbox)
AGAIN = 5.0  # seconds: an answer that catches everything is told again, and one that ends processes has time to


class TookTooLongError(BaseException):
    """Raised in an answer at its time's end. No Exception, so that it does not catch it."""


class CheckInterrupted(KeyboardInterrupt):
    """An interrupt of an answer. A notebook shows its message alone, without the kit's own part of the traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


class _Screenful:
    """A stream of output that lets a screenful through, and counts the lines of the rest."""

    def __init__(self, out: Any) -> None:
        self._out = out
        self._lines = self._characters = self.left_out = 0

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
    """Cut what the block prints and warns of after so many lines each, and say how many more there were."""
    screens = _Screenful(sys.stdout), _Screenful(sys.stderr)
    try:
        with redirect_stdout(screens[0]), redirect_stderr(screens[1]):
            yield
    finally:
        if left_out := sum(screen.left_out for screen in screens):
            print(f"… and {left_out:,} more line{'s' * (left_out != 1)}, which labkit.check leaves out")


@contextmanager
def no_questions() -> Iterator[None]:
    """Refuse `input()`. JupyterLab would run no other cell until its question is answered, also when the answer's time is over."""

    def refused(prompt: object = "") -> str:
        raise EOFError("nobody is asked while an answer is checked, so input() has nothing to return")

    before, builtins.input = builtins.input, refused
    try:
        yield
    finally:
        builtins.input = before


@contextmanager
def no_exit() -> Iterator[None]:
    """Let `exit()` and `quit()` raise SystemExit. In a notebook they would return, and end the kernel after the cell."""
    shell = ipython_shell()
    if shell is None:
        yield
        return

    def refused() -> None:
        raise SystemExit("exit() and quit() end the kernel: leave them out")

    shell.ask_exit = refused
    try:
        yield
    finally:
        del shell.ask_exit  # the class has its own


@contextmanager
def in_time(number: str, answer: Any) -> Iterator[None]:
    """Say after a while what runs and how to stop it, and raise TookTooLongError in the block at its time's end.

    Signals reach the main thread alone: in another one the block has no end.
    """
    out, thread, done, limit = sys.stdout, threading.current_thread(), threading.Event(), TimeLimit(LIMIT)
    ends = thread is threading.main_thread()

    def heard(*_: Any) -> None:
        if not done.is_set():
            raise TookTooLongError

    def watch() -> None:
        if done.wait(PATIENCE):
            return
        where = _where(sys._current_frames().get(thread.ident or 0), answer)
        end = f" It ends by itself after {LIMIT:g} s." if ends else ""
        out.write(f"{number} has run for {PATIENCE:g} s{where}. To stop it, interrupt the kernel (■ in the toolbar).{end}\n")
        out.flush()
        while ends and (remaining := limit.remaining()) > 0 and not done.wait(remaining):
            pass
        while ends and not done.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            done.wait(AGAIN)

    before: Callable[[int, FrameType | None], Any] | int | None = signal.signal(signal.SIGALRM, heard) if ends else None
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()  # it sends no signal after that
        if ends:
            signal.signal(signal.SIGALRM, before)


def _where(frame: FrameType | None, answer: Any) -> str:
    """The line of the answer that a thread is in, the innermost."""
    code = getattr(answer, "__code__", None)
    for seen, line in traceback.walk_stack(frame) if frame is not None else ():
        if code is not None and seen.f_code.co_filename == code.co_filename and seen.f_code.co_name != "<module>":
            [told] = traceback.StackSummary.extract(iter([(seen, line)]))
            return f", and is in line {line} of its cell: {told.line}"
    return ""
