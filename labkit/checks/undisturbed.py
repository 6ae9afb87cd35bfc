"""Leave random state and GPU memory as they were before a check or a call."""

import gc
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from labkit import machine
from labkit.checks.settings import settings_kept


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state of Python, NumPy, PyTorch and the GPUs in use after the block."""
    used = machine.current()
    gpus = range(used.count if used is not None else 0)
    python, cpu = random.getstate(), torch.get_rng_state()
    cuda = [torch.cuda.get_rng_state(gpu) for gpu in gpus]
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state(legacy=False)
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if machine.current() is used:
            for gpu, state in zip(gpus, cuda, strict=True):
                torch.cuda.set_rng_state(state, gpu)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore PyTorch's settings after the block, and free the memory that it took on GPUs.

    Raises RuntimeError if a GPU no longer works after the block.
    """
    allocated, reserved = _allocated(), _reserved()
    try:
        with settings_kept(), machine.in_use().new_workspaces_freed():
            yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # their local variables hold tensors
        raise
    finally:
        if _allocated() > allocated:
            gc.collect()  # an exception and its frames refer to each other
        if _reserved() > reserved:
            torch.cuda.empty_cache()


def _allocated() -> int:
    """Return the bytes that tensors use on all GPUs."""
    return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))


def _reserved() -> int:
    """Return the bytes that PyTorch's allocator has reserved on all GPUs."""
    return sum(map(torch.cuda.memory_reserved, range(torch.cuda.device_count())))
