"""The question and the answer of one attempt: which script runs on which GPU, and what it took."""

from dataclasses import dataclass, field

PROGRESS = "progress"  # the file in an attempt's folder that says how far the attempt is


@dataclass(frozen=True)
class Wish:
    """What is tried: a script's steps on `gpus` GPUs of one model, with one change or none.

    `memory` is in bytes, None for the model's own.
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
    """What an attempt found, in bytes and seconds.

    Of several GPUs, memory is that of the fullest one.

    Attributes:
        total: the memory of one GPU.
        fits: False if memory ran out.
        failed: the text of an exception other than for memory, with its line.
        line: the line that made the peak.
        steps: how many steps were counted.
        used: the most that the device holds, with CUDA's contexts and all processes.
        allocated: the most that the allocator has given out. `reserved` is what it holds.
        parts: what the peak of `allocated` consists of, and the rest of `reserved`.
        others: what other processes of the script hold on the same GPU.
        step: the median time of the steps after the first.
        idle: the share of a step in which the GPU has nothing to do.
        changed: whether the change met something that it could change.
        first: the most that a single step took, if there was one step alone.
        asked: the line that could not go on without a value, after the first whole step.
        by_hand: no optimizer was made, so each backward pass was taken for a step.
        made_up: the lines that read values which nothing computed, and got made-up ones.
        changes: without a change, those of CHANGES that would meet something.
        resident: the most of this computer's memory that the processes took.
        tries_algorithms: cuDNN would try its algorithms at each new shape.
        peaks: the bytes allocated at the peak of each step.
        left: the bytes that each step left behind.
        grows: where memory grows.
        device: number of the fullest GPU.
        by_device: the most that each GPU holds, by its number.
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
