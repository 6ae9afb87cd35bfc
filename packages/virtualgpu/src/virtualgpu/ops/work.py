"""The work of a kernel beyond reading its operands and writing its results once.

Most kernels are bound by memory, so their time is that of their bytes. Some take longer, for one of
these reasons: they read something twice, or against its order in memory; they do so much for each
element or row that the multiprocessors are the limit; or one step must wait for another. The
families of operators register such rules (`call.device_time`) and name the reason in PyTorch's
sources.

The figures are clocks of one multiprocessor, rounded, from benchmarks/timing/kernels.json (one
H200, torch 2.11). On another GPU they count its own multiprocessors and its own clock.
"""

from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from virtualgpu.clock.costs import clocks_beyond_memory
from virtualgpu.ops.call import Call, DeviceTime, Operator, Work, bytes_of
from virtualgpu.tensor import VirtualTensor, tensors

Tensor = torch.Tensor
_STRIDED = torch.strided

# Clocks per element of pointwise kernels that cannot use vectors of elements
# (ATen/native/cuda/CUDALoops.cuh).
UNVECTORIZED = 0.31
# Bytes read for an element whose neighbours are elsewhere in memory. Other elements use a part of
# its sector of 32 bytes.
SECTOR = 21
RANDOM = 0.35  # clocks per element of Philox (ATen/native/cuda/DistributionTemplates.h)
# Kernels on lists of tensors work chunk by chunk, with less than the memory's bandwidth. One launch
# takes a limited number of tensors, by the number of lists, and of chunks. A block of threads needs
# some clocks per chunk, by the number of lists (ATen/native/cuda/MultiTensorApply.cuh).
LISTS = 4 / 3
CHUNK = 65536  # elements
LAUNCHED_CHUNKS = 320
LAUNCHED_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
CHUNK_CLOCKS = {1: 13_000, 2: 14_500, 3: 19_000, 4: 23_000, 5: 25_000}
# Host time, in launches, of each tensor of a list that is changed
# (benchmarks/timing/host_functions.json). With results, the time of their memory exceeds this.
LISTED = 0.06
# Pointwise operators that PyTorch does not tag as such.
ALSO_POINTWISE = {"clone", "masked_fill", "masked_fill_", "where", "_to_copy"}
CONVERTS = {"_to_copy"}  # pointwise kernels that use vectors of two dtypes


def work(call: Call, result: Any) -> Work:
    """Return the work of the kernel of a call, whose results are given."""
    results: list[Tensor]
    if type(result) is VirtualTensor:
        results = [result]
    else:
        results = list(tensors(result))
    moved = call.moved
    for x in results:
        moved += x.numel() * x.itemsize
    op = call.op
    rule = op.device_time
    if rule is None:
        rule = op.device_time = default_rule(op)
    return rule(call, results, moved)


def default_rule(op: Operator) -> DeviceTime:
    """Return the function that gives the work of an operator without a rule of its own."""
    if op.name.startswith(("_foreach_", "_fused_")):
        return of_lists
    if op.name in ALSO_POINTWISE or torch.Tag.pointwise in op.func.tags:
        return pointwise
    if torch.Tag.nondeterministic_seeded in op.func.tags:
        return drawing
    return bound_by_memory


def bound_by_memory(call: Call, results: list[Tensor], moved: int) -> Work:
    """Return the work of a kernel that reads its operands once and writes its results once.

    Tensors given for results are already counted among the arguments.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    if call.kwargs and call.op.outs:
        moved -= sum(map(bytes_of, call.given_outputs()))
    return Work(moved)


def drawing(call: Call, results: list[Tensor], moved: int) -> Work:
    """Return the work of a kernel that draws random numbers.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    largest = max((x.numel() for x in results), default=0)
    return Work(moved, clocks=RANDOM * largest)


def pointwise(call: Call, results: list[Tensor], moved: int) -> Work:
    """Return the work of a pointwise kernel.

    Operands of one dtype with the memory layout of the output are read in vectors, others element
    by element.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    operands: list[Tensor] = []
    for x in call.args:
        if type(x) is VirtualTensor:
            if x.layout is not _STRIDED:
                return Work(moved)
            if operands and (x is operands[0] or x is operands[-1]):
                moved -= bytes_of(x)  # read once
            else:
                operands.append(x)
    if call.kwargs and call.op.outs:
        moved -= sum(map(bytes_of, call.given_outputs()))
    if not operands or not results or results[0].layout is not _STRIDED:
        return Work(moved)
    output, kind = results[0], operands[0].dtype
    size, strides = output.shape, output.stride()
    for x in operands:
        if x.dtype is not kind or x.stride() != strides or x.shape != size:
            one_type = call.op.name in CONVERTS or all(x.dtype is kind for x in operands)
            return laid_out(output, operands, moved, one_type)
    return Work(moved)


def laid_out(output: Tensor, operands: Iterable[Tensor], moved: int, one_type: bool = True) -> Work:
    """Return the work of a pointwise kernel whose operands may have different memory layouts.

    `moved` is the bytes of operands and output. `one_type` says whether all have one dtype. If so,
    and if the layouts are equal, the kernel reads vectors.
    """
    size, strides, n = output.shape, output.stride(), output.numel()
    vectors, bytes = one_type, float(moved)
    for x in operands:
        if x.shape == size and x.stride() == strides:
            continue
        vectors = False
        if x.shape == size and n > 1:
            lengths = zip(size, x.stride(), strict=True)
            read = prod(length for length, stride in lengths if stride)
            apart = max(x.stride(fastest(output)), 1) * x.itemsize
            bytes += read * max(x.itemsize, min(apart, SECTOR)) - n * x.itemsize
    return Work(bytes, clocks=0.0 if vectors else UNVECTORIZED * n)


def fastest(x: Tensor) -> int:
    """Return the dimension of `x` with the smallest stride. `x` has more than one element."""
    if x.shape[-1] > 1 and x.is_contiguous():
        return x.dim() - 1
    strides = enumerate(zip(x.shape, x.stride(), strict=True))
    return min((stride, dimension) for dimension, (length, stride) in strides if length > 1)[1]


def of_lists(call: Call, results: list[Tensor], moved: int) -> Work:
    """Return the work of an operator on lists of tensors.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    changed = sum(map(bytes_of, call.written()))
    if call.op.overwrites:
        moved -= changed
    lists = []
    for x in call.args:
        if isinstance(x, (list, tuple)) and x and type(x[0]) is VirtualTensor:
            lists.append(x)
    for number, x in enumerate(lists):
        if any(x[0] is y[0] for y in lists[:number]):
            moved -= sum(map(bytes_of, x))  # read once
    first = lists[0] if lists else ()
    sizes = [x.numel() for x in first]
    depth = min(max(1, len(lists) + bool(results)), max(LAUNCHED_TENSORS))
    chunks = sum(-(-size // CHUNK) for size in sizes)
    kernels = max(1, -(-len(sizes) // LAUNCHED_TENSORS[depth]), -(-chunks // LAUNCHED_CHUNKS))
    if not results:
        moved += changed
    profile, bytes = call.gpu.profile, LISTS * moved
    waiting = kernels * CHUNK_CLOCKS[depth] * min(1.0, max(sizes, default=0) / CHUNK)
    clocks = clocks_beyond_memory(profile, waiting * profile.multiprocessors, bytes)
    beyond = clocks / profile.multiprocessors
    further = (kernels - 1) * profile.kernel_minimum_seconds * 1e3 * profile.sm_clock_khz
    launches = 0.0
    if not results:
        launches = LISTED * len(sizes)
    return Work(bytes, serial=beyond + further, launches=launches)
