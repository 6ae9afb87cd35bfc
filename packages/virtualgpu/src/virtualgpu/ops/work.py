"""What a kernel does beyond reading its operands and writing its results once: the default rule behind an operator's device time.

Most kernels are bound by memory: their time is that of their bytes. Some take longer, for one of these reasons. They read something
twice, or across its order in memory; they have so much to do for each element or row that the multiprocessors are what keeps them; or
one step has to wait for the one before. The families of operators say which (`call.device_time`), with the part of PyTorch's sources
that is the reason.

The figures, in clocks of one multiprocessor, are read off benchmarks/timing/kernels.json (one H200, torch 2.11), rounded; on another
GPU they count its own multiprocessors and its own clock.
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

# Pointwise kernels that cannot take a vector of elements at a time: clocks an element (ATen/native/cuda/CUDALoops.cuh).
UNVECTORIZED = 0.31
# Bytes that are read for an element whose neighbours in the output's order lie elsewhere: of a sector of 32 a part serves another.
SECTOR = 21
RANDOM = 0.35  # clocks an element, of Philox (ATen/native/cuda/DistributionTemplates.h)
# Lists of tensors go chunk by chunk, and reach less than the memory's bandwidth. A launch takes so
# many tensors, by the number of lists, and so many chunks. One block of threads needs so many clocks
# for a chunk, by the number of lists (ATen/native/cuda/MultiTensorApply.cuh).
LISTS = 4 / 3
CHUNK = 65536  # elements
LAUNCHED_CHUNKS = 320
LAUNCHED_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
CHUNK_CLOCKS = {1: 13_000, 2: 14_500, 3: 19_000, 4: 23_000, 5: 25_000}
# Host time, in launches, of each tensor of a list that changes (benchmarks/timing/host_functions.json).
# Where there are results, the time of their memory is more than that.
LISTED = 0.06
ALSO_POINTWISE = {"clone", "masked_fill", "masked_fill_", "where", "_to_copy"}  # besides those that PyTorch tags so
CONVERTS = {"_to_copy"}  # pointwise kernels that take vectors of two types


def work(call: Call, result: Any) -> Work:
    """What the operator's kernel does."""
    results: list[Tensor] = [result] if type(result) is VirtualTensor else list(tensors(result))
    moved = call.moved
    for x in results:
        moved += x.numel() * x.itemsize
    op = call.op
    rule = op.device_time
    if rule is None:
        rule = op.device_time = default_rule(op)
    return rule(call, results, moved)


def default_rule(op: Operator) -> DeviceTime:
    """The rule of an operator of which no family says anything."""
    if op.name.startswith(("_foreach_", "_fused_")):
        return of_lists
    if op.name in ALSO_POINTWISE or torch.Tag.pointwise in op.func.tags:
        return pointwise
    if torch.Tag.nondeterministic_seeded in op.func.tags:
        return drawing
    return bound_by_memory


def bound_by_memory(call: Call, results: list[Tensor], moved: int) -> Work:
    """Operands are read once, results written once. What is given for results was counted among the arguments already."""
    if call.kwargs and call.op.outs:
        moved -= sum(map(bytes_of, call.given_outputs()))
    return Work(moved)


def drawing(call: Call, results: list[Tensor], moved: int) -> Work:
    return Work(moved, clocks=RANDOM * max((x.numel() for x in results), default=0))


def pointwise(call: Call, results: list[Tensor], moved: int) -> Work:
    """Operands that are of one type and lie in memory as the output does are read in vectors, all others one by one."""
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
    """The work of a pointwise kernel whose operands may lie in memory in another order than its output."""
    size, strides, n = output.shape, output.stride(), output.numel()
    vectors, bytes = one_type, float(moved)
    for x in operands:
        if x.shape == size and x.stride() == strides:
            continue
        vectors = False
        if x.shape == size and n > 1:
            read = prod(length for length, stride in zip(size, x.stride(), strict=True) if stride)
            apart = max(x.stride(fastest(output)), 1) * x.itemsize
            bytes += read * max(x.itemsize, min(apart, SECTOR)) - n * x.itemsize
    return Work(bytes, clocks=0.0 if vectors else UNVECTORIZED * n)


def fastest(x: Tensor) -> int:
    """The dimension along which neighbours lie closest in memory, of a tensor with more than one element."""
    if x.shape[-1] > 1 and x.is_contiguous():
        return x.dim() - 1
    return min((stride, d) for d, (length, stride) in enumerate(zip(x.shape, x.stride(), strict=True)) if length > 1)[1]


def of_lists(call: Call, results: list[Tensor], moved: int) -> Work:
    changed = sum(map(bytes_of, call.written()))
    if call.op.overwrites:
        moved -= changed
    lists = [x for x in call.args if isinstance(x, (list, tuple)) and x and type(x[0]) is VirtualTensor]
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
    beyond = clocks_beyond_memory(profile, waiting * profile.multiprocessors, bytes) / profile.multiprocessors
    further = (kernels - 1) * profile.kernel_minimum_seconds * 1e3 * profile.sm_clock_khz
    return Work(bytes, serial=beyond + further, launches=0.0 if results else LISTED * len(sizes))
