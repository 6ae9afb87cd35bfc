"""`torch.cuda.set_sync_debug_mode`: PyTorch reports where a program makes the host wait for a GPU implicitly.

PyTorch looks at the mode in two functions alone, before they do anything (c10/cuda/CUDAFunctions.h): `memcpy_and_sync`, through which
every copy with the host goes that is not `non_blocking`, and every read of a few numbers; and `stream_synchronize`. So nothing is reported
of `torch.cuda.synchronize()` and `Event.synchronize()`, nor of a `non_blocking` copy from or to pageable memory, for which the driver
waits. Which operators read numbers stands in `test_sync_warning` of PyTorch's test/test_torch.py; the words are those of
`warn_or_error_on_sync` (c10/cuda/CUDAFunctions.cpp) and `THCPModule_cudaSetSyncDebugMode` (torch/csrc/cuda/Module.cpp).
"""

import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

from virtualgpu.front_end import HERE

WAITS = "called a synchronizing CUDA operation"
PROTOTYPE = "Synchronization debug mode is a prototype feature and does not yet detect all synchronizing operations"
SILENT, WARN, RAISE = range(3)
_APPLY = str(Path("torch", "autograd", "function.py"))  # its frame lies between a copy that autograd records and the caller


class SyncDebug:
    """The mode of one machine: of all its GPUs and threads, as in PyTorch."""

    def __init__(self) -> None:
        self.mode = SILENT
        self._warned = False

    def set(self, mode: Any) -> None:
        """Raises RuntimeError for what is not 0 (say nothing), 1 (warn) or 2 (raise)."""
        if not self._warned:
            self._warned = True
            _warn(PROTOTYPE)
        if not isinstance(mode, int) or isinstance(mode, bool):
            raise RuntimeError("invalid argument to set_sync_debug_mode")
        if mode not in (SILENT, WARN, RAISE):
            raise RuntimeError("invalid value of debug_mode, expected one of 0,1,2")
        self.mode = mode

    def notice(self) -> None:
        """The host is about to wait. Warns or raises RuntimeError, as the mode says."""
        if self.mode == RAISE:
            raise RuntimeError(WAITS)
        if self.mode == WARN:
            _warn(WAITS)


def _warn(text: str) -> None:
    """A warning at the line of Python that called PyTorch."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename.startswith(HERE) or frame.f_code.co_filename.endswith(_APPLY)):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)
