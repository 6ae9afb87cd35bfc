"""`torch.cuda.set_sync_debug_mode`: reports of where a program makes the host wait implicitly.

PyTorch checks the mode at the start of two functions only (c10/cuda/CUDAFunctions.h). They are
`memcpy_and_sync`, which every copy with the host uses that is not `non_blocking` and every read of
a few numbers, and `stream_synchronize`. PyTorch therefore does not report
`torch.cuda.synchronize()` and `Event.synchronize()`. It also does not report `non_blocking` copies
from or to pageable memory, although the driver waits for them.

`test_sync_warning` of PyTorch's test/test_torch.py lists the operators that read numbers. The words
are those of `warn_or_error_on_sync` (c10/cuda/CUDAFunctions.cpp) and
`THCPModule_cudaSetSyncDebugMode` (torch/csrc/cuda/Module.cpp).
"""

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from virtualgpu.front_end import HERE

WAITS = "called a synchronizing CUDA operation"
PROTOTYPE = (
    "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing "
    "operations"
)
SILENT, WARN, RAISE = range(3)
# The frame of this file is between a copy that autograd records and the copy's caller.
_APPLY = str(Path("torch", "autograd", "function.py"))


class SyncDebug:
    """The synchronization debug mode of one machine. It applies to all GPUs and threads."""

    def __init__(self) -> None:
        self.mode = SILENT
        self._warned = False

    def set(self, mode: Any) -> None:
        """Set the mode: 0 is silent, 1 warns and 2 raises an error at each implicit wait.

        Raises RuntimeError for other modes.
        """
        if not self._warned:
            self._warned = True
            _warn(PROTOTYPE)
        if not isinstance(mode, int) or isinstance(mode, bool):
            raise RuntimeError("invalid argument to set_sync_debug_mode")
        if mode not in (SILENT, WARN, RAISE):
            raise RuntimeError("invalid value of debug_mode, expected one of 0,1,2")
        self.mode = mode

    def notice(self) -> None:
        """Report that the host is about to wait. The mode decides whether this warns or raises."""
        if self.mode == RAISE:
            raise RuntimeError(WAITS)
        if self.mode == WARN:
            _warn(WAITS)


def _warn(text: str) -> None:
    """Emit a warning with this text at the line of Python code that called PyTorch."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(HERE) and not file.endswith(_APPLY):
            break
        level += 1
        frame = frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
