"""The memory and time of reductions.

If several blocks of threads share an output, they exchange partial results in a staging buffer and
count with semaphores. The rule is that of `setReduceConfig` in PyTorch's
aten/src/ATen/native/cuda/Reduce.cuh. It applies to the dimensions as TensorIterator sorts and
merges them (aten/src/ATen/TensorIterator.cpp). It depends on the shape and strides, the size of an
accumulator, and the number of multiprocessors and of threads on each. Compared with recordings from
an H200 (torch 2.11, CUDA 13.0).
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
# Clocks of a value, which a thread adds after the previous one, and of a value whose address is
# computed from several dimensions.
VALUE, PLACED_VALUE = 105, 260
# Clocks until the last of the blocks that share an output knows that it is the last, and of each
# partial result of the others that a thread of this block adds.
LAST_BLOCK, PARTIAL_RESULT = 5_000, 400
# Clocks of each row that becomes one sum, and of each row that becomes an extremum or variance.
REDUCED_ROW, COMPARED_ROW = 42, 104
_LOW = (torch.float16, torch.bfloat16)


def staging(
    x: torch.Tensor, dims: Iterable[int], accumulator: int, itemsize: int | None = None
) -> Shape:
    """Return the bytes of the two buffers of a reduction of `x` over `dims`.

    They are the staging buffer and the semaphores. Returns () if one block of threads computes each
    output. `accumulator` is the bytes of a partial result. `itemsize` is the size of an element if
    the kernel reads another dtype than that of `x`.
    """
    return buffers(launch_of(x, dims, itemsize), accumulator)


def launch_of(x: torch.Tensor, dims: Iterable[int], itemsize: int | None = None) -> "Launch | None":
    """Return the layout of the threads that reduce `x` over `dims`.

    Returns None if `x` has no elements. `itemsize` is the size of an element if the kernel reads
    another dtype than that of `x`.
    """
    gpu: Gpu = x._gpu  # type: ignore[attr-defined]
    profile = gpu.profile
    size = itemsize or x.itemsize
    return launch(
        tuple(x.shape),
        x.stride(),
        tuple(dims),
        x.storage_offset() % MAX_OUTPUT_VECTOR,
        256 if size == 16 else MAX_THREADS,  # the most threads of a block
        profile.multiprocessors,
        profile.max_threads_per_multiprocessor,
    )


def contiguous_staging(gpu: Gpu, numel: int, accumulator: int) -> Shape:
    """Return the bytes of the buffers for reducing all `numel` elements of a contiguous temporary.

    `accumulator` is the bytes of a partial result.
    """
    profile = gpu.profile
    resident = profile.max_threads_per_multiprocessor
    threads = launch((numel,), (1,), (0,), 0, MAX_THREADS, profile.multiprocessors, resident)
    return buffers(threads, accumulator)


class Launch(NamedTuple):
    """The layout of the threads of a reduction.

    values: values that each thread adds
    blocks: blocks that share an output
    lanes: threads of a block that add the results of these blocks
    outputs: outputs of the reduction
    grid: blocks with different outputs
    partial: partial results per block
    pieces: reduced dimensions after merging
    """

    values: int
    blocks: int
    lanes: int
    outputs: int
    grid: int
    partial: int
    pieces: int


def buffers(launch: Launch | None, accumulator: int) -> Shape:
    """Return the bytes of the staging buffer and of the semaphores of a launch, or ().

    `accumulator` is the bytes of a partial result.
    """
    if launch is None or launch.blocks == 1:
        return NONE
    return accumulator * launch.outputs * launch.blocks * launch.partial, SEMAPHORE * launch.grid


@lru_cache(maxsize=4096)
def launch(
    shape: Shape,
    strides: Shape,
    dims: Shape,
    offset: int,
    max_threads: int,
    multiprocessors: int,
    resident: int,
) -> Launch | None:
    """Return the layout of the threads of a reduction over `dims`, or None without elements.

    Strides are in elements, and `offset` is the position of the first element in its storage. A
    block has at most `max_threads` threads, and `resident` threads fit on a multiprocessor.
    """
    if not all(shape):
        return None
    reduced_dims = {d % len(shape) for d in dims} if shape else set()
    reduced, kept = _merged(shape, strides, reduced_dims)
    inputs = prod(n for n, _ in reduced)  # per output
    outputs = prod(n for n, _ in kept)
    # Whether the fastest dimension is reduced.
    fast = not kept or (bool(reduced) and reduced[0][1] < kept[0][1])
    vector = 1
    width, height = (inputs, outputs) if fast else (outputs, inputs)
    is_contiguous = not kept and len(reduced) == 1 and reduced[0][1] == 1
    if fast and is_contiguous and width > 128:
        width //= 4  # each thread reads vectors along the input
    elif not fast and kept[0][1] == 1:
        vector = _output_vector(offset, kept, reduced)
        width //= vector
    block_width, block_height = _block(width, height, max_threads // vector)

    step_input, step_output = (block_width, 1) if fast else (1, block_width)
    threshold = min(block_height * MIN_VALUES_PER_THREAD, MAX_VALUES_PER_THREAD)
    by_warps = -(-inputs // step_input) >= threshold
    if by_warps:
        step_input *= block_height
    else:
        step_output *= block_height
    values = -(-inputs // step_input)
    grid = -(-(outputs // vector) // step_output)
    target = multiprocessors * (resident // (block_width * block_height))
    blocks = 1
    if by_warps and values >= MAX_VALUES_PER_THREAD and grid <= target:
        most = min(-(-target // grid), -(-values // MIN_VALUES_PER_THREAD))
        blocks = max(most, -(-values // MAX_VALUES_PER_THREAD))
    if fast:
        lanes, partial = block_width * block_height, 1
    else:
        lanes, partial = block_height, block_width * vector
    return Launch(-(-values // blocks), blocks, lanes, outputs, grid, partial, len(reduced))


def _merged(
    shape: Shape, strides: Shape, dims: set[int]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the reduced and the kept dimensions of a tensor, each list with the fastest first.

    A dimension is a pair (size, stride). `dims` are the reduced ones. Neighbours are merged if they
    are contiguous. Kept dimensions must also be contiguous in the output.
    """
    parts: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for kept in (False, True):
        mine = []
        for d in range(len(shape)):
            if (d not in dims) is kept and shape[d] != 1:
                mine.append((strides[d], -d, shape[d]))
        outer = 1
        strides_out = {}  # of the contiguous output
        for d in range(len(shape) - 1, -1, -1):
            if d not in dims:
                strides_out[-d] = outer
                outer *= shape[d]
        joined = parts[kept]
        last_out = (0, 0)
        for stride, d, n in sorted(mine):
            out = strides_out[d] if kept else 0
            contiguous = bool(joined) and joined[-1][0] * joined[-1][1] == stride
            if contiguous and (not kept or last_out[0] * last_out[1] == out):
                joined[-1] = joined[-1][0] * n, joined[-1][1]
                last_out = last_out[0] * n, last_out[1]
            else:
                joined.append((n, stride))
                last_out = n, out
    return parts


def _output_vector(offset: int, kept: list[tuple[int, int]], reduced: list[tuple[int, int]]) -> int:
    """Return the number of neighbouring outputs that one thread of a reduction computes.

    This number divides the fastest size, all other strides and the address. `offset` is the
    position of the first element, and `kept` and `reduced` are pairs (size, stride).
    """
    vector = MAX_OUTPUT_VECTOR
    other_strides = [stride for _, stride in (*kept[1:], *reduced)]
    for n in (offset, kept[0][0], *other_strides):
        while n % vector:
            vector //= 2
    return vector


def _block(width: int, height: int, max_threads: int) -> tuple[int, int]:
    """Return (width, height) of a block of threads, which are powers of two.

    `width` and `height` are the sizes of the dimensions that it covers. The width is at least a
    warp if the dimension is long enough.
    """
    width = min(max_threads, 1 << max(width, 1).bit_length() - 1)
    height = min(max_threads, 1 << max(height, 1).bit_length() - 1)
    block_height = min(height, max_threads // min(width, 32))
    return min(width, max_threads // block_height), block_height


# Sizes of accumulators in bytes


def sum_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of the accumulator of a sum of this dtype.

    It is float32 for half precision. Source: aten/src/ATen/AccumulateType.h.
    """
    if dtype in _LOW:
        return 4
    return dtype.itemsize


def index_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of an accumulator for a value of this dtype and its 64-bit index."""
    return 16


def truth_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of an accumulator for a truth value. They do not depend on the dtype."""
    return 1


def pair_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of an accumulator for a minimum and a maximum of this dtype."""
    return 2 * dtype.itemsize


def moments_bytes(dtype: torch.dtype) -> int:
    """Return the bytes of an accumulator for variances of this dtype.

    It is WelfordData: the mean, the squared deviations, and the count as two numbers.
    """
    if dtype is torch.float64:
        return 32
    return 16


# Operators


def _dims(call: Call) -> Iterable[int]:
    """Return the dimensions over which a call reduces its first argument."""
    dims = call.argument("dim")
    if isinstance(dims, int):
        return (dims,)
    return dims or range(call.args[0].dim())


def _reduces(accumulator: Callable[[torch.dtype], int], *names: str) -> None:
    """Register the staging buffer as the temporary memory of the reductions of these names.

    `accumulator` returns the bytes of a partial result for a dtype.
    """

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
    """Return the bytes of the temporaries of `any` and `all`.

    A single number is copied first. Source: aten/src/ATen/native/ReduceOps.cpp.
    """
    x = call.args[0]
    if x.numel() == 1:
        if x.dtype is torch.bool:
            return NONE
        return (1,)
    return staging(x, _dims(call), truth_bytes(x.dtype))


@temporaries("sum", "nansum", "prod", "mean", "linalg_vector_norm", "norm")
def sums(call: Call, result: torch.Tensor) -> Shape:
    """Return the bytes of the temporaries of a sum.

    If the result has another dtype, a converted copy is made first. Half precision needs no copy
    for a float32 result.
    """
    x = call.args[0]
    dtype = result.dtype
    dims = _dims(call)
    if dtype is x.dtype:
        return staging(x, dims, sum_bytes(dtype))
    if x.dtype.is_complex:
        return staging(x, dims, x.itemsize)
    if x.dtype in _LOW and dtype is torch.float32:
        return staging(x, dims, sum_bytes(dtype))
    return x.numel() * dtype.itemsize, *staging(x, dims, sum_bytes(dtype), dtype.itemsize)


def _without_nan(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: Any = None
) -> torch.Tensor:
    """Compute `nansum`, also of complex numbers, for which the CPU has no kernel.

    CUDA omits complex numbers with a NaN in either part.
    """
    if x.dtype.is_complex:
        kind = dtype or x.dtype
        result = (
            torch.where(x.isnan(), 0, widened(x)).sum(dim, keepdim, dtype=widened(kind)).to(kind)
        )
        if out is None:
            return result
        return out.resize_(result.shape).copy_(result)
    if out is None:
        return aten.nansum.default(x, dim, keepdim, dtype=dtype)
    return aten.nansum.out(x, dim, keepdim, dtype=dtype, out=out)


CPU_KERNELS.update({aten.nansum.default: _without_nan, aten.nansum.out: _without_nan})


@temporaries("max", "min")
def extremes(call: Call, result: Any) -> Shape:
    """Return the bytes of the temporaries of `max` and `min`.

    Over all elements they return values, and over one dimension also indices. With two tensors
    they are not reductions.
    """
    x = call.args[0]
    if isinstance(result, torch.Tensor):
        if len(call.args) > 1 or call.kwargs:
            return NONE
        return staging(x, range(x.dim()), sum_bytes(x.dtype))
    return staging(x, _dims(call), index_bytes(x.dtype))


@device_time("sum", "mean", "prod", "nansum", "linalg_vector_norm", "norm", "any", "all")
def summing(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a sum.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    return _by_rows(call, results, moved, REDUCED_ROW)


@device_time(
    "amax",
    "amin",
    "argmax",
    "argmin",
    "aminmax",
    "var",
    "std",
    "var_mean",
    "std_mean",
    "logsumexp",
    "max",
    "min",
)
def comparing(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a reduction that compares values or computes variances.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    if torch.Tag.pointwise in call.func.tags:  # the larger one of two tensors
        return pointwise(call, results, moved)
    return _by_rows(call, results, moved, COMPARED_ROW)


def _by_rows(call: Call, results: list[torch.Tensor], moved: int, clocks: int) -> Work:
    """Return the work of a reduction, with `clocks` for each row that becomes one element.

    If columns are reduced, each thread reads a column of its own. If several blocks share an
    output, the last of them adds the results of the others. `moved` is the bytes of all arguments
    and results.
    """
    x = call.args[0]
    rows = results[0].numel() if results else 0
    if type(x) is not VirtualTensor or not 0 < rows < x.numel() or x.layout is not torch.strided:
        return Work(moved)
    all_dims: Iterable[int] = range(x.dim())
    if "dim" in call.op.arguments:
        all_dims = _dims(call)
    dims = {d % x.dim() for d in all_dims}
    each = 0.0
    if rows > 1 and fastest(x) in dims:
        each = clocks * rows
    threads = launch_of(x, dims)
    if threads is None:
        return Work(moved, clocks=each)
    value_clocks = VALUE if threads.pieces == 1 else PLACED_VALUE
    serial = float(threads.values * value_clocks)
    if threads.blocks > 1:
        serial += LAST_BLOCK + PARTIAL_RESULT * -(-threads.blocks // threads.lanes)
    return Work(moved, clocks=each, serial=serial)


def of_all(name: str, x: torch.Tensor) -> tuple[int, ...]:
    """Return the memory plan of reducing all elements of `x` with the operator `name`."""
    if x.numel() <= 1 << 13:
        return ()
    call = Call(operator(getattr(torch.ops.aten, name).default), (x,), {})
    rule = call.op.temporaries
    assert rule is not None, f"{name} has no rule for temporaries"
    sizes = [size for size in rule(call, torch.empty((), dtype=x.dtype, device="cpu")) if size]
    return (*sizes, *(-size for size in reversed(sizes)))


# Segments


@handles("segment_reduce", "_segment_reduce_backward")
def segments(call: Call) -> Any:
    """Reduce segments. The host checks the lengths. A sum also converts the lengths to offsets.

    Source: aten/src/ATen/native/SegmentReduce.cpp.
    """
    lengths = call.argument("lengths")
    if lengths is None or call.op.outs:
        return operators.compute_or_into_given(call)
    item, size = lengths.itemsize, lengths.numel() * lengths.itemsize
    rows = lengths.numel() // max(lengths.shape[-1], 1)
    scan = cub.scan(lengths.shape[-1] + 1, item) if lengths.dim() == 1 else 0
    plan: Plan = (
        Out(0),
        rows * item,
        size + rows * item,
        -rows * item,
        scan,
        -scan,
        -size - rows * item,
    )
    if call.op.name == "_segment_reduce_backward":
        gradient = call.args[0]
        copy = 0 if gradient.is_contiguous() else gradient.numel() * gradient.itemsize
        plan = copy, *plan, -copy
    elif not call.argument("unsafe"):
        plan = item, -item, rows * 8, rows, 1, -1, -rows, -rows * 8, *plan
        call.common_gpu().read(1)
    return perform(call, plan)


# Gradient clipping computes norms of lists of tensors, first of each chunk (ForeachReduceOp.cu).
FUSED_ORDERS = (1, 2, inf)


@handles("_foreach_norm", "_foreach_max")
def foreach_norm(call: Call) -> Any:
    """Compute the norm of each tensor in a list, from partial results for its chunks.

    Each tensor gets as many partial results as the largest one has. They are allocated before
    the results.
    """
    tensors = call.args[0]
    order = call.argument("ord")
    kinds = {(x.dtype, x.device) for x in tensors}
    fast = "out" not in call.kwargs and len(kinds) == 1 and all(x.numel() for x in tensors)
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
