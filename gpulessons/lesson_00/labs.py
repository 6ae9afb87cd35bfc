"""Record and draw the allocated, reserved and used memory of each GPU over time."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ipywidgets as widgets
from matplotlib.ticker import MaxNLocator

from gputrace import units
from gputrace.figures.figure import BLACK, BLUE, VERMILLION, Figure, label_ends, new_canvas
from labkit import machine
from labkit.labs.experiment import badge
from labkit.labs.figures import badged, in_style
from labkit.labs.panel import Panel

SAMPLING_PERIOD = 0.02  # seconds between two samples of a real GPU
MOST_SAMPLES = 2000  # kept for each GPU

_watching: "MemoryRecorder | None" = None


@dataclass(frozen=True)
class MemorySample:
    """Memory of one GPU at one moment, in bytes."""

    seconds: float  # since the recorder started
    device: int  # index of the GPU
    allocated: int  # by tensors
    reserved: int  # by PyTorch: for tensors and for its cache
    used: int  # by all processes


class MemoryRecorder:
    """Recorder of the memory of the GPUs in use.

    On virtual GPUs every event of the allocator adds a sample, so a run gives the same samples each
    time. On real GPUs a thread measures every 20 ms. It misses memory that is allocated and freed
    between two samples. Only one recorder runs at a time. `start` stops the one before.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[MemorySample]] = {}
        # Each virtual GPU's allocator, and the function that listens to it.
        self._heard: list[tuple[Any, Callable[..., None]]] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._start = 0.0
        self.machine: machine.GPUsInUse | None = None
        self.badge = ""
        self.changes = 0  # how many samples differed from the one before

    @property
    def running(self) -> bool:
        """Whether this recorder is recording."""
        return self is _watching

    @property
    def samples(self) -> list[MemorySample]:
        """All samples, sorted by device and then by time."""
        return [sample for device in sorted(self._kept) for sample in list(self._kept[device])]

    def start(self) -> None:
        """Delete earlier samples, and start to record the GPUs in use.

        Raises RuntimeError if no GPU is in use.
        """
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
            self._thread = threading.Thread(
                target=self._watch, args=(used.count,), name="labkit memory", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """Stop recording, and keep the samples."""
        global _watching
        if _watching is self:
            _watching = None
        for allocator, listener in self._heard:
            allocator.unlisten(listener)
        count = 0
        if self.machine is not None:
            count = self.machine.count
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
            self._add(
                gpu.index,
                allocator.allocated,
                allocator.reserved,
                allocator.total - allocator.free_bytes(),
            )
            listener = self._listener(gpu.index, allocator)
            allocator.listen(listener)
            self._heard.append((allocator, listener))

    def _listener(self, index: int, allocator: Any) -> Callable[..., None]:
        def listen(action: str, block: Any, size: int) -> None:
            # The allocator reports a completed free before it subtracts the freed bytes.
            freed = 0
            if action == "free_completed":
                freed = block.size
            self._add(
                index,
                allocator.allocated - freed,
                allocator.reserved,
                allocator.total - allocator.free_bytes(),
            )

        return listen

    def _watch(self, count: int) -> None:
        while not self._ended.wait(SAMPLING_PERIOD):
            self._look(count)

    def _look(self, count: int) -> None:
        import torch

        # The learner's first tensor should create the CUDA context. Reading the memory would, too.
        if not torch.cuda.is_initialized():
            return
        for index in range(count):
            free, total = torch.cuda.mem_get_info(index)
            self._add(
                index,
                torch.cuda.memory_allocated(index),
                torch.cuda.memory_reserved(index),
                total - free,
            )

    def _add(self, device: int, allocated: int, reserved: int, used: int) -> None:
        now = machine.host_time() - self._start
        sample = MemorySample(now, device, allocated, reserved, used)
        kept = self._kept.setdefault(device, [])
        if kept and kept[-1] == replace(sample, seconds=kept[-1].seconds):
            return
        self.changes += 1
        kept.append(sample)
        if len(kept) > MOST_SAMPLES:
            self._kept[device] = thinned(kept)


def thinned(samples: list[MemorySample]) -> list[MemorySample]:
    """Return about half the samples of one device, with all peaks.

    Among four successive samples, those with the most and the least allocated memory are kept.
    """
    chosen = []
    for start in range(0, len(samples), 4):
        four = samples[start : start + 4]
        most, least = max(four, key=lambda s: s.allocated), min(four, key=lambda s: s.allocated)
        chosen += sorted({most, least}, key=four.index)
    return chosen


# The figure

LINES = (  # what is drawn, its label, its colour and its line width
    ("used", "used on the device", BLACK, 1.2),
    ("reserved", "reserved", VERMILLION, 2),
    ("allocated", "allocated", BLUE, 2),
)


@in_style
def plot_memory_over_time(samples: Sequence[MemorySample], badge: str) -> Figure:
    """Draw the bytes allocated, reserved and used over time, with one panel per GPU.

    Raises ValueError if there are no samples.
    """
    if not samples:
        raise ValueError("There are no samples of memory to draw, because nothing was recorded.")
    devices = sorted({sample.device for sample in samples})
    peaks = {
        name: max(getattr(sample, name) for sample in samples)
        for name in ("allocated", "reserved", "used")
    }
    size, unit = units.byte_unit(peaks["used"])
    end = max(sample.seconds for sample in samples)
    if end == 0:
        end = 1e-6  # The lines of a single moment need some length.
    period, short = units.time_unit(end)
    finding = (
        f"Allocated memory peaks at {units.byte_text(peaks['allocated'])}, "
        f"reserved memory at {units.byte_text(peaks['reserved'])}"
    )
    canvas, *panels = new_canvas(finding, rows=len(devices))
    for axes, device in zip(panels, devices, strict=True):
        mine = [sample for sample in samples if sample.device == device]
        times = [sample.seconds / period for sample in mine] + [end / period]
        labels = []
        for name, label, colour, width in LINES:
            heights = [getattr(sample, name) / size for sample in mine]
            axes.step(times, [*heights, heights[-1]], where="post", color=colour, linewidth=width)
            labels.append((times[-1], heights[-1], label, colour))
        axes.set(ylim=(0, None), ylabel="memory" if len(devices) == 1 else f"cuda:{device}")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} {unit}")
        axes.yaxis.set_major_locator(MaxNLocator(max(2, 6 // len(devices))))
        axes.margins(x=0)
        label_ends(axes, labels)
    panels[-1].set_xlabel(f"time since the start, {short}")
    used = f"All processes together use at most {units.byte_text(peaks['used'])} of a device."
    gpus = "1 GPU"
    if len(devices) != 1:
        gpus = f"{len(devices)} GPUs"
    return badged(canvas, badge, used, f"{gpus}, {len(samples)} samples.")


# The widget


DRAW_PERIOD = 0.5  # seconds between two drawings while the kernel is idle


class MemoryPanel(Panel):
    """Panel that shows the memory allocated by tensors, reserved by PyTorch and used on the device.

    The panel starts at once. It redraws the curves after each cell, and also between cells if
    something has changed. A new panel stops the one before. Without a GPU the panel says so, and
    can be started later.
    """

    shows = ""  # its figure changes twice a second
    question = (
        "How much memory do tensors hold, does PyTorch reserve, and is used on the device, "
        "over time?"
    )

    def __init__(self) -> None:
        self.recorder = MemoryRecorder()
        self._drawn = -1
        self._task: asyncio.Task | None = None
        self._cells: Any = None  # the notebook's events, while the panel listens to them
        self.start_button = widgets.Button(
            description="Start", icon="play", tooltip="Forget what was seen and watch the memory"
        )
        self.stop_button = widgets.Button(
            description="Stop", icon="stop", tooltip="Stop watching; the figure stays"
        )
        self.message = widgets.HTML()
        self.picture = widgets.HTML()
        self._when_clicked(self.start_button, self.start, at_once=True)
        self._when_clicked(self.stop_button, self._stop_clicked, at_once=True)
        super().__init__(
            [widgets.HBox([self.start_button, self.stop_button]), self.message, self.picture]
        )
        self.start()

    def start(self) -> None:
        """Delete earlier samples, and start to record the GPUs in use."""
        self.stop()
        try:
            self.recorder.start()
        except Exception as error:  # No GPU, or its driver does not answer. The panel stays usable.
            self._say(f"Not watching. {error}")
            return
        self._set_buttons()
        self._drawn = -1
        self._follow_cells()
        if self._loop is not None and self._loop.is_running():
            self._task = self._loop.create_task(self._redraw_often())
        self.refresh()

    def stop(self) -> None:
        """Stop recording, and keep the figure."""
        if self._cells is not None:
            self._cells.unregister("post_run_cell", self._after_cell)
            self._cells = None
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self.recorder.running:
            self.refresh()
            self.recorder.stop()
        self._set_buttons()

    def _stop_clicked(self) -> None:
        self._focus(self.start_button)
        self.stop()

    def figure(self) -> Figure:
        """Return the figure of the samples. Raises ValueError if there are none."""
        return plot_memory_over_time(self.recorder.samples, self.recorder.badge)

    def refresh(self) -> None:
        """Redraw the figure if there are new samples. Call this from the main thread only."""
        if self.recorder.changes == self._drawn:
            return
        samples = self.recorder.samples
        if not samples:
            return
        self._drawn = self.recorder.changes
        self.picture.value = plot_memory_over_time(samples, self.recorder.badge).html
        last = {sample.device: sample for sample in samples}
        self._say(
            " ".join(
                f"cuda:{device}: {units.byte_text(now.allocated)} allocated, "
                f"{units.byte_text(now.reserved)} reserved, "
                f"{units.byte_text(now.used)} used on the device."
                for device, now in last.items()
            )
        )

    def _follow_cells(self) -> None:
        from IPython import get_ipython

        shell = get_ipython()
        if shell is not None:
            self._cells = shell.events
            self._cells.register("post_run_cell", self._after_cell)

    def _after_cell(self, *_: Any) -> None:
        if not self.recorder.running:  # Another panel records now.
            self.stop()
        elif self.recorder.machine is not machine.current():
            self.start()  # The lesson changed its GPUs.
        else:
            self.refresh()

    async def _redraw_often(self) -> None:
        """Redraw twice per second, because labs can change the memory between cells, too."""
        while self.recorder.running:
            await asyncio.sleep(DRAW_PERIOD)
            self._after_cell()

    def _set_buttons(self) -> None:
        self.stop_button.disabled = not self.recorder.running
