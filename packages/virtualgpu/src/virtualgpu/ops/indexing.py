"""Indexing, gathering and masks: what the operators allocate and cost, and what they refuse.

Sources: PyTorch's native/TensorAdvancedIndexing.cpp and native/cuda/Indexing.cu (index_put with
accumulation sorts the positions), IndexingUtils, Nonzero.cu.
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

# Backward formulas that fill zeros of their own in place. With a tensor subclass or a mode they use
# the operator that copies.
FILLS_OWN_ZEROS = {
    "scatter_add": {"GatherBackward0", "CummaxBackward0", "CumminBackward0"},
    "index_add": {"IndexSelectBackward0"},
    "index_put": {"IndexBackward0", "UnsafeIndexBackward0"},
    "masked_scatter": {"MaskedSelectBackward0"},
    "put": {"TakeBackward0"},
    "scatter": {
        "SortBackward0", "SortBackward1", "TopkBackward0", "KthvalueBackward0", "MedianBackward1",
        "NanmedianBackward1", "ModeBackward0", "MaxBackward0", "MinBackward0",
    },
}  # fmt: skip
# Clocks that it takes to sort the indices, so that each row has its summands side by side
# (ATen/native/cuda/Indexing.cu, Embedding.cu). Embeddings count them as well.
SORTED_INDICES, COUNTED_INDICES = 40_000, 24_000
ADDED = 1.3  # clocks an element that is added where others may be adding, too (atomicAdd)

POSITIONS = (
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
)
_INDEX = '-sizes[i] <= index && index < sizes[i] && "index out of bounds"'
asserts(_INDEX, *POSITIONS, cpu="out of bounds for dimension [0-9]")
_GATHER = 'idx_dim >= 0 && idx_dim < index_size && "scatter gather kernel index out of bounds"'
asserts(_GATHER, "gather", "scatter_add", "scatter_add_")
_SCATTER = 'idx_dim >= 0 && idx_dim < index_size && "index out of bounds"'
asserts(_SCATTER, "scatter", "scatter_", "scatter_reduce", "scatter_reduce_")
_SELECT = "srcIndex < srcSelectDimSize"
asserts(_SELECT, "index_select", "embedding", "embedding_renorm_")
_BAG, _BAG_BEYOND = "input[emb] < numRows", "which is not in the valid range"
asserts(_BAG, "_embedding_bag", "_embedding_bag_forward_only", cpu=_BAG_BEYOND)
_ADD = "dstIndex < dstAddDimSize"
asserts(_ADD, "index_add", "index_add_", "index_reduce", "index_reduce_")
_COPY = 'idx >= 0 && idx < self_dim_size && "index_copy_(): index out of bounds"'
asserts(_COPY, "index_copy", "index_copy_")
_FILL = 'idx >= -self_dim_size && idx < self_dim_size && "Index out of bounds"'
asserts(_FILL, "index_fill", "index_fill_")
_TAKE = 'idx < numel && idx >= -numel && "cuda_take_put_kernel() index out of bounds"'
asserts(_TAKE, "take", "put", "put_")
cuda_operator("embedding", "index_select", weight="self", indices="index")


@device_error("index", "index_put", "index_put_", "_index_put_impl_")
def indices_elsewhere(given: Devices) -> str | None:
    """Return CUDA's message for an index on another GPU than the indexed tensor, or None.

    `given` has the name and the tensor of each argument.
    """
    device = given[0][1].device
    for name, x in given:
        if name == "indices" and x.is_cuda and x.device != device:
            return (
                "indices should be either on cpu or on the same device "
                f"as the indexed tensor ({device})"
            )
    return None


@device_error("masked_fill", "masked_fill_")
def mask_elsewhere(given: Devices) -> str | None:
    """Return CUDA's message for a mask on another device than the tensor, or None.

    `given` has the name and the tensor of each argument.
    """
    own, mask = given[0][1].device, given[1][1].device
    if len(given) == 3 and given[2][1].dim():
        return (
            "masked_fill_ only supports a 0-dimensional value tensor, but got tensor with "
            f"{given[2][1].dim()} dimension(s)."
        )
    if len(given) == 3 and not given[0][1].is_cuda:  # the value is a tensor
        return "masked_fill_: Expected inputs to be on same device"
    if own == mask:
        return None
    return (
        f"expected self and mask to be on the same device, but got mask on {mask} and self on {own}"
    )


@device_time("embedding", "index_select", "gather", "take", "index", "_unsafe_index")
def pick(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of picking elements of a table.

    The kernel reads at most as many bytes as it returns. Data that fit in the second-level cache
    are read once.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    table = call.args[0]
    chosen = sum(map(bytes_of, results))
    if type(table) is VirtualTensor and bytes_of(table) <= table._gpu.profile.l2_bytes:
        chosen = min(chosen, bytes_of(table))
    return Work(moved - bytes_of(table) + chosen)


@device_time(
    "embedding_dense_backward",
    "index_add",
    "index_add_",
    "scatter_add",
    "scatter_add_",
    "scatter_reduce",
    "scatter_reduce_",
)
def add_at(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of adding elements at positions that may occur more than once.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    names = ("grad_output", "source", "src")
    source = next(call.argument(name) for name in names if name in call.op.arguments)
    bytes = _only_chosen(call, moved, bytes_of(source))
    serial = 0
    if call.op.name == "embedding_dense_backward":
        serial = SORTED_INDICES + COUNTED_INDICES
    return Work(bytes, clocks=ADDED * source.numel(), serial=serial)


@device_time("index_put_", "_index_put_impl_")
def put_at(call: Call, results: list[torch.Tensor], moved: int) -> Work:
    """Return the work of writing or adding values at positions.

    `results` are the results of `call`. `moved` is the bytes of all arguments and results.
    """
    values = call.argument("values")
    written = bytes_of(values) if type(values) is VirtualTensor else 0
    serial = SORTED_INDICES if call.argument("accumulate") else 0
    return Work(_only_chosen(call, moved, written), serial=serial)


def _only_chosen(call: Call, moved: int, chosen: int) -> int:
    """Return the bytes that a kernel moves if it uses only some elements of its first argument.

    `moved` is the bytes of all arguments and results. An operator in place only reads and writes
    the `chosen` bytes.
    """
    if not call.op.name.endswith("_"):
        return moved
    return moved - 2 * bytes_of(call.args[0]) + 2 * min(chosen, bytes_of(call.args[0]))


def own_zeros(call: Call) -> bool:
    """Return whether a backward formula calls this operator on zeros that nothing else refers to.

    The operator may then write to them in place.
    """
    return _graph_task() != -1 and _node().name() in FILLS_OWN_ZEROS[call.op.name]


@handles("scatter_", "scatter_reduce", "scatter_reduce_")
def reduced(call: Call) -> Any:
    """Run a scatter that combines values by a reduction.

    Raises RuntimeError if CUDA has no kernel of this reduction for the dtype.
    """
    _refuse_products(call)
    if call.op.written:
        return operators.into_given(call)
    return operators.compute(call)


def _refuse_products(call: Call) -> None:
    """Raise RuntimeError if CUDA has no kernel for the call's reduction and dtype.

    Only sums have kernels for complex numbers and booleans (native/cuda/ScatterGatherKernel.cu).
    """
    x, reduction = call.args[0], call.argument("reduce")
    if reduction in (None, "add", "sum") or not call.args[2].numel():
        return
    if not x.is_complex() and x.dtype is not torch.bool:
        return
    kernel = "fill_base_kernel_reduce_multiply"
    if isinstance(call.args[3], torch.Tensor):
        kernel = "gather_base_kernel_func"
    raise RuntimeError(f"\"cuda_scatter_{kernel}\" not implemented for '{scalar_name(x.dtype)}'")


@handles("scatter_add", "scatter", "index_add", "put")
def scatter(call: Call) -> Any:
    """Run an operator that scatters. Inside a backward formula, it writes in place."""
    _refuse_products(call)
    if call.op.outs:
        return operators.into_given(call)
    if own_zeros(call):
        return in_place(call)
    return operators.compute(call)


def in_place(call: Call) -> Any:
    """Run the in-place variant of the operator, and return its first argument."""
    operators.mixed(call.of(call.op.in_place()))
    return call.args[0]


# Positions and masks.


def check_indices(x: torch.Tensor, indices: Any) -> None:
    """Raise CUDA's RuntimeError unless each index is on the CPU or on the tensor's GPU.

    If the tensor is on the CPU, no index may be on a GPU.
    """
    home = x._gpu if type(x) is VirtualTensor else None
    for index in indices:
        if type(index) is VirtualTensor and index._gpu is not home:
            raise RuntimeError(
                "indices should be either on cpu or on the same device "
                f"as the indexed tensor ({x.device})"
            )


def is_mask(index: Any) -> bool:
    """Return whether an index is a mask: a tensor of booleans or of 8-bit numbers."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@lru_cache(maxsize=4096)
def nonzero_plan(
    n: int, dims: int, found: int, multiprocessors: int, out: "int | Out | None" = None
) -> Plan:
    """Return the memory plan for selecting the nonzero elements among n elements.

    `found` is the number of nonzero elements. `out` is the step that allocates the result.
    Without `out`, the step allocates the bytes of the positions.
    """
    temp = cub.count(n, multiprocessors)
    result = out or 8 * dims * found
    if n == 0:
        return (result,)
    if not found:
        return 4, temp, -temp, result, -4
    select = cub.select(n, 8)
    return 4, temp, -temp, result, select, -select, -4


def _found(mask: torch.Tensor) -> int:
    """Return the number of true elements in a mask."""
    with _DisableTorchDispatch():
        return int(mask.count_nonzero())


def find_positions(gpu: Gpu, indices: Any) -> None:
    """Take the time in which the host finds the positions of all masks among the indices.

    It waits for the number of positions of each mask on the GPU. Positions of a mask on the host
    are sent to the GPU without a wait (`expandTensors` in ATen/native/IndexingUtils.h).
    """
    for index in indices:
        if type(index) is VirtualTensor:
            if is_mask(index):
                gpu.read(8)
        elif index is not None and not is_mask(index):
            gpu.send(8 * index.numel())


def fills(indices: Any, values: torch.Tensor) -> bool:
    """Return whether an assignment sets a single value under a single mask.

    For a value on the host, CUDA then only fills (`canDispatchToMaskedFill` in
    ATen/native/TensorAdvancedIndexingUtils.h).
    """
    given = [index for index in indices if index is not None]
    alone = len(given) == 1 and is_mask(given[0]) and type(given[0]) is VirtualTensor
    return alone and values.numel() == 1 and type(values) is not VirtualTensor


def places(x: torch.Tensor, indices: Any) -> tuple[Plan, list[int], Plan]:
    """Return the memory plans for converting the indices of `x` to positions.

    Returns:
        The plan of the allocations, the number of positions in each indexed dimension, and the plan
        that frees what remains allocated.
    """
    steps: list[Any] = []
    kept: list[int] = []
    counts: list[int] = []
    for index in indices:
        if index is None:
            continue
        if is_mask(index):
            count = _found(index)
            size = 8 * index.dim() * count
            if type(index) is VirtualTensor:
                multiprocessors = index._gpu.profile.multiprocessors
                steps += nonzero_plan(index.numel(), index.dim(), count, multiprocessors)
            else:
                steps.append(size)
            kept.append(size)
            counts += [count] * index.dim()
        else:
            counts.append(index.numel())
            if type(index) is not VirtualTensor:
                steps.append(8 * index.numel())
                kept.append(8 * index.numel())
    return tuple(steps), counts, tuple(-size for size in reversed(kept))


def _without_memory(gpu: Gpu, values: torch.Tensor) -> VirtualTensor:
    """Return a tensor on the GPU that has these values but no memory block."""
    allocate_on(gpu, values.untyped_storage(), allocated=False)
    return wrap(values, gpu)


def _all_true(mask: VirtualTensor) -> VirtualTensor:
    """Return a mask of the same shape with only true elements, without a memory block."""
    with _DisableTorchDispatch():
        return _without_memory(mask._gpu, torch.ones(mask.shape, dtype=torch.bool))


def _positions(gpu: Gpu, indices: Any) -> list[torch.Tensor | None]:
    """Return the indices, with positions in place of each mask.

    They are the positions of the mask's true elements. The shapes of results can be computed from
    them without values.
    """
    result: list[torch.Tensor | None] = []
    with _DisableTorchDispatch():
        for index in indices:
            if is_mask(index):
                for positions in index.nonzero().unbind(1):
                    result.append(_without_memory(gpu, positions.clone()))
            else:
                result.append(index)
    return result


def restrided(indices: Any) -> tuple[int, ...]:
    """Return the bytes of copies that give all positions the same strides, as the kernel needs.

    Source: `AdvancedIndex` in native/TensorAdvancedIndexing.cpp.
    """
    given = [index for index in indices if index is not None and not is_mask(index)]
    if len(given) < 2:
        return ()
    alike = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in given]
    try:
        spread = torch.broadcast_tensors(*alike)
    except RuntimeError:  # the operator itself says that they do not fit together
        return ()
    if all(x.stride() == spread[0].stride() for x in spread):
        return ()
    return tuple(8 * x.numel() for x in spread if not x.is_contiguous())


@handles("index", "_unsafe_index")
def index(call: Call) -> Any:
    """Run the operator `index`, and allocate the memory of the positions.

    A mask without values counts as true everywhere if the machine makes up values or treats masks
    as full. Raises RuntimeError if an index is on another GPU than the tensor.
    """
    x, indices = call.args[0], call.args[1]
    check_indices(x, indices)
    gpu = call.common_gpu(host=True)
    find_positions(gpu, indices)
    makes_up = gpu.machine.makes_up
    unknown = any(is_mask(index) and not all_known(index) for index in indices)
    if unknown and makes_up is not None:
        makes_up(torch.bool)
    if gpu.machine.selected.full_masks or makes_up is not None:
        known = list(indices)
        for d, index in enumerate(indices):
            if is_mask(index) and not all_known(index):
                known[d] = _all_true(index)
        indices = known
    if call.op.outs or not all_known(indices):
        return operators.mixed(call)
    before, _, behind = places(x, indices)
    copies = restrided(indices)
    if not all_known(x) and any(map(is_mask, indices)):
        call = call.with_arguments(x, _positions(gpu, indices))
    return perform(call, (*before, *copies, OUT, *(-size for size in copies), *behind))


@handles("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def index_put(call: Call) -> Any:
    """Run `index_put` and its variants, with the memory that CUDA uses.

    With accumulation, the positions are sorted. Otherwise the kernel needs no memory besides the
    positions. Setting one value from the host under a mask is a fill.

    Raises RuntimeError if an index or the values are on the wrong device.
    """
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
                if accumulate or torch.are_deterministic_algorithms_enabled():
                    raise RuntimeError(
                        f"expected device {x.device} but got device cpu for value tensor"
                    )
                raise different_devices(x, values)
            x._gpu.send(values.itemsize)
        find_positions(x._gpu, indices)
    if not filled and all_known(indices):
        before, counts, behind = places(x, indices)
        if accumulate:
            checks = not own and not unsafe
            plan = (*before, *_accumulation_plan(x, indices, counts, check=checks, behind=behind))
        else:
            copies = restrided(indices)
            plan = (*before, *copies, *(-size for size in copies), *behind)
    if own:
        result = in_place(call)
    else:
        result = operators.mixed(call)
    play(x._gpu, plan)
    return result


def _accumulation_plan(
    x: torch.Tensor, indices: Any, counts: list[int], check: bool, behind: Plan
) -> Plan:
    """Return the memory plan of `index_put` with accumulation (`index_put_with_sort_kernel`).

    The kernel computes one linear position for each element and sorts the positions together with
    their original order.

    Args:
        x: the tensor that is written to
        indices: the operator's indices, with None for dimensions that are not indexed
        counts: the number of positions in each indexed dimension
        check: whether the largest and the smallest value of each index are checked
        behind: the plan that frees the positions
    """
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
        steps += [size, size, -size]
        steps += [size, size, -size, -size] * (len(counts) - 1)  # wrapped, times the stride
    if any(map(is_mask, found)):
        steps += behind
    bits = (x.numel() // max(_slice(x, indices), 1)).bit_length()
    temp = cub.radix_sort(n, 8, 8, max(bits, 1))
    steps += [size, size, size, temp, -temp, *[-size] * 4]
    if not any(map(is_mask, found)):
        steps += behind
    return tuple(steps)


def _slice(x: torch.Tensor, indices: Any) -> int:
    """Return the number of elements at each position: the product of the dimensions not indexed."""
    dims = 0
    for index in indices:
        dims += index.dim() if is_mask(index) else 1
    return int(torch.Size(x.shape[dims:]).numel())


@handles("nonzero")
def nonzero(call: Call) -> Any:
    """Run `nonzero`. The host waits for the number of elements that are not zero."""
    if call.kwargs:
        return operators.into_given(call)
    x = call.args[0]
    gpu = call.common_gpu()
    gpu.read(8)
    copy = 0 if x.is_contiguous() else bytes_of(x)
    multiprocessors = gpu.profile.multiprocessors

    def plan(outputs: list[Any]) -> Plan:
        """Return the memory plan of `nonzero`. `outputs` holds the positions that it has found."""
        found = outputs[0].shape[0]
        return copy, *nonzero_plan(x.numel(), x.dim(), found, multiprocessors, OUT), -copy

    return perform(call, plan)


@handles("masked_select")
def masked_select(call: Call) -> Any:
    """Run `masked_select`: find the positions of the mask's true elements, then gather."""
    if call.kwargs:
        return operators.into_given(call)
    x, mask = call.args
    gpu = call.common_gpu()
    gpu.read(8)
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    n, dims, multiprocessors = shape.numel(), max(len(shape), 1), gpu.profile.multiprocessors
    copy = n  # of the mask, expanded to the shape
    if mask.shape == shape and mask.is_contiguous():
        copy = 0

    def plan(outputs: list[Any]) -> Plan:
        """Return the memory plan of `masked_select`. `outputs` holds the elements found."""
        found = outputs[0].numel()
        selection = nonzero_plan(n, dims, found, multiprocessors)
        return copy, *selection, -copy, OUT, -8 * dims * found

    return perform(call, plan)


@handles("masked_scatter", "masked_scatter_")
def masked_scatter(call: Call) -> Any:
    """Run `masked_scatter`, which scans the mask to find which value each element takes.

    The scan uses 64-bit numbers.
    """
    if call.func is aten.masked_scatter.default and own_zeros(call):
        result = in_place(call)
    else:
        result = operators.compute(call)
    n, mask, source = result.numel(), call.args[1], call.args[2]
    if n:
        spread = n
        if mask.shape == result.shape and mask.is_contiguous():
            spread = 0
        copy = 0 if source.is_contiguous() else bytes_of(source)
        scan = cub.scan(n, 8)
        play(result._gpu, (8 * n, spread, scan, -scan, -spread, copy, -copy, -8 * n))
    return result


@handles("masked_scatter_backward")
def masked_scatter_backward(call: Call) -> Any:
    """Run the gradient of `masked_scatter`.

    It returns the gradients under the mask, with zeros for values that were not used.
    """
    grad, mask, sizes = call.args
    taken = grad.masked_select(mask)
    rest = torch.Size(sizes).numel() - taken.numel()
    if rest > 0:
        return torch.cat([taken, taken.new_zeros(rest)]).view(sizes)
    return taken.view(sizes)


# Composites of indexing, which C++ computes below autograd.


def _within(x: torch.Tensor, indices: Any) -> list[Any]:
    """Return the indices of `x`, each clamped to the bounds of its dimension."""
    clamped = list(indices)
    for d, index in enumerate(indices):
        if index is not None:
            clamped[d] = index.clamp(-x.shape[d], x.shape[d] - 1)
    return clamped


@handles("_unsafe_masked_index")
def unsafe_masked_index(call: Call) -> torch.Tensor:
    """Run `_unsafe_masked_index` as the operators that C++ calls for it."""
    x, mask, indices, fill = call.args
    if not x.numel() or any(is_mask(index) for index in indices):
        return operators.mixed(call)
    # A name keeps the clamped indices allocated to the end, as C++ does.
    within = _within(x, indices)
    return aten._unsafe_index.Tensor(x, within).masked_fill(mask.logical_not(), fill)


@handles("_unsafe_masked_index_put_accumulate")
def unsafe_masked_index_put(call: Call) -> torch.Tensor:
    """Run `_unsafe_masked_index_put_accumulate` as the operators that C++ calls for it."""
    x, mask, indices, values = call.args
    if not x.numel() or any(is_mask(index) for index in indices):
        return operators.mixed(call)
    within = _within(x, indices)
    return aten._unsafe_index_put.default(
        x, within, values.masked_fill(mask.logical_not(), 0), True
    )


@temporaries("index_reduce", "index_reduce_", "scatter_reduce", "scatter_reduce_")
def of_means(call: Call, result: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes of the counts that a mean needs: the number of summands at each position.

    Source: native/TensorAdvancedIndexing.cpp.
    """
    if call.argument("reduce") != "mean":
        return ()
    x = call.args[0]
    if "scatter" in call.op.name:
        return bytes_of(call.argument("src")), bytes_of(x), x.numel()
    return bytes_of(call.argument("source")), bytes_of(x), 0
