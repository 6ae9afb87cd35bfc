"""What CUDA does where the CPU's kernel has raised an error: it says it in its own words, or goes on, and its GPU has a fault.

PyTorch's generated code checks devices argument by argument for most operators, and names the argument; elementwise ones (TensorIterator)
check by themselves. Which operator does what stands in PyTorch's own native_functions.yaml, which comes with torch.

Device-side asserts: a kernel that meets a value it cannot work with stops its GPU for good. The CPU's kernel raises at once. CUDA's call
returns; the error surfaces at the next call that waits for the GPU, or at a launch after the GPU has got there, and every later use of
the GPU raises it again, until its machine is taken away (a real one: its process ends).
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

from virtualgpu.errors import DifferentDevicesError, Fault, argument_differs, at_least_two, unsupported, with_cuda_types
from virtualgpu.ops.call import CUDA_KERNELS, CUDA_OPERATORS, DEVICE_ERRORS, REFUSE_HALF, Call, asserts, cuda_operator
from virtualgpu.ops.half import FOR_COMPLEX_HALF, HALF, in_float32
from virtualgpu.ops.without_values import on_meta
from virtualgpu.tensor import VirtualTensor, wrap_all

asserts("", "_assert_async", cpu="^Expected Tensor with single nonzero")
cuda_operator("stack", "cat")

_UNIMPLEMENTED = re.compile(r'^"(\w+)" not implemented for')
_WITHOUT_HALF = re.compile(r'" not implemented for \'(Half|BFloat16|ComplexHalf)\'')
_WITHOUT_KERNEL = re.compile(r"^Could not run 'aten::([\w.]+)' with arguments from the '(\w*)CPU' backend")
_MISFIT = object()
_KERNEL_FOR_CUDA = "^    .*(CUDA|Composite).*:"
_KERNEL_FOR_CPU = "^    .*(CPU|Composite).*:"


def survive(call: Call, error: Exception) -> Any:
    """A result of the right shape where CUDA's kernel would have asserted; elsewhere raises the error in CUDA's words."""
    try:
        if isinstance(error, DifferentDevicesError):
            if call.op.name.startswith("_foreach_"):
                return _tensor_by_tensor(call)
            raise of_operator(call) from None
        if formats := _lacks_half(call, error):
            call.op.kernel = in_float32(call.func.overloadpacket, call.func, formats=formats)
            assert call.op.handler is not None
            return call.op.handler(call)
        assertion, about_values = call.op.assertion
        if not about_values.search(str(error)):
            raise as_on_cuda(call, error) from None
        gpu = call.gpu
        shapes = _result_without_values(call, error)
        gpu.launch(0, name=call.op.name)
        if gpu.stream.capture is None:  # a kernel that is captured does not run
            gpu.fault = Fault(assertion, gpu.stream.ready)
        if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
            gpu.synchronize()
        return wrap_all(shapes, gpu)
    finally:
        del error  # its traceback holds this frame: a cycle, which would keep the operator's tensors until the next collection


def _lacks_half(call: Call, error: Exception) -> tuple[torch.dtype, ...]:
    """The formats of half precision for which the CPU, unlike CUDA, has no kernel, if the error says so: the operator has done nothing."""
    found = _WITHOUT_HALF.search(str(error))
    if not found or call.op.kernel is not call.op.own_kernel or call.op.name.startswith(tuple(REFUSE_HALF)):
        return ()
    if found[1] == "ComplexHalf":
        return (torch.complex32,) if call.op.name.removesuffix("_") in FOR_COMPLEX_HALF else ()
    return () if any(x.dtype.is_complex for x in call.tensors()) else HALF


def _result_without_values(call: Call, error: Exception) -> Any:
    """Tensors of the result's shape. Shapes and types that do not fit are seen before any kernel runs: they raise as they are."""
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
    if returns[0].alias_info is not None:  # written in place
        if call.op.outs:
            return next(x for x in (*call.kwargs.values(), *call.args) if type(x) is VirtualTensor)
        return call.args[0]
    if shapes is None:
        raise error
    with _DisableTorchDispatch():
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: torch.zeros_like(x, device="cpu"), shapes)


def as_on_cuda(call: Call, error: Exception) -> Exception:
    """The error of a CPU kernel, in the words of CUDA's."""
    name, words = call.op.name, str(error)
    found = _UNIMPLEMENTED.match(words)
    if found and name in CUDA_KERNELS:
        return type(error)(words.replace(found[1], CUDA_KERNELS[name], 1))
    if found := _WITHOUT_KERNEL.match(words):
        if found[1] in native_functions().for_cuda_alone:
            return unsupported(f"torch.ops.aten.{found[1]}")
        return NotImplementedError(f"Could not run 'aten::{found[1]}' with arguments from the '{found[2]}CUDA' backend.")
    if "_cpu_template" in words:  # the function that complains
        return type(error)(words.replace("_cpu_template", "_cuda_template"))
    if words.startswith("expected m1 and m2 to have the same dtype"):
        return type(error)(words.replace("m1 and m2", "mat1 and mat2", 1))
    if (renamed := with_cuda_types(words)) != words and all(type(x) is VirtualTensor for x in call.tensors()):
        return type(error)(renamed)
    return error


# Devices that disagree


class NativeFunctions(NamedTuple):
    """Names, with overload, of operators by what PyTorch's list says of them."""

    by_themselves: frozenset[str] = frozenset()  # check devices in their kernels
    by_argument: frozenset[str] = frozenset()  # generated code checks each argument
    iterators: frozenset[str] = frozenset()  # structured kernels of TensorIterator's
    structured: frozenset[str] = frozenset()
    without_cuda: frozenset[str] = frozenset()
    for_cuda_alone: frozenset[str] = frozenset()


@cache
def native_functions() -> NativeFunctions:
    """What PyTorch's own list says; nothing where the package that has it is missing."""
    package = importlib.util.find_spec("torchgen")
    if package is None or package.origin is None:
        return NativeFunctions()
    text = (Path(package.origin).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    by_themselves, with_cuda, iterators, structured = set(), set(), set(), set()
    without_cuda, for_cuda_alone = set(), set()
    delegates = {}  # by operator: the structured one whose kernel it shares
    for entry in re.split(r"^- func: ", text, flags=re.MULTILINE)[1:]:
        name = entry[: entry.index("(")]
        if "device_check: NoCheck" in entry:
            by_themselves.add(name)
        if re.search(r"^  structured(_delegate)?: ", entry, flags=re.MULTILINE):
            structured.add(name)
        if "structured_inherits: TensorIteratorBase" in entry:
            iterators.add(name)
        if found := re.search(r"^  structured_delegate: (\S+)", entry, flags=re.MULTILINE):
            delegates[name] = found[1]
        has_cuda_kernel = re.search("^    (.*, )?CUDA[,:]", entry, flags=re.MULTILINE) is not None
        if has_cuda_kernel:
            with_cuda.add(name)
        if name in structured:
            continue
        if re.search("^    (.*, )?CPU[,:]", entry, flags=re.MULTILINE) and not re.search(_KERNEL_FOR_CUDA, entry, flags=re.MULTILINE):
            without_cuda.add(name)
        elif has_cuda_kernel and not re.search(_KERNEL_FOR_CPU, entry, flags=re.MULTILINE):
            for_cuda_alone.add(name)
    with_cuda |= {name for name, delegate in delegates.items() if delegate in with_cuda}
    iterators |= {name for name, delegate in delegates.items() if delegate in iterators}
    by_argument = with_cuda - by_themselves
    return NativeFunctions(*map(frozenset, (by_themselves, by_argument, iterators, structured, without_cuda, for_cuda_alone)))


def _whole(name: str, overload: str) -> str:
    return f"{name}.{overload}" if overload else name


def has_cpu_kernel_alone(func: Any) -> bool:
    """Does PyTorch say of this operator that it has a kernel for the CPU and none for CUDA?"""
    schema = func._schema
    return _whole(schema.name.removeprefix("aten::"), schema.overload_name) in native_functions().without_cuda


# These read CPU tensors without dimensions, or move them to the output's device.
READS_NUMBERS = {"linspace", "logspace", "where"}


def device_rules(func: Any) -> tuple[bool, bool, bool]:
    """Return how CUDA checks the devices of an operator's arguments.

    The first value says whether generated code wants each tensor on one device. The second says
    whether TensorIterator checks, which admits one CPU tensor without dimensions. The third says
    whether all inputs of an `out=` on a GPU may be on the CPU.
    """
    schema, natives = func._schema, native_functions()
    own = schema.name.removeprefix("aten::")
    on_cuda = own if own in DEVICE_ERRORS else CUDA_OPERATORS.get(own, (own,))[0]
    name = _whole(on_cuda, schema.overload_name)
    return name in natives.by_argument, name in natives.iterators, name.partition(".")[0] in READS_NUMBERS


def _named_tensors(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor among the arguments, with the argument's name, in the order of the schema."""
    for name in call.op.arguments:
        value = call.argument(name)
        for x in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(x, torch.Tensor):
                yield name, x


def _tensor_by_tensor(call: Call) -> Any:
    """An operator on lists whose tensors lie on several devices: CUDA takes those of each entry by themselves, where they lie, and refuses
    only what disagrees within one ("slow path" of PyTorch's native/ForeachOpsKernels.cpp). `_foreach_copy_` copies between devices. Scalars
    in a tensor of the CPU's are numbers."""
    arguments = {name: call.argument(name) for name in call.op.arguments}
    scalars = arguments.get("scalars")
    if isinstance(scalars, torch.Tensor) and type(scalars) is not VirtualTensor:
        return call.func.overloadpacket.ScalarList(**arguments | {"scalars": scalars.tolist()})
    lists = {name: x for name, x in arguments.items() if isinstance(x, (list, tuple))}
    lengths = set(map(len, lists.values()))
    copies = call.op.name == "_foreach_copy_"
    if len(lengths) > 1 or (lengths == {1} and not copies):
        raise of_operator(call) from None
    entries = [arguments | {name: x[i : i + 1] for name, x in lists.items()} for i in range(*lengths)]
    if copies:
        for entry in entries:
            entry["self"][0].copy_(entry["src"][0], entry["non_blocking"])
        return None
    results = [call.func(**entry) for entry in entries]
    return None if call.op.only_writes else [x for result in results for x in result]


def of_operator(call: Call) -> RuntimeError:
    """CUDA's error of this operator for arguments on several devices."""
    name = call.op.name
    given = list(_named_tensors(call))
    special = DEVICE_ERRORS.get(name)
    words = special(given) if special is not None else None
    if words is not None:
        return RuntimeError(words)
    name, renamed = CUDA_OPERATORS.get(name, (name, {}))
    overload = call.func._schema.overload_name
    whole = _whole(name, overload)
    natives = native_functions()
    if whole in natives.by_themselves or name in renamed or not natives.by_themselves:
        return RuntimeError(at_least_two(given))
    method = (
        f"wrapper_CUDA_{name}{'_' + overload if overload else ''}" if whole in natives.structured else f"wrapper_CUDA_{overload}_{name}"
    )
    return RuntimeError(argument_differs([(renamed.get(argument, argument), x) for argument, x in given], method))
