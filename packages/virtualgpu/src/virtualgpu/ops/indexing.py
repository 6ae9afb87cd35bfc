"""Indexing, gathering, and masks.

Sources: PyTorch's native/TensorAdvancedIndexing.cpp and native/cuda/Indexing.cu (index_put with accumulation sorts the positions),
IndexingUtils, Nonzero.cu.
Checked against an H200 (PyTorch 2.11, CUDA 13.0) for 1 to 10,000,000 elements.
"""

from functools import lru_cache
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.errors import scalar_name
from virtualgpu.hardware import Gpu
from virtualgpu.ops import cub, operators
from virtualgpu.ops.call import (
    Call,
    Devices,
    Work,
    asserts,
    bytes_of,
    cuda_operator,
    device_error,
    device_time,
    different_devices,
    handles,
    temporaries,
)
from virtualgpu.ops.reductions import of_all
from virtualgpu.ops.sequence import OUT, Out, Plan, perform, play
from virtualgpu.ops.without_values import all_known
from virtualgpu.tensor import VirtualTensor, allocate_on, wrap

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
# Clocks that it takes to sort the indices, so that each row has its summands side by side
# (ATen/native/cuda/Indexing.cu, Embedding.cu). Embeddings count them as well.
SORTED_INDICES, COUNTED_INDICES = 40_000, 24_000
ADDED = 1.3  # clocks an element that is added where others may be adding, too (atomicAdd)

POSITIONS = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")
asserts('-sizes[i] <= index && index < sizes[i] && "index out of bounds"', *POSITIONS, cpu="out of bounds for dimension [0-9]")
_GATHER = 'idx_dim >= 0 && idx_dim < index_size && "scatter gather kernel index out of bounds"'
asserts(_GATHER, "gather", "scatter_add", "scatter_add_")
_SCATTER = 'idx_dim >= 0 && idx_dim < index_size && "index out of bounds"'
asserts(_SCATTER, "scatter", "scatter_", "scatter_reduce", "scatter_reduce_")
asserts("srcIndex < srcSelectDimSize", "index_select", "embedding", "embedding_renorm_")
_BAG_BEYOND = "which is not in the valid range"
asserts("input[emb] < numRows", "_embedding_bag", "_embedding_bag_forward_only", cpu=_BAG_BEYOND)
asserts("dstIndex < dstAddDimSize", "index_add", "index_add_", "index_reduce", "index_reduce_")
asserts('idx >= 0 && idx < self_dim_size && "index_copy_(): index out of bounds"', "index_copy", "index_copy_")
asserts('idx >= -self_dim_size && idx < self_dim_size && "Index out of bounds"', "index_fill", "index_fill_")
asserts('idx < numel && idx >= -numel && "cuda_take_put_kernel() index out of bounds"', "take", "put", "put_")
cuda_operator("embedding", "index_select", weight="self", indices="index")


@device_error("index", "index_put", "index_put_", "_index_put_impl_")
def indices_elsewhere(given: Devices) -> str | None:
    device = given[0][1].device
    wrong = any(name == "indices" and x.is_cuda and x.device != device for name, x in given)
    return f"indices should be either on cpu or on the same device as the indexed tensor ({device})" if wrong else None


@device_error("masked_fill", "masked_fill_")
def mask_elsewhere(given: Devices) -> str | None:
    own, mask = given[0][1].device, given[1][1].device
    if len(given) == 3 and not given[0][1].is_cuda:  # the value is a tensor
        return "masked_fill_: Expected inputs to be on same device"
    return f"expected self and mask to be on the same device, but got mask on {mask} and self on {own}" if own != mask else None


@device_time("embedding", "index_select", "gather", "take", "index", "_unsafe_index")
def pick(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """No more is read than is returned; what the second-level cache holds is read once."""
    table = call.args[0]
    chosen = sum(map(bytes_of, results))
    cached = bytes_of(table) <= table._gpu.profile.l2_bytes if type(table) is VirtualTensor else False
    return Work(moved - bytes_of(table) + (min(chosen, bytes_of(table)) if cached else chosen))


@device_time("embedding_dense_backward", "index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def add_at(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    source = next(call.argument(name) for name in ("grad_output", "source", "src") if name in call.op.arguments)
    bytes = _only_chosen(call, moved, bytes_of(source))
    serial = SORTED_INDICES + COUNTED_INDICES if call.op.name == "embedding_dense_backward" else 0
    return Work(bytes, clocks=ADDED * source.numel(), serial=serial)


@device_time("index_put_", "_index_put_impl_")
def put_at(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    values = call.argument("values")
    written = bytes_of(values) if type(values) is VirtualTensor else 0
    serial = SORTED_INDICES if call.argument("accumulate") else 0
    return Work(_only_chosen(call, moved, written), serial=serial)


def _only_chosen(call: Call, moved: int, chosen: int) -> int:
    """The bytes that are moved. An operator in place reads and writes `chosen` bytes of its tensor."""
    if not call.op.name.endswith("_"):
        return moved
    return moved - 2 * bytes_of(call.args[0]) + 2 * min(chosen, bytes_of(call.args[0]))


def own_zeros(call: Call) -> bool:
    """Is this a backward formula's operator on zeros that nobody else holds?"""
    return _graph_task() != -1 and _node().name() in FILLS_OWN_ZEROS[call.op.name]


@handles("scatter_", "scatter_reduce", "scatter_reduce_")
def reduced(call: Call) -> Any:
    _refuse_products(call)
    return operators.into_given(call) if call.op.written else operators.compute(call)


def _refuse_products(call: Call) -> None:
    """Raises RuntimeError for what the kernels of all reductions but sums are not compiled for (native/cuda/ScatterGatherKernel.cu)."""
    x, reduction = call.args[0], call.argument("reduce")
    if reduction in (None, "add", "sum") or not (x.is_complex() or x.dtype is torch.bool) or not call.args[2].numel():
        return
    kernel = "gather_base_kernel_func" if isinstance(call.args[3], torch.Tensor) else "fill_base_kernel_reduce_multiply"
    raise RuntimeError(f"\"cuda_scatter_{kernel}\" not implemented for '{scalar_name(x.dtype)}'")


@handles("scatter_add", "scatter", "index_add", "put")
def scatter(call: Call) -> Any:
    _refuse_products(call)
    if call.op.outs:
        return operators.into_given(call)
    return in_place(call) if own_zeros(call) else operators.compute(call)


def in_place(call: Call) -> Any:
    """The variant that writes into its first argument."""
    operators.mixed(call.of(call.op.in_place()))
    return call.args[0]


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
    if not found:
        return 4, temp, -temp, out or size, -4
    return 4, temp, -temp, out or size, cub.select(n, 8), -cub.select(n, 8), -4


def _found(mask: torch.Tensor) -> int:
    with _DisableTorchDispatch():
        return int(mask.count_nonzero())


def find_positions(gpu: Gpu, indices: Any) -> None:
    """The host waits for the number of a mask's positions, and while those that it has itself go to the GPU.

    It does not wait for the positions of a mask of its own (expandTensors, ATen/native/IndexingUtils.h).
    """
    for index in indices:
        if type(index) is VirtualTensor:
            if is_mask(index):
                gpu.read(8)
        elif index is not None and not is_mask(index):
            gpu.send(8 * index.numel())


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


def _without_memory(gpu: Gpu, values: torch.Tensor) -> VirtualTensor:
    allocate_on(gpu, values.untyped_storage(), allocated=False)
    return wrap(values, gpu)


def _all_true(mask: VirtualTensor) -> VirtualTensor:
    with _DisableTorchDispatch():
        return _without_memory(mask._gpu, torch.ones(mask.shape, dtype=torch.bool))


def _positions(gpu: Gpu, indices: Any) -> list[torch.Tensor | None]:
    """The indices with the positions of each mask's true elements in its place, from which shapes follow without values."""
    with _DisableTorchDispatch():
        parts = ([_without_memory(gpu, x.clone()) for x in index.nonzero().unbind(1)] if is_mask(index) else [index] for index in indices)
        return [index for part in parts for index in part]


def restrided(indices: Any) -> tuple[int, ...]:
    """Bytes of the copies of positions that the kernel wants to lie alike (AdvancedIndex, native/TensorAdvancedIndexing.cpp)."""
    given = [index for index in indices if index is not None and not is_mask(index)]
    if len(given) < 2:
        return ()
    alike = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given]
    try:
        spread = torch.broadcast_tensors(*alike)
    except RuntimeError:  # the operator itself says that they do not fit together
        return ()
    return () if all(x.stride() == spread[0].stride() for x in spread) else tuple(8 * x.numel() for x in spread if not x.is_contiguous())


@handles("index", "_unsafe_index")
def index(call: Call) -> Any:
    x, indices = call.args[0], call.args[1]
    check_indices(x, indices)
    gpu = call.common_gpu(host=True)
    find_positions(gpu, indices)
    makes_up = gpu.machine.makes_up
    unknown = any(is_mask(index) and not all_known(index) for index in indices)
    if unknown and makes_up is not None:
        makes_up(torch.bool)
    if gpu.machine.selected.full_masks or makes_up is not None:
        indices = [_all_true(index) if is_mask(index) and not all_known(index) else index for index in indices]
    if call.op.outs or not all_known(indices):
        return operators.mixed(call)
    before, _, behind = places(x, indices)
    copies = restrided(indices)
    if not all_known(x) and any(map(is_mask, indices)):
        call = call.with_arguments(x, _positions(gpu, indices))
    return perform(call, (*before, *copies, OUT, *(-size for size in copies), *behind))


@handles("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def index_put(call: Call) -> Any:
    """With accumulation the positions are sorted; otherwise the kernel needs nothing. One value from the host under a mask is a fill."""
    x, indices, values = call.args[0], call.args[1], call.args[2]
    check_indices(x, indices)
    if type(values) is VirtualTensor and values.device != x.device and not values.dim():
        # A number on another device is copied, and the host waits for it.
        call = call.with_arguments(x, indices, values.to(x.device), *call.args[3:], **call.kwargs)
        if type(x) is not VirtualTensor:
            return call.func(*call.args, **call.kwargs)
        values = call.args[2]
    if type(x) is not VirtualTensor:
        raise different_devices(call.args, call.kwargs)
    accumulate = call.argument("accumulate")
    unsafe = call.argument("unsafe")
    own = call.func is aten.index_put.default and own_zeros(call)
    plan: Plan = ()
    filled = not accumulate and fills(indices, values)
    if not filled:
        if type(values) is not VirtualTensor:
            if values.dim():  # CUDA's kernels take one number of the host's, and no more
                sorts = accumulate or torch.are_deterministic_algorithms_enabled()
                text = f"expected device {x.device} but got device cpu for value tensor"
                raise RuntimeError(text) if sorts else different_devices(x, values)
            x._gpu.send(values.itemsize)
        find_positions(x._gpu, indices)
    if not filled and all_known(indices):
        before, counts, behind = places(x, indices)
        if accumulate:
            plan = (*before, *_accumulate(x, indices, counts, check=not own and not unsafe, behind=behind))
        else:
            copies = restrided(indices)
            plan = (*before, *copies, *(-size for size in copies), *behind)
    result = in_place(call) if own else operators.mixed(call)
    play(x._gpu, plan)
    return result


def _accumulate(x: torch.Tensor, indices: Any, counts: list[int], check: bool, behind: Plan) -> Plan:
    """`index_put_with_sort_kernel`: one linear position an element, sorted together with where it came from."""
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
                steps += [8, *of_all("max", i), 1, -1, -8] * 2
    if all(on_host) and not any(map(is_mask, found)):
        behind = ()  # the positions are computed on the host, and moved once
        steps = []
    else:
        steps += [size, size, -size, *[size, size, -size, -size] * (len(counts) - 1)]  # wrapped, times the stride
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


@handles("nonzero")
def nonzero(call: Call) -> Any:
    if call.kwargs:
        return operators.into_given(call)
    x = call.args[0]
    gpu = call.common_gpu()
    gpu.read(8)
    copy, sms = 0 if x.is_contiguous() else bytes_of(x), gpu.profile.multiprocessors
    return perform(call, lambda outputs: (copy, *nonzero_plan(x.numel(), x.dim(), outputs[0].shape[0], sms, OUT), -copy))


@handles("masked_select")
def masked_select(call: Call) -> Any:
    """The places of the mask's nonzero elements, then a gather."""
    if call.kwargs:
        return operators.into_given(call)
    x, mask = call.args
    gpu = call.common_gpu()
    gpu.read(8)
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    n, dims, sms = shape.numel(), max(len(shape), 1), gpu.profile.multiprocessors
    copy = 0 if mask.shape == shape and mask.is_contiguous() else n  # of the mask, spread out

    def plan(outputs: list[Any]) -> Plan:
        found = outputs[0].numel()
        return copy, *nonzero_plan(n, dims, found, sms), -copy, OUT, -8 * dims * found

    return perform(call, plan)


@handles("masked_scatter", "masked_scatter_")
def masked_scatter(call: Call) -> Any:
    """Where each masked element takes its value from is a scan of the mask, in 64-bit numbers."""
    own = call.func is aten.masked_scatter.default and own_zeros(call)
    result = in_place(call) if own else operators.compute(call)
    n, mask, source = result.numel(), call.args[1], call.args[2]
    if n:
        spread = 0 if mask.shape == result.shape and mask.is_contiguous() else n
        copy, scan = 0 if source.is_contiguous() else bytes_of(source), cub.scan(n, 8)
        play(result._gpu, (8 * n, spread, scan, -scan, -spread, copy, -copy, -8 * n))
    return result


@handles("masked_scatter_backward")
def masked_scatter_backward(call: Call) -> Any:
    """The gradients under the mask, filled up with zeros for the values that were not taken."""
    grad, mask, sizes = call.args
    taken = grad.masked_select(mask)
    rest = torch.Size(sizes).numel() - taken.numel()
    return (torch.cat([taken, taken.new_zeros(rest)]) if rest > 0 else taken).view(sizes)


# Composites of indexing, which C++ makes below autograd


def _within(x: torch.Tensor, indices: Any) -> list[Any]:
    return [None if index is None else index.clamp(-x.shape[d], x.shape[d] - 1) for d, index in enumerate(indices)]


@handles("_unsafe_masked_index")
def unsafe_masked_index(call: Call) -> torch.Tensor:
    x, mask, indices, fill = call.args
    if not x.numel() or any(is_mask(index) for index in indices):
        return operators.mixed(call)
    within = _within(x, indices)  # which lives to the end
    return aten._unsafe_index.Tensor(x, within).masked_fill(mask.logical_not(), fill)


@handles("_unsafe_masked_index_put_accumulate")
def unsafe_masked_index_put(call: Call) -> torch.Tensor:
    x, mask, indices, values = call.args
    if not x.numel() or any(is_mask(index) for index in indices):
        return operators.mixed(call)
    within = _within(x, indices)
    return aten._unsafe_index_put.default(x, within, values.masked_fill(mask.logical_not(), 0), True)


@temporaries("index_reduce", "index_reduce_", "scatter_reduce", "scatter_reduce_")
def of_means(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """A mean counts what is added up at each place (native/TensorAdvancedIndexing.cpp)."""
    if call.argument("reduce") != "mean":
        return ()
    x, source = call.args[0], call.argument("source" if "index" in call.op.name else "src")
    return bytes_of(source), bytes_of(x), x.numel() if "scatter" in call.op.name else 0
