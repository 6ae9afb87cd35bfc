"""The text of an out-of-memory error, in PyTorch's words.

The words are those of `malloc` and `format_size` in c10/cuda/CUDACachingAllocator.cpp.
"""

from dataclasses import dataclass

_DOCUMENTATION = (
    "https://docs.pytorch.org/docs/stable/notes/cuda.html"
    "#optimizing-memory-usage-with-pytorch-cuda-alloc-conf"
)
_OLD_DOCUMENTATION = "https://pytorch.org/docs/stable/notes/cuda.html#environment-variables"


@dataclass(eq=False)
class OutOfMemory(Exception):  # noqa: N818 - the driver raises torch.OutOfMemoryError from it
    """Error for a request that the device cannot serve.

    Attributes (`message` is PyTorch's text, all others are bytes):
        requested: what the program asked for
        segment_size: what the allocator asked the driver for
        total: the device's memory
        free: the device's memory that no process holds
        allowed: the limit that a memory fraction sets, or None
        allocated: bytes in blocks that tensors hold
        reserved: bytes that the allocator holds from the device
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
    """Return a number of bytes as PyTorch's error prints it, such as `2.00 MiB`.

    Exactly 1024 of a unit are still printed in that unit, as PyTorch does.
    """
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
    """Return the message for device `index`.

    All sizes are bytes, and `processes` lists (pid, bytes) in NVML's order. The message names the
    size of the segment that the driver refused, which can be larger than the tensor.
    """
    others = ""
    for pid, nbytes in processes:
        owner = f"Process {pid}"
        if pid == own_pid:
            owner = "Including non-PyTorch memory, this process"
        others += f"{owner} has {size_text(nbytes)} memory in use. "
    limit = ""
    if allowed is not None:
        limit = f"{size_text(allowed)} allowed; "
    variable, documentation = _wording(version)
    return (
        f"CUDA out of memory. Tried to allocate {size_text(segment_size)}. "
        f"GPU {index} has a total capacity of {size_text(total)} "
        f"of which {size_text(free)} is free. {others}{limit}"
        f"Of the allocated memory {size_text(allocated)} is allocated by PyTorch, "
        f"and {size_text(reserved - allocated)} is reserved by PyTorch but unallocated. "
        "If reserved but unallocated memory is large try setting "
        f"{variable}=expandable_segments:True to avoid fragmentation.  "
        f"See documentation for Memory Management  ({documentation})"
    )


def minor_version(version: str) -> tuple[int, int]:
    """Return the major and minor number of a version: (2, 13) for "2.13.0+cpu"."""
    major, minor = version.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _wording(version: str) -> tuple[str, str]:
    """Return the variable and the page that the message of a PyTorch version names.

    The words of 2.10 come from published logs, those of 2.11 from a recording, and those of 2.13
    from its library.
    """
    if minor_version(version) < (2, 11):
        return "PYTORCH_ALLOC_CONF", _OLD_DOCUMENTATION
    return "PYTORCH_CUDA_ALLOC_CONF", _DOCUMENTATION
