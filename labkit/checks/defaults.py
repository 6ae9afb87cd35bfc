"""PyTorch's settings as they are at first, while an answer is observed: what a notebook has set for itself changes no verdict."""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def defaults() -> Iterator[None]:
    """In the block the default device, dtype, grad mode, precision, streams, threads and printing are PyTorch's own; a warning is no error.

    Afterwards they are the notebook's again.
    """
    device, dtype = torch.get_default_device(), torch.get_default_dtype()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    deterministic, anomaly = torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()
    collecting, recursion, folder = gc.isenabled(), sys.getrecursionlimit(), os.getcwd()
    printing = vars(torch._tensor_str.PRINT_OPTS).copy()
    with ExitStack() as stack:
        stack.callback(os.chdir, folder)
        stack.callback(sys.setrecursionlimit, recursion)
        stack.callback(vars(torch._tensor_str.PRINT_OPTS).update, printing)
        stack.callback(torch.set_num_threads, threads)
        stack.callback(torch.set_float32_matmul_precision, precision)
        stack.callback(torch._C._set_deterministic_algorithms, deterministic)  # what torch exports imports its compiler
        stack.callback(torch.autograd.set_detect_anomaly, anomaly)
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(torch.set_default_device, None if device.type == "cpu" else device)
        stack.callback(gc.enable if collecting else gc.disable)
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_printoptions(profile="default")
        torch._C._set_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        torch.set_float32_matmul_precision("highest")
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
