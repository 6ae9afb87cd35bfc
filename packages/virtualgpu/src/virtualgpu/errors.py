"""What CUDA says when something is wrong: one place for the classes and the words, which follow the installed torch.

The words are those that an H200 with torch 2.11 gave, recorded in benchmarks/fidelity/h200/probe.json; in which version they changed was
read off the libraries of torch 2.10 to 2.15 (`strings libtorch_cpu.so libc10_cuda.so`), and the tests look there again. PyTorch's
generated code checks devices argument by argument for most operators, and names the argument; elementwise ones (TensorIterator) check by
themselves. Which operator does what stands in PyTorch's own native_functions.yaml, which comes with torch.
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
    lines = [
        f"CUDA error: {what}",
        advice,
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
    """Memory or an event that is opened in the process that sent it."""
    return cuda_error("invalid device context", _search_for("cudaErrorDeviceUninitialized"))


def invalid_resource_handle() -> Exception:
    """Memory or an event of a process that has ended, or an event that is not for other processes."""
    return cuda_error("invalid resource handle", _search_for("cudaErrorInvalidResourceHandle"))


def invalid_argument() -> Exception:
    """For what the driver does not accept together, such as an event's flags."""
    return cuda_error("invalid argument", _search_for("cudaErrorInvalidValue"))


def stream_capture(what: str, kind: str, name: str = "StreamCapture") -> Exception:
    """What a capture does not admit, or is no graph: `kind` ends the error's name."""
    return cuda_error(what, _search_for(f"cudaError{name}{kind}"))


def _search_for(name: str) -> str:
    page = "https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html"
    return f"Search for `{name}' in {page} for more information."


@dataclass
class Fault:
    """An assert that failed on a GPU at `time` (seconds on the machine's clock). `known` once the host has heard of it."""

    assertion: str
    time: float
    known: bool = False

    def surface(self) -> None:
        """Raises AcceleratorError. The first time, what the kernel printed is printed too, without its thread's number."""
        if not self.known:
            self.known = True
            print(f"device-side assertion `{self.assertion}` failed.", file=sys.stderr)
        raise device_side_assert()


# Devices that disagree


class DifferentDevicesError(RuntimeError):
    """Arguments on several devices, before anybody has looked at which operator has them."""


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
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on {other}, different from other tensors on {common} "
        f"(when checking argument in method {method})"
    )


# Kernels that CUDA lacks


def _class_of_unimplemented() -> type[RuntimeError]:
    """With what the installed torch says that a kernel lacks a type, on any device: NotImplementedError in newer versions."""
    try:
        torch.empty(1, dtype=torch.int, device="cpu").softmax(0)
    except RuntimeError as error:
        return type(error)
    return NotImplementedError


_Unimplemented = _class_of_unimplemented()


def not_implemented(kernel: str, dtype: torch.dtype) -> RuntimeError:
    """CUDA's kernel of this name lacks the type."""
    return _Unimplemented(f"\"{kernel}\" not implemented for '{scalar_name(dtype)}'")


def scalar_name(dtype: torch.dtype) -> str:
    """PyTorch's C++ name of a type: "Long" for int64."""
    return torch.empty(0, dtype=dtype, device="meta").type().rpartition(".")[2].removesuffix("Tensor")


def cpp_name(dtype: torch.dtype) -> str:
    """The C++ type of an element, as PyTorch's messages print it: "c10::Half" for float16."""
    known = {torch.float32: "float", torch.float64: "double", torch.int64: "long", torch.int32: "int", torch.bool: "bool"}
    return known.get(dtype, f"c10::{scalar_name(dtype)}")


def tensor_type(dtype: torch.dtype) -> str:
    """The type of a CUDA tensor, as PyTorch's messages print it: bfloat16 has no legacy name."""
    return "CUDABFloat16Type" if dtype is torch.bfloat16 else f"torch.cuda.{scalar_name(dtype)}Tensor"


def type_of(x: torch.Tensor) -> str:
    """The type of a tensor, as PyTorch's messages print it."""
    if x.device.type == "cuda":
        return tensor_type(x.dtype)
    return "CPUBFloat16Type" if x.dtype is torch.bfloat16 else f"torch.{scalar_name(x.dtype)}Tensor"


def refuse_legacy_conversion(dtype: torch.dtype, device: Any, given: torch.Tensor) -> None:
    """Raise TypeError for a tensor of another type, which a legacy constructor does not convert."""

    def options(dtype: torch.dtype, device: Any) -> str:
        rest = "requires_grad=false (default), pinned_memory=false (default), memory_format=(nullopt)"
        return f"TensorOptions(dtype={cpp_name(dtype)}, device={device}, layout=Strided, {rest})"

    raise TypeError(f"expected {options(dtype, device)} (got {options(given.dtype, given.device)})")


_CPU_TYPE = re.compile(r"\btorch\.(?=(sparse\.)?[A-Z]\w*Tensor\b)")


def with_cuda_types(words: str) -> str:
    """The words of an error about GPU tensors, which C++ calls by the types of CPU tensors: `torch.FloatTensor`."""
    return _CPU_TYPE.sub("torch.cuda.", words).replace("CPUBFloat16Type", "CUDABFloat16Type")


_NOT_SERVED = "is not served by the virtual GPU"
NOT_KEPT = "were not kept"


def unsupported(what: str) -> Exception:
    return NotImplementedError(f"{what} {_NOT_SERVED}. It works on a real one")


def refusal_behind(error: BaseException | None) -> str | None:
    """What a virtual GPU cannot do, in its words, if that led to this exception. Another process's errors come as text."""
    if error is None:
        return None
    said = next((line for line in str(error).splitlines() if _NOT_SERVED in line), None)
    if said is not None or asks_for_values(error):
        return str(error) if said is None else said.removeprefix("NotImplementedError: ")
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    led_to_it = (*(error.exceptions if isinstance(error, BaseExceptionGroup) else ()), before)
    return next((found for each in led_to_it if (found := refusal_behind(each)) is not None), None)


def asks_for_values(error: BaseException) -> bool:
    """Whether an exception says that something needs values which were not kept."""
    return isinstance(error, RuntimeError) and NOT_KEPT in str(error)


# Gradients


def assign_gradient(set_gradient: Callable[..., None]) -> Callable[[torch.Tensor, Any], None]:
    """The setter of `Tensor.grad`: C++ sees only CPU tensors, and would take a gradient from anywhere."""

    def assign(self: torch.Tensor, gradient: Any) -> None:
        if isinstance(gradient, torch.Tensor) and gradient.device != self.device:
            by_index = gradient.device.type == self.device.type
            what = "located on device with index" if by_index else "with device type"
            there, here = (x.device.index if by_index else x.device.type for x in (gradient, self))
            raise RuntimeError(
                f"attempting to assign a gradient {what} '{there}' to a tensor {what} '{here}'. "
                "Please ensure that the gradient and the tensor are on the same device"
            )
        set_gradient(self, gradient)

    return assign


def is_wrapped(x: torch.Tensor) -> bool:
    """Is this the wrapper of a function transform? C++ tells its device, which is the CPU."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


def make_gradients(make: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.autograd._make_grads`, which also looks at the devices of the gradients given to `backward`."""

    def checked(outputs: Any, gradients: Any, is_grads_batched: bool) -> Any:
        made = make(outputs, gradients, is_grads_batched=is_grads_batched)
        for index, (output, gradient) in enumerate(zip(outputs, made, strict=False)):
            if not isinstance(output, torch.Tensor) or gradient is None or is_wrapped(output) or is_wrapped(gradient):
                continue
            if gradient.device != output.device:
                raise RuntimeError(f"invalid gradient at index {index} - expected device {output.device} but got {gradient.device}")
        return made

    return checked
