"""What each block of memory is for: parameters, gradients, activations and so on.

Nothing is looked up while the program runs. The category of a block follows from what holds it at
the start or the end of the recording. Otherwise it follows from the phases in which the block was
allocated and freed. A block that a backward pass allocates and frees again, such as the gradient of
an activation, is in flight. One that outlives the backward pass is the gradient of a parameter. The
buckets of DistributedDataParallel hold gradients, although they are allocated before the first
backward pass, and again in the second forward pass.
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gputrace.events import (
    ACTIVATIONS,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    GRADIENTS,
    IN_FLIGHT,
    OPTIMIZER_STATE,
    OTHER,
    PARAMETERS,
    WORKSPACE,
    Events,
    Stack,
)
from gputrace.holders.tensors import Living, of_kind
from gputrace.phases import Phase, phase_of
from gputrace.replay import RecordedSegment
from virtualgpu import workspaces

CategoryAt = dict[tuple[int, int], int]  # categories by (device, address)

# Functions of a module's class that do nothing with tensors except making parameters.
_MAKES_PARAMETERS = {"__init__", "_apply", "to_empty"}
# Functions of torch/nn/parallel/distributed.py that allocate nothing themselves except buckets.
_MAKES_BUCKETS = {"_ddp_init_helper", "_pre_forward"}


def held(objects: list[Any], living: Living) -> CategoryAt:
    """Return the category of each storage that is alive, from the objects that hold it.

    The category is OTHER if no holder shows what the storage is for.

    Args:
        objects: the objects that the garbage collector tracks, or the relevant ones of them.
        living: the storages and links that were found from these objects.
    """
    gradients = {id(gradient) for _, gradient, how in living.links if how == "grad"}
    buffers: set[int] = set()
    for module in of_kind(objects, torch.nn.Module):
        buffers.update(map(id, vars(module).get("_buffers", {}).values()))
    states: set[int] = set()
    for optimizer in of_kind(objects, torch.optim.Optimizer):
        for slot in vars(optimizer).get("state", {}).values():
            if isinstance(slot, dict):
                states.update(map(id, slot.values()))

    def category(tensor: torch.Tensor) -> int:
        if isinstance(tensor, torch.nn.Parameter) or id(tensor) in buffers:
            return PARAMETERS
        if id(tensor) in gradients:
            return GRADIENTS
        if id(tensor) in states:
            return OPTIMIZER_STATE
        return OTHER

    found = {}
    for key, storage in living.storages.items():
        found[key] = min(map(category, storage.tensors), default=OTHER)
    return found


def workspace_sizes(capability: int) -> set[int]:
    """Return the sizes in bytes of the workspaces of cuBLAS and cuBLASLt.

    `capability` is the major compute capability of the GPU.
    """
    cublas = workspaces.cublas_bytes(capability, os.environ)
    return {cublas, workspaces.cublaslt_bytes(os.environ)} - {0}


def categorised(
    events: Events,
    segments: Iterable[RecordedSegment],
    stacks: list[Stack],
    phases: list[Phase],
    at_start: CategoryAt,
    at_end: CategoryAt,
    workspaces: set[int],
) -> Events:
    """Return the events with their categories, and set those of the blocks in `segments`.

    Args:
        segments: the segments at the start of the recording. Their blocks are changed.
        at_start, at_end: the categories of the storages that were alive then.
        workspaces: the sizes of library workspaces.
    """
    blocks = [(segment.device, block) for segment in segments for block in segment.blocks]
    for device, block in blocks:
        unheld = WORKSPACE if block.requested in workspaces else OTHER
        block.category = at_start.get((device, block.address), unheld)
    category = np.full(len(events), OTHER, np.uint8)
    born = np.flatnonzero(events.action == ALLOC)
    died = events.deaths[born]
    category[born] = _by_phase(events, stacks, phases, born, died)
    for index in born[died < 0].tolist():
        known = at_end.get((int(events.device[index]), int(events.address[index])))
        if known is None and int(events.requested[index]) in workspaces:
            category[index] = WORKSPACE  # it is of the right size, and no tensor holds it
        elif known not in (None, OTHER):
            category[index] = known
    later = np.flatnonzero((events.birth >= 0) & (events.action != ALLOC))
    category[later] = category[events.birth[later]]
    before = {(device, block.address): block.category for device, block in blocks}
    of_blocks = np.isin(events.action, (ALLOC, FREE_REQUESTED, FREE_COMPLETED))
    for index in np.flatnonzero((events.birth < 0) & of_blocks).tolist():
        category[index] = before.get((int(events.device[index]), int(events.address[index])), OTHER)
    return replace(events, category=category)


def _by_phase(
    events: Events,
    stacks: list[Stack],
    phases: list[Phase],
    born: np.ndarray,
    died: np.ndarray,
) -> np.ndarray:
    """Return the categories that follow from when blocks were allocated and freed.

    Args:
        born: the indices of the allocations.
        died: the indices of the frees, or -1.
    """
    names = np.array(["", *(phase.name for phase in phases)])
    birth_phase = phase_of(phases, events.time[born])
    death_phase = np.where(died < 0, -1, phase_of(phases, events.time[died]))
    birth, death = names[birth_phase + 1], names[death_phase + 1]
    makes = np.array([_makes_parameters(stack) for stack in stacks], dtype=bool)
    buckets = np.array([_makes_buckets(stack) for stack in stacks], dtype=bool)
    return np.select(
        [
            buckets[events.stack[born]],
            (birth == "backward") & (birth_phase == death_phase),
            birth == "backward",
            (birth == "step") & (birth_phase != death_phase),
            birth == "step",
            # This rule precedes the next one, because a new model may free one after a backward.
            makes[events.stack[born]],
            (birth == "forward") | (death == "backward"),
        ],
        [GRADIENTS, IN_FLIGHT, GRADIENTS, OPTIMIZER_STATE, OTHER, PARAMETERS, ACTIVATIONS],
        OTHER,
    ).astype(np.uint8)


def _makes_parameters(stack: Stack) -> bool:
    """Return whether the calls in a stack make the parameters of a module."""
    for line in stack:
        in_module = "/nn/modules/" in line.filename.replace("\\", "/")
        if in_module and line.function in _MAKES_PARAMETERS:
            return True
    return False


def _makes_buckets(stack: Stack) -> bool:
    """Return whether the calls in a stack make the buckets of DistributedDataParallel."""
    if not stack or stack[0].function not in _MAKES_BUCKETS:
        return False
    return stack[0].filename.replace("\\", "/").endswith("/nn/parallel/distributed.py")
