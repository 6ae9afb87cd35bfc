"""The memory of this computer, and the share of it that the values of device tensors may take."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

# A lesson that fills 16 GiB of GPU memory must run in 1 GiB of RAM, so these bounds are low.
HOST_SHARE = 0.25  # share of the process's memory for the values of all device tensors together
LARGEST_KEPT = 256 << 20  # bytes of one tensor; ten larger ones would fill a laptop


def host_budget() -> tuple[int, int]:
    """Return the bytes of host memory for the values of all device tensors, and of one tensor.

    LABKIT_HOST_BUDGET in the environment sets both. Without it they depend on the memory of this
    computer or container. Raises ValueError unless the variable is a whole number.
    """
    text = os.environ.get("LABKIT_HOST_BUDGET")
    if text:
        if not text.isdigit():
            raise ValueError(f"LABKIT_HOST_BUDGET={text!r}: give a whole number of bytes")
        return int(text), int(text)
    usable, _, _ = host_memory()
    return int(usable * HOST_SHARE), LARGEST_KEPT


def host_memory(root: Path = Path("/")) -> tuple[int, int, bool]:
    """Return (usable bytes, free bytes of these, whether a container sets the limit).

    Raises ImportError on Windows where psutil is missing.
    """
    total, available = _whole_machine()
    limit, used = container_memory(root)
    if limit is None or limit >= total:
        return total, available, False
    return limit, max(0, min(available, limit - used)), True


def _whole_machine() -> tuple[int, int]:
    """Return (bytes of this computer's memory, bytes that a program could still get)."""
    with suppress(OSError, KeyError):
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        sizes = [int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable")]
        total, available = sizes
        return total, available
    try:
        import psutil  # for other systems
    except ImportError:
        if not hasattr(os, "sysconf"):
            raise
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    machine = psutil.virtual_memory()
    return machine.total, machine.available


def container_memory(root: Path = Path("/")) -> tuple[int | None, int]:
    """Return (memory limit in bytes or None, bytes in use without the page cache).

    A limit belongs to a control group, such as a container, a batch job or a service, and holds in
    the groups inside it, too. Of all limits, the one that leaves the least memory is returned. Both
    versions of Linux's control groups are read (the kernel's Documentation/admin-guide,
    cgroup-v2.rst and cgroup-v1/memory.rst).
    """
    groups = root / "sys/fs/cgroup"
    version_1 = groups / "memory"
    found = [
        *_limits(groups, _own_group(root, ""), "memory.max", "memory.current"),
        *_limits(
            version_1,
            _own_group(root, "memory"),
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
    ]
    limited = [(limit, used) for limit, used in found if limit is not None]
    if limited:
        return min(limited, key=lambda group: group[0] - group[1])
    if found:
        return found[-1]
    return None, 0


def _own_group(root: Path, controller: str) -> PurePosixPath:
    """Return the path of this process's control group, relative to the folder of all groups.

    `controller` is the name of the groups' controller, or "" for version 2 of control groups.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(",") and ".." not in path:
                return PurePosixPath(path.lstrip("/"))
    return PurePosixPath()


def _limits(
    top: Path, group: PurePosixPath, limit_file: str, usage_file: str
) -> Iterator[tuple[int | None, int]]:
    """Yield (limit, bytes in use) of a control group and of each group around it.

    `top` is the folder of all groups, and the two files are in each group's folder. A limit of None
    means no limit. Groups that cannot be read are left out.
    """
    for path in (group, *group.parents):
        try:
            folder = top / path
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / usage_file).read_text())
            statistics = (folder / "memory.stat").read_text()
            cache = re.findall(r"^(?:total_)?inactive_file (\d+)", statistics, re.MULTILINE)
            reclaimable = 0
            if cache:
                reclaimable = int(cache[-1])  # version 1 lists the group itself first, then totals
            yield None if limit == "max" else int(limit), used - reclaimable
        except (OSError, ValueError):
            continue
