"""What each kind of operator does on a virtual GPU: which devices it admits, where it computes, what it costs.

`virtualgpu.ops.dispatch` chooses one of these functions for an operator.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware
from virtualgpu.errors import different_devices, not_implemented
from virtualgpu.generators import chosen
from virtualgpu.hardware import Gpu
from virtualgpu.ops import kernels, registry
from virtualgpu.ops.half import KERNELS
from virtualgpu.ops.schemas import written
from virtualgpu.ops.without_values import infer, loses_values, on_meta
from virtualgpu.tensor import (
    VirtualTensor,
    empty_without_values,
    memory_of,
    place,
    require_room,
    require_values,
    span_bytes,
    tensors,
    unsupported,
    wrap,
    wrap_all,
)

# The names that CUDA gives the kernels it does not have for integers.
INTEGER_PRODUCT = {"bmm": "baddbmm_cuda", "baddbmm": "baddbmm_cuda", "baddbmm_": "baddbmm_cuda", "dot": "dot", "vdot": "vdot"}
INTEGER_PRODUCT |= {"mv": "addmv_impl_cuda", "addmv": "addmv_impl_cuda", "addmv_": "addmv_impl_cuda"}

# Devices


def common_gpu(args: tuple, kwargs: dict) -> tuple[Gpu, int]:
    """The one GPU of all arguments, and their bytes. CPU tensors without dimensions may join. Raises RuntimeError otherwise."""
    gpu = None
    moved = 0
    for x in tensors(args, kwargs) if kwargs else tensors(args):
        if type(x) is VirtualTensor:
            moved += x.numel() * x.itemsize
            if gpu is None:
                gpu = x._gpu
            elif x._gpu is not gpu:
                raise different_devices(args, kwargs)
        elif x.dim():
            raise different_devices(args, kwargs)
    assert gpu is not None
    gpu.machine.require_alive()
    gpu.machine.selected.gpu = gpu
    return gpu, moved


# Computing


def compute(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run the CPU kernel on the same tensors and put its results on the GPU."""
    gpu, moved = common_gpu(args, kwargs)
    return run(func, args, kwargs, gpu, moved)


def mixed(func: Any, args: tuple, kwargs: dict) -> Any:
    """The same where CPU tensors may stand among the arguments."""
    found = [x for x in tensors(args, kwargs) if type(x) is VirtualTensor]
    if type(args[0]) is not VirtualTensor and isinstance(args[0], torch.Tensor):
        raise different_devices(args, kwargs)
    gpu, moved = common_gpu(tuple(found), {})
    return run(func, args, kwargs, gpu, moved)


def run(func: Any, args: tuple, kwargs: dict, gpu: Gpu, moved: int) -> Any:
    if loses_values(func, args, kwargs, gpu):
        result = infer(func, args, kwargs, gpu)
    else:
        with _DisableTorchDispatch():
            result = KERNELS.get(func, func)(*args, **kwargs)
        result = wrap_all(result, gpu)
    name = func._schema.name.removeprefix("aten::")
    rule = registry.TEMPORARIES.get(name)
    if rule is not None:
        gpu.scratch(rule(func, args, kwargs, result))
    gpu.launch(*kernels.work(func, args, kwargs, result, moved), name=name)
    return result


def view(func: Any, args: tuple, kwargs: dict) -> Any:
    """A view launches nothing and needs no values."""
    gpu = args[0]._gpu if type(args[0]) is VirtualTensor else common_gpu(args, kwargs)[0]
    gpu.machine.selected.gpu = gpu
    gpu.machine.clock.advance_host(gpu.profile.view_seconds)
    with _DisableTorchDispatch():
        result = func(*args, **kwargs)
    return wrap_all(result, gpu)


def product(func: Any, args: tuple, kwargs: dict) -> Any:
    """A matrix product: CUDA has none for integers."""
    gpu, moved = common_gpu(args, kwargs)
    dtype = args[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        kernel = INTEGER_PRODUCT.get(func._schema.name.removeprefix("aten::"), "addmm_cuda")
        raise not_implemented(kernel, dtype)
    return run(func, args, kwargs, gpu, moved)


# Operators with rules of their own


def like(func: Any, args: tuple, kwargs: dict) -> Any:
    """A new tensor after the model of another, on its device, or on another's if Python asks for that."""
    model = args[0]
    device = kwargs.pop("device", None)
    from_python = kwargs.pop("pin_memory", None) is not None
    gpu: Gpu | None = model._gpu
    if device is not None and (device.type != "cpu" or from_python):
        gpu = hardware.machine().gpu(device)
    if gpu is None:
        with _DisableTorchDispatch():
            return func(*args, **kwargs)
    gpu.machine.require_alive()
    gpu.machine.selected.gpu = gpu
    name = func._schema.name.removeprefix("aten::")
    numel = model.numel() if name.endswith("_like") else prod(args[1])
    nbytes = numel * (kwargs.get("dtype") or model.dtype).itemsize
    if not gpu.machine.may_keep(nbytes):
        shape = on_meta(func, args, kwargs)
        result = empty_without_values(gpu, shape.size(), shape.stride(), shape.dtype)
    elif name in _FILLED:
        with _DisableTorchDispatch():
            result = wrap(
                torch.empty_like(model, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format", torch.preserve_format)), gpu
            )
            _FILLED[name](result, *args[1:], generator=gpu.generator.next_draws(numel))
    else:
        with _DisableTorchDispatch():
            result = wrap(func(*args, **kwargs), gpu)
    if "empty" in name:
        memory_of(result).written = 0
    else:
        gpu.launch(nbytes, name=name)
    return result


_FILLED: dict[str, Callable[..., Any]] = {
    "rand_like": torch.Tensor.uniform_,
    "randn_like": torch.Tensor.normal_,
    "randint_like": lambda x, *limits, generator: x.random_(*(limits if len(limits) == 2 else (0, *limits)), generator=generator),
}


def draw(func: Any, args: tuple, kwargs: dict) -> Any:
    """A random operator with an argument for the generator: the GPU's own, unless the caller brings one of the GPU's kind."""
    gpu, moved = common_gpu(args, kwargs)
    position = [argument.name for argument in func._schema.arguments].index("generator")
    given = args[position] if position < len(args) else kwargs.get("generator")
    generator = chosen(given, gpu).next_draws(_largest(args))
    return refit(run(func, args[:position], kwargs | {"generator": generator}, gpu, moved))


def draw_from_default(func: Any, args: tuple, kwargs: dict) -> Any:
    """A random operator that asks for no generator takes the default one: the GPU's stands in for the CPU's."""
    gpu, moved = common_gpu(args, kwargs)
    with gpu.generator.as_default(_largest(args)):
        return run(func, args, kwargs, gpu, moved)


def _largest(args: tuple) -> int:
    """Elements of the largest tensor among the arguments, for each of which a random operator draws."""
    return max((x.numel() for x in tensors(args)), default=0)


def into_given(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator that writes into arguments, by `out=` or in place: an output on the CPU is never admitted, and it may grow."""
    for x in written(func, args, kwargs):
        if type(x) is not VirtualTensor:
            refuse_waiting(x)
            raise different_devices(args, kwargs)
    for position, argument in enumerate(argument for argument in func._schema.arguments if argument.is_out):
        x = kwargs.get(argument.name)
        if type(x) is VirtualTensor and x.layout is torch.strided and memory_of(x).export is not None:
            with _DisableTorchDispatch():
                empty = torch.empty(0, dtype=x.dtype, device="meta")
            found = list(tensors(on_meta(func, args, kwargs | {argument.name: empty})))
            _require_room(x, found[position])
    return refit(compute(func, args, kwargs))


def refit(result: Any) -> Any:
    """Give storages that have grown a block of their new size."""
    for x in tensors(result):
        if type(x) is VirtualTensor and x.layout is torch.strided:
            storage = x.untyped_storage()
            if storage.nbytes() > storage.memory.requested:
                place(storage, x._gpu, kept=storage.memory.kept is not None)
    return result


def resize(func: Any, args: tuple, kwargs: dict) -> Any:
    """`resize_`: the storage grows in place, and takes a new block if it does."""
    gpu, _ = common_gpu(args[:1], {})
    if gpu.machine.valueless_storages and memory_of(args[0]).kept is None:
        raise unsupported("resize_ of a tensor whose values were not kept")
    if memory_of(args[0]).export is not None:
        _require_room(args[0], on_meta(func, args, kwargs))
    with _DisableTorchDispatch():
        return refit(func(*args, **kwargs))


def _require_room(x: torch.Tensor, shape: torch.Tensor) -> None:
    require_room(x.untyped_storage(), x.storage_offset() * x.itemsize + span_bytes(shape.size(), shape.stride(), shape.dtype))


def set_storage(func: Any, args: tuple, kwargs: dict) -> Any:
    """`set_`: the tensor moves to another storage of its GPU."""
    gpu = args[0]._gpu
    source = args[1] if len(args) > 1 else None
    storage = source.untyped_storage() if isinstance(source, torch.Tensor) else source
    memory = getattr(storage, "memory", None)
    if storage is not None and (storage.nbytes() > 0 if memory is None else memory.gpu is not gpu):
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{gpu.device}" to a storage on different device "{storage.device}".  '
            "This is no longer allowed; the devices must match."
        )
    with _DisableTorchDispatch():
        result = func(*args, **kwargs)
    if not hasattr(result.untyped_storage(), "memory"):
        place(result.untyped_storage(), gpu)
    return result


def read_scalar(func: Any, args: tuple, kwargs: dict) -> Any:
    """`.item()`: the host waits for the stream and for the number."""
    gpu, nbytes = common_gpu(args, kwargs)
    require_values(memory_of(args[0]))
    gpu.read(nbytes)
    with _DisableTorchDispatch():
        return func(*args, **kwargs)


def compare(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator that answers the host with a truth value, which has to be read."""
    gpu, moved = common_gpu(args, kwargs)
    for x in tensors(args):
        require_values(memory_of(x))
    gpu.launch(moved, name=func._schema.name.removeprefix("aten::"))
    gpu.read(1)
    with _DisableTorchDispatch():
        return func(*args, **kwargs)


def shape_from_values(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator whose output's shape depends on values: the host waits to learn it, if it is not told."""
    result = mixed(func, args, kwargs)
    if kwargs.get("output_size") is None:
        common_gpu(tuple(x for x in tensors(args) if type(x) is VirtualTensor), {})[0].read(8)
    return result


def refuse_waiting(target: torch.Tensor) -> None:
    """C++ made this tensor on the CPU before it had looked at any device tensor: the result would come back on the wrong device."""
    waiting = getattr(target.untyped_storage(), "waiting", None) if type(target) is torch.Tensor else None
    if waiting is not None and waiting == hardware.machine().selected.waiting:
        raise unsupported("an operator for which PyTorch's C++ makes a tensor on the CPU and then writes a CUDA tensor into it")
