"""The execution of each kind of operator: allowed devices, computation and cost.

`virtualgpu.ops.dispatch` chooses one of these functions unless a family has its own.
"""

from collections.abc import Callable
from math import nan, prod
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.generators import chosen
from virtualgpu.memory import require_values
from virtualgpu.ops.call import Call, different_devices
from virtualgpu.ops.without_values import infer, loses_values, on_meta
from virtualgpu.ops.work import work
from virtualgpu.tensor import (
    VirtualTensor,
    allocate_on,
    empty_without_values,
    memory_of,
    require_within_capacity,
    span_bytes,
    tensors,
    unsupported,
    wrap,
    wrap_all,
)


def compute(call: Call, values: Callable[[], Any] | None = None) -> Any:
    """Run an operator on one GPU, and return its results.

    The CPU's kernel computes the values, or the function `values` if it is given.
    """
    call.common_gpu()
    return run(call, values)


def mixed(call: Call) -> Any:
    """Run an operator whose arguments, except the first one, may also be on the CPU."""
    if type(call.args[0]) is not VirtualTensor and isinstance(call.args[0], torch.Tensor):
        raise different_devices(call.args, call.kwargs)
    call.common_gpu(host=True)
    return run(call)


def run(call: Call, values: Callable[[], Any] | None = None) -> Any:
    """Compute the results of an operator, allocate memory for them, and queue the kernel.

    Memory for temporaries is allocated, too. If the CPU's kernel does not compute the same values
    as CUDA's, `values` returns the results as plain tensors. Its caller then allocates the
    temporaries.
    """
    gpu, op = call.gpu, call.op
    if loses_values(call):
        result = infer(call)
    else:
        with _DisableTorchDispatch():
            result = op.kernel(*call.args, **call.kwargs) if values is None else values()
        result = wrap(result, gpu) if type(result) is torch.Tensor else wrap_all(result, gpu)
    if op.temporaries is not None and values is None:
        gpu.scratch(op.temporaries(call, result))
    gpu.launch(*work(call, result), name=op.name)
    return result


def view(call: Call) -> Any:
    """Run an operator that returns a view. It launches nothing and needs no values."""
    gpu = call.gpu
    if type(call.args[0]) is not VirtualTensor:
        call.common_gpu()
    machine = gpu.machine
    machine.selected.gpu = gpu
    machine.clock.advance_host(gpu.profile.view_seconds)
    with _DisableTorchDispatch():
        result = call.op.kernel(*call.args, **call.kwargs)
    return wrap(result, gpu) if type(result) is torch.Tensor else wrap_all(result, gpu)


# Operators with their own rules


def like(call: Call) -> Any:
    """Run an operator that creates a tensor like its first argument.

    The new tensor is on the same device or on the device that Python asks for.
    """
    model, kwargs = call.args[0], call.kwargs
    device = kwargs.pop("device", None)
    from_python = kwargs.pop("pin_memory", None) is not None
    gpu = model._gpu
    if device is not None and (device.type != "cpu" or from_python):
        gpu = hardware.machine().gpu(device)
    if gpu is None:
        return call.on_cpu()
    gpu.machine.require_alive()
    gpu.machine.selected.gpu = gpu
    name = call.op.name
    dtype = kwargs.get("dtype") or model.dtype
    if name.endswith("_like"):
        numel = model.numel()
    else:
        numel = prod(call.args[1])
    nbytes = numel * dtype.itemsize
    if not gpu.machine.may_keep(nbytes, dtype, data=name in _FILLED):
        shape = on_meta(call)
        result = empty_without_values(gpu, shape.size(), shape.stride(), shape.dtype)
    elif name in _FILLED:
        with _DisableTorchDispatch():
            form = kwargs.get("memory_format", torch.preserve_format)
            result = wrap(torch.empty_like(model, dtype=dtype, memory_format=form), gpu)
            _FILLED[name](result, *call.args[1:], generator=gpu.generator.next_draws(numel))
    else:
        result = wrap(call.on_cpu(), gpu)
    if "empty" in name:
        memory_of(result).written = 0
    else:
        gpu.launch(nbytes, name=name)
    return result


def _fill_with_integers(x: torch.Tensor, *limits: int, generator: torch.Generator) -> torch.Tensor:
    """Fill `x` with random integers between two limits. A single limit is the upper one."""
    if len(limits) == 1:
        limits = (0, *limits)
    return x.random_(*limits, generator=generator)


_FILLED: dict[str, Callable[..., Any]] = {
    "rand_like": torch.Tensor.uniform_,
    "randn_like": torch.Tensor.normal_,
    "randint_like": _fill_with_integers,
}


def draw(call: Call) -> Any:
    """Run a random operator that accepts a generator, with the GPU's own one by default."""
    gpu = call.common_gpu()
    generator = chosen(call.argument("generator"), gpu).next_draws(_largest(call.args))
    args = call.args[: call.op.arguments.index("generator")]
    return refit(compute(call.with_arguments(*args, **call.kwargs | {"generator": generator})))


def draw_from_default(call: Call) -> Any:
    """Run a random operator without a generator argument, with the GPU's generator."""
    with call.common_gpu().generator.as_default(_largest(call.args)):
        return run(call)


def _largest(args: tuple) -> int:
    """Return the number of elements of the largest tensor among a random operator's arguments.

    The operator draws one number for each of them.
    """
    return max((x.numel() for x in tensors(args)), default=0)


def into_given(call: Call) -> Any:
    """Run an operator that writes its results to arguments, given as `out=` or in place.

    The outputs must be on a GPU, and their storages can grow.
    """
    for x in call.written():
        if type(x) is not VirtualTensor:
            refuse_waiting(x)
            raise different_devices(call.args, call.kwargs)
    if call.op.outs and not call.op.outputs_anywhere and not _has_input_on_gpu(call):
        raise different_devices(call.args, call.kwargs)
    for position, name in enumerate(call.op.outs):
        given = call.kwargs.get(name)
        if type(given) is not VirtualTensor or given.layout is not torch.strided:
            continue
        given.untyped_storage().unshare()
        if memory_of(given).export is not None:
            with _DisableTorchDispatch():
                empty = torch.empty(0, dtype=given.dtype, device="meta")
            kwargs = call.kwargs | {name: empty}
            found = list(tensors(on_meta(call.with_arguments(*call.args, **kwargs))))
            _require_within_capacity(given, found[position])
    return refit(compute(call))


def _has_input_on_gpu(call: Call) -> bool:
    """Return whether an input of the call is on a GPU. Outputs do not count.

    Without any input, return True.
    """
    given = [value for name, value in call.kwargs.items() if name not in call.op.outs]
    inputs = list(tensors(call.args, *given))
    return not inputs or any(type(x) is VirtualTensor for x in inputs)


def compute_or_into_given(call: Call) -> Any:
    """Run an operator that has no rule of its own.

    It writes its results to the given outputs, or else to new tensors.
    """
    if call.op.outs:
        return into_given(call)
    return compute(call)


def refit(result: Any) -> Any:
    """Give each storage of an operator's result that has grown a larger memory block.

    Returns `result`.
    """
    for x in tensors(result):
        if type(x) is VirtualTensor and x.layout is torch.strided:
            storage = x.untyped_storage()
            if storage.nbytes() > storage.memory.requested:
                allocate_on(x._gpu, storage, kept=storage.memory.kept is not None)
    return result


def resize(call: Call) -> Any:
    """Run `resize_`. A storage that grows gets a new block.

    Raises NotImplementedError for a tensor without values.
    """
    x = call.args[0]
    gpu = call.common_gpu()
    if gpu.machine.valueless_storages and memory_of(x).kept is None:
        raise unsupported("resize_ of a tensor whose values were not kept")
    if memory_of(x).export is not None:
        _require_within_capacity(x, on_meta(call))
    x.untyped_storage().unshare()
    with _DisableTorchDispatch():
        return refit(call.op.kernel(*call.args, **call.kwargs))


def resize_as(call: Call) -> Any:
    """Run `resize_as_`, which resizes a tensor to the size of another one on any device."""
    x, template = call.args[:2]
    form = call.argument("memory_format")
    options = {}
    if form not in (None, torch.preserve_format):
        options["memory_format"] = form
    if form is torch.preserve_format:
        options = {"memory_format": torch._prims_common.suggest_memory_format(template)}
    return torch.ops.aten.resize_.default(x, template.size(), **options)


def _require_within_capacity(x: VirtualTensor, shape: torch.Tensor) -> None:
    """Raise NotImplementedError if `x` is in memory shared with a process and would outgrow it.

    `shape` is a tensor with the new shape of `x`.
    """
    start = int(x.storage_offset()) * x.itemsize
    nbytes = start + span_bytes(shape.size(), shape.stride(), shape.dtype)
    require_within_capacity(x.untyped_storage(), nbytes)


def set_storage(call: Call) -> Any:
    """Run `set_`, which moves a tensor to another storage of its GPU.

    Raises RuntimeError for a storage on another device.
    """
    x = call.args[0]
    source = call.args[1] if len(call.args) > 1 else None
    storage = source
    if isinstance(source, torch.Tensor):
        storage = source.untyped_storage()
    memory = getattr(storage, "memory", None)
    if type(x) is not VirtualTensor:
        raise storage_elsewhere(x, storage)
    gpu = x._gpu
    if memory is not None:
        elsewhere = memory.gpu is not gpu
    else:
        elsewhere = storage is not None and storage.nbytes() > 0
    if elsewhere:
        raise storage_elsewhere(x, storage)
    result = call.on_cpu()
    if not hasattr(result.untyped_storage(), "memory"):
        allocate_on(gpu, result.untyped_storage())
    return result


def storage_elsewhere(x: torch.Tensor, storage: Any) -> RuntimeError:
    """Return the error for the operator `set_` of a tensor and a storage on another device."""
    return RuntimeError(
        f'Attempted to set the storage of a tensor on device "{x.device}" to a storage on '
        f'different device "{storage.device}".  '
        "This is no longer allowed; the devices must match."
    )


def read_scalar(call: Call) -> Any:
    """Run `.item()`, for which the host waits for the stream and the number.

    Raises RuntimeError if the value was not kept.
    """
    gpu, nbytes, x = call.common_gpu(), call.moved, call.args[0]
    machine, memory = gpu.machine, memory_of(x)
    is_kept = memory.kept is not None
    blank = machine.blanks_host and x.dtype.is_floating_point  # as for a copy to the host
    if not is_kept and not blank and machine.makes_up is None:
        require_values(memory)
    gpu.read(nbytes)
    if is_kept:
        return call.on_cpu()
    if machine.makes_up is None:
        return nan
    return machine.makes_up(x.dtype)


def shape_from_values(call: Call) -> Any:
    """Run an operator whose output's shape depends on values. The host waits for the shape.

    It does not wait if the caller gives the shape as `output_size`.
    """
    result = mixed(call)
    if call.kwargs.get("output_size") is None:
        call.gpu.read(8)
    return result


def refuse_waiting(target: torch.Tensor) -> None:
    """Raise NotImplementedError if C++ made the target of a write on the CPU and meant a GPU.

    C++ made it before it saw a device tensor, so the result would be on the wrong device.
    """
    if type(target) is not torch.Tensor:
        return
    waiting = getattr(target.untyped_storage(), "waiting", None)
    if waiting is not None and waiting == hardware.machine().selected.waiting:
        raise unsupported(
            "an operator for which PyTorch's C++ makes a tensor on the CPU and then writes a CUDA "
            "tensor into it"
        )
