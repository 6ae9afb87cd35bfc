"""The fork server: a process that has imported torch, and whose copies are ready at once.

torchrun's agents, ranks, and the attempts of `fit` are such copies. A copy is like a process that
was started afresh, except that modules are imported already, and that strings have the same hashes
in all copies.

A process starts its server when it first needs one. Only this process and its agents use the
server, and it ends with them. The server has one thread and never uses a GPU, so its copies can
use one.

Multiprocessing has a fork server too, but that one does not give its children their starter's
environment, files and folder, nor a session of their own. They also begin with multiprocessing's
own state.
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
from collections.abc import Sequence
from typing import Any

from labkit.processes import messages
from labkit.processes.supervision import JOB_VARIABLE, KIT, end_with_parent, start_connected
from virtualgpu.script import run_script

# Bytes reserved for `JOB_VARIABLE` in the environment that the system shows of a copy.
VARIABLE_BYTES = 8192
STARTING = 120.0  # seconds for the server to import torch
POSSIBLE = sys.platform == "linux"  # on macOS, a copy may not use the system's libraries
# Modules whose memory the copies share. A program may add to them before its server starts.
MODULES = [
    "torch.distributed.run",
    # torch imports it for the first optimizer and for DistributedDataParallel, which takes a second
    # and 70 MB per rank.
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.distributed.optim",
    "virtualgpu.install",
    "gputrace.recording",  # for ranks that are traced, and for attempts of `fit`
]
# A new value of these variables needs no new server. PyTorch sets TORCHINDUCTOR_CACHE_DIR with the
# first optimizer of a process.
_ANY_TIME = {
    JOB_VARIABLE,
    "TMPDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTEST_CURRENT_TEST",
    "OMP_NUM_THREADS",
}
# A copy sends this word when the system shows its job. From then on, whoever ends the job finds it.
_FOUND = "found"
_START = f"""import sys
if not sys.flags.safe_path:
    del sys.path[0]  # the working folder
sys.path.insert(0, {KIT!r})  # so that this kit is imported, even if another one is installed
from labkit.processes import forkserver
forkserver.serve(sys.argv[-1], sys.argv[1:-1])
"""


class Forked:
    """A process that the server forked. It has the methods of `subprocess.Popen` that are needed.

    Attributes:
        pid: the number of the process.
        returncode: the exit status, negative for a signal, or None while the process runs.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self._connection = pid, connection
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit status. Raise subprocess.TimeoutExpired after `timeout` seconds."""
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
        """Store the exit status that the server has reported."""
        self.returncode = status
        self._connection.close()  # from now on the system may give the number to another process


def popen(
    command: Sequence[str],
    env: dict[str, str],
    *,
    output: int | None = None,
    pass_fds: Sequence[int] = (),
    with_server: bool = False,
) -> "Forked | subprocess.Popen[bytes]":
    """Start `python -u *command` in its own session.

    The process is a copy of the server, and is killed when the server ends. Where there can be no
    server, it is started afresh, and has to end itself.

    Args:
        command: the path of a script of this kit, and its arguments.
        env: the process's environment.
        output: the file descriptor for its output. Then the process has no input. By default it
            has the input and output of this process.
        pass_fds: file descriptors that it has open under the same numbers.
        with_server: whether it may use the server of this process. Then the server does not end
            before it, so it has to end itself. Otherwise it starts a server of its own if needed.
    """
    with open(os.devnull) as nothing:
        files = [0, 1, 2] if output is None else [nothing.fileno(), output, output]
        try:
            return _server_for(env).fork(command, env, files, pass_fds, with_server)
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
    """Connection of this process to a server.

    Attributes:
        line: the connection.
        kind: what the server's copies inherit and cannot change, as `_kind` returns it.
        process: the server, or None if another process has started it.
        has_served: whether the server has forked a copy for this process.
    """

    def __init__(
        self,
        line: socket.socket,
        kind: Any = None,
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.line, self.kind, self.process, self.has_served = line, kind, process, False

    @classmethod
    def start(cls, env: dict[str, str], kind: Any) -> "_Server":
        """Start a server with this environment."""
        env = env | {
            JOB_VARIABLE: os.environ.get(JOB_VARIABLE, "").ljust(VARIABLE_BYTES),
            # If an import asks whether there are GPUs, the driver answers. CUDA would answer by
            # default, and a process cannot use CUDA after a fork.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        process, line = start_connected(
            [sys.executable, "-u", "-c", _START, *MODULES],
            socket.SOCK_SEQPACKET,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=env,
        )
        return cls(line, kind, process)

    def fork(
        self,
        command: Sequence[str],
        env: dict[str, str],
        files: list[int],
        pass_fds: Sequence[int],
        with_server: bool,
    ) -> Forked:
        """Fork a copy of the server. The arguments are those of `popen`.

        Raises OSError or EOFError if the server has ended or cannot fork.
        """
        request = {"command": list(command), "env": env, "targets": [0, 1, 2, *pass_fds]}
        line_of_copy = [self.line.fileno()] if with_server else []
        ours, theirs = socket.socketpair()
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with theirs:
                sent = [theirs.fileno(), folder, *files, *pass_fds, *line_of_copy]
                socket.send_fds(self.line, [b"fork"], sent)
            ours.settimeout(STARTING)
            pid = messages.receive(ours)
            # If this process is interrupted before it sends the request, the copy ends at once.
            ours.sendall(messages.packed(request))
            answer = messages.receive(ours)
            ours.settimeout(None)
            self.has_served = True
            forked = Forked(pid, ours)
            if answer != _FOUND:
                forked.ended(answer)
            return forked
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(folder)

    def retire(self) -> None:
        """Let the server end as soon as no agent needs it."""
        self.line.close()
        if self.process is not None:
            # Without a thread that waits for it, the server would stay as a zombie.
            threading.Thread(target=self.process.wait, daemon=True).start()


_server: _Server | None = None
_lock = threading.Lock()


def _server_for(env: dict[str, str]) -> _Server:
    """Return this process's server, and start it if there is none for this environment.

    Raises OSError if there can be none.
    """
    global _server
    with _lock:
        if _server is not None and _server.process is None:
            return _server  # this process is itself a copy of the server
        kind = _kind(env)
        if not POSSIBLE:
            raise OSError("this system cannot have a fork server")
        if _server is not None and _server.kind == kind:
            assert _server.process is not None
            if _server.process.poll() is None:
                return _server
            if not _server.has_served:
                raise OSError("a server of this kind ends while it starts")
        if _server is not None:
            _server.retire()
        _server = _Server.start(env, kind)
        return _server


def _kind(env: dict[str, str]) -> Any:
    """Return the settings that a process can no longer change after its libraries are loaded.

    They are what Python, PyTorch and their libraries may read from `env` when they are loaded.
    """
    folders = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    is_relative = not all(map(os.path.isabs, folders))
    variables = {name: value for name, value in env.items() if name not in _ANY_TIME}
    return variables, os.getcwd() if is_relative else None


def end() -> None:
    """End the server and its copies."""
    global _server
    if _server is not None:
        _server.line.close()
        if _server.process is not None:
            _server.process.kill()
            _server.process.wait()
        _server = None


def is_here() -> bool:
    """Return whether this process has a server, or is a copy of one that it may use."""
    return _server is not None


def pid() -> int | None:
    """Return the number of the server that this process has started, or None."""
    if _server is None or _server.process is None:
        return None
    return _server.process.pid


def _forget_server() -> None:
    """Forget the server after a fork, because it belongs to the parent process."""
    global _server, _lock
    _lock = threading.Lock()
    if _server is not None:
        _server.line.close()
        if _server.process is not None:
            _server.process.returncode = 0  # so that nobody waits for it
        _server = None


atexit.register(end)
os.register_at_fork(after_in_child=_forget_server)


# The functions below run in the server.


def _fork_on_request(line: socket.socket) -> list[int]:
    """Fork whenever a process asks for a copy on the connection `line`.

    Return only in a copy, with the files that the caller sent for it.
    """
    # For each running copy, a file descriptor that is ready when the copy has ended, the copy's
    # number, and the connection to the process that asked for it.
    running: dict[int, tuple[int, int]] = {}
    poll = select.poll()
    poll.register(line, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in running:
                poll.unregister(ready)
                os.close(ready)
                pid, caller = running.pop(ready)
                _send(caller, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(caller)
                continue
            asked, fds, _, _ = socket.recv_fds(line, 4, 64)
            if not asked:  # every process that used this server has ended
                os._exit(0)
            forked = _fork()
            if forked == 0:
                line.close()
                for ending, (_, caller) in running.items():
                    os.close(ending)
                    os.close(caller)
                return fds
            for sent in fds[1:]:
                os.close(sent)
            if forked is None:
                os.close(fds[0])  # which tells the caller that there is no copy
                continue
            _send(fds[0], forked)
            ending = os.pidfd_open(forked)
            running[ending] = forked, fds[0]
            poll.register(ending, select.POLLIN)


def _load(modules: Sequence[str]) -> None:
    """Import the modules, and prepare this process for forks."""
    for name in modules:
        with contextlib.suppress(ImportError):  # some builds of torch lack a module
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    # OpenBLAS ends its threads at a fork, and starts them again when they are needed.
    if os.fork() == 0:
        os._exit(0)
    os.wait()


def _fork() -> int | None:
    """Fork as os.fork does. Return None if that is not possible.

    It is not if the system refuses, or if a library has started threads, which a copy would lack.
    """
    with contextlib.suppress(OSError):
        if len(os.listdir("/proc/self/task")) == 1:
            return os.fork()
    return None


def _send(line: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.write(line, messages.packed(number))


def _become(fds: list[int], job: int) -> list[str]:
    """Make this copy a process as if it had been started afresh, and return its command.

    Args:
        fds: the files that the caller sent: a connection, its folder, the files for the request's
            `targets`, and perhaps a connection to the server.
        job: the address of the value of `JOB_VARIABLE`.
    """
    global _server
    os.setsid()
    above = 1 + max(map(int, os.listdir("/proc/self/fd")))
    request = _receive_request(fds[0], job)
    # First move the files out of the way of each other.
    above = max(above, *request["targets"]) + 1
    folder, *files = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in fds[1:]]
    for fd in fds[1:]:
        os.close(fd)
    for target in request["targets"]:
        os.dup2(files[0], target)
        os.close(files.pop(0))
    if files:  # this process may use the server too
        _server = _Server(socket.socket(fileno=files[0]))
    else:
        end_with_parent()
    os.fchdir(folder)
    os.close(folder)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    threads = os.environ.get("OMP_NUM_THREADS", "1").partition(",")[0]
    if threads.isdecimal() and threads != "1":  # the server has one
        sys.modules["torch"].set_num_threads(int(threads))
    # numpy's random state is a copy of the server's. torch always begins with the same seed, and
    # Python draws a new one after a fork.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    importlib.invalidate_caches()
    sys.orig_argv = [sys.executable, "-u", *request["command"]]
    if not sys.flags.safe_path:
        sys.path.insert(0, "")  # `run_script` replaces it with the script's folder
    return list(request["command"])


def _receive_request(connection: int, job: int) -> dict[str, Any]:
    """Receive what to run, show this process as a part of its job, and answer that it is.

    The process ends if the caller was interrupted.
    """
    with socket.socket(fileno=connection) as caller:
        try:
            request: dict[str, Any] = messages.receive(caller)
            value = request["env"].get(JOB_VARIABLE, "").encode()[:VARIABLE_BYTES]
            # /proc/PID/environ shows the value with which the server was started. So replace it.
            ctypes.memmove(job, value.ljust(VARIABLE_BYTES), VARIABLE_BYTES)
            caller.sendall(messages.packed(_FOUND))
        except (OSError, EOFError):
            os._exit(1)
    return request


def serve(fileno: str, modules: Sequence[str]) -> None:
    """Import the modules, and fork when a process asks for it.

    The server never returns. A copy returns when its script has run.

    Args:
        fileno: the number of the connection on which processes ask.
        modules: the names of the modules.
    """
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    job = libc.getenv(JOB_VARIABLE.encode())
    _load(modules)
    sys.path.remove(KIT)
    os.close(os.pidfd_open(os.getpid()))  # raises an error on a system that is too old
    script, *arguments = _become(_fork_on_request(socket.socket(fileno=int(fileno))), job)
    run_script(script, arguments)
