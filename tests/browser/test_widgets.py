"""The widgets in a notebook, used with mouse and keyboard."""

import re

import pytest

from .endless import ENDLESS
from .labs import Lab

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=1)",
    "from gpulessons.lesson_01.labs import CopySpeedLab\n\n"
    "lab = CopySpeedLab(sizes=[1 << n for n in range(12, 25, 2)])\nlab",
    "from gpulessons.lesson_01 import labs\n\n"
    "labs.plot_copy_speed(labkit.labs.collect(lab.experiment()))",
    f"{ENDLESS}\n\nendless(lab)",
    "from gpulessons.lesson_00.labs import MemoryPanel\n\npanel = MemoryPanel()\npanel",
    "tensors = [torch.ones(5 << 20, device='cuda') for _ in range(4)]\ndel tensors[1:]",
)


@pytest.fixture(scope="module")
def page(open_cells_once):
    return open_cells_once("widgets", CELLS)


def test_a_learner_predicts_runs_stops_and_runs_again(page, front_end, look):
    from playwright.sync_api import expect

    lab = Lab(page)
    expect(lab.run).to_be_disabled()
    for silly in ("", "banana", "-3", "0"):
        lab.refuses(silly, "type a number greater than 0")
    look(page, "silly", lab.message)
    lab.takes("5", "You predict: 5 times")
    lab.stops_half_way("")
    look(page, "stopped", lab.message)

    if not front_end.keeps_focus:
        lab.run.focus()
    expect(lab.run).to_be_focused()
    page.keyboard.press("Space")
    lab.says("you predicted 5, which is")
    expect(lab.run).to_be_focused()
    lab.shows("Pinned memory copies .* times faster .*Predicted at 16 MiB: 5 times faster")
    look(page, "finished", lab.picture)


def test_the_memory_panel_shows_what_a_cell_did(page, look):
    from playwright.sync_api import expect

    shown = page.locator(".widget-html-content", has_text="used on the device.").last
    expect(shown).to_contain_text("cuda:0: 20 MiB allocated")
    picture = page.locator(".widget-html-content img:visible").last
    expect(picture).to_have_attribute("alt", re.compile("Allocated memory peaks at 80 MiB"))
    look(page, "memory", picture)
