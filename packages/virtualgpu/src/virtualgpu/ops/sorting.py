"""Sorting, selection by rank, scans, counting and unique values: what each allocates and costs.

Sources: PyTorch's native/cuda/Sort.cpp and Sort.cu (small sorts up to 4096 elements, full and
segmented radix sorts), TensorTopK.cu (when several blocks share a slice), Sorting.cpp (median),
ScanKernels.cpp, Unique.cu and UniqueCub.cu, SummaryOps.cu.
Checked against an H200 (PyTorch 2.11, CUDA 13.0) for 1 to 10,000,000 elements.
"""

from functools import lru_cache
from math import ceil, log2
from typing import Any

import torch

from virtualgpu.errors import not_implemented
from virtualgpu.ops import cub, operators
from virtualgpu.ops.call import (
    CPU_KERNELS,
    Call,
    Work,
    bytes_of,
    cuda_kernel,
    device_time,
    handles,
    temporaries,
)
from virtualgpu.ops.gradients import reads_zeros
from virtualgpu.ops.half import lacks
from virtualgpu.ops.reductions import of_all
from virtualgpu.ops.sequence import OUT, Out, Plan, every_output, perform
from virtualgpu.tensor import VirtualTensor

aten = torch.ops.aten
SMALL_SORT = 4096  # elements along the dimension that a bitonic or a block's radix sort takes
SORTED = 3.1  # clocks an element and byte of its key: a pass of CUB's radix sort for each
SELECTED = SORTED / 2  # the same, where a few are chosen
# Clocks that a sort takes at least: in one block of threads, and in several passes over all blocks.
ONE_BLOCK, SEVERAL_PASSES = 34_000, 80_000
# Clocks that a selection takes at least, and of an element of a slice, which one block of threads
# reads several times. Longer slices are divided among blocks (ATen/native/cuda/TensorTopK.cu).
SELECTION, SELECTED_ELEMENT, DIVIDED = 12_000, 7, 1 << 14
SCANNED = 0.5  # clocks an element (ATen/native/cuda/ScanUtils.cuh)
STEP = 700  # clocks of a step that waits for memory, and that the next one waits for
FULL_SORT_BELOW = 128  # slices; from there on each slice is a segment of one segmented sort


# Formats that the CPU sorts and CUDA does not (ATen/native/cuda/Sort.cpp).
_UNSORTED = (torch.uint16, torch.uint32, torch.uint64)
lacks("sortKeyValueInplace", aten.sort, _UNSORTED)
cuda_kernel("sortKeyValueInplace", "sort")
cuda_kernel("topk_out_cuda", "topk")
cuda_kernel("cuda_mode", "mode")
cuda_kernel("nonzero_cuda", "nonzero")


def slices(x: torch.Tensor, dim: int) -> tuple[int, int]:
    """Return (number of slices of `x` along `dim`, length of each slice)."""
    length = x.shape[dim] if x.dim() else 1
    return x.numel() // max(length, 1), length


@lru_cache(maxsize=4096)
def sort_plan(rows: int, n: int, itemsize: int, contiguous: bool, floating: bool) -> Plan:
    """Return the memory plan of a sort, after its values and indices are allocated.

    It sorts `rows` slices of `n` elements of `itemsize` bytes. `contiguous` says whether a slice's
    elements are adjacent, and `floating` whether they are floating-point numbers.
    """
    total = rows * n
    if n <= SMALL_SORT:
        return 8 * n, -8 * n
    around: tuple[int, ...] = () if contiguous else (total * itemsize, total * itemsize, 8 * total)
    if rows == 1:
        temp = cub.radix_sort(n, itemsize)
        inner: Plan = (8 * n, temp, -temp, -8 * n)
    elif rows < FULL_SORT_BELOW:
        # First everything is sorted with pairs of (segment, position) as values, then by segment:
        # a stable sort of keys alone.
        temp, keys = cub.radix_sort(total, itemsize), total * itemsize
        again = cub.radix_sort(total, 8, 0, bits=ceil(log2(rows)))
        pairs, segments = 8 * total, 8 * total
        by_value: Plan = (keys, temp, -temp, -keys)
        inner = (pairs, segments, *by_value, again, -again, -segments, -pairs)
    else:
        temp = cub.segmented_sort(total, itemsize)
        inner = (8 * total, temp, -temp, -8 * total)
    return (*around, *inner, *(-size for size in reversed(around)))


def _sort_steps(x: torch.Tensor, dim: int) -> Plan:
    """Return the memory plan for sorting `x` along `dim`, after the outputs are allocated."""
    if x.dim() == 0 or x.numel() == 0:
        return ()
    rows, n = slices(x, dim)
    return sort_plan(rows, n, x.itemsize, x.stride(dim) == 1 or n == 1, x.dtype.is_floating_point)


@handles("sort")
def sort(call: Call) -> Any:
    """Run `sort` with its temporary memory."""
    if call.op.outs:
        return operators.into_given(call)
    steps = _sort_steps(call.args[0], call.argument("dim"))
    return perform(call, (Out(0), Out(1), *steps))


@device_time("sort", "argsort", "msort", "_unique2", "unique_dim")
def sort_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a sort, which grows with the number of bytes of its keys.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    x = call.args[0]
    serial = ONE_BLOCK if x.numel() <= SMALL_SORT else SEVERAL_PASSES
    return Work(moved, clocks=SORTED * bytes_of(x), serial=serial)


@device_time("topk", "kthvalue", "median", "nanmedian", "mode")
def select_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of selecting elements by rank, which grows with the length of the slices.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    x = call.args[0]
    length = x.numel()
    if x.dim() and "dim" in call.op.arguments:
        length = x.shape[call.argument("dim")]
    serial = SELECTION + SELECTED_ELEMENT * min(length, DIVIDED)
    return Work(moved, clocks=SELECTED * bytes_of(x), serial=serial)


@handles("median", "nanmedian")
def median(call: Call) -> Any:
    """Run `median` or `nanmedian` with its temporary memory.

    Along a dimension CUDA selects in place. The median of a whole tensor comes from a sort,
    whose last element shows whether there is a NaN.
    """
    if call.op.outs:
        return operators.into_given(call)
    if len(call.func._schema.returns) > 1:
        return operators.compute(call)
    x = call.args[0]
    n, size = x.numel(), x.numel() * x.itemsize
    if n == 0:
        return operators.compute(call)
    steps = sort_plan(1, n, x.itemsize, True, x.dtype.is_floating_point)
    plan = (size, 8 * n, *steps, -8 * n, 1, OUT, -1, -size)
    return perform(call, plan)


@lru_cache(maxsize=4096)
def topk_plan(rows: int, n: int, itemsize: int, multiprocessors: int) -> Plan:
    """Return the memory plan of selecting the largest elements of `rows` slices of `n` elements.

    Returns () unless several blocks of threads share each slice. The memory is for counts of
    digits, their sums, and scans of each slice. `itemsize` is the bytes of an element.
    """
    if not shares_slices(rows, n):
        return ()
    threads, blocks_per_multiprocessor = 256, 65536 // (40 * 256)  # 40 registers a thread
    items = min(
        max(ceil(n * rows / (multiprocessors * blocks_per_multiprocessor * threads)), 4), 64
    )
    blocks = ceil(n / (items * threads)) * rows
    digits = 8 if itemsize == 8 else 4
    per_slice = (rows * itemsize, 8 * rows, 2 * digits * rows)
    counts = (blocks * 512, rows * 1024, 4 * blocks, 4 * blocks)
    held = (*per_slice, *counts)
    return (*held, 1279, -1279, 1279, -1279, *(-size for size in reversed(held)))


def shares_slices(rows: int, n: int) -> bool:
    """Return whether several blocks of threads select elements of one slice together.

    There are `rows` slices of `n` elements. The limits are those of `should_use_multiblock` in
    TensorTopK.cu.
    """
    bounds = ((20, 20000), (40, 10000), (80, 8000), (199, 5000), (799, 3000), (4000, 800))
    for most_rows, least_length in bounds:
        if rows <= most_rows:
            return n >= least_length
    return n >= 400


@handles("topk")
def topk(call: Call) -> Any:
    """Run `topk` with the memory of the selection, and of the sort of the selected elements."""
    if call.op.outs:
        return operators.into_given(call)
    x, k = call.args[0], call.args[1]
    dim = call.argument("dim")
    rows, n = slices(x, dim)
    multiprocessors = call.common_gpu().profile.multiprocessors
    steps: Plan = ()
    if x.dim():
        steps = topk_plan(rows, n, x.itemsize, multiprocessors)
    if k > SMALL_SORT and call.argument("sorted"):
        chosen, places = rows * k * x.itemsize, rows * k * 8
        inner = sort_plan(rows, k, x.itemsize, True, x.dtype.is_floating_point)
        steps = (*steps, places, chosen, *inner, places, -places, -chosen, -places)
    return perform(call, (Out(0), Out(1), *steps))


@handles("cumsum", "cumprod", "logcumsumexp")
def scan(call: Call) -> Any:
    """Run a scan (cumulative sum, product or logcumsumexp) with its temporary memory.

    CUB scans a single slice. PyTorch's own kernels scan several slices and need no memory. If
    input and result differ in dtype, the input is converted first.
    """
    reads_zeros(call)
    if call.op.outs:
        return operators.into_given(call)
    x = call.args[0]

    def plan(outputs: list[Any]) -> Plan:
        """Return the memory plan of a scan. `outputs` holds the result.

        It has the converted input and CUB's temporary storage.
        """
        result = outputs[0]
        cast = copy = temp = 0
        if result.dtype is not x.dtype:
            cast = result.numel() * result.itemsize
        elif not x.is_contiguous():
            copy = bytes_of(x)
        if x.dim() and x.numel() and x.numel() == x.shape[call.args[1]]:
            temp = cub.scan(x.numel(), result.itemsize)
        return OUT, cast, copy, temp, -temp, -copy, -cast

    return perform(call, plan)


@device_time("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def scan_time(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of a scan.

    Along the last dimension many threads share a row. Along another dimension, one thread
    processes a column step by step.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    x, dim = call.args[0], call.argument("dim")
    if x.dim() and x.numel() and dim % x.dim() != x.dim() - 1 and x.numel() > x.shape[dim]:
        return Work(moved, serial=STEP * x.shape[dim])
    return Work(moved, clocks=SCANNED * x.numel())


# Counting and unique values.


def _extreme_values(x: torch.Tensor) -> Plan:
    """Return the memory plan for finding the smallest and the largest element of `x`."""
    size = x.itemsize
    return size, *of_all("min", x), -size, size, *of_all("max", x), -size


def _read_extremes(x: VirtualTensor) -> None:
    """Let the host wait for the smallest and the largest element of `x`, and read them."""
    for _ in range(2):
        x._gpu.read(x.itemsize)


@handles("bincount")
def bincount(call: Call) -> Any:
    """Run `bincount`. The host first reads the extreme values, for the output's size."""
    if "out" in call.kwargs or call.args[0].numel() == 0:
        return operators.compute(call)
    plan = (*_extreme_values(call.args[0]), OUT)
    _read_extremes(call.args[0])
    return perform(call, plan)


def _counting(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute `histc` on the CPU, also for integers, which only CUDA's kernel counts.

    Raises RuntimeError for float16 (aten/src/ATen/native/cuda/SummaryOps.cu).
    """
    if x.dtype is torch.float16:
        raise RuntimeError("HalfTensor is not supported")
    counted = x if x.dtype.is_floating_point else x.double()
    made = aten.histc.default(counted, *args, **kwargs)
    return made.to(x.dtype)


CPU_KERNELS[aten.histc.default] = _counting
lacks("histc", aten.histc, (torch.bfloat16,))


@handles("histc")
def histc(call: Call) -> Any:
    """Run `histc`. If the call gives no range, the host reads the extreme values."""
    if call.op.outs:
        return operators.into_given(call)
    if call.args[0].is_complex():
        raise not_implemented("histc", call.args[0].dtype)
    plan: Plan = (OUT,)
    if call.argument("min") == call.argument("max") and call.args[0].numel():
        plan = (OUT, *_extreme_values(call.args[0]))
        _read_extremes(call.args[0])
    return perform(call, plan)


@temporaries("mode")
def mode(call: Call, result: Any) -> tuple[int, ...]:
    """Return the bytes of a copy with contiguous slices, if one is needed.

    Source: aten/src/ATen/native/cuda/TensorModeKernel.cpp.
    """
    x = call.args[0]
    if x.dim() > 1 and call.argument("dim") % x.dim() != x.dim() - 1:
        return (bytes_of(x),)
    return ()


@handles("repeat_interleave")
def repeat_interleave(call: Call) -> Any:
    """Run `repeat_interleave` for a tensor that holds numbers of repeats.

    A scan computes where the repeats of each element end. Unless `output_size` is given, the
    host reads the total number of repeats.
    """
    repeats = call.args[0]
    if call.op.outs or repeats.dim() != 1 or not repeats.numel():
        return operators.shape_from_values(call)
    sums, scan, n = 8 * repeats.numel(), cub.scan(repeats.numel(), 8), repeats.numel()
    checks: Plan = (n, 1, -1, -n)
    if call.argument("output_size") is not None:
        checks = ()
    else:
        call.common_gpu().read(8)
    return perform(call, (sums, scan, -scan, *checks, OUT, -sums))


@handles("_unique2")
def unique(call: Call) -> Any:
    """Run `_unique2`: sort, then select the elements that differ from their predecessor.

    If the inverse is requested, the positions are sorted, too.
    """
    x = call.args[0]
    inverse, counts = call.argument("return_inverse"), call.argument("return_counts")
    n, item = x.numel(), x.itemsize
    if n:
        x._gpu.read(8)  # how many there are
    if n == 0 or x.dtype is torch.bool:
        return perform(call, every_output)
    keys, places = n * item, 8 * n
    if inverse:
        temp, steps = cub.radix_sort(n, item, 8), cub.int_scan(n)
        sorting: Plan = (keys, places, places, temp, -temp, -places)
        begin: Plan = (*sorting, Out(1, places), places, steps, -steps, -places)
        end: Plan = (-places, -keys)
    else:
        temp = cub.radix_sort(n, item, 0, floating=x.dtype.is_floating_point)
        begin = (keys, temp, -temp)
        end = (-keys,)
    plan = (*begin, *_compaction(n, item, bool(counts)), *end)
    return perform(call, plan)


@handles("_unique")
def unique_unordered(call: Call) -> Any:
    """Run `_unique`, for which CUDA sorts, too."""
    x = call.argument("self")
    return aten._unique2.default(x, call.argument("sorted"), call.argument("return_inverse"))[:2]


def _compaction(n: int, item: int, counts: bool) -> Plan:
    """Return the memory plan of keeping the values that differ from their predecessor.

    There are `n` values of `item` bytes. With `counts`, equal values are counted, too. While CUB
    fills the output, the output has room for all n values.
    """
    if counts:
        temp = cub.run_lengths(n)
        return Out(0, n * item), 8, Out(2, 8 * n), temp, -temp, -8
    temp = cub.select(n, item)
    return Out(0, n * item), 8, temp, -temp, -8


@handles("unique_consecutive")
def unique_consecutive(call: Call) -> Any:
    """Run `unique_consecutive`. The host reads the number of values."""
    x = call.args[0]
    n = x.numel()
    if n:
        x._gpu.read(8)  # how many there are
    if n == 0 or call.argument("dim") is not None:
        return perform(call, every_output)
    begin: Plan = ()
    if call.argument("return_inverse"):
        scan_bytes = cub.int_scan(n)
        begin = (Out(1, 8 * n), 4 * n, scan_bytes, -scan_bytes, -4 * n)
    plan = (*begin, *_compaction(n, x.itemsize, bool(call.argument("return_counts"))))
    return perform(call, plan)


@handles("isin")
def isin(call: Call) -> torch.Tensor:
    """Run `isin` (native/TensorCompare.cpp).

    A small number of test elements is compared with every element. Otherwise elements and tests
    are sorted together, and those that occur twice are kept.
    """
    elements, tests = call.args[:2]
    unique, invert = call.argument("assume_unique"), call.argument("invert")
    are_tensors = isinstance(elements, torch.Tensor) and isinstance(tests, torch.Tensor)
    if call.op.outs or not are_tensors or not elements.numel():
        return operators.compute_or_into_given(call)
    if any(x.is_complex() or x.dtype is torch.bool for x in (elements, tests)):
        return operators.compute(call)  # PyTorch refuses these types on every device
    result = elements.new_empty(elements.shape, dtype=torch.bool)
    if tests.numel() < int(10 * elements.numel() ** 0.145):
        alike = elements.unsqueeze(-1) == tests.reshape(-1)
        if invert:
            return result.copy_(alike.any(-1).logical_not_())
        return result.copy_(alike.any(-1))
    order = None
    if unique:
        first, second = elements.reshape(-1), tests.reshape(-1)
    else:
        first, order = aten._unique.default(elements, False, True)
        second = aten._unique.default(tests, False)[0]
    values, places = torch.cat([first, second]).sort(stable=True)
    twice = torch.empty_like(values, dtype=torch.bool)
    if invert:
        twice[:-1].copy_(values[1:] != values[:-1])
    else:
        twice[:-1].copy_(values[1:] == values[:-1])
    twice[-1:].fill_(invert)
    mask = torch.empty_like(twice).index_copy_(0, places, twice)
    if order is None:
        return result.copy_(mask[: elements.numel()].view(elements.shape))
    return result.copy_(mask[order].view(elements.shape))
