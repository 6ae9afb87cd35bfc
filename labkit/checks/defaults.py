"""PyTorch's default settings, which hold while an answer is observed.

So the settings of a notebook do not change a verdict.
"""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from labkit import machine


@contextmanager
def defaults() -> Iterator[None]:
    """Use the default settings of PyTorch in the block, also for printing.

    Warnings do not raise errors in the block, and a memory limit that the notebook has set for a
    GPU does not apply. `settings_kept` restores PyTorch's settings later. This function restores
    the others after the block, such as the working folder.
    """
    collecting = gc.isenabled()
    recursion = sys.getrecursionlimit()
    folder = os.getcwd()
    printing = vars(torch._tensor_str.PRINT_OPTS).copy()
    with ExitStack() as stack:
        stack.callback(os.chdir, folder)
        stack.callback(sys.setrecursionlimit, recursion)
        stack.callback(vars(torch._tensor_str.PRINT_OPTS).update, printing)
        stack.callback(gc.enable if collecting else gc.disable)
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_printoptions(profile="default")
        torch._C._set_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_float32_matmul_precision("highest")
        _lift_memory_limits()
        sys.setrecursionlimit(max(1000, recursion))
        gc.enable()
        stack.enter_context(warnings.catch_warnings())
        kept = [known for known in warnings.filters if known[0] != "error"]
        warnings.resetwarnings()
        warnings.filters.extend(kept)  # type: ignore[attr-defined]  # a list
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _lift_memory_limits() -> None:
    """Let PyTorch take as much of each GPU's memory as `labkit.use` allows."""
    used = machine.in_use()
    for gpu in range(used.count):
        share = min(1.0, used.memory / torch.cuda.get_device_properties(gpu).total_memory)
        if torch.cuda.get_per_process_memory_fraction(gpu) != share:
            torch.cuda.set_per_process_memory_fraction(share, gpu)
