"""Indexing, gathering, embeddings, and what finds its own output's size: nonzero, masks, unique, bincount.

Sources: PyTorch's native/TensorAdvancedIndexing.cpp and native/cuda/Indexing.cu (index_put with accumulation sorts the positions),
IndexingUtils, Nonzero.cu, Unique.cu and UniqueCub.cu, Embedding.cu with EmbeddingBackwardKernel.cu, EmbeddingBag.cu, SummaryOps.cu.
Checked against an H200 (PyTorch 2.11, CUDA 13.0) for 1 to 10,000,000 elements.
"""

from functools import lru_cache
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import errors
from virtualgpu.hardware import Gpu
from virtualgpu.ops import cub, operators, registry, without_values
from virtualgpu.ops.sequence import OUT, Out, Plan, perform, play
from virtualgpu.ops.sorting import reduction
from virtualgpu.tensor import VirtualTensor, wrap

aten = torch.ops.aten
_graph_task, _node = torch._C._current_graph_task_id, torch._C._current_autograd_node

# Backward formulas that fill zeros of their own in place; where a subclass or a mode is about they take the operator that copies.
FILLS_OWN_ZEROS = {
    "scatter_add": {"GatherBackward0", "CummaxBackward0", "CumminBackward0"},
    "index_add": {"IndexSelectBackward0"},
    "index_put": {"IndexBackward0", "UnsafeIndexBackward0"},
    "masked_scatter": {"MaskedSelectBackward0"},
    "put": {"TakeBackward0"},
    "scatter": {
        "SortBackward0", "SortBackward1", "TopkBackward0", "KthvalueBackward0", "MedianBackward1", "NanmedianBackward1",
        "ModeBackward0", "MaxBackward0", "MinBackward0",
    },
}  # fmt: skip


def own_zeros(func: Any) -> bool:
    """Is this a backward formula's operator on zeros that nobody else holds?"""
    return _graph_task() != -1 and _node().name() in FILLS_OWN_ZEROS[func._schema.name[6:]]


@registry.handles("scatter_add", "scatter", "index_add", "put")
def scatter(func: Any, args: tuple, kwargs: dict) -> Any:
    if "out" in kwargs:
        return operators.into_given(func, args, kwargs)
    return in_place(func, args, kwargs) if own_zeros(func) else operators.compute(func, args, kwargs)


def in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    """The variant that writes into its first argument."""
    writing = getattr(getattr(aten, func._schema.name[6:] + "_"), func._overloadname)
    operators.mixed(writing, args, kwargs)
    return args[0]


# Positions and masks


def check_indices(x: torch.Tensor, indices: Any) -> None:
    """Raises RuntimeError, as CUDA does, for an index on another GPU, or on a GPU where the tensor is on the CPU."""
    home = x._gpu if type(x) is VirtualTensor else None
    for index in indices:
        if type(index) is VirtualTensor and index._gpu is not home:
            raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({x.device})")


def is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@lru_cache(maxsize=4096)
def nonzero_plan(n: int, dims: int, found: int, multiprocessors: int, out: "int | Out | None" = None) -> Plan:
    """The places of n elements' nonzero ones: counted, then selected. `out` is the step that makes room for the result."""
    size, temp = 8 * dims * found, cub.count(n, multiprocessors)
    if n == 0:
        return (out or size,)
    return 4, temp, -temp, out or size, cub.select(n, 8), -cub.select(n, 8), -4


def _found(mask: torch.Tensor) -> int:
    with _DisableTorchDispatch():
        return int(mask.count_nonzero())


def find_positions(gpu: Gpu, indices: Any) -> None:
    """The host waits for the number of a mask's positions, and while those that it has itself go to the GPU.

    It does not wait for the positions of a mask of its own, from torch 2.9 on (expandTensors, ATen/native/IndexingUtils.h).
    """
    for index in indices:
        if type(index) is VirtualTensor:
            if is_mask(index):
                gpu.read(8)
        elif index is not None and (not is_mask(index) or errors.VERSION < (2, 9)):
            gpu.send(8 * (_found(index) * index.dim() if is_mask(index) else index.numel()))


def fills(indices: Any, values: torch.Tensor) -> bool:
    """Is this one value of the host's under one mask (canDispatchToMaskedFill, ATen/native/TensorAdvancedIndexingUtils.h)?"""
    given = [index for index in indices if index is not None]
    alone = len(given) == 1 and is_mask(given[0]) and type(given[0]) is VirtualTensor
    return alone and values.numel() == 1 and type(values) is not VirtualTensor


def places(x: torch.Tensor, indices: Any) -> tuple[Plan, list[int], Plan]:
    """What turning the indices into positions allocates, the positions of each indexed dimension, and the frees of what it keeps."""
    steps: list[Any] = []
    kept: list[int] = []
    counts: list[int] = []
    for index in indices:
        if index is None:
            continue
        if is_mask(index):
            count = _found(index)
            if type(index) is VirtualTensor:
                steps += nonzero_plan(index.numel(), index.dim(), count, index._gpu.profile.multiprocessors)
            else:
                steps.append(8 * index.dim() * count)
            kept.append(8 * index.dim() * count)
            counts += [count] * index.dim()
        else:
            counts.append(index.numel())
            if type(index) is not VirtualTensor:
                steps.append(8 * index.numel())
                kept.append(8 * index.numel())
    return tuple(steps), counts, tuple(-size for size in reversed(kept))


@registry.handles("index", "_unsafe_index")
def index(func: Any, args: tuple, kwargs: dict) -> Any:
    x, indices = args[0], args[1]
    check_indices(x, indices)
    gpu, moved = operators.common_gpu(tuple(y for y in operators.tensors(args) if type(y) is VirtualTensor), {})
    find_positions(gpu, indices)
    if "out" in kwargs or not without_values.all_known(indices):
        return operators.mixed(func, args, kwargs)
    before, _, behind = places(x, indices)
    return perform(func, args, kwargs, lambda outputs: (*before, OUT, *behind), gpu, moved)


@registry.handles("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def index_put(func: Any, args: tuple, kwargs: dict) -> Any:
    """With accumulation the positions are sorted; otherwise the kernel needs nothing. One value from the host under a mask is a fill."""
    x, indices, values = args[0], args[1], args[2]
    check_indices(x, indices)
    if type(x) is not VirtualTensor:
        raise operators.different_devices(args, kwargs)
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    unsafe = args[4] if len(args) > 4 else kwargs.get("unsafe", False)
    own = func is aten.index_put.default and own_zeros(func)
    plan: Plan = ()
    filled = not accumulate and fills(indices, values)
    if not filled:
        if type(values) is not VirtualTensor:
            x._gpu.send(values.itemsize)
        find_positions(x._gpu, indices)
    if not filled and without_values.all_known(indices):
        before, counts, behind = places(x, indices)
        if accumulate:
            plan = (*before, *_accumulate(x, indices, counts, check=not own and not unsafe, behind=behind))
        else:
            plan = (*before, *behind)
    result = in_place(func, args, kwargs) if own else operators.mixed(func, args, kwargs)
    play(x._gpu, plan)
    return result


def _accumulate(x: torch.Tensor, indices: Any, counts: list[int], check: bool, behind: Plan) -> Plan:
    """`index_put_with_sort_kernel`: one linear position an element, sorted beside its place of origin."""
    found = [i for i in indices if i is not None]
    n = max(counts, default=0)
    if n == 0:
        return behind
    size = 8 * n
    steps: list[int] = []
    on_host = [type(i) is not VirtualTensor for i in found]
    if check:
        for i in found:  # the largest and the smallest, compared and read
            if not is_mask(i) and type(i) is VirtualTensor:
                steps += [8, *reduction("max", i), 1, -1, -8] * 2
    if all(on_host) and not any(map(is_mask, found)):
        behind = ()  # the positions are computed on the host, and moved once
        steps = []
    elif len(counts) == 1 and not any(map(is_mask, found)):
        steps += [size, size, -size]  # wrapped, times the stride
    else:
        steps += [size, size, -size, *[size, size, -size, -size] * (len(counts) - 1)] if len(counts) > 1 else [size, size, -size]
    if any(map(is_mask, found)):
        steps += behind
    bits = (x.numel() // max(_slice(x, indices), 1)).bit_length()
    temp = cub.radix_sort(n, 8, 8, max(bits, 1))
    steps += [size, size, size, temp, -temp, *[-size] * 4]
    if not any(map(is_mask, found)):
        steps += behind
    return tuple(steps)


def _slice(x: torch.Tensor, indices: Any) -> int:
    """Elements that one position stands for: those of the dimensions behind the last index."""
    dims = sum(i.dim() if is_mask(i) else 1 for i in indices)
    return int(torch.Size(x.shape[dims:]).numel())


@registry.handles("nonzero")
def nonzero(func: Any, args: tuple, kwargs: dict) -> Any:
    if kwargs:
        return operators.into_given(func, args, kwargs)
    x = args[0]
    gpu, moved = operators.common_gpu(args, kwargs)
    gpu.read(8)
    sms = gpu.profile.multiprocessors
    return perform(func, args, kwargs, lambda outputs: nonzero_plan(x.numel(), x.dim(), outputs[0].shape[0], sms, OUT), gpu, moved)


@registry.handles("masked_select")
def masked_select(func: Any, args: tuple, kwargs: dict) -> Any:
    """The places of the mask's nonzero elements, then a gather."""
    if kwargs:
        return operators.into_given(func, args, kwargs)
    x, mask = args
    gpu, moved = operators.common_gpu(args, kwargs)
    gpu.read(8)
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    n, dims, sms = shape.numel(), max(len(shape), 1), gpu.profile.multiprocessors

    def plan(outputs: list[Any]) -> Plan:
        found = outputs[0].numel()
        return *nonzero_plan(n, dims, found, sms), OUT, -8 * dims * found

    return perform(func, args, kwargs, plan, gpu, moved)


@registry.handles("masked_scatter", "masked_scatter_")
def masked_scatter(func: Any, args: tuple, kwargs: dict) -> Any:
    """Where each masked element takes its value from is a scan of the mask, in 64-bit numbers."""
    own = func is aten.masked_scatter.default and own_zeros(func)
    result = in_place(func, args, kwargs) if own else operators.compute(func, args, kwargs)
    n = result.numel()
    if n:
        play(result._gpu, (8 * n, cub.scan(n, 8), -cub.scan(n, 8), -8 * n))
    return result


@registry.handles("masked_scatter_backward")
def masked_scatter_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    """The gradients under the mask, filled up with zeros for the values that were not taken."""
    grad, mask, sizes = args
    taken = grad.masked_select(mask)
    rest = torch.Size(sizes).numel() - taken.numel()
    return (torch.cat([taken, taken.new_zeros(rest)]) if rest > 0 else taken).view(sizes)


# Embeddings

ATOMIC_UP_TO = 3072  # indices whose gradients are added by atomic operations; more are sorted
ROWS_A_THREAD = 10


@lru_cache(maxsize=4096)
def sorted_gradient(n: int, rows: int, columns: int, item: int, grad: int, by_frequency: bool) -> Plan:
    """`embedding_backward_cuda_kernel`: sorted indices, their segments, partial sums of segments in float32."""
    size = n * item
    temp, segments = cub.radix_sort(n, item, item), min(n, rows)
    partial = n // ROWS_A_THREAD + segments
    unique, starts = cub.unique_by_key(n, item), cub.scan(segments, item)
    sums = partial * columns * max(grad, 4)
    frequency = (size, 1279, -1279, 1279, -1279) if by_frequency else ()  # an estimate above 50,000 indices
    return (
        size, size, size, temp, -temp, -size, *frequency,
        OUT, size, 8, size, unique, -unique, -size, segments * item, segments * item, starts, -starts, 8,
        partial * item, sums, -sums, -partial * item, -8, -segments * item, -segments * item, -8, -size,
        *((-size,) if by_frequency else ()), -size, -size,
    )  # fmt: skip


def _whole(outputs: list[torch.Tensor]) -> Plan:
    return tuple(Out(i) for i in range(len(outputs)))


@registry.handles("embedding_dense_backward")
def embedding_dense_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    if kwargs:
        return operators.into_given(func, args, kwargs)
    grad, indices, rows, _, by_frequency = args
    n = indices.numel()
    if (n <= ATOMIC_UP_TO and not by_frequency) or n == 0:
        return perform(func, args, kwargs, _whole)
    plan = sorted_gradient(n, rows, grad.shape[-1], indices.itemsize, grad.itemsize, bool(by_frequency))
    return perform(func, args, kwargs, lambda outputs: plan)


@registry.handles("_sparse_coo_tensor_with_dims_and_tensors", "_sparse_coo_tensor_unsafe")
def sparse(func: Any, args: tuple, kwargs: dict) -> Any:
    """A sparse tensor is made of the two that it is given, whatever size it stands for."""
    gpu, _ = operators.common_gpu(args, kwargs)
    with _DisableTorchDispatch():
        return wrap(func(*args, **kwargs), gpu)


MAXIMUM = 2  # the mode of an embedding bag


@registry.handles("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(func: Any, args: tuple, kwargs: dict) -> Any:
    """The bag of each index is noted at its own length, bags' sizes at theirs; the CPU's kernel notes them otherwise."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    indices, offsets, mode = named["indices"], named["offsets"], named.get("mode", 0)
    bags = offsets.numel() - bool(named.get("include_last_offset", False))
    size = max(indices.itemsize, offsets.itemsize)

    def plan(outputs: list[Any]) -> Plan:
        return Out(2), Out(1), Out(0), Out(3)

    def kernel(*args: Any, **kwargs: Any) -> tuple:
        output, _, _, maxima = func(*args, **kwargs)
        kind = torch.int64 if size == 8 else torch.int32
        starts = offsets[:bags].to(torch.int64)
        ends = torch.cat([starts[1:], starts.new_full((1,), indices.numel())]) if bags else starts
        bag_size = (ends - starts).to(kind)
        bag_of = torch.repeat_interleave(torch.arange(bags, device="cpu"), bag_size.to(torch.int64)).to(kind)
        return output, bag_of, bag_size, maxima if mode == MAXIMUM else torch.empty(0, dtype=kind, device="cpu")

    return perform(func, args, kwargs, plan, kernel=kernel)


@registry.handles("_embedding_bag_backward", "_embedding_bag_dense_backward")
def embedding_bag_backward(func: Any, args: tuple, kwargs: dict) -> Any:
    """The gradients of an embedding's rows, always sorted. The largest of a bag has one place each, and is added there."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    grad, indices, rows, by_frequency, mode = (named[x] for x in ("grad", "indices", "num_weights", "scale_grad_by_freq", "mode"))
    if named.get("sparse"):
        return operators.compute(func, args, kwargs)
    if mode == MAXIMUM or indices.numel() == 0:
        return perform(func, args, kwargs, _whole)
    plan = sorted_gradient(indices.numel(), rows, grad.shape[-1], indices.itemsize, grad.itemsize, bool(by_frequency))
    return perform(func, args, kwargs, lambda outputs: plan)


@registry.composes("one_hot")
def one_hot(indices: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """CUDA checks no index beforehand, and scatters ones."""
    if indices.dtype is not torch.int64:
        raise RuntimeError(f"one_hot is only applicable to index tensor of type LongTensor, but got {indices.type()}")
    if indices.numel() == 0:
        if num_classes <= 0:
            raise RuntimeError("Can not infer total number of classes from empty tensor.")
        return indices.new_empty((*indices.shape, num_classes))
    if num_classes == -1:
        num_classes = int(indices.max().item()) + 1
    result = indices.new_zeros((*indices.shape, num_classes))
    return result.scatter_(-1, indices.unsqueeze(-1), 1)


# Counting and unique values


def _extreme_values(x: torch.Tensor) -> Plan:
    """The smallest and the largest element, each read by the host or kept for a moment."""
    size = x.itemsize
    return size, *reduction("min", x), -size, size, *reduction("max", x), -size


def _read_extremes(x: VirtualTensor) -> None:
    for _ in range(2):
        x._gpu.read(x.itemsize)


@registry.handles("bincount")
def bincount(func: Any, args: tuple, kwargs: dict) -> Any:
    if "out" in kwargs or args[0].numel() == 0:
        return operators.compute(func, args, kwargs)
    plan = (*_extreme_values(args[0]), OUT)
    _read_extremes(args[0])
    return perform(func, args, kwargs, lambda outputs: plan)


@registry.handles("histc")
def histc(func: Any, args: tuple, kwargs: dict) -> Any:
    """The range is looked up where it is not given."""
    if "out" in kwargs:
        return operators.into_given(func, args, kwargs)
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    search = named.get("min", 0) == named.get("max", 0) and args[0].numel()
    plan = (OUT, *(_extreme_values(args[0]) if search else ()))
    if search:
        _read_extremes(args[0])
    return perform(func, args, kwargs, lambda outputs: plan)


@registry.handles("_unique2")
def unique(func: Any, args: tuple, kwargs: dict) -> Any:
    """Sorted, with the places if the inverse is asked for; then neighbours that differ are kept."""
    x = args[0]
    _, inverse, counts = (*args[1:], *(kwargs.get(a.name, a.default_value) for a in func._schema.arguments[len(args) :]))[:3]
    n, item = x.numel(), x.itemsize
    if n:
        x._gpu.read(8)  # how many there are
    if n == 0 or x.dtype is torch.bool:
        return perform(func, args, kwargs, _whole)
    keys, places = n * item, 8 * n
    if inverse:
        temp, steps = cub.radix_sort(n, item, 8), cub.int_scan(n)
        begin: Plan = (keys, places, places, temp, -temp, -places, Out(1, places), places, steps, -steps, -places)
    else:
        temp = cub.radix_sort(n, item, 0, floating=x.dtype.is_floating_point)
        begin = (keys, temp, -temp)
    plan = (*begin, *_compaction(n, item, bool(counts)), *((-places,) if inverse else ()), -keys)
    return perform(func, args, kwargs, lambda outputs: plan)


def _compaction(n: int, item: int, counts: bool) -> Plan:
    """Values of which neighbours differ, with room for all of them, and their counts."""
    if counts:
        return Out(0, n * item), 8, Out(2, 8 * n), cub.run_lengths(n), -cub.run_lengths(n), -8
    return Out(0, n * item), 8, cub.select(n, item), -cub.select(n, item), -8


@registry.handles("unique_consecutive")
def unique_consecutive(func: Any, args: tuple, kwargs: dict) -> Any:
    x = args[0]
    inverse, counts, dim = (*args[1:], *(kwargs.get(a.name, a.default_value) for a in func._schema.arguments[len(args) :]))[:3]
    n = x.numel()
    if n:
        x._gpu.read(8)  # how many there are
    if n == 0 or dim is not None:
        return perform(func, args, kwargs, _whole)
    begin: Plan = (Out(1, 8 * n), 4 * n, cub.int_scan(n), -cub.int_scan(n), -4 * n) if inverse else ()
    plan = (*begin, *_compaction(n, x.itemsize, bool(counts)))
    return perform(func, args, kwargs, lambda outputs: plan)
