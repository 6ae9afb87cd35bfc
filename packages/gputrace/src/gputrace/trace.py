"""Trace: what a block of code did to the memory of each GPU, and what ran on the GPUs when."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gputrace import lines as lines_of_code
from gputrace.events import ALLOC, CATEGORIES
from gputrace.files import archive as files
from gputrace.files import chrome, snapshot
from gputrace.leaks import Birth, Leaks, find_leaks
from gputrace.trace_data import UNFINISHED, Device, TraceData

if TYPE_CHECKING:
    from gputrace.comparison import Comparison
    from gputrace.explorer.frame import Exploration
    from gputrace.figures.figure import Figure
    from gputrace.oom.explanation import OutOfMemoryExplanation


class Trace(TraceData):
    """Recording of a block of code, made by `gputrace.record()`.

    All sizes are in bytes, and all times in seconds from the start of the recording.

    Attributes:
        events: the memory events in order of time, as the columns of `gputrace.events.Events`.
        stacks: the Python lines of each stack, innermost first. `events.stack` has its number.
        phases: the forward passes, backward passes and optimizer steps, in order of time.
        start: the segments that existed before the first event.
        used: (seconds, device, bytes in use by all processes), for each time it was measured.
        allocated_at_end, reserved_at_end, totals: bytes by device.
        seconds: how long the recording took, on the clock of `virtualgpu.host_time`. On real GPUs,
            this is the computer's clock.
        lost: how many of the oldest events were dropped, because the recording was full.
        error: the text of the out-of-memory error that ended the block, or "".
        badge, origin: where the numbers come from.
        census: the storages that were alive at the end. None if another process recorded them.
        computers: the time of this computer, for each process. Only `labkit trace` measures it. It
            differs from run to run, also with virtual GPUs.
        spans: the kernels and copies of the GPUs, and the launches and waits of the host, as
            `gputrace.spans.Spans`.
        waits: the waits of streams for other streams, as `gputrace.spans.Waits`.
        races: pairs of launches that access the same memory without an order. They are known only
            for virtual GPUs.
        hosts: for a trace of several ranks, the host's threads and phases of each rank, as
            `gputrace.spans.RankHost`.
        lost_spans: how many of the oldest spans and waits were dropped.
        no_timeline: why there are no spans. "" if there are spans, or if nothing ran.
        named_streams: names of streams by their handles. `stream_names` numbers the others.
    """

    def lines(self, device: "Device | None" = None) -> "lines_of_code.Lines":
        """Return what each line of your code did to the memory of a device.

        By default, this is the device with the highest peak. The result is a list of `LineMemory`
        in order of the source, which prints as a table. Its columns are:

        - "change": the bytes that the line allocated, minus those that it freed.
        - "peak": the most bytes that were allocated on the device while the line ran.
        - "allocated": the bytes that the line allocated in total.
        - "times": the number of its allocations.

        A backward pass or an optimizer's step belongs to the line that called it.
        """
        return lines_of_code.by_line(self, self.device_index(device))

    @property
    def oom(self) -> "OutOfMemoryExplanation | None":
        """Explanation of the out-of-memory error that ended the block, or of the last one in it.

        None if memory did not run out.
        """
        from gputrace.oom.explanation import explain

        return explain(self)

    def compare(self, after: "Trace") -> "Comparison":
        """Return what changed from this trace to another, by line and by kernel.

        Lines are matched by their text, so that lines above them may be added or removed. The
        result prints as tables, and `save("changes.html")` writes a page.
        """
        from gputrace.comparison import Comparison

        return Comparison(self, after)

    # Leaks

    def leaks(self) -> Leaks:
        """Return the tensors that were allocated in the block and are still alive.

        The largest comes first, and each has the names of what keeps it alive.

        Raises:
            RuntimeError: the trace was loaded from a file, so its tensors were in another process.
        """
        if self.census is None:
            raise RuntimeError(
                "this trace was loaded from a file. Call leaks() in the process that recorded it"
            )
        return find_leaks(self.alive_at_end(), self.census, self.badge)

    def alive_at_end(self) -> list[Birth]:
        """Return the allocations in the block that were not freed at its end, in order of time."""
        events = self.events
        kept = np.flatnonzero((events.action == ALLOC) & (events.deaths < 0)).tolist()
        return [
            Birth(
                int(events.device[index]),
                int(events.address[index]),
                int(events.size[index]),
                self.line(int(events.stack[index])),
                CATEGORIES[events.category[index]],
            )
            for index in kept
        ]

    # Figures. Each has `png`, `html`, `alt`, `title` and `save("memory.png")`.

    def plot_memory(self, device: "Device | None" = None) -> "Figure":
        """Draw the memory over time: allocated by category, reserved, and used by all processes.

        The figure shows the phases and the line at the peak. By default, it is about the device
        with the highest peak.

        Raises:
            ValueError: the recording does not have this device.
        """
        from gputrace.figures.memory import trace_memory

        return trace_memory(self, self.device_index(device))

    def plot_devices(self) -> "Figure":
        """Draw the allocated and the reserved memory of every device over time, on equal scales."""
        from gputrace.figures.devices import trace_devices

        return trace_devices(self)

    def plot_timeline(
        self,
        device: "Device | None" = None,
        *,
        memory: bool = False,
        start: float = 0.0,
        end: float | None = None,
    ) -> "Figure":
        """Draw what ran when, with a lane for the host, for each stream and for each copy engine.

        Args:
            device: the device. None draws all of them.
            memory: whether to draw the device's memory above, on the same time axis.
            start, end: the part to draw, in seconds.

        Raises:
            ValueError: the recording does not have this device, or the part is empty.
            RuntimeError: no timeline was recorded.
        """
        from gputrace.figures.timeline import trace_timeline

        index = None
        if device is not None:
            index = self.device_index(device)
        return trace_timeline(self, index, memory=memory, start=start, end=end)

    def plot_segments(
        self, at: str | float | int = "peak", device: "Device | None" = None
    ) -> "Figure":
        """Draw a map of a device's segments and blocks at one moment.

        `at` is a moment as for `segments`.
        """
        from gputrace.figures.segments import segment_map

        return segment_map(self, at, self.device_index(device))

    def explore(self) -> "Exploration":
        """Return an explorer with zoom and details: the timeline and a map of the blocks.

        A notebook shows it as the output of a cell. `trace.explore().save("trace.html")` writes it
        to a page, which needs no network.
        """
        from gputrace.explorer.frame import Exploration

        picture = self.plot_memory() if self.no_timeline else self.plot_timeline(memory=True)
        return Exploration(self, picture)

    # Files

    def save(self, path: str | Path) -> None:
        """Write the trace to a file, which `Trace.load` reads. Raise OSError if that fails."""
        files.write(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a trace that `save` wrote.

        Raises:
            ValueError: the file is something else.
            OSError: the file cannot be read.
        """
        return cls(**files.read(path))

    def export_snapshot(self, path: str | Path) -> None:
        """Write a memory snapshot of PyTorch's format, which https://pytorch.org/memory_viz opens.

        Raises:
            ValueError: events were lost, so the segments are not known.
        """
        Path(path).write_bytes(snapshot.content(self))

    def export_chrome(self, path: str | Path) -> None:
        """Write a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

        It has spans, waits, races and memory.

        Raises:
            RuntimeError: no timeline was recorded.
            OSError: the file cannot be written. Then no part of it is left.
        """
        self.require_timeline()
        chrome.write(self, path)

    def __repr__(self) -> str:
        if "events" not in self.__dict__:
            return f"<Trace: {UNFINISHED}>"
        return lines_of_code.summary(self)
