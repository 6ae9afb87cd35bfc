"""Plays the allocations and frees of a CUDA kernel around the outputs of its CPU counterpart.

A plan is a tuple of steps in time: a positive number allocates so many bytes, a negative one frees the youngest block of that size,
an `Out` is the moment at which an output gets its memory, and a function is called.
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
    """The output at this position among the results; `nbytes` where CUDA's block is larger than the tensor."""

    position: int = 0
    nbytes: int | None = None


OUT = Out()

Plan = tuple[Any, ...]  # of int, Out or a function


def every_output(outputs: list[Any]) -> Plan:
    """The outputs in their order, and nothing else."""
    return tuple(Out(i) for i in range(len(outputs)))


def play(gpu: Gpu, plan: Iterable[Any], outputs: Sequence[torch.Tensor] = (), known: bool = True) -> list[Any]:
    """Carry out a plan. Returns the outputs on the GPU; those that the plan does not name come last."""
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
    return [_made(gpu, x, None, known) if y is None else y for x, y in zip(outputs, made, strict=True)]


def _made(gpu: Gpu, output: Any, nbytes: int | None, known: bool) -> Any:
    if not isinstance(output, torch.Tensor):
        return output
    if not known:
        return empty_without_values(gpu, output.size(), output.stride(), output.dtype)
    if nbytes is not None and nbytes > output.untyped_storage().nbytes():
        storage = output.untyped_storage()
        hang(Memory(gpu, gpu.allocate(nbytes), storage.nbytes()), storage)
    return wrap(output, gpu)


def perform(call: Call, plan: Plan | Callable[[list[Any]], Plan], kernel: Callable[..., Any] | None = None) -> Any:
    """Run an operator that only returns new tensors, with the allocations of a plan, which may be made when the results are known.

    `kernel` computes the results on plain tensors, where the CPU's own kernel does not serve.
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
    made = play(gpu, plan if isinstance(plan, tuple) else plan(outputs), outputs, known)
    gpu.launch(*work(call, made), name=call.op.name)
    return made[0] if single else tuple(made)
