"""Functions that make tensors on a virtual GPU: two kernels of the CUDA dispatch key, and replacements where C++ does more than these."""

import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.utils._device
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware, legacy_types
from virtualgpu.errors import is_wrapped, outermost, refuse_legacy_conversion, unsupported
from virtualgpu.moves import gpu_of, to_device
from virtualgpu.pinned import pinned
from virtualgpu.tensor import VirtualTensor, empty, tensors

_device = torch.device
_set_default_tensor_type = torch._C._set_default_tensor_type
_tensor, _as_tensor, _new_tensor = torch.tensor, torch.as_tensor, torch.Tensor.new_tensor
# torch functions that take a device: C++ understands a bare number there only where it was built with CUDA.
FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "from_file", "full", "full_like", "linspace", "logspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "zeros", "zeros_like",
    "bartlett_window", "blackman_window", "hamming_window", "hann_window", "kaiser_window", "empty_permuted", "normal", "scalar_tensor",
)  # fmt: skip
# Tensor methods of the same kind.
METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
# Those that C++ can only make on the CPU, for want of a guard for CUDA devices: made there, and moved.
MOVED = ("range", "tril_indices", "triu_indices")
# Sparse tensors, and the parts that they are made of.
SPARSE = {
    "sparse_coo_tensor": ("indices", "values"),
    "sparse_csr_tensor": ("crow_indices", "col_indices", "values"),
    "sparse_csc_tensor": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr_tensor": ("crow_indices", "col_indices", "values"),
    "sparse_bsc_tensor": ("ccol_indices", "row_indices", "values"),
    "sparse_compressed_tensor": ("compressed_indices", "plain_indices", "values"),
}
LEGACY = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16, "CharTensor": torch.int8, "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}  # fmt: skip


_default_is_cuda = False  # has set_default_tensor_type made a CUDA type the default?
_COPY_CONSTRUCT = (
    "To copy construct from a tensor, it is recommended to use sourceTensor.detach().clone() or "
    "sourceTensor.detach().clone().requires_grad_(True), rather than torch.tensor(sourceTensor)."
)


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """By owner, the names that change."""
    torch.utils._device._device_constructors()  # it remembers torch's own functions at its first call: not ours
    makers: dict[str, Any] = {name: with_any_device(getattr(torch, name)) for name in FACTORIES}
    makers |= {name: with_number_limits(makers[name]) for name in ("linspace", "logspace")}
    makers |= {name: made_on_host(getattr(torch, name)) for name in MOVED}
    makers |= {name: made_of_parts(getattr(torch, name), parts) for name, parts in SPARSE.items()}
    makers |= {"tensor": tensor, "as_tensor": as_tensor, "asarray": asarray(torch.asarray), "device": Device}
    # In a script, and PyTorch scripts some functions of its own for forward derivatives, the new functions still name its operators.
    builtins = torch.jit._builtins._get_builtin_table()
    scripted = {id(made): operator for name, made in makers.items() if (operator := builtins.get(id(getattr(torch, name)))) is not None}
    yield torch, makers
    yield builtins, scripted
    methods = {name: with_any_device(getattr(torch.Tensor, name)) for name in METHODS}
    yield torch.Tensor, methods | {"new_tensor": new_tensor, "__new__": staticmethod(legacy_constructor(torch.Tensor.__new__))}
    yield torch.fft, {name: with_any_device(getattr(torch.fft, name)) for name in ("fftfreq", "rfftfreq")}
    yield torch._C, {"_set_default_tensor_type": set_default_tensor_type}
    exported = to_dlpack(torch.utils.dlpack.to_dlpack)
    yield torch.utils.dlpack, {"to_dlpack": exported}
    yield torch, {"to_dlpack": exported}
    for owner, kind in ((torch.cuda, _LegacyType), (torch.cuda.sparse, _LegacySparseType)):
        named = ((name, dtype) for name, dtype in LEGACY.items() if hasattr(owner, name))
        yield owner, {name: kind(name, (), {"dtype": dtype, "__module__": owner.__name__}) for name, dtype in named}
    yield from legacy_types.replacements(tuple(LEGACY))
    names = ("nested_tensor", "as_nested_tensor")
    yield torch.nested, {name: on_the_cpu_only(f"torch.nested.{name}", getattr(torch.nested, name)) for name in names}


# The CUDA dispatch key: all factories call these two, in any thread


def cuda_empty(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None, memory_format: Any = None
) -> Any:
    dtype = dtype or torch.get_default_dtype()
    gpu = _gpu(device)
    if memory_format in (None, torch.contiguous_format):
        stride: list[int] = []
        step = 1
        for length in reversed(size):
            stride.insert(0, step)
            step *= max(length, 1)
        return empty(gpu, size, stride, dtype)
    shape = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format)
    return empty(gpu, shape.size(), shape.stride(), dtype)


def cuda_empty_strided(size: Any, stride: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
    return empty(_gpu(device), size, stride, dtype or torch.get_default_dtype())


def _gpu(device: Any) -> hardware.Gpu:
    gpu = hardware.machine().gpu(device)
    assert gpu is not None  # C++ calls these for CUDA devices
    return gpu


# Makers that read Python data


def _chosen_device(device: Any) -> Any:
    """The device asked for, or the default one of `with torch.device(...)` and `torch.set_default_device`."""
    if device is not None:
        return device
    modes = map(torch._C._get_function_stack_at, reversed(range(torch._C._len_torch_function_stack())))
    return next((mode.device for mode in modes if isinstance(mode, torch.utils._device.DeviceContext)), "cpu")


@outermost
def tensor(data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, pin_memory: bool = False) -> torch.Tensor:
    if type(data) is VirtualTensor:
        warnings.warn(_COPY_CONSTRUCT, stacklevel=2)
        gpu = data._gpu if device is None else hardware.machine().gpu(device)
        return to_device(data.detach(), gpu, dtype, copy=True).requires_grad_(requires_grad)
    made = _tensor(read(data), dtype=dtype, device="cpu")
    made = _placed(pinned(made) if pin_memory else made, device)
    return made.requires_grad_() if requires_grad else made  # inside torch.func even requires_grad_(False) is refused


@outermost
def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return data.to(device=data.device if device is None else device, dtype=data.dtype if dtype is None else dtype)
    return _placed(_as_tensor(read(data), dtype=dtype, device="cpu"), device)


def _placed(made: torch.Tensor, device: Any) -> torch.Tensor:
    """What was made on the CPU, on the device that was asked for."""
    device = _chosen_device(device)
    return made.to("meta") if str(device) == "meta" else to_device(made, hardware.machine().gpu(device))


def read(data: Any) -> Any:
    """Lists of data, with the numbers in them that lie on GPUs read: the host waits for each."""
    if not isinstance(data, (list, tuple)):
        return data
    if not {VirtualTensor, list, tuple}.intersection(map(type, data)):
        return data
    return [_tensor(x.item(), dtype=x.dtype, device="cpu") if type(x) is VirtualTensor and x.dim() == 0 else read(x) for x in data]


def new_tensor(self: torch.Tensor, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return (
            data.detach()
            .to(device=self.device if device is None else device, dtype=dtype or data.dtype, copy=True)
            .requires_grad_(requires_grad)
        )
    return tensor(data, dtype=dtype or self.dtype, device=self.device if device is None else device, requires_grad=requires_grad)


def with_any_device(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory of torch that also takes a GPU's number as `device`, and `pin_memory`."""

    @outermost
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = _device("cuda", kwargs["device"])
        elif args and kwargs.get("device") is not None and _is_of_wrapper(args[0], kwargs["device"]):
            del kwargs["device"]
        beside_out = kwargs.pop("device", None) if type(kwargs.get("out")) is VirtualTensor else None  # C++ takes out= for the CPU's
        if beside_out is not None and _device(beside_out).type != "cuda":
            raise RuntimeError(f"device type {_device(beside_out).type} does not match device type of out parameter (cuda)")
        if kwargs.pop("pin_memory", False):
            if torch.device(_chosen_device(kwargs.get("device"))).type != "cpu":
                raise RuntimeError("Only dense CPU tensors can be pinned")
            return pinned(factory(*args, **kwargs))
        return factory(*args, **kwargs)

    return make


def with_number_limits(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory whose limits may be tensors without dimensions. C++ reads them, so they choose no device."""

    def number(x: Any) -> Any:
        return x.item() if type(x) is VirtualTensor and x.dim() == 0 else x

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        limits = {name: number(kwargs[name]) for name in ("start", "end") if name in kwargs}
        return factory(*map(number, args), **kwargs | limits)

    return make


def _is_of_wrapper(model: Any, device: Any) -> bool:
    """Return whether `device` may be what the wrapper of a function transform gave as its own: the CPU, wherever its tensor is."""
    return isinstance(model, torch.Tensor) and is_wrapped(model) and _device(device).type == "cpu"


def made_on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory whose result is made on the CPU and moved to the device that was asked for."""

    @outermost
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.pop("device", None)
        return _placed(factory(*args, device="cpu", **kwargs), device)

    return make


def asarray(convert: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.asarray`: of a tensor on a GPU it shares the memory where it may, and copies where it must."""

    @outermost
    @wraps(convert)
    def converted(obj: Any, *, device: Any = None, copy: bool | None = None, **kwargs: Any) -> torch.Tensor:
        if not isinstance(obj, torch.Tensor):
            return _placed(convert(obj, device="cpu", copy=copy, **kwargs), device)
        here = gpu_of(obj)
        there = here if device is None and here is not None else hardware.machine().gpu(_chosen_device(device))
        if here is not there:
            if copy is False:
                raise ValueError(f"can't alias tensor from device '{obj.device}' to '{'cpu' if there is None else there.device}'.")
            obj, copy = to_device(obj, there), None
        return convert(obj, device="cpu", copy=copy, **kwargs)  # where C++ believes it to be

    return converted


def to_dlpack(export: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.utils.dlpack.to_dlpack`, which would hand a tensor on without a word about its GPU."""

    @wraps(export)
    def exported(tensor: torch.Tensor) -> Any:
        return tensor.__dlpack__() if type(tensor) is VirtualTensor else export(tensor)

    return exported


def made_of_parts(factory: Callable[..., torch.Tensor], names: tuple[str, ...]) -> Callable[..., torch.Tensor]:
    """A factory of sparse tensors. All parts go to the device that was asked for, or to that of the values."""

    @outermost
    @wraps(factory)
    def make(*args: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
        parts = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
        if len(parts) < len(names):  # of a size alone
            return _placed(factory(*args, device="cpu", dtype=dtype, **kwargs), device)
        kwargs = {name: value for name, value in kwargs.items() if name not in names}
        if device is None and isinstance(parts["values"], torch.Tensor):
            device = parts["values"].device
        values = as_tensor(parts.pop("values"), dtype, device)
        indices = (as_tensor(part, None, device) for part in parts.values())
        return factory(*indices, values, *args[len(names) :], device="cpu", **kwargs)  # where C++ believes them to be

    return make


def on_the_cpu_only(name: str, factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A factory that is refused where it would make a tensor on a GPU."""

    @wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if any(type(x) is VirtualTensor for x in tensors(args)) or torch.device(_chosen_device(device)).type == "cuda":
            raise unsupported(f"{name} of CUDA tensors")
        return factory(*args, **kwargs)

    return make


class _AnyDevice(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _device)


class Device(metaclass=_AnyDevice):
    """Replaces `torch.device`: C++ understands a bare number only where it was built with CUDA."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is int:
            return _device("cuda", args[0])
        return _device(*args, **kwargs)


# Legacy constructors


def legacy_constructor(construct: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.Tensor.__new__`. C++ cannot make a tensor of a subclass while a dispatch mode has Python see each new tensor."""

    # Without names: PyTorch's compiler compares the signature with that of its own substitute.
    def __new__(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: N807 (Python's name)
        if args[0] is torch.Tensor or any(type(x) is VirtualTensor for x in args[1:]):
            return construct(*args, **kwargs)
        with _DisableTorchDispatch():
            return construct(*args, **kwargs)

    return __new__


class _LegacyType(type):
    """The type of `torch.cuda.FloatTensor` and others: calls make tensors, and `isinstance` works."""

    dtype: torch.dtype
    layout = torch.strided
    is_cuda = True

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and (instance.dtype, instance.layout) == (cls.dtype, cls.layout)

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        device = "cuda" if device is None else device
        if len(args) == 1 and not isinstance(args[0], int):
            data = args[0]
            if isinstance(data, torch.Tensor):
                if not isinstance(data, cls):
                    refuse_legacy_conversion(cls.dtype, "cuda", data)
                return torch.ops.aten.alias.default(data)
            if not isinstance(data, torch.Size):
                return tensor(data, dtype=cls.dtype, device=device)
            args = tuple(data)
        return torch.empty(args, dtype=cls.dtype, device=device)


class _LegacySparseType(_LegacyType):
    """The type of `torch.cuda.sparse.FloatTensor` and others, made of indices and values, or of a size alone."""

    layout = torch.sparse_coo

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        parts = args if args and isinstance(args[0], torch.Tensor) else (args,)
        return torch.sparse_coo_tensor(*parts, dtype=cls.dtype, device="cuda" if device is None else device)


def set_default_tensor_type(kind: Any) -> None:
    """`torch._C._set_default_tensor_type`. C++ takes CPU types only: of a CUDA type it gets the dtype, and PyTorch the default device."""
    global _default_is_cuda
    is_cuda = isinstance(kind, _LegacyType)
    _set_default_tensor_type(legacy_types.made_in_cpp(getattr(torch, kind.__name__) if is_cuda else kind))
    if is_cuda != _default_is_cuda:
        torch.set_default_device("cuda" if is_cuda else None)
        _default_is_cuda = is_cuda


def remove() -> None:
    """Make the CPU the default device again if a CUDA type is the default."""
    if _default_is_cuda:
        set_default_tensor_type(torch.FloatTensor)
