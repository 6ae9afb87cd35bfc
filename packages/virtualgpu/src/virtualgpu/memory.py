"""The memory of a storage on a virtual GPU, which makes its tensors device tensors."""

from typing import Any

from virtualgpu import front_end
from virtualgpu.allocator import Block
from virtualgpu.clock.machine_clock import StreamTime
from virtualgpu.errors import NOT_KEPT
from virtualgpu.hardware import Gpu
from virtualgpu.processes.exported_blocks import ExportedBlock


def unwatched(gpu: Gpu) -> StreamTime | None:
    """Return the current stream of a GPU if the race detector does not compare its operators.

    Returns None if the detector compares them. For other streams, only writes are noted in each
    memory.
    """
    if not gpu.machine.several_streams:
        return gpu.default_stream
    stream = gpu.machine.races.lone.stream
    if stream is not None and stream.device_index == gpu.index:
        return stream
    return None


class Memory:
    """The memory of one storage on a GPU. It belongs to the storage and is freed with it.

    block: the allocator's block, or None for an empty storage
    born: the call that made it, which is a Python instruction or a node of a backward pass
    kept: the bytes of values on the host, or None for a storage without values
    switched_off: whether values were not computed when this storage lost its values
    export: the block as other processes see it
    access_log: the accesses by streams, an `AccessLog` of virtualgpu.streams.accesses, or None
    writer: the stream that last wrote here without a note in `access_log`, or None
    written: the number of its launch
    """

    __slots__ = (
        "__weakref__",
        "access_log",
        "block",
        "born",
        "export",
        "gpu",
        "kept",
        "switched_off",
        "writer",
        "written",
    )

    def __init__(self, gpu: Gpu, block: Block | None, kept: int | None) -> None:
        machine = gpu.machine
        self.gpu = gpu
        self.block = block
        self.born = machine.selected.call
        self.kept = kept
        self.switched_off = False
        self.export: ExportedBlock | None = None
        self.access_log: Any = None
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
        """Whether another process can see the values."""
        return self.export is not None

    def forget(self) -> None:
        """Drop the values of this storage, because they are not known any more."""
        if self.kept is not None:
            self.switched_off = not self.gpu.machine.values
            self.gpu.machine.kept_bytes -= self.kept
            self.gpu.machine.valueless_storages += 1
            self.kept = None

    def remember(self, kept: int | None) -> None:
        """Undo `forget`, so that the storage has `kept` bytes of values again."""
        if self.kept is None and kept is not None:
            self.gpu.machine.valueless_storages -= 1
            self.gpu.machine.kept_bytes += kept
            self.kept = kept

    @property
    def address(self) -> int:
        """The address of the storage on the GPU, or 0 if the storage is empty."""
        if self.block is None:
            return 0
        return self.block.address

    @property
    def requested(self) -> int:
        """The bytes that were requested for the storage."""
        if self.block is None:
            return 0
        return self.block.requested


def require_values(memory: Memory) -> None:
    """Raise RuntimeError for a storage whose values were not kept."""
    if memory.kept is None:
        text = f"the values of this tensor on {memory.gpu.device} {NOT_KEPT}, because"
        raise RuntimeError(f"{text} {_why_not_kept(memory)}")


def _why_not_kept(memory: Memory) -> str:
    """Return the text of an error: why the values were not kept, and what the program can do."""
    machine = memory.gpu.machine
    known = "Only its shape and its memory are known."
    if not machine.values:
        return f"nothing is computed here (values=False). {known}"
    if memory.switched_off:
        return (
            f"an operator wrote to it while nothing was computed (values=False). {known} "
            "Make tensors inside the function that runs without values."
        )
    why = "they take too much host memory"
    if machine.was_without_values:
        why += ", or come from a tensor that was written while nothing was computed (values=False)"
    return (
        f"{why}. {known} Use smaller tensors, or set LABKIT_HOST_BUDGET (bytes of host memory for "
        f"values on all GPUs) before {front_end.name()} starts."
    )
