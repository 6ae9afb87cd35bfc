"""A panel that shows what the GPUs do now: memory, utilization, power and temperature, and the last minute of each."""

import asyncio
import time

import ipywidgets as widgets

from labkit.experiments.readings import PERIOD, GpuWatcher
from labkit.widgets.base import Panel
from labkit.widgets.cards import STYLE, cards

SILENT = 5.0  # seconds without an answer after which the driver is called silent
FIRST = 0.1  # seconds from the start to the first drawing


class Monitor(Panel):
    """All GPUs that NVML knows, real or virtual, live. It starts at once.

    A thread reads the figures, so that it also sees what a long cell does. Drawn is between cells, twice a second, because only the
    main thread may draw. Where there is no GPU the monitor says so, and shows one when it comes. It rests while it is not displayed.
    Outside a notebook nothing runs by itself: each `refresh` takes a reading.
    """

    def __init__(self) -> None:
        self._watcher: GpuWatcher | None = None
        self._task: asyncio.Task | None = None
        self._rests = False  # it would watch if it were displayed
        self.start_button = widgets.Button(description="Start", icon="play", tooltip="Forget what was seen and watch the GPUs")
        self.stop_button = widgets.Button(description="Stop", icon="stop", tooltip="Stop watching; the last figures stay")
        self.message = widgets.HTML()
        self.figures = widgets.HTML(layout=widgets.Layout(overflow="auto"))  # in a narrow notebook they can be moved
        # Neither button is ever disabled: that would take the keyboard's place away from who has just pressed it.
        self._when_clicked(self.start_button, self.start)
        self._when_clicked(self.stop_button, self.stop)
        super().__init__([widgets.HBox([self.start_button, self.stop_button]), self.message, self.figures, widgets.HTML(STYLE)])
        self._view_count = 0  # asks the front end to count how often the monitor is displayed
        self.observe(lambda _: self._on_main_thread(self._follow_display), "_view_count")
        self.start()

    def start(self) -> None:
        """Forget what was seen and watch the GPUs."""
        self._end()
        self._rests = False
        self.figures.value = ""
        self._say("Asking the driver.")
        loop = self._loop
        if loop is not None and loop.is_running():
            self._watcher = GpuWatcher(wanted=loop.is_running)
            self._watcher.start()
            self._task = loop.create_task(self._redraw_often(self._watcher))
        else:
            self._watcher = GpuWatcher()
            self.refresh()

    def stop(self) -> None:
        """Watch no more. The last figures stay."""
        self._rests = False
        self._end()
        self._say("Stopped. Press Start to watch again.")

    def refresh(self) -> None:
        """Draw what was seen. Call it from the main thread only. After `stop` it does nothing."""
        watcher = self._watcher
        if watcher is None:
            return
        if watcher.thread is None:
            watcher.look()
        looks = watcher.looks
        if time.monotonic() - watcher.asked > SILENT:
            self._say("The driver has not answered for some seconds. The figures are older than that.")
        elif looks and looks[-1].trouble:
            self._say(f"No GPU to show: {looks[-1].trouble}.")
            self.figures.value = ""
        elif looks:
            count = len(looks[-1].gpus)
            self._say(f"Watching {count} GPU{'s' * (count > 1)}.")
            self.figures.value = cards(looks)

    def close(self) -> None:
        """Take the monitor away, in the notebook and here."""
        self._end()
        super().close()

    async def _redraw_often(self, watcher: GpuWatcher) -> None:
        try:
            await asyncio.sleep(FIRST)
            while watcher.running:
                self.refresh()
                await asyncio.sleep(PERIOD)
            if watcher is self._watcher:  # its thread has ended by itself: say so
                self.stop()
        finally:
            watcher.stop()

    def _end(self) -> None:
        watcher, task = self.__dict__.get("_watcher"), self.__dict__.get("_task")
        self._watcher = self._task = None
        if watcher is not None:
            watcher.stop()
        if task is not None:
            task.cancel()

    def _follow_display(self) -> None:
        """Rest while no front end displays the monitor; go on when one does again."""
        if self._view_count == 0 and self._watcher is not None:
            self._end()
            self._rests = True
            self._say("Resting, because the monitor is not displayed.")
        elif self._view_count and self._rests:
            self.start()
