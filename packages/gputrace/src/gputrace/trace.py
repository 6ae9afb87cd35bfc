"""A trace: what a recorded block of code did to the memory of each GPU, and when what ran on them."""

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
    from gputrace.explorer.frame import Exploration
    from gputrace.figures.figure import Figure
    from gputrace.oom.explanation import OutOfMemoryExplanation


class Trace(TraceData):
    """What happened to GPU memory in a block of code, and when what ran. `gputrace.record()` makes one; bytes and seconds.

    Attributes:
        events: the columns of `gputrace.events.Events`, in order of time.
        stacks: the stack of Python lines, innermost first, for each number in `events.stack`.
        phases: forward, backward and step, in order of time.
        start: the segments that were there before the first event.
        used: (seconds, device, bytes that everyone holds on it), as often as was looked.
        allocated_at_end, reserved_at_end, totals: bytes by device.
        seconds: how long the recording took, on the clock that `virtualgpu.host_time` reads; on real GPUs, the computer's.
        lost: the number of the oldest events that were forgotten, as the recording held no more.
        error: the text of the out-of-memory error that ended the block; else empty.
        badge, origin: where the numbers come from.
        census: the storages that were alive at the end, where this process recorded them.
        spans: the kernels and copies of the GPUs, and what the host launched and waited for: `gputrace.spans.Spans`.
        waits: streams that wait for other streams: `gputrace.spans.Waits`.
        races: pieces of work that touch the same memory without an order, where that is known: a virtual GPU's.
        lost_spans: the number of the oldest spans and waits that were forgotten.
        no_timeline: why there are no spans; empty where there are, or where nothing ran.
        named_streams: what to call streams, by their handles; `stream_names` numbers the others.
    """

    def lines(self, device: "Device | None" = None) -> "lines_of_code.Lines":
        """What each line of yours did to the memory of a device: a list of `LineMemory`, in order of the source, which prints as a table.

        Its columns: "change", the bytes that the line allocated less those that it freed; "peak", the most that was allocated on the
        device while it worked; "allocated", what it allocated in all; "times", in how many allocations. What a backward pass or an
        optimizer's step does belongs to the line that called it.
        """
        return lines_of_code.by_line(self, self.device_index(device))

    @property
    def oom(self) -> "OutOfMemoryExplanation | None":
        """The out-of-memory error that ended the block, or else the last one in it, explained; None if there was none."""
        from gputrace.oom.explanation import explain

        return explain(self)

    # Leaks

    def leaks(self) -> Leaks:
        """The tensors born in the block that outlived it and are alive now, the largest first, and who holds each.

        Raises RuntimeError for a trace that was loaded from a file: its tensors lived in another process.
        """
        if self.census is None:
            raise RuntimeError("this trace was loaded from a file: ask for leaks() in the process that recorded it")
        return find_leaks(self.alive_at_end(), self.census, self.badge)

    def alive_at_end(self) -> list[Birth]:
        """What was allocated in the block and not freed when it ended, in order of time."""
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

    # Figures, each with `png`, `html`, `alt`, `title` and `save("memory.png")`

    def plot_memory(self, device: "Device | None" = None) -> "Figure":
        """Allocated by category, reserved and used over time, with the phases and the line that made the peak.

        Raises ValueError for a device that the recording does not know.
        """
        from gputrace.figures.memory import trace_memory

        return trace_memory(self, self.device_index(device))

    def plot_devices(self) -> "Figure":
        """What is allocated and reserved on every device over time, one panel a device, on the same scales."""
        from gputrace.figures.devices import trace_devices

        return trace_devices(self)

    def plot_timeline(
        self, device: "Device | None" = None, *, memory: bool = False, start: float = 0.0, end: float | None = None
    ) -> "Figure":
        """What ran when: a lane for the host, for each stream in use and for each copy engine in use, of one device or of all.

        `memory=True` puts the device's memory above it, on the same axis of time. `start` and `end`, in seconds, cut out a part.
        Raises ValueError for a device that the recording does not know and for a part that is none, RuntimeError where no timeline
        was recorded.
        """
        from gputrace.figures.timeline import trace_timeline

        return trace_timeline(self, None if device is None else self.device_index(device), memory=memory, start=start, end=end)

    def plot_segments(self, at: str | float | int = "peak", device: "Device | None" = None) -> "Figure":
        """The map of a device's segments and blocks at one moment; `at` as for `segments`."""
        from gputrace.figures.segments import segment_map

        return segment_map(self, at, self.device_index(device))

    def explore(self) -> "Exploration":
        """All of it to look into: a timeline and a map of the blocks, zoomed, panned and asked under the pointer or by keyboard.

        The last value of a notebook's cell shows it; `trace.explore().save("trace.html")` writes it as a page, which needs no network.
        """
        from gputrace.explorer.frame import Exploration

        return Exploration(self, self.plot_memory() if self.no_timeline else self.plot_timeline(memory=True))

    # Files

    def save(self, path: str | Path) -> None:
        """Write the trace to a file, which `Trace.load` reads. Raises OSError where it cannot be written."""
        files.write(self, path)

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read a trace that `save` wrote. Raises ValueError for another file, OSError where there is none."""
        return cls(**files.read(path))

    def export_snapshot(self, path: str | Path) -> None:
        """Write PyTorch's own snapshot of memory, which https://pytorch.org/memory_viz opens: it reads pickles up to protocol 4.

        Raises ValueError where events were lost: the segments are not known then.
        """
        Path(path).write_bytes(snapshot.content(self))

    def export_chrome(self, path: str | Path) -> None:
        """Write a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open: spans, waits, races and memory.

        Raises RuntimeError where no timeline was recorded, OSError where the file cannot be written: then nothing is left there.
        """
        self.require_timeline()
        chrome.write(self, path)

    def __repr__(self) -> str:
        if "events" not in self.__dict__:
            return f"<Trace: {UNFINISHED}>"
        return lines_of_code.summary(self)
