"""How much of this computer's memory the process may use: all of it, or what its container allows."""

import re
from pathlib import Path


def host_memory(root: Path = Path("/")) -> tuple[int, int, bool]:
    """Bytes that this process may use, bytes of these that are free, and whether a container's limit is what holds.

    Raises ImportError where psutil is missing.
    """
    import psutil

    machine = psutil.virtual_memory()
    limit, used = container_memory(root)
    if limit is None or limit >= machine.total:
        return machine.total, machine.available, False
    return limit, max(0, min(machine.available, limit - used)), True


def container_memory(root: Path = Path("/")) -> tuple[int | None, int]:
    """The memory limit of this process's control group in bytes (None: no limit) and what the group uses now without page cache.

    Both versions of Linux's control groups (the kernel's Documentation/admin-guide, cgroup-v2.rst and cgroup-v1/memory.rst).
    """
    groups = root / "sys/fs/cgroup"
    for folder, limit_file, usage_file in (
        (groups, "memory.max", "memory.current"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / usage_file).read_text())
            cache = re.findall(r"^(?:total_)?inactive_file (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
        except (OSError, ValueError):
            continue
        reclaimable = int(cache[-1]) if cache else 0  # version 1 lists the group alone, then in total
        return (None if limit == "max" else int(limit)), used - reclaimable
    return None, 0
