"""What each kind of operator does on a virtual GPU: which devices it admits, where it computes, what it costs.

`handler` chooses one function of this module for an operator, once, from its schema; the tables name the exceptions.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch._C import _DisableTorchDispatch

from labkit.vgpu import footprint, hardware
from labkit.vgpu.errors import different_devices
from labkit.vgpu.generators import is_virtual
from labkit.vgpu.half import KERNELS
from labkit.vgpu.hardware import Gpu
from labkit.vgpu.tensor import (
    INFER_FROM,
    VirtualTensor,
    empty,
    hollow,
    memory_of,
    place,
    require_values,
    unsupported,
    wrap,
    wrap_all,
)

aten = torch.ops.aten
# The first argument gives the shape (and the device, unless `device` says otherwise); nothing is read.
LIKE = {
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided",
}  # fmt: skip
# Operators that take CPU tensors beside CUDA ones: indices, and what CUDA's own kernels read on the host.
MIXED = {
    "index",
    "index_put",
    "index_put_",
    "_index_put_impl_",
    "_unsafe_index",
    "_unsafe_index_put",
    "_pack_padded_sequence",
    "_cudnn_rnn",
    "_ctc_loss",
    "_ctc_loss_backward",
}
# Matrix products: the argument positions of the two factors.
PRODUCTS = {
    "mm": (0, 1), "bmm": (0, 1), "mv": (0, 1), "dot": (0, 1), "vdot": (0, 1),
    "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2), "baddbmm_": (1, 2), "addmv": (1, 2), "addmv_": (1, 2),
}  # fmt: skip
# The names that CUDA gives the kernels it does not have for integers.
INTEGER_PRODUCT = {"bmm": "baddbmm_cuda", "baddbmm": "baddbmm_cuda", "baddbmm_": "baddbmm_cuda", "dot": "dot", "vdot": "vdot"}
INTEGER_PRODUCT |= {"mv": "addmv_impl_cuda", "addmv": "addmv_impl_cuda", "addmv_": "addmv_impl_cuda"}
FORMATS = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float64: "float64"}
Handler = Callable[[Any, tuple, dict], Any]


def handler(func: Any) -> Handler:
    """The function that runs this operator."""
    name = func._schema.name.removeprefix("aten::")
    if name in footprint.HANDLERS:
        return footprint.HANDLERS[name]
    if name in _NAMED:
        return _NAMED[name]
    if name in LIKE:
        return like
    if name in PRODUCTS:
        return product
    arguments = {argument.name for argument in func._schema.arguments}
    if "generator" in arguments:
        return draw
    if torch.Tag.nondeterministic_seeded in func.tags:
        return draw_from_default
    if _returns_views(func):
        return view
    if torch.Tag.dynamic_output_shape in func.tags:
        return shape_from_values
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
        return into_given if name not in MIXED else mixed
    return mixed if name in MIXED else compute


def _returns_views(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


# Devices


def tensors(*arguments: Any) -> Iterator[torch.Tensor]:
    """All tensors among an operator's arguments, those in lists too."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from tensors(*argument)
        elif isinstance(argument, dict):
            yield from tensors(*argument.values())


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


def run(func: Any, args: tuple, kwargs: dict, gpu: Gpu, moved: int, flops: float = 0, format: str = "float32", outputs: int = 0) -> Any:
    if (gpu.machine.hollow or _large(args)) and not keeps_values(func, args, kwargs, gpu):
        result = infer(func, args, kwargs, gpu)
    else:
        with _DisableTorchDispatch():
            result = KERNELS.get(func, func)(*args, **kwargs)
        result = wrap_all(result, gpu)
    rule = footprint.TEMPORARIES.get(func._schema.name[6:])
    if rule is not None:
        gpu.scratch(rule(func, args, kwargs, result))
    for x in tensors(result):
        moved += x.numel() * x.itemsize
    gpu.launch(moved, flops, format, outputs)
    return result


def view(func: Any, args: tuple, kwargs: dict) -> Any:
    """A view launches nothing and needs no values."""
    gpu = args[0]._gpu if type(args[0]) is VirtualTensor else common_gpu(args, kwargs)[0]
    gpu.machine.selected.gpu = gpu
    with _DisableTorchDispatch():
        result = func(*args, **kwargs)
    return wrap_all(result, gpu)


def product(func: Any, args: tuple, kwargs: dict) -> Any:
    """A matrix product: CUDA has none for integers."""
    gpu, moved = common_gpu(args, kwargs)
    dtype = args[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        kernel = INTEGER_PRODUCT.get(func._schema.name.removeprefix("aten::"), "addmm_cuda")
        scalar = torch.empty(0, dtype=dtype).type().removeprefix("torch.").removesuffix("Tensor")
        raise NotImplementedError(f"\"{kernel}\" not implemented for '{scalar}'")
    work = matrix_work(func, args)
    flops, outputs = work if work is not None else (0, 0)
    format = FORMATS.get(dtype, "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32")
    return run(func, args, kwargs, gpu, moved, flops, format, outputs)


def matrix_work(func: Any, args: tuple) -> tuple[int, int] | None:
    """Floating-point operations and output elements of a matrix product; None for another operator."""
    positions = PRODUCTS.get(func._schema.name.removeprefix("aten::"))
    if positions is None:
        return None
    left, right = args[positions[0]], args[positions[1]]
    terms = left.shape[-1]
    outputs = left.numel() // max(terms, 1) * (right.shape[-1] if right.dim() > 1 else 1)
    return 2 * outputs * terms, outputs


# Without values


def _large(args: tuple) -> bool:
    """Could the output be too large for the host? A broadcast or a product makes at most the product of the input sizes."""
    size = 1
    for x in args:
        if isinstance(x, torch.Tensor):
            size *= x.numel() or 1
    return size >= INFER_FROM


def keeps_values(func: Any, args: tuple, kwargs: dict, gpu: Gpu) -> bool:
    """Are all inputs known, and is there room for the outputs?"""
    for x in tensors(args, kwargs):
        if type(x) is VirtualTensor and x.layout is torch.strided and memory_of(x).kept is None:
            return False
    if not gpu.machine.values:
        return False
    if not _large(args):
        return True
    shapes = on_meta(func, args, kwargs)
    if shapes is None:
        return True
    fresh = sum(x.untyped_storage().nbytes() for x in tensors(shapes) if x.device.type == "meta")
    return gpu.machine.may_keep(fresh)


def on_meta(func: Any, args: tuple, kwargs: dict) -> Any:
    """The operator run on shapes alone; None where PyTorch cannot say them without the values."""

    def shape_of(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            with _DisableTorchDispatch():
                return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, (list, tuple)):
            return type(x)(shape_of(y) for y in x)
        return x

    try:
        return func(*shape_of(args), **{key: shape_of(value) for key, value in kwargs.items() if key != "generator"})
    except NotImplementedError:
        return None


def infer(func: Any, args: tuple, kwargs: dict, gpu: Gpu) -> Any:
    """What the operator returns, without values."""
    written = _written(func, args, kwargs)
    for x in written:
        forget(x)
    returns = func._schema.returns
    if all(r.alias_info is not None for r in returns):  # all that it does is to write
        return None if not returns else written[0] if len(returns) == 1 else tuple(written)
    shapes = on_meta(func, args, kwargs)
    if shapes is None:
        raise RuntimeError(f"{func._schema.name}: the shape of its result depends on values, and these were not kept")

    def place_shape(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return hollow(gpu, x.size(), x.stride(), x.dtype)
        if isinstance(x, (list, tuple)):
            return type(x)(place_shape(y) for y in x)
        return x

    return place_shape(shapes)


def _written(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors that the operator writes into."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or position >= len(args) else args[position]
            found += tensors(value)
    return found


def forget(x: torch.Tensor) -> None:
    """Something unknown was written into this tensor: its storage has no values any more."""
    memory = memory_of(x)
    if memory.kept is not None:
        memory.gpu.machine.keep(memory.kept, -1)
        memory.gpu.machine.keep(None)
        memory.kept = None


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
        result = hollow(gpu, shape.size(), shape.stride(), shape.dtype)
    elif name in _FILLED:
        with _DisableTorchDispatch():
            result = wrap(
                torch.empty_like(model, dtype=kwargs.get("dtype"), memory_format=kwargs.get("memory_format", torch.preserve_format)), gpu
            )
            _FILLED[name](result, *args[1:], generator=gpu.generator)
    else:
        with _DisableTorchDispatch():
            result = wrap(func(*args, **kwargs), gpu)
    if "empty" not in name:
        gpu.launch(nbytes)
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
    if given is not None and not is_virtual(given):
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{given.device.type}'")
    if given is None:
        kwargs = kwargs | {"generator": gpu.generator}
        args = args[:position]
    return refit(run(func, args, kwargs, gpu, moved))


def draw_from_default(func: Any, args: tuple, kwargs: dict) -> Any:
    """A random operator that asks for no generator takes the default one: the GPU's stands in for the CPU's."""
    gpu, moved = common_gpu(args, kwargs)
    with gpu.generator.as_default():
        return run(func, args, kwargs, gpu, moved)


def into_given(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator that writes into arguments, by `out=` or in place: an output on the CPU is never admitted, and it may grow."""
    for x in _written(func, args, kwargs):
        if type(x) is not VirtualTensor:
            refuse_waiting(x)
            raise different_devices(args, kwargs)
    return refit(compute(func, args, kwargs))


def refit(result: Any) -> Any:
    """Give storages that have grown a block of their new size."""
    for x in tensors(result):
        if type(x) is VirtualTensor and x.layout is torch.strided:
            storage = x.untyped_storage()
            nbytes, block = storage.nbytes(), storage.memory.block
            if nbytes > (0 if block is None else block.requested):
                place(storage, x._gpu, kept=storage.memory.kept is not None)
    return result


def resize(func: Any, args: tuple, kwargs: dict) -> Any:
    """`resize_`: the storage grows in place, and takes a new block if it does."""
    gpu, _ = common_gpu(args[:1], {})
    if gpu.machine.hollow and memory_of(args[0]).kept is None:
        raise unsupported("resize_ of a tensor whose values were not kept")
    with _DisableTorchDispatch():
        return refit(func(*args, **kwargs))


def set_storage(func: Any, args: tuple, kwargs: dict) -> Any:
    """`set_`: the tensor moves to another storage, and to its GPU."""
    with _DisableTorchDispatch():
        result = func(*args, **kwargs)
    memory = getattr(result.untyped_storage(), "memory", None)
    if (memory is None and result.untyped_storage().nbytes()) or (memory is not None and memory.gpu is not args[0]._gpu):
        there = "cpu" if memory is None else memory.gpu.device
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{args[0].device}" to a storage on different device "{there}".  '
            "This is no longer allowed; the devices must match."
        )
    if memory is None:
        memory = place(result.untyped_storage(), args[0]._gpu)
    result._gpu = memory.gpu
    return result


def read_scalar(func: Any, args: tuple, kwargs: dict) -> Any:
    """`.item()`: the host waits for the stream and for the number."""
    gpu, nbytes = common_gpu(args, kwargs)
    require_values(memory_of(args[0]))
    gpu.copy("d2h", nbytes, pinned=True)
    with _DisableTorchDispatch():
        return func(*args, **kwargs)


def compare(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator that answers the host with a truth value, which has to be read."""
    gpu, moved = common_gpu(args, kwargs)
    for x in tensors(args):
        require_values(memory_of(x))
    gpu.launch(moved)
    gpu.copy("d2h", 1, pinned=True)
    with _DisableTorchDispatch():
        return func(*args, **kwargs)


def all_close(func: Any, args: tuple, kwargs: dict) -> bool:
    """`allclose` is made of other operators, the last of which is read."""
    return bool(torch.isclose(*args, **kwargs).all().item())


def shape_from_values(func: Any, args: tuple, kwargs: dict) -> Any:
    """An operator whose output's shape depends on values: the host waits to learn it."""
    result = mixed(func, args, kwargs)
    common_gpu(tuple(x for x in tensors(args) if type(x) is VirtualTensor), {})[0].copy("d2h", 8, pinned=True)
    return result


def copy_into(func: Any, args: tuple, kwargs: dict) -> Any:
    """`copy_`: between any two devices."""
    target, source = args[0], args[1]
    refuse_waiting(target)
    transfer(source, target, non_blocking=bool(args[2]) if len(args) > 2 else kwargs.get("non_blocking", False))
    return target


def refuse_waiting(target: torch.Tensor) -> None:
    """C++ made this tensor on the CPU before it had looked at any device tensor: the result would come back on the wrong device."""
    waiting = getattr(target.untyped_storage(), "waiting", None) if type(target) is torch.Tensor else None
    if waiting is not None and waiting == hardware.machine().selected.waiting:
        raise unsupported("an operator whose result PyTorch's C++ makes on the CPU, such as torch.linalg.matrix_rank,")


def transfer(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> None:
    """Copy values and queue the copy where CUDA does: within a GPU, between two, or between a GPU and the host."""
    from labkit.vgpu.host import is_pinned

    there = source._gpu if type(source) is VirtualTensor else None
    here = target._gpu if type(target) is VirtualTensor else None
    (here or there).machine.require_alive()
    (here or there).machine.selected.gpu = here or there
    nbytes = target.numel() * target.itemsize
    unknown = there is not None and memory_of(source).kept is None
    if here is None:
        if unknown:
            require_values(memory_of(source))
    elif unknown or memory_of(target).kept is None:
        forget(target)
        unknown = True
    if here is None or there is None:
        (here or there).scratch(footprint.copies.staging(source, target, there, here, non_blocking))
    if not unknown:
        with _DisableTorchDispatch():
            target.copy_(source)
    if here is None:
        locked = is_pinned(target)
        there.copy("d2h", nbytes, locked, blocking=not (non_blocking and locked))
    elif there is None:
        locked = is_pinned(source)
        here.copy("h2d", nbytes, locked, blocking=not (non_blocking and locked))
    elif here is there:
        here.copy("d2d", nbytes)
    else:
        there.copy("p2p", nbytes, blocking=False)
        clock = here.machine.clock
        clock.wait(here.stream, clock.record(there.stream))


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
    if source.layout is not torch.strided:
        return move_sparse(source, gpu, dtype, non_blocking)
    dtype = dtype or source.dtype
    between = gpu is not None and type(source) is VirtualTensor
    if dtype is not source.dtype and between and not gpu.profile.peer_access:
        source = source.to(dtype)  # converted where it lies; else the copy itself converts (copy_requires_temporaries, Copy.cu)
    form = {} if memory_format is None else {"memory_format": memory_format}
    shape = torch.empty_like(torch.empty_strided(source.size(), source.stride(), dtype=dtype, device="meta"), **form)
    if gpu is None:
        if type(source) is VirtualTensor:
            require_values(memory_of(source))
        target = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype)
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
    return torch.sparse_coo_tensor(indices, values, source.size(), is_coalesced=source.is_coalesced(), check_invariants=False)


_NAMED: dict[str, Handler] = {
    "copy_": copy_into,
    "_to_copy": to_copy,
    "_local_scalar_dense": read_scalar,
    "equal": compare,
    "allclose": all_close,
    "set_": set_storage,
    "resize_": resize,
}
