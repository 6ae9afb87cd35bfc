"""What reductions ask for: where several blocks of threads share one output, they meet in a staging buffer, counted by semaphores.

The rule is that of `setReduceConfig` in PyTorch's aten/src/ATen/native/cuda/Reduce.cuh, on the dimensions as TensorIterator sorts
and joins them (aten/src/ATen/TensorIterator.cpp). It depends on the shape and the strides, the size of an accumulator, and the
number of multiprocessors and of threads on each. Held against recordings from an H200 (torch 2.11, CUDA 13.0).
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import inf, prod
from typing import Any, NamedTuple

import torch

from virtualgpu.hardware import Gpu
from virtualgpu.ops import cub, operators
from virtualgpu.ops.call import CPU_KERNELS, Call, Work, device_time, handles, operator, temporaries
from virtualgpu.ops.half import widened
from virtualgpu.ops.sequence import Out, Plan, perform
from virtualgpu.ops.work import CHUNK, fastest, pointwise
from virtualgpu.tensor import VirtualTensor

aten = torch.ops.aten

Shape = tuple[int, ...]
NONE: Shape = ()
MAX_THREADS = 512
MAX_OUTPUT_VECTOR = 4
MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD = 16, 256
SEMAPHORE = 4  # bytes
# Clocks of a value, which a thread takes in after the one before, and of one whose place is computed
# from several dimensions. Clocks until the last of the blocks that share an output knows that it is
# the last one, and of each result of the others that a thread of it takes in.
VALUE, PLACED_VALUE = 105, 260
LAST_BLOCK, PARTIAL_RESULT = 5_000, 400
REDUCED_ROW, COMPARED_ROW = 42, 104  # clocks for each row that becomes one sum, or one extremum or variance
_LOW = (torch.float16, torch.bfloat16)


def staging(x: torch.Tensor, dims: Iterable[int], accumulator: int, itemsize: int | None = None) -> Shape:
    """Bytes of the staging buffer and of the semaphores of a reduction of `x` over `dims`; nothing where one block serves an output.

    `accumulator` is the size of a partial result; `itemsize` that of an element, if the kernel reads another type than that of `x`.
    """
    return buffers(launch_of(x, dims, itemsize), accumulator)


def launch_of(x: torch.Tensor, dims: Iterable[int], itemsize: int | None = None) -> "Launch | None":
    """How the threads of a reduction of `x` over `dims` are laid out. None without elements."""
    gpu: Gpu = x._gpu  # type: ignore[attr-defined]
    profile = gpu.profile
    size = itemsize or x.itemsize
    return launch(
        tuple(x.shape),
        x.stride(),
        tuple(dims),
        x.storage_offset() % MAX_OUTPUT_VECTOR,
        256 if size == 16 else MAX_THREADS,
        profile.multiprocessors,
        profile.max_threads_per_multiprocessor,
    )


def contiguous_staging(gpu: Gpu, numel: int, accumulator: int) -> Shape:
    """The same for all of a contiguous tensor of `numel` elements, a temporary of the operator."""
    profile = gpu.profile
    resident = profile.max_threads_per_multiprocessor
    threads = launch((numel,), (1,), (0,), 0, MAX_THREADS, profile.multiprocessors, resident)
    return buffers(threads, accumulator)


class Launch(NamedTuple):
    """How the threads of a reduction are laid out.

    Each thread takes in so many `values`, and so many `blocks` share an output. `lanes` threads of a
    block add up what these blocks found. Of `outputs` there are so many, `grid` blocks side by side
    have others, and a block has room for `partial` results. `pieces` are the dimensions that vanish,
    counted once if they lie as one.
    """

    values: int
    blocks: int
    lanes: int
    outputs: int
    grid: int
    partial: int
    pieces: int


def buffers(launch: Launch | None, accumulator: int) -> Shape:
    if launch is None or launch.blocks == 1:
        return NONE
    return accumulator * launch.outputs * launch.blocks * launch.partial, SEMAPHORE * launch.grid


@lru_cache(maxsize=4096)
def launch(shape: Shape, strides: Shape, dims: Shape, offset: int, max_threads: int, multiprocessors: int, resident: int) -> Launch | None:
    """What `launch_of` tells. Strides in elements; `resident` threads fit on a multiprocessor."""
    if not all(shape):
        return None
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
    blocks = 1
    if by_warps and values >= MAX_VALUES_PER_THREAD and grid <= target:
        blocks = max(min(-(-target // grid), -(-values // MIN_VALUES_PER_THREAD)), -(-values // MAX_VALUES_PER_THREAD))
    lanes = block_width * block_height if fast else block_height
    return Launch(-(-values // blocks), blocks, lanes, outputs, grid, 1 if fast else block_width * vector, len(reduced))


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


def _dims(call: Call) -> Iterable[int]:
    dims = call.argument("dim")
    if isinstance(dims, int):
        return (dims,)
    return dims or range(call.args[0].dim())


def _reduces(accumulator: Callable[[torch.dtype], int], *names: str) -> None:
    @temporaries(*names)
    def rule(call: Call, result: Any) -> Shape:
        x = call.args[0]
        return staging(x, _dims(call), accumulator(x.dtype))


_reduces(sum_bytes, "amax", "amin")
_reduces(index_bytes, "argmax", "argmin")
_reduces(pair_bytes, "aminmax", "_aminmax")
_reduces(moments_bytes, "var", "std", "var_mean", "std_mean")


@temporaries("any", "all")
def truths(call: Call, result: torch.Tensor) -> Shape:
    """A single number is converted and copied (aten/src/ATen/native/ReduceOps.cpp)."""
    x = call.args[0]
    if x.numel() == 1:
        return NONE if x.dtype is torch.bool else (1,)
    return staging(x, _dims(call), truth_bytes(x.dtype))


@temporaries("sum", "nansum", "prod", "mean", "linalg_vector_norm", "norm")
def sums(call: Call, result: torch.Tensor) -> Shape:
    """Another type than the result's is converted first, a copy of its own; float16 and bfloat16 to float32 needs none."""
    x = call.args[0]
    dtype = result.dtype
    dims = _dims(call)
    if dtype is x.dtype or (x.dtype in _LOW and dtype is torch.float32) or x.dtype.is_complex:
        return staging(x, dims, sum_bytes(dtype) if dtype is x.dtype or not x.dtype.is_complex else x.itemsize)
    return x.numel() * dtype.itemsize, *staging(x, dims, sum_bytes(dtype), dtype.itemsize)


def _without_nan(x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None) -> torch.Tensor:
    """`nansum`, of complex numbers too: CUDA leaves out those of which a part is NaN, the CPU has no kernel for them."""
    if x.dtype.is_complex:
        kind = dtype or x.dtype
        result = torch.where(x.isnan(), 0, widened(x)).sum(dim, keepdim, dtype=widened(kind)).to(kind)
        return result if out is None else out.resize_(result.shape).copy_(result)
    return aten.nansum.default(x, dim, keepdim, dtype=dtype) if out is None else aten.nansum.out(x, dim, keepdim, dtype=dtype, out=out)


CPU_KERNELS.update({aten.nansum.default: _without_nan, aten.nansum.out: _without_nan})


@temporaries("max", "min")
def extremes(call: Call, result: Any) -> Shape:
    """Over all: values alone. Over one dimension: with their indices. Of two tensors: no reduction."""
    x = call.args[0]
    if isinstance(result, torch.Tensor):
        return staging(x, range(x.dim()), sum_bytes(x.dtype)) if len(call.args) == 1 and not call.kwargs else NONE
    return staging(x, _dims(call), index_bytes(x.dtype))


@device_time("sum", "mean", "prod", "nansum", "linalg_vector_norm", "norm", "any", "all")
def summing(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    return _by_rows(call, results, moved, REDUCED_ROW)


@device_time("amax", "amin", "argmax", "argmin", "aminmax", "var", "std", "var_mean", "std_mean", "logsumexp", "max", "min")
def comparing(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    if torch.Tag.pointwise in call.func.tags:  # the larger one of two tensors
        return pointwise(call, results, moved)
    return _by_rows(call, results, moved, COMPARED_ROW)


def _by_rows(call: Call, results: list[torch.Tensor], moved: int, clocks: int) -> Work:
    """Rows that each become one element; where columns do, each thread goes down one of its own.

    If several blocks share an output, the last of them adds up what the others have found.
    """
    x = call.args[0]
    rows = results[0].numel() if results else 0
    if type(x) is not VirtualTensor or not 0 < rows < x.numel() or x.layout is not torch.strided:
        return Work(moved)
    dims = {d % x.dim() for d in (_dims(call) if "dim" in call.op.arguments else range(x.dim()))}
    each = clocks * rows if rows > 1 and fastest(x) in dims else 0.0
    threads = launch_of(x, dims)
    if threads is None:
        return Work(moved, clocks=each)
    serial = float(threads.values * (VALUE if threads.pieces == 1 else PLACED_VALUE))
    if threads.blocks > 1:
        serial += LAST_BLOCK + PARTIAL_RESULT * -(-threads.blocks // threads.lanes)
    return Work(moved, clocks=each, serial=serial)


def of_all(name: str, x: torch.Tensor) -> tuple[int, ...]:
    """A plan of the temporaries of a reduction of all elements, by the rule of its operator."""
    if x.numel() <= 1 << 13:
        return ()
    call = Call(operator(getattr(torch.ops.aten, name).default), (x,), {})
    rule = call.op.temporaries
    assert rule is not None, f"{name} is no reduction"
    sizes = [size for size in rule(call, torch.empty((), dtype=x.dtype, device="cpu")) if size]
    return (*sizes, *(-size for size in reversed(sizes)))


# Segments


@handles("segment_reduce", "_segment_reduce_backward")
def segments(call: Call) -> Any:
    """The lengths are checked by the host, and become offsets by a sum (aten/src/ATen/native/SegmentReduce.cpp)."""
    lengths = call.argument("lengths")
    if lengths is None or call.op.outs:
        return operators.compute_or_into_given(call)
    item, size = lengths.itemsize, lengths.numel() * lengths.itemsize
    rows = lengths.numel() // max(lengths.shape[-1], 1)
    scan = cub.scan(lengths.shape[-1] + 1, item) if lengths.dim() == 1 else 0
    plan: Plan = (Out(0), rows * item, size + rows * item, -rows * item, scan, -scan, -size - rows * item)
    if call.op.name == "_segment_reduce_backward":
        copy = 0 if call.args[0].is_contiguous() else call.args[0].numel() * call.args[0].itemsize
        plan = copy, *plan, -copy
    elif not call.argument("unsafe"):
        plan = item, -item, rows * 8, rows, 1, -1, -rows, -rows * 8, *plan
        call.common_gpu().read(1)
    return perform(call, plan)


# Norms of lists of tensors, as gradient clipping takes them, are computed chunk by chunk first (ForeachReduceOp.cu)
FUSED_ORDERS = (1, 2, inf)


@handles("_foreach_norm", "_foreach_max")
def foreach_norm(call: Call) -> Any:
    """A partial result for every chunk of every tensor, as many for each as the largest has, before the results."""
    tensors = call.args[0]
    order = call.argument("ord")
    fast = "out" not in call.kwargs and len({(x.dtype, x.device) for x in tensors}) == 1 and all(x.numel() for x in tensors)
    if "norm" in call.op.name:
        fast = fast and order in FUSED_ORDERS and tensors[0].dtype.is_floating_point
    if not fast:
        return operators.compute(call)
    gpu = call.common_gpu()
    chunks = max(-(-x.numel() // CHUNK) for x in tensors)
    item = sum_bytes(call.argument("dtype") or tensors[0].dtype)
    if "max" in call.op.name:
        item = tensors[0].itemsize
    partial = gpu.allocate(len(tensors) * chunks * item)
    try:
        return operators.compute(call)
    finally:
        if partial is not None:
            gpu.allocator.free(partial)
