"""A lab that a learner wrote in five lines, used by mouse, by keyboard, and after a reload."""

import pytest

from .keyboard import overwrite, press, reach, walk
from .labs import Lab, button
from .pages import FRONT_END

pytestmark = pytest.mark.browser

FUNCTION = """def step_seconds(gpus, width):
    model = torch.nn.DataParallel(torch.nn.Linear(width, width).cuda(), list(range(gpus)))
    batch = torch.ones(64, width, device="cuda")

    def step():
        model(batch).sum().backward()

    return labkit.seconds(step)"""
LAB = """labkit.Lab(
    step_seconds, {"gpus": [1, 2, 4], "width": [64, 128]},
    question="How many times as fast as on one GPU is a step on four?",
    predict="speed-up",
)"""
CELLS = ("import torch\n\nimport labkit\n\nlabkit.use(gpus=4)", FUNCTION, LAB)
SLOWER = "GPUs 1 → 4: .* times slower.*Predicted at 4 GPUs: 2 times"


def test_with_the_mouse_and_after_a_reload(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("own_lab", CELLS)
    lab = Lab(page)
    lab.refuses("twice", "type a number greater than 0")
    lab.takes("3", "You predict: 3 times")
    page.get_by_label("width:").select_option("128")
    lab.says("First predict")  # another width, another prediction
    lab.answer.fill("2")
    lab.predict.click()
    lab.says("You predict: 2 times")
    lab.run.click()
    lab.says("gpus 4, width 128: ")
    lab.says("times. You predicted 2, which is")
    lab.shows(SLOWER)
    look(page, "own_lab", lab.picture)
    if FRONT_END.module != "jupyterlab":  # the classic notebook draws a widget again by itself
        return
    said = lab.message.inner_text()
    page.keyboard.press("Control+S")
    page.wait_for_function("!window.jupyterapp.shell.currentWidget.context.model.dirty")
    page.reload()
    page.locator(FRONT_END.notebook).wait_for()
    page.evaluate(FRONT_END.ready)
    for number in (1, 2):  # the function's cell makes a new function of the same code
        cell = page.locator(FRONT_END.cell).nth(number)
        prompt = cell.locator(".jp-InputPrompt").inner_text()
        cell.locator(FRONT_END.source).click()
        page.keyboard.press("Control+Enter")
        expect(cell).not_to_contain_text(prompt)
    lab = Lab(page)
    lab.says(said)
    lab.shows(SLOWER)
    expect(page.get_by_label("width:")).to_have_value("128")


def test_with_the_keyboard(open_cells, front_end):
    page = open_cells("own_lab_keys", CELLS)
    cell = page.locator(front_end.cell).nth(2)
    front_end.select_cell(page, cell)
    panel = cell.locator(".widget-vbox").first
    assert walk(page, panel) == []
    front_end.select_cell(page, cell)
    lab = Lab(panel)
    reach(page, panel.get_by_label("width:"))
    page.keyboard.press("ArrowDown")
    reach(page, lab.answer)
    overwrite(page, "2")
    page.keyboard.press("Enter")
    lab.says("You predict: 2 times")
    press(page, button(panel, "Run"))
    lab.says("gpus 4, width 128: ")
    lab.shows(SLOWER)
