"""The grader's end of a sandbox: it starts a nursery behind a wall and talks with one submission at a time. Nothing here can block.

A submission's copy has one line to the grader, on which it may speak only when asked, and its output, of which only the beginning is kept.
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
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from labcourse import open_lessons
from labcourse import wall as walls
from labcourse.wall import Wall
from labkit.processes import messages

STARTING = 180.0  # seconds for imports, on a slow disk
ENDING = 30.0  # seconds until a submission's processes are gone
KEPT = 8 << 10  # bytes of output that are kept
LARGEST = 16 << 20  # bytes of one message
CHUNK = 1 << 16
FOLDERS = "labkit-course-"  # in the folder for temporary files; then the grader's process
RETIRE = 500  # submissions after which a nursery is replaced


@dataclass(frozen=True)
class Limits:
    """What one submission may use.

    Attributes:
        cell_seconds, trial_seconds: of a cell, and of one try of an exercise.
        seconds: of all cells together.
        memory: bytes, beyond what importing PyTorch takes.
        scratch: bytes of files.
        output: bytes that it may print.
        processes, threads: that run at the same time.
        grace: seconds beyond its time for a submission to say that it ran out of it.
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
    """The submission's process is gone, or had to go. `kind` is a key of `labcourse.record.KINDS`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail or kind)
        self.kind = kind


class SandboxError(Exception):
    """The sandbox itself does not start."""


class Sandbox:
    """A nursery behind a wall, for one submission after another; started when first needed, and again after it had to go."""

    def __init__(self, wall: Wall, limits: Limits) -> None:
        self.wall, self.limits = wall, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._own: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the nursery and all that is behind the wall."""
        if self._process is not None:
            self._line.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.5 if self.wall.own_processes else 5)
            self._process.kill()  # with the first process behind a wall goes everything there
            self._process.wait()
            self._process = None
        if self._own is not None:
            self._own.cleanup()
            self._own = None

    def run(self) -> "Run":
        """A process for one submission."""
        if self._process is None or self._process.poll() is not None or self._used >= RETIRE:
            self._start()
        self._used += 1
        return Run(self)

    def _start(self) -> None:
        self.close()
        _sweep()
        self._own = tempfile.TemporaryDirectory(prefix=f"{FOLDERS}{os.getpid()}-", ignore_cleanup_errors=True)
        folders = (walls.ROOM, walls.SHARED) if self.wall.hides_disk else (self._own.name,)
        if self.wall.hides_disk:
            for name, text in open_lessons.sources().items():
                Path(self._own.name, name).write_text(text)
        self._line, theirs = socket.socketpair()
        self._used, self._inbox = 0, messages.Inbox(LARGEST)
        nursery = [sys.executable, "-P", "-s", "-m", "labcourse.nursery", str(theirs.fileno()), *folders]
        with theirs:
            self._process = subprocess.Popen(
                [*self.wall.around(self._own.name), *nursery],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=walls.environment(self.wall, folders[0]),
                cwd="/",
            )
        if self.hear(STARTING) is None:
            self._process.kill()
            said = self._process.communicate()[1].decode(errors="replace").strip()
            self._process = None
            raise SandboxError(f"the sandbox ({self.wall.name}) does not start: {said.splitlines()[-1] if said else 'it says nothing'}")
        self._process.stderr.close()

    def start_copy(self, fds: list[int]) -> None:
        limits = self.limits
        job = {"memory": limits.memory, "scratch": limits.scratch, "processes": limits.processes, "threads": limits.threads}
        job |= {"seconds": int(2 * limits.seconds), "alone": self.wall.own_processes}
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._line.sendmsg([messages.packed(job)], rights)

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """What the nursery says next; None if it says nothing in that time, or is gone."""
        deadline = time.monotonic() + seconds
        while (message := self._inbox.take()) is None:
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = self._line.recv(CHUNK)
            except (TimeoutError, ConnectionError):
                return None
            if not data:
                return None
            self._inbox.add(data)
        return message

    def fileno(self) -> int:
        return self._line.fileno()

    def stop_copy(self) -> None:
        with contextlib.suppress(OSError):
            self._line.sendall(messages.packed("stop"))

    def give_up(self) -> None:
        """The nursery does not answer, or leaves something behind: the next submission gets a new one."""
        if self._process is not None:
            self._process.kill()
        self.close()


def _sweep() -> None:
    """Remove what a grader that was killed could not."""
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*-*"):
        owner = folder.name.removeprefix(FOLDERS).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)


class Run:
    """One submission's process. Use as a context manager; whatever happens, nothing of it is left."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox, self._limits = sandbox, sandbox.limits
        self._inbox, self.output, self._written = messages.Inbox(LARGEST), bytearray(), 0
        self.memory, self._over = 0, False
        self._line, theirs = socket.socketpair()
        self._output, end = os.pipe()
        with theirs:
            sandbox.start_copy([theirs.fileno(), end])
        os.close(end)
        self._line.setblocking(False)
        os.set_blocking(self._output, False)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._line.close()
        if not self._over:
            self._end(stop=True)
        os.close(self._output)

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """What the process says to a question.

        Raises:
            EndedError: it ended, or had to; or it spoke when it was not asked.
        """
        nonce = secrets.token_hex(16)
        self._listen(0)  # whatever is there now was not asked for
        if not self._inbox.empty:
            self._stop("tampered", "it wrote to the grader before it was asked")
        try:
            deadline = time.monotonic() + seconds + self._limits.grace
            self._write(messages.packed({"nonce": nonce, **question}), deadline)
            reply = self._read(deadline)
        except messages.MessageError as error:
            self._stop("tampered", f"what it wrote to the grader is {error}")
        if type(reply) is not dict or reply.pop("nonce", None) != nonce or not self._inbox.empty:
            self._stop("tampered", "what it wrote to the grader is no answer to the question")
        return reply

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._line.send(view) :]
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._stop("time")
                self._listen(0.05)
            except OSError:
                self._ended_early()

    def _read(self, deadline: float) -> Any:
        while (message := self._inbox.take()) is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._stop("time")
            self._listen(min(remaining, 1.0))
        return message

    def _listen(self, seconds: float) -> None:
        """Take in what comes within that time: answers, output, and what the nursery says."""
        with selectors.DefaultSelector() as selector:
            for source in (self._line, self._output, self._sandbox):
                selector.register(source, selectors.EVENT_READ)
            for key, _ in selector.select(seconds):
                if key.fileobj is self._line:
                    with contextlib.suppress(BlockingIOError, ConnectionError):
                        self._hear_line()
                elif key.fileobj is self._sandbox:
                    self._ended_early()
                else:
                    self._hear_output()

    def _hear_line(self) -> None:
        data = self._line.recv(CHUNK)
        if data:
            self._inbox.add(data)
        elif self._inbox.empty:
            self._ended_early()
        else:
            raise messages.MessageError("cut off")

    def _hear_output(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._output, CHUNK)
            self._written += len(data)
            self.output += data[: KEPT - len(self.output)]
            if self._written > self._limits.output:
                self._stop("output", f"it printed more than {self._limits.output >> 20} MiB")
            if not data:
                time.sleep(0.01)  # it has closed its output, and may go on

    def _stop(self, kind: str, detail: str = "") -> None:
        self._end(stop=True)
        raise EndedError(kind, detail)

    def _ended_early(self) -> None:
        """The line is closed, or the nursery says that the process is gone."""
        from labcourse.session import LATE

        ended = self._end(stop=False)
        why, status = ended.get("why"), ended.get("status")
        if why in ("memory", "processes"):
            raise EndedError(why)
        if status == LATE:
            raise EndedError("time")
        raise EndedError("ended", f"exit status {status}" if status is None or status >= 0 else f"signal {-status}")

    def _end(self, stop: bool) -> dict[str, Any]:
        """Let the nursery end all that is left, and hear how it was. Without `stop` it may see first how the process ends by itself."""
        self._over = True
        try:
            ended = None if stop else self._sandbox.hear(1.0)
            if ended is None:
                self._sandbox.stop_copy()
                ended = self._sandbox.hear(ENDING)
        except messages.MessageError:
            ended = None
        if ended is None or not ended.get("clean"):
            self._sandbox.give_up()
        self.memory = (ended or {}).get("memory", 0)
        return ended or {}
