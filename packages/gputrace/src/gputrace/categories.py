"""What each block was for: parameters, gradients, activations, optimizer state, in flight, workspace, other.

Nothing is looked up while the program runs. A block's category follows from what holds it when the recording starts or ends, and else
from the phase in which it was born and the one in which it died: what a backward makes and frees again, such as the gradients of
activations, is in flight, and what outlives it is the gradient of a parameter. DistributedDataParallel's buckets hold gradients, though
they are made before the first backward, and again in the second forward.
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

CategoryAt = dict[tuple[int, int], int]  # the category of what lies at (device, address)

_MAKES_PARAMETERS = {"__init__", "_apply", "to_empty"}  # functions of a module's class that do nothing else with tensors
_MAKES_BUCKETS = {"_ddp_init_helper", "_pre_forward"}  # functions of torch/nn/parallel/distributed.py that themselves make nothing else


def held(objects: list[Any], living: Living) -> CategoryAt:
    """The categories of the storages that are alive, by what holds them; OTHER where that does not show it.

    `objects` is what the garbage collector tracks, or the relevant of it; `living` is what was found among them.
    """
    gradients = {id(gradient) for _, gradient, how in living.links if how == "grad"}
    buffers = {id(buffer) for module in of_kind(objects, torch.nn.Module) for buffer in vars(module).get("_buffers", {}).values()}
    optimizers = of_kind(objects, torch.optim.Optimizer)
    slots = [slot for optimizer in optimizers for slot in vars(optimizer).get("state", {}).values() if isinstance(slot, dict)]
    states = {id(value) for slot in slots for value in slot.values()}

    def category(tensor: torch.Tensor) -> int:
        if isinstance(tensor, torch.nn.Parameter) or id(tensor) in buffers:
            return PARAMETERS
        return GRADIENTS if id(tensor) in gradients else OPTIMIZER_STATE if id(tensor) in states else OTHER

    return {key: min(map(category, storage.tensors), default=OTHER) for key, storage in living.storages.items()}


def workspace_sizes(capability: int) -> set[int]:
    """Bytes that cuBLAS and cuBLASLt take for a workspace on a GPU of this major compute capability."""
    return {workspaces.cublas_bytes(capability, os.environ), workspaces.cublaslt_bytes(os.environ)} - {0}


def categorised(
    events: Events,
    segments: Iterable[RecordedSegment],
    stacks: list[Stack],
    phases: list[Phase],
    at_start: CategoryAt,
    at_end: CategoryAt,
    workspaces: set[int],
) -> Events:
    """The same events with their categories; those of `segments`, the blocks that were there at the start, are set in place."""
    for segment in segments:
        for block in segment.blocks:
            unheld = WORKSPACE if block.requested in workspaces else OTHER
            block.category = at_start.get((segment.device, block.address), unheld)
    category = np.full(len(events), OTHER, np.uint8)
    born = np.flatnonzero(events.action == ALLOC)
    died = events.deaths[born]
    category[born] = _by_phase(events, stacks, phases, born, died)
    for index in born[died < 0].tolist():
        known = at_end.get((int(events.device[index]), int(events.address[index])))
        if known is None and int(events.requested[index]) in workspaces:
            category[index] = WORKSPACE  # no tensor holds it
        elif known not in (None, OTHER):
            category[index] = known
    later = np.flatnonzero((events.birth >= 0) & (events.action != ALLOC))
    category[later] = category[events.birth[later]]
    before = {(segment.device, block.address): block.category for segment in segments for block in segment.blocks}
    for index in np.flatnonzero((events.birth < 0) & (events.action <= 2)).tolist():
        category[index] = before.get((int(events.device[index]), int(events.address[index])), OTHER)
    return replace(events, category=category)


def _by_phase(events: Events, stacks: list[Stack], phases: list[Phase], born: np.ndarray, died: np.ndarray) -> np.ndarray:
    """The categories that follow from when the blocks were born and died; `died` is -1 for those that live on."""
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
            makes[events.stack[born]],  # before the rule about deaths: a model's may come right after the backward
            (birth == "forward") | (death == "backward"),
        ],
        [GRADIENTS, IN_FLIGHT, GRADIENTS, OPTIMIZER_STATE, OTHER, PARAMETERS, ACTIVATIONS],
        OTHER,
    ).astype(np.uint8)


def _makes_parameters(stack: Stack) -> bool:
    return any(line.function in _MAKES_PARAMETERS and "/nn/modules/" in line.filename.replace("\\", "/") for line in stack)


def _makes_buckets(stack: Stack) -> bool:
    last = stack[0] if stack else None
    return last is not None and last.function in _MAKES_BUCKETS and last.filename.replace("\\", "/").endswith("/nn/parallel/distributed.py")
