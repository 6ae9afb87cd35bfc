"""A panel that shows the memory of the GPUs in use while cells run."""

import asyncio
from typing import Any

import ipywidgets as widgets

from gputrace import units
from labkit import machine, plots
from labkit.experiments import MemoryRecorder
from labkit.widgets.base import Panel

PERIOD = 0.5  # seconds between two drawings while the kernel is free


class MemoryPanel(Panel):
    """Memory allocated by tensors, reserved by PyTorch and used on the device, over time.

    It starts at once, and redraws after each cell, and between cells as something changes. A new panel takes over from the one
    before. Where there is no GPU it says so, and can be started later.
    """

    def __init__(self) -> None:
        self.recorder = MemoryRecorder()
        self._drawn = -1
        self._task: asyncio.Task | None = None
        self._cells: Any = None  # the notebook's events, while the panel listens to them
        self.start_button = widgets.Button(description="Start", icon="play", tooltip="Forget what was seen and watch the memory")
        self.stop_button = widgets.Button(description="Stop", icon="stop", tooltip="Stop watching; the figure stays")
        self.message = widgets.HTML()
        self.picture = widgets.HTML()
        self._when_clicked(self.start_button, self.start)
        self._when_clicked(self.stop_button, self._stop_clicked)
        super().__init__([widgets.HBox([self.start_button, self.stop_button]), self.message, self.picture])
        self.start()

    def start(self) -> None:
        """Forget what was seen and watch the machine in use."""
        self.stop()
        try:
            self.recorder.start()
        except Exception as error:  # no GPU, or one whose driver does not answer: the panel stays usable
            self._say(f"Not watching. {error}")
            return
        self._set_buttons()
        self._drawn = -1
        self._follow_cells()
        if self._loop is not None and self._loop.is_running():
            self._task = self._loop.create_task(self._redraw_often())
        self.refresh()

    def stop(self) -> None:
        """Watch no more. The figure stays."""
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
        self._keyboard_goes_to(self.start_button)
        self.stop()

    def figure(self) -> plots.Figure:
        """What was seen, as a plain figure. Raises ValueError when nothing was."""
        return plots.memory_over_time(self.recorder.samples, self.recorder.badge)

    def refresh(self) -> None:
        """Draw what is new. Call it from the main thread only."""
        if self.recorder.looks == self._drawn or not (samples := self.recorder.samples):
            return
        self._drawn = self.recorder.looks
        self.picture.value = plots.memory_over_time(samples, self.recorder.badge).html
        last = {sample.device: sample for sample in samples}
        self._say(
            " ".join(
                f"cuda:{device}: {units.byte_text(now.allocated)} allocated, {units.byte_text(now.reserved)} reserved, "
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
        if not self.recorder.running:  # another panel watches now
            self.stop()
        elif self.recorder.machine is not machine.current():
            self.start()  # the lesson changed machines: watch the new one, or say that there is none
        else:
            self.refresh()

    async def _redraw_often(self) -> None:
        """Labs run on the event loop between cells; show what they do to the memory, too."""
        while self.recorder.running:
            await asyncio.sleep(PERIOD)
            self._after_cell()

    def _set_buttons(self) -> None:
        self.stop_button.disabled = not self.recorder.running
