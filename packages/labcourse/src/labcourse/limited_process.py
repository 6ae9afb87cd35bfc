"""Run the kit's own functions on a student's text in a process with limits of time and memory.

Parsing may take all memory or never end: JSON may be nested a million levels deep, or a tokenizer
may read a cell again and again. So no student's text is parsed in the grader's own process. A text
that exceeds the limits costs its student a mark, and affects nobody else::
    with LimitedProcess(report=print) as process:
        notebook = process.call(reading.parse, data, about="reading ada/02_streams.ipynb")

The process never runs what it reads. It starts with the first call, and again after a call that had
to be ended.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from labcourse.reading import UnreadableError
from labkit import courses
from labkit.processes.supervision import KIT, start_connected

SECONDS = 20.0  # for one call
MEMORY = 1 << 30  # bytes for one call, beyond the memory of the process before it
LARGEST = 64 << 20  # bytes of a result
SLOW = 2.0  # seconds until a slow call is reported
STARTING = 180.0  # seconds for the imports that a function needs
PROGRAM = "import sys; from labcourse.limited_process import serve; serve(*sys.argv[1:])"


class LimitError(UnreadableError):
    """Error for a call that exceeds a limit.

    The message says which limit, and calls the text that was read "it".
    """


class LimitedProcess:
    """Process that runs one function at a time. Use it as a context manager, in one thread.

    Args:
        report: gets a line of text when a call takes long.
        seconds: the time limit of a call.
        memory: how many bytes a call may use.
    """

    def __init__(
        self,
        report: Callable[[str], Any] = lambda line: None,
        seconds: float = SECONDS,
        memory: int = MEMORY,
    ) -> None:
        self.report = report
        self._seconds, self._memory = seconds, memory
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stopped = False

    def __enter__(self) -> "LimitedProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> int | None:
        """End the process, if there is one, and return its exit status."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.2)  # the process ends when its connection is closed
        process.kill()
        return process.wait()

    def stop(self) -> None:
        """End the call that another thread has made, and refuse further calls."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def call(self, function: Callable[..., Any], *arguments: Any, about: str = "a call") -> Any:
        """Call a module's function in the process. Return its result, or raise its exception.

        The arguments and the result are pickled.

        Args:
            about: what the call does, for `report`, such as "reading ada/02_streams.ipynb".

        Raises:
            LimitError: the call took too long or too much memory, or ended the process.
        """
        try:
            succeeded, result = self._answer(pickle.dumps((function, arguments)), about)
        except BaseException:  # also KeyboardInterrupt: the next call must not get this answer
            self.close()
            raise
        if not succeeded:
            raise result
        return result

    def _answer(self, request: bytes, about: str) -> Any:
        """Send a pickled call to the process. Return whether the call succeeded, and its result.

        `about` says in reports what the call does.
        """
        connection = self._connected()
        try:
            connection.send_bytes(request)
            self._receive(connection, STARTING)  # the import is finished, and the time begins
            if not connection.poll(min(SLOW, self._seconds)):
                line = f"{about} takes long. It will be ended after {self._seconds:g} s"
                self.report(line)
            return self._receive(connection, max(0.0, self._seconds - SLOW))
        except (EOFError, OSError):
            status = self.close()
            raise LimitError(f"it ended its process, with exit status {status}") from None

    def _receive(self, connection: Connection, seconds: float) -> Any:
        """Return the next object from the process, or raise LimitError after `seconds`."""
        if not connection.poll(seconds):
            raise LimitError(f"it takes longer than {self._seconds:g} s")
        return pickle.loads(connection.recv_bytes(LARGEST))

    def _connected(self) -> Connection:
        """Return the connection to the process, which is started if needed."""
        if self._stopped:
            raise LimitError("it was stopped")
        if self._connection is None:
            own = [KIT, *(os.fspath(folder.parent) for folder in courses.packages().values())]
            path = os.pathsep.join(filter(None, [*own, os.environ.get("PYTHONPATH")]))
            self._process, ours = start_connected(
                [sys.executable, "-P", "-c", PROGRAM, str(self._seconds), str(self._memory)],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
            self._connection = Connection(ours.detach())
            if self._stopped:  # `stop` was called in the meantime
                self.stop()
        return self._connection


def serve(seconds: str, memory: str, fileno: str) -> None:
    """Run calls in the limited process, until the grader closes the connection.

    The arguments are those of the command line: the limits of a call, and the file descriptor of
    the connection.
    """
    warnings.simplefilter("ignore")  # Python would print warnings about the student's text
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, also inside C code
    connection = Connection(int(fileno))
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            function, arguments = pickle.loads(connection.recv_bytes())
            connection.send("ready")
            # This alarm ends the process if the grader was killed.
            signal.setitimer(signal.ITIMER_REAL, float(seconds) + 10)
            answer = _called(function, arguments, int(memory))
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send_bytes(answer)


def _called(function: Callable[..., Any], arguments: tuple[Any, ...], memory: int) -> bytes:
    """Call a function on these arguments, with a limit of memory in bytes.

    Return, pickled, whether the call succeeded, and its result or its exception.
    """
    try:
        with _limited(memory):
            answer = pickle.dumps((True, function(*arguments)))
    except MemoryError:
        answer = _failed(LimitError(f"it takes more than {memory >> 20} MiB of memory"))
    except RecursionError:
        answer = _failed(LimitError("it is nested too deeply"))
    except Exception as error:
        error.__traceback__ = error.__context__ = error.__cause__ = None
        answer = _failed(error)
    if len(answer) > LARGEST:
        answer = _failed(LimitError(f"it holds more than {LARGEST >> 20} MiB"))
    return answer


def _failed(error: Exception) -> bytes:
    """Return the answer for a call that raised an exception."""
    return pickle.dumps((False, error))


@contextlib.contextmanager
def _limited(memory: int) -> Iterator[None]:
    """Limit the memory that a `with` block adds to this process. This only works on Linux."""
    if sys.platform != "linux":
        yield
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
