"""Plays the allocations and frees of a CUDA kernel around the outputs of its CPU counterpart.

A plan is a tuple of steps in time: a positive number allocates so many bytes, a negative one frees the youngest block of that size,
an `Out` is the moment at which an output gets its memory, and a function is called.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._C import _DisableTorchDispatch

from virtualgpu.hardware import Gpu, Memory
from virtualgpu.ops import kernels, operators, without_values
from virtualgpu.ops.half import KERNELS
from virtualgpu.tensor import VirtualStorage, empty_without_values, wrap


class Out(NamedTuple):
    """The output at this position among the results; `nbytes` where CUDA's block is larger than the tensor."""

    index: int = 0
    nbytes: int | None = None


OUT = Out()

Plan = tuple[Any, ...]  # of int, Out or a function


def play(gpu: Gpu, plan: Iterable[Any], outputs: Sequence[torch.Tensor] = (), known: bool = True) -> list[Any]:
    """Carry out a plan. Returns the outputs on the GPU; those that the plan does not name come last."""
    live: list[tuple[int, Any]] = []
    made: list[Any] = [None] * len(outputs)
    try:
        for step in plan:
            if type(step) is Out:
                made[step.index] = _place(gpu, outputs[step.index], step.nbytes, known)
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
    return [_place(gpu, x, None, known) if y is None else y for x, y in zip(outputs, made, strict=True)]


def _place(gpu: Gpu, output: Any, nbytes: int | None, known: bool) -> Any:
    if not isinstance(output, torch.Tensor):
        return output
    if not known:
        return empty_without_values(gpu, output.size(), output.stride(), output.dtype)
    if nbytes is not None and nbytes > output.untyped_storage().nbytes():
        storage = output.untyped_storage()
        memory = Memory(gpu, gpu.allocate(nbytes), storage.nbytes())
        storage.__class__ = VirtualStorage
        storage.memory = memory
    return wrap(output, gpu)


def perform(
    func: Any,
    args: tuple,
    kwargs: dict,
    plan: Callable[[list[Any]], Plan],
    gpu: Gpu | None = None,
    moved: int = 0,
    kernel: Callable[..., Any] | None = None,
) -> Any:
    """Run an operator that only returns new tensors, with the allocations of a plan, which is made when the results are known.

    `kernel` computes the results on plain tensors, where the CPU's own kernel does not serve.
    """
    if gpu is None:
        gpu, moved = operators.common_gpu(args, kwargs)
    known = not without_values.loses_values(func, args, kwargs, gpu)
    if known:
        with _DisableTorchDispatch():
            raw = (kernel or KERNELS.get(func, func))(*args, **kwargs)
    else:
        raw = without_values.on_meta(func, args, kwargs)
        if raw is None:
            raise RuntimeError(f"{func._schema.name}: the shape of its result depends on values, and these were not kept")
    single = isinstance(raw, torch.Tensor)
    outputs = [raw] if single else list(raw)
    made = play(gpu, plan(outputs), outputs, known)
    gpu.launch(*kernels.work(func, args, kwargs, made, moved), name=func._schema.name.removeprefix("aten::"))
    return made[0] if single else tuple(made)
