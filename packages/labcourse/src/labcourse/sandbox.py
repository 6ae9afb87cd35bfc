"""Sandbox as the grader sees it: start an isolated fork server, and talk to one submission.

The process of a submission has a connection to the grader and a pipe for its output. It may write
to the connection only when it is asked. Only the beginning of its output is kept. No call in this
module waits without a time limit.
"""

import array
import contextlib
import os
import secrets
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import psutil

from labcourse import backends
from labcourse.backends import Backend
from labcourse.control_group import ControlGroup
from labcourse.limited_process import LimitedProcess
from labkit.processes import messages
from labkit.processes.supervision import start_connected
from labkit.processes.time_limits import TimeLimit

STARTING = 180.0  # seconds for imports from a slow disk
ENDING = 30.0  # seconds until a submission's processes have ended
READING = 60.0  # seconds to read a notebook, or to judge one try of an answer
KEPT = 8 << 10  # bytes of output that are kept
LARGEST = 16 << 20  # bytes of one message
MOST_PARTS = 3 << 20  # commas and brackets in one message, because each makes an object
CHUNK = 1 << 16
FOLDERS = "labkit-course-"  # temporary folders are called labkit-course-(process of the grader)-…
SERVER = ("-P", "-s", "-m", "labcourse.sandbox_server")  # Python's command line
RETIRE = 500  # submissions until a fork server is replaced
LATE = 75  # exit status of a process that ran out of time and did not react to the exception


@dataclass(frozen=True)
class Limits:
    """Limits for one submission.

    Attributes:
        cell_seconds: seconds for one cell. Time spent waiting for a processor core does not count,
            neither here nor for the next two limits.
        trial_seconds: seconds for one try of an answer.
        seconds: seconds for all cells and answers together, including cells that run again.
        memory: bytes, beyond the memory that importing PyTorch takes.
        scratch: bytes of files.
        output: bytes that the submission may print.
        processes, threads: how many may run at the same time.
        grace: seconds that a submission has to report that it ran out of time.
    """

    cell_seconds: float = 60.0
    trial_seconds: float = 30.0
    seconds: float = 240.0
    memory: int = 4 << 30
    scratch: int = 256 << 20
    output: int = 256 << 20
    processes: int = 48
    threads: int = 256
    grace: float = 5.0


class EndedError(Exception):
    """Error for a submission whose process has ended, or had to be ended.

    `kind` is a key of `labcourse.examination.KINDS`.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail or kind)
        self.kind = kind


class SandboxError(Exception):
    """Error for a sandbox that cannot start."""


class Sandbox:
    """Isolated fork server that runs one submission after another. Use it as a context manager.

    It starts with the first submission, and again after it had to be ended.

    Args:
        report: gets a line of text when a call of the reader takes long.

    Attributes:
        reader: the process that reads notebooks and judges what answers did.
        group: the control group that limits the server's memory, or None.
    """

    def __init__(
        self,
        backend: Backend,
        limits: Limits,
        report: Callable[[str], Any] = lambda line: None,
    ) -> None:
        self.backend, self.limits = backend, limits
        self.reader = LimitedProcess(report, seconds=READING)
        self._stopped = False
        self._server: subprocess.Popen[bytes] | None = None
        self.group: ControlGroup | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self, kill: bool = False) -> None:
        """End the reader, the fork server and all their processes. With `kill`, do not wait."""
        self.reader.close()
        self._end_server(kill)

    def stop(self) -> None:
        """End what another thread does with this sandbox, and refuse to start again."""
        self._stopped = True
        self.reader.stop()
        server = self._server
        if server is not None:
            server.kill()

    def _end_server(self, kill: bool) -> None:
        """End the fork server and all its processes, and remove its control group and folder.

        With `kill`, do not wait for them to end by themselves.
        """
        if self._server is not None:
            self._connection.close()
            patience = 5.0
            if kill:
                patience = 0.0
            elif self.backend.own_processes:
                patience = 0.5
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(patience)
            self._server.kill()  # in a process namespace, all processes end with the first one
            self._server.wait()
            self._server = None
        if self.group is not None:
            self.group.remove()
            self.group = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run(self) -> "SubmissionProcess":
        """Fork a process for one submission."""
        if self._server is None or self._server.poll() is not None or self._used >= RETIRE:
            self.start()
        self._used += 1
        try:
            return SubmissionProcess(self)
        except OSError:  # the server has ended in the meantime
            self.start()
            return SubmissionProcess(self)

    def start(self) -> None:
        """Start the fork server, and end the one that runs. Raise SandboxError if it fails."""
        self._end_server(kill=False)
        if self._stopped:
            raise SandboxError("grading was stopped")
        _remove_abandoned_folders()
        self._folder = tempfile.TemporaryDirectory(
            prefix=f"{FOLDERS}{os.getpid()}-", ignore_cleanup_errors=True
        )
        folders = self.backend.folders or (self._folder.name,)
        self._used, self._inbox = 0, messages.Inbox(LARGEST)
        self._server, self._connection = start_connected(
            [*self.backend.command, sys.executable, *SERVER, *folders],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=backends.environment(folders[0]),
            cwd="/",
        )
        if self._stopped:  # `stop` was called in the meantime
            self._server.kill()
        if self.receive(STARTING) is None:
            self._server.kill()
            lines = self._server.communicate()[1].decode(errors="replace").strip().splitlines()
            self._server = None
            self._connection.close()
            reason = lines[-1] if lines else "it prints no reason"
            raise SandboxError(f"the sandbox ({self.backend.name}) does not start: {reason}")
        if self._server.stderr is not None:
            self._server.stderr.close()
        self.group = ControlGroup.around(self._server.pid, self.limits.memory)

    def fork(self, fds: list[int]) -> None:
        """Ask the fork server for a new process that has these open files."""
        limits = self.limits
        request = {
            "memory": limits.memory,
            "scratch": limits.scratch,
            "processes": limits.processes,
            "threads": limits.threads,
            "seconds": int(2 * limits.seconds) + 1,
            "own_processes": self.backend.own_processes,
            "late_status": LATE,
            "filtered": self.backend.hides_disk,
            "socket": _socket_buffer(),
            "counted": self.group is not None,
        }
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._connection.sendmsg([messages.packed(request)], rights)

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """Return the fork server's next message.

        Return None if no message arrives within this time, or if the server has ended.
        """
        deadline = time.monotonic() + seconds
        message = self._inbox.take()
        while message is None:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._connection.recv(CHUNK)
            except (TimeoutError, ConnectionError):
                return None
            if not data:
                return None
            self._inbox.add(data)
            message = self._inbox.take()
        return dict(message)

    def fileno(self) -> int:
        """Return the file descriptor of the connection to the fork server."""
        return self._connection.fileno()

    def time_limit(self, seconds: float) -> TimeLimit:
        """Return a limit in seconds, from now on, for the processes of the fork server."""
        return TimeLimit(seconds, [] if self._server is None else [self._server.pid])

    def end_process(self, stop: bool) -> dict[str, Any]:
        """Have the fork server end all processes of a submission, and return its report.

        Without `stop`, the server may first see how the process ends by itself. The server itself
        is ended if it does not answer, leaves something behind, or was changed.
        """
        ended = None
        with contextlib.suppress(messages.MessageError):
            if not stop:
                ended = self.receive(1.0)
            if ended is None:
                with contextlib.suppress(OSError):
                    self._connection.sendall(messages.packed("stop"))
                ended = self.receive(ENDING)
        if ended is None or not ended.get("clean") or ended.get("changed"):
            self._end_server(kill=True)
        return ended or {}


def _socket_buffer() -> int:
    """Return how many bytes can wait in a socket between processes, at most."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core/wmem_default").read_text())
    return 212_992


def _remove_abandoned_folders() -> None:
    """Remove the temporary folders of graders that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*-*"):
        owner = folder.name.removeprefix(FOLDERS).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


class SubmissionProcess:
    """Process of one submission. Use it as a context manager, which ends all that it started.

    Attributes:
        output: the beginning of what it printed.
        memory: its peak memory in bytes, once it has ended.
        changed: what it changed in the fork server, once it has ended.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._limits = sandbox, sandbox.limits
        self._inbox, self.output, self._written = messages.Inbox(LARGEST), bytearray(), 0
        self.memory, self.changed, self._has_ended = 0, list[str](), False
        self._connection, theirs = socket.socketpair()
        self._output, writing = os.pipe()
        with theirs:
            try:
                sandbox.fork([theirs.fileno(), writing])
            except OSError:
                self._close()
                raise
            finally:
                os.close(writing)
        self._connection.setblocking(False)
        os.set_blocking(self._output, False)

    def __enter__(self) -> "SubmissionProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._has_ended:
            self._end(stop=True)
        self._close()

    def _close(self) -> None:
        """Close the connection to the process and the pipe for its output."""
        self._connection.close()
        os.close(self._output)

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a question to the process, and return its answer.

        Raises:
            EndedError: the process has ended or had to be ended, or it wrote without being asked.
        """
        nonce = secrets.token_hex(16)
        self._listen(0)
        if not self._inbox.empty:
            self._stop("tampered", "it wrote to the grader before it was asked")
        try:
            limit = self._sandbox.time_limit(seconds + self._limits.grace)
            self._write(messages.packed({"nonce": nonce, **question}), limit)
            reply = self._read(limit)
        except messages.MessageError as error:
            self._stop("tampered", f"the message that it wrote to the grader is {error}")
        has_nonce = type(reply) is dict and reply.pop("nonce", None) == nonce
        if not has_nonce or not self._inbox.empty:
            detail = "the message that it wrote to the grader does not answer the question"
            self._stop("tampered", detail)
        return dict(reply)

    def _write(self, data: bytes, limit: TimeLimit) -> None:
        """Send all bytes to the process within the time limit."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._connection.send(view) :]
            except BlockingIOError:
                if limit.remaining() <= 0:
                    self._stop("time")
                self._listen(0.05)
            except OSError:
                self._raise_ended()

    def _read(self, limit: TimeLimit) -> Any:
        """Return the next message of the process, within the time limit."""
        text = self._inbox.take_text()
        while text is None:
            remaining = limit.remaining()
            if remaining <= 0:
                self._stop("time")
            self._listen(min(remaining, 1.0))
            text = self._inbox.take_text()
        if sum(text.count(sign) for sign in (b",", b"[", b"{")) > MOST_PARTS:
            raise messages.MessageError("too large")
        return cleaned(messages.unpacked(text))

    def _listen(self, seconds: float) -> None:
        """Read what arrives within this time: answers, output, and the fork server's reports."""
        with selectors.DefaultSelector() as selector:
            sources = (
                (self._output, self._read_output),
                (self._connection, self._read_answer),
                (self._sandbox, self._raise_ended),
            )
            for source, read in sources:
                selector.register(source, selectors.EVENT_READ, read)
            ready = {key.data for key, _ in selector.select(seconds)}
            for _, read in sources:  # in this order, because the end of the process comes last
                if read in ready:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        read()

    def _read_answer(self) -> None:
        """Read from the connection. Raise EndedError or MessageError if the process closed it."""
        data = self._connection.recv(CHUNK)
        if data:
            self._inbox.add(data)
        elif self._inbox.empty:
            self._raise_ended()
        else:
            raise messages.MessageError("cut off")

    def _read_output(self) -> None:
        """Read output, and keep its beginning. End the process if it prints too much."""
        data = os.read(self._output, CHUNK)
        self._written += len(data)
        self.output += data[: KEPT - len(self.output)]
        if self._written > self._limits.output:
            self._stop("output", f"it printed more than {self._limits.output >> 20} MiB")
        if not data:
            time.sleep(0.01)  # the process has closed its output, and may go on

    def _stop(self, kind: str, detail: str = "") -> NoReturn:
        """End the process and raise EndedError with this kind and detail."""
        self._end(stop=True)
        raise EndedError(kind, detail)

    def _raise_ended(self) -> NoReturn:
        """Raise EndedError, because the connection is closed or the fork server reports the end."""
        group = self._sandbox.group
        ran_out = group is not None and group.ran_out()  # ask before the group is removed
        ended = self._end(stop=False)
        reason, status = ended.get("reason"), ended.get("status")
        if reason in ("memory", "processes"):
            raise EndedError(reason)
        if ran_out and status in (-9, None):  # None: the fork server was killed, too
            raise EndedError("memory")
        if status == LATE:
            raise EndedError("time")
        if status is None or status >= 0:
            raise EndedError("ended", f"exit status {status}")
        raise EndedError("ended", f"signal {-status}")

    def _end(self, stop: bool) -> dict[str, Any]:
        """End all processes of the submission, and return the fork server's report.

        Without `stop`, the server may first see how the process ends by itself.
        """
        self._has_ended = True
        ended = self._sandbox.end_process(stop)
        self.memory, self.changed = ended.get("memory", 0), ended.get("changed", [])
        return ended


def cleaned(message: Any, depth: int = 40, entries: int = 1 << 20) -> Any:
    """Return a message from a submission without halves of surrogate pairs in its texts.

    Raise MessageError if the message has more levels than `depth`, or more values than `entries`.
    """
    left = entries

    def clean(value: Any, level: int) -> Any:
        nonlocal left
        left -= 1
        if level < 0:
            raise messages.MessageError("too deep")
        if left < 0:
            raise messages.MessageError("too large")
        if isinstance(value, str):
            return value.encode("utf-8", "replace").decode()
        if isinstance(value, list):
            return [clean(element, level - 1) for element in value]
        if isinstance(value, dict):
            return {clean(key, level): clean(element, level - 1) for key, element in value.items()}
        return value

    return clean(message, depth)
