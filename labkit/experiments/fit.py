"""Does a training fit a GPU, and what should be changed first? The formula of `budget`, asked again and again."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from labkit import machine
from labkit.experiments.budget import BF16_SINCE, MOST_GPUS, Budget, Chip, Setting, budget
from virtualgpu import profiles

IN_USE = "the GPU in use"
SHARE = 0.95  # of the memory, which a step may take: the cache keeps blocks of sizes that nobody asks for again
WORTH = 0.98  # a change that leaves more than this is none


class Gpu(NamedTuple):
    """A GPU as the budget sees it. `memory` is what PyTorch can have of it, in bytes: all but the CUDA context."""

    name: str
    memory: int
    chip: Chip

    def holds(self, found: Budget) -> bool:
        """Whether a training with this budget runs, with some room for what the cache wastes."""
        return found.peak <= SHARE * self.memory


def models() -> tuple[str, ...]:
    """The GPUs to choose from: the one in use, and those that virtual GPUs can be modelled on."""
    return IN_USE, *profiles.names()


def gpu(name: str = IN_USE) -> Gpu:
    """The GPU of this name. Raises ValueError for one that is not known, RuntimeError where none is in use and that was asked for."""
    if name != IN_USE:
        profile = profiles.load(name)
        chip = Chip(profile.major, profile.multiprocessors, profile.max_threads_per_multiprocessor)
        return Gpu(profile.name, profile.total_memory - profile.context_bytes, chip)
    import torch

    used = machine.current()
    if used is None:
        raise RuntimeError("no GPU is in use: labkit.use(gpus=1) gives you one, real or virtual")
    found = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    context = total - free - torch.cuda.memory_reserved(0)  # and whatever other processes hold
    limit = total if used.request.memory is None else min(total, used.request.memory)
    chip = Chip(found.major, found.multi_processor_count, found.max_threads_per_multi_processor)
    return Gpu(found.name, limit - context, chip)


class Step(NamedTuple):
    """One step of a plan: what is changed, the setting that comes of it, and its budget."""

    change: str
    setting: Setting
    budget: Budget


def plan(setting: Setting, on: Gpu) -> Iterator[Step]:
    """The setting as it is, and then change after change until it fits, or nothing helps any more.

    Changes are tried in order of their price. The first that makes it fit is taken; if none does, the one that saves most.
    """
    here = Step("as chosen", setting, budget(setting, on.chip))
    yield here
    while not on.holds(here.budget):
        steps = [Step(name, other, budget(other, on.chip)) for name, other in changes(here.setting, on)]
        steps = [step for step in steps if step.budget.peak < WORTH * here.budget.peak]
        if not steps:
            return
        here = next((step for step in steps if on.holds(step.budget)), min(steps, key=lambda step: step.budget.peak))
        yield here


def changes(setting: Setting, on: Gpu) -> Iterator[tuple[str, Setting]]:
    """What may be changed, in order of the price. The network stays, and the rows of a step.

    Half precision and a fused optimizer cost nothing, micro-batches time for smaller kernels, checkpointing a second forward; momentum
    in place of Adam is another training, and more GPUs cost money.
    """
    half = "bfloat16" if on.chip.major >= BF16_SINCE else "float16"
    if not setting.mixed:
        yield f"autocast to {half}", replace(setting, precision=f"autocast {half}")
    if setting.optimizer == "Adam":
        yield "a fused Adam", replace(setting, optimizer="Adam fused")
    more = [2**power for power in range(1, 21) if setting.micro_batches < 2**power <= setting.batch // setting.gpus]
    if more:
        tried = (replace(setting, micro_batches=count) for count in more)
        fitting = next((other for other in tried if on.holds(budget(other, on.chip))), replace(setting, micro_batches=more[-1]))
        yield f"{fitting.micro_batches} micro-batches", fitting
    if not setting.checkpointing:
        yield "checkpointing", replace(setting, checkpointing=True)
    if setting.optimizer.startswith("Adam"):
        yield "momentum instead of Adam", replace(setting, optimizer="SGD momentum")
    gpus = 2 * setting.gpus
    if gpus <= MOST_GPUS and gpus * setting.micro_batches <= setting.batch:
        yield f"{gpus} GPUs", replace(setting, gpus=gpus)


def answer(steps: list[Step], on: Gpu) -> str:
    """Whether it fits and what to change first, in a sentence or two."""
    first, last = steps[0], steps[-1]
    if on.holds(first.budget):
        return "It fits."
    if len(steps) == 1:
        return "It does not fit, and none of these changes helps: cut the network in pieces, or give each GPU a share of its weights."
    told = "It does not fit. " if first.budget.peak > on.memory else "It hardly fits. "
    told += f"First change: {steps[1].change}"
    then = [step.change for step in steps[2:]]
    told += f"; then {', '.join(then)}." if then else "."
    return told if on.holds(last.budget) else f"{told} Even so it does not fit."
