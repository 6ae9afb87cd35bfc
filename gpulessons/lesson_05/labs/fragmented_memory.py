"""Free memory that cannot be used: the largest request that still succeeds when blocks were freed between live ones."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from matplotlib.axes import Axes

from gpulessons.lesson_05.labs.allocator_by_hand import unused_stream
from gputrace import units
from gputrace.figures.figure import BLACK, BLUE, GREEN, VERMILLION, Figure, binary_scale, darker, label_ends, new_canvas
from labkit import machine
from labkit.labs.experiment import Result, Row, Run, badge, checked_sizes
from labkit.labs.figures import finished, in_style, sources

MIB = 1 << 20
BLOCKS = (2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
MEMORY = 640 * MIB  # that the experiment may reserve
STEP = 2 * MIB  # the largest request is found to within this; every segment's size is a multiple of it
VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # the first that is set counts
LEAST, MOST_BLOCKS = 64 * 1024, 4096
SETTINGS = {"default": "", "max_split_size_mb:64": "max_split_size_mb:64", "expandable_segments": "expandable_segments:True"}
COLUMNS = {"block": "bytes", "setting": "", "largest": "bytes", "free": "bytes", "allocated": "bytes", "reserved": "bytes"}


def fragmentation(blocks: Sequence[int] = BLOCKS, memory: int = MEMORY, settings: Mapping[str, str] = SETTINGS) -> Run:
    """The largest request that succeeds after a first tensor filled the `memory` (bytes) and went, `blocks` of one size (bytes) filled it
    again, and every second block was freed.

    One row a size and setting: `largest` is found by trying, to within 2 MiB; `free` is what no tensor holds of the memory,
    `allocated` and `reserved` are as the blocks were freed. `settings` are those of PYTORCH_CUDA_ALLOC_CONF, by the name to show.

    The experiment works on a stream of its own under a limit of its own, and puts settings and limit back; it empties the cache.
    Virtual GPUs keep no values meanwhile.

    Raises ValueError for sizes outside 64 KiB to `memory`, and for memory that is not there; RuntimeError when no GPU is in use.
    """
    name = badge()
    if type(memory) is not int or memory < LEAST or memory % STEP:
        raise ValueError(f"memory={memory!r}: give a number of bytes that is a multiple of 2 MiB, such as {MEMORY}")
    sizes = checked_sizes("blocks", blocks, memory)
    if sizes[0] < max(LEAST, memory // MOST_BLOCKS):
        raise ValueError(
            f"blocks={list(blocks)!r}: the smallest that {memory} bytes are filled with is {max(LEAST, memory // MOST_BLOCKS)}"
        )
    parameters = {"blocks": sizes, "kept": "every second", "memory": memory, "settings": dict(settings)}
    return Run("fragmentation", parameters, COLUMNS, name, len(sizes) * len(settings), _points(sizes, memory, settings))


def largest_share(result: Result, setting: str) -> dict[int, float]:
    """The largest request that succeeded as a share of what was free, by the size of the blocks."""
    columns = (result.column(name, setting=setting) for name in ("block", "largest", "free"))
    return {block: largest / free for block, largest, free in zip(*columns, strict=True)}


def _points(blocks: Sequence[int], memory: int, settings: Mapping[str, str]) -> Iterator[Row]:
    for block in blocks:
        for name, text in settings.items():
            with machine.in_use().without_values(), _allocator(text, memory), torch.cuda.stream(unused_stream()):
                row = _point(block, memory)
            yield {"block": block, "setting": name, **row}


def _point(block: int, memory: int) -> dict[str, int]:
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    first = _bytes(memory)
    del first
    alive = _fill(block, memory)[::2]
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
    torch._C._accelerator_setAllocatorSettings(text)


# The figure


# Colour, marker and width for each setting: the widest lies under the others, where they are equal.
LOOKS = ((VERMILLION, "s", 6.0), (BLUE, "o", 3.6), (GREEN, "^", 1.8))
ENOUGH = 0.95  # a request of this share of what is free counts as served whole


@in_style
def plot_fragmentation(result: Result, recorded: Result | None = None) -> Figure:
    """The largest request by the size of the blocks, a line for each setting (three at most), below what was free."""
    settings = list(result.parameters["settings"])
    canvas, axes = new_canvas(_finding(result, settings))
    labels = []
    for source, dashes in reversed(sources(result, recorded)):  # the dashes on top
        for setting, look in zip(settings, LOOKS, strict=False):
            labels += _line(axes, source, setting, look, dashes)
    _free(axes, result, settings[0])
    binary_scale(axes, "size of the blocks, of which every second one stays", units.byte_text, most=8)
    axes.set_yscale("log", base=2)
    low, high = axes.get_ylim()
    ticks = [2.0**power for power in range(20, 40, 2) if low <= 2.0**power <= high]
    axes.set_yticks(ticks, [units.byte_text(tick) for tick in ticks])
    axes.set_ylabel("largest request that succeeds")
    label_ends(axes, labels)
    return finished(canvas, result, recorded, _proof)


def _finding(result: Result, settings: list[str]) -> str:
    rows = [row for row in result.rows if row["setting"] == settings[0]]
    if not rows:
        return "Not measured yet: the largest request that succeeds"
    worst = min(rows, key=lambda row: row["largest"] / row["free"])
    if worst["largest"] / worst["free"] >= ENOUGH:
        return f"All {units.byte_text(worst['free'])} that are free serve one request"
    if helped := _helped(result, settings):
        parts = [f"{setting} from {units.byte_text(block)}" for setting, block in helped.items()]
        return f"What helps: {', '.join(parts)}"
    block, largest, free = (units.byte_text(worst[name]) for name in ("block", "largest", "free"))
    return f"Between blocks of {block}, a request gets at most {largest} of {free} free"


def _helped(result: Result, settings: list[str]) -> dict[str, int]:
    """Return, for each setting that helps, the smallest block size at which it does.

    A setting helps if it serves a larger request than the first setting.
    """
    plain = result.by("block", "largest", setting=settings[0])
    rows = sorted(result.rows, key=lambda row: -row["block"])
    helping = (row for row in rows if row["largest"] > plain.get(row["block"], row["largest"]))
    return {row["setting"]: row["block"] for row in helping}


def _line(axes: Axes, source: Result, setting: str, look: tuple[str, str, float], dashes: str) -> list[tuple]:
    blocks, largest = source.column("block", setting=setting), source.column("largest", setting=setting)
    colour, marker, width = look
    if not blocks:
        return []
    if dashes != "-":
        axes.plot(blocks, largest, dashes, color=darker(colour), linewidth=1.2)
        return []
    axes.plot(blocks, largest, dashes, color=colour, marker=marker, linewidth=width, markersize=5 + width / 2)
    return [(blocks[-1], largest[-1], setting, colour)]


def _free(axes: Axes, result: Result, setting: str) -> None:
    """What is free in all, a dotted line above the others."""
    blocks, free = result.column("block", setting=setting), result.column("free", setting=setting)
    if blocks:
        axes.plot(blocks, free, ":", color=BLACK, linewidth=1.2)
        axes.annotate(f"free: {units.byte_text(free[0])}", (blocks[0], free[0]), (0, -6), textcoords="offset points", va="top")


def _proof(result: Result) -> str:
    block = result.rows[-1]["block"]
    parts = [
        f"{units.byte_text(result.column('largest', setting=setting, block=block)[0])} with {setting} ({share[block]:.0%} of what is free)"
        for setting in result.parameters["settings"]
        if block in (share := largest_share(result, setting))
    ]
    return f"between blocks of {units.byte_text(block)} the largest request that succeeds is {', '.join(parts)}."
