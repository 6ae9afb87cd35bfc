"""The grader's end of a sandbox: it starts a fork server in isolation and talks with one submission at a time. Nothing here can block.

A submission's process has a connection to the grader and an output. It may write on the connection
only when it is asked. Only the beginning of its output is kept.
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

STARTING = 180.0  # seconds for imports, on a slow disk
ENDING = 30.0  # seconds until a submission's processes are gone
READING = 60.0  # seconds to read a notebook, or to judge one try of an answer
KEPT = 8 << 10  # bytes of output that are kept
LARGEST = 16 << 20  # bytes of one message
MOST_PARTS = 3 << 20  # commas and brackets of one message: each makes an object
CHUNK = 1 << 16
FOLDERS = "labkit-course-"  # in the folder for temporary files; then the grader's process
SERVER = ("-P", "-s", "-m", "labcourse.sandbox_server")  # of Python's command line
RETIRE = 500  # submissions after which a fork server is replaced
LATE = 75  # exit status of a submission's process that ran out of time and did not react to it


@dataclass(frozen=True)
class Limits:
    """What one submission may use.

    Attributes:
        cell_seconds, trial_seconds: of a cell, and of one try of an exercise. What a submission
            waits for a core does not count, here and in `seconds`.
        seconds: of all cells and answers together, also where cells have to run again.
        memory: bytes, beyond what importing PyTorch takes.
        scratch: bytes of files.
        output: bytes that it may print.
        processes, threads: that run at the same time.
        grace: seconds beyond its time for a submission to report that it ran out of it.
    """

    cell_seconds: float = 60.0
    trial_seconds: float = 30.0
    seconds: float = 240.0
    memory: int = 4 << 30
    scratch: int = 256 << 20
    output: int = 16 << 20
    processes: int = 48
    threads: int = 256
    grace: float = 5.0


class EndedError(Exception):
    """The submission's process has ended, or had to be ended. `kind` is a key of `labcourse.examination.KINDS`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail or kind)
        self.kind = kind


class SandboxError(Exception):
    """The sandbox itself does not start."""


class Sandbox:
    """A fork server in isolation that runs one submission after another.

    It starts when it is first needed, and again after it had to be ended.

    Attributes:
        reader: the process that reads notebooks, and judges what their answers did.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self, kill: bool = False) -> None:
        """End the reader, the fork server and all that it started; with `kill`, at once."""
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
        if self._server is not None:
            self._connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(0.0 if kill else 0.5 if self.backend.own_processes else 5)
            self._server.kill()  # in a namespace of its own, all other processes there end with the first one
            self._server.wait()
            self._server = None
        if self.group is not None:
            self.group.remove()
            self.group = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def run(self) -> "SubmissionProcess":
        """A process for one submission."""
        if self._server is None or self._server.poll() is not None or self._used >= RETIRE:
            self.start()
        self._used += 1
        try:
            return SubmissionProcess(self)
        except OSError:  # the server has ended since
            self.start()
            return SubmissionProcess(self)

    def start(self) -> None:
        """Start the fork server, anew if there is one. Raises SandboxError."""
        self._end_server(kill=False)
        if self._stopped:
            raise SandboxError("grading was stopped")
        _remove_abandoned_folders()
        self._folder = tempfile.TemporaryDirectory(prefix=f"{FOLDERS}{os.getpid()}-", ignore_cleanup_errors=True)
        folders = self.backend.folders or (self._folder.name,)
        self._used, self._inbox = 0, messages.Inbox(LARGEST)
        self._server, self._connection = start_connected(
            [*self.backend.command, sys.executable, *SERVER, *folders],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=backends.environment(folders[0]),
            cwd="/",
        )
        if self._stopped:  # meanwhile
            self._server.kill()
        if self.receive(STARTING) is None:
            self._server.kill()
            error = self._server.communicate()[1].decode(errors="replace").strip()
            self._server = None
            self._connection.close()
            raise SandboxError(
                f"the sandbox ({self.backend.name}) does not start: {error.splitlines()[-1] if error else 'it prints no reason'}"
            )
        if self._server.stderr is not None:
            self._server.stderr.close()
        self.group = ControlGroup.around(self._server.pid, self.limits.memory)

    def fork(self, fds: list[int]) -> None:
        """Ask the fork server for a process with these files."""
        limits = self.limits
        request = {"memory": limits.memory, "scratch": limits.scratch, "processes": limits.processes, "threads": limits.threads}
        request |= {"seconds": int(2 * limits.seconds) + 1, "own_processes": self.backend.own_processes, "late_status": LATE}
        request |= {"filtered": self.backend.hides_disk, "socket": _socket_buffer()}
        request |= {"counted": self.group is not None}
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._connection.sendmsg([messages.packed(request)], rights)

    def receive(self, seconds: float) -> dict[str, Any] | None:
        """The fork server's next message; None if none comes in that time, or the server has ended."""
        deadline = time.monotonic() + seconds
        while (message := self._inbox.take()) is None:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._connection.recv(CHUNK)
            except (TimeoutError, ConnectionError):
                return None
            if not data:
                return None
            self._inbox.add(data)
        return dict(message)

    def fileno(self) -> int:
        return self._connection.fileno()

    def time_limit(self, seconds: float) -> TimeLimit:
        """Return a limit for what the fork server has started, from this moment on."""
        return TimeLimit(seconds, [] if self._server is None else [self._server.pid])

    def end_process(self, stop: bool) -> dict[str, Any]:
        """Have the fork server end all that a submission started, and report how it ended.

        Without `stop` it may see first how the process ends by itself. A server that does not answer, leaves something, or is not what it
        was before, is ended too.
        """
        try:
            ended = None if stop else self.receive(1.0)
            if ended is None:
                with contextlib.suppress(OSError):
                    self._connection.sendall(messages.packed("stop"))
                ended = self.receive(ENDING)
        except messages.MessageError:
            ended = None
        if ended is None or not ended.get("clean") or ended.get("changed"):
            self._end_server(kill=True)
        return ended or {}


def _socket_buffer() -> int:
    """Bytes that wait in a socket between processes at most."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/net/core/wmem_default").read_text())
    return 212_992


def _remove_abandoned_folders() -> None:
    """Remove the folders of graders that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*-*"):
        owner = folder.name.removeprefix(FOLDERS).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


class SubmissionProcess:
    """One submission's process. Use as a context manager; whatever happens, nothing of it is left.

    Attributes:
        output: the beginning of what it printed.
        memory: bytes at most, when it has ended.
        changed: what it changed of the fork server, when it has ended.
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._has_ended:
            self._end(stop=True)
        self._close()

    def _close(self) -> None:
        self._connection.close()
        os.close(self._output)

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The process's answer to a question.

        Raises:
            EndedError: it ended, or had to be ended; or it wrote when it was not asked.
        """
        nonce = secrets.token_hex(16)
        self._listen(0)  # whatever is there now was not asked for
        if not self._inbox.empty:
            self._stop("tampered", "it wrote to the grader before it was asked")
        try:
            limit = self._sandbox.time_limit(seconds + self._limits.grace)
            self._write(messages.packed({"nonce": nonce, **question}), limit)
            reply = self._read(limit)
        except messages.MessageError as error:
            self._stop("tampered", f"what it wrote to the grader is {error}")
        if type(reply) is not dict or reply.pop("nonce", None) != nonce or not self._inbox.empty:
            self._stop("tampered", "what it wrote to the grader is no answer to the question")
        return reply

    def _write(self, data: bytes, limit: TimeLimit) -> None:
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
        while (text := self._inbox.take_text()) is None:
            remaining = limit.remaining()
            if remaining <= 0:
                self._stop("time")
            self._listen(min(remaining, 1.0))
        if sum(text.count(sign) for sign in (b",", b"[", b"{")) > MOST_PARTS:
            raise messages.MessageError("too large")
        return cleaned(messages.unpacked(text))

    def _listen(self, seconds: float) -> None:
        """Take in what comes within that time: answers, output, and what the fork server reports."""
        with selectors.DefaultSelector() as selector:
            for source, read in (
                (self._output, self._read_output),
                (self._connection, self._read_answer),
                (self._sandbox, self._raise_ended),
            ):
                selector.register(source, selectors.EVENT_READ, read)
            ready = {key.data for key, _ in selector.select(seconds)}
            for key in selector.get_map().values():  # the end of the process comes last
                if key.data in ready:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        key.data()

    def _read_answer(self) -> None:
        data = self._connection.recv(CHUNK)
        if data:
            self._inbox.add(data)
        elif self._inbox.empty:
            self._raise_ended()
        else:
            raise messages.MessageError("cut off")

    def _read_output(self) -> None:
        data = os.read(self._output, CHUNK)
        self._written += len(data)
        self.output += data[: KEPT - len(self.output)]
        if self._written > self._limits.output:
            self._stop("output", f"it printed more than {self._limits.output >> 20} MiB")
        if not data:
            time.sleep(0.01)  # it has closed its output, and may go on

    def _stop(self, kind: str, detail: str = "") -> NoReturn:
        self._end(stop=True)
        raise EndedError(kind, detail)

    def _raise_ended(self) -> NoReturn:
        """Raise EndedError. The connection is closed, or the fork server reports the end."""
        group = self._sandbox.group
        ran_out = group is not None and group.ran_out()  # which nobody can say of a server that has ended
        ended = self._end(stop=False)
        reason, status = ended.get("reason"), ended.get("status")
        if reason in ("memory", "processes"):
            raise EndedError(reason)
        if ran_out and status in (-9, None):  # None: the fork server was killed, too
            raise EndedError("memory")
        if status == LATE:
            raise EndedError("time")
        raise EndedError("ended", f"exit status {status}" if status is None or status >= 0 else f"signal {-status}")

    def _end(self, stop: bool) -> dict[str, Any]:
        self._has_ended = True
        ended = self._sandbox.end_process(stop)
        self.memory, self.changed = ended.get("memory", 0), ended.get("changed", [])
        return ended


def cleaned(message: Any, depth: int = 40, entries: int = 1 << 20) -> Any:
    """Return a message from a submission without half surrogates in its texts.

    Raises MessageError if the message has more levels than `depth`, or more values than `entries`.
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
            return value if value.isascii() else value.encode("utf-8", "replace").decode()
        if isinstance(value, list):
            return [clean(element, level - 1) for element in value]
        if isinstance(value, dict):
            return {clean(key, level): clean(element, level - 1) for key, element in value.items()}
        return value

    return clean(message, depth)
