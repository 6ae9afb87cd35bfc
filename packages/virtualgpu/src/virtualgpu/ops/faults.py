"""CUDA's reaction where the CPU's kernel has raised an error.

CUDA raises an error in its own words, or returns and leaves its GPU with a fault.

For most operators, PyTorch's generated code checks the devices argument by argument and names the
argument. Elementwise operators (TensorIterator) check devices themselves. PyTorch's own
native_functions.yaml, which is part of torch, tells which operator does what.

Device-side asserts: a kernel that finds an invalid value stops its GPU for good. The CPU's kernel
raises at once, but CUDA's call returns. The error appears in the next call that waits for the GPU,
or in a launch after the GPU has reached the assert. Every later use of the GPU raises it again,
until the machine is taken away. On a real GPU the process must end.
"""

import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.errors import (
    DifferentDevicesError,
    Fault,
    argument_differs,
    at_least_two,
    unsupported,
    with_cuda_types,
)
from virtualgpu.ops.call import (
    CUDA_KERNELS,
    CUDA_OPERATORS,
    DEVICE_ERRORS,
    REFUSE_HALF,
    Call,
    Handler,
    asserts,
    cuda_operator,
)
from virtualgpu.ops.half import FOR_COMPLEX_HALF, HALF, UNIMPLEMENTED, in_float32
from virtualgpu.ops.without_values import on_meta
from virtualgpu.tensor import VirtualTensor, tensors, wrap_all

asserts("", "_assert_async", cpu="^Expected Tensor with single nonzero")
cuda_operator("stack", "cat")

_CPU = re.compile("(_vml)?_cpu")  # in the names of most kernels, CUDA's have "_cuda" there
_WITHOUT_HALF = re.compile(r'" not implemented for \'(Half|BFloat16|ComplexHalf)\'')
_WITHOUT_KERNEL = re.compile(
    r"^Could not run 'aten::([\w.]+)' with arguments from the '(\w*)CPU' backend"
)
_MISFIT = object()
_KERNEL_FOR_CUDA = "^    .*(CUDA|Composite).*:"
_KERNEL_FOR_CPU = "^    .*(CPU|Composite).*:"


def survive(call: Call, error: Exception) -> Any:
    """Return a result of the right shape if CUDA's kernel would fail an assert.

    `error` is the error of the CPU's kernel for the same call. In all other cases it is raised in
    CUDA's words.
    """
    try:
        if isinstance(error, DifferentDevicesError):
            if call.op.name.startswith("_foreach_"):
                return _tensor_by_tensor(call)
            raise of_operator(call) from None
        formats = _lacks_half(call, error)
        if formats:
            call.op.kernel = in_float32(call.func.overloadpacket, call.func, formats=formats)
            assert call.op.handler is not None
            return call.op.handler(call)
        assertion, about_values = call.op.assertion
        if not about_values.search(str(error)):
            raise as_on_cuda(call, error) from None
        gpu = call.gpu
        shapes = _result_without_values(call, error)
        gpu.launch(0, name=call.op.name)
        if gpu.stream.capture is None:  # a captured kernel does not run
            gpu.fault = Fault(assertion, gpu.stream.ready)
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            gpu.synchronize()
        return wrap_all(shapes, gpu)
    finally:
        # The error's traceback refers to this frame. The cycle would keep the operator's tensors
        # until the next garbage collection.
        del error


def _lacks_half(call: Call, error: Exception) -> tuple[torch.dtype, ...]:
    """Return the half-precision dtypes that CUDA's kernel supports and the CPU's kernel does not.

    `error` is the error of the CPU's kernel, before which it has done nothing. Returns () unless
    the error says that a dtype is not supported.
    """
    if hasattr(error, "of_cuda"):
        return ()
    found = _WITHOUT_HALF.search(str(error))
    has_own_kernel = call.op.kernel is call.op.own_kernel
    if not found or not has_own_kernel or call.op.name.startswith(tuple(REFUSE_HALF)):
        return ()
    if found[1] == "ComplexHalf":
        if call.op.name.removesuffix("_") in FOR_COMPLEX_HALF:
            return (torch.complex32,)
        return ()
    if any(x.dtype.is_complex for x in call.tensors()):
        return ()
    return HALF


def _result_without_values(call: Call, error: Exception) -> Any:
    """Return tensors of the result's shape, without computing values.

    Shapes and dtypes that do not fit are noticed before any kernel runs, so `error`, the error of
    the CPU's kernel, is raised unchanged for these.
    """
    try:
        shapes = on_meta(call)
    except (RuntimeError, IndexError):
        shapes = _MISFIT
    if shapes is _MISFIT:
        try:
            raise error
        finally:
            del error
    returns = call.func._schema.returns
    if not returns:
        return None
    if returns[0].alias_info is not None:  # the operator writes to an argument
        if call.op.outs:
            given = (*call.kwargs.values(), *call.args)
            return next(x for x in given if type(x) is VirtualTensor)
        return call.args[0]
    if shapes is None:
        raise error

    def zeros(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x, device="cpu")

    with _DisableTorchDispatch():
        return torch.utils._pytree.tree_map_only(torch.Tensor, zeros, shapes)


def as_on_cuda(call: Call, error: Exception) -> Exception:
    """Return the error that CUDA's kernel would raise, given the error of the CPU's kernel."""
    if hasattr(error, "of_cuda"):
        return error
    name, words = call.op.name, str(error)
    found = UNIMPLEMENTED.match(words)
    if found:
        kernel = CUDA_KERNELS.get(name) or _CPU.sub("_cuda", found[1])
        return type(error)(words.replace(found[1], kernel, 1))
    found = _WITHOUT_KERNEL.match(words)
    if found:
        if found[1] in native_functions().for_cuda_alone:
            return unsupported(f"torch.ops.aten.{found[1]}")
        return NotImplementedError(
            f"Could not run 'aten::{found[1]}' with arguments from the '{found[2]}CUDA' backend."
        )
    if "_cpu_template" in words:  # the name of the function that raises
        return type(error)(words.replace("_cpu_template", "_cuda_template"))
    if words.startswith("expected m1 and m2 to have the same dtype"):
        return type(error)(words.replace("m1 and m2", "mat1 and mat2", 1))
    renamed = with_cuda_types(words)
    if renamed != words and all(type(x) is VirtualTensor for x in call.tensors()):
        return type(error)(renamed)
    return error


# Arguments on different devices


class NativeFunctions(NamedTuple):
    """Sets of operators, by name with overload, that PyTorch's list describes in a certain way."""

    by_themselves: frozenset[str] = frozenset()  # their kernels check devices
    by_argument: frozenset[str] = frozenset()  # generated code checks each argument
    iterators: frozenset[str] = frozenset()  # structured kernels that use TensorIterator
    structured: frozenset[str] = frozenset()
    without_cuda: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()  # copy their results to the given outputs
    for_cuda_alone: frozenset[str] = frozenset()


@cache
def native_functions() -> NativeFunctions:
    """Read PyTorch's list of operators, native_functions.yaml, and return the sets of operators.

    The sets are empty if the package that reads the list is not installed.
    """
    package = importlib.util.find_spec("torchgen")
    if package is None or package.origin is None:
        return NativeFunctions()
    file = Path(package.origin).parent / "packaged/ATen/native/native_functions.yaml"
    text = file.read_text()
    by_themselves, with_cuda, iterators, structured = set(), set(), set(), set()
    without_cuda, for_cuda_alone, copied = set(), set(), {"unbind_copy.int_out"}
    delegates = {}  # by operator, the structured operator whose kernel it shares
    for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        name = entry[: entry.index("(")]
        generated = re.search(r"^  autogen: (.*)$", entry, flags=re.MULTILINE)
        if generated:
            copied.update(generated[1].split(", "))
        if "device_check: NoCheck" in entry:
            by_themselves.add(name)
        if re.search(r"^  structured(_delegate)?: ", entry, flags=re.MULTILINE):
            structured.add(name)
        if "structured_inherits: TensorIteratorBase" in entry:
            iterators.add(name)
        delegate = re.search(r"^  structured_delegate: (\S+)", entry, flags=re.MULTILINE)
        if delegate:
            delegates[name] = delegate[1]
        has_cuda_kernel = re.search("^    (.*, )?CUDA[,:]", entry, flags=re.MULTILINE) is not None
        if has_cuda_kernel:
            with_cuda.add(name)
        if name in structured:
            continue
        has_cpu_kernel = re.search("^    (.*, )?CPU[,:]", entry, flags=re.MULTILINE) is not None
        if has_cpu_kernel and not re.search(_KERNEL_FOR_CUDA, entry, flags=re.MULTILINE):
            without_cuda.add(name)
        elif has_cuda_kernel and not re.search(_KERNEL_FOR_CPU, entry, flags=re.MULTILINE):
            for_cuda_alone.add(name)
    with_cuda |= {name for name, other in delegates.items() if other in with_cuda}
    iterators |= {name for name, other in delegates.items() if other in iterators}
    return NativeFunctions(
        by_themselves=frozenset(by_themselves),
        by_argument=frozenset(with_cuda - by_themselves),
        iterators=frozenset(iterators),
        structured=frozenset(structured),
        without_cuda=frozenset(without_cuda),
        copied=frozenset(copied),
        for_cuda_alone=frozenset(for_cuda_alone),
    )


def _whole(name: str, overload: str) -> str:
    """Return an operator's full name, such as "add.Tensor" for the overload "Tensor" of "add"."""
    if overload:
        return f"{name}.{overload}"
    return name


def has_cpu_kernel_alone(func: Any) -> bool:
    """Return whether the operator `func` has a kernel for the CPU and none for CUDA.

    PyTorch's list of operators says so.
    """
    schema = func._schema
    name = _whole(schema.name.removeprefix("aten::"), schema.overload_name)
    return name in native_functions().without_cuda


# These operators read CPU tensors without dimensions, or move them to the output's device.
READS_NUMBERS = {"linspace", "logspace", "where"}


def device_rules(func: Any) -> tuple[bool, bool, bool]:
    """Return how CUDA checks the devices of the arguments of `func`, as three flags.

    The first one says whether generated code requires all tensors to be on one device. The second
    says whether TensorIterator checks, which allows one CPU tensor without dimensions. The third
    says whether all inputs may be on the CPU if an `out=` is on a GPU.
    """
    schema, natives = func._schema, native_functions()
    own = schema.name.removeprefix("aten::")
    on_cuda = own
    if own not in DEVICE_ERRORS and own in CUDA_OPERATORS:
        on_cuda = CUDA_OPERATORS[own][0]
    name = _whole(on_cuda, schema.overload_name)
    reads_numbers = name.partition(".")[0] in READS_NUMBERS
    return name in natives.by_argument, name in natives.iterators, reads_numbers


def copies_to_outputs(func: Any) -> bool:
    """Return whether PyTorch generates the code of `func`.

    Such an operator computes its results and copies them to the given outputs.
    """
    schema = func._schema
    if not any(x.is_out for x in schema.arguments):
        return False
    name = _whole(schema.name.removeprefix("aten::"), schema.overload_name)
    return name in native_functions().copied


def checks_outputs(handler: Handler) -> Handler:
    """Return `handler`, changed to check the given outputs before it runs the operator.

    The operator is one that PyTorch generates. It computes its results where its inputs are, and
    copies them. A factory such as `zeros_like` fills its output instead, wherever that is
    (torchgen's `gen_composite_out_kernel`).
    """

    def check(call: Call) -> Any:
        outs = {name: x for name, x in call.kwargs.items() if name in call.op.outs}
        given = [x for name, x in _named_tensors(call) if name not in outs]
        devices = {x.device for x in given}
        results = list(tensors(outs))
        if len(devices) == 1 and any(x.device not in devices for x in results):
            functional = _functional(call)
            if "device" in {x.name for x in functional._schema.arguments}:
                (out,) = results
                inputs = {name: x for name, x in call.kwargs.items() if name not in outs}
                made = functional(*call.args, **inputs, dtype=out.dtype, device=out.device)
                return out.resize_(made.shape).copy_(made)
            raise RuntimeError(_refused_output(given[0].device, results))
        return handler(call)

    return check


def _functional(call: Call) -> Any:
    """Return the overload of the call's operator that returns new tensors as results."""
    overload = call.func._schema.overload_name.removesuffix("out").removesuffix("_") or "default"
    return getattr(call.func.overloadpacket, overload)


def _refused_output(device: torch.device, outs: list[torch.Tensor]) -> str:
    """Return CUDA's message for the first of the outputs that is not on `device`.

    This is the device of the inputs.
    """
    elsewhere = next(x for x in outs if x.device != device)
    return f"Expected out tensor to have device {device}, but got {elsewhere.device} instead"


def _named_tensors(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name of the argument, tensor) for every tensor argument, in the schema's order."""
    for name in call.op.arguments:
        value = call.argument(name)
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, torch.Tensor):
                yield name, x


def _tensor_by_tensor(call: Call) -> Any:
    """Run an operator on lists whose tensors are on several devices.

    CUDA handles each entry of the lists by itself, on its device, and refuses only entries with
    tensors on several devices ("slow path" of PyTorch's native/ForeachOpsKernels.cpp).
    `_foreach_copy_` copies between devices. Scalars in a CPU tensor count as numbers.
    """
    arguments = {name: call.argument(name) for name in call.op.arguments}
    scalars = arguments.get("scalars")
    if isinstance(scalars, torch.Tensor) and type(scalars) is not VirtualTensor:
        return call.func.overloadpacket.ScalarList(**arguments | {"scalars": scalars.tolist()})
    lists = {name: x for name, x in arguments.items() if isinstance(x, (list, tuple))}
    lengths = set(map(len, lists.values()))
    copies = call.op.name == "_foreach_copy_"
    if len(lengths) > 1 or (lengths == {1} and not copies):
        raise of_operator(call) from None
    entries = []
    for index in range(*lengths):
        entries.append(arguments | {name: x[index : index + 1] for name, x in lists.items()})
    if copies:
        for entry in entries:
            entry["self"][0].copy_(entry["src"][0], entry["non_blocking"])
        return None
    results = [call.func(**entry) for entry in entries]
    if call.op.only_writes:
        return None
    return [x for result in results for x in result]


def of_operator(call: Call) -> RuntimeError:
    """Return the error of this call on CUDA, where its arguments are on several devices."""
    name = call.op.name
    given = list(_named_tensors(call))
    special = DEVICE_ERRORS.get(name)
    if special is not None:
        words = special(given)
        if words is not None:
            return RuntimeError(words)
    name, renamed = CUDA_OPERATORS.get(name, (name, {}))
    overload = call.func._schema.overload_name
    whole = _whole(name, overload)
    natives = native_functions()
    if whole in natives.by_themselves or name in renamed or not natives.by_themselves:
        return RuntimeError(at_least_two(given))
    if whole not in natives.structured:
        method = f"wrapper_CUDA_{overload}_{name}"
    elif overload:
        method = f"wrapper_CUDA_{name}_{overload}"
    else:
        method = f"wrapper_CUDA_{name}"
    named = [(renamed.get(argument, argument), x) for argument, x in given]
    return RuntimeError(argument_differs(named, method))
