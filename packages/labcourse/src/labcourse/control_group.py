"""Linux control group that limits the memory of a sandbox.

The kernel counts the memory of all processes in the group, whichever process holds the memory
and in whatever form. On many computers only root may create such a group.
"""

import contextlib
import os
import re
import time
from pathlib import Path

import psutil

# The files with the limit and with the number of killed processes, in version 2 and in version 1.
FILES = (("memory.max", "memory.events"), ("memory.limit_in_bytes", "memory.oom_control"))
TREES = ("/sys/fs/cgroup", "/sys/fs/cgroup/memory")
ALLOWANCE = 256 << 20  # bytes for what the fork server itself needs beside the submission


OWN = re.compile(r"labkit-(\d+)-\d+")  # labkit-(process of the grader)-(process of the sandbox)


class ControlGroup:
    """Control group with the fork server of a sandbox and all processes that it forks."""

    def __init__(self, folder: Path, version: int) -> None:
        self._folder = folder
        self._limit, self._events = FILES[version]
        self._seen = 0

    @classmethod
    def around(cls, pid: int, memory: int) -> "ControlGroup | None":
        """Create a group with a process and its children.

        Args:
            pid: the process, which is a sandbox's fork server.
            memory: how many bytes the group may use beyond what it uses now.

        Returns:
            None if this user may not create a control group that limits memory.
        """
        for version, tree in enumerate(TREES):
            group = cls(Path(tree, f"labkit-{os.getpid()}-{pid}"), version)
            if not Path(tree, "cgroup.procs").exists() and not Path(tree, "tasks").exists():
                continue
            _remove_abandoned(Path(tree))
            try:
                group._folder.mkdir()
                if not (group._folder / group._limit).exists():
                    raise OSError("the kernel does not count memory in this tree")
                before = sum(process.memory_info().rss for process in cls._tree(pid))
                (group._folder / group._limit).write_text(str(before + memory + ALLOWANCE))
                for process in cls._tree(pid):
                    (group._folder / "cgroup.procs").write_text(str(process.pid))
            except (OSError, psutil.Error):
                group.remove()
                continue
            group._seen = group._killed()
            return group
        return None

    @staticmethod
    def _tree(pid: int) -> list[psutil.Process]:
        """List a process and all its descendants."""
        return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]

    def ran_out(self) -> bool:
        """Return whether the kernel has killed a process of the group since the last call."""
        seen, self._seen = self._seen, self._killed()
        return self._seen > seen

    def _killed(self) -> int:
        """Count the processes that the kernel killed because the group exceeded its limit."""
        with contextlib.suppress(OSError):
            for line in (self._folder / self._events).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def remove(self) -> None:
        """Remove the group. Give up after 0.2 s if a process remains in it."""
        for _ in range(20):
            try:
                return self._folder.rmdir()
            except FileNotFoundError:
                return None
            except OSError:  # its last process has not quite ended
                time.sleep(0.01)


def _remove_abandoned(tree: Path) -> None:
    """Remove the groups of graders that were killed. Groups of other programs are kept."""
    for folder in tree.glob("labkit-*"):
        named = OWN.fullmatch(folder.name)
        if named and not psutil.pid_exists(int(named[1])):
            with contextlib.suppress(OSError):
                folder.rmdir()
