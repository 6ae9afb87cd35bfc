"""Tensor methods that change the device, with autograd: `to`, `cuda`, `cpu`, `copy_`, `data`, `pin_memory`.

C++ takes every copy here for CPU to CPU, and would leave the gradient where it is; so a copy is an autograd Function of its own.
"""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import torch
import torch.serialization
from torch._C import _DisableTorchDispatch
from torch.autograd import forward_ad
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from virtualgpu import errors, hardware, pinned
from virtualgpu.errors import outermost
from virtualgpu.hardware import Gpu
from virtualgpu.ops.copies import move
from virtualgpu.ops.operators import storage_elsewhere
from virtualgpu.tensor import (
    VirtualStorage,
    VirtualTensor,
    attributes_of,
    empty_without_values,
    new_storage,
    plain_set,
    plain_type,
    send_to,
)

_to = torch.Tensor.to
_copy: Any = torch.Tensor.copy_
_data: Any = torch.Tensor.data
_parse_to = torch._C._nn._parse_to
_swap = torch._C._swap_tensor_impl


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    grad: Any = torch.Tensor.grad
    yield (
        torch.Tensor,
        {
            "to": to,
            "copy_": copy_,
            "cuda": cuda,
            "cpu": cpu,
            "data": Attribute("data", get_data, set_data, _data.__delete__),
            "grad": Attribute("grad", grad.__get__, errors.assign_gradient(grad.__set__), grad.__delete__),
            **unbound_methods(
                {
                    "apply_": torch.Tensor.apply_,
                    "const_data_ptr": torch.Tensor.const_data_ptr,  # type: ignore[attr-defined]
                    "data_ptr": torch.Tensor.data_ptr,
                    "get_device": torch.Tensor.get_device,
                    "new": with_own_type(torch.Tensor.new),
                    "numpy": read_on_host(torch.Tensor.numpy),
                    "pin_memory": pinned.pin_memory,
                    "tolist": read_on_host(torch.Tensor.tolist),
                    "type": type_,
                }
            ),
            "map_": on_host_alone(torch.Tensor.map_, "'other'"),
            "map2_": on_host_alone(torch.Tensor.map2_, "argument 'x'", "argument 'y'"),
            "set_": set_,
            "type_as": type_as,
        },
    )
    yield torch, {"get_device": get_device, "is_storage": partial(_is_storage, torch.is_storage)}
    yield torch._C._nn, {"_parse_to": parse_to}
    device = property(lambda self: getattr(self, "_destination", torch.device("cpu")))
    yield UninitializedTensorMixin, {"materialize": materialize, "device": device}
    yield torch.UntypedStorage, {"to": storage_to, "cuda": storage_cuda, "__new__": staticmethod(new_storage)}
    yield torch.TypedStorage, {"_new_wrapped_storage": wrapped_storage}
    yield torch.serialization, {"_package_registry": [(0, lambda storage: None, restore), *torch.serialization._package_registry]}


class Move(torch.autograd.Function):
    """A copy to another device, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, gpu: Gpu | None, dtype: Any, non_blocking: bool, memory_format: Any) -> torch.Tensor:
        ctx.back = gpu_of(source), source.dtype
        return move(source, gpu, dtype, non_blocking, memory_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        gpu, dtype = ctx.back
        hardware.machine().selected.visit(torch._C._current_graph_task_id(), gpu, gpu_of(gradient))
        return to_device(gradient, gpu, dtype), None, None, None, None


# `Function.apply` without its preparations for function transforms, and without the notes of
# `gradient_devices`: the gradient of a move is always on the right device.
_apply_move: Any = super(torch.autograd.Function, Move).apply


class TransformedMove(torch.autograd.Function):
    """The same under vmap, grad and jvp, and of dual tensors, in the form that PyTorch asks for there, of which each call takes longer."""

    @staticmethod
    def forward(source: torch.Tensor, gpu: Gpu | None, dtype: Any, non_blocking: bool, memory_format: Any) -> torch.Tensor:
        return move(source, gpu, dtype, non_blocking, memory_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        source, *ctx.there = inputs
        ctx.back = gpu_of(source), source.dtype

    backward = Move.backward

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        return TransformedMove.apply(tangent, *ctx.there)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *given: Any) -> tuple[torch.Tensor, int]:
        return TransformedMove.apply(*given), in_dims[0]


class MoveInto(torch.autograd.Function):
    """A copy into a tensor on another device, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        ctx.back = gpu_of(source), source.dtype
        ctx.shape = source.shape
        ctx.mark_dirty(target)
        return _copy(target, source, non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        own = torch.zeros_like(gradient) if ctx.needs_input_grad[0] else None
        return own, Move.backward(ctx, gradient.sum_to_size(ctx.shape))[0], None


def gpu_of(tensor: torch.Tensor) -> Gpu | None:
    """The virtual GPU a tensor is on, or says that it is on (DTensors, FakeTensors); None for the CPU."""
    if type(tensor) is VirtualTensor:
        return tensor._gpu
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # its own device is that of the values here, the CPU
        return gpu_of(torch._C._functorch.get_unwrapped(tensor))
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        return gpu_of(_whole_batch(tensor)[0])
    return hardware.machine().gpu(tensor.device) if tensor.device.type == "cuda" else None


def _whole_batch(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
    """All of a gradient that `torch.autograd.grad(…, is_grads_batched=True)` shows as one, the batch first; and that batch's level."""
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    while True:
        level -= 1
        whole = torch._remove_batch_dim(gradient, level, 0, 0)
        if whole.size(0):  # else it has no batch of this level: a dimension of the size given, 0, stands for it
            return whole, level


def to_device(
    tensor: torch.Tensor, gpu: Gpu | None, dtype: Any = None, non_blocking: bool = False, copy: bool = False, memory_format: Any = None
) -> torch.Tensor:
    if isinstance(tensor, UninitializedTensorMixin):
        tensor._destination = torch.device("cpu") if gpu is None else gpu.device
        if dtype is not None:
            tensor.data = torch.empty(0, dtype=dtype, device="cpu")
        return tensor
    if gpu is gpu_of(tensor):
        if gpu is not None:
            gpu.machine.require_alive()
        form = {} if memory_format is None else {"memory_format": memory_format}
        return _to(tensor, tensor.dtype if dtype is None else dtype, non_blocking, copy, **form)
    hardware.machine().take_turn()
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or _has_tangent(tensor):
        return TransformedMove.apply(tensor, gpu, dtype, non_blocking, memory_format)
    if torch._C._functorch.is_legacy_batchedtensor(tensor):
        whole, level = _whole_batch(tensor)
        return torch._add_batch_dim(to_device(whole, gpu, dtype, non_blocking), 0, level)
    if tensor.requires_grad and torch.is_grad_enabled():
        return _apply_move(tensor, gpu, dtype, non_blocking, memory_format)
    return move(tensor, gpu, dtype, non_blocking, memory_format)


def _has_tangent(tensor: torch.Tensor) -> bool:
    """Is it a dual tensor of forward-mode differentiation, above autograd? What autograd itself calls sees none."""
    if forward_ad._current_level < 0 or torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality):
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


@outermost
def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.to` in all its forms: (dtype), (device), (device, dtype), (other), each with non_blocking, copy and memory_format."""
    machine = hardware.machine()
    kwargs = dict(kwargs)
    other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.pop("other", None)
    if other is not None:
        device, dtype, rest = other.device, other.dtype, args[1:]
    else:
        device, dtype, rest = kwargs.pop("device", None), kwargs.pop("dtype", None), args
        if rest and (rest[0] is None or (isinstance(rest[0], (str, int, torch.device)) and not isinstance(rest[0], bool))):
            device, rest = rest[0], rest[1:]
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype, rest = rest[0] or dtype, rest[1:]
    if isinstance(device, (str, int)):
        device = torch.device(device)
    if device is not None and device.type == "meta":
        return torch.empty_strided(self.size(), self.stride(), dtype=dtype or self.dtype, device="meta")
    if device is not None and device.type not in ("cpu", "cuda"):
        return _to(self, *args, **kwargs | ({"device": device} if "device" in kwargs else {}))
    options = dict(zip(("non_blocking", "copy"), rest, strict=False)) | kwargs
    unknown = set(options) - {"non_blocking", "copy", "memory_format"}
    if unknown or len(rest) > 2:
        return _to(self, *args, **kwargs)  # let PyTorch say what is wrong
    return to_device(self, gpu_of(self) if device is None else machine.gpu(device), dtype, **options)


def get_device(tensor: torch.Tensor) -> int:
    return tensor.get_device()


@outermost
def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> torch.Tensor:
    gpu = hardware.machine().gpu(device)
    if gpu is None:
        raise RuntimeError("Invalid device, must be cuda device")
    return to_device(self, gpu, non_blocking=non_blocking, memory_format=memory_format)


@outermost
def cpu(self: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
    return to_device(self, None, memory_format=memory_format)


@outermost
def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(src, (bool, int, float, complex)):  # C++ would hand the bare number on
        src = torch.scalar_tensor(src, dtype=self.dtype, device="cpu")
    if isinstance(src, torch.Tensor) and src.requires_grad and torch.is_grad_enabled() and gpu_of(src) is not gpu_of(self):
        return MoveInto.apply(self, src, non_blocking)
    if isinstance(src, torch.Tensor) and _has_tangent(src):
        src = to_device(src, gpu_of(self))
    return _copy(self, src, non_blocking)


def unbound_methods(of_host: dict[str, Any]) -> dict[str, Any]:
    """Give methods of `torch.Tensor` that a GPU's tensor has of its own an answer for both.

    `torch.Tensor.data_ptr(tensor)` and `map(torch.Tensor.data_ptr, tensors)` do not ask the tensor's
    class. The tensor that C++ would answer for is on the CPU.
    """
    return {name: _for_both(method, getattr(VirtualTensor, name)) for name, method in of_host.items()}


def _for_both(of_host: Any, of_gpu: Any) -> Any:
    @wraps(of_host)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is VirtualTensor:
            return of_gpu(self, *args, **kwargs)
        return of_host(self, *args, **kwargs)

    return method


# What C++ reads of a tensor on the host without calling an operator


def read_on_host(read: Any) -> Any:
    """`Tensor.numpy` or `tolist` of a tensor on the host, into which a copy may be under way."""

    def checked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        races = hardware.machine().races
        if races.host_copies:
            races.host_reads(self, read.__name__)
        return read(self, *args, **kwargs)

    return checked


# Methods of the CPU's tensors that C++ would let device tensors into


def with_own_type(new: Any) -> Any:
    """`Tensor.new` of a CPU tensor, which takes no tensor of another type."""

    @outermost
    @wraps(new)
    def checked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is VirtualTensor and len(args) == 1:
            errors.refuse_legacy_conversion(self.dtype, "cpu", args[0])
        return new(self, *args, **kwargs)

    return checked


def on_host_alone(method: Any, *names: str) -> Any:
    """`Tensor.map_` or `map2_`, which call Python for each element of tensors on the CPU."""

    @outermost
    @wraps(method)
    def checked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if VirtualTensor not in map(type, (self, *args)):
            return method(self, *args, **kwargs)
        expected = errors.type_of(self)
        for name, other in zip(names, args, strict=False):
            if isinstance(other, torch.Tensor) and errors.type_of(other) != expected:
                given = errors.type_of(other)
                raise TypeError(f"{method.__name__}: expected {expected} for {name} (got {given})")
        raise TypeError(f"{method.__name__} is only implemented on CPU tensors")

    return checked


@outermost
def set_(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`Tensor.set_`, which gives a CPU tensor no storage of a GPU."""
    source = args[0] if args else kwargs.get("source")
    storage = getattr(source, "_untyped_storage", source)
    if type(storage) is VirtualStorage and type(self) is not VirtualTensor:
        raise storage_elsewhere(self, storage)
    return plain_set(self, *args, **kwargs)


# tensor.data


def get_data(self: torch.Tensor) -> torch.Tensor:
    return _data.__get__(self)


class Attribute(property):
    """A property with the owner and the name that torch looks up on attributes made in C."""

    __objclass__ = torch._C.TensorBase

    def __init__(self, name: str, *functions: Any) -> None:
        super().__init__(*functions)
        self.__name__ = name


def set_data(self: Any, value: Any) -> None:
    """`parameter.data = …`, which `Module.to` uses: the tensor object stays the same, its content may change device."""
    if (type(self) is VirtualTensor) == (type(value) is VirtualTensor):
        _data.__set__(self, value)
    else:
        _exchange(self, value)
    if type(value) is VirtualTensor:
        self._gpu = value._gpu
    if (replaced := attributes_of.__get__(self).pop("_stands_for", None)) is not None:
        _swap(self, replaced)
        self.__class__, replaced.__class__ = replaced.__class__, self.__class__
        own, others = attributes_of.__get__(self), attributes_of.__get__(replaced)
        attributes_of.__set__(self, others)
        attributes_of.__set__(replaced, own)


def _exchange(tensor: Any, value: torch.Tensor) -> None:
    """Give a plain tensor's object a virtual content, or the other way round.

    C++ marks what is virtual on the content, so the contents of two objects are exchanged. Graphs that hold the old content keep it.
    """
    content: Any = value.detach()
    if content.dtype.is_floating_point or content.dtype.is_complex:
        content.requires_grad_(tensor.requires_grad)
    gradient, hooks = tensor.grad if tensor.is_leaf else None, (tensor._backward_hooks, tensor._post_accumulate_grad_hooks)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    _swap(tensor, content)
    if type(value) is VirtualTensor:
        content.__class__, tensor.__class__ = torch.Tensor, VirtualTensor
        tensor._gpu = value._gpu
        if is_parameter:
            tensor._is_param = True
    else:
        content.__class__, tensor.__class__ = VirtualTensor, torch.nn.Parameter if is_parameter else torch.Tensor
        attributes = attributes_of.__get__(tensor)
        content._gpu = attributes.pop("_gpu")
        attributes.pop("_is_param", None)
    if gradient is not None:
        shell = _shell(gradient, value)
        if shell.size() != tensor.size():  # FSDP moves a parameter whose gradient is that of its own shard
            _data.__set__(tensor, shell)
        tensor.grad = shell
        _data.__set__(tensor, value)
    if hooks[0]:
        tensor._backward_hooks = hooks[0]
    if hooks[1]:
        tensor._post_accumulate_grad_hooks = hooks[1]
    if content.requires_grad and content.is_leaf:
        # A graph that was made before would accumulate into the old content, which no object has any more.
        with _DisableTorchDispatch():  # the edge is found by a view, which is nobody's operator
            torch.autograd.graph.get_gradient_edge(content).node.register_prehook(_refuse_gradient)


def _refuse_gradient(gradients: Any) -> None:
    raise RuntimeError(
        "Expected all tensors to be on the same device, but the parameter of this gradient has been moved to another one since the forward."
    )


def _shell(gradient: torch.Tensor, value: torch.Tensor) -> Any:
    """A gradient of its parameter's new type, without memory of its own.

    `Module.to` moves it next, by `parameter.grad.data = …`. C++ holds the gradient too, so its object cannot change its type then.
    """
    shell: Any = getattr(gradient, "_stands_for", None)
    if shell is not None and shell.device == value.device:  # the parameter has come back without it
        return shell
    if type(value) is VirtualTensor:
        shell = empty_without_values(value._gpu, gradient.size(), gradient.stride(), gradient.dtype, allocated=False)
    else:
        shell = torch.empty_strided(gradient.size(), gradient.stride(), dtype=gradient.dtype, device="cpu")
    shell._stands_for = gradient  # it replaces the shell once the shell has got its content
    return shell


def materialize(self: UninitializedTensorMixin, shape: Any, device: Any = None, dtype: Any = None) -> None:
    """A lazy module's parameter gets its shape, where the module has been moved meanwhile."""
    data = torch.empty(shape, device=device or self.device, dtype=dtype or self.data.dtype)
    self.__class__ = self.cls_to_become
    self.data = data


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """What `Module.to` makes of its arguments: a device may be a bare number, or another tensor's."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (torch.device(args[0]), *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = torch.device(kwargs["device"])
    other = args[0] if args and isinstance(args[0], torch.Tensor) else kwargs.pop("tensor", None)
    if other is not None:
        return other.device, other.dtype, *_parse_to(*args[1:], **kwargs)[2:]
    return _parse_to(*args, **kwargs)


def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return to(self, other)


# Legacy conversions


def storage_to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
    """`UntypedStorage.to` and, through it, `cuda`: checkpoints are mapped by them."""
    gpu = hardware.machine().gpu(device)
    if gpu is None:
        return self.cpu()
    return self if gpu.device == self.device else new_storage(VirtualStorage, self.nbytes(), device=gpu.device).copy_(self)


def storage_cuda(self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False) -> torch.UntypedStorage:
    return storage_to(self, device="cuda" if device is None else device)


def wrapped_storage(self: torch.TypedStorage, untyped: torch.UntypedStorage) -> torch.TypedStorage:
    """`TypedStorage._new_wrapped_storage`, which asks for exactly PyTorch's own class."""
    if type(self) is torch.TypedStorage:
        return torch.TypedStorage(wrap_storage=untyped, dtype=self.dtype, _internal=True)
    return type(self)(wrap_storage=untyped)


def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """`Tensor.type`: the name of a CUDA type moves a CPU tensor to the GPU."""
    name = dtype if isinstance(dtype, str) else f"{getattr(dtype, '__module__', '')}.{getattr(dtype, '__name__', '')}"
    if name.startswith("torch.cuda."):
        return to(self, "cuda", plain_type(torch.empty(0, device="cpu"), name.replace(".cuda", "")).dtype, non_blocking)
    return plain_type(self, name if isinstance(dtype, type) else dtype, non_blocking, **kwargs)


# torch.load


def restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """`torch.load`: what was saved on a GPU goes to the virtual one of that number. None for other locations."""
    if not location.startswith("cuda"):
        return None
    torch.serialization._validate_device(location, "cuda")
    gpu = hardware.machine().gpu(location)
    assert gpu is not None
    send_to(gpu, storage)
    return storage


def _is_storage(known: Callable[[Any], bool], value: Any) -> bool:
    """`torch.is_storage`, which looks classes up by identity."""
    return type(value) is VirtualStorage or known(value)
