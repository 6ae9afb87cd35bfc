"""Every lab survives an interrupt of the kernel, a reload of the page and a rerun of its cell."""

import re

import pytest

from .endless import ENDLESS
from .labs import IMPORTS, LABS, PANELS, Lab, button, message
from .pages import FRONT_END, ask

pytestmark = pytest.mark.browser

# A claim that only an interrupt can end. It says when it has begun. Later claims are as usual.
CLAIM = """import time

from gpulessons.lesson_13 import labs as claims

panel = claims.ClaimsPanel("empy_cache")
tried = claims.try_claim


def wait(name):
    claims.try_claim = tried
    panel._say("The claim waits")
    time.sleep(600)


claims.try_claim = wait
panel"""
SET_UP = (f"import labkit\n{IMPORTS}\nlabkit.use(gpus=4)", ENDLESS)
CELLS = (
    *SET_UP,
    *(f"lab = {made}\nendless(lab)\nlab" for made in LABS.values()),
    *(CLAIM if name == "ClaimsPanel" else f"{name}()" for name in PANELS),
)


@pytest.fixture(scope="module")
def page(open_cells_once):
    page = open_cells_once("surviving_labs", CELLS)
    FRONT_END.show_whole(page)
    return page


@pytest.fixture
def interrupt(server):
    """A function that interrupts the notebook's kernel, as the button ■ does."""

    def interrupt() -> None:
        [kernel] = [
            session["kernel"]["id"]
            for session in ask(server, "sessions")
            if session["path"] == "surviving_labs.ipynb"
        ]
        ask(server, f"kernels/{kernel}/interrupt", "POST")

    return interrupt


def cell(page: object, name: str) -> object:
    return page.locator(FRONT_END.cell).nth(len(SET_UP) + [*LABS, *PANELS].index(name))


@pytest.mark.parametrize("name", LABS)
def test_an_interrupt_stops_it_and_it_runs_again(page, interrupt, name):
    lab = Lab(cell(page, name))
    lab.takes("2")
    lab.run.click()
    lab.says(re.compile(r"Point \d+ of 1000000"))
    interrupt()
    lab.says(re.compile(r"Stopped after \d+ of 1000000 points"))
    lab.run.click()
    lab.ends()
    lab.shows("Predicted")


def test_an_interrupt_stops_a_claim(page, interrupt):
    from playwright.sync_api import expect

    panel = cell(page, "ClaimsPanel")
    button(panel, "It holds").click()
    expect(message(panel)).to_contain_text("The claim waits")
    interrupt()
    expect(message(panel)).to_contain_text("Interrupted: guess again to run it again.")
    button(panel, "It has a typo").click()
    expect(message(panel)).to_contain_text("Right: it has a typo.")


def test_what_has_nothing_to_stop_works_after_an_interrupt(page, interrupt):
    from playwright.sync_api import expect

    interrupt()
    allocator, streams, memory = (
        cell(page, name) for name in ("AllocatorLab", "StreamsLab", "MemoryPanel")
    )
    button(allocator, "Reset").click()
    expect(message(allocator)).to_contain_text("All blocks are freed")
    streams.get_by_label("You predict:").select_option(index=1)
    button(streams, "Run").click()
    expect(message(streams)).to_contain_text("of 1 predictions came true")
    for name in ("Stop", "Start"):
        button(memory, name).click()
    expect(message(memory)).to_contain_text("allocated")


@pytest.mark.skipif(
    FRONT_END.module != "jupyterlab", reason="the classic notebook draws a widget again by itself"
)
def test_after_a_reload_each_says_what_it_said_and_a_cell_that_runs_again_shows_its_result(
    page, look
):
    from playwright.sync_api import expect

    said = {
        name: message(cell(page, name)).inner_text()
        for name in [*LABS, *PANELS]
        if name != "MemoryPanel"
    }
    page.keyboard.press("Control+S")
    page.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")
    page.reload()
    page.locator(FRONT_END.notebook).wait_for()
    page.evaluate(FRONT_END.ready)
    FRONT_END.show_whole(page)
    for name, text in said.items():  # the kernel lives, and so do they
        expect(message(cell(page, name))).to_have_text(text)
    first = cell(page, "CopySpeedLab")
    lab = Lab(first)
    number = first.locator(".jp-InputPrompt").inner_text()
    first.locator(FRONT_END.source).click()
    page.keyboard.press("Control+Enter")
    expect(first).not_to_contain_text(number)
    lab.says(said["CopySpeedLab"])
    look(page, "lab_brought_up_again", lab.message)
