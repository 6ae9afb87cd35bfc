"""What makes a tensor one of a virtual GPU: the memory that hangs on its storage."""

from typing import Any

from virtualgpu import front_end
from virtualgpu.allocator import Block
from virtualgpu.clock.machine_clock import StreamTime
from virtualgpu.errors import NOT_KEPT
from virtualgpu.hardware import Gpu
from virtualgpu.processes.exported_blocks import ExportedBlock


def unwatched(gpu: Gpu) -> StreamTime | None:
    """The stream of a GPU whose work the search for races does not look at, only which memory it has written."""
    if not gpu.machine.several_streams:
        return gpu.default_stream
    stream = gpu.machine.races.lone.stream
    return stream if stream is not None and stream.device_index == gpu.index else None


class Memory:
    """What a storage holds on a GPU. It hangs on the storage's Python object, so it dies with the last view of the storage.

    `kept` is the number of bytes of values on the host, None for a storage without values.
    `switched_off` says that values were not computed when this storage lost its values.
    """

    __slots__ = (
        "__weakref__",
        "block",
        "born",
        "export",
        "gpu",
        "kept",
        "switched_off",
        "access_log",
        "writer",
        "written",
    )

    def __init__(self, gpu: Gpu, block: Block | None, kept: int | None) -> None:
        machine = gpu.machine
        self.gpu = gpu
        self.block = block
        self.born = machine.selected.call  # the call that made it: a Python instruction or a node of a backward
        self.kept = kept
        self.switched_off = False
        self.export: ExportedBlock | None = None  # to other processes
        self.access_log: Any = None  # who has touched it, once the GPU has several streams (a Place of virtualgpu.streams.accesses)
        # Of a stream whose work nobody looks at: the number of the piece that wrote here last, now of the one that makes this.
        self.writer = unwatched(gpu) if machine.several_streams else gpu.default_stream
        self.written = 0 if self.writer is None else self.writer.count + 1
        if kept is None:
            machine.valueless_storages += 1
        else:
            machine.kept_bytes += kept

    def __del__(self) -> None:
        if self.kept is None:
            self.gpu.machine.valueless_storages -= 1
        else:
            self.gpu.machine.kept_bytes -= self.kept
        if self.block is not None:
            if self.access_log is not None and self.gpu.machine.several_streams:
                self.gpu.machine.races.freed(self.gpu, self.block, self.access_log)
            if self.export is not None:
                self.gpu.machine.pending_frees.add(self.gpu.allocator, self.block, self.export)
            else:
                self.gpu.allocator.free(self.block)

    @property
    def shared(self) -> bool:
        """May another process see the values?"""
        return self.export is not None

    def forget(self) -> None:
        """The values are known no longer."""
        if self.kept is not None:
            self.switched_off = not self.gpu.machine.values
            self.gpu.machine.kept_bytes -= self.kept
            self.gpu.machine.valueless_storages += 1
            self.kept = None

    def remember(self, kept: int | None) -> None:
        """Undo `forget`. The storage has values of `kept` bytes again."""
        if self.kept is None and kept is not None:
            self.gpu.machine.valueless_storages -= 1
            self.gpu.machine.kept_bytes += kept
            self.kept = kept

    @property
    def address(self) -> int:
        return 0 if self.block is None else self.block.address

    @property
    def requested(self) -> int:
        """Bytes that a storage may have here."""
        return 0 if self.block is None else self.block.requested


def require_values(memory: Memory) -> None:
    """Raises RuntimeError for a storage whose values were not kept."""
    if memory.kept is None:
        text = f"the values of this tensor on {memory.gpu.device} {NOT_KEPT}, because"
        raise RuntimeError(f"{text} {_why_not_kept(memory)}")


def _why_not_kept(memory: Memory) -> str:
    """Return the reason, and what the program can do."""
    machine = memory.gpu.machine
    known = "only its shape and its memory are known."
    if not machine.values:
        return f"nothing is computed here (values=False): {known}"
    if memory.switched_off:
        return (
            f"an operator wrote to it while nothing was computed (values=False): {known} "
            "Make tensors inside the function that runs without values."
        )
    why = "they take too much host memory"
    if machine.was_without_values:
        why += ", or come from a tensor that was written while nothing was computed (values=False)"
    return (
        f"{why}: {known} Use smaller tensors, or set LABKIT_HOST_BUDGET (bytes of host memory for "
        f"values on all GPUs) before {front_end.name()} starts."
    )
