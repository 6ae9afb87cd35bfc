"""Gradients that CUDA adds up in place.

PyTorch's backward writes into a temporary of its own where it can, but not where a tensor subclass or a dispatch mode is about.
Virtual tensors are both, so what it then asks for out of place is done in place here, under the conditions of the sources.
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
# References to a gradient that only the engine holds, and to its storage, as `count_references` has found them in this version of torch.
_ALONE: list[tuple[int, int]] = []
# Nodes whose formulas add nothing up: two of their gradients may go to the same node (x * x).
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
# Formulas that combine a temporary of their own with another tensor (torch/csrc/autograd/FunctionsManual.cpp).
_SEVERAL_MASKS = {"MaxBackward1", "MinBackward1", "MedianBackward0", "NanmedianBackward0", "AmaxBackward0", "AminBackward0"}
OWN_TEMPORARIES = {
    "logical_and": _SEVERAL_MASKS | {"ClampBackward0", "ClampBackward1"},
    "logical_or": _SEVERAL_MASKS | {"ClampBackward0", "ClampBackward1"},
    "masked_fill": {"Atan2Backward0", "NormBackward0", "NormBackward1", "LinalgVectorNormBackward0"},
    "sub": {"BinaryCrossEntropyWithLogitsBackward0"},
    "index_fill": {"TraceBackward0"},
    "mul": {"BinaryCrossEntropyBackward0", "BinaryCrossEntropyWithLogitsBackward0"},
}
if VERSION >= (2, 14):  # from then on equal values share a gradient: a `where` is masked in place, and masks are no longer
    OWN_TEMPORARIES["logical_and"] -= {"ClampBackward0"}
    OWN_TEMPORARIES["logical_or"] -= {"ClampBackward0"}
    OWN_TEMPORARIES["masked_fill"] |= {"ClampBackward0", "ClampMinBackward1", "ClampMaxBackward1"}
    OWN_TEMPORARIES["masked_fill"] |= {"MaximumBackward0", "MinimumBackward0", "FmaxBackward0", "FminBackward0"}


@handles("add")
def add(call: Call) -> Any:
    """The engine adds gradients that meet at one node into the first one, if nobody else holds it (autograd/input_buffer.cpp).

    `linear` adds its bias to a product that it has just made (aten/src/ATen/native/Linear.cpp).
    """
    if call.op.func is _ADD and not call.kwargs:
        if _graph_task() != -1:
            if _accumulates(*call.args):
                return operators.compute(call.of(aten.add_.Tensor))
        elif _is_bias(*call.args):
            return operators.view(Call(operator(aten.alias.default), (operators.compute(call.of(aten.add_.Tensor)),), {}))
    return operators.compute_or_into_given(call)


def _accumulates(gradient: Any, other: Any) -> bool:
    """Is this a sum of two gradients on their way to one node, whose first may be overwritten?

    A formula's sum differs: its first term was made in the same node, or is held by another as well.
    """
    if type(gradient) is not VirtualTensor or type(other) is not VirtualTensor or torch.is_grad_enabled():
        return False
    if gradient.shape != other.shape or gradient.dtype is not other.dtype:
        return False
    if gradient.layout is not torch.strided or other.layout is not torch.strided:
        return False
    storage = gradient.untyped_storage()
    references = gradient._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]  # in no stub
    if not _ALONE:
        _ALONE.append(references)
    if references != _ALONE[0]:
        return False
    dense = gradient.is_contiguous() or (0 not in gradient.stride() and storage.nbytes() == gradient.numel() * gradient.itemsize)
    return dense and (memory_of(gradient).born != gradient._gpu.machine.selected.call or _node().name() in WITHOUT_SUMS)


def count_references(machine: Machine) -> None:
    """Before the first backward of a process, not before: where there are real GPUs autograd starts threads for them then, and no child
    that is forked later can run a backward of its own. In a thread that has no modes, transforms or streams of the program's."""
    if not _ALONE:
        done = _thread.allocate_lock()
        done.acquire()
        _thread.start_new_thread(_count, (type(machine.host_operators), done))
        done.acquire()


def _count(host_operators: Callable[[Machine], Any], done: _thread.LockType) -> None:
    """On a machine that is never put in place: a backward whose two gradients nobody else holds."""
    machine = Machine(load("H200"), 1)

    def on_gpu(x: torch.Tensor) -> torch.Tensor:
        allocate_on(machine.gpus[0], x.untyped_storage())
        return wrap(x, machine.gpus[0])

    try:
        with host_operators(machine):
            x = on_gpu(torch.ones(1, device="cpu")).requires_grad_() * 2
            run = torch.autograd.Variable._execution_engine.run_backward  # not what is in its place
            run(
                (x.sin() + x.cos(),), (on_gpu(torch.ones(1, device="cpu")),), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
    finally:
        machine.alive = False
        done.release()


def _is_bias(x: Any, bias: Any) -> bool:
    """Was the first a product, made in this same call of C++, and is the second a vector of its rows' length?"""
    if type(x) is not VirtualTensor or type(bias) is not VirtualTensor:
        return False
    selected = x._gpu.machine.selected
    memory = None if selected.product is None else selected.product()
    if memory is None or memory.born != selected.call or memory_of(x) is not memory:
        return False
    return bias.dim() == 1 and x.shape[-1:] == bias.shape and x.dtype is bias.dtype


@handles("logical_and", "logical_or", "masked_fill", "index_fill", "mul", "sub")
def combine(call: Call) -> Any:
    """Formulas of a backward that overwrite a temporary of their own."""
    if _graph_task() == -1 or call.kwargs or not _is_own_temporary(call, *call.args[:2]):
        return operators.compute_or_into_given(call)
    return operators.compute(call.of(call.op.in_place()))


def _is_own_temporary(call: Call, x: Any, other: Any) -> bool:
    if torch.is_grad_enabled() or type(x) is not VirtualTensor or _node().name() not in OWN_TEMPORARIES[call.op.name]:
        return False
    if memory_of(x).born != x._gpu.machine.selected.call:
        return False
    return not isinstance(other, torch.Tensor) or torch.broadcast_shapes(x.shape, other.shape) == x.shape
