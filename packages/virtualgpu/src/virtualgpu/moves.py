"""Methods that move tensors between devices, with autograd: `to`, `cuda`, `cpu`, `copy_`, `data`.

C++ takes every such copy for a copy between CPU tensors, and would leave the gradient on the wrong
device. A copy is therefore an autograd Function of its own.
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
    bytes_in,
    empty_without_values,
    new_storage,
    plain_set,
    plain_type,
    send_to,
)

_to = torch.Tensor.to
_copy: Any = torch.Tensor.copy_
_data: Any = torch.Tensor.data
plain_storage_copy: Any = torch.UntypedStorage.copy_
_parse_to = torch._C._nn._parse_to
_swap = torch._C._swap_tensor_impl


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    grad: Any = torch.Tensor.grad
    yield (
        torch.Tensor,
        {
            "to": to,
            "copy_": copy_,
            "cuda": cuda,
            "cpu": cpu,
            "data": Attribute("data", get_data, set_data, _data.__delete__),
            "grad": Attribute(
                "grad", grad.__get__, errors.assign_gradient(grad.__set__), grad.__delete__
            ),
            **unbound_methods(
                {
                    "apply_": torch.Tensor.apply_,
                    "data_ptr": torch.Tensor.data_ptr,
                    "get_device": torch.Tensor.get_device,
                    "new": with_own_type(torch.Tensor.new),
                    "numpy": read_on_host(torch.Tensor.numpy),
                    "pin_memory": pinned.pin_memory,
                    "tolist": read_on_host(torch.Tensor.tolist),
                    "type": type_,
                }
            ),
            **_newer_methods(),
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
    yield (
        torch.UntypedStorage,
        {
            "to": storage_to,
            "cuda": storage_cuda,
            "copy_": storage_copy,
            "__new__": staticmethod(new_storage),
        },
    )
    yield torch.TypedStorage, {"_new_wrapped_storage": wrapped_storage}
    registry = [(0, lambda storage: None, restore), *torch.serialization._package_registry]
    yield torch.serialization, {"_package_registry": registry}


class Move(torch.autograd.Function):
    """Copy of a tensor to another device. Its gradient is copied back."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        gpu: Gpu | None,
        dtype: Any,
        non_blocking: bool,
        memory_format: Any,
    ) -> torch.Tensor:
        """Return a copy of `source` on `gpu`, or on the CPU if `gpu` is None."""
        ctx.back = gpu_of(source), source.dtype
        return move(source, gpu, dtype, non_blocking, memory_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient copied to the source's device, and None for the other arguments."""
        gpu, dtype = ctx.back
        hardware.machine().selected.visit(torch._C._current_graph_task_id(), gpu, gpu_of(gradient))
        return to_device(gradient, gpu, dtype), None, None, None, None


# `Function.apply` without its preparations for function transforms and without the notes of
# `gradient_devices`. The gradient of a move is always on the right device.
_apply_move: Any = super(torch.autograd.Function, Move).apply


class TransformedMove(torch.autograd.Function):
    """Copy of a tensor to another device under function transforms, and for dual tensors.

    vmap, grad, jvp and dual tensors need this slower form of autograd Function.
    """

    @staticmethod
    def forward(
        source: torch.Tensor,
        gpu: Gpu | None,
        dtype: Any,
        non_blocking: bool,
        memory_format: Any,
    ) -> torch.Tensor:
        """Return a copy of `source` on `gpu`, or on the CPU if `gpu` is None."""
        return move(source, gpu, dtype, non_blocking, memory_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
        """Note the arguments of the copy for the backward pass and for tangents."""
        source, *ctx.there = inputs
        ctx.back = gpu_of(source), source.dtype

    backward = Move.backward

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: None) -> torch.Tensor:
        """Return the tangent, copied to the device of the tensor's copy."""
        return TransformedMove.apply(tangent, *ctx.there)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *given: Any) -> tuple[torch.Tensor, int]:
        """Copy a whole batch of tensors at once under vmap.

        Returns the copy and the position of the batch dimension in it.
        """
        return TransformedMove.apply(*given), in_dims[0]


class MoveInto(torch.autograd.Function):
    """Copy of a tensor into a tensor on another device. Its gradient is copied back."""

    @staticmethod
    def forward(
        ctx: Any, target: torch.Tensor, source: torch.Tensor, non_blocking: bool
    ) -> torch.Tensor:
        """Copy `source` into `target` and return the target."""
        ctx.back = gpu_of(source), source.dtype
        ctx.shape = source.shape
        ctx.mark_dirty(target)
        return _copy(target, source, non_blocking)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return zeros for the gradient of the target, and the copied gradient for the source."""
        own = None
        if ctx.needs_input_grad[0]:
            own = torch.zeros_like(gradient)
        return own, Move.backward(ctx, gradient.sum_to_size(ctx.shape))[0], None


def gpu_of(tensor: torch.Tensor) -> Gpu | None:
    """Return the virtual GPU of a tensor, or None for the CPU.

    DTensors and FakeTensors count as being on the device that they report.
    """
    if type(tensor) is VirtualTensor:
        return tensor._gpu
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor):  # its own device is always the CPU
        return gpu_of(functorch.get_unwrapped(tensor))
    if functorch.is_legacy_batchedtensor(tensor):
        return gpu_of(_whole_batch(tensor)[0])
    if tensor.device.type == "cuda":
        return hardware.machine().gpu(tensor.device)
    return None


def _whole_batch(gradient: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Remove the vmap wrapper of a batched gradient, and return (tensor, vmap level).

    The batch becomes the tensor's first dimension. `torch.autograd.grad(…,
    is_grads_batched=True)` makes such gradients.
    """
    level = torch._C._vmapmode_increment_nesting()
    torch._C._vmapmode_decrement_nesting()
    while True:
        level -= 1
        whole = torch._remove_batch_dim(gradient, level, 0, 0)
        if whole.size(0):  # without a batch of this level, PyTorch adds a dimension of size 0
            return whole, level


def to_device(
    tensor: torch.Tensor,
    gpu: Gpu | None,
    dtype: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    """Return the tensor on `gpu`, or on the CPU if `gpu` is None. Autograd records the copy.

    `dtype` and `memory_format` also convert it. Without `copy`, a tensor that needs no change is
    returned itself.
    """
    if isinstance(tensor, UninitializedTensorMixin):
        tensor._destination = torch.device("cpu") if gpu is None else gpu.device
        if dtype is not None:
            tensor.data = torch.empty(0, dtype=dtype, device="cpu")
        return tensor
    if gpu is gpu_of(tensor):
        if gpu is not None:
            gpu.machine.require_alive()
        form = {}
        if memory_format is not None:
            form["memory_format"] = memory_format
        if dtype is None:
            dtype = tensor.dtype
        return _to(tensor, dtype, non_blocking, copy, **form)
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
    """Return whether this is a dual tensor of forward-mode differentiation, outside autograd.

    Code that autograd itself calls does not see tangents.
    """
    if forward_ad._current_level < 0:
        return False
    autograd_key = torch._C.DispatchKey.AutogradFunctionality
    if torch._C._dispatch_tls_is_dispatch_key_excluded(autograd_key):
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None


@outermost
def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Move or convert a tensor. It replaces `Tensor.to` in all its forms.

    The forms are (dtype), (device), (device, dtype) and (other), each with `non_blocking`, `copy`
    and `memory_format`.
    """
    machine = hardware.machine()
    kwargs = dict(kwargs)
    if args and isinstance(args[0], torch.Tensor):
        other = args[0]
    else:
        other = kwargs.pop("other", None)
    if other is not None:
        device, dtype, rest = other.device, other.dtype, args[1:]
    else:
        device, dtype, rest = kwargs.pop("device", None), kwargs.pop("dtype", None), args
        if rest and _may_be_device(rest[0]):
            device, rest = rest[0], rest[1:]
        if rest and (rest[0] is None or isinstance(rest[0], torch.dtype)):
            dtype, rest = rest[0] or dtype, rest[1:]
    if isinstance(device, (str, int)):
        device = torch.device(device)
    if device is not None and device.type == "meta":
        dtype = dtype or self.dtype
        return torch.empty_strided(self.size(), self.stride(), dtype=dtype, device="meta")
    if device is not None and device.type not in ("cpu", "cuda"):
        if "device" in kwargs:
            kwargs["device"] = device
        return _to(self, *args, **kwargs)
    options = dict(zip(("non_blocking", "copy"), rest, strict=False)) | kwargs
    unknown = set(options) - {"non_blocking", "copy", "memory_format"}
    if unknown or len(rest) > 2:
        return _to(self, *args, **kwargs)  # PyTorch reports what is wrong
    gpu = gpu_of(self) if device is None else machine.gpu(device)
    return to_device(self, gpu, dtype, **options)


def _may_be_device(argument: Any) -> bool:
    """Return whether `argument`, the first one of `Tensor.to`, is a device or None."""
    if isinstance(argument, bool):
        return False
    return argument is None or isinstance(argument, (str, int, torch.device))


def get_device(tensor: torch.Tensor) -> int:
    """Return the index of a tensor's GPU, or -1 for the CPU. It replaces `torch.get_device`."""
    return tensor.get_device()


@outermost
def cuda(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = None
) -> torch.Tensor:
    """Copy a tensor to a GPU. It replaces `Tensor.cuda`."""
    gpu = hardware.machine().gpu(device)
    if gpu is None:
        raise RuntimeError("Invalid device, must be cuda device")
    return to_device(self, gpu, non_blocking=non_blocking, memory_format=memory_format)


@outermost
def cpu(self: torch.Tensor, memory_format: Any = None) -> torch.Tensor:
    """Copy a tensor to the host. It replaces `Tensor.cpu`."""
    return to_device(self, None, memory_format=memory_format)


@outermost
def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy `src` into a tensor. It replaces `Tensor.copy_`."""
    if isinstance(src, (bool, int, float, complex)):  # C++ would pass the number on as it is
        src = torch.scalar_tensor(src, dtype=self.dtype, device="cpu")
    if isinstance(src, torch.Tensor):
        records = src.requires_grad and torch.is_grad_enabled()
        if records and gpu_of(src) is not gpu_of(self):
            return MoveInto.apply(self, src, non_blocking)
        if _has_tangent(src):
            src = to_device(src, gpu_of(self))
    return _copy(self, src, non_blocking)


def unbound_methods(of_host: dict[str, Any]) -> dict[str, Any]:
    """Return methods of `torch.Tensor`, by name, that work for CPU tensors and GPU tensors.

    `of_host` has the original methods. `torch.Tensor.data_ptr(tensor)` and
    `map(torch.Tensor.data_ptr, tensors)` call these methods without asking the tensor's class. The
    original methods in C++ would take a GPU tensor for a CPU tensor.
    """
    answers = {}
    for name, method in of_host.items():
        answers[name] = _for_both(method, getattr(VirtualTensor, name))
    return answers


def _newer_methods() -> dict[str, Any]:
    """Return replacements for methods that only newer versions of torch have, by name.

    This is `const_data_ptr`, if the installed torch has it.
    """
    of_host = getattr(torch.Tensor, "const_data_ptr", None)
    if of_host is None:
        return {}
    return unbound_methods({"const_data_ptr": of_host})


def _for_both(of_host: Any, of_gpu: Any) -> Any:
    """Return a method that calls `of_gpu` for GPU tensors and `of_host` for CPU tensors."""

    @wraps(of_host)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call `of_gpu` for a GPU tensor and `of_host` for a CPU tensor."""
        if type(self) is VirtualTensor:
            return of_gpu(self, *args, **kwargs)
        return of_host(self, *args, **kwargs)

    return method


# Methods with which C++ reads a tensor on the host without an operator


def read_on_host(read: Any) -> Any:
    """Return `read`, which is `Tensor.numpy` or `tolist`, with a check for races.

    It reports a race if a copy to the host into this tensor is still pending.
    """

    def checked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        races = hardware.machine().races
        if races.host_copies:
            races.host_reads(self, read.__name__)
        return read(self, *args, **kwargs)

    return checked


# Methods of CPU tensors that C++ would also run on device tensors


def with_own_type(new: Any) -> Any:
    """Return a replacement of `Tensor.new` for CPU tensors, which is the method `new`.

    It raises TypeError if an argument is a tensor of another type.
    """

    @outermost
    @wraps(new)
    def checked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is VirtualTensor and len(args) == 1:
            errors.refuse_legacy_conversion(self.dtype, "cpu", args[0])
        return new(self, *args, **kwargs)

    return checked


def on_host_alone(method: Any, *names: str) -> Any:
    """Return `method`, which is `Tensor.map_` or `map2_`, changed to refuse GPU tensors.

    It raises TypeError unless all tensors are on the CPU. `names` are the arguments that are
    tensors.
    """

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
    """Replace a tensor's storage. It raises RuntimeError for a GPU's storage in a CPU tensor."""
    source = args[0] if args else kwargs.get("source")
    storage = getattr(source, "_untyped_storage", source)
    if type(storage) is VirtualStorage and type(self) is not VirtualTensor:
        raise storage_elsewhere(self, storage)
    return plain_set(self, *args, **kwargs)


# tensor.data


def get_data(self: torch.Tensor) -> torch.Tensor:
    """Return the tensor without its autograd history. It replaces reading `Tensor.data`."""
    return _data.__get__(self)


class Attribute(property):
    """Property with the owner and the name that torch expects of attributes made in C."""

    __objclass__ = torch._C.TensorBase

    def __init__(self, name: str, *functions: Any) -> None:
        super().__init__(*functions)
        self.__name__ = name


def set_data(self: Any, value: Any) -> None:
    """Set `tensor.data`, which `Module.to` uses. The content can move to another device.

    The tensor's Python object stays the same.
    """
    if (type(self) is VirtualTensor) == (type(value) is VirtualTensor):
        _data.__set__(self, value)
    else:
        _exchange(self, value)
    if type(value) is VirtualTensor:
        self._gpu = value._gpu
    replaced = attributes_of.__get__(self).pop("_stands_for", None)
    if replaced is not None:
        _swap(self, replaced)
        self.__class__, replaced.__class__ = replaced.__class__, self.__class__
        own, others = attributes_of.__get__(self), attributes_of.__get__(replaced)
        attributes_of.__set__(self, others)
        attributes_of.__set__(replaced, own)


def _exchange(tensor: Any, value: torch.Tensor) -> None:
    """Give a tensor object the content of another one on another device.

    One of the two is a CPU tensor and the other a virtual one. C++ marks contents as virtual, so
    the contents of both objects are exchanged. Graphs that refer to the old content keep it.
    """
    content: Any = value.detach()
    if content.dtype.is_floating_point or content.dtype.is_complex:
        content.requires_grad_(tensor.requires_grad)
    gradient = None
    if tensor.is_leaf:
        gradient = tensor.grad
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    _swap(tensor, content)
    if type(value) is VirtualTensor:
        content.__class__, tensor.__class__ = torch.Tensor, VirtualTensor
        tensor._gpu = value._gpu
        if is_parameter:
            tensor._is_param = True
    else:
        content.__class__ = VirtualTensor
        tensor.__class__ = torch.nn.Parameter if is_parameter else torch.Tensor
        attributes = attributes_of.__get__(tensor)
        content._gpu = attributes.pop("_gpu")
        attributes.pop("_is_param", None)
    if gradient is not None:
        shell = _shell(gradient, value)
        if shell.size() != tensor.size():  # FSDP moves parameters whose gradient is only a shard
            _data.__set__(tensor, shell)
        tensor.grad = shell
        _data.__set__(tensor, value)
    if hooks[0]:
        tensor._backward_hooks = hooks[0]
    if hooks[1]:
        tensor._post_accumulate_grad_hooks = hooks[1]
    if content.requires_grad and content.is_leaf:
        # A graph made earlier would accumulate into the old content, which no object refers to.
        with _DisableTorchDispatch():  # getting the edge makes a view, which is not an operator
            edge = torch.autograd.graph.get_gradient_edge(content)
            edge.node.register_prehook(_refuse_gradient)


def _refuse_gradient(gradients: Any) -> None:
    """Raise RuntimeError, because a parameter has moved since the forward pass.

    It is a hook that gets the gradients of the parameter's old content.
    """
    raise RuntimeError(
        "Expected all tensors to be on the same device, but the parameter of this gradient has "
        "been moved to another one since the forward pass."
    )


def _shell(gradient: torch.Tensor, value: torch.Tensor) -> Any:
    """Return a tensor without memory, as the gradient of a parameter that has moved.

    It has the device of `value`, the parameter's new content, and the shape of `gradient`.
    `Module.to` moves the gradient next, with `parameter.grad.data = …`. C++ also holds the gradient
    then, so the type of its object could not be changed any more.
    """
    shell: Any = getattr(gradient, "_stands_for", None)
    if shell is not None and shell.device == value.device:  # the parameter returned without it
        return shell
    if type(value) is VirtualTensor:
        shell = empty_without_values(
            value._gpu, gradient.size(), gradient.stride(), gradient.dtype, allocated=False
        )
    else:
        shape, stride = gradient.size(), gradient.stride()
        shell = torch.empty_strided(shape, stride, dtype=gradient.dtype, device="cpu")
    shell._stands_for = gradient  # it replaces the shell when the shell gets its content
    return shell


def materialize(
    self: UninitializedTensorMixin, shape: Any, device: Any = None, dtype: Any = None
) -> None:
    """Give a lazy module's parameter its shape, on the device to which the module was moved."""
    data = torch.empty(shape, device=device or self.device, dtype=dtype or self.data.dtype)
    self.__class__ = self.cls_to_become
    self.data = data


def parse_to(*args: Any, **kwargs: Any) -> Any:
    """Parse the arguments of `Module.to`. A device may be a GPU's number or a tensor."""
    if args and isinstance(args[0], int) and not isinstance(args[0], bool):
        args = (torch.device(args[0]), *args[1:])
    if isinstance(kwargs.get("device"), int):
        kwargs["device"] = torch.device(kwargs["device"])
    if args and isinstance(args[0], torch.Tensor):
        other = args[0]
    else:
        other = kwargs.pop("tensor", None)
    if other is not None:
        return other.device, other.dtype, *_parse_to(*args[1:], **kwargs)[2:]
    return _parse_to(*args, **kwargs)


def type_as(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to the dtype and device of another. It replaces `Tensor.type_as`."""
    return to(self, other)


# Legacy conversions


def storage_to(
    self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False
) -> torch.UntypedStorage:
    """Move a storage to a device. It replaces `UntypedStorage.to`, which maps checkpoints."""
    gpu = hardware.machine().gpu(device)
    if gpu is None:
        return self.cpu()
    if gpu.device == self.device:
        return self
    return new_storage(VirtualStorage, self.nbytes(), device=gpu.device).copy_(self)


def storage_cuda(
    self: torch.UntypedStorage, device: Any = None, non_blocking: bool = False
) -> torch.UntypedStorage:
    """Move a storage to a GPU. It replaces `UntypedStorage.cuda`."""
    if device is None:
        device = "cuda"
    return storage_to(self, device=device)


def storage_copy(
    self: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: bool | None = None
) -> torch.UntypedStorage:
    """Copy the bytes of another storage. It replaces `UntypedStorage.copy_`."""
    if VirtualStorage not in (type(self), type(source)) or self.nbytes() != source.nbytes():
        return plain_storage_copy(self, source, non_blocking)
    bytes_in(self).copy_(bytes_in(source), non_blocking=bool(non_blocking))
    return self


def wrapped_storage(self: torch.TypedStorage, untyped: torch.UntypedStorage) -> torch.TypedStorage:
    """Return a typed storage around `untyped`.

    It replaces `TypedStorage._new_wrapped_storage`, which accepts only PyTorch's own class.
    """
    if type(self) is torch.TypedStorage:
        return torch.TypedStorage(wrap_storage=untyped, dtype=self.dtype, _internal=True)
    return type(self)(wrap_storage=untyped)


def type_(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
    """Return or change a tensor's type. The name of a CUDA type moves a CPU tensor to the GPU.

    It replaces `Tensor.type`.
    """
    if isinstance(dtype, str):
        name = dtype
    else:
        name = f"{getattr(dtype, '__module__', '')}.{getattr(dtype, '__name__', '')}"
    if name.startswith("torch.cuda."):
        example = plain_type(torch.empty(0, device="cpu"), name.replace(".cuda", ""))
        return to(self, "cuda", example.dtype, non_blocking)
    if isinstance(dtype, type):
        dtype = name
    return plain_type(self, dtype, non_blocking, **kwargs)


# torch.load


def restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """Move a storage that `torch.load` has read to the virtual GPU from which it was saved.

    `location` is that device, such as "cuda:1". Returns None for other locations, as `torch.load`
    expects. Raises RuntimeError for a GPU that does not exist.
    """
    if not location.startswith("cuda"):
        return None
    torch.serialization._validate_device(location, "cuda")
    gpu = hardware.machine().gpu(location)
    assert gpu is not None
    send_to(gpu, storage)
    return storage


def _is_storage(known: Callable[[Any], bool], value: Any) -> bool:
    """Return whether `value` is a storage. It replaces `torch.is_storage`, the function `known`."""
    return type(value) is VirtualStorage or known(value)
