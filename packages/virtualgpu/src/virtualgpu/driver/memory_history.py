"""Memory snapshots and histories of a virtual machine, as `torch.cuda.memory` asks for them."""

import os
import sys
from collections.abc import Collection
from types import FrameType
from typing import Any

from virtualgpu.allocator.pool import NO_POOL
from virtualgpu.allocator.settings import UNLIMITED
from virtualgpu.errors import unsupported
from virtualgpu.front_end import CALLS_OPERATORS, HERE
from virtualgpu.hardware import Gpu, Machine
from virtualgpu.script import run_script
from virtualgpu.stream_numbers import raw_stream


def python_frames() -> list[dict[str, Any]]:
    """Return the caller's Python stack, innermost frame first.

    The virtual GPU's own functions and the code that started the script are left out.
    """
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not run_script.__code__:
        filename = frame.f_code.co_filename
        if not filename.startswith(HERE) and not filename.endswith(CALLS_OPERATORS):
            name, line = frame.f_code.co_name, frame.f_lineno
            frames.append({"name": name, "filename": filename, "line": line})
        frame = frame.f_back
    return frames


def snapshot(machine: Machine, pool: tuple[int, int, bool] | None = None) -> dict[str, Any]:
    """Return a snapshot of the machine's memory as PyTorch's C++ does.

    With `pool`, the snapshot has only the segments of this pool.
    """
    settings = machine.gpus[0].allocator.settings
    divisions = settings.divisions
    chosen = pool[:2] if pool else NO_POOL
    segments: list[dict[str, Any]] = []
    for gpu in machine.gpus:
        segments += _with_raw_streams(gpu, gpu.allocator.segments(chosen))
    max_split_size = settings.max_split_size
    if max_split_size == UNLIMITED:
        max_split_size = -1
    return {
        "segments": segments,
        "device_traces": [_with_raw_streams(gpu, gpu.allocator.history()) for gpu in machine.gpus],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "max_split_size": max_split_size,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
            "expandable_segments": settings.expandable_segments,
            "roundup_power2_divisions": {str(1 << i): count for i, count in enumerate(divisions)},
        },
        "external_annotations": [],
    }


def _with_raw_streams(gpu: Gpu, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of a snapshot with CUDA's numbers for the streams.

    The allocator of `gpu` made the entries, with PyTorch's stream ids. In a real snapshot, "stream"
    is the stream's `cudaStream_t`.
    """
    return [entry | {"stream": raw_stream(gpu.index, entry["stream"])} for entry in entries]


def answers(machine: Machine) -> dict[str, Any]:
    """Return the functions of `torch._C` that torch.cuda.memory calls for histories."""
    metadata = {"text": ""}

    def record(
        enabled: str | None,
        context: str | None,
        stacks: str,
        max_entries: int,
        clear_history: bool = False,
        compile_context: bool = False,
        annotations: bool = False,
        skip_actions: Collection[str] = (),
        pinned_memory: bool = False,
        cuda: bool = True,
    ) -> None:
        """Start the history of every GPU's memory, or end it if `enabled` is None.

        The arguments are those of PyTorch's C++ function. torch 2.14 added the last two of them.
        `stacks` is ignored: only Python stacks are kept, because a virtual GPU has no C++ code of
        interest.
        """
        if pinned_memory:
            raise unsupported("a history of pinned memory")
        for gpu in machine.gpus:
            gpu.allocator.record_history(
                enabled if cuda else None,
                max_entries,
                python_frames,
                context=context,
                clock=lambda: round(machine.clock.host * 1e6),
                clear=clear_history,
                metadata=lambda: metadata["text"],
                skipped=skip_actions,
            )

    def record_legacy(
        enabled: bool,
        record_context: bool = True,
        max_entries: int = 1,
        alloc_context: bool = False,
        cpp: bool = False,
        *rest: Any,
    ) -> None:
        """Start or end the history of every GPU's memory, for older versions of torch.

        The arguments are those of C++ in these versions.
        """
        context = None
        if record_context:
            context = "alloc" if alloc_context else "state"
        record("all" if enabled else None, context, "python", max_entries, *rest)

    def traceback_of(address: int) -> list[dict[str, Any]] | None:
        """Return the Python stack that allocated the block at an address, or None if unknown."""
        for gpu in machine.gpus:
            for segment in gpu.allocator.segments():
                for block in segment["blocks"]:
                    if block["address"] == address and block["frames"]:
                        return block["frames"]
        return None

    return {
        "_cuda_record_memory_history": record,
        "_cuda_record_memory_history_legacy": record_legacy,
        "_cuda_memorySnapshot": lambda pool=None: snapshot(machine, pool),
        "_cuda_allocationTraceback": traceback_of,
        "_cuda_setMemoryMetadata": lambda text: metadata.update(text=text),
        "_cuda_getMemoryMetadata": lambda: metadata["text"],
    }
