"""Copies between any two devices, without autograd: their values, their memory and their time."""

from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.hardware import Gpu
from virtualgpu.host.pinned import is_pinned, pinned
from virtualgpu.ops import kernels, staging
from virtualgpu.ops.operators import compute, refuse_waiting
from virtualgpu.ops.without_values import forget
from virtualgpu.tensor import VirtualTensor, empty, mark_written, memory_of, require_values, unsupported


def copy_into(func: Any, args: tuple, kwargs: dict) -> Any:
    """`copy_`: between any two devices."""
    target, source = args[0], args[1]
    refuse_waiting(target)
    transfer(source, target, non_blocking=bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False))
    return target


def transfer(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Copy values and queue the copy where CUDA does: within a GPU, between two, or between a GPU and the host."""
    there = source._gpu if type(source) is VirtualTensor else None
    here = target._gpu if type(target) is VirtualTensor else None
    machine = (here or there).machine
    machine.require_alive()
    machine.selected.gpu = here or there
    host_side = target if here is None else source if there is None else None
    waits = not (non_blocking and host_side is not None and is_pinned(host_side))
    if machine.selected.watched or (waits and hardware.watcher is None):
        _copy(source, target, there, here, non_blocking, waits)
        return
    if not waits:
        machine.order.mark_host(host_side)
    stream = (there or here).stream
    before = machine.clock.before(stream)
    if there is not None and here is not None and here is not there:
        before |= {s: max(n, before.get(s, 0)) for s, n in machine.clock.before(here.stream).items()}
    machine.order.copy(source, target, stream, before, lambda func, args, kwargs: _copy(args[1], args[0], there, here, non_blocking, waits))


def _copy(source: torch.Tensor, target: torch.Tensor, there: Gpu | None, here: Gpu | None, non_blocking: bool, waits: bool) -> None:
    """The copy itself, from `there` to `here` (None: the host). `waits` says whether the host waits for one with the host."""
    nbytes = target.numel() * target.itemsize
    clock, order = (here or there).machine.clock, (here or there).machine.order
    if not non_blocking and (here is None or there is None):
        (here or there).machine.sync_debug.notice()
    unknown = there is not None and memory_of(source).kept is None
    if here is None:
        if unknown and there.machine.blanks_host:
            blank(target)
        elif unknown:
            require_values(memory_of(source))
    elif unknown or memory_of(target).kept is None:
        forget(target)
        unknown = True
    host_side = target if here is None else source
    if here is None or there is None:
        (here or there).scratch(staging.staging(source, target, there, here, non_blocking))
    if not unknown and (waits or here is not None):
        with _DisableTorchDispatch():
            target.copy_(source)
    if here is None or there is None:
        gpu = here or there
        gpu.copy("d2h" if here is None else "h2d", nbytes, is_pinned(host_side), blocking=waits)
        if not waits:
            order.host_copies.append((gpu.stream, gpu.stream.count))
            if here is None and not unknown:
                order.to_host(source, target, gpu.stream)
    elif here is there:
        if source.shape == target.shape and source.stride() == target.stride():
            here.copy("d2d", nbytes)
        else:
            here.launch(*kernels.laid_out(target, [source], 2 * nbytes), name="copy")
    else:
        # On the source's stream, which waits for the target's, and that one for the copy (copy_kernel_cuda, ATen/native/cuda/Copy.cu).
        an_event = 4 * there.profile.event_seconds  # made, recorded, waited for, destroyed
        clock.wait(there.stream, clock.record(here.stream, an_event))
        there.copy("p2p", nbytes, blocking=False)
        clock.wait(here.stream, clock.record(there.stream, an_event))
    if here is not None and hardware.watcher is None:
        mark_written(target)


def blank(target: torch.Tensor) -> None:
    """Unknown values arrive in a tensor on the host: NaN where the dtype has it; integers stay as they were."""
    if target.dtype.is_floating_point or target.dtype.is_complex:
        with _DisableTorchDispatch():
            target.fill_(torch.nan)


def to_copy(func: Any, args: tuple, kwargs: dict) -> Any:
    """A copy with another dtype or layout on the same device; C++ says "cpu" for that. Another GPU may be named."""
    source = args[0]
    device = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    gpu = source._gpu if device is None or device.type == "cpu" else hardware.machine().gpu(device)
    if gpu is source._gpu:
        kwargs.pop("non_blocking", None)
        return compute(func, args, kwargs)
    return move(source, gpu, kwargs.get("dtype"), kwargs.get("non_blocking", False), kwargs.get("memory_format"))


def move(source: torch.Tensor, gpu: Gpu | None, dtype: torch.dtype | None, non_blocking: bool, memory_format: Any = None) -> torch.Tensor:
    """A copy on another device (None: on the CPU), without autograd."""
    if source.is_nested:
        raise unsupported("a copy of a nested tensor between devices")
    if source.layout is not torch.strided:
        return move_sparse(source, gpu, dtype, non_blocking)
    dtype = dtype or source.dtype
    between = gpu is not None and type(source) is VirtualTensor
    if dtype is not source.dtype and between and not gpu.profile.peer_access:
        source = source.to(dtype)  # converted where it lies; else the copy itself converts (copy_requires_temporaries, Copy.cu)
    form = {} if memory_format is None else {"memory_format": memory_format}
    shape = torch.empty_like(torch.empty_strided(source.size(), source.stride(), dtype=dtype, device="meta"), **form)
    if gpu is None:
        if type(source) is VirtualTensor and not source._gpu.machine.blanks_host:
            require_values(memory_of(source))
        target = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device="cpu")
        if non_blocking and type(source) is VirtualTensor:
            pinned(target.zero_())  # page-locked memory (_to_copy, TensorConversions.cpp), in which nothing stands yet
    else:
        gpu.machine.require_alive()
        target = empty(gpu, shape.size(), shape.stride(), shape.dtype)
    transfer(source, target, non_blocking)
    return target


def move_sparse(source: torch.Tensor, gpu: Gpu | None, dtype: torch.dtype | None, non_blocking: bool) -> torch.Tensor:
    """A sparse tensor moves part by part."""
    if source.layout is not torch.sparse_coo:
        raise unsupported(f"a copy of a tensor of layout {source.layout} between devices")
    indices, values = (move(part, gpu, kind, non_blocking) for part, kind in ((source._indices(), None), (source._values(), dtype)))
    return torch.sparse_coo_tensor(
        indices, values, source.size(), device=indices.device, is_coalesced=source.is_coalesced(), check_invariants=False
    )
