"""The plans that cuFFT keeps on each GPU, which `torch.backends.cuda.cufft_plan_cache` shows."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from virtualgpu.hardware import Gpu, Machine

MOST = 4096  # plans that a GPU keeps by default (aten/src/ATen/native/cuda/CuFFTPlanCache.h)


class FftPlans:
    """The cached plans of one GPU, least recently used first."""

    def __init__(self) -> None:
        self.most = MOST
        self._keys: OrderedDict[tuple, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def use(self, key: tuple) -> None:
        """Note that a transform uses the plan with this key."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        self._shrink()

    def resize(self, most: int) -> None:
        """Keep at most this number of plans. Raises RuntimeError for a negative number."""
        if most < 0:
            raise RuntimeError(f"cuFFT plan cache size must be non-negative, but got {most}")
        self.most = most
        self._shrink()

    def clear(self) -> None:
        """Forget all plans."""
        self._keys.clear()

    def _shrink(self) -> None:
        """Forget the least recently used plans until the limit is kept."""
        while len(self._keys) > self.most:
            self._keys.popitem(last=False)


def plans_of(gpu: Gpu) -> FftPlans:
    """Return the cached plans of a GPU. The first call creates the cache."""
    plans: FftPlans = gpu.libraries.setdefault("cufft", FftPlans())
    return plans


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    gpus = machine.gpus
    yield torch, {"_cufft_clear_plan_cache": lambda index: plans_of(gpus[index]).clear()}
    # These properties hold PyTorch's functions.
    properties = vars(torch.backends.cuda.cuFFTPlanCache)
    yield properties["size"], {"getter": lambda index: len(plans_of(gpus[index]))}
    yield (
        properties["max_size"],
        {
            "getter": lambda index: plans_of(gpus[index]).most,
            "setter": lambda index, most: plans_of(gpus[index]).resize(most),
        },
    )
