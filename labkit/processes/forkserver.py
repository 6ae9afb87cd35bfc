"""The fork server: a process that has imported torch once. Its copies, ready at once, are torchrun's agents, ranks, and attempts of `fit`.

A process starts its server when it first needs one, and nobody uses it but this process and its agents; it ends with them, however they
end. It has one thread and never touches a GPU, so that its copies can. Multiprocessing's server is another one, because its children have
neither their starter's environment, files and folder nor a session of their own, and start with what multiprocessing keeps in them.

A copy is like a process started afresh, with two exceptions: what was imported is there, and strings have the same hashes in all copies.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.processes import messages
from labkit.processes.supervision import JOB_VARIABLE, KIT, start_connected
from virtualgpu.script import run_script

VARIABLE_BYTES = (
    8192  # kept for `JOB_VARIABLE` in the environment that the system shows of the server's copies
)
STARTING = 120.0  # seconds for the server to import torch
POSSIBLE = sys.platform == "linux"  # on macOS, a copy may not use the system's libraries
MODULES = [  # whose memory the copies share. A program may add to them before its server starts.
    "torch.distributed.run",
    "torch._dynamo",  # torch itself imports it for the first optimizer, and for DistributedDataParallel: a second and 70 MB a rank
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.optim",
    "virtualgpu.install",
    "gputrace.recording",  # of a rank that is traced, of an attempt
]
# A new value of these variables needs no new server. PyTorch sets the third one with the first
# optimizer of a process.
_ANY_TIME = {
    JOB_VARIABLE,
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTEST_CURRENT_TEST",
    "OMP_NUM_THREADS",
}
_FOUND = "found"  # what a copy says when the system shows to which job it belongs: a job that ends now kills it
_START = f"""import sys
if not sys.flags.safe_path:
    del sys.path[0]  # the working folder
sys.path.insert(0, {KIT!r})  # for this kit, not one that is installed
from labkit.processes import forkserver
forkserver.serve(sys.argv[-1], sys.argv[1:-1])
"""


class Forked:
    """A process that the server forked, with the part of `subprocess.Popen` that is used of it."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self._connection = pid, connection
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative if it was a signal; None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, when there is one. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0)
            try:
                self.ended(messages.receive(self._connection))
            except (OSError, EOFError):  # the server was killed
                self.ended(-signal.SIGKILL)
        assert self.returncode is not None
        return self.returncode

    def ended(self, status: int) -> None:
        """The server has told its exit status."""
        self.returncode = status
        self._connection.close()  # from now on the system may give the number to another process


def popen(
    command: Sequence[str],
    env: dict[str, str],
    *,
    output: int | None = None,
    pass_fds: Sequence[int] = (),
    with_caller: bool = False,
    with_server: bool = False,
) -> "Forked | subprocess.Popen[bytes]":
    """Start `python -u *command` in a session of its own: a copy of the server or, where that cannot be, a process started afresh.

    Args:
        command: the path of a script of this kit, and its arguments.
        env: the process's environment.
        output: the file that it writes to, while it has no input. None: its input and output are this process's.
        pass_fds: files that it has open under the same numbers.
        with_caller: kill it when this process has ended. (Started afresh, it has to see to its end itself.)
        with_server: let it use this process's server. Otherwise it starts a server of its own when it needs one.
    """
    with open(os.devnull) as nothing:
        files = [0, 1, 2] if output is None else [nothing.fileno(), output, output]
        try:
            return _server_for(env).fork(command, env, files, pass_fds, with_caller, with_server)
        except (OSError, EOFError):
            stdin, stdout, stderr = files
            return subprocess.Popen(
                [sys.executable, "-u", *command],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                start_new_session=True,
                env=env,
            )


class _Server:
    """This process's end of the line to a server, which has a `kind`: what its copies inherit and cannot change."""

    def __init__(
        self,
        line: socket.socket,
        kind: Any = None,
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.line, self.kind, self.process, self.has_served = line, kind, process, False

    @classmethod
    def start(cls, env: dict[str, str], kind: Any) -> "_Server":
        # Should an import ask whether there are GPUs, the driver answers without CUDA, which a process cannot use after a fork.
        jobs = os.environ.get(JOB_VARIABLE, "").ljust(VARIABLE_BYTES)
        env = env | {
            JOB_VARIABLE: jobs,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        command, none = [sys.executable, "-u", "-c", _START, *MODULES], subprocess.DEVNULL
        process, line = start_connected(
            command, socket.SOCK_SEQPACKET, stdout=none, stderr=none, env=env
        )
        return cls(line, kind, process)

    def fork(
        self,
        command: Sequence[str],
        env: dict[str, str],
        files: list[int],
        pass_fds: Sequence[int],
        with_caller: bool,
        with_server: bool,
    ) -> Forked:
        """Raises OSError or EOFError if the server has ended, or cannot fork."""
        request = {"command": list(command), "env": env, "targets": [0, 1, 2, *pass_fds]}
        to_ask = [self.line.fileno()] if with_server else []
        ours, theirs = socket.socketpair()
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with theirs:
                socket.send_fds(
                    self.line,
                    [bytes([with_caller])],
                    [theirs.fileno(), folder, *files, *pass_fds, *to_ask],
                )
            ours.settimeout(STARTING)
            pid = messages.receive(ours)
            ours.sendall(
                messages.packed(request)
            )  # without it, if this process is interrupted, the copy ends at once
            told = messages.receive(ours)
            ours.settimeout(None)
            self.has_served = True
            forked = Forked(pid, ours)
            if told != _FOUND:
                forked.ended(told)
            return forked
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(folder)

    def retire(self) -> None:
        """Let it end as soon as no agent needs it."""
        self.line.close()
        if self.process is not None:
            threading.Thread(
                target=self.process.wait, daemon=True
            ).start()  # or it would stay as a zombie


_server: _Server | None = None
_lock = threading.Lock()


def _server_for(env: dict[str, str]) -> _Server:
    """This process's server, started anew if there is none of the kind. Raises OSError where there can be none."""
    global _server
    with _lock:
        if _server is not None and _server.process is None:
            return _server  # of which this process itself is a copy
        kind = _kind(env)
        if not POSSIBLE:
            raise OSError("this system cannot")
        if _server is not None and _server.kind == kind:
            assert _server.process is not None
            if _server.process.poll() is None:
                return _server
            if not _server.has_served:
                raise OSError("such a server ends while it starts")
        if _server is not None:
            _server.retire()
        _server = _Server.start(env, kind)
        return _server


def _kind(env: dict[str, str]) -> Any:
    """Return what Python, PyTorch and their libraries may read when they are loaded."""
    folders = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    is_relative = not all(map(os.path.isabs, folders))
    variables = {name: value for name, value in env.items() if name not in _ANY_TIME}
    return variables, is_relative and os.getcwd()


def end() -> None:
    """End the server and what it forked, as the end of this process does."""
    global _server
    if _server is not None:
        _server.line.close()
        if _server.process is not None:
            _server.process.kill()
            _server.process.wait()
        _server = None


def is_here() -> bool:
    """Whether this process has a server, its own or the one of which it is a copy."""
    return _server is not None


def pid() -> int | None:
    """The number of the server that this process has started, if there is one."""
    return None if _server is None or _server.process is None else _server.process.pid


def _forget() -> None:
    """In a process that was forked from one with a server: that one is not its own."""
    global _server, _lock
    _lock = threading.Lock()
    if _server is not None:
        _server.line.close()
        if _server.process is not None:
            _server.process.returncode = 0  # so that nobody waits for it
        _server = None


atexit.register(end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


# The server's own side.


@dataclass
class _Copy:
    """A process that was forked: its number; a file that is ready when it has ended, and one that is ready when nobody waits for it."""

    pid: int
    ending: int
    line: int
    with_caller: bool
    has_ended: bool = False
    is_abandoned: bool = False


def _fork_on_request(line: socket.socket) -> list[int]:
    """Fork whenever somebody asks for it. Returns in the copies alone, with the files that were sent."""
    copies: dict[int, _Copy] = {}
    poll = select.poll()
    poll.register(line, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd in copies:
                poll.unregister(fd)
                _follow(fd, copies.pop(fd))
                continue
            asked, fds, _, _ = socket.recv_fds(line, 1, 64)
            if not asked:  # every process that used this server has ended
                _kill_with_callers(copies.values())
                os._exit(0)
            pid = _fork()
            if pid == 0:
                for other in {line.detach(), *copies}:
                    os.close(other)
                return fds
            for sent in fds[1:] if pid else fds:  # closed, the first says that there is no copy
                os.close(sent)
            if pid:
                copy = _Copy(pid, os.pidfd_open(pid), fds[0], with_caller=bool(asked[0]))
                _send(copy.line, pid)
                copies |= {copy.ending: copy, copy.line: copy}
                poll.register(copy.ending, select.POLLIN)
                poll.register(copy.line, 0)  # for its end alone: what is sent there is for the copy


def _load(modules: Sequence[str]) -> None:
    for name in modules:
        with contextlib.suppress(ImportError):  # of a torch that was built without it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if os.fork() == 0:
        os._exit(0)
    os.wait()  # OpenBLAS ends its threads at a fork, and starts them when they are used


def _fork() -> int | None:
    """As os.fork; None if the system refuses, or a library has started threads, which a copy would lack."""
    with contextlib.suppress(OSError):
        return os.fork() if len(os.listdir("/proc/self/task")) == 1 else None
    return None


def _kill_with_callers(copies: Iterable[_Copy]) -> None:
    """Kill the copies that may not outlive their callers, which have ended."""
    for copy in copies:
        if copy.with_caller and not copy.has_ended:
            os.kill(copy.pid, signal.SIGKILL)


def _follow(fd: int, copy: _Copy) -> None:
    """The copy has ended; or the process that asked for it knows that, or has ended itself."""
    if fd == copy.ending:
        copy.has_ended = True
        ended = os.waitid(os.P_PID, copy.pid, os.WEXITED | os.WNOWAIT)
        if ended is not None and not copy.is_abandoned:
            _send(
                copy.line, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            )
    else:
        copy.is_abandoned = True
        if copy.with_caller and not copy.has_ended:
            os.kill(copy.pid, signal.SIGKILL)
    os.close(fd)
    if copy.has_ended and copy.is_abandoned:
        os.waitpid(
            copy.pid, 0
        )  # not sooner: the number would be free while somebody may still send it a signal


def _send(line: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.write(line, messages.packed(number))


def _become(fds: list[int], job: int) -> list[str]:
    """Make a process of this copy as if it had been started afresh, and return its command. `job` is the address of `JOB_VARIABLE`."""
    global _server
    os.setsid()
    above = 1 + max(map(int, os.listdir("/proc/self/fd")))
    with socket.socket(fileno=fds[0]) as caller:
        try:
            request = messages.receive(caller)
            value = request["env"].get(JOB_VARIABLE, "").encode()[:VARIABLE_BYTES]
            # What /proc/PID/environ shows, where the server was started with another value.
            ctypes.memmove(job, value.ljust(VARIABLE_BYTES), VARIABLE_BYTES)
            caller.sendall(messages.packed(_FOUND))
        except (OSError, EOFError):  # the caller was interrupted
            os._exit(1)
    above = max(above, *request["targets"]) + 1
    folder, *files = [
        fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds[1:]
    ]  # out of the way of each other
    for fd in fds[1:]:
        os.close(fd)
    for target in request["targets"]:
        os.dup2(files[0], target)
        os.close(files.pop(0))
    if files:  # the line to the server, which this process may use too
        _server = _Server(socket.socket(fileno=files[0]))
    os.fchdir(folder)
    os.close(folder)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    threads = os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]
    if threads.isdecimal() and threads != "1":  # the server has 1
        sys.modules["torch"].set_num_threads(int(threads))
    if "numpy" in sys.modules:
        sys.modules[
            "numpy"
        ].random.seed()  # torch's is always the same at first, and Python sees to its own
    importlib.invalidate_caches()
    sys.orig_argv = [sys.executable, "-u", *request["command"]]
    if not sys.flags.safe_path:
        sys.path.insert(0, "")  # for the script's folder
    return list(request["command"])


def serve(fileno: str, modules: Sequence[str]) -> None:
    """Import the modules, and fork when somebody asks on the line of this number. Return only in the copies, when their script has run."""
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    job = libc.getenv(JOB_VARIABLE.encode())
    _load(modules)
    sys.path.remove(KIT)
    os.close(os.pidfd_open(os.getpid()))  # an old system has none
    script, *arguments = _become(_fork_on_request(socket.socket(fileno=int(fileno))), job)
    run_script(script, arguments)
