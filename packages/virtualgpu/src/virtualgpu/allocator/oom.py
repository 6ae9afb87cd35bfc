"""The text of an out-of-memory error, as PyTorch words it (c10/cuda/CUDACachingAllocator.cpp, `malloc` and `format_size`)."""

from dataclasses import dataclass

_DOCUMENTATION = "https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
_OLD_DOCUMENTATION = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"


@dataclass(eq=False)
class OutOfMemory(Exception):  # noqa: N818 - the driver raises torch.OutOfMemoryError from it, PyTorch's own name
    """A request that the device cannot serve. `message` is PyTorch's text; the other attributes are bytes.

    `requested` is what the program asked for, `segment_size` what the allocator asked the driver for, `total` and `free` the
    device's memory, `allowed` the limit that a memory fraction sets (None without one), `allocated` and `reserved` the
    allocator's own figures.
    """

    message: str
    requested: int
    segment_size: int
    total: int
    free: int
    allowed: int | None
    allocated: int
    reserved: int

    def __str__(self) -> str:
        return self.message


def size_text(nbytes: int) -> str:
    """Bytes as PyTorch's error prints them: `2.00 MiB`. The bound of a unit still belongs to the unit below."""
    if nbytes <= 1 << 10:
        return f"{nbytes} bytes"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        if nbytes <= 1 << 10 * (power + 1):
            return f"{nbytes / (1 << 10 * power):.2f} {unit}"
    return f"{nbytes / (1 << 30):.2f} GiB"


TOO_LARGE = "CUDA out of memory. Tried to allocate more than 1EB memory."


def oom_text(
    *,
    index: int,
    segment_size: int,
    total: int,
    free: int,
    allowed: int | None,
    allocated: int,
    reserved: int,
    processes: list[tuple[int, int]],
    own_pid: int,
    version: str,
) -> str:
    """The message for device `index`; sizes in bytes, `processes` as (pid, bytes) in NVML's order.

    The request is given by the size of the segment that could not be had, which may be more than the tensor's.
    """
    others = "".join(
        f"Including non-PyTorch memory, this process has {size_text(nbytes)} memory in use. "
        if pid == own_pid
        else f"Process {pid} has {size_text(nbytes)} memory in use. "
        for pid, nbytes in processes
    )
    limit = "" if allowed is None else f"{size_text(allowed)} allowed; "
    variable, documentation = _wording(version)
    return (
        f"CUDA out of memory. Tried to allocate {size_text(segment_size)}. GPU {index} has a total capacity of {size_text(total)} "
        f"of which {size_text(free)} is free. {others}{limit}Of the allocated memory {size_text(allocated)} is allocated by PyTorch, "
        f"and {size_text(reserved - allocated)} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large "
        f"try setting {variable}=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
        f"({documentation})"
    )


def minor_version(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _wording(version: str) -> tuple[str, str]:
    """The variable and the page that a PyTorch version's message names: 2.10 from published logs, 2.11 recorded, 2.13 in its library."""
    if minor_version(version) < (2, 11):
        return "PYTORCH_ALLOC_CONF", _OLD_DOCUMENTATION
    return "PYTORCH_CUDA_ALLOC_CONF", _DOCUMENTATION
