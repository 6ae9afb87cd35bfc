"""Copies between any two devices, without autograd: their values, their memory and their time.

What a copy between a GPU and the host allocates on the GPU besides its target is the rule of `copy_kernel_cuda` and
`copy_requires_temporaries` in PyTorch's native/cuda/Copy.cu: a copy that is no plain block of memory goes through contiguous copies on
both sides. A blocking copy converts the type on the host, another one on the GPU.
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
from virtualgpu.ops.without_values import forget
from virtualgpu.ops.work import laid_out
from virtualgpu.pinned import is_pinned, pinned
from virtualgpu.tensor import VirtualTensor, empty, mark_written, memory_of, span_bytes, wrap

_node, _graph_task = torch._C._current_autograd_node, torch._C._current_graph_task_id
overwrites("copy_", "_foreach_copy_")
_PAGEABLE = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
    "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)


@handles("copy_")
def copy_into(call: Call) -> Any:
    """`copy_`: between any two devices."""
    target, source = call.args[0], call.args[1]
    refuse_waiting(target)
    transfer(source, target, non_blocking=call.argument("non_blocking"))
    return target


def transfer(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Copy values and queue the copy where CUDA does: within a GPU, between two, or between a GPU and the host."""
    there = source._gpu if type(source) is VirtualTensor else None
    here = target._gpu if type(target) is VirtualTensor else None
    gpu: Gpu = here or there  # type: ignore[assignment]  # one of the two is on a GPU
    machine = gpu.machine
    machine.require_alive()
    machine.selected.gpu = gpu
    host_side = target if here is None else source if there is None else None
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
        before |= {s: max(n, before.get(s, 0)) for s, n in machine.clock.before(here.stream).items()}
    machine.races.copy(source, target, stream, before, lambda call: copy(call.args[1], call.args[0]))


def _copy_with_host(source: torch.Tensor, target: torch.Tensor, gpu: Gpu, non_blocking: bool, waits: bool) -> None:
    """The copy itself, between a GPU and the host, which waits for it or not."""
    machine, to_host = gpu.machine, type(source) is VirtualTensor
    device_side, host_side = (source, target) if to_host else (target, source)
    if not non_blocking:
        machine.sync_debug.notice()
    known = memory_of(device_side).kept is not None
    if not (to_host or machine.may_fill(bytes_of(target), target.dtype) or (known and _is_mask(source))):
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
            arrived = source if to_host or not machine.races.host_copies else machine.races.on_arrival(source, gpu.stream)
            target.copy_(arrived)
            if non_blocking and target.dtype is not source.dtype:
                saturate(target, arrived)  # the GPU converts
    gpu.copy("d2h" if to_host else "h2d", bytes_of(target), is_pinned(host_side), blocking=waits)
    if not waits and gpu.stream.capture is None:
        machine.races.host_copies.append((gpu.stream, gpu.stream.count))
        if to_host and known:
            machine.races.to_host(source, target, gpu.stream)


def _is_mask(x: torch.Tensor) -> bool:
    """Is this what a model adds to scores, so that softmax leaves some out? Data and parameters have no infinity."""
    with _DisableTorchDispatch():
        return x.is_floating_point() and bool(x.isinf().any())


def _copy_on_gpus(source: torch.Tensor, target: torch.Tensor, there: Gpu, here: Gpu) -> None:
    """The copy itself, from GPU `there` to GPU `here`, often the same."""
    if memory_of(source).kept is None or memory_of(target).kept is None:
        forget(target)
    else:
        with _DisableTorchDispatch():
            target.copy_(source)
            if target.dtype is not source.dtype:
                saturate(target, source)
    nbytes = bytes_of(target)
    if here is not there:
        # On the source's stream, which waits for the target's, and that one for the copy (copy_kernel_cuda, ATen/native/cuda/Copy.cu).
        clock, an_event = here.machine.clock, 4 * there.profile.event_seconds  # made, recorded, waited for, destroyed
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
    """Fill a tensor on the host to which unknown values are copied.

    If values may be made up, it gets those. Otherwise floats become NaN, and integers stay.
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
    """Copy a tensor, and copy another one from any device into a view of the copy (native/TensorShape.cpp)."""
    x, source = call.args[:2]
    if x.device == source.device:
        return operators.compute_or_into_given(call)
    return call.func(x, source.to(x.device), *call.args[2:], **call.kwargs)


@handles("_to_copy")
def to_copy(call: Call) -> Any:
    """A copy with another dtype or layout on the same device; C++ says "cpu" for that. Another GPU may be named."""
    source, kwargs = call.args[0], call.kwargs
    device = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    gpu = source._gpu if device is None or device.type == "cpu" else hardware.machine().gpu(device)
    if gpu is source._gpu:
        kwargs.pop("non_blocking", None)
        return compute(call)
    return move(source, gpu, kwargs.get("dtype"), kwargs.get("non_blocking", False), kwargs.get("memory_format"))


def move(source: torch.Tensor, gpu: Gpu | None, dtype: torch.dtype | None, non_blocking: bool, memory_format: Any = None) -> torch.Tensor:
    """A copy on another device (None: on the CPU), without autograd."""
    if source.is_nested:
        raise unsupported("a copy of a nested tensor between devices")
    if source.layout is not torch.strided:
        return move_sparse(source, gpu, dtype, non_blocking)
    if hasattr(source, "__tensor_flatten__") or (source.device.type == "cuda" and type(source) is not VirtualTensor):
        return move_wrapper(source, gpu, dtype, non_blocking)
    dtype = dtype or source.dtype
    if dtype is not source.dtype and type(source) is VirtualTensor and gpu is not None and not gpu.profile.peer_access:
        source = source.to(dtype)  # converted where it lies; else the copy itself converts (copy_requires_temporaries, Copy.cu)
    size, strides = source.size(), source.stride()
    if not (memory_format in (None, torch.preserve_format) and source.is_contiguous()):  # else it lies there as it does here
        form = {} if memory_format is None else {"memory_format": memory_format}
        strides = torch.empty_like(torch.empty_strided(size, strides, device="meta"), **form).stride()
    if gpu is None:
        if type(source) is VirtualTensor and not source._gpu.machine.blanks_host:
            require_values(memory_of(source))
        target = torch.empty_strided(size, strides, dtype=dtype, device="cpu")
        if type(source) is VirtualTensor and memory_of(source).kept is None and not dtype.is_floating_point:
            target.zero_()  # of integers nothing else is written
        if non_blocking and type(source) is VirtualTensor:
            pinned(target.zero_())  # page-locked memory (_to_copy, TensorConversions.cpp), in which nothing stands yet
    else:
        gpu.machine.require_alive()
        target = empty(gpu, size, strides, dtype)
    transfer(source, target, non_blocking)
    return target


def move_wrapper(source: Any, gpu: Gpu | None, dtype: torch.dtype | None, non_blocking: bool) -> Any:
    """A DTensor moves part by part; a FakeTensor has none, and stays fake."""
    if not hasattr(source, "__tensor_flatten__"):
        device = torch.device("cpu") if gpu is None else gpu.device
        return torch.ops.aten._to_copy.default(source, dtype=dtype, device=device, non_blocking=non_blocking)
    source = source if dtype is None else source.to(dtype)
    names, context = source.__tensor_flatten__()
    parts = {name: getattr(source, name) for name in names}  # a mesh among them
    for name, part in parts.items():
        if isinstance(part, torch.Tensor):
            parts[name] = part.to("cpu" if gpu is None else gpu.device, non_blocking=non_blocking)
    return type(source).__tensor_unflatten__(parts, context, source.size(), source.stride())


def move_sparse(source: torch.Tensor, gpu: Gpu | None, dtype: torch.dtype | None, non_blocking: bool) -> torch.Tensor:
    """A sparse tensor moves part by part."""
    if source.layout is not torch.sparse_coo:
        by_rows = source.layout in (torch.sparse_csr, torch.sparse_bsr)
        starts, places = (source.crow_indices(), source.col_indices()) if by_rows else (source.ccol_indices(), source.row_indices())
        starts, places = move(starts, gpu, None, non_blocking), move(places, gpu, None, non_blocking)
        values = move(source.values(), gpu, dtype, non_blocking)
        make: Any = torch.sparse_compressed_tensor
        return make(starts, places, values, source.size(), layout=source.layout, check_invariants=False)
    indices, values = (move(part, gpu, kind, non_blocking) for part, kind in ((source._indices(), None), (source._values(), dtype)))
    return torch.sparse_coo_tensor(
        indices, values, source.size(), device=indices.device, is_coalesced=source.is_coalesced(), check_invariants=False
    )


@handles("clone")
def clone(call: Call) -> Any:
    """Of a sparse tensor, part by part. A gradient that nobody else holds is kept as it is (autograd/functions/accumulate_grad.h)."""
    x = call.args[0]
    if x.layout is not torch.sparse_coo:
        return compute(call)
    if _graph_task() != -1 and not torch.is_grad_enabled() and _node().name() == "torch::autograd::AccumulateGrad":
        return x
    indices, values = x._indices().clone(), x._values().clone()
    return torch.sparse_coo_tensor(indices, values, x.size(), is_coalesced=x.is_coalesced(), check_invariants=False)


@handles("roll")
def roll(call: Call) -> Any:
    """One dimension after the other; the kernel reads contiguous memory (aten/src/ATen/native/cuda/TensorTransformations.cu)."""
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
    """A sparse tensor is made of the two that it is given, whatever size it stands for."""
    gpu = call.common_gpu()
    return wrap(call.on_cpu(), gpu)


def staging(source: torch.Tensor, target: torch.Tensor, to_host: bool, non_blocking: bool) -> tuple[int, ...]:
    """Bytes of the temporaries on the GPU, of a copy between it and the host."""
    same_type = source.dtype is target.dtype
    if same_type and _one_block(source, target):
        return ()
    count = target.numel()
    if not to_host:
        converts_here = non_blocking and not same_type
        return () if target.is_contiguous() and not converts_here else (count * (source if converts_here else target).itemsize,)
    sizes = []
    if non_blocking and not same_type:
        sizes.append(count * target.itemsize)
    if not source.is_contiguous() or source.numel() != count:
        sizes.append(count * (target if non_blocking else source).itemsize)
    return tuple(sizes)


def _one_block(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Do both fill their memory in the same order?"""
    if source.is_contiguous() and target.is_contiguous():
        return True
    same_order = source.stride() == target.stride() and source.shape == target.shape
    return same_order and span_bytes(source.size(), source.stride(), source.dtype) == source.numel() * source.itemsize
