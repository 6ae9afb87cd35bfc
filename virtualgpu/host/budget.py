"""How much of the host's memory the values of device tensors may take."""

import os

from virtualgpu.host_memory import host_memory

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
