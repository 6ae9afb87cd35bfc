"""Widgets on a page: their parts, and what a learner does with each of them."""

import re
from typing import Any

# A cell that imports all labs.
IMPORTS = """
from gpulessons.lesson_00.labs import MemoryPanel
from gpulessons.lesson_01.labs import CopySpeedLab
from gpulessons.lesson_02.labs import StreamsLab
from gpulessons.lesson_03.labs import DataParallelLab
from gpulessons.lesson_04.labs import PipelineLab
from gpulessons.lesson_05.labs import AllocatorLab
from gpulessons.lesson_06.labs import LeakLab
from gpulessons.lesson_07.labs import FormatLab
from gpulessons.lesson_08.labs import SharingLab
from gpulessons.lesson_10.labs import BucketsLab
from gpulessons.lesson_13.labs import ClaimsPanel
"""
# Each lab that predicts and runs, as a cell makes it, and the panels that are used in other ways.
LABS = {
    "CopySpeedLab": "CopySpeedLab(sizes=[1 << n for n in range(12, 25, 4)])",
    "DataParallelLab": "DataParallelLab()",
    "PipelineLab": "PipelineLab(micro_batches=4)",
    "BucketsLab": "BucketsLab(width=1024)",
    "LeakLab": "LeakLab()",
    "SharingLab": "SharingLab()",
    "FormatLab": "FormatLab()",
}
PANELS = ("AllocatorLab", "StreamsLab", "ClaimsPanel", "MemoryPanel")


def button(place: Any, name: str) -> Any:
    """Return the first button with that name in a page or in a part of one."""
    return place.locator(".jupyter-button", has_text=re.compile(rf"^\s*{name}\s*$")).first


def message(place: Any) -> Any:
    """Return the lab's message, which a screen reader reads out."""
    return place.locator(".widget-html-content p[role]").first


def picture(place: Any) -> Any:
    """Return the figure of the first widget."""
    return place.locator(".widget-html-content img").first


class Lab:
    """A lab in a browser. `place` is the page, or the part of it that has one lab."""

    def __init__(self, place: Any) -> None:
        self.answer = place.get_by_label("Your prediction:")
        self.predict, self.stop = button(place, "Predict"), button(place, "Stop")
        self.run = button(place, "(Run|Running…)")
        self.message, self.picture = message(place), picture(place)

    def says(self, text: str | re.Pattern) -> None:
        """Wait until the lab's message matches the text."""
        from playwright.sync_api import expect

        expect(self.message).to_contain_text(text)

    def refuses(self, silly: str, said: str) -> None:
        """Type text that is no prediction, and check that the lab refuses it.

        `silly` is the text, and `said` matches the reason that the lab shows.
        """
        from playwright.sync_api import expect

        self.answer.fill(silly)
        self.predict.click()
        self.says(said)
        expect(self.run).to_be_disabled()

    def takes(self, prediction: str, said: str = "You predict: ") -> None:
        """Type a prediction, press Enter, and wait until the lab's message matches `said`."""
        self.answer.fill(prediction)
        self.answer.press("Enter")
        self.says(said)

    def stops_half_way(self, point: str, left_open: str = "") -> None:
        """Run an endless experiment, and stop it.

        The lab's message must match `point` while it runs, and `left_open` afterwards.
        """
        from playwright.sync_api import expect

        self.run.click()
        self.says(re.compile(rf"Point \d+ of 1000000: {point}"))
        expect(self.predict).to_be_disabled()
        self.stop.click()
        self.says(re.compile(rf"Stopped after \d+ of 1000000 points.*{left_open}"))
        expect(self.run).to_be_enabled()

    def ends(self) -> None:
        """Wait until a stopped run has ended, because only one runs at a time."""
        from playwright.sync_api import expect

        expect(self.message).not_to_contain_text(re.compile("Point|Stopped"))
        expect(self.stop).to_be_disabled()

    def shows(self, words: str) -> None:
        """Wait until the figure is drawn and its words match the pattern."""
        from playwright.sync_api import expect

        expect(self.picture).to_have_attribute("alt", re.compile(words))
        assert self.picture.evaluate("image => image.decode().then(() => image.naturalWidth > 0)")
