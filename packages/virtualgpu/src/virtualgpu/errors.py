"""CUDA's errors: their classes and texts, which follow the installed torch.

The texts were recorded on an H200 with torch 2.11 (benchmarks/fidelity/h200/probe.json). The
versions in which they changed were read from the libraries of torch 2.10 to 2.15 (`strings
libtorch_cpu.so libc10_cuda.so`), and the tests look there again.

For most operators, PyTorch's generated code checks the devices argument by argument and names the
argument. Elementwise operators (TensorIterator) check devices themselves. PyTorch's own
native_functions.yaml, which is part of torch, tells which operator does what.
"""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch

from virtualgpu.source_lines import is_users

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
AcceleratorError: type[Exception] = torch.AcceleratorError


def leave_out_the_kit(error: Exception) -> None:
    """Remove the kit's own calls from an error's traceback.

    CUDA's errors have no such calls, and the calls would keep tensors alive. They stay if the
    user's code is among them, and in Python's development mode (`python -X dev`), which is for
    developers of the kit.
    """
    call = error.__traceback__
    while call is not None:
        if sys.flags.dev_mode or is_users(call.tb_frame.f_code.co_filename):
            return
        call = call.tb_next
    error.__traceback__ = None  # a plain `raise` adds no line of its own


def outermost(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, changed so that its errors do not show the kit's calls.

    Users call this function.
    """

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
    """Return the CUDA error with the text `what`, as PyTorch words it, and a line of advice."""
    lines = [
        f"CUDA error: {what}",
        advice,
        "CUDA kernel errors might be asynchronously reported at some other API call, so the "
        "stacktrace below might be incorrect.",
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n",
    ]
    return AcceleratorError("\n".join(lines))


def invalid_ordinal() -> Exception:
    """Return the error for the index of a GPU that does not exist."""
    advice = "GPU device may be out of range, do you have enough GPUs?"
    return cuda_error("invalid device ordinal", advice)


def device_side_assert() -> Exception:
    """Return the error of a kernel that found an invalid value, such as an index out of range."""
    return cuda_error("device-side assert triggered", _search_for("cudaErrorAssert"))


def invalid_device_context() -> Exception:
    """Return the error for memory or an event that is opened in the process that exported it."""
    return cuda_error("invalid device context", _search_for("cudaErrorDeviceUninitialized"))


def invalid_resource_handle() -> Exception:
    """Return the error for memory or an event that cannot be opened.

    Its process has ended, or the event is not for other processes.
    """
    return cuda_error("invalid resource handle", _search_for("cudaErrorInvalidResourceHandle"))


def invalid_argument() -> Exception:
    """Return the error for arguments that the driver does not accept together."""
    return cuda_error("invalid argument", _search_for("cudaErrorInvalidValue"))


def stream_capture(what: str, kind: str, name: str = "StreamCapture") -> Exception:
    """Return the error of a forbidden operation in a graph capture.

    `what` is its text. `kind` is the end and `name` the beginning of CUDA's name of the error.
    """
    return cuda_error(what, _search_for(f"cudaError{name}{kind}"))


def _search_for(name: str) -> str:
    """Return CUDA's sentence that says where the error `name` is documented."""
    page = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    return f"Search for `{name}' in {page} for more information."


@dataclass
class Fault:
    """A failed assert of a kernel, at `time` seconds on the machine's clock.

    `known` says whether the host has learned of it.
    """

    assertion: str
    time: float
    known: bool = False

    def surface(self) -> None:
        """Raise AcceleratorError for this failed assert.

        The first time, also print what the kernel prints, without the number of its thread.
        """
        if not self.known:
            self.known = True
            print(f"device-side assertion `{self.assertion}` failed.", file=sys.stderr)
        raise device_side_assert()


# Devices that disagree


class DifferentDevicesError(RuntimeError):
    """Error about arguments on several devices, raised where the operator is not known.

    It is later replaced by the operator's own error.
    """


def at_least_two(given: list[tuple[str, torch.Tensor]]) -> str:
    """Return CUDA's message that there are "at least two devices", which names two of them.

    `given` has the name and the tensor of each argument. CUDA devices come first. CPU tensors
    without dimensions do not count.
    """
    found = dict.fromkeys(str(x.device) for _, x in given if x.dim() or x.device.type != "cpu")
    if len(found) < 2:  # a CPU tensor without dimensions is not allowed here
        found = dict.fromkeys(str(x.device) for _, x in given)
    first, second = sorted(found, key=lambda device: device == "cpu")[:2]
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{first} and {second}!"
    )


def argument_differs(given: list[tuple[str, torch.Tensor]], method: str) -> str:
    """Return CUDA's message that names the first argument on a wrong device.

    `given` has the name and the tensor of each argument. The device of the first one is the right
    one. `method` is the method that the message names.
    """
    common = given[0][1].device
    argument, other = next((argument, x.device) for argument, x in given if x.device != common)
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on {other}, "
        f"different from other tensors on {common} "
        f"(when checking argument in method {method})"
    )


# Kernels that CUDA does not have


def _class_of_unimplemented() -> type[RuntimeError]:
    """Return the class of torch's error for a dtype that a kernel lacks.

    It is NotImplementedError in newer versions.
    """
    try:
        torch.empty(1, dtype=torch.int, device="cpu").softmax(0)
    except RuntimeError as error:
        return type(error)
    return NotImplementedError


_Unimplemented = _class_of_unimplemented()


def not_implemented(kernel: str, dtype: torch.dtype) -> RuntimeError:
    """Return the error of a CUDA kernel that does not support a dtype.

    `kernel` is the name of the kernel in the message.
    """
    error = _Unimplemented(f"\"{kernel}\" not implemented for '{scalar_name(dtype)}'")
    error.of_cuda = True  # type: ignore[attr-defined]  # unlike an error of a CPU kernel
    return error


def scalar_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in PyTorch's C++, such as "Long" for int64."""
    legacy_name = torch.empty(0, dtype=dtype, device="meta").type()
    return legacy_name.rpartition(".")[2].removesuffix("Tensor")


def cpp_name(dtype: torch.dtype) -> str:
    """Return the C++ type of a dtype's elements in PyTorch's messages: "c10::Half" for float16."""
    known = {
        torch.float32: "float",
        torch.float64: "double",
        torch.int64: "long",
        torch.int32: "int",
        torch.bool: "bool",
    }
    return known.get(dtype, f"c10::{scalar_name(dtype)}")


def tensor_type(dtype: torch.dtype) -> str:
    """Return the type in PyTorch's messages of CUDA tensors with this dtype.

    It is a legacy name, such as "torch.cuda.FloatTensor". bfloat16 has none.
    """
    if dtype is torch.bfloat16:
        return "CUDABFloat16Type"
    return f"torch.cuda.{scalar_name(dtype)}Tensor"


def type_of(x: torch.Tensor) -> str:
    """Return the type of the tensor `x` in PyTorch's messages."""
    if x.device.type == "cuda":
        return tensor_type(x.dtype)
    if x.dtype is torch.bfloat16:
        return "CPUBFloat16Type"
    return f"torch.{scalar_name(x.dtype)}Tensor"


def refuse_legacy_conversion(dtype: torch.dtype, device: Any, given: torch.Tensor) -> None:
    """Raise PyTorch's TypeError of a legacy constructor that does not convert the tensor `given`.

    `dtype` and `device` are those of the constructor's type.
    """

    def options(dtype: torch.dtype, device: Any) -> str:
        return (
            f"TensorOptions(dtype={cpp_name(dtype)}, device={device}, layout=Strided, "
            "requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt))"
        )

    raise TypeError(f"expected {options(dtype, device)} (got {options(given.dtype, given.device)})")


_CPU_TYPE = re.compile(r"\btorch\.(?=(sparse\.)?[A-Z]\w*Tensor\b)")


def with_cuda_types(words: str) -> str:
    """Replace the names of CPU tensor types in the text of an error by those of CUDA types."""
    return _CPU_TYPE.sub("torch.cuda.", words).replace("CPUBFloat16Type", "CUDABFloat16Type")


_NOT_SUPPORTED = "is not supported by the virtual GPU"
NOT_KEPT = "were not kept"


def unsupported(what: str) -> Exception:
    """Return the error for something that a virtual GPU does not support.

    `what` is the subject of the message.
    """
    return NotImplementedError(f"{what} {_NOT_SUPPORTED}. It works on a real one")


def refusal_behind(error: BaseException | None) -> str | None:
    """Return the text of the virtual GPU's refusal that led to an exception, or None.

    The causes of the exception are searched, too. Errors of another process come as text, which is
    also searched.
    """
    if error is None:
        return None
    for line in str(error).splitlines():
        if _NOT_SUPPORTED in line:
            return line.removeprefix("NotImplementedError: ")
    if asks_for_values(error):
        return str(error)
    causes: list[BaseException | None] = []
    if isinstance(error, BaseExceptionGroup):
        causes += error.exceptions
    if error.__cause__ is not None:
        causes.append(error.__cause__)
    elif not error.__suppress_context__:
        causes.append(error.__context__)
    for cause in causes:
        found = refusal_behind(cause)
        if found is not None:
            return found
    return None


def asks_for_values(error: BaseException) -> bool:
    """Return whether an exception says that the program needs values that were not kept."""
    return isinstance(error, RuntimeError) and NOT_KEPT in str(error)


# Gradients


def assign_gradient(set_gradient: Callable[..., None]) -> Callable[[torch.Tensor, Any], None]:
    """Return a setter of `Tensor.grad` that checks devices.

    PyTorch's setter `set_gradient` sees only CPU tensors and would accept any device.
    """

    def assign(self: torch.Tensor, gradient: Any) -> None:
        if isinstance(gradient, torch.Tensor) and gradient.device != self.device:
            if gradient.device.type == self.device.type:
                what = "located on device with index"
                there, here = str(gradient.device.index), str(self.device.index)
            else:
                what = "with device type"
                there, here = gradient.device.type, self.device.type
            raise RuntimeError(
                f"attempting to assign a gradient {what} '{there}' to a tensor {what} '{here}'. "
                "Please ensure that the gradient and the tensor are on the same device"
            )
        set_gradient(self, gradient)

    return assign


def is_wrapped(x: torch.Tensor) -> bool:
    """Return whether `x` is the wrapper of a function transform such as vmap.

    C++ says that such a wrapper is on the CPU.
    """
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)


def make_gradients(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `torch.autograd._make_grads` that checks the devices of gradients.

    `make` is the original function.
    """

    def checked(outputs: Any, gradients: Any, is_grads_batched: bool) -> Any:
        made = make(outputs, gradients, is_grads_batched=is_grads_batched)
        for index, (output, gradient) in enumerate(zip(outputs, made, strict=False)):
            if not isinstance(output, torch.Tensor) or gradient is None:
                continue
            if is_wrapped(output) or is_wrapped(gradient):
                continue
            if gradient.device != output.device:
                raise RuntimeError(
                    f"invalid gradient at index {index} - expected device {output.device} "
                    f"but got {gradient.device}"
                )
        return made

    return checked
