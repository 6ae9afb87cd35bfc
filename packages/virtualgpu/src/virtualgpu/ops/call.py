"""One operator, and one call of it.

An `Operator` holds what is known of an operator, found out once: what its schema says, and what the families of this package register
for it, by its name without namespace and overload ("sum", "native_dropout"). A `Call` is one call of it: `virtualgpu.ops.dispatch` makes
it, and everything that computes, times, orders or refuses the operator takes it.
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
    """What a kernel does.

    `bytes` of device memory that it moves; `flops` of matrix products in a `format` of
    `profiles.FORMATS`, whose results have so many elements, and each so many rows and columns if it
    is a `matrix`. Sums may be split into pieces of `split_terms` terms or more. `clocks` of one
    multiprocessor, which all of them share, and `serial` ones that nobody can share; `around` are
    bytes that kernels of its own move before and after a product. So many calls of `cudnn` launch
    it; where that is 0, PyTorch does. It costs the host as much as so many further `launches`.
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
    """One call of an operator on device tensors.

    `gpu` is that of the first device tensor among the arguments. Once `common_gpu` has looked at all of them, `moved` are their bytes, and
    `most` is the product of their numbers of elements, those in lists left out: neither a broadcast nor a product of matrices makes more.
    """

    __slots__ = ("_looked", "_numbers", "_on_host", "_several", "args", "gpu", "kwargs", "most", "moved", "op")

    def __init__(self, op: "Operator", args: tuple, kwargs: dict[str, Any]) -> None:
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self._looked = False
        if args and type(args[0]) is VirtualTensor:  # a view needs no more
            self.gpu = args[0]._gpu
        else:
            self.gpu = None  # type: ignore[assignment]  # an operator on tensors of the host alone has none
            self._look()

    def _look(self) -> None:
        self._looked = True
        self.moved = 0
        self._several = self._on_host = False
        self._numbers = 0  # CPU tensors without dimensions
        self.most = self._look_at(self.args)
        if self.kwargs:
            self._look_at(self.kwargs.values())

    def _look_at(self, values: Iterable[Any]) -> int:
        """Find the devices and the bytes of the tensors. Returns the product of their numbers of elements."""
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
        return self.op.func

    def common_gpu(self, host: bool = False) -> Gpu:
        """The one GPU of all tensors. CPU tensors without dimensions may join, with `host` any others. Raises RuntimeError otherwise."""
        if not self._looked:
            self._look()
        gpu = self.gpu
        if self._several or (self._on_host and not host):
            raise different_devices(self.args, self.kwargs)
        if self._numbers > 1 and self.op is not None and self.op.iterates and self._numbers_of_program() > 1:
            raise RuntimeError("Trying to pass too many CPU scalars to non-CPU kernel!")
        self._on_host = False  # they are admitted
        machine = gpu.machine
        if machine.forked or not machine.alive:
            machine.require_alive()
        machine.selected.gpu = gpu
        return gpu

    def require_one_device(self) -> None:
        """Check the devices as PyTorch's generated code does, which admits no CPU tensor. Raises RuntimeError."""
        if not self._looked:
            self._look()
        if self._several or self._on_host or (self._numbers and self.gpu is not None and self._numbers_of_program()):
            raise different_devices(self.args, self.kwargs)

    def _numbers_of_program(self) -> int:
        """Count the CPU tensors without dimensions that the program has made, not C++ itself."""
        numbers = (x for x in self.tensors() if type(x) is not VirtualTensor and x.dim() == 0)
        return sum(getattr(x.untyped_storage(), "waiting", None) is None for x in numbers)

    def is_on_one_gpu(self) -> bool:
        """Are all device tensors on one GPU?"""
        if not self._looked:
            self._look()
        return self.gpu is not None and not self._several

    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return list(tensors(self.args, self.kwargs) if self.kwargs else tensors(self.args))

    def argument(self, name: str) -> Any:
        """The argument of this name, or its default; None where the operator has none of the name."""
        position = self.op.positions.get(name, len(self.args))
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, self.op.defaults.get(name))

    def written(self) -> list[Tensor]:
        """The tensors that the operator writes into."""
        return list(tensors([self.argument(name) for name in self.op.written]))

    def roles(self) -> Iterator[tuple[Tensor, bool, bool]]:
        """Each tensor among the arguments: does the operator read it, does it write into it?"""
        op = self.op
        targets = {id(x) for x in self.written()} if op.written else set()
        given = {id(x) for x in tensors(self.kwargs)} if targets and self.kwargs else set()
        for x in self.tensors():
            is_target = id(x) in targets
            yield x, not (is_target and (op.overwrites or id(x) in given)), is_target

    def given_outputs(self) -> list[Tensor]:
        """The tensors that were given for results to be written into."""
        return [x for name in self.op.outs if isinstance(x := self.kwargs.get(name), Tensor)] if self.kwargs else []

    def on_cpu(self) -> Any:
        """What the CPU's kernel makes of the same arguments, in plain tensors."""
        with _DisableTorchDispatch():
            return self.op.kernel(*self.args, **self.kwargs)

    def of(self, func: Any) -> "Call":
        """The same arguments, given to another operator."""
        return Call(operator(func), self.args, self.kwargs)

    def with_arguments(self, *args: Any, **kwargs: Any) -> "Call":
        """Another call of the same operator."""
        return Call(self.op, args, kwargs)


Handler = Callable[[Call], Any]
Temporaries = Callable[[Call, Any], Iterable[int]]  # (call, result) -> bytes of each
DeviceTime = Callable[[Call, list[Tensor], int], Work]  # (call, results, bytes of arguments and results) -> what its kernel does
ArgumentCheck = Callable[[tuple, dict], None]  # (args, kwargs): raises what CUDA raises
Devices = list[tuple[str, Tensor]]  # the tensors among the arguments, each with the argument's name

# What the families say of their operators.
HANDLERS: dict[str, Handler] = {}
TEMPORARIES: dict[str, Temporaries] = {}
DEVICE_TIMES: dict[str, DeviceTime] = {}
COMPOSITES: dict[str, Callable[..., Any]] = {}
DTENSOR_COMPOSITES: dict[str, Callable[..., Any]] = {}  # the same, of DTensors
CHECKS: dict[str, ArgumentCheck] = {}
DEVICE_ERRORS: dict[str, Callable[[Devices], str | None]] = {}
CUDA_OPERATORS: dict[str, tuple[str, dict[str, str]]] = {}
CUDA_KERNELS: dict[str, str] = {}
ASSERTIONS: dict[str, tuple[str, re.Pattern[str]]] = {}
OVERWRITES: set[str] = set()
NO_ASSERTION = "", re.compile("(?!)")  # no error is known by it
CPU_KERNELS: dict[Any, Callable[..., Any]] = {}  # by OpOverload: what computes its values in place of PyTorch's kernel
SHAPES: dict[str, Callable[..., Any]] = {}
REFUSE_HALF: set[str] = set()

Rule = TypeVar("Rule", bound=Callable[..., Any])


def _registering(table: dict[str, Any], names: Iterable[str]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        assert not table.keys() & set(names), f"two rules for {names}"
        table.update(dict.fromkeys(names, rule))
        return rule

    return register


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Run these operators by a function of the family's own: CUDA computes them otherwise than the CPU does."""
    return _registering(HANDLERS, names)


def temporaries(*names: str) -> Callable[[Temporaries], Temporaries]:
    """Say what the kernels of these operators allocate after their outputs, and free before they return."""
    return _registering(TEMPORARIES, names)


def device_time(*names: str) -> Callable[[DeviceTime], DeviceTime]:
    """Say what the kernels of these operators do beyond moving their bytes."""
    return _registering(DEVICE_TIMES, names)


def shapes_by(*names: str) -> Callable[[Rule], Rule]:
    """Say these operators' results of tensors on the meta device, where PyTorch's own kernel there refuses what CUDA takes."""
    return _registering(SHAPES, names)


def composes(*names: str) -> Callable[[Rule], Rule]:
    """Say what these composite operators are made of on CUDA, above autograd. The function gets the operator's arguments."""
    return _registering(COMPOSITES, names)


def composes_dtensors(*names: str) -> Callable[[Rule], Rule]:
    """The same for DTensors on a GPU, where C++ would choose what has no rule for DTensors: what it takes for the CPU's."""
    return _registering(DTENSOR_COMPOSITES, names)


def checks(*names: str) -> Callable[[Rule], Rule]:
    """Refuse arguments of these composite operators before they take themselves apart."""
    return _registering(CHECKS, names)


def device_error(*names: str) -> Callable[[Rule], Rule]:
    """Say what CUDA says of these operators' arguments on several devices; None for its usual words."""
    return _registering(DEVICE_ERRORS, names)


def asserts(assertion: str, *names: str, cpu: str = "out of range|out of bounds") -> None:
    """Say what the CUDA kernels of these operators assert, as torch 2.11 prints it on an H200 (benchmarks/fidelity/h200/probe.json), and
    by which words the errors are known that the CPU's kernels raise there."""
    ASSERTIONS.update(dict.fromkeys(names, (assertion, re.compile(cpu))))


def cuda_kernel(kernel: str, *names: str) -> None:
    """CUDA's kernel of these operators has another name than the CPU's, by which an error calls it."""
    CUDA_KERNELS.update(dict.fromkeys(names, kernel))


def cuda_operator(name: str, cuda: str, **renamed: str) -> None:
    """The CPU's operator stands for another one of CUDA's, some of whose arguments have other names."""
    CUDA_OPERATORS[name] = cuda, renamed


def refuses_half(*prefixes: str) -> None:
    """CUDA, like the CPU, has no kernels in half precision for the operators whose names begin so."""
    REFUSE_HALF.update(prefixes)


def overwrites(*names: str) -> None:
    """These operators write into their first argument without reading it."""
    OVERWRITES.update(names)


UNDECLARED_VIEWS = {"_unsafe_view"}  # views that autograd is not to know of, so their schema says nothing


class Operator:
    """What is known of one operator of PyTorch, an OpOverload.

    `written` are the names of the arguments that it writes into, `outs` of those that were given for results. `handler` and
    `device_time` are chosen at its first call.
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
        self.positions = {a.name: position for position, a in enumerate(schema.arguments) if not a.kwarg_only}
        self.defaults: Mapping[str, Any] = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        self.written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        self.outs = tuple(a.name for a in schema.arguments if a.is_out)
        self.only_writes = all(result.alias_info is not None for result in schema.returns)
        views = schema.returns and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        self.returns_views = bool(views) or self.name in UNDECLARED_VIEWS
        self.own_kernel: Callable[..., Any] = getattr(func, "_op", func)  # PyTorch's, without the frame of OpOverload.__call__
        self.kernel = CPU_KERNELS.get(func, self.own_kernel)
        self.temporaries = TEMPORARIES.get(self.name)
        self.device_time = DEVICE_TIMES.get(self.name)
        self.overwrites = self.name in OVERWRITES
        self.assertion = ASSERTIONS.get(self.name, NO_ASSERTION)
        self.handler: Handler | None = None
        self.iterates = False  # is its kernel one of TensorIterator's, which takes one CPU number?
        self.outputs_anywhere = False  # may all inputs of an `out=` be on the CPU?
        self.by_argument = False  # does generated code check the device of each argument?
        self.model_only = False  # does the first argument give a shape alone?
        self.touches_values = True  # does the handler itself read or write values?
        self.marks_written = False  # is what it writes to be noted, as long as nobody looks for races?

    def in_place(self) -> Any:
        """The variant of the operator that writes into its first argument."""
        return getattr(getattr(torch.ops.aten, self.name + "_"), self.func._overloadname)


_operators: dict[int, Operator] = {}  # by the id of the OpOverload, which the Operator keeps alive: to hash one takes a frame of Python
_NO_OPERATOR: Any = None


def operator(func: Any) -> Operator:
    """What is known of this OpOverload."""
    found = _operators.get(id(func))
    if found is None:
        found = _operators[id(func)] = Operator(func)
    return found


def different_devices(*values: Any) -> DifferentDevicesError:
    """The error before anybody has looked at which operator has the arguments: `faults.of_operator` names the argument where CUDA does."""
    return DifferentDevicesError(at_least_two([("", x) for x in tensors(*values)]))


def common_gpu(*values: Any) -> Gpu:
    """The one GPU of all these tensors. Raises RuntimeError for several devices."""
    return Call(_NO_OPERATOR, values, {}).common_gpu()


def bytes_of(x: Tensor) -> int:
    """Bytes of the elements."""
    return x.numel() * x.itemsize


def made_of(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """A composite operator run as C++ makes it. `OpOverload.decompose` prefers Python's version, whose LSTM is wrong in torch 2.11."""
    return operator._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@contextmanager
def made_on(gpu: Gpu) -> Iterator[None]:
    """In the block, what C++ makes on the CPU is made on this GPU."""
    selected = gpu.machine.selected
    before, selected.made_on = selected.made_on, gpu
    try:
        yield
    finally:
        selected.made_on = before
