"""A container's limits on Linux: memory for a process and its descendants, and some cores."""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
# For both versions of Linux's control groups: their folder, the pattern of their line in
# /proc/self/cgroup, and the files with the limit, the limit with swap, and the kills.
MEMORY_OF_ONE = r"^\d+:(?:\w+,)*memory(?:,\w+)*:/(.*)$"
VERSIONS = (
    (
        GROUPS / "memory",
        MEMORY_OF_ONE,
        "memory.limit_in_bytes",
        "memory.memsw.limit_in_bytes",
        "memory.oom_control",
    ),
    (GROUPS, r"^0::/(.*)$", "memory.max", "memory.swap.max", "memory.events"),
)


class Container:
    """Control group with limits. `folder` is None if the system does not allow one."""

    def __init__(self, folder: Path | None, kills: str) -> None:
        self.folder = folder
        self._kills = kills

    def entering(self, cores: int) -> Callable[[], None]:
        """Keep this process and its children in the container, on the first `cores` cores."""

        def enter() -> None:
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
            if self.folder is not None:
                (self.folder / "cgroup.procs").write_text(str(os.getpid()))

        return enter

    def killed(self) -> int:
        """Return how many processes the kernel killed because the memory was used up."""
        if self.folder is None:
            return 0
        found = re.search(
            r"^oom_kill (\d+)$", (self.folder / self._kills).read_text(), re.MULTILINE
        )
        return int(found[1]) if found else 0


@contextmanager
def container(memory: int) -> Iterator[Container]:
    """Make a container within this process's control group, with this memory and no swap."""
    made = next(
        filter(None, (_make(memory, *version) for version in VERSIONS)), Container(None, "")
    )
    try:
        yield made
    finally:
        if made.folder is not None:
            made.folder.rmdir()  # fails where a process is left in it


def _make(memory: int, top: Path, line: str, limit: str, swap: str, kills: str) -> Container | None:
    mine = re.search(line, Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    if mine is None:
        return None
    folder = top / mine[1] / f"labkit-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        return None
    try:
        (folder / limit).write_text(str(memory))
    except OSError:  # the group above does not hand memory on to those below
        folder.rmdir()
        return None
    with suppress(OSError):
        (folder / swap).write_text("0" if swap == "memory.swap.max" else str(memory))
    return Container(folder, kills)
