"""What a kernel does beyond reading its operands and writing its results once: the rules behind an operator's device time.

Most kernels are bound by memory: their time is that of their bytes. Those below take longer, for one of these reasons. They read
something twice, or across its order in memory; they have so much to do for each element or row that the multiprocessors are what
keeps them; or one step has to wait for the one before. Where a part of PyTorch's sources is the reason, it stands beside the figure.

The figures, in clocks of one multiprocessor, are read off benchmarks/timing/kernels.json (one H200, torch 2.11), rounded; on another
GPU they count its own multiprocessors and its own clock.
"""

from collections.abc import Callable, Iterable
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from virtualgpu.ops.schemas import written
from virtualgpu.tensor import VirtualTensor, tensors

Tensor = torch.Tensor


class Work(NamedTuple):
    """What a kernel does.

    `bytes` of device memory that it moves; `flops` of matrix products in a `format` of `profiles.FORMATS`, whose results have so many
    elements; `clocks` of one multiprocessor, which all of them share, and `serial` ones that nobody can share; `around` are bytes that
    kernels of its own move before and after a product.
    """

    bytes: float
    flops: float = 0.0
    format: str = "float32"
    outputs: int = 0
    clocks: float = 0.0
    serial: float = 0.0
    around: float = 0.0


Rule = Callable[[Any, tuple, dict, list[Tensor], int], Work]
RULES: dict[str, Rule] = {}

# Pointwise kernels that cannot take a vector of elements at a time: clocks an element (ATen/native/cuda/CUDALoops.cuh).
UNVECTORIZED = 0.31
# Bytes that are read for an element whose neighbours in the output's order lie elsewhere: of a sector of 32 a part serves another.
SECTOR = 21
RANDOM = 0.35  # clocks an element, of Philox (ATen/native/cuda/DistributionTemplates.h)
# Lists of tensors go chunk by chunk, and reach three quarters of the memory's bandwidth (ATen/native/cuda/MultiTensorApply.cuh).
LISTS = 4 / 3
LONG_ROW = 1024  # elements; a longer row does not stay in the registers between two looks at it (ATen/native/cuda/PersistentSoftmax.cuh)
ROW_BLOCK = 366  # clocks of a block of threads that does one row (ATen/native/cuda/layer_norm_kernel.cu)
ROW_BLOCK_BACKWARD, LAYER_NORM_BACKWARD = 145, 1.2  # clocks a row, and an element, of which the weight's gradient takes most
CHANNEL, CHANNEL_BACKWARD = 0.9, 0.33  # elements a clock of the block that sums up one channel (ATen/native/cuda/Normalization.cuh)
REDUCED_ROW, COMPARED_ROW = 42, 104  # clocks for each row that becomes one sum, or one extremum or variance
SCANNED = 0.5  # clocks an element (ATen/native/cuda/ScanUtils.cuh)
STEP = 700  # clocks of a step that waits for memory, and that the next one waits for
SORTED = 3.1  # clocks an element and byte of its key: a pass of CUB's radix sort for each
SELECTED = SORTED / 2  # the same, where a few are chosen
ADDED = 1.3  # clocks an element that is added where others may be adding, too (atomicAdd)
POOLED, POOLED_BACKWARD = 0.3, 2.3  # clocks an element of the larger image (ATen/native/cuda/DilatedMaxPool2d.cu)
LOSS_ROW = 2  # clocks a row: one block adds up the loss of them all (ATen/native/cuda/Loss.cu)

OVERWRITES = {"fill_", "zero_"}
DRAWS = {"normal_", "uniform_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"}
CONVERTS = {"_to_copy"}  # pointwise kernels that take vectors of two types
ALSO_POINTWISE = {"clone", "masked_fill", "masked_fill_", "where", *CONVERTS}
SUMS = {"sum", "mean", "prod", "nansum", "linalg_vector_norm", "norm", "any", "all"}
COMPARES = {"max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "var", "std", "var_mean", "std_mean", "logsumexp"}


def work(func: Any, args: tuple, kwargs: dict, result: Any, moved: int) -> Work:
    """What the operator's kernel does, whose tensor arguments have `moved` bytes in all."""
    results = [result] if type(result) is VirtualTensor else list(tensors(result))
    for x in results:
        moved += x.numel() * x.itemsize
    rule = _rule(func)
    return Work(moved) if rule is None else rule(func, args, kwargs, results, moved)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Say what the kernels of these operators do."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


@cache
def _rule(func: Any) -> Rule | None:
    name = func._schema.name.removeprefix("aten::")
    if name in RULES:
        return RULES[name]
    if name.startswith(("_foreach_", "_fused_")):
        return of_lists
    if name in OVERWRITES:
        return overwriting
    if name in DRAWS:
        return drawing
    if name in ALSO_POINTWISE or torch.Tag.pointwise in func.tags:
        return pointwise
    if name in SUMS or name in COMPARES:
        return reduction
    if torch.Tag.nondeterministic_seeded in func.tags:
        return drawing_from
    return given_outputs if any(argument.is_out for argument in func._schema.arguments) else None


def bytes_of(x: Tensor) -> int:
    """Bytes of the elements."""
    return x.numel() * x.itemsize


def named(func: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """The arguments by name."""
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs


# Pointwise


def overwriting(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    """What is overwritten is not read."""
    return Work(moved - bytes_of(args[0]))


def drawing(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    return Work(moved - bytes_of(args[0]), clocks=RANDOM * args[0].numel())


def drawing_from(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    return Work(moved, clocks=RANDOM * max((x.numel() for x in results), default=0))


def given_outputs(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    return Work(moved - sum(map(bytes_of, _outputs(func, kwargs))))


def pointwise(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    """Operands that are of one type and lie in memory as the output does are read in vectors, all others one by one."""
    operands: list[Tensor] = []
    for x in args:
        if type(x) is VirtualTensor:
            if x.layout is not torch.strided:
                return Work(moved)
            if operands and (x is operands[0] or x is operands[-1]):
                moved -= bytes_of(x)  # read once
            else:
                operands.append(x)
    if kwargs:
        moved -= sum(map(bytes_of, _outputs(func, kwargs)))
    if not operands or not results or results[0].layout is not torch.strided:
        return Work(moved)
    output, kind = results[0], operands[0].dtype
    size, strides = output.shape, output.stride()
    for x in operands:
        if x.dtype is not kind or x.stride() != strides or x.shape != size:
            one_type = func._schema.name.removeprefix("aten::") in CONVERTS or all(x.dtype is kind for x in operands)
            return laid_out(output, operands, moved, one_type)
    return Work(moved)


def _outputs(func: Any, kwargs: dict) -> list[Tensor]:
    """The tensors that were given for results to be written into."""
    names = {argument.name for argument in func._schema.arguments if argument.is_out}
    return [x for name, x in kwargs.items() if name in names and isinstance(x, Tensor)]


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
            apart = max(x.stride(_fastest(output)), 1) * x.itemsize
            bytes += read * max(x.itemsize, min(apart, SECTOR)) - n * x.itemsize
    return Work(bytes, clocks=0.0 if vectors else UNVECTORIZED * n)


def _fastest(x: Tensor) -> int:
    """The dimension along which neighbours lie closest in memory, of a tensor with more than one element."""
    return min((stride, d) for d, (length, stride) in enumerate(zip(x.shape, x.stride(), strict=True)) if length > 1)[1]


def of_lists(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    changed = sum(map(bytes_of, written(func, args, kwargs)))
    if func._schema.name == "aten::_foreach_zero_":
        moved -= changed
    return Work(LISTS * (moved + (0 if results else changed)))


# Rows, channels and reductions


@rule("_softmax", "_log_softmax")
def softmax(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    """A long row is read twice."""
    long = args[0].dim() and args[0].shape[args[1]] > LONG_ROW
    return Work(1.5 * moved if long else moved)


@rule("_softmax_backward_data")
def softmax_backward(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    """The product of gradient and output is a kernel of its own (softmax_backward_cuda_out, ATen/native/cuda/SoftMax.cu)."""
    return Work(2 * moved)


@rule("native_layer_norm", "native_group_norm")
def layer_norm(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    return of_rows(args[0].numel(), results[1].numel(), moved)


def of_rows(elements: int, rows: int, moved: int) -> Work:
    """Rows that are normalized, each by a block of threads; a long one is read twice."""
    long = elements > LONG_ROW * rows
    return Work(1.5 * moved if long else moved, clocks=ROW_BLOCK * rows)


@rule("native_layer_norm_backward", "native_group_norm_backward")
def layer_norm_backward(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    mean = args[3] if "layer" in func._schema.name else args[2]
    return of_rows_backward(args[1].numel(), mean.numel(), moved)


def of_rows_backward(elements: int, rows: int, moved: int) -> Work:
    return Work(moved, clocks=LAYER_NORM_BACKWARD * elements + ROW_BLOCK_BACKWARD * rows)


@rule("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")
def batch_norm(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    """In training each channel is summed up by one block, whatever else the GPU could do meanwhile."""
    training = named(func, args, kwargs).get("training", True)
    return Work(moved, serial=_a_channel(args[0]) / CHANNEL if training else 0.0)


@rule("native_batch_norm_backward", "batch_norm_backward", "cudnn_batch_norm_backward")
def batch_norm_backward(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    return Work(moved, serial=_a_channel(args[1]) / CHANNEL_BACKWARD)


def _a_channel(x: Tensor) -> float:
    return x.numel() / x.shape[1] if x.numel() else 0.0


def reduction(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    """Rows that each become one element; where columns do, each thread goes down one of its own."""
    x = args[0]
    rows = results[0].numel() if results else 0
    if not isinstance(x, Tensor) or not 1 < rows < x.numel() or x.layout is not torch.strided:
        return Work(moved)
    dim = named(func, args, kwargs).get("dim") or 0
    dims = {d % x.dim() for d in (dim if isinstance(dim, (list, tuple)) else [dim])}
    name = func._schema.name.removeprefix("aten::")
    return Work(moved, clocks=(REDUCED_ROW if name in SUMS else COMPARED_ROW) * rows if _fastest(x) in dims else 0.0)


@rule("nll_loss_forward")
def loss(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    alone = results and results[0].dim() == 0
    return Work(moved - bytes_of(args[0]) + 32 * args[1].numel(), serial=LOSS_ROW * args[1].numel() if alone else 0.0)


# Order, positions and pictures


@rule("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")
def scan(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    """Along the last dimension many threads share a row; along another, one thread goes down each column step by step."""
    x, dim = args[0], named(func, args, kwargs)["dim"]
    if x.dim() and x.numel() and dim % x.dim() != x.dim() - 1 and x.numel() > x.shape[dim]:
        return Work(moved, serial=STEP * x.shape[dim])
    return Work(moved, clocks=SCANNED * x.numel())


@rule("sort", "argsort", "msort", "_unique2", "unique_dim")
def sort(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    return Work(moved, clocks=SORTED * bytes_of(args[0]))


@rule("topk", "kthvalue", "median", "nanmedian", "mode")
def select(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    return Work(moved, clocks=SELECTED * bytes_of(args[0]))


@rule("embedding", "index_select", "gather", "take", "index", "_unsafe_index")
def pick(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    """No more is read than is returned; what the second-level cache holds is read once."""
    table = args[0]
    chosen = sum(map(bytes_of, results))
    cached = bytes_of(table) <= table._gpu.profile.l2_bytes if type(table) is VirtualTensor else False
    return Work(moved - bytes_of(table) + (min(chosen, bytes_of(table)) if cached else chosen))


@rule("embedding_dense_backward", "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def add_at(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    given = named(func, args, kwargs)
    source = next(given[name] for name in ("grad_output", "source", "src") if name in given)
    return Work(moved, clocks=ADDED * source.numel())


@rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    return Work(moved, clocks=POOLED * args[0].numel())


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(func: Any, args: tuple, kwargs: dict, results: list[Tensor], moved: int) -> Work:
    return Work(moved, clocks=POOLED_BACKWARD * args[1].numel())
