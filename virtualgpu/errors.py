"""What CUDA says when something is wrong: one place for the classes and the words, which follow the installed torch.

The words are those that an H200 with torch 2.11 gave, recorded in benchmarks/fidelity/h200/probe.json; in which version they changed was
read off the libraries of torch 2.6 to 2.15 (`strings libtorch_cpu.so libc10_cuda.so`), and the tests look there again. PyTorch's
generated code checks devices argument by argument for most operators, and names the argument; elementwise ones (TensorIterator) check by
themselves. Which operator does what stands in PyTorch's own native_functions.yaml, which comes with torch.
"""

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch

from virtualgpu.source_lines import is_users

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
NAMES_ARGUMENT_FIRST = VERSION >= (2, 8)  # "got mat2 is on cpu, different from other tensors on cuda:0"
ADVISES = VERSION >= (2, 9)  # where to read about a CUDA error
AcceleratorError: type[Exception] = getattr(torch, "AcceleratorError", RuntimeError)  # its own class from torch 2.8 on


def leave_out_the_kit(error: Exception) -> None:
    """Take the calls inside the kit that the error came through out of its traceback: CUDA's has none, and they would hold tensors.

    They stay where code of the user's is among them, and in Python's development mode (`python -X dev`), for the kit's own makers.
    """
    call = error.__traceback__
    while call is not None:
        if sys.flags.dev_mode or is_users(call.tb_frame.f_code.co_filename):
            return
        call = call.tb_next
    error.__traceback__ = None  # a bare `raise` adds no line of its own to it


def outermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that users call: its errors leave out the kit."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            leave_out_the_kit(error)
            raise

    return called


# Errors of CUDA itself


def cuda_error(what: str, advice: str) -> Exception:
    lines = [f"CUDA error: {what}", *([advice] if ADVISES else [])]
    lines += [
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
    ]
    return AcceleratorError("\n".join(lines))


def invalid_ordinal() -> Exception:
    """There is no GPU of that number."""
    return cuda_error("invalid device ordinal", "GPU device may be out of range, do you have enough GPUs?")


def device_side_assert() -> Exception:
    """A kernel found a value that it cannot work with, such as an index out of range."""
    return cuda_error("device-side assert triggered", _search_for("cudaErrorAssert"))


def invalid_device_context() -> Exception:
    """Memory that is opened in the process that sent it."""
    return cuda_error("invalid device context", _search_for("cudaErrorDeviceUninitialized"))


def invalid_resource_handle() -> Exception:
    """Memory of a process that has ended."""
    return cuda_error("invalid resource handle", _search_for("cudaErrorInvalidResourceHandle"))


def _search_for(name: str) -> str:
    page = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    return f"Search for `{name}' in {page} for more information."


# Devices that disagree


@cache
def _native_functions() -> tuple[frozenset[str], frozenset[str]]:
    """Names with overload of the operators that check devices by themselves, and of those whose kernels are structured."""
    package = importlib.util.find_spec("torchgen")
    text = "" if package is None else (Path(package.origin).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    by_themselves, structured = set(), set()
    for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        name = entry[: entry.index("(")]
        if "device_check: NoCheck" in entry:
            by_themselves.add(name)
        if re.search(r"^  structured(_delegate)?: ", entry, flags=re.MULTILINE):
            structured.add(name)
    return frozenset(by_themselves), frozenset(structured)


def _arguments(func: Any, args: tuple, kwargs: dict) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor among the arguments, with the argument's name, in the order of the schema."""
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, torch.Tensor):
                yield argument.name, x


class DifferentDevicesError(RuntimeError):
    """Arguments on several devices, before anybody has looked at which operator has them."""


def different_devices(args: tuple, kwargs: dict) -> DifferentDevicesError:
    """The plain error; `of_operator` names the argument where CUDA does."""
    given = [("", x) for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return DifferentDevicesError(at_least_two(given))


def of_operator(func: Any, args: tuple, kwargs: dict) -> RuntimeError:
    """CUDA's error of this operator for arguments on several devices."""
    name = func._schema.name.removeprefix("aten::")
    given = list(_arguments(func, args, kwargs))
    special = _OWN_WORDS.get(name)
    words = special(given) if special is not None else None
    if words is not None:
        return RuntimeError(words)
    # The CPU's operator stands for another one of CUDA's, whose arguments have other names.
    name, renamed = _CUDA_OPERATOR.get(name, (name, {}))
    overload = func._schema.overload_name
    whole = f"{name}.{overload}" if overload else name
    by_themselves, structured = _native_functions()
    if whole in by_themselves or name in renamed or not by_themselves:
        return RuntimeError(at_least_two(given))
    method = f"wrapper_CUDA_{name}{'_' + overload if overload else ''}" if whole in structured else f"wrapper_CUDA_{overload}_{name}"
    return RuntimeError(argument_differs([(renamed.get(argument, argument), x) for argument, x in given], method))


def at_least_two(given: list[tuple[str, torch.Tensor]]) -> str:
    """The first two devices, CUDA ones first. CPU tensors without dimensions do not count."""
    found = dict.fromkeys(str(x.device) for _, x in given if x.dim() or x.device.type != "cpu")
    if len(found) < 2:  # a CPU scalar stood where it is not admitted
        found = dict.fromkeys(str(x.device) for _, x in given)
    first, second = sorted(found, key=lambda device: device == "cpu")[:2]
    return f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}!"


def argument_differs(given: list[tuple[str, torch.Tensor]], method: str) -> str:
    """The first argument whose device is not that of the first one."""
    common = given[0][1].device
    argument, other = next((argument, x.device) for argument, x in given if x.device != common)
    if NAMES_ARGUMENT_FIRST:
        return (
            f"Expected all tensors to be on the same device, but got {argument} is on {other}, different from other tensors on {common} "
            f"(when checking argument in method {method})"
        )
    return (
        f"Expected all tensors to be on the same device, but found at least two devices, {common} and {other}! "
        f"(when checking argument for argument {argument} in method {method})"
    )


_CUDA_OPERATOR: dict[str, tuple[str, dict[str, str]]] = {
    "embedding": ("index_select", {"weight": "self", "indices": "index"}),
    "stack": ("cat", {}),
    "_native_batch_norm_legit": ("native_batch_norm", {}),
    "convolution": ("_slow_conv2d_forward", {"input": "self"}),
}


def _convolution(given: list[tuple[str, torch.Tensor]]) -> str | None:
    found = dict(given)
    image = found["input"]
    if not image.is_cuda:
        return argument_differs([("self", image), *given[1:]], "wrapper_CUDA___slow_conv2d_forward")
    argument = next(name for name in ("weight", "bias") if name in found and found[name].device != image.device)
    if found[argument].is_cuda:
        return None
    return f"Input type ({image.type()}) and {argument} type ({found[argument].type()}) should be the same"


def _index(given: list[tuple[str, torch.Tensor]]) -> str | None:
    device = given[0][1].device
    wrong = any(name == "indices" and x.is_cuda and x.device != device for name, x in given)
    return f"indices should be either on cpu or on the same device as the indexed tensor ({device})" if wrong else None


def _mask(given: list[tuple[str, torch.Tensor]]) -> str | None:
    own, mask = given[0][1].device, given[1][1].device
    return f"expected self and mask to be on the same device, but got mask on {mask} and self on {own}" if own != mask else None


def _attention(given: list[tuple[str, torch.Tensor]]) -> str | None:
    query, key, value = (x.device for _, x in given[:3])
    return (
        "Expected query, key, and value to have the same device type, but got "
        f"query.device: {query} key.device: {key} and value.device: {value} instead."
    )


_OWN_WORDS: dict[str, Callable[[list[tuple[str, torch.Tensor]]], str | None]] = {
    "convolution": _convolution,
    "index": _index,
    "index_put": _index,
    "index_put_": _index,
    "_index_put_impl_": _index,
    "masked_fill": _mask,
    "masked_fill_": _mask,
}


def check_recurrent(args: tuple, kwargs: dict) -> None:
    """`lstm`, `gru` and the plain ones: the weights, their third argument, must be where the input is. Raises RuntimeError otherwise."""
    for weight in args[2]:
        if weight.device != args[0].device:
            raise RuntimeError(
                "Input and parameter tensors are not at the same device, "
                f"found input tensor at {args[0].device} and parameter tensor at {weight.device}"
            )


def check_attention(args: tuple, kwargs: dict) -> None:
    """`scaled_dot_product_attention`: raises RuntimeError unless query, key and value are on one device."""
    given = [("", x) for x in args[:3]]
    if len({x.device for _, x in given}) > 1:
        raise RuntimeError(_attention(given))


# Composite operators that look at devices before they take themselves apart.
CHECKS: dict[str, Callable[[tuple, dict], None]] = {
    **dict.fromkeys(("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"), check_recurrent),
    "scaled_dot_product_attention": check_attention,
}


# Kernels that CUDA lacks

_UNIMPLEMENTED = re.compile(r'^"(\w+)" not implemented for')


def _class_of_unimplemented() -> type[RuntimeError]:
    """With what the installed torch says that a kernel lacks a type, on any device: NotImplementedError in newer versions."""
    try:
        torch.empty(1, dtype=torch.int, device="cpu").softmax(0)
    except RuntimeError as error:
        return type(error)
    return NotImplementedError


_Unimplemented = _class_of_unimplemented()
# What CUDA calls its kernel for an operator, where the CPU has one of another name.
KERNEL_NAMES = {
    "_softmax": "host_softmax",
    "_log_softmax": "host_softmax",
    "linalg_cholesky_ex": "cholesky_cusolver",
    "cholesky": "cholesky_cusolver",
}


def as_on_cuda(func: Any, error: RuntimeError) -> RuntimeError:
    """The error of a CPU kernel, in the words of CUDA's."""
    name = func._schema.name.removeprefix("aten::")
    words = str(error)
    found = _UNIMPLEMENTED.match(words)
    if found and name in KERNEL_NAMES:
        return type(error)(words.replace(found[1], KERNEL_NAMES[name], 1))
    if words.startswith("expected m1 and m2 to have the same dtype"):
        return type(error)(words.replace("m1 and m2", "mat1 and mat2", 1))
    return error


def not_implemented(kernel: str, dtype: torch.dtype) -> RuntimeError:
    """CUDA's kernel of this name lacks the type."""
    return _Unimplemented(f"\"{kernel}\" not implemented for '{scalar_name(dtype)}'")


def scalar_name(dtype: torch.dtype) -> str:
    """PyTorch's C++ name of a type: "Long" for int64."""
    return torch.empty(0, dtype=dtype, device="meta").type().rpartition(".")[2].removesuffix("Tensor")


def require_floating_convolution(dtype: torch.dtype) -> None:
    """cuDNN convolves no integers: raises RuntimeError for them."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"getCudnnDataTypeFromScalarType() not supported for {scalar_name(dtype)}")


# Gradients


def assign_gradient(set_gradient: Callable[..., None]) -> Callable[[torch.Tensor, Any], None]:
    """The setter of `Tensor.grad`: C++ sees only CPU tensors, and would take a gradient from anywhere."""

    def assign(self: torch.Tensor, gradient: Any) -> None:
        if isinstance(gradient, torch.Tensor) and gradient.device != self.device:
            here, there = self.device, gradient.device
            words = "attempting to assign a gradient with device type '{}' to a tensor with device type '{}'."
            if here.type == there.type:
                words = "attempting to assign a gradient located on device with index '{}' to a tensor located on device with index '{}'."
                here, there = here.index, there.index
            else:
                here, there = here.type, there.type
            raise RuntimeError(f"{words.format(there, here)} Please ensure that the gradient and the tensor are on the same device")
        set_gradient(self, gradient)

    return assign


def make_gradients(make: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd._make_grads`, which also looks at the devices of the gradients given to `backward`."""

    def checked(outputs: Any, gradients: Any, is_grads_batched: bool) -> Any:
        made = make(outputs, gradients, is_grads_batched=is_grads_batched)
        for index, (output, gradient) in enumerate(zip(outputs, made, strict=False)):
            if not isinstance(output, torch.Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(output):
                continue  # a function transform's wrapper: C++ tells its device, which is the CPU
            if gradient is not None and gradient.device != output.device:
                raise RuntimeError(f"invalid gradient at index {index} - expected device {output.device} but got {gradient.device}")
        return made

    return checked
