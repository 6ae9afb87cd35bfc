"""Gradients that CUDA sums in place.

PyTorch's backward pass writes to a temporary of its own where it can, but not if there is a tensor
subclass or a dispatch mode. Virtual tensors use both. What PyTorch then requests out of place is
done in place here, under the same conditions as in PyTorch's sources.
"""

import _thread
from collections.abc import Callable
from typing import Any

import torch

from virtualgpu.errors import VERSION
from virtualgpu.hardware import Machine
from virtualgpu.ops import operators
from virtualgpu.ops.call import Call, handles, operator
from virtualgpu.profiles import load
from virtualgpu.tensor import VirtualTensor, allocate_on, memory_of, wrap

aten = torch.ops.aten
_ADD = aten.add.Tensor
_graph_task, _node = torch._C._current_graph_task_id, torch._C._current_autograd_node
# The numbers of references to a gradient that only the engine holds, and to its storage, as
# `count_references` found them in this version of torch.
_ALONE: list[tuple[int, int]] = []
# Nodes whose formulas sum nothing. Two of their gradients may go to the same node (x * x).
WITHOUT_SUMS = {
    "StackBackward0",
    "CatBackward0",
    "MulBackward0",
    "DivBackward0",
    "AddcmulBackward0",
    "AddcdivBackward0",
    "MmBackward0",
    "BmmBackward0",
    "SubBackward0",
}
# Formulas that combine a temporary of their own with another tensor
# (torch/csrc/autograd/FunctionsManual.cpp).
_SEVERAL_MASKS = {
    "MaxBackward1",
    "MinBackward1",
    "MedianBackward0",
    "NanmedianBackward0",
    "AmaxBackward0",
    "AminBackward0",
}
OWN_TEMPORARIES = {
    "logical_and": _SEVERAL_MASKS | {"ClampBackward0", "ClampBackward1"},
    "logical_or": _SEVERAL_MASKS | {"ClampBackward0", "ClampBackward1"},
    "masked_fill": {
        "Atan2Backward0",
        "NormBackward0",
        "NormBackward1",
        "LinalgVectorNormBackward0",
    },
    "sub": {"BinaryCrossEntropyWithLogitsBackward0"},
    "index_fill": {"TraceBackward0"},
    "mul": {"BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0"},
}
if VERSION >= (2, 14):  # equal values share a gradient: a `where` is masked in place, not masks
    OWN_TEMPORARIES["logical_and"] -= {"ClampBackward0"}
    OWN_TEMPORARIES["logical_or"] -= {"ClampBackward0"}
    OWN_TEMPORARIES["masked_fill"] |= {"ClampBackward0", "ClampMinBackward1", "ClampMaxBackward1"}
    OWN_TEMPORARIES["masked_fill"] |= {"MaximumBackward0", "MinimumBackward0"}
    OWN_TEMPORARIES["masked_fill"] |= {"FmaxBackward0", "FminBackward0"}


# Nodes whose formulas read from the GPU whether the input has a zero. For subclasses of a tensor,
# PyTorch computes the gradient with scans and reads nothing.
READS_ZEROS = {"ProdBackward0", "ProdBackward1", "CumprodBackward0"}


def reads_zeros(call: Call) -> None:
    """Let the host wait, as for the number that CUDA's backward formula of a product reads.

    The formula reads whether the input has a zero. This happens in the first scan of each such
    node. Raises CUDA's error if the stream is being captured.
    """
    task = _graph_task()
    if task == -1:
        return
    node = _node()
    if node is None or node.name() not in READS_ZEROS:
        return
    gpu = call.common_gpu()
    selected, here = gpu.machine.selected, (task, node._sequence_nr())
    if selected.read_zeros != here:
        selected.read_zeros = here
        gpu.read(8)


@handles("add")
def add(call: Call) -> Any:
    """Run the operator `add`, in place where PyTorch's backward pass does so.

    Autograd's engine adds gradients that meet at one node to the first one, if nothing else refers
    to it (autograd/input_buffer.cpp). `linear` adds its bias to a product that it has just made
    (aten/src/ATen/native/Linear.cpp).
    """
    if call.op.func is _ADD and not call.kwargs:
        if _graph_task() != -1:
            if _accumulates(*call.args):
                return operators.compute(call.of(aten.add_.Tensor))
        elif _is_bias(*call.args):
            result = operators.compute(call.of(aten.add_.Tensor))
            return operators.view(Call(operator(aten.alias.default), (result,), {}))
    return operators.compute_or_into_given(call)


def _accumulates(gradient: Any, other: Any) -> bool:
    """Return whether this sum adds two gradients at one node, and may overwrite the first one.

    Other sums are part of a formula. Their first term was made in the same node, or something
    else also refers to it.
    """
    if (
        type(gradient) is not VirtualTensor
        or type(other) is not VirtualTensor
        or torch.is_grad_enabled()
    ):
        return False
    if gradient.shape != other.shape or gradient.dtype is not other.dtype:
        return False
    if gradient.layout is not torch.strided or other.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    uses = gradient._use_count()  # type: ignore[attr-defined]  # not in the stubs
    references = uses, torch._C._storage_Use_Count(storage._cdata)
    if not _ALONE:
        _ALONE.append(references)
    if references != _ALONE[0]:
        return False
    dense = gradient.is_contiguous()
    if not dense and 0 not in gradient.stride():
        dense = storage.nbytes() == gradient.numel() * gradient.itemsize
    if not dense:
        return False
    if memory_of(gradient).born != gradient._gpu.machine.selected.call:
        return True
    return _node().name() in WITHOUT_SUMS


def count_references(machine: Machine) -> None:
    """Measure how many references a gradient has, before a process's first backward pass.

    It must not happen earlier. On a machine with real GPUs autograd starts threads at that time,
    and a child that is forked later cannot run a backward pass. The count happens in a new
    thread, which has none of the program's modes, transforms or streams.
    """
    if not _ALONE:
        done = _thread.allocate_lock()
        done.acquire()
        _thread.start_new_thread(_count, (type(machine.host_operators), done))
        done.acquire()


def _count(host_operators: Callable[[Machine], Any], done: _thread.LockType) -> None:
    """Run a backward pass in which two gradients meet, to count the references to one of them.

    `host_operators` makes the mode for a machine that is never put in use. `done` is released at
    the end.
    """
    machine = Machine(load("H200"), 1)

    def on_gpu(x: torch.Tensor) -> torch.Tensor:
        allocate_on(machine.gpus[0], x.untyped_storage())
        return wrap(x, machine.gpus[0])

    try:
        with host_operators(machine):
            x = on_gpu(torch.ones(1, device="cpu")).requires_grad_() * 2
            gradient = on_gpu(torch.ones(1, device="cpu"))
            run = torch.autograd.Variable._execution_engine.run_backward  # PyTorch's own function
            run(
                (x.sin() + x.cos(),),
                (gradient,),
                False,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
    finally:
        machine.alive = False
        done.release()


def _is_bias(x: Any, bias: Any) -> bool:
    """Return whether `bias` is added to `x`, a matrix product made in this call of C++.

    The sizes must fit.
    """
    if type(x) is not VirtualTensor or type(bias) is not VirtualTensor:
        return False
    selected = x._gpu.machine.selected
    if selected.product is None:
        return False
    memory = selected.product()
    if memory is None or memory.born != selected.call or memory_of(x) is not memory:
        return False
    return bias.dim() == 1 and x.shape[-1:] == bias.shape and x.dtype is bias.dtype


@handles("logical_and", "logical_or", "masked_fill", "index_fill", "mul", "sub")
def combine(call: Call) -> Any:
    """Run an operator, in place if PyTorch's backward formula would overwrite its own temporary."""
    if _graph_task() == -1 or call.kwargs or not _is_own_temporary(call, *call.args[:2]):
        return operators.compute_or_into_given(call)
    return operators.compute(call.of(call.op.in_place()))


def _is_own_temporary(call: Call, x: Any, other: Any) -> bool:
    """Return whether `x` is a temporary of the running backward formula that it may overwrite.

    `other` is the second operand of `call`.
    """
    if torch.is_grad_enabled() or type(x) is not VirtualTensor:
        return False
    if _node().name() not in OWN_TEMPORARIES[call.op.name]:
        return False
    if memory_of(x).born != x._gpu.machine.selected.call:
        return False
    return (
        not isinstance(other, torch.Tensor)
        or torch.broadcast_shapes(x.shape, other.shape) == x.shape
    )
