"""The operators of the host: they take time, and their memory can be page-locked."""

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

# PyTorch's own operators fail or crash on symbolic zeros if a mode is active. Real zeros work.
_SYMBOLIC_ZEROS, _ZEROS = torch.ops.aten._efficientzerotensor.default, torch.ops.aten.zeros.default
# Functions of modes, such as that of a default device, which has one line for all calls.
_OF_MODES = {"__torch_function__", "__torch_dispatch__"}
# The name of a leaf's node, and the Python function that calls autograd's engine. If a hook calls
# an operator, the caller is another function.
_LEAF, _ENGINE = (
    "torch::autograd::AccumulateGrad",
    torch.autograd.graph._engine_run_backward.__code__,
)
_graph_task, _node = torch._C._current_graph_task_id, torch._C._current_autograd_node
_sequence = torch.autograd._get_sequence_nr  # the number of nodes that this thread has made so far
MOST_NODES_WITHOUT_OPERATORS = 64  # an assumption about successive nodes in a network


class HostOperators(TorchDispatchMode):
    """Mode that sees every operator of the machine's threads.

    Operators on CPU tensors take host time. The mode also finds the tensors that C++ makes on the
    CPU but should make on a GPU. A composite operator in C++ makes its temporary tensors on the
    device that it believes its inputs to be on, which is the CPU.

    Python always passes `pin_memory` when it creates a tensor, and C++ never does. A factory
    without `pin_memory` therefore belongs to the GPU of the operator that ran before it in the same
    call. A call is one Python instruction or one node of a backward pass. If no operator ran
    before, the new tensor waits on the CPU, and moves to the GPU of the first device tensor that it
    meets in this call. It need not wait in a backward pass that has used only one GPU.
    """

    supports_higher_order_operators = True

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.machine = machine
        self.scheduler = machine.scheduler
        self._maker = get_ident()
        self._one_numbering = True  # whether one thread has made all of autograd's nodes
        self.races = machine.races = RaceDetector(machine)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch does not wrap __torch_dispatch__ and hide the caller."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        try:
            if self.machine.forked and not types and not kwargs:
                return func(*args)  # a data loader's worker has no clock and no GPU
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
                # Nobody else sets this mark. It is needed because Python may give the next frame
                # the same address.
                if not frame.f_trace_opcodes:
                    frame.f_trace_opcodes = True
                    selected.frames += 1
                call: tuple = ((selected.frames, id(frame)), frame.f_lasti)
                self._record(selected)
            else:
                node = _node()
                call = (task,)  # without a node in a callback that ends the backward pass
                if node is not None:
                    call = (task, node._sequence_nr(), node.name())
                if selected.task != task:
                    selected.visit(task)
                    if VirtualTensor in types:  # the engine's thread of a GPU has to be woken up
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
            return self._on_host(
                _ZEROS if func is _SYMBOLIC_ZEROS else func, types, args, kwargs or {}, call
            )
        except (IndexError, RuntimeError) as error:
            errors.leave_out_the_kit(error)
            raise

    def _record(self, selected: Selected) -> None:
        """Add the host time of the autograd nodes that the thread has made since its last operator.

        `selected` is the state of the thread.
        """
        made = _sequence()
        before = selected.recorded
        if made > (before or 0) and get_ident() != self._maker:
            self._one_numbering = False
        if before is not None and made > before:
            self._take(selected, (made - before) * self.machine.profile.record_seconds)
        selected.recorded = made

    def _run_node(self, selected: Selected, call: tuple) -> None:
        """Add the host time of the backward node that runs now.

        This includes the nodes before it that ran no operator. `selected` is the state of the
        thread, and `call` identifies the node.

        A backward pass runs its nodes from the last one made to the first. A gap of a few numbers
        means nodes that only hand a gradient on, such as those of additions. A large gap means
        another part of the graph. Leaves have no numbers of their own and count from the largest.
        Each thread counts its own nodes, so a gap means nothing if several threads have made nodes.
        """
        nodes = 1
        if torch.is_grad_enabled():  # with create_graph, the engine's threads make nodes
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
        """Advance the host's clock by `seconds`, unless the thread takes no host time."""
        if not selected.untimed:
            self.machine.clock.advance_host(seconds)

    def _by_parts(self, func: HigherOrderOperator, args: tuple, kwargs: dict) -> Any:
        """Run a higher-order operator, such as flex attention, as single operators."""
        eager = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if eager is None:
            raise errors.unsupported(f"torch.ops.higher_order.{func.name()}")
        with self:
            return eager(*args, **kwargs)

    def _wrapped(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operator on tensors of a subclass, such as DTensors, by the subclass's own code.

        The subclass's work takes host time.
        """
        wrapped = sum(hasattr(x, "__tensor_flatten__") for x in tensors(args))
        if wrapped:
            profile = self.machine.profile
            self.machine.clock.advance_host(
                profile.wrapper_seconds + wrapped * profile.wrapped_seconds
            )
        return func(*args, **kwargs)

    def _on_host(self, func: Any, types: Any, args: tuple, kwargs: dict, call: tuple) -> Any:
        """Run an operator that has no device tensors among its arguments.

        It runs on the CPU, or it makes a new tensor for a GPU. `call` identifies the Python
        instruction or backward node that runs it.
        """
        selected = self.machine.selected
        waits = selected.waiting == call and "pin_memory" not in kwargs
        if waits:
            waits = all(x.dim() == 0 or _waits(x, call) for x in tensors(args))
        if (
            "device" in kwargs
            and not types
            and "pin_memory" not in kwargs
            and kwargs["device"].type == "cpu"
        ):
            gpu = selected.made_on
            if gpu is None:
                gpu = selected.gpu if selected.call == call else self._only_gpu(call)
            if gpu is not None:
                return func(*args, **(kwargs | {"device": gpu.device}))
            selected.waiting = call
            waits = True
        else:
            selected.call = None
            if len(call) == 3 and types:
                selected.places.add(None)
        if kwargs.get("pin_memory"):
            device = kwargs.get("device")
            if device is not None and device.type == "cpu":
                return pinned(func(*args, **(kwargs | {"pin_memory": False})))
        draws = kwargs.get("generator") is not None
        if draws and ("device" not in kwargs or kwargs["device"].type == "cpu"):
            refuse_device_generator(kwargs["generator"])
        op = operator(func)
        if len(call) == 3 and call[2] == _LEAF and args and sys._getframe(2).f_code is _ENGINE:
            require_gradient_on_host(_node(), args[0])
        if self.races.host_copies:
            result = self.races.host_runs(op, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if type(result) is VirtualTensor:
            return result  # from a factory on a GPU, whose own operators have taken their time
        if waits and type(result) is torch.Tensor and result.layout is torch.strided:
            result.untyped_storage().__dict__["waiting"] = call
        self._take_time(op, args, result)
        return result

    def _only_gpu(self, call: tuple) -> Gpu | None:
        """Return the only GPU that the running backward pass has used so far.

        `call` identifies what runs now. Returns None outside a backward pass, and if the pass has
        used the CPU or several GPUs.
        """
        places = self.machine.selected.places
        if len(call) == 3 and len(places) == 1:
            return next(iter(places))
        return None

    def _take_time(self, op: Operator, args: tuple, result: Any) -> None:
        """Add the host time of a CPU operator with these arguments and this result."""
        if self.machine.selected.untimed:
            return
        moved = 0
        if not op.returns_views:
            for x in (*args, result):
                if isinstance(x, torch.Tensor):
                    if x.is_meta or isinstance(x, FakeTensor):
                        return  # such tensors are only shapes
                    moved += x.numel() * x.itemsize
        profile = self.machine.profile
        if op.name == "_local_scalar_dense":
            self.machine.clock.advance_host(profile.cpu_item_seconds)
            return
        work = matrix_work(op.name, args)
        flops = 0 if work is None else work[0]
        seconds = costs.cpu_seconds(profile, moved, flops)
        if op.name.startswith("_foreach_"):  # on the CPU, PyTorch goes through the list in a loop
            for x in args[0][1:]:
                seconds += profile.cpu_listed_seconds + 2 * x.nbytes / profile.cpu_bytes_per_second
        self.machine.clock.advance_host(seconds)


def _waits(x: torch.Tensor, call: tuple) -> bool:
    """Return whether C++ has made the CPU tensor `x` during `call`, and it may belong on a GPU."""
    return x.layout is torch.strided and getattr(x.untyped_storage(), "waiting", None) == call


def adopt(args: tuple) -> tuple:
    """Return the arguments, with CPU tensors that belong on a GPU moved there.

    These are the tensors that C++ has made during the present call. One of the arguments is already
    on the GPU.
    """
    gpu = next(x._gpu for x in tensors(args) if type(x) is VirtualTensor)
    waiting = gpu.machine.selected.waiting

    def moved(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(moved(y) for y in x)
        if type(x) is not torch.Tensor or not x.dim():
            return x
        if getattr(x.untyped_storage(), "waiting", None) == waiting:
            return move(x, gpu, None, True)
        return x

    return tuple(moved(x) for x in args)


def require_gradient_on_host(node: Any, gradient: torch.Tensor) -> None:
    """Raise RuntimeError if a leaf on a GPU gets a gradient on the CPU.

    A hook of a node that C++ made has replaced the gradient. Such hooks cannot be observed.
    """
    leaf = node.variable
    if type(leaf) is not VirtualTensor or type(gradient) is not torch.Tensor:
        return
    # others are C++'s own, such as DDP's
    if (gradient.dtype, gradient.shape) == (
        leaf.dtype,
        leaf.shape,
    ):
        was, got = errors.type_of(leaf), errors.type_of(gradient)
        raise RuntimeError(f"hook '<unknown>' has changed the type of value (was {was} got {got})")


def refuse_device_generator(generator: torch.Generator) -> None:
    """Raise RuntimeError, as CUDA does, if a GPU's generator is used on the CPU."""
    if is_virtual(generator):
        raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
