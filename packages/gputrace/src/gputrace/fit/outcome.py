"""Question and answer of an attempt: which script runs on which GPU, and what it needed."""

from dataclasses import dataclass, field

PROGRESS = "progress"  # the file in an attempt's folder that says how far the attempt is


@dataclass(frozen=True)
class Wish:
    """Order for one attempt: to run a script's first steps on virtual GPUs.

    `gpus` is the number of GPUs of one model. `change` names a change to the script, or is None.
    `memory` is in bytes. None means the model's own memory.
    """

    script: str
    arguments: list[str]
    module: bool
    like: str
    steps: int
    host: float = 1.0
    memory: int | None = None
    change: str | None = None
    gpus: int = 1


@dataclass
class Outcome:
    """Result of an attempt, in bytes and seconds.

    If there are several GPUs, the memory is that of the fullest one.

    Attributes:
        total: the memory of one GPU.
        fits: False if memory ran out.
        failed: the text and the line of an exception, except if memory ran out.
        line: the line that made the peak.
        steps: how many steps were counted.
        used: the most bytes in use on the GPU, with CUDA's contexts and all processes.
        allocated, reserved: the most bytes that the allocator had given out, and that it held.
        parts: what the peak of `allocated` consists of, and the rest of `reserved`.
        others: what other processes of the script hold on the same GPU.
        step: the median time of the steps after the first.
        idle: the share of a step during which the GPU has nothing to do.
        changed: whether the change found something to change.
        first: the longest time that the step may have taken, if there was only one.
        asked: the line that could not go on without a value, after the first complete step.
        by_hand: whether each backward pass counted as a step, because there is no optimizer.
        made_up: the lines that read made-up values.
        changes: without a change, the names of the changes that would find something.
        resident: the most bytes of this computer's memory that the processes used.
        tries_algorithms: whether cuDNN would try its algorithms at each new shape.
        peaks: the bytes allocated at the peak of each step.
        left: the bytes that each step left behind.
        grows: where memory grows, in words.
        device: the number of the fullest GPU.
        by_device: the most bytes in use on each GPU, by its number.
        loading: how long this computer took for each batch of the slowest line that takes batches
            from a DataLoader.
        workers: the number of this DataLoader's worker processes.
        processes: how many processes the script started, without those that load data.
    """

    total: int = 0
    fits: bool = True
    failed: str = ""
    line: str = ""
    steps: int = 0
    used: int = 0
    allocated: int = 0
    reserved: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    step: float | None = None
    idle: float | None = None
    changed: bool = False
    first: float | None = None
    asked: str = ""
    by_hand: bool = False
    made_up: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    resident: int = 0
    tries_algorithms: bool = False
    peaks: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    grows: str = ""
    device: int = 0
    by_device: list[int] = field(default_factory=list)
    processes: int = 0
    others: int = 0
    loading: list[float] = field(default_factory=list)
    workers: int = 0
