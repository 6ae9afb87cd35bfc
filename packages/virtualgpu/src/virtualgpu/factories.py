"""Functions that create tensors on a virtual GPU.

Two kernels of the CUDA dispatch key create tensors. Other functions are replaced where PyTorch's
C++ does more than calling these kernels.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.utils._device
from torch._C import _DisableTorchDispatch

from virtualgpu import hardware, legacy_types
from virtualgpu.errors import (
    argument_differs,
    is_wrapped,
    outermost,
    refuse_legacy_conversion,
    unsupported,
)
from virtualgpu.moves import gpu_of, to_device
from virtualgpu.pinned import pinned
from virtualgpu.tensor import VirtualTensor, empty, tensors

_device = torch.device
_set_default_tensor_type = torch._C._set_default_tensor_type
_tensor, _as_tensor, _new_tensor = torch.tensor, torch.as_tensor, torch.Tensor.new_tensor
# Functions of torch with a `device`. C++ accepts a plain number as a device only if it was built
# with CUDA.
FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "from_file", "full", "full_like",
    "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "randperm", "zeros", "zeros_like", "bartlett_window", "blackman_window",
    "hamming_window", "hann_window", "kaiser_window", "empty_permuted", "normal", "scalar_tensor",
)  # fmt: skip
# Methods of tensors with a `device`.
METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros")
# C++ can create the results of these only on the CPU, because it has no guard for CUDA devices.
# They are created there and then moved.
MOVED = ("range", "tril_indices", "triu_indices")
# Functions that create sparse tensors, with the names of their parts.
SPARSE = {
    "sparse_coo_tensor": ("indices", "values"),
    "sparse_csr_tensor": ("crow_indices", "col_indices", "values"),
    "sparse_csc_tensor": ("ccol_indices", "row_indices", "values"),
    "sparse_bsr_tensor": ("crow_indices", "col_indices", "values"),
    "sparse_bsc_tensor": ("ccol_indices", "row_indices", "values"),
    "sparse_compressed_tensor": ("compressed_indices", "plain_indices", "values"),
}
# The legacy types and their dtypes.
LEGACY = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


_default_is_cuda = False  # whether set_default_tensor_type has made a CUDA type the default
_COPY_CONSTRUCT = (
    "To copy construct from a tensor, it is recommended to use sourceTensor.detach().clone() or "
    "sourceTensor.detach().clone().requires_grad_(True), rather than torch.tensor(sourceTensor)."
)


def replacements(machine: hardware.Machine) -> Iterator[tuple[Any, dict[Any, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    # PyTorch remembers its constructors at the first call, which must come before the replacement.
    torch.utils._device._device_constructors()
    makers: dict[str, Any] = {name: with_any_device(getattr(torch, name)) for name in FACTORIES}
    makers |= {name: with_number_limits(makers[name]) for name in ("linspace", "logspace")}
    makers |= {name: made_on_host(getattr(torch, name)) for name in MOVED}
    makers |= {name: made_of_parts(getattr(torch, name), parts) for name, parts in SPARSE.items()}
    makers |= {
        "tensor": tensor,
        "as_tensor": as_tensor,
        "asarray": asarray(torch.asarray),
        "device": Device,
    }
    # Scripts must find PyTorch's operators under the new functions, too. PyTorch itself scripts
    # some functions for forward-mode derivatives.
    builtins = torch.jit._builtins._get_builtin_table()
    scripted = {}
    for name, made in makers.items():
        operator = builtins.get(id(getattr(torch, name)))
        if operator is not None:
            scripted[id(made)] = operator
    yield torch, makers
    yield builtins, scripted
    methods: dict[str, Any] = {
        name: with_any_device(getattr(torch.Tensor, name)) for name in METHODS
    }
    methods["new_tensor"] = new_tensor
    methods["__new__"] = staticmethod(legacy_constructor(torch.Tensor.__new__))
    yield torch.Tensor, methods
    frequencies = ("fftfreq", "rfftfreq")
    yield torch.fft, {name: with_any_device(getattr(torch.fft, name)) for name in frequencies}
    yield torch._C, {"_set_default_tensor_type": set_default_tensor_type}
    exported = to_dlpack(torch.utils.dlpack.to_dlpack)
    yield torch.utils.dlpack, {"to_dlpack": exported}
    yield torch, {"to_dlpack": exported}
    for owner, kind in ((torch.cuda, _LegacyType), (torch.cuda.sparse, _LegacySparseType)):
        legacy_types_of_owner = {}
        for name, dtype in LEGACY.items():
            if hasattr(owner, name):
                attributes = {"dtype": dtype, "__module__": owner.__name__}
                legacy_types_of_owner[name] = kind(name, (), attributes)
        yield owner, legacy_types_of_owner
    yield from legacy_types.replacements(tuple(LEGACY))
    refused = {}
    for name in ("nested_tensor", "as_nested_tensor"):
        refused[name] = on_the_cpu_only(f"torch.nested.{name}", getattr(torch.nested, name))
    yield torch.nested, refused


# The kernels of the CUDA dispatch key, which all factories call, in any thread


def cuda_empty(
    size: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> Any:
    """Return an uninitialised tensor of this size, as `aten::empty` does."""
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


def cuda_empty_strided(
    size: Any,
    stride: Any,
    *,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> Any:
    """Return an uninitialised tensor of this size and stride, as `aten::empty_strided` does."""
    return empty(_gpu(device), size, stride, dtype or torch.get_default_dtype())


def _gpu(device: Any) -> hardware.Gpu:
    """Return the GPU that a CUDA device names."""
    gpu = hardware.machine().gpu(device)
    assert gpu is not None  # C++ calls these for CUDA devices
    return gpu


# Functions that read Python data


def _chosen_device(device: Any) -> Any:
    """Return `device`, or PyTorch's default device if `device` is None."""
    if device is not None:
        return device
    depth = torch._C._len_torch_function_stack()
    for index in reversed(range(depth)):
        mode = torch._C._get_function_stack_at(index)
        if isinstance(mode, torch.utils._device.DeviceContext):
            return mode.device
    return "cpu"


@outermost
def tensor(
    data: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
    pin_memory: bool = False,
) -> torch.Tensor:
    """Create a tensor from data. It replaces `torch.tensor`."""
    if type(data) is VirtualTensor:
        warnings.warn(_COPY_CONSTRUCT, stacklevel=2)
        gpu: hardware.Gpu | None = data._gpu
        if device is not None:
            gpu = hardware.machine().gpu(device)
        return to_device(data.detach(), gpu, dtype, copy=True).requires_grad_(requires_grad)
    made = _tensor(read(data), dtype=dtype, device="cpu")
    if pin_memory:
        made = pinned(made)
    made = _placed(made, device)
    if requires_grad:  # torch.func refuses even requires_grad_(False)
        made.requires_grad_()
    return made


@outermost
def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> torch.Tensor:
    """Return data as a tensor, without a copy if possible. It replaces `torch.as_tensor`."""
    if isinstance(data, torch.Tensor):
        if device is None:
            device = data.device
        if dtype is None:
            dtype = data.dtype
        return data.to(device=device, dtype=dtype)
    return _placed(_as_tensor(read(data), dtype=dtype, device="cpu"), device)


def _placed(made: torch.Tensor, device: Any) -> torch.Tensor:
    """Move the tensor `made` from the CPU to the requested device, and return it."""
    device = _chosen_device(device)
    if str(device) == "meta":
        return made.to("meta")
    return to_device(made, hardware.machine().gpu(device))


def read(data: Any) -> Any:
    """Replace GPU tensors that hold one number by CPU numbers in nested lists, and return these.

    The host waits for each number.
    """
    if not isinstance(data, (list, tuple)):
        return data
    if not {VirtualTensor, list, tuple}.intersection(map(type, data)):
        return data
    found = []
    for x in data:
        if type(x) is VirtualTensor and x.dim() == 0:
            found.append(_tensor(x.item(), dtype=x.dtype, device="cpu"))
        else:
            found.append(read(x))
    return found


def new_tensor(
    self: torch.Tensor,
    data: Any,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Create a tensor like `self` from data. It replaces `Tensor.new_tensor`."""
    if device is None:
        device = self.device
    if isinstance(data, torch.Tensor):
        copy = data.detach().to(device=device, dtype=dtype or data.dtype, copy=True)
        return copy.requires_grad_(requires_grad)
    return tensor(data, dtype=dtype or self.dtype, device=device, requires_grad=requires_grad)


def with_any_device(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `factory`, changed to accept `pin_memory`, and a GPU's number as `device`."""

    @outermost
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if isinstance(device, int):
            kwargs["device"] = _device("cuda", device)
        elif args and device is not None and _is_of_wrapper(args[0], device):
            del kwargs["device"]
        if type(kwargs.get("out")) is VirtualTensor:
            # C++ takes `out` for a CPU tensor, so it must not see the device.
            device = kwargs.pop("device", None)
            if device is not None and _device(device).type != "cuda":
                given = _device(device).type
                raise RuntimeError(
                    f"device type {given} does not match device type of out parameter (cuda)"
                )
        if kwargs.pop("pin_memory", False):
            if torch.device(_chosen_device(kwargs.get("device"))).type != "cpu":
                raise RuntimeError("Only dense CPU tensors can be pinned")
            return pinned(factory(*args, **kwargs))
        return factory(*args, **kwargs)

    return make


def with_number_limits(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `factory`, changed to accept limits that are tensors without dimensions.

    The limits are the ends of a range. C++ reads such tensors, so they do not choose the device.
    """

    def number(x: Any) -> Any:
        if type(x) is VirtualTensor and x.dim() == 0:
            return x.item()
        return x

    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        limits = {name: number(kwargs[name]) for name in ("start", "end") if name in kwargs}
        return factory(*map(number, args), **kwargs | limits)

    return make


def _is_of_wrapper(model: Any, device: Any) -> bool:
    """Return whether `device` may be what the wrapper of a function transform reports.

    The wrapper `model` always says that it is on the CPU.
    """
    if not isinstance(model, torch.Tensor) or not is_wrapped(model):
        return False
    return _device(device).type == "cpu"


def made_on_host(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `factory`, changed to make its result on the CPU.

    The result is then moved to the requested device.
    """

    @outermost
    @wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.pop("device", None)
        return _placed(factory(*args, device="cpu", **kwargs), device)

    return make


def asarray(convert: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a replacement of `torch.asarray`, which is the function `convert`.

    It shares the memory of a GPU tensor where it can.
    """

    @outermost
    @wraps(convert)
    def converted(
        obj: Any, *, device: Any = None, copy: bool | None = None, **kwargs: Any
    ) -> torch.Tensor:
        if not isinstance(obj, torch.Tensor):
            return _placed(convert(obj, device="cpu", copy=copy, **kwargs), device)
        here = gpu_of(obj)
        there = here
        if device is not None or here is None:
            there = hardware.machine().gpu(_chosen_device(device))
        if here is not there:
            if copy is False:
                target = "cpu" if there is None else there.device
                raise ValueError(f"can't alias tensor from device '{obj.device}' to '{target}'.")
            obj = to_device(obj, there)
            copy = None
        return convert(obj, device="cpu", copy=copy, **kwargs)  # C++ believes it to be on the CPU

    return converted


def to_dlpack(export: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `torch.utils.dlpack.to_dlpack`, which is the function `export`.

    The original would not notice that a tensor is on a virtual GPU.
    """

    @wraps(export)
    def exported(tensor: torch.Tensor) -> Any:
        if type(tensor) is VirtualTensor:
            return tensor.__dlpack__()
        return export(tensor)

    return exported


def made_of_parts(
    factory: Callable[..., torch.Tensor], names: tuple[str, ...]
) -> Callable[..., torch.Tensor]:
    """Return `factory`, which makes sparse tensors, changed to put all their parts on one device.

    `names` are the arguments for the parts. They are moved to the requested device, or to the
    device of the values.
    """

    @outermost
    @wraps(factory)
    def make(*args: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
        parts = dict(zip(names, args, strict=False))
        parts |= {name: kwargs[name] for name in names if name in kwargs}
        if len(parts) < len(names):  # only a size is given
            return _placed(factory(*args, device="cpu", dtype=dtype, **kwargs), device)
        kwargs = {name: value for name, value in kwargs.items() if name not in names}
        if device is None:
            given = [(name, x) for name, x in parts.items() if isinstance(x, torch.Tensor)]
            if len(given) > 1 and len({x.device for _, x in given}) > 1:
                raise RuntimeError(_parts_differ(given, kwargs.get("layout")))
        if device is None and isinstance(parts["values"], torch.Tensor):
            device = parts["values"].device
        values = as_tensor(parts.pop("values"), dtype, device)
        indices = [as_tensor(part, None, device) for part in parts.values()]
        # C++ believes the parts to be on the CPU.
        return factory(*indices, values, *args[len(names) :], device="cpu", **kwargs)

    return make


def _parts_differ(given: list[tuple[str, torch.Tensor]], layout: torch.layout | None) -> str:
    """Return PyTorch's message for parts of a sparse tensor that are on different devices.

    Args:
        given: the name and the tensor of each part. The values come last.
        layout: the layout that `sparse_compressed_tensor` was asked for. It names the parts.
    """
    if given[0][0] == "indices":
        method = "wrapper_SparseCUDA___sparse_coo_tensor_with_dims_and_tensors"
        return argument_differs(given, method)
    *indices, (_, values) = given
    name = next(name for name, x in indices if x.device != values.device)
    if layout is not None:
        rows = layout in (torch.sparse_csr, torch.sparse_bsr)
        compressed, plain = ("crow", "col") if rows else ("ccol", "row")
        name = name.replace("compressed", compressed).replace("plain", plain)
    return f"Values and {name} need to be on the same device."


def on_the_cpu_only(name: str, factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return `factory`, changed to raise NotImplementedError for a tensor on a GPU.

    `name` is the function that the error names.
    """

    @wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        on_gpu = torch.device(_chosen_device(device)).type == "cuda"
        if on_gpu or any(type(x) is VirtualTensor for x in tensors(args)):
            raise unsupported(f"{name} of CUDA tensors")
        return factory(*args, **kwargs)

    return make


class _AnyDevice(type):
    """Metaclass of `Device`: PyTorch's devices count as its instances."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _device)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _device)


class Device(metaclass=_AnyDevice):
    """Replacement of `torch.device` that accepts a GPU's number in every build of PyTorch."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and type(args[0]) is int:
            return _device("cuda", args[0])
        return _device(*args, **kwargs)


# Legacy constructors


def legacy_constructor(construct: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a replacement of `torch.Tensor.__new__` that works while a dispatch mode is active.

    C++ cannot create a tensor of a subclass while Python sees each new tensor. `construct` is the
    original method.
    """

    # No named arguments: PyTorch's compiler compares the signature with that of its own substitute.
    def __new__(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: N807 (Python's name)
        if args[0] is torch.Tensor or any(type(x) is VirtualTensor for x in args[1:]):
            return construct(*args, **kwargs)
        with _DisableTorchDispatch():
            return construct(*args, **kwargs)

    return __new__


class _LegacyType(type):
    """Class of `torch.cuda.FloatTensor` and similar types, which create tensors when called."""

    dtype: torch.dtype
    layout = torch.strided
    is_cuda = True

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, torch.Tensor) or not instance.is_cuda:
            return False
        return (instance.dtype, instance.layout) == (cls.dtype, cls.layout)

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        if device is None:
            device = "cuda"
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
    """Class of `torch.cuda.sparse.FloatTensor` and similar types.

    They create tensors from indices and values, or from a size.
    """

    layout = torch.sparse_coo

    def __call__(cls, *args: Any, device: Any = None) -> torch.Tensor:
        parts: tuple = (args,)
        if args and isinstance(args[0], torch.Tensor):
            parts = args
        if device is None:
            device = "cuda"
        return torch.sparse_coo_tensor(*parts, dtype=cls.dtype, device=device)


def set_default_tensor_type(kind: Any) -> None:
    """Set the default tensor type. It replaces `torch._C._set_default_tensor_type`.

    C++ accepts only CPU types. For a CUDA type it gets the CPU type of the same dtype, and
    PyTorch's default device is set.
    """
    global _default_is_cuda
    is_cuda = isinstance(kind, _LegacyType)
    host_type = getattr(torch, kind.__name__) if is_cuda else kind
    _set_default_tensor_type(legacy_types.made_in_cpp(host_type))
    if is_cuda != _default_is_cuda:
        torch.set_default_device("cuda" if is_cuda else None)
        _default_is_cuda = is_cuda


def remove() -> None:
    """Make the CPU the default device again if a CUDA type is the default."""
    if _default_is_cuda:
        set_default_tensor_type(torch.FloatTensor)
