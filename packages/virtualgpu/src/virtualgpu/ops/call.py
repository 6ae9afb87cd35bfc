"""Operators and their calls.

An `Operator` holds what is known about one operator: what its schema says, and what the families of
this package register for its name without namespace and overload ("sum", "native_dropout"). A
`Call` is one call of an operator. `virtualgpu.ops.dispatch` creates it, and the functions that
compute, time, order or refuse the operator receive it.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.clock.costs import SPLIT_TERMS
from virtualgpu.errors import DifferentDevicesError, at_least_two
from virtualgpu.hardware import Gpu
from virtualgpu.tensor import VirtualTensor, tensors

Tensor = torch.Tensor


class Work(NamedTuple):
    """The work of a kernel.

    bytes: bytes of device memory that it moves
    flops: operations of its matrix products
    format: the format of the products, one of `profiles.FORMATS`
    outputs: elements of the products' results
    clocks: clocks of one multiprocessor, which all multiprocessors share
    serial: clocks that cannot be shared
    around: bytes that kernels of their own move before and after a product
    matrix: rows and columns of each result, if the results are matrices
    cudnn: the number of cuDNN calls that launch it, or 0 if PyTorch launches it
    launches: the host's cost in excess of the first launch, in launches
    split_terms: the least number of terms per part if cuBLAS splits sums
    """

    bytes: float
    flops: float = 0.0
    format: str = "float32"
    outputs: int = 0
    clocks: float = 0.0
    serial: float = 0.0
    around: float = 0.0
    matrix: tuple[int, int] | None = None
    cudnn: int = 0
    launches: float = 0.0
    split_terms: int = SPLIT_TERMS


class Call:
    """One call of an operator on device tensors, with its arguments.

    `gpu` is the GPU of the first device tensor among the arguments. After `common_gpu`, `moved`
    holds the bytes of all arguments. `most` is the product of the arguments' numbers of elements,
    without tensors in lists. No broadcast and no matrix product has more elements.
    """

    __slots__ = (
        "_looked", "_numbers", "_on_host", "_several", "args", "gpu", "kwargs", "most", "moved",
        "op",
    )  # fmt: skip

    def __init__(self, op: "Operator", args: tuple, kwargs: dict[str, Any]) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self._looked = False
        if args and type(args[0]) is VirtualTensor:  # enough for a view
            self.gpu = args[0]._gpu
        else:
            self.gpu = None  # type: ignore[assignment]  # stays None without device tensors
            self._look()

    def _look(self) -> None:
        """Store the devices and the total bytes of all arguments in this object."""
        self._looked = True
        self.moved = 0
        self._several = self._on_host = False
        self._numbers = 0  # CPU tensors without dimensions
        self.most = self._look_at(self.args)
        if self.kwargs:
            self._look_at(self.kwargs.values())

    def _look_at(self, values: Iterable[Any]) -> int:
        """Add the devices and the bytes of these arguments to those stored in this object.

        Returns the product of the tensors' numbers of elements.
        """
        gpu, moved, most = self.gpu, 0, 1
        for x in values:
            if type(x) is VirtualTensor:
                n = x.numel()
                most *= n or 1
                moved += n * x.itemsize
                if gpu is None:
                    gpu = self.gpu = x._gpu
                elif x._gpu is not gpu:
                    self._several = True
            elif isinstance(x, Tensor):
                most *= x.numel() or 1
                if x.dim():
                    self._on_host = True
                else:
                    self._numbers += 1
            elif isinstance(x, (list, tuple)):
                self._look_at(x)
                gpu = self.gpu
        self.moved += moved
        return most

    @property
    def func(self) -> Any:
        """The operator as PyTorch's OpOverload."""
        return self.op.func

    def common_gpu(self, host: bool = False) -> Gpu:
        """Return the one GPU of all tensor arguments.

        CPU tensors without dimensions are allowed, and with `host` all CPU tensors. Raises
        RuntimeError for tensors on other devices.
        """
        if not self._looked:
            self._look()
        gpu = self.gpu
        if self._several or (self._on_host and not host):
            raise different_devices(self.args, self.kwargs)
        iterates = self._numbers > 1 and self.op is not None and self.op.iterates
        if iterates and self._numbers_of_program() > 1:
            raise RuntimeError("Trying to pass too many CPU scalars to non-CPU kernel!")
        self._on_host = False  # CPU tensors have been allowed
        machine = gpu.machine
        if machine.forked or not machine.alive:
            machine.require_alive()
        machine.selected.gpu = gpu
        return gpu

    def require_one_device(self) -> None:
        """Raise RuntimeError unless all tensor arguments are on one GPU.

        PyTorch's generated code makes the same check, which allows no CPU tensor.
        """
        if not self._looked:
            self._look()
        if self._several or self._on_host:
            raise different_devices(self.args, self.kwargs)
        if self._numbers and self.gpu is not None and self._numbers_of_program():
            raise different_devices(self.args, self.kwargs)

    def _numbers_of_program(self) -> int:
        """Return how many CPU tensors without dimensions the program passes to the operator.

        Tensors that C++ has made for this call do not count.
        """
        count = 0
        for x in self.tensors():
            if type(x) is not VirtualTensor and x.dim() == 0:
                count += getattr(x.untyped_storage(), "waiting", None) is None
        return count

    def is_on_one_gpu(self) -> bool:
        """Return whether the call has device tensors, and all of them are on one GPU."""
        if not self._looked:
            self._look()
        return self.gpu is not None and not self._several

    def tensors(self) -> list[Tensor]:
        """Return all tensors among the arguments."""
        if self.kwargs:
            return list(tensors(self.args, self.kwargs))
        return list(tensors(self.args))

    def argument(self, name: str) -> Any:
        """Return the argument of this name or its default, or None if there is no such argument."""
        position = self.op.positions.get(name, len(self.args))
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, self.op.defaults.get(name))

    def written(self) -> list[Tensor]:
        """Return the tensors that the operator writes to."""
        return list(tensors([self.argument(name) for name in self.op.written]))

    def roles(self) -> Iterator[tuple[Tensor, bool, bool]]:
        """Yield (tensor, whether it is read, whether it is written) for each tensor argument."""
        op = self.op
        targets = {id(x) for x in self.written()} if op.written else set()
        given = {id(x) for x in tensors(self.kwargs)} if targets and self.kwargs else set()
        for x in self.tensors():
            is_target = id(x) in targets
            yield x, not (is_target and (op.overwrites or id(x) in given)), is_target

    def given_outputs(self) -> list[Tensor]:
        """Return the tensors that the caller provides for results, such as `out=`."""
        if not self.kwargs:
            return []
        given = [self.kwargs.get(name) for name in self.op.outs]
        return [x for x in given if isinstance(x, Tensor)]

    def on_cpu(self) -> Any:
        """Return the results of the CPU's kernel for the same arguments, as plain tensors."""
        with _DisableTorchDispatch():
            return self.op.kernel(*self.args, **self.kwargs)

    def of(self, func: Any) -> "Call":
        """Return a call of the operator `func` with the arguments of this call."""
        return Call(operator(func), self.args, self.kwargs)

    def with_arguments(self, *args: Any, **kwargs: Any) -> "Call":
        """Return a call of the same operator with these arguments."""
        return Call(self.op, args, kwargs)


Handler = Callable[[Call], Any]
Temporaries = Callable[[Call, Any], Iterable[int]]  # (call, result) -> bytes of each
# (call, results, bytes of arguments and results) -> the kernel's work
DeviceTime = Callable[[Call, list[Tensor], int], Work]
ArgumentCheck = Callable[[tuple, dict], None]  # (args, kwargs); raises CUDA's errors
Devices = list[tuple[str, Tensor]]  # the tensors among the arguments, with the arguments' names

# What the families register for their operators.
HANDLERS: dict[str, Handler] = {}
TEMPORARIES: dict[str, Temporaries] = {}
DEVICE_TIMES: dict[str, DeviceTime] = {}
COMPOSITES: dict[str, Callable[..., Any]] = {}
DTENSOR_COMPOSITES: dict[str, Callable[..., Any]] = {}  # for DTensors
CHECKS: dict[str, ArgumentCheck] = {}
DEVICE_ERRORS: dict[str, Callable[[Devices], str | None]] = {}
CUDA_OPERATORS: dict[str, tuple[str, dict[str, str]]] = {}
CUDA_KERNELS: dict[str, str] = {}
ASSERTIONS: dict[str, tuple[str, re.Pattern[str]]] = {}
OVERWRITES: set[str] = set()
NO_ASSERTION = "", re.compile("(?!)")  # a pattern that matches no error
# Kernels, by OpOverload, that compute values in place of PyTorch's CPU kernels.
CPU_KERNELS: dict[Any, Callable[..., Any]] = {}
SHAPES: dict[str, Callable[..., Any]] = {}
REFUSE_HALF: set[str] = set()

Rule = TypeVar("Rule", bound=Callable[..., Any])


def _registering(table: dict[str, Any], names: Iterable[str]) -> Callable[[Rule], Rule]:
    """Return a decorator that stores the decorated function in `table` under these names."""

    def register(rule: Rule) -> Rule:
        assert not table.keys() & set(names), f"two rules for {names}"
        table.update(dict.fromkeys(names, rule))
        return rule

    return register


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Return a decorator: its function runs the operators of these names.

    They need it because CUDA differs from the CPU.
    """
    return _registering(HANDLERS, names)


def temporaries(*names: str) -> Callable[[Temporaries], Temporaries]:
    """Return a decorator: its function gives the temporary memory of these operators' kernels.

    The kernels allocate this memory after their outputs, and free it before they return.
    """
    return _registering(TEMPORARIES, names)


def device_time(*names: str) -> Callable[[DeviceTime], DeviceTime]:
    """Return a decorator: its function gives the work of these operators' kernels.

    Operators without such a function only take the time of moving their bytes.
    """
    return _registering(DEVICE_TIMES, names)


def shapes_by(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator: its function gives the results of these operators on the meta device.

    They have the shapes of the results. PyTorch's own meta kernel refuses arguments that CUDA
    accepts.
    """
    return _registering(SHAPES, names)


def composes(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator: its function implements these composite operators on CUDA.

    It gets the operator's arguments and calls other operators, above autograd.
    """
    return _registering(COMPOSITES, names)


def composes_dtensors(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator: its function implements these composite operators for DTensors.

    C++ would choose the CPU's operators, which have no rule for DTensors.
    """
    return _registering(DTENSOR_COMPOSITES, names)


def checks(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator: its function checks the arguments of these composite operators."""
    return _registering(CHECKS, names)


def device_error(*names: str) -> Callable[[Rule], Rule]:
    """Return a decorator: its function gives CUDA's message for arguments on several devices.

    It applies to the operators of these names. The function returns None for CUDA's usual message.
    """
    return _registering(DEVICE_ERRORS, names)


def asserts(assertion: str, *names: str, cpu: str = "out of range|out of bounds") -> None:
    """Register the text of the assert that fails in the CUDA kernels of these operators.

    The texts are those of torch 2.11 on an H200 (benchmarks/fidelity/h200/probe.json). The
    pattern `cpu` recognises the error that the CPU's kernel raises instead.
    """
    ASSERTIONS.update(dict.fromkeys(names, (assertion, re.compile(cpu))))


def cuda_kernel(kernel: str, *names: str) -> None:
    """Register `kernel` as the name that CUDA's errors use for the kernel of these operators."""
    CUDA_KERNELS.update(dict.fromkeys(names, kernel))


def cuda_operator(name: str, cuda: str, **renamed: str) -> None:
    """Register the operator `cuda`, which CUDA runs in place of the CPU's operator `name`.

    `renamed` maps names of arguments to CUDA's names.
    """
    CUDA_OPERATORS[name] = cuda, renamed


def refuses_half(*prefixes: str) -> None:
    """Register prefixes of operators that have no kernels in half precision on CUDA and CPU."""
    REFUSE_HALF.update(prefixes)


def overwrites(*names: str) -> None:
    """Register operators that write to their first argument without reading it."""
    OVERWRITES.update(names)


UNDECLARED_VIEWS = {"_unsafe_view"}  # views that the schema does not mention, to hide from autograd


class Operator:
    """The kit's knowledge about one operator of PyTorch, an OpOverload.

    written: the names of the arguments that it writes to
    outs: the names of the arguments that the caller provides for results
    handler, device_time: the functions that run and time it, chosen at its first call
    kernel: the CPU kernel that computes its values
    own_kernel: PyTorch's CPU kernel, without the frame of OpOverload.__call__
    iterates: whether its kernel uses TensorIterator, which accepts one CPU number
    outputs_anywhere: whether all inputs may be on the CPU if the outputs are given
    by_argument: whether generated code checks the device of each argument
    model_only: whether the first argument gives only a shape
    touches_values: whether the handler itself reads or writes values
    marks_written: whether its writes are noted while races are not searched for
    """

    __slots__ = (
        "arguments", "assertion", "by_argument", "defaults", "device_time", "func", "handler",
        "iterates", "kernel", "marks_written", "model_only", "name", "only_writes",
        "outputs_anywhere", "outs", "overwrites", "own_kernel", "positions", "returns_views",
        "temporaries", "touches_values", "written",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.func = func
        self.name: str = schema.name.removeprefix("aten::")
        self.arguments = tuple(argument.name for argument in schema.arguments)
        self.positions = {
            argument.name: position
            for position, argument in enumerate(schema.arguments)
            if not argument.kwarg_only
        }
        self.defaults: Mapping[str, Any] = {
            argument.name: argument.default_value
            for argument in schema.arguments
            if argument.has_default_value()
        }
        self.written = tuple(a.name for a in schema.arguments if _is_written(a))
        self.outs = tuple(a.name for a in schema.arguments if a.is_out)
        self.only_writes = all(result.alias_info is not None for result in schema.returns)
        views = [_is_view(result) for result in schema.returns]
        self.returns_views = (bool(views) and all(views)) or self.name in UNDECLARED_VIEWS
        self.own_kernel: Callable[..., Any] = getattr(func, "_op", func)
        self.kernel = CPU_KERNELS.get(func, self.own_kernel)
        self.temporaries = TEMPORARIES.get(self.name)
        self.device_time = DEVICE_TIMES.get(self.name)
        self.overwrites = self.name in OVERWRITES
        self.assertion = ASSERTIONS.get(self.name, NO_ASSERTION)
        self.handler: Handler | None = None
        self.iterates = False
        self.outputs_anywhere = False
        self.by_argument = False
        self.model_only = False
        self.touches_values = True
        self.marks_written = False

    def in_place(self) -> Any:
        """Return the overload of this operator that writes its result to its first argument."""
        return getattr(getattr(torch.ops.aten, self.name + "_"), self.func._overloadname)


def _is_written(argument: Any) -> bool:
    """Return whether an operator writes to this argument of its schema."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _is_view(result: Any) -> bool:
    """Return whether this result of an operator's schema is a view of an argument."""
    return result.alias_info is not None and not result.alias_info.is_write


# By the id of the OpOverload, which its Operator keeps alive. Hashing an OpOverload is slow,
# because its hash is a Python function.
_operators: dict[int, Operator] = {}
_NO_OPERATOR: Any = None


def operator(func: Any) -> Operator:
    """Return the description of an OpOverload, which is made at the first call."""
    found = _operators.get(id(func))
    if found is None:
        found = _operators[id(func)] = Operator(func)
    return found


def different_devices(*values: Any) -> DifferentDevicesError:
    """Return the error for these values, whose tensors are on several devices.

    `faults.of_operator` later replaces it with the words that CUDA uses for the operator.
    """
    return DifferentDevicesError(at_least_two([("", x) for x in tensors(*values)]))


def common_gpu(*values: Any) -> Gpu:
    """Return the one GPU of all tensors among these values.

    Raises RuntimeError for several devices.
    """
    return Call(_NO_OPERATOR, values, {}).common_gpu()


def bytes_of(x: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return x.numel() * x.itemsize


def made_of(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a composite operator as a sequence of other operators, as C++ does.

    `OpOverload.decompose` prefers Python's version, whose LSTM is wrong in torch 2.11.
    """
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextmanager
def made_on(gpu: Gpu) -> Iterator[None]:
    """Create on this GPU all tensors that C++ would create on the CPU in the block."""
    selected = gpu.machine.selected
    before, selected.made_on = selected.made_on, gpu
    try:
        yield
    finally:
        selected.made_on = before
