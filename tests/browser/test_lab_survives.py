"""A lab in a browser after what befalls it: the page is loaded again, its cell is run again, the kernel is interrupted."""

import re

import pytest
from endless import ENDLESS
from labs import Lab
from pages import FRONT_END, ask

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=1)",
    ENDLESS,
    "lab = labkit.labs.CopySpeedLab()\nlab",
    "endless(lab)",
)


@pytest.mark.skipif(FRONT_END.module != "jupyterlab", reason="the classic notebook draws a widget again by itself")
def test_a_lab_survives_an_interrupt_and_a_reload(open_cells, server, look):
    from playwright.sync_api import expect

    page = open_cells("surviving_lab", CELLS)
    lab = Lab(page)
    lab.takes("3", "You predict: 3 times")
    lab.run.click()
    lab.says(re.compile(r"Point \d+ of 1000000"))
    [kernel] = [session["kernel"]["id"] for session in ask(server, "sessions") if session["path"] == "surviving_lab.ipynb"]
    ask(server, f"kernels/{kernel}/interrupt", "POST")
    lab.says(re.compile(r"Stopped after \d+ of 1000000 points"))
    expect(lab.run).to_be_enabled()
    lab.run.click()
    lab.says("times faster; you predicted 3")
    lab.shows("Pinned memory copies")
    said = lab.message.inner_text()

    cell = page.locator(FRONT_END.cell).nth(2)

    page.keyboard.press("Control+S")
    page.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")
    page.reload()
    page.locator(FRONT_END.notebook).wait_for()
    page.evaluate(FRONT_END.ready)
    lab.says(said)  # the kernel lives, and so does the lab
    cell.locator(FRONT_END.source).click()
    page.keyboard.press("Control+Enter")
    expect(cell).not_to_contain_text("[3]:")
    lab.says(said)
    lab.shows("Pinned memory copies.*Predicted")
    look(page, "lab_brought_up_again", lab.picture)
