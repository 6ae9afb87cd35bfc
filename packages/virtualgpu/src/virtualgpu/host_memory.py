"""The memory of this computer that the process may use, and how much of it the values of device tensors may take."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

# A lesson that fills 16 GiB of GPU must run in 1 GiB of RAM: values of device tensors are kept within these bounds.
HOST_SHARE = 0.25  # of the memory that this process may use, for the values of all device tensors together
LARGEST_KEPT = 256 << 20  # bytes of one tensor: ten of those would fill a laptop


def host_budget() -> tuple[int, int]:
    """Bytes of host memory for the values of all device tensors, and of one of them.

    LABKIT_HOST_BUDGET in the environment sets both; else they follow from the memory of this machine, or of its container.
    """
    if text := os.environ.get("LABKIT_HOST_BUDGET"):
        if not text.isdigit():
            raise ValueError(f"LABKIT_HOST_BUDGET={text!r}: give a whole number of bytes")
        return int(text), int(text)
    usable, _, _ = host_memory()
    return int(usable * HOST_SHARE), LARGEST_KEPT


def host_memory(root: Path = Path("/")) -> tuple[int, int, bool]:
    """Bytes that this process may use, bytes of these that are free, and whether a container's limit is what holds.

    Raises ImportError on Windows where psutil is missing.
    """
    total, available = _whole_machine()
    limit, used = container_memory(root)
    if limit is None or limit >= total:
        return total, available, False
    return limit, max(0, min(available, limit - used)), True


def _whole_machine() -> tuple[int, int]:
    """Bytes of this computer's memory, and of it what a program could get."""
    with suppress(OSError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, available = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
        return total, available
    try:
        import psutil  # other systems say it in ways of their own
    except ImportError:
        if not hasattr(os, "sysconf"):
            raise
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    machine = psutil.virtual_memory()
    return machine.total, machine.available


def container_memory(root: Path = Path("/")) -> tuple[int | None, int]:
    """The memory limit in bytes (None: no limit) that leaves this process the least, and what is used of it now without page cache.

    A limit is set for a control group: a container, a batch job, a service. It holds in the groups inside that group too. Both versions
    of Linux's control groups (the kernel's Documentation/admin-guide, cgroup-v2.rst and cgroup-v1/memory.rst).
    """
    groups = root / "sys/fs/cgroup"
    found = [
        *_limits(groups, _own_group(root, ""), "memory.max", "memory.current"),
        *_limits(groups / "memory", _own_group(root, "memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ]
    limited = [(limit, used) for limit, used in found if limit is not None]
    if limited:
        return min(limited, key=lambda group: group[0] - group[1])
    return found[-1] if found else (None, 0)


def _own_group(root: Path, controller: str) -> PurePosixPath:
    """The path of this process's control group below the folder of all groups that `controller` manages; "" is version 2."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") and ".." not in path:
                return PurePosixPath(path.lstrip("/"))
    return PurePosixPath()


def _limits(top: Path, group: PurePosixPath, limit_file: str, usage_file: str) -> Iterator[tuple[int | None, int]]:
    """The limit and the use of a control group and of each one around it, as far as they can be seen from here."""
    for path in (group, *group.parents):
        try:
            folder = top / path
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / usage_file).read_text())
            cache = re.findall(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            reclaimable = int(cache[-1]) if cache else 0  # version 1 lists the group alone, then in total
            yield None if limit == "max" else int(limit), used - reclaimable
        except (OSError, ValueError):
            continue
