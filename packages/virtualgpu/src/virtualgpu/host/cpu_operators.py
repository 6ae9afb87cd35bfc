"""The host of a virtual machine: its operators take time, its memory can be pinned."""

import sys
from threading import get_ident
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from virtualgpu import errors
from virtualgpu.clock import costs
from virtualgpu.generators import is_virtual
from virtualgpu.hardware import Gpu, Machine, Selected
from virtualgpu.ops.blas import matrix_work
from virtualgpu.ops.call import Call, Operator, operator
from virtualgpu.ops.copies import move
from virtualgpu.ops.dispatch import dispatch
from virtualgpu.ops.operators import refuse_waiting
from virtualgpu.pinned import pinned
from virtualgpu.streams import backward
from virtualgpu.streams.race_detector import RaceDetector
from virtualgpu.tensor import VirtualTensor, tensors

# PyTorch's own operators fail or crash on symbolic zeros where a mode is active: real zeros serve as well.
_SYMBOLIC_ZEROS, _ZEROS = torch.ops.aten._efficientzerotensor.default, torch.ops.aten.zeros.default
_OF_MODES = {"__torch_function__", "__torch_dispatch__"}  # such as a default device's: one line for all calls
# The node of a leaf, and the Python function that calls autograd's engine: of operators that hooks call, another one is the caller.
_LEAF, _ENGINE = "torch::autograd::AccumulateGrad", torch.autograd.graph._engine_run_backward.__code__
_graph_task, _node = torch._C._current_graph_task_id, torch._C._current_autograd_node
_sequence = torch.autograd._get_sequence_nr  # how many nodes this thread has made so far
MOST_NODES_WITHOUT_OPERATORS = 64  # assumed: that may follow one another in a network


class HostOperators(TorchDispatchMode):
    """Sees every operator of the threads of a machine: those on CPU tensors take host time, and C++ may make tensors for a GPU.

    A composite operator in C++ makes its temporaries on the device that it believes its inputs to be on: the CPU. What Python
    creates always says `pin_memory`; what C++ creates never does. So a factory without it belongs to the GPU of the operator that
    ran before it in the same call: the same Python instruction, or the same node of a backward. Where none did yet, its results
    wait on the CPU, and move to the GPU of the first device tensor that they meet in that call. In a backward that has been on one
    GPU alone they need not wait.
    """

    supports_higher_order_operators = True

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.scheduler = machine.scheduler
        self._maker = get_ident()
        self._one_numbering = True  # has one thread made all nodes of autograd?
        self.races = machine.races = RaceDetector(machine)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would wrap __torch_dispatch__ against torch.compile, which costs and hides the calling frame

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        try:
            if self.machine.forked and not types and not kwargs:
                return func(*args)  # a data loader's worker: its clock is nobody's, and no GPU can be meant
            if self.scheduler.several:
                self.scheduler.take_turn()
            if type(func) is not OpOverload and isinstance(func, HigherOrderOperator):
                return self._by_parts(func, args, kwargs or {})
            selected = self.machine.selected
            task = _graph_task()
            if task == -1:
                frame: Any = sys._getframe(1)
                while frame.f_code.co_name in _OF_MODES:
                    frame = frame.f_back
                if not frame.f_trace_opcodes:  # a mark that nobody else sets: Python gives the next frame the same place in memory
                    frame.f_trace_opcodes = True
                    selected.frames += 1
                call: tuple = ((selected.frames, id(frame)), frame.f_lasti)
                self._record(selected)
            else:
                node = _node()
                call = (task, node._sequence_nr(), node.name()) if node is not None else (task,)  # None where a callback ends the backward
                if selected.task != task:
                    selected.visit(task)
                    if VirtualTensor in types:  # the engine's thread of a GPU has to be woken
                        self._take(selected, self.machine.profile.backward_seconds)
                if node is not None and selected.node != call:
                    self._run_node(selected, call)
            if len(types) > 1 and any(kind is not VirtualTensor for kind in types):
                return self._wrapped(func, args, kwargs or {})
            if VirtualTensor in types:
                if self.machine.several_streams:
                    backward.follow(self.machine, node if task != -1 else None, args)
                selected.call = call
                if selected.waiting == call:
                    for x in Call(operator(func), args, kwargs or {}).written():
                        refuse_waiting(x)
                    args = adopt(args)
                result = dispatch(VirtualTensor, func, types, args, kwargs)
                if task != -1:
                    selected.places.add(selected.gpu)
                return result
            if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
                return self._wrapped(func, args, kwargs or {})
            return self._on_host(_ZEROS if func is _SYMBOLIC_ZEROS else func, types, args, kwargs or {}, call)
        except (IndexError, RuntimeError) as error:
            errors.leave_out_the_kit(error)
            raise

    def _record(self, selected: Selected) -> None:
        """The nodes that autograd has made since the last operator of this thread take host time."""
        made = _sequence()
        before = selected.recorded
        if made > (before or 0) and get_ident() != self._maker:
            self._one_numbering = False
        if before is not None and made > before:
            self._take(selected, (made - before) * self.machine.profile.record_seconds)
        selected.recorded = made

    def _run_node(self, selected: Selected, call: tuple) -> None:
        """A node of a backward pass takes host time, and so do those before it that called no operator.

        A backward pass runs its nodes from the last one made to the first. A gap of a few numbers
        is nodes that hand a gradient on, such as those of additions. A large gap is another part
        of the graph. Leaves have no number of their own: they count from the largest. Each thread
        counts its own nodes, so a gap says nothing where several threads have made some.
        """
        nodes = 1
        if torch.is_grad_enabled():  # create_graph: the engine's threads make nodes
            self._one_numbering = False
        if self._one_numbering and selected.node is not None and selected.node[0] == call[0]:
            nodes = selected.node_number - call[1]
            if not 1 <= nodes <= MOST_NODES_WITHOUT_OPERATORS:
                nodes = 1
        profile = self.machine.profile
        seconds = nodes * profile.node_seconds
        if call[2] == _LEAF:
            seconds += profile.leaf_seconds
        else:
            selected.node_number = call[1]
        selected.node = call
        self._take(selected, seconds)

    def _take(self, selected: Selected, seconds: float) -> None:
        if not selected.untimed:
            self.machine.clock.advance_host(seconds)

    def _by_parts(self, func: HigherOrderOperator, args: tuple, kwargs: dict) -> Any:
        """An operator that takes functions, such as flex attention: eagerly, as PyTorch's own Python for it calls ordinary operators."""
        eager = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if eager is None:
            raise errors.unsupported(f"torch.ops.higher_order.{func.name()}")
        with self:
            return eager(*args, **kwargs)

    def _wrapped(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """An operator on tensors of a subclass, such as DTensors, which sees it first."""
        wrapped = sum(hasattr(x, "__tensor_flatten__") for x in tensors(args))
        if wrapped:
            profile = self.machine.profile
            self.machine.clock.advance_host(profile.wrapper_seconds + wrapped * profile.wrapped_seconds)
        return func(*args, **kwargs)

    def _on_host(self, func: Any, types: Any, args: tuple, kwargs: dict, call: tuple) -> Any:
        """An operator without device tensors: on the CPU, or a factory."""
        selected = self.machine.selected
        waits = selected.waiting == call and "pin_memory" not in kwargs and all(x.dim() == 0 or _waits(x, call) for x in tensors(args))
        if "device" in kwargs and not types and "pin_memory" not in kwargs and kwargs["device"].type == "cpu":
            gpu = selected.made_on or (selected.gpu if selected.call == call else self._only_place(call))
            if gpu is not None:
                return func(*args, **(kwargs | {"device": gpu.device}))
            selected.waiting = call
            waits = True
        else:
            selected.call = None
            if len(call) == 3 and types:
                selected.places.add(None)
        if kwargs.get("pin_memory") and (device := kwargs.get("device")) is not None and device.type == "cpu":
            return pinned(func(*args, **(kwargs | {"pin_memory": False})))
        if kwargs.get("generator") is not None and ("device" not in kwargs or kwargs["device"].type == "cpu"):
            refuse_device_generator(kwargs["generator"])
        op = operator(func)
        if len(call) == 3 and call[2] == _LEAF and args and sys._getframe(2).f_code is _ENGINE:
            require_gradient_on_host(_node(), args[0])
        result = self.races.host_runs(op, args, kwargs) if self.races.host_copies else func(*args, **kwargs)
        if type(result) is VirtualTensor:
            return result  # a factory on a GPU: its own operators have taken their time
        if waits and type(result) is torch.Tensor and result.layout is torch.strided:
            result.untyped_storage().__dict__["waiting"] = call
        self._take_time(op, args, result)
        return result

    def _only_place(self, call: tuple) -> Gpu | None:
        """The one GPU that a backward has been on so far; None for several places, for the CPU, and outside a backward."""
        places = self.machine.selected.places
        return next(iter(places)) if len(call) == 3 and len(places) == 1 else None

    def _take_time(self, op: Operator, args: tuple, result: Any) -> None:
        if self.machine.selected.untimed:
            return
        moved = 0
        for x in () if op.returns_views else (*args, result):
            if isinstance(x, torch.Tensor):
                if x.is_meta or isinstance(x, FakeTensor):
                    return  # shapes alone
                moved += x.numel() * x.itemsize
        profile = self.machine.profile
        if op.name == "_local_scalar_dense":
            self.machine.clock.advance_host(profile.cpu_item_seconds)
            return
        work = matrix_work(op.name, args)
        seconds = costs.cpu_seconds(profile, moved, 0 if work is None else work[0])
        if op.name.startswith("_foreach_"):  # on the CPU, PyTorch goes through the list
            for x in args[0][1:]:
                seconds += profile.cpu_listed_seconds + 2 * x.nbytes / profile.cpu_bytes_per_second
        self.machine.clock.advance_host(seconds)


def _waits(x: torch.Tensor, call: tuple) -> bool:
    """Return whether C++ made this tensor on the CPU in this call, perhaps for a GPU."""
    return x.layout is torch.strided and getattr(x.untyped_storage(), "waiting", None) == call


def adopt(args: tuple) -> tuple:
    """The arguments with those that C++ made on the CPU for this call moved to the GPU of the others."""
    gpu = next(x._gpu for x in tensors(args) if type(x) is VirtualTensor)
    waiting = gpu.machine.selected.waiting

    def moved(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(moved(y) for y in x)
        if type(x) is torch.Tensor and x.dim() and getattr(x.untyped_storage(), "waiting", None) == waiting:
            return move(x, gpu, None, True)
        return x

    return tuple(moved(x) for x in args)


def require_gradient_on_host(node: Any, gradient: torch.Tensor) -> None:
    """Raise RuntimeError if a leaf on a GPU gets a gradient of the host.

    A hook of a node that C++ has made has put it there. Nothing sees such hooks when they run.
    """
    leaf = node.variable
    if type(leaf) is not VirtualTensor or type(gradient) is not torch.Tensor:
        return
    if (gradient.dtype, gradient.shape) == (leaf.dtype, leaf.shape):  # others are C++'s own, such as DDP's
        was, got = errors.type_of(leaf), errors.type_of(gradient)
        raise RuntimeError(f"hook '<unknown>' has changed the type of value (was {was} got {got})")


def refuse_device_generator(generator: torch.Generator) -> None:
    """Raises RuntimeError, as CUDA does, if a GPU's generator is to draw on the CPU."""
    if is_virtual(generator):
        raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
