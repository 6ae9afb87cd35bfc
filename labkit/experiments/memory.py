"""The memory of each GPU in use over time: allocated, reserved, and used on the device by everyone."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit import machine
from labkit.experiments.result import badge

PERIOD = 0.02  # seconds between two looks at a real GPU
MOST = 2000  # samples kept of one GPU

_watching: "MemoryRecorder | None" = None


@dataclass(frozen=True)
class MemorySample:
    """`seconds` since the recorder started, the GPU's index, and bytes: held by tensors, by PyTorch's cache too, by all processes."""

    seconds: float
    device: int
    allocated: int
    reserved: int
    used: int


class MemoryRecorder:
    """Watches the memory of the GPUs in use.

    On virtual GPUs every event of the allocator gives a sample, so a run gives the same samples each time. Real GPUs are looked at
    from a thread, every 20 ms, which reads figures and does nothing else; it misses what comes and goes between two looks.
    One recorder watches at a time: `start` stops the one before.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[MemorySample]] = {}
        self._heard: list[tuple[Any, Callable[..., None]]] = []  # virtual GPUs' allocators and what listens to each
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._start = 0.0
        self.machine: machine.Machine | None = None
        self.badge = ""
        self.looks = 0  # how often something new was seen

    @property
    def running(self) -> bool:
        """Whether it watches."""
        return self is _watching

    @property
    def samples(self) -> list[MemorySample]:
        """All samples, device by device, in order of time."""
        return [sample for device in sorted(self._kept) for sample in list(self._kept[device])]

    def start(self) -> None:
        """Watch the machine in use, forgetting earlier samples. Raises RuntimeError when no GPU is in use."""
        global _watching
        if _watching is not None:
            _watching.stop()
        self.badge = badge()
        _watching, used = self, machine.in_use()
        self.machine, self._kept, self._start = used, {}, machine.host_time()
        if used.virtual:
            self._listen()
        else:
            self._look(used.count)
            self._ended.clear()
            self._thread = threading.Thread(target=self._watch, args=(used.count,), name="labkit memory", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Watch no more; the samples stay."""
        global _watching
        if _watching is self:
            _watching = None
        for allocator, listener in self._heard:
            allocator.unlisten(listener)
        count = 0 if self.machine is None else self.machine.count
        self._heard, self.machine = [], None
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self._look(count)

    def _listen(self) -> None:
        from virtualgpu import instruments

        for gpu in instruments.machine().gpus:
            allocator = gpu.allocator
            self._add(gpu.index, allocator.allocated, allocator.reserved, allocator.total - allocator.free_bytes())
            listener = self._listener(gpu.index, allocator)
            allocator.listen(listener)
            self._heard.append((allocator, listener))

    def _listener(self, index: int, allocator: Any) -> Callable[..., None]:
        def listen(action: str, block: Any, size: int) -> None:
            # The allocator tells of a completed free before it counts it.
            freed = block.size if action == "free_completed" else 0
            self._add(index, allocator.allocated - freed, allocator.reserved, allocator.total - allocator.free_bytes())

        return listen

    def _watch(self, count: int) -> None:
        while not self._ended.wait(PERIOD):
            self._look(count)

    def _look(self, count: int) -> None:
        import torch

        if not torch.cuda.is_initialized():  # to look would create the CUDA context that the learner's first tensor creates
            return
        for index in range(count):
            free, total = torch.cuda.mem_get_info(index)
            self._add(index, torch.cuda.memory_allocated(index), torch.cuda.memory_reserved(index), total - free)

    def _add(self, device: int, allocated: int, reserved: int, used: int) -> None:
        kept = self._kept.setdefault(device, [])
        if kept and (kept[-1].allocated, kept[-1].reserved, kept[-1].used) == (allocated, reserved, used):
            return
        self.looks += 1
        kept.append(MemorySample(machine.host_time() - self._start, device, allocated, reserved, used))
        if len(kept) > MOST:
            self._kept[device] = thinned(kept)


def thinned(samples: list[MemorySample]) -> list[MemorySample]:
    """About half the samples of one device: of each four in a row those with the most and the least allocated, so peaks stay."""
    chosen = []
    for start in range(0, len(samples), 4):
        four = samples[start : start + 4]
        most, least = max(four, key=lambda s: s.allocated), min(four, key=lambda s: s.allocated)
        chosen += sorted({most, least}, key=four.index)
    return chosen
