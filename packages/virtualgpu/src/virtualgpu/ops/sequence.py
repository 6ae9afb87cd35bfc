"""Allocations and frees of a CUDA kernel around the outputs that the CPU has computed.

A plan is a tuple of steps in the order of time. A positive number allocates that many bytes. A
negative number frees the newest block of that size. An `Out` allocates an output's memory. A
function is called.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.hardware import Gpu
from virtualgpu.memory import Memory
from virtualgpu.ops.call import Call
from virtualgpu.ops.without_values import loses_values, shapes_of
from virtualgpu.ops.work import work
from virtualgpu.tensor import empty_without_values, hang, wrap


class Out(NamedTuple):
    """Step of a plan that allocates the output at this position among the results.

    `nbytes` is the size of CUDA's block if it is larger than the tensor.
    """

    position: int = 0
    nbytes: int | None = None


OUT = Out()

Plan = tuple[Any, ...]  # of int, Out or a function


def every_output(outputs: list[Any]) -> Plan:
    """Return the plan that allocates the outputs in their order, and nothing else."""
    return tuple(Out(i) for i in range(len(outputs)))


def play(
    gpu: Gpu, plan: Iterable[Any], outputs: Sequence[torch.Tensor] = (), known: bool = True
) -> list[Any]:
    """Execute a plan, and return the outputs on the GPU.

    Outputs that the plan does not mention are allocated last. `known` says whether they have
    values.
    """
    live: list[tuple[int, Any]] = []
    made: list[Any] = [None] * len(outputs)
    try:
        for step in plan:
            if type(step) is Out:
                made[step.position] = _made(gpu, outputs[step.position], step.nbytes, known)
            elif type(step) is not int:
                step()
            elif step > 0:
                live.append((step, gpu.allocate(step)))
            elif step < 0:
                position = max(i for i, (size, _) in enumerate(live) if size == -step)
                gpu.allocator.free(live.pop(position)[1])
    finally:
        for _, block in reversed(live):
            gpu.allocator.free(block)
    for position, output in enumerate(outputs):
        if made[position] is None:
            made[position] = _made(gpu, output, None, known)
    return made


def _made(gpu: Gpu, output: Any, nbytes: int | None, known: bool) -> Any:
    """Return the plain tensor `output` as a tensor on the GPU.

    Its block has at least `nbytes` bytes. `known` says whether it has values. An output that is not
    a tensor is returned unchanged.
    """
    if not isinstance(output, torch.Tensor):
        return output
    if not known:
        return empty_without_values(gpu, output.size(), output.stride(), output.dtype)
    if nbytes is not None and nbytes > output.untyped_storage().nbytes():
        storage = output.untyped_storage()
        hang(Memory(gpu, gpu.allocate(nbytes), storage.nbytes()), storage)
    return wrap(output, gpu)


def perform(
    call: Call,
    plan: Plan | Callable[[list[Any]], Plan],
    kernel: Callable[..., Any] | None = None,
) -> Any:
    """Run an operator that only returns new tensors, with the allocations of a plan.

    `plan` may be a function of the results. `kernel` computes the results as plain tensors if the
    CPU's own kernel does not.
    """
    gpu = call.common_gpu()
    known = not loses_values(call)
    if known:
        with _DisableTorchDispatch():
            raw = (kernel or call.op.kernel)(*call.args, **call.kwargs)
    else:
        raw = shapes_of(call)
    single = isinstance(raw, torch.Tensor)
    outputs = [raw] if single else list(raw)
    if not isinstance(plan, tuple):
        plan = plan(outputs)
    made = play(gpu, plan, outputs, known)
    gpu.launch(*work(call, made), name=call.op.name)
    if single:
        return made[0]
    return tuple(made)
