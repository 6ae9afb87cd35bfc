"""Every widget worked without a mouse, from the notebook's cells to the widget's last button."""

import re

import pytest

from .endless import ENDLESS
from .keyboard import overwrite, press, reach, walk
from .labs import IMPORTS, LABS, PANELS, Lab, button, message, picture

pytestmark = pytest.mark.browser

SET_UP = (f"import labkit\n{IMPORTS}\nlabkit.use(gpus=4)", ENDLESS)
CELLS = (
    *SET_UP,
    *(f"lab = {made}\nendless(lab)\nlab" for made in LABS.values()),
    *(f"{name}()" for name in PANELS),
)


@pytest.fixture(scope="module")
def page(open_cells_once):
    return open_cells_once("keyboard", CELLS)


@pytest.fixture
def enter(page, front_end):
    """Return a function that moves with keys to a widget's cell and into the widget.

    The function returns the widget's part of the page.
    """

    def go_to(name: str) -> object:
        cell = page.locator(front_end.cell).nth(len(SET_UP) + [*LABS, *PANELS].index(name))
        front_end.select_cell(page, cell)
        panel = cell.locator(".widget-vbox").first
        assert walk(page, panel) == []
        front_end.select_cell(page, cell)
        return panel

    return go_to


@pytest.mark.parametrize("name", LABS)
def test_a_lab_is_asked_stopped_and_run_again(page, enter, front_end, name):
    from playwright.sync_api import expect

    lab = Lab(enter(name))
    reach(page, lab.answer)
    for typed, said in (("x", "type a number"), ("2", "You predict: 2")):
        overwrite(page, typed)
        page.keyboard.press("Enter")
        lab.says(said)

    press(page, lab.run)
    lab.says(re.compile(r"Point \d+ of 1000000"))
    press(page, lab.stop)
    lab.says(re.compile(r"Stopped after \d+ of 1000000 points"))
    if not front_end.keeps_focus:
        lab.run.focus()
    expect(lab.run).to_be_focused()
    page.keyboard.press("Enter")
    lab.ends()
    lab.shows("Predicted")
    expect(lab.run).to_be_focused()


def test_memory_is_allocated_freed_and_given_back(page, enter):
    from playwright.sync_api import expect

    panel = enter("AllocatorLab")
    reach(page, panel.get_by_label("MiB:").first)
    overwrite(page, "1")
    reach(page, panel.get_by_label("Reserved afterwards, you predict:"))
    overwrite(page, "2")
    press(page, button(panel, "Do it"))
    expect(message(panel)).to_contain_text("Now 2 MiB reserved, as you predicted.")
    press(page, button(panel, "Reset"))
    expect(message(panel)).to_contain_text("All blocks are freed")
    reach(page, panel.get_by_label("Next step:"), "Shift+Tab")
    page.keyboard.press("ArrowDown")
    expect(panel.get_by_label("block:")).to_be_visible()


def test_a_program_of_streams_is_changed_and_run(page, enter):
    from playwright.sync_api import expect

    panel = enter("StreamsLab")
    reach(page, panel.get_by_label("stream:"))
    page.keyboard.press("ArrowDown")  # c
    press(page, button(panel, "Insert"), "Enter")
    expect(message(panel)).to_contain_text("Line 2 is new")
    reach(page, panel.get_by_label("Program:"))
    page.keyboard.press("ArrowUp")
    press(page, button(panel, "Remove"), "Enter", "Shift+Tab")
    expect(message(panel)).to_contain_text("Line 2 is out")
    reach(page, panel.get_by_label("You predict:"))
    page.keyboard.press("End")
    press(page, button(panel, "Run"))
    expect(message(panel)).to_contain_text("As you predicted. 1 of 1 predictions came true.")
    expect(picture(panel)).to_be_visible()


def test_a_claim_is_chosen_and_tried(page, enter):
    from playwright.sync_api import expect

    panel = enter("ClaimsPanel")
    reach(page, panel.get_by_label("Claim:"))
    page.keyboard.press("Home")
    expect(message(panel)).to_contain_text("First guess")
    press(page, button(panel, "It is false"))
    expect(message(panel)).to_contain_text(re.compile("^(Right|No): it (holds|is|has|uses)"))


def test_a_watch_is_stopped_and_started(page, enter):
    from playwright.sync_api import expect

    panel = enter("MemoryPanel")
    start, stop = button(panel, "Start"), button(panel, "Stop")
    press(page, stop)
    expect(stop).to_be_disabled()
    press(page, start, "Space", "Shift+Tab")
    expect(message(panel)).to_contain_text("allocated")
    expect(start).to_be_focused()
