"""A control group of the system around a sandbox, where this user may make one: it counts memory whoever holds it, in whatever form."""

import contextlib
import os
import re
import time
from pathlib import Path

import psutil

# The limit, and the count of processes that were ended for it, in version 2 and in version 1.
FILES = (("memory.max", "memory.events"), ("memory.limit_in_bytes", "memory.oom_control"))
TREES = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")


OWN = re.compile(r"labkit-(\d+)-\d+")  # the grader's process, and that of its sandbox


class ControlGroup:
    """The group of a sandbox's fork server and of all that it forks."""

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._limit, self._events = FILES[version]
        self._seen = 0

    @classmethod
    def around(cls, pid: int, memory: int) -> "ControlGroup | None":
        """A group with this process and its children, which may take so many bytes more than now; None where none can be made."""
        for version, tree in enumerate(TREES):
            group = cls(Path(tree, f"labkit-{os.getpid()}-{pid}"), version)
            if not Path(tree, "cgroup.procs").exists() and not Path(tree, "tasks").exists():
                continue
            _remove_abandoned(Path(tree))
            try:
                group._folder.mkdir()
                if not (group._folder / group._limit).exists():  # nobody counts memory there
                    raise OSError
                before = sum(process.memory_info().rss for process in cls._tree(pid))
                (group._folder / group._limit).write_text(str(before + memory + (256 << 20)))
                for process in cls._tree(pid):
                    (group._folder / "cgroup.procs").write_text(str(process.pid))
            except (OSError, psutil.Error):
                group.remove()
                continue
            group._seen = group._ended()
            return group
        return None

    @staticmethod
    def _tree(pid: int) -> list[psutil.Process]:
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]

    def ran_out(self) -> bool:
        """Whether the system has ended a process of the group for its memory since this was last asked."""
        seen, self._seen = self._seen, self._ended()
        return self._seen > seen

    def _ended(self) -> int:
        with contextlib.suppress(OSError):
            for line in (self._folder / self._events).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> None:
        for _ in range(20):
            try:
                return self._folder.rmdir()
            except FileNotFoundError:
                return None
            except OSError:  # its last process is still on its way out
                time.sleep(0.01)


def _remove_abandoned(tree: Path) -> None:
    """Remove the groups of graders that were killed. Groups of other programs stay."""
    for folder in tree.glob("labkit-*"):
        named = OWN.fullmatch(folder.name)
        if named and not psutil.pid_exists(int(named[1])):
            with contextlib.suppress(OSError):
                folder.rmdir()
