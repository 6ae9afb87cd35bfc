"""The streams on which a backward pass runs.

As in PyTorch's engine, each node runs on the stream of its forward operator. The node that adds a
gradient to a leaf runs on the stream of the leaf's first use.

The engine makes the stream of a node wait for the streams that computed its gradients. At the end,
the streams that were current before the backward pass wait for all of them (torch.autograd, "Stream
semantics of backward passes"). Here the streams of a GPU wait for one another whenever two
successive nodes run on different streams. Branches of a backward pass on two streams of one GPU
therefore run one after the other.
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
    """Record the streams of autograd's nodes, or select the stream of the running node.

    It is called before an operator on device tensors, whose arguments are `args`. In a forward pass
    (`node` is None) the current stream is recorded for the new nodes. In a backward pass the
    operator runs on the stream that was recorded for its node.
    """
    if node is None:
        _note(machine, args)
        return
    for x in tensors(args):
        if type(x) is VirtualTensor:
            arrive(machine, node, x._gpu)
            return


def arrive(machine: Machine, node: Any, gpu: Gpu) -> None:
    """Make the stream of a backward node the current one of `gpu`.

    This happens before the node runs its first operator. The node itself may choose another stream
    later.
    """
    name, number, selected = node.name(), node._sequence_nr(), machine.selected
    leaf = node.variable if name.endswith("AccumulateGrad") else None
    if leaf is not None and (type(leaf) is not VirtualTensor or leaf.layout is not torch.strided):
        return
    here = torch._C._current_graph_task_id(), name, number, id(leaf), gpu.index
    if selected.arrived != here:
        selected.arrived = here
        if leaf is None:
            forward_stream = machine.forward_streams.get((gpu.index, number), gpu.default_stream)
            _switch(selected, gpu, forward_stream)
            return
        leaf_stream = machine.leaf_streams.get(memory_of(leaf))
        if leaf_stream is not None:
            _switch(selected, gpu, leaf_stream)


def _note(machine: Machine, args: tuple) -> None:
    """Record the current streams for the nodes that autograd has made since the last operator.

    `args` are the arguments of the operator that runs now. Autograd makes the nodes of an operator
    before it calls the operator, and numbers them. Each thread numbers its own nodes from 0, so two
    nodes can have the same number. The newest is used.
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
    """Record the current stream for each leaf among `args` that has no recorded stream yet."""
    for x in args:
        if type(x) is VirtualTensor:
            if x.requires_grad and x.is_leaf and x.layout is torch.strided:
                machine.leaf_streams.setdefault(memory_of(x), x._gpu.stream)
        elif isinstance(x, (list, tuple)):
            _note_leaves(machine, x)


def _switch(selected: Selected, gpu: Gpu, wanted: StreamTime) -> None:
    """Make `wanted` the current stream of a GPU in this thread.

    It waits for the work of the stream that was the current one.
    """
    current = gpu.stream
    selected.ambient.setdefault(gpu.index, current)
    if wanted is not current:
        clock = gpu.machine.clock
        clock.wait(wanted, clock.record(current))
        selected.streams[gpu.index] = wanted


def run_on_streams(machine: Machine, run: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `run`, PyTorch's function for a backward pass, with these arguments.

    Afterwards the streams that were current before the pass wait for it.
    """
    count_references(machine)
    selected = machine.selected
    outer, selected.ambient = selected.ambient, {}
    try:
        return run(*args, **kwargs)
    finally:
        for index, stream in selected.ambient.items():
            _switch(selected, machine.gpus[index], stream)
        selected.ambient = outer
        selected.arrived = None
        machine.leaf_streams.clear()  # the next graph makes new nodes for the leaves


def replacements(machine: Machine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (object, new attributes by name) for each object of PyTorch to change.

    These are the changes of this module. They are undone when `machine` is removed.
    """
    autograd = torch.autograd
    engine = starting_at_roots(machine, autograd._engine_run_backward)
    replaced = {
        "_make_grads": errors.make_gradients(autograd._make_grads),
        "_engine_run_backward": engine,
    }
    yield autograd, replaced


def starting_at_roots(machine: Machine, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, PyTorch's function for backward passes, changed for virtual GPUs.

    It also records the GPU on which the backward pass starts, because the first node may create a
    number there before it uses a tensor.

    On a machine with GPUs, autograd starts threads in a process's first backward pass, even on the
    CPU. A forked child does not have these threads, so its backward pass raises RuntimeError.
    """
    threads_in: int | None = None  # the id of the process that has the threads

    def run_from(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal threads_in
        roots = set()
        for x in tensors(outputs):
            roots.add(x._gpu if type(x) is VirtualTensor else None)
        roots_on_gpus = roots - {None}
        if roots_on_gpus:
            machine.require_alive()  # no operator checks this if the graph has only views
        process = os.getpid()
        if threads_in not in (None, process):
            raise RuntimeError(_FORKED)
        threads_in = process
        before = machine.selected.root
        machine.selected.root = None
        if len(roots) == 1:
            machine.selected.root = roots.pop()
        try:
            return run_on_streams(machine, run, outputs, *args, **kwargs)
        except RuntimeError as error:
            if roots_on_gpus and "modified by an inplace operation" in str(error):
                error.args = (errors.with_cuda_types(str(error)),)
            raise
        finally:
            machine.selected.root = before

    return run_from
