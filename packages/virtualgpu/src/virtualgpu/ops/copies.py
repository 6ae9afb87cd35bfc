"""Copies between any two devices, without autograd: their values, memory and time.

A copy between a GPU and the host may need temporary memory on the GPU. The rules are those of
`copy_kernel_cuda` and `copy_requires_temporaries` in PyTorch's native/cuda/Copy.cu. A copy that is
not one block of memory goes through contiguous copies on both sides. A blocking copy converts the
dtype on the host, and a non-blocking one on the GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.errors import unsupported
from virtualgpu.hardware import Gpu
from virtualgpu.memory import require_values
from virtualgpu.ops import operators
from virtualgpu.ops.call import Call, bytes_of, handles, operator, overwrites
from virtualgpu.ops.elementwise import contiguous_copies
from virtualgpu.ops.integers import saturate
from virtualgpu.ops.operators import compute, refuse_waiting
from virtualgpu.ops.sequence import OUT, perform
from virtualgpu.ops.without_values import forget, loses_values
from virtualgpu.ops.work import laid_out
from virtualgpu.pinned import is_pinned, pinned
from virtualgpu.tensor import VirtualTensor, empty, mark_written, memory_of, span_bytes, wrap

_node, _graph_task = torch._C._current_autograd_node, torch._C._current_graph_task_id
overwrites("copy_", "_foreach_copy_")
_PAGEABLE = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is "
    "pinned. Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)


@handles("copy_")
def copy_into(call: Call) -> Any:
    """Run the operator `copy_` between any two devices, and return the target."""
    target, source = call.args[0], call.args[1]
    refuse_waiting(target)
    transfer(source, target, non_blocking=call.argument("non_blocking"))
    return target


def transfer(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Copy the values of `source` to `target`, and queue the copy where CUDA does.

    The copy is within a GPU, between two GPUs, or between a GPU and the host.
    """
    there = source._gpu if type(source) is VirtualTensor else None
    here = target._gpu if type(target) is VirtualTensor else None
    gpu: Gpu = here or there  # type: ignore[assignment]  # one of the two is on a GPU
    machine = gpu.machine
    machine.require_alive()
    machine.selected.gpu = gpu
    host_side = None
    if here is None:
        host_side = target
    elif there is None:
        host_side = source
    waits = not (non_blocking and host_side is not None and is_pinned(host_side))

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        if here is None or there is None:
            _copy_with_host(source, target, gpu, non_blocking, waits)
        else:
            _copy_on_gpus(source, target, there, here)
        if here is not None and not machine.several_streams:
            mark_written(target)

    if machine.selected.in_operator or (waits and not machine.several_streams):
        return copy(source, target)
    stream = (there or gpu).stream
    if stream.capture is not None and host_side is not None and not is_pinned(host_side):
        raise RuntimeError(_PAGEABLE)
    if not waits:
        machine.races.mark_host(host_side)
    if stream.capture is not None:
        call = Call(operator(torch.ops.aten.copy_.default), (target, source, non_blocking), {})
        return stream.capture.note(call, lambda call: copy(source, target))
    before = machine.clock.before(stream)
    if there is not None and here is not None and here is not there:
        for other, count in machine.clock.before(here.stream).items():
            before[other] = max(count, before.get(other, 0))

    def copy_call(call: Call) -> None:
        copy(call.args[1], call.args[0])

    machine.races.copy(source, target, stream, before, copy_call)


def _copy_with_host(
    source: torch.Tensor, target: torch.Tensor, gpu: Gpu, non_blocking: bool, waits: bool
) -> None:
    """Copy `source` to `target`, one of which is on `gpu` and the other on the host.

    The host waits for the copy if `waits` is true.
    """
    machine, to_host = gpu.machine, type(source) is VirtualTensor
    device_side, host_side = (source, target) if to_host else (target, source)
    if not non_blocking:
        machine.sync_debug.notice()
    known = memory_of(device_side).kept is not None
    fills = to_host or machine.may_fill(bytes_of(target), target.dtype)
    if not fills and not (known and _is_mask(source)):
        known = False
    if not known:
        if not to_host:
            forget(target)
        elif machine.blanks_host:
            blank(target, machine.makes_up)
        else:
            require_values(memory_of(source))
    gpu.scratch(staging(source, target, to_host, non_blocking))
    if known and (waits or not to_host):
        with _DisableTorchDispatch():
            arrived = source
            if not to_host and machine.races.host_copies:
                arrived = machine.races.on_arrival(source, gpu.stream)
            target.copy_(arrived)
            if non_blocking and target.dtype is not source.dtype:
                saturate(target, arrived)  # the GPU converts the dtype
    gpu.copy("d2h" if to_host else "h2d", bytes_of(target), is_pinned(host_side), blocking=waits)
    if not waits and gpu.stream.capture is None:
        machine.races.host_copies.append((gpu.stream, gpu.stream.count))
        if to_host and known:
            machine.races.to_host(source, target, gpu.stream)


def _is_mask(x: torch.Tensor) -> bool:
    """Return whether `x` contains infinities.

    A mask that a model adds before a softmax does. Data and parameters do not.
    """
    with _DisableTorchDispatch():
        return x.is_floating_point() and bool(x.isinf().any())


def _copy_on_gpus(source: torch.Tensor, target: torch.Tensor, there: Gpu, here: Gpu) -> None:
    """Copy `source` on GPU `there` to `target` on GPU `here`. The two can be the same GPU."""
    if memory_of(source).kept is None or memory_of(target).kept is None:
        forget(target)
    else:
        with _DisableTorchDispatch():
            target.copy_(source)
            if target.dtype is not source.dtype:
                saturate(target, source)
    nbytes = bytes_of(target)
    if here is not there:
        # The copy is on the source's stream, which waits for the target's stream. That stream then
        # waits for the copy (copy_kernel_cuda, ATen/native/cuda/Copy.cu).
        clock = here.machine.clock
        an_event = 4 * there.profile.event_seconds  # created, recorded, waited for, destroyed
        clock.wait(there.stream, clock.record(here.stream, an_event))
        there.copy("p2p", nbytes, blocking=False)
        clock.wait(here.stream, clock.record(there.stream, an_event))
    elif source.shape == target.shape and source.stride() == target.stride():
        here.copy("d2d", nbytes)
    else:
        here.launch(*laid_out(target, [source], 2 * nbytes), name="copy")


def blank(
    target: torch.Tensor,
    makes_up: Callable[[torch.dtype], bool | int | float] | None,
) -> None:
    """Fill `target`, a host tensor to which values are copied that were not kept.

    `makes_up`, if given, returns a value for a dtype. Otherwise floats become NaN, and integers do
    not change.
    """
    if makes_up is not None:
        value = makes_up(target.dtype)
    elif target.dtype.is_floating_point or target.dtype.is_complex:
        value = torch.nan
    else:
        return
    with _DisableTorchDispatch():
        target.fill_(value)


@handles("slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter")
def scatter_into_view(call: Call) -> Any:
    """Copy a tensor, then write another tensor into a view of the copy.

    The other tensor may be on any device. Source: native/TensorShape.cpp.
    """
    x, source = call.args[:2]
    if x.device == source.device:
        return operators.compute_or_into_given(call)
    return call.func(x, source.to(x.device), *call.args[2:], **call.kwargs)


@handles("_to_copy")
def to_copy(call: Call) -> Any:
    """Copy a tensor with another dtype or layout, or to another GPU.

    C++ names the device "cpu" for a copy on the same GPU.
    """
    source, kwargs = call.args[0], call.kwargs
    device = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    gpu = source._gpu
    if device is not None and device.type != "cpu":
        gpu = hardware.machine().gpu(device)
    if gpu is source._gpu:
        kwargs.pop("non_blocking", None)
        return compute(call)
    dtype, form = kwargs.get("dtype"), kwargs.get("memory_format")
    return move(source, gpu, dtype, kwargs.get("non_blocking", False), form)


def move(
    source: torch.Tensor,
    gpu: Gpu | None,
    dtype: torch.dtype | None,
    non_blocking: bool,
    memory_format: Any = None,
) -> torch.Tensor:
    """Return a copy of `source` on `gpu`, or on the CPU for None, without autograd.

    `dtype` and `memory_format` also convert it. Raises NotImplementedError for nested tensors.
    """
    if source.is_nested:
        raise unsupported("a copy of a nested tensor between devices")
    if source.layout is not torch.strided:
        return move_sparse(source, gpu, dtype, non_blocking)
    is_wrapper = hasattr(source, "__tensor_flatten__")
    is_fake = source.device.type == "cuda" and type(source) is not VirtualTensor
    if is_wrapper or is_fake:
        return move_wrapper(source, gpu, dtype, non_blocking)
    dtype = dtype or source.dtype
    converts = dtype is not source.dtype and type(source) is VirtualTensor
    if converts and gpu is not None and not gpu.profile.peer_access:
        # With peer access the copy itself converts (copy_requires_temporaries, Copy.cu).
        source = source.to(dtype)
    size, strides = source.size(), source.stride()
    keeps_layout = memory_format in (None, torch.preserve_format) and source.is_contiguous()
    if not keeps_layout:
        form = {}
        if memory_format is not None:
            form["memory_format"] = memory_format
        shape = torch.empty_strided(size, strides, device="meta")
        strides = torch.empty_like(shape, **form).stride()
    if gpu is None:
        if type(source) is VirtualTensor and not source._gpu.machine.blanks_host:
            require_values(memory_of(source))
        target = torch.empty_strided(size, strides, dtype=dtype, device="cpu")
        if type(source) is VirtualTensor:
            if memory_of(source).kept is None and not dtype.is_floating_point:
                target.zero_()  # integers get no other values
            if non_blocking:
                # The target is page-locked (_to_copy, TensorConversions.cpp). Nothing has arrived
                # there yet.
                pinned(target.zero_())
    else:
        gpu.machine.require_alive()
        target = empty(gpu, size, strides, dtype)
    transfer(source, target, non_blocking)
    return target


def move_wrapper(
    source: Any, gpu: Gpu | None, dtype: torch.dtype | None, non_blocking: bool
) -> Any:
    """Return a copy on `gpu`, or on the CPU for None, of a DTensor or a FakeTensor.

    A DTensor is copied part by part. The copy of a FakeTensor is a FakeTensor, too.
    """
    device = torch.device("cpu") if gpu is None else gpu.device
    if not hasattr(source, "__tensor_flatten__"):
        return torch.ops.aten._to_copy.default(
            source, dtype=dtype, device=device, non_blocking=non_blocking
        )
    if dtype is not None:
        source = source.to(dtype)
    names, context = source.__tensor_flatten__()
    parts = {name: getattr(source, name) for name in names}  # not all parts are tensors
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            parts[name] = part.to(device, non_blocking=non_blocking)
    return type(source).__tensor_unflatten__(parts, context, source.size(), source.stride())


def move_sparse(
    source: torch.Tensor, gpu: Gpu | None, dtype: torch.dtype | None, non_blocking: bool
) -> torch.Tensor:
    """Return a copy of a sparse tensor on `gpu`, or on the CPU for None.

    It is copied part by part.
    """
    if source.layout is not torch.sparse_coo:
        if source.layout in (torch.sparse_csr, torch.sparse_bsr):
            starts, places = source.crow_indices(), source.col_indices()
        else:
            starts, places = source.ccol_indices(), source.row_indices()
        starts = move(starts, gpu, None, non_blocking)
        places = move(places, gpu, None, non_blocking)
        values = move(source.values(), gpu, dtype, non_blocking)
        make: Any = torch.sparse_compressed_tensor
        return make(
            starts, places, values, source.size(), layout=source.layout, check_invariants=False
        )
    indices = move(source._indices(), gpu, None, non_blocking)
    values = move(source._values(), gpu, dtype, non_blocking)
    return torch.sparse_coo_tensor(
        indices,
        values,
        source.size(),
        device=indices.device,
        is_coalesced=source.is_coalesced(),
        check_invariants=False,
    )


@handles("clone")
def clone(call: Call) -> Any:
    """Copy a tensor. A sparse tensor is copied part by part.

    A sparse gradient that nothing else refers to is not copied
    (autograd/functions/accumulate_grad.h).
    """
    x = call.args[0]
    if x.layout is not torch.sparse_coo:
        return compute(call)
    in_backward = _graph_task() != -1 and not torch.is_grad_enabled()
    if in_backward and _node().name() == "torch::autograd::AccumulateGrad":
        return x
    indices, values = x._indices().clone(), x._values().clone()
    return torch.sparse_coo_tensor(
        indices, values, x.size(), is_coalesced=x.is_coalesced(), check_invariants=False
    )


@handles("roll")
def roll(call: Call) -> Any:
    """Run the operator `roll`, one dimension after the other.

    The kernel reads contiguous memory (aten/src/ATen/native/cuda/TensorTransformations.cu).
    """
    x, shifts = call.args[:2]
    dims = call.argument("dims")
    if call.op.outs or not x.numel():
        return operators.compute_or_into_given(call)
    if len(shifts) == 1 and not dims:
        return x.contiguous().view(-1).roll(shifts, 0).view(x.shape)
    if len(shifts) > 1 and len(shifts) == len(dims):
        for shift, dim in zip(shifts, dims, strict=True):
            x = x.roll(shift, dim)
        return x
    copies = contiguous_copies(x)
    return perform(call, (*copies, OUT, *(-size for size in copies)))


@handles("_sparse_coo_tensor_with_dims_and_tensors", "_sparse_coo_tensor_unsafe")
def make_sparse(call: Call) -> Any:
    """Create a sparse tensor from the given indices and values, without a copy."""
    gpu = call.common_gpu()
    return wrap(call.on_cpu(), gpu)


@handles("_coalesce")
def coalesce(call: Call) -> Any:
    """Run the operator `coalesce`, which sums up the values of equal indices of a sparse tensor.

    The host waits for the number of different indices. Without values the result still has the
    right indices. Without indices all count as different.
    """
    x = call.args[0]
    call.common_gpu()
    if not loses_values(call):
        return compute(call)
    indices, values = x._indices(), x._values()
    if memory_of(indices).kept is not None and x.sparse_dim():
        indices = torch.unique(indices, dim=1)
    else:
        indices = indices.clone()
    summed = values.new_empty((indices.shape[1], *values.shape[1:]))
    forget(summed)
    return _from_parts(x, indices, summed)


@handles("sparse_mask")
def sparse_mask(call: Call) -> Any:
    """Run the operator `sparse_mask`.

    It returns the elements of a tensor at the indices of a sparse tensor.
    """
    x, mask = call.args[:2]
    call.common_gpu()
    if mask.layout is not torch.sparse_coo or not loses_values(call):
        return compute(call)
    chosen = x.new_empty(mask._values().shape)
    forget(chosen)
    call.gpu.launch(*laid_out(chosen, [chosen], 2 * bytes_of(chosen)), name=call.op.name)
    return _from_parts(mask, mask._indices().clone(), chosen)


@handles("_to_dense")
def to_dense(call: Call) -> Any:
    """Run the operator that converts a sparse tensor to a dense one."""
    x = call.args[0]
    call.common_gpu()
    if x.layout is not torch.sparse_coo or not loses_values(call):
        return compute(call)
    dense = x._values().new_zeros(x.size(), dtype=call.argument("dtype"))
    forget(dense)
    return dense


def _from_parts(like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a coalesced sparse tensor with these indices and values, and the size of `like`."""
    return torch.sparse_coo_tensor(
        indices, values, like.size(), is_coalesced=True, check_invariants=False
    )


def staging(
    source: torch.Tensor, target: torch.Tensor, to_host: bool, non_blocking: bool
) -> tuple[int, ...]:
    """Return the bytes of each temporary on the GPU for a copy between it and the host.

    The copy is to the host if `to_host` is true, and otherwise to the GPU.
    """
    same_type = source.dtype is target.dtype
    if same_type and _one_block(source, target):
        return ()
    count = target.numel()
    if not to_host:
        if non_blocking and not same_type:  # the GPU converts the dtype
            return (count * source.itemsize,)
        if target.is_contiguous():
            return ()
        return (count * target.itemsize,)
    sizes = []
    if non_blocking and not same_type:
        sizes.append(count * target.itemsize)
    if not source.is_contiguous() or source.numel() != count:
        converted = target if non_blocking else source
        sizes.append(count * converted.itemsize)
    return tuple(sizes)


def _one_block(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether both tensors fill one block of memory in the same order."""
    if source.is_contiguous() and target.is_contiguous():
        return True
    if source.stride() != target.stride() or source.shape != target.shape:
        return False
    span = span_bytes(source.size(), source.stride(), source.dtype)
    return span == source.numel() * source.itemsize
