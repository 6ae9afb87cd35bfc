"""Will it fit? The memory of a training step by formula: what stays, and the fullest moment of forward, backward and step.

    peak = parameters + optimizer state + batch + workspace            (always there)
         + the most, over all moments, of activations + gradients + what is in flight

In the forward, activations grow layer by layer. In the backward they go, layer by layer, and gradients come. In the optimizer's step all
gradients are there and no activations. Which moment is the fullest depends on the setting, so all are tried.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from labkit import machine
from labkit.lab_parts.layers import FULL, INDEX, LayerMemory, Mode, block_bytes, layers, loss
from labkit.lab_parts.networks import GPT, OPTIMIZERS, PRECISIONS, Network, ResNet
from virtualgpu import profiles
from virtualgpu.workspaces import cublas_bytes, cublaslt_bytes

SPREADS = ("DataParallel", "DDP")
MOST_GPUS, MOST_ROWS = 16, 1 << 20
# Bytes for each byte of the parameters: what an optimizer keeps of every step before, and what it makes for a moment in its step.
STATE = {"SGD": 0, "SGD momentum": 1, "RMSprop": 1, "Adam": 2, "AdamW": 2, "Adam fused": 2}
MOMENT = {"RMSprop": 1, "Adam": 1, "AdamW": 1}  # foreach: the roots of all mean squares at once
JOINED = 10 << 20  # bytes: the buffer of reduce_add_coalesced
BF16_SINCE = 8  # the major compute capability from which fused attention takes bfloat16


@dataclass(frozen=True)
class Setting:
    """How a network is trained. `batch` counts the rows of one optimizer step, over all GPUs and micro-batches.

    Raises ValueError naming the choices.
    """

    network: Network
    batch: int
    precision: str = "float32"
    optimizer: str = "Adam"
    checkpointing: bool = False
    gpus: int = 1
    spread: str = "DDP"
    micro_batches: int = 1

    def __post_init__(self) -> None:
        choices = {"precision": tuple(PRECISIONS), "optimizer": tuple(OPTIMIZERS), "spread": SPREADS, "checkpointing": (False, True)}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(map(repr, allowed))}")
        for name, most in (("batch", MOST_ROWS), ("gpus", MOST_GPUS), ("micro_batches", MOST_ROWS)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r}: give a whole number from 1 to {most}")
        if self.gpus * self.micro_batches > self.batch:
            raise ValueError(f"batch={self.batch}: {self.gpus} GPU(s) and {self.micro_batches} micro-batch(es) need a row each")

    @property
    def mixed(self) -> str:
        """The format that autocast casts to; "" without autocast."""
        return self.precision.removeprefix("autocast ") if PRECISIONS[self.precision] else ""

    @property
    def rows(self) -> int:
        """Of the largest part that a GPU computes at once."""
        return -(-self.micro_rows // self.gpus)

    @property
    def micro_rows(self) -> int:
        """Of the largest micro-batch, over all GPUs."""
        return -(-self.batch // self.micro_batches)


class Chip(NamedTuple):
    """What the formulas ask of a GPU: its major compute capability, its multiprocessors, and the threads that fit on each."""

    major: int
    multiprocessors: int
    threads: int


class Budget(NamedTuple):
    """The fullest moment of a step on the fullest GPU, which is the first: its name, and bytes by what they are for."""

    moment: str
    terms: dict[str, int]

    @property
    def peak(self) -> int:
        return sum(self.terms.values())


class Moment(NamedTuple):
    """Bytes beside what is always there."""

    name: str
    activations: int
    gradients: int
    in_flight: int

    @property
    def bytes(self) -> int:
        return self.activations + self.gradients + self.in_flight


def budget(setting: Setting, chip: Chip) -> Budget:
    """The peak of `max_memory_allocated` in a training step, after the first ones.

    A step is zero_grad, forward and backward of every micro-batch, then the optimizer's step. Raises ValueError for what has no formula.
    """
    if isinstance(setting.network, GPT) and setting.precision == "autocast bfloat16" and chip.major < BF16_SINCE:
        raise ValueError("fused attention takes bfloat16 from Ampere on, and this GPU is older: choose autocast float16")
    found = _on_one_gpu(setting, chip)
    parameters = sum(block_bytes(layer.weights) for layer in found)
    fullest = max(_moments(setting, found, parameters), key=lambda moment: moment.bytes)
    terms = {
        "parameters": parameters + sum(block_bytes(layer.buffers) for layer in found),
        "optimizer state": STATE[setting.optimizer] * parameters,
        "gradients": fullest.gradients,
        "activations": fullest.activations,
        "in flight": fullest.in_flight,
        "buckets": parameters if setting.gpus > 1 and setting.spread == "DDP" else 0,
        "batch": _batch_bytes(setting),
        "workspace": _workspaces(setting, chip),
    }
    return Budget(fullest.name, terms)


# The step


def _moments(setting: Setting, found: list[LayerMemory], parameters: int) -> Iterator[Moment]:
    """Every moment that may be the fullest. With several micro-batches, all gradients are there from the second one on.

    New gradients are added to those at once, but under DataParallel, whose replica on this GPU has gradients of its own until the end.
    """
    there = parameters if setting.micro_batches > 1 else 0
    replica = setting.gpus > 1 and setting.spread == "DataParallel"
    parts = list(_parts(found, setting.checkpointing))
    kept = 0
    for part in parts:
        if part.again:
            kept += part.input  # all that stays of it
            yield from _forward(part, kept, there)
        else:
            yield from _forward(part, kept, there)
            kept += sum(part.stays)
    gradients = 0
    for part in reversed(parts):
        if part.again:
            for moment in _forward(part, kept, there + gradients if replica else there or gradients):
                waiting = moment.in_flight + part.layers[-1].output  # the gradient of its output
                yield moment._replace(name=moment.name.replace("forward", "second forward"), in_flight=waiting)
            kept += sum(part.stays)
        for layer, stays in zip(reversed(part.layers), reversed(part.stays), strict=True):
            yield Moment(f"backward of {layer.name}", kept, there + gradients if replica else there or gradients, layer.backward)
            kept -= stays
            gradients += block_bytes(layer.weights)
        if part.again:
            kept -= part.input
    if replica:
        weights = [FULL * size for layer in found for size in layer.weights]
        yield Moment("the sum of all GPUs' gradients", 0, there + parameters, _sums(weights))
    yield Moment("the optimizer's step", 0, parameters, MOMENT.get(setting.optimizer, 0) * parameters)


def _sums(gradients: list[int]) -> int:
    """Bytes in flight while DataParallel adds the gradients of all GPUs: the sums so far, and joined copies of gradients.

    Gradients are joined up to 10 MiB, a larger one stays by itself (torch._utils._take_tensors). The joined ones of the group before
    are still there when those of the next are made (torch/nn/parallel/comm.py).
    """
    groups: list[list[int]] = [[]]
    for size in gradients:
        if groups[-1] and sum(groups[-1]) + size > JOINED:
            groups.append([])
        groups[-1].append(size)
    most = sums = before = 0
    for group in groups:
        joined = sum(group) if len(group) > 1 else 0
        most = max(most, sums + before + joined, sums + joined + sum(group))
        sums, before = sums + sum(group), joined
    return most


class Part(NamedTuple):
    """Layers that are kept together, or computed `again` together, and what each leaves for the backward."""

    layers: list[LayerMemory]
    stays: list[int]
    input: int
    again: bool


def _parts(found: list[LayerMemory], checkpointing: bool) -> Iterator[Part]:
    """The layers cut into parts. An input stays only once: as the output of the layer before, as a checkpoint's, or for who reads it."""
    before: LayerMemory | None = None
    was_again = False
    for segment, group in groupby(found, key=lambda layer: layer.segment):
        part, stays = list(group), []
        again = checkpointing and segment >= 0
        arriving = before.output if before else 0
        for layer in part:
            first = layer is part[0]
            there = (first and again) or (before is not None and before.keeps_output and not (first and was_again))
            stays.append(layer.kept + (0 if there else layer.reads))
            before = layer
        yield Part(part, stays, arriving, again)
        was_again = again


def _forward(part: Part, kept: int, gradients: int) -> Iterator[Moment]:
    for layer, stays in zip(part.layers, part.stays, strict=True):
        kept += stays
        yield Moment(f"forward of {layer.name}", kept, gradients, layer.forward)


# One of several GPUs


def _on_one_gpu(setting: Setting, chip: Chip) -> list[LayerMemory]:
    """The layers as the first GPU meets them. Under DataParallel it gathers all outputs, and computes the loss of the whole batch."""
    mode = Mode(setting.mixed, chip.multiprocessors, chip.threads)
    found = layers(setting.network, setting.rows, mode)
    if setting.gpus == 1 or setting.spread == "DDP":
        return found
    rows, classes = _outputs(setting.network, setting.micro_rows), _classes(setting.network)
    outputs = mode.size * rows * classes
    gather = LayerMemory("gather", 0, 0, outputs + found[-2].output, outputs, outputs)
    return [*found[:-1], gather, loss(rows, classes, mode)]


def _classes(network: Network) -> int:
    return network.vocabulary if isinstance(network, GPT) else network.classes  # type: ignore[attr-defined]


def _outputs(network: Network, rows: int) -> int:
    """Rows of the network's output: a transformer predicts at each position."""
    return rows * network.tokens if isinstance(network, GPT) else rows


def _batch_bytes(setting: Setting) -> int:
    """Inputs and targets of a whole step, which lie on the GPU; under DDP each GPU has its share."""
    network, rows = setting.network, setting.batch
    if setting.spread == "DDP":
        rows = -(-rows // setting.gpus)
    if isinstance(network, GPT):
        return 2 * INDEX * rows * network.tokens
    numbers = 3 * network.side**2 if isinstance(network, ResNet) else network.width  # type: ignore[attr-defined]
    return FULL * rows * numbers + INDEX * rows


def _workspaces(setting: Setting, chip: Chip) -> int:
    """cuBLAS keeps a workspace for the thread of the forward and one for that of the backward, cuBLASLt one where it adds a bias.

    So it does in the backward where a forward is computed again; and under DataParallel, whose threads hand theirs on.
    """
    library, with_bias = cublas_bytes(chip.major, os.environ), cublaslt_bytes(os.environ)
    threads = setting.gpus > 1 and setting.spread == "DataParallel"
    again = setting.checkpointing and not isinstance(setting.network, ResNet)
    return 2 * library + with_bias * (2 if again or threads else 1)


# The GPU


IN_USE = "the GPU in use"


SHARE = 0.95  # of the memory, which a step may take: the cache keeps blocks of sizes that nobody asks for again


class GpuMemory(NamedTuple):
    """A GPU as the budget sees it. `memory` is what PyTorch can have of it, in bytes: all but the CUDA context."""

    name: str
    memory: int
    chip: Chip

    def holds(self, found: Budget) -> bool:
        """Whether a training with this budget runs, with some room for what the cache wastes."""
        return found.peak <= SHARE * self.memory


def gpu_models() -> tuple[str, ...]:
    """The GPUs to choose from: the one in use, and those that virtual GPUs can be modelled on."""
    return IN_USE, *profiles.names()


def gpu_of(name: str = IN_USE) -> GpuMemory:
    """The GPU of this name. Raises ValueError for one that is not known, RuntimeError where none is in use and that was asked for."""
    if name != IN_USE:
        profile = profiles.load(name)
        chip = Chip(profile.major, profile.multiprocessors, profile.max_threads_per_multiprocessor)
        return GpuMemory(profile.name, profile.total_memory - profile.context_bytes, chip)
    import torch

    used = machine.current()
    if used is None:
        raise RuntimeError("no GPU is in use: labkit.use(gpus=1) gives you one, real or virtual")
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    context = total - free - torch.cuda.memory_reserved(0)  # and whatever other processes hold
    limit = total if used.request.memory is None else min(total, used.request.memory)
    chip = Chip(found.major, found.multi_processor_count, found.max_threads_per_multi_processor)
    return GpuMemory(found.name, limit - context, chip)
