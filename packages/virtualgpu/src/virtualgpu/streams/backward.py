"""The streams of a backward: each node runs on that of its forward operator, as in PyTorch's engine; the one that puts a gradient into a
leaf on that of the leaf's first use.

The engine lets the stream of a node wait for those that made its gradients, and in the end the streams that were current for all of
them (torch.autograd, "Stream semantics of backward passes"). Here a GPU's streams wait for one another whenever the next node is on
another stream than the last: so branches of a backward on two streams of one GPU run one after the other.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from virtualgpu import errors
from virtualgpu.clock.machine_clock import StreamTime
from virtualgpu.hardware import Gpu, Machine, Selected
from virtualgpu.ops.gradients import count_references
from virtualgpu.tensor import VirtualTensor, memory_of, tensors

MOST = 1 << 16  # nodes on streams other than the default one that are remembered
_FORKED = (
    "Unable to handle autograd's threading in combination with fork-based multiprocessing. "
    "See https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork"
)
_sequence = torch.autograd._get_sequence_nr


def follow(machine: Machine, node: Any, args: tuple) -> None:
    """Before an operator on device tensors: record the stream of a forward's node, or switch to that of a backward's."""
    if node is None:
        _note(machine, args)
    elif (gpu := next((x._gpu for x in tensors(args) if type(x) is VirtualTensor), None)) is not None:
        arrive(machine, node, gpu)


def arrive(machine: Machine, node: Any, gpu: Gpu) -> None:
    """Before anything else that a node of a backward does: switch to its stream. Later the node may choose another."""
    name, number, selected = node.name(), node._sequence_nr(), machine.selected
    leaf = node.variable if name.endswith("AccumulateGrad") else None
    if leaf is not None and (type(leaf) is not VirtualTensor or leaf.layout is not torch.strided):
        return
    here = torch._C._current_graph_task_id(), name, number, id(leaf), gpu.index
    if selected.arrived != here:
        selected.arrived = here
        if leaf is None:
            _switch(selected, gpu, machine.forward_streams.get((gpu.index, number), gpu.default_stream))
        elif (wanted := machine.leaf_streams.get(memory_of(leaf))) is not None:
            _switch(selected, gpu, wanted)


def _note(machine: Machine, args: tuple) -> None:
    """Autograd has made the nodes of an operator when it calls it: they have the sequence numbers since the last one.

    Each thread counts its own nodes from 0, so a number may be that of another thread's node too: the newest counts.
    """
    if torch.is_grad_enabled():
        _note_leaves(machine, args)
    made = _sequence()
    selected = machine.selected
    known = machine.forward_streams
    if made > selected.nodes and (known or selected.streams):
        for gpu in machine.gpus:
            stream = gpu.stream
            for number in range(selected.nodes, made):
                if stream.stream_id:
                    known[gpu.index, number] = stream
                else:
                    known.pop((gpu.index, number), None)
        while len(known) > MOST:
            known.popitem(last=False)
    selected.nodes = made


def _note_leaves(machine: Machine, args: Any) -> None:
    for x in args:
        if type(x) is VirtualTensor:
            if x.requires_grad and x.is_leaf and x.layout is torch.strided:
                machine.leaf_streams.setdefault(memory_of(x), x._gpu.stream)
        elif isinstance(x, (list, tuple)):
            _note_leaves(machine, x)


def _switch(selected: Selected, gpu: Gpu, wanted: StreamTime) -> None:
    current = gpu.stream
    selected.ambient.setdefault(gpu.index, current)
    if wanted is not current:
        clock = gpu.machine.clock
        clock.wait(wanted, clock.record(current))
        selected.streams[gpu.index] = wanted


def run_on_streams(machine: Machine, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a backward, and return to the streams that were current before it, which then wait for it."""
    count_references(machine)
    selected = machine.selected
    outer, selected.ambient = selected.ambient, {}
    try:
        return run(*args, **kwargs)
    finally:
        for index, stream in selected.ambient.items():
            _switch(selected, machine.gpus[index], stream)
        selected.ambient, selected.arrived = outer, None
        machine.leaf_streams.clear()  # a leaf's node goes with the graph that it was made for


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """By owner, the names that change."""
    autograd = torch.autograd
    engine = starting_at_roots(machine, autograd._engine_run_backward)
    yield autograd, {"_make_grads": errors.make_gradients(autograd._make_grads), "_engine_run_backward": engine}


def starting_at_roots(machine: Machine, run: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that knows on which GPU it starts: its first node may make a number there before it looks at any tensor.

    Where there are GPUs, a process's first backward, even one on the CPU, starts threads of autograd's, which a forked child does not have.
    """
    threads_in: int | None = None  # the process that has them

    def run_from(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal threads_in
        roots = {x._gpu if type(x) is VirtualTensor else None for x in tensors(outputs)}
        roots_on_gpus = roots - {None}
        if roots_on_gpus:
            machine.require_alive()  # a graph of nothing but views calls no operator that would
        process = os.getpid()
        if threads_in not in (None, process):
            raise RuntimeError(_FORKED)
        threads_in = process
        before, machine.selected.root = machine.selected.root, roots.pop() if len(roots) == 1 else None
        try:
            return run_on_streams(machine, run, outputs, *args, **kwargs)
        except RuntimeError as error:
            if roots_on_gpus and "modified by an inplace operation" in str(error):
                error.args = (errors.with_cuda_types(str(error)),)
            raise
        finally:
            machine.selected.root = before

    return run_from
