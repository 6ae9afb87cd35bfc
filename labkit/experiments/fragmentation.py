"""Free memory that cannot be used: the largest request that still succeeds when blocks were freed between live ones."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from labkit import machine
from labkit.experiments.allocator_by_hand import unused_stream
from labkit.experiments.result import Result, Row, Run, badge, checked_sizes

MIB = 1 << 20
BLOCKS = (2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
MEMORY = 640 * MIB  # that the experiment may reserve
STEP = 2 * MIB  # the largest request is found to within this; every segment's size is a multiple of it
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first that is set counts
LEAST, MOST_BLOCKS = 64 * 1024, 4096
# Which of the blocks, in order of their addresses, stay alive.
PATTERNS = {
    "every second": lambda index, count: index % 2 == 0,
    "every fourth": lambda index, count: index % 4 == 0,
    "the first half": lambda index, count: index < count // 2,
}
SETTINGS = {"default": "", "max_split_size_mb:64": "max_split_size_mb:64", "expandable_segments": "expandable_segments:True"}
COLUMNS = {"block": "bytes", "setting": "", "largest": "bytes", "free": "bytes", "allocated": "bytes", "reserved": "bytes"}


def fragmentation(
    blocks: Sequence[int] = BLOCKS, kept: str = "every second", memory: int = MEMORY, settings: Mapping[str, str] = SETTINGS
) -> Run:
    """The largest request that succeeds after a first tensor filled the `memory` (bytes) and went, `blocks` of one size (bytes) filled it
    again, and only some of them were `kept`: "every second", "every fourth" or "the first half".

    One row a size and setting: `largest` is found by trying, to within 2 MiB; `free` is what no tensor holds of the memory,
    `allocated` and `reserved` are as the blocks were freed. `settings` are those of PYTORCH_CUDA_ALLOC_CONF, by the name to show.

    The experiment works on a stream of its own under a limit of its own, and puts settings and limit back; it empties the cache.
    Virtual GPUs keep no values meanwhile.

    Raises ValueError for sizes outside 64 KiB to `memory`, for another pattern, and for memory that is not there; RuntimeError when no
    GPU is in use.
    """
    name = badge()
    if type(memory) is not int or memory < LEAST or memory % STEP:
        raise ValueError(f"memory={memory!r}: give a number of bytes that is a multiple of 2 MiB, such as {MEMORY}")
    if kept not in PATTERNS:
        raise ValueError(f"kept={kept!r}: choose one of {', '.join(map(repr, PATTERNS))}")
    sizes = checked_sizes("blocks", blocks, memory)
    if sizes[0] < max(LEAST, memory // MOST_BLOCKS):
        raise ValueError(
            f"blocks={list(blocks)!r}: the smallest that {memory} bytes are filled with is {max(LEAST, memory // MOST_BLOCKS)}"
        )
    if not settings:
        raise ValueError('settings={}: give at least one as name: text, such as {"default": ""}')
    parameters = {"blocks": sizes, "kept": kept, "memory": memory, "settings": dict(settings)}
    return Run("fragmentation", parameters, COLUMNS, name, len(sizes) * len(settings), _points(sizes, kept, memory, settings))


def largest_share(result: Result, setting: str) -> dict[int, float]:
    """The largest request that succeeded as a share of what was free, by the size of the blocks."""
    columns = (result.column(name, setting=setting) for name in ("block", "largest", "free"))
    return {block: largest / free for block, largest, free in zip(*columns, strict=True)}


def _points(blocks: Sequence[int], kept: str, memory: int, settings: Mapping[str, str]) -> Iterator[Row]:
    for block in blocks:
        for name, text in settings.items():
            with machine.in_use().without_values(), _allocator(text, memory), torch.cuda.stream(unused_stream()):
                row = _point(block, kept, memory)
            yield {"block": block, "setting": name, **row}


def _point(block: int, kept: str, memory: int) -> dict[str, int]:
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    first = _bytes(memory)
    del first
    tensors = _fill(block, memory)
    alive = [tensor for index, tensor in enumerate(tensors) if PATTERNS[kept](index, len(tensors))]
    del tensors
    allocated = torch.cuda.memory_allocated() - held
    row = {"free": memory - allocated, "allocated": allocated, "reserved": torch.cuda.memory_reserved() - reserved}
    largest = _largest_request(memory - allocated)
    del alive
    return {"largest": largest, **row}


def _fill(block: int, memory: int) -> list[torch.Tensor]:
    """As many blocks as the memory holds, in order of their addresses."""
    tensors: list[torch.Tensor] = []
    while len(tensors) < memory // block:
        try:
            tensors.append(_bytes(block))
        except torch.OutOfMemoryError:
            break  # a setting that leaves gaps has no room for the last ones
    return sorted(tensors, key=torch.Tensor.data_ptr)


def _largest_request(free: int) -> int:
    """The most bytes, in steps of 2 MiB, that one tensor can get: by halving what is not known yet."""
    least, too_much = 0, free // STEP + 1
    while too_much - least > 1:
        middle = (least + too_much) // 2
        try:
            _bytes(middle * STEP)
        except torch.OutOfMemoryError:
            too_much = middle
        else:
            least = middle
    return least * STEP


def _bytes(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cuda")


@contextmanager
def _allocator(settings: str, memory: int) -> Iterator[None]:
    """In the block, the allocator has these settings, and may reserve so many bytes more than what it cannot give back now."""
    device = torch.cuda.current_device()
    before = torch.cuda.get_per_process_memory_fraction(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    limit = torch.cuda.memory_reserved() + memory
    if limit > min(before, 1.0) * total:
        raise ValueError(f"memory={memory}: the GPU has {total} bytes, of which this process may take {int(before * total)}")
    # A little more than the limit, for a share of the memory is no whole number of bytes; less than the smallest segment more.
    torch.cuda.set_per_process_memory_fraction(min((limit + MIB) / total, 1.0), device)
    try:
        _configure(settings)
        yield
    finally:
        torch.cuda.empty_cache()
        _configure(next((os.environ[name] for name in VARIABLES if name in os.environ), ""))
        torch.cuda.set_per_process_memory_fraction(before, device)


def _configure(settings: str) -> None:
    """New settings for later requests. PyTorch keeps the kind of its segments where the text does not name it."""
    text = settings if "expandable_segments" in settings else ",".join(filter(None, ("expandable_segments:False", settings)))
    configure = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # until torch 2.8 there is only the other
    (configure or torch.cuda.memory._set_allocator_settings)(text)
