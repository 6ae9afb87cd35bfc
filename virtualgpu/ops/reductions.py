"""What reductions ask for: where several blocks of threads share one output, they meet in a staging buffer, counted by semaphores.

The rule is that of `setReduceConfig` in PyTorch's aten/src/ATen/native/cuda/Reduce.cuh, on the dimensions as TensorIterator sorts
and joins them (aten/src/ATen/TensorIterator.cpp). It depends on the shape and the strides, the size of an accumulator, and the
number of multiprocessors and of threads on each. Held against recordings from an H200 (torch 2.11, CUDA 13.0).
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import prod
from typing import Any

import torch

from virtualgpu.hardware import Gpu
from virtualgpu.ops.registry import temporaries

Shape = tuple[int, ...]
NONE: Shape = ()
MAX_THREADS = 512
MAX_OUTPUT_VECTOR = 4
MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD = 16, 256
SEMAPHORE = 4  # bytes
_LOW = (torch.float16, torch.bfloat16)


def staging(x: torch.Tensor, dims: Iterable[int], accumulator: int, itemsize: int | None = None) -> Shape:
    """Bytes of the staging buffer and of the semaphores of a reduction of `x` over `dims`; nothing where one block serves an output.

    `accumulator` is the size of a partial result; `itemsize` that of an element, if the kernel reads another type than that of `x`.
    """
    gpu: Gpu = x._gpu  # type: ignore[attr-defined]
    profile = gpu.profile
    size = itemsize or x.itemsize
    return launch_buffers(
        tuple(x.shape),
        x.stride(),
        tuple(dims),
        x.storage_offset() % MAX_OUTPUT_VECTOR,
        accumulator,
        256 if size == 16 else MAX_THREADS,
        profile.multiprocessors,
        profile.max_threads_per_multiprocessor,
    )


def contiguous_staging(gpu: Gpu, numel: int, accumulator: int) -> Shape:
    """The same for all of a contiguous tensor of `numel` elements, a temporary of the operator."""
    profile = gpu.profile
    resident = profile.max_threads_per_multiprocessor
    return launch_buffers((numel,), (1,), (0,), 0, accumulator, MAX_THREADS, profile.multiprocessors, resident)


@lru_cache(maxsize=4096)
def launch_buffers(
    shape: Shape, strides: Shape, dims: Shape, offset: int, accumulator: int, max_threads: int, multiprocessors: int, resident: int
) -> Shape:
    """The sizes in bytes that `staging` tells. Strides in elements; `resident` threads fit on a multiprocessor."""
    if not all(shape):
        return NONE
    reduced, kept = _merged(shape, strides, {d % len(shape) for d in dims} if shape else set())
    inputs = prod(n for n, _ in reduced)  # per output
    outputs = prod(n for n, _ in kept)
    fast = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])  # does the fastest dimension vanish?
    vector = 1
    width, height = (inputs, outputs) if fast else (outputs, inputs)
    if fast and not kept and reduced and reduced[0][1] == 1 and len(reduced) == 1 and width > 128:
        width //= 4  # each thread reads vectors along the input
    elif not fast and kept[0][1] == 1:
        vector = _output_vector(offset, kept, reduced)
        width //= vector
    block_width, block_height = _block(width, height, max_threads // vector)

    step_input, step_output = (block_width, 1) if fast else (1, block_width)
    by_warps = -(-inputs // step_input) >= min(block_height * MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD)
    if by_warps:
        step_input *= block_height
    else:
        step_output *= block_height
    values = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    target = multiprocessors * (resident // (block_width * block_height))
    if not by_warps or values < MAX_VALUES_PER_THREAD or grid > target:
        return NONE
    blocks = max(min(-(-target // grid), -(-values // MIN_VALUES_PER_THREAD)), -(-values // MAX_VALUES_PER_THREAD))
    if blocks <= 1:
        return NONE
    buffer = accumulator * outputs * blocks * (1 if fast else block_width * vector)
    return buffer, SEMAPHORE * grid


def _merged(shape: Shape, strides: Shape, dims: set[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Reduced and kept dimensions as (size, stride), fastest first, with neighbours joined where they lie as one."""
    parts: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for kept in (False, True):
        mine = [(strides[d], -d, shape[d]) for d in range(len(shape)) if (d not in dims) is kept and shape[d] != 1]
        outer = 1  # of the contiguous output: kept dimensions join only where the output's lie as one, too
        strides_out = {}
        for d in range(len(shape) - 1, -1, -1):
            if d not in dims:
                strides_out[-d] = outer
                outer *= shape[d]
        joined = parts[kept]
        last_out = (0, 0)
        for stride, d, n in sorted(mine):
            out = strides_out[d] if kept else 0
            if joined and joined[-1][0] * joined[-1][1] == stride and (not kept or last_out[0] * last_out[1] == out):
                joined[-1] = joined[-1][0] * n, joined[-1][1]
                last_out = last_out[0] * n, last_out[1]
            else:
                joined.append((n, stride))
                last_out = n, out
    return parts


def _output_vector(offset: int, kept: list[tuple[int, int]], reduced: list[tuple[int, int]]) -> int:
    """How many neighbouring outputs a thread computes: what divides the fastest size, all other strides and the address."""
    vector = MAX_OUTPUT_VECTOR
    for n in (offset, kept[0][0], *(stride for _, stride in kept[1:]), *(stride for _, stride in reduced)):
        while n % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, max_threads: int) -> tuple[int, int]:
    """Width and height of a block of threads, powers of two: at least a warp along the width, where it is that long."""
    width, height = (min(max_threads, 1 << max(n, 1).bit_length() - 1) for n in (width, height))
    block_height = min(height, max_threads // min(width, 32))
    return min(width, max_threads // block_height), block_height


# Accumulators


def sum_bytes(dtype: torch.dtype) -> int:
    """Half precision accumulates in float32, everything else in itself (aten/src/ATen/AccumulateType.h)."""
    return 4 if dtype in _LOW else dtype.itemsize


def index_bytes(dtype: torch.dtype) -> int:
    """A value and its index of 64 bits."""
    return 16


def truth_bytes(dtype: torch.dtype) -> int:
    return 1


def pair_bytes(dtype: torch.dtype) -> int:
    """A minimum and a maximum."""
    return 2 * dtype.itemsize


def moments_bytes(dtype: torch.dtype) -> int:
    """Mean, sum of squared deviations, and the count twice, as an integer of 32 bits and as a number (WelfordData)."""
    return 32 if dtype is torch.float64 else 16


# Operators


def _argument(func: Any, args: tuple, kwargs: dict, name: str) -> Any:
    position = _positions(func).get(name)
    if position is not None and position < len(args):
        return args[position]
    return kwargs.get(name)


@lru_cache(maxsize=1024)
def _positions(func: Any) -> dict[str, int]:
    return {argument.name: position for position, argument in enumerate(func._schema.arguments) if not argument.kwarg_only}


def _dims(func: Any, args: tuple, kwargs: dict) -> Iterable[int]:
    dims = _argument(func, args, kwargs, "dim")
    if isinstance(dims, int):
        return (dims,)
    return dims or range(args[0].dim())


def _reduces(accumulator: Callable[[torch.dtype], int], *names: str) -> None:
    @temporaries(*names)
    def rule(func: Any, args: tuple, kwargs: dict, result: Any) -> Shape:
        x = args[0]
        return staging(x, _dims(func, args, kwargs), accumulator(x.dtype))


_reduces(sum_bytes, "amax", "amin")
_reduces(index_bytes, "argmax", "argmin")
_reduces(truth_bytes, "any", "all")
_reduces(pair_bytes, "aminmax", "_aminmax")
_reduces(moments_bytes, "var", "std", "var_mean", "std_mean")


@temporaries("sum", "nansum", "prod", "mean", "linalg_vector_norm", "norm")
def sums(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> Shape:
    """Another type than the result's is converted first, a copy of its own; float16 and bfloat16 to float32 needs none."""
    x = args[0]
    dtype = result.dtype
    dims = _dims(func, args, kwargs)
    if dtype is x.dtype or (x.dtype in _LOW and dtype is torch.float32) or x.dtype.is_complex:
        return staging(x, dims, sum_bytes(dtype) if dtype is x.dtype or not x.dtype.is_complex else x.itemsize)
    return x.numel() * dtype.itemsize, *staging(x, dims, sum_bytes(dtype), dtype.itemsize)


@temporaries("max", "min")
def extremes(func: Any, args: tuple, kwargs: dict, result: Any) -> Shape:
    """Over all: values alone. Over one dimension: with their indices. Of two tensors: no reduction."""
    x = args[0]
    if isinstance(result, torch.Tensor):
        return staging(x, range(x.dim()), sum_bytes(x.dtype)) if len(args) == 1 and not kwargs else NONE
    return staging(x, _dims(func, args, kwargs), index_bytes(x.dtype))


@temporaries("mse_loss", "smooth_l1_loss")
def pointwise_losses(func: Any, args: tuple, kwargs: dict, result: torch.Tensor) -> Shape:
    """The losses of all elements, then their sum or mean (aten/src/ATen/native/Loss.cpp). `reduction` is 0 for none."""
    x, y = args[:2]
    reduction = _argument(func, args, kwargs, "reduction")
    if reduction == 0:
        return NONE
    shape = x.shape if x.shape == y.shape else torch.broadcast_shapes(x.shape, y.shape)
    numel = prod(shape)
    return numel * x.itemsize, *contiguous_staging(x._gpu, numel, sum_bytes(x.dtype))
