"""Sorting, selection by rank, scans, and drawing without replacement.

Sources: PyTorch's native/cuda/Sort.cpp and Sort.cu (small sorts up to 4096 elements, full and segmented radix sorts), TensorTopK.cu
(when several blocks share a slice), Sorting.cpp (median), ScanKernels.cpp, MultinomialKernel.cu and Distributions, Randperm.cu.
Checked against an H200 (PyTorch 2.11, CUDA 13.0) for 1 to 10,000,000 elements.
"""

from functools import lru_cache
from math import ceil, log, log2
from typing import Any

import torch

from virtualgpu.generators import chosen
from virtualgpu.hardware import Gpu
from virtualgpu.ops import cub, operators, registry
from virtualgpu.ops.sequence import OUT, Out, Plan, perform, play

aten = torch.ops.aten
SMALL_SORT = 4096  # elements along the dimension that a bitonic or a block's radix sort takes
FULL_SORT_BELOW = 128  # slices; from there on each slice is a segment of one segmented sort


def slices(x: torch.Tensor, dim: int) -> tuple[int, int]:
    """The number of slices along a dimension, and their length."""
    length = x.shape[dim] if x.dim() else 1
    return x.numel() // max(length, 1), length


@lru_cache(maxsize=4096)
def sort_plan(rows: int, n: int, itemsize: int, contiguous: bool, floating: bool) -> Plan:
    """What a sort allocates after its values and indices."""
    total = rows * n
    if n <= SMALL_SORT:
        return 8 * n, -8 * n
    around: tuple[int, ...] = () if contiguous else (total * itemsize, total * itemsize, 8 * total)
    if rows == 1:
        temp = cub.radix_sort(n, itemsize)
        inner: Plan = (8 * n, temp, -temp, -8 * n)
    elif rows < FULL_SORT_BELOW:
        # Sorted whole with pairs of (segment, position) as values, then by segment: a stable sort of keys alone.
        temp, keys = cub.radix_sort(total, itemsize), total * itemsize
        again = cub.radix_sort(total, 8, 0, bits=ceil(log2(rows)))
        inner = (8 * total, 8 * total, keys, temp, -temp, -keys, again, -again, -8 * total, -8 * total)
    else:
        temp = cub.segmented_sort(total, itemsize)
        inner = (8 * total, temp, -temp, -8 * total)
    return (*around, *inner, *(-size for size in reversed(around)))


def _sort_steps(x: torch.Tensor, dim: int) -> Plan:
    if x.dim() == 0 or x.numel() == 0:
        return ()
    rows, n = slices(x, dim)
    return sort_plan(rows, n, x.itemsize, x.stride(dim) == 1 or n == 1, x.dtype.is_floating_point)


@registry.handles("sort")
def sort(func: Any, args: tuple, kwargs: dict) -> Any:
    if "values" in kwargs:
        return operators.into_given(func, args, kwargs)
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    steps = _sort_steps(args[0], named.get("dim", -1))
    return perform(func, args, kwargs, lambda outputs: (Out(0), Out(1), *steps))


@registry.handles("median", "nanmedian")
def median(func: Any, args: tuple, kwargs: dict) -> Any:
    """Along a dimension by selection in place; of a whole tensor by sorting it, and a look at its last element for NaN."""
    if "values" in kwargs or "out" in kwargs:
        return operators.into_given(func, args, kwargs)
    if len(func._schema.returns) > 1:
        return operators.compute(func, args, kwargs)
    x = args[0]
    n, size = x.numel(), x.numel() * x.itemsize
    if n == 0:
        return operators.compute(func, args, kwargs)
    steps = sort_plan(1, n, x.itemsize, True, x.dtype.is_floating_point)
    plan = (size, 8 * n, *steps, -8 * n, 1, OUT, -1, -size)
    return perform(func, args, kwargs, lambda outputs: plan)


@lru_cache(maxsize=4096)
def topk_plan(rows: int, n: int, itemsize: int, multiprocessors: int) -> Plan:
    """A selection by several blocks a slice: counts of digits, their sums, and scans by slice."""
    if not shares_slices(rows, n):
        return ()
    threads, blocks_per_multiprocessor = 256, 65536 // (40 * 256)  # 40 registers a thread
    items = min(max(ceil(n * rows / (multiprocessors * blocks_per_multiprocessor * threads)), 4), 64)
    blocks = ceil(n / (items * threads)) * rows
    digits = 8 if itemsize == 8 else 4
    held = (rows * itemsize, 8 * rows, 2 * digits * rows, blocks * 512, rows * 1024, 4 * blocks, 4 * blocks)
    return (*held, 1279, -1279, 1279, -1279, *(-size for size in reversed(held)))


def shares_slices(rows: int, n: int) -> bool:
    """Does PyTorch put several blocks on a slice? (`should_use_multiblock` in TensorTopK.cu)"""
    bounds = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    return n >= next((length for most, length in bounds if rows <= most), 400)


@registry.handles("topk")
def topk(func: Any, args: tuple, kwargs: dict) -> Any:
    if "values" in kwargs:
        return operators.into_given(func, args, kwargs)
    x, k = args[0], args[1]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    rows, n = slices(x, dim)
    multiprocessors = operators.common_gpu(args, kwargs)[0].profile.multiprocessors
    steps = topk_plan(rows, n, x.itemsize, multiprocessors) if x.dim() else ()
    if k > SMALL_SORT and (args[4] if len(args) > 4 else kwargs.get("sorted", True)):
        chosen, places = rows * k * x.itemsize, rows * k * 8
        steps = (
            *steps,
            places,
            chosen,
            *sort_plan(rows, k, x.itemsize, True, x.dtype.is_floating_point),
            places,
            -places,
            -chosen,
            -places,
        )
    return perform(func, args, kwargs, lambda outputs: (Out(0), Out(1), *steps))


@registry.handles("cumsum", "cumprod", "logcumsumexp")
def scan(func: Any, args: tuple, kwargs: dict) -> Any:
    """One slice is scanned by CUB; several by PyTorch's own kernels, which need nothing. Another dtype is cast first."""
    if "out" in kwargs:
        return operators.into_given(func, args, kwargs)
    x = args[0]

    def plan(outputs: list[Any]) -> Plan:
        result = outputs[0]
        cast = result.numel() * result.itemsize if result.dtype is not x.dtype else 0
        whole = x.dim() and x.numel() == x.shape[args[1]] and x.numel()
        temp = cub.scan(x.numel(), result.itemsize) if whole else 0
        return OUT, cast, temp, -temp, -cast

    return perform(func, args, kwargs, plan)


def reduction(name: str, x: torch.Tensor) -> tuple[int, ...]:
    """The temporaries of a reduction of all elements, by the rule of its family."""
    rule = registry.TEMPORARIES.get(name)
    if rule is None:
        return ()
    func = getattr(aten, name).default
    sizes = [size for size in rule(func, (x,), {}, torch.empty((), dtype=x.dtype, device="cpu")) if size] if x.numel() > 1 << 13 else []
    return (*sizes, *(-size for size in reversed(sizes)))


@registry.handles("multinomial")
def multinomial(func: Any, args: tuple, kwargs: dict) -> Any:
    """With replacement from cumulated sums; without, by the largest of p / exponential, after a look for invalid probabilities."""
    if "out" in kwargs:
        return operators.draw(func, args, kwargs)
    gpu, moved = operators.common_gpu(args, kwargs)
    x, draws = args[0], args[1]
    replacement = args[2] if len(args) > 2 else kwargs.get("replacement", False)
    given = args[3] if len(args) > 3 else kwargs.get("generator")
    generator = chosen(given, gpu).next_draws(x.numel())
    rows, n = (1, x.shape[0]) if x.dim() == 1 else x.shape
    size = x.numel() * x.itemsize
    if replacement and draws > 1:
        plan: Plan = (OUT, size, size, size, -size, -size, -size)
    else:
        plan = _without_replacement(gpu, x, rows, n, draws)
    call = (x, draws, replacement)
    return perform(func, call, {"generator": generator}, lambda outputs: plan, gpu, moved)


def _without_replacement(gpu: Gpu, x: torch.Tensor, rows: int, n: int, draws: int) -> Plan:
    item, size = x.itemsize, x.numel() * x.itemsize
    # max < inf and min >= 0, read by the host; then no row whose sum is zero
    check: tuple[int, ...] = (item, *_extremes(gpu, x), 1, item, *_extremes(gpu, x), 1, 1, -1, -item, -1, -item)
    sums = (item, 1, -item) if x.dim() == 1 else (rows * item, rows, 1, -rows, -rows * item)
    chosen = rows * draws * item
    pick: tuple[int, ...] = () if draws == 1 else (chosen, *topk_plan(rows, n, item, gpu.profile.multiprocessors), -chosen)
    return (OUT, *check, *sums, 1, -1, size, *pick, -size, -1, -1)


def _extremes(gpu: Gpu, x: torch.Tensor) -> tuple[int, ...]:
    return reduction("max", x)


@registry.handles("randperm")
def randperm(func: Any, args: tuple, kwargs: dict) -> Any:
    """Sorts the numbers by random keys, of just so many bits that they hardly collide (`randperm_out_cuda`)."""
    result = operators.draw(func, args, kwargs) if "generator" in func._overloadname else operators.into_given(func, args, kwargs)
    n, item = result.numel(), result.itemsize
    if n:
        bits = min(64, ceil(log2(n - (6 * n * n + 1) / (12 * log(0.9)))))
        key = 4 if bits <= 32 else 8
        temp = cub.radix_sort(n, key, item, bits)
        play(result._gpu, (item, -item, n * item, n * key, n * key, temp, -temp, -n * key, -n * key, -n * item))
    return result
