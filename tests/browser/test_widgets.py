"""The widgets in a notebook, used with mouse and keyboard."""

import re

import pytest
from endless import ENDLESS

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=1)",
    "lab = labkit.widgets.CopySpeedLab(sizes=[1 << n for n in range(12, 25, 2)])\nlab",
    "lab.figure()",
    f"{ENDLESS}\n\nendless(lab)",
    "panel = labkit.widgets.MemoryPanel()\npanel",
    "tensors = [torch.ones(5 << 20, device='cuda') for _ in range(4)]\ndel tensors[1:]",
)


@pytest.fixture
def page(open_cells):
    return open_cells("widgets", CELLS)


def test_a_learner_predicts_runs_stops_and_runs_again(page, front_end, look):
    from playwright.sync_api import expect

    answer = page.get_by_label("Your prediction:")
    predict, run, stop = (page.locator(".jupyter-button", has_text=name).first for name in ("Predict", "Run", "Stop"))
    message = page.locator(".widget-html-content p[role]").first
    expect(run).to_be_disabled()

    for silly in ("", "banana", "-3", "0"):
        answer.fill(silly)
        predict.click()
        expect(message).to_contain_text("type a number greater than 0")
        expect(run).to_be_disabled()
    look(page, "silly")

    answer.fill("5")
    answer.press("Enter")
    expect(message).to_contain_text("You predict: 5 times")
    run.click()
    expect(message).to_contain_text(re.compile(r"Point \d+ of 1000000"))
    expect(predict).to_be_disabled()
    look(page, "running")
    stop.click()
    expect(message).to_contain_text(re.compile(r"Stopped after \d+ of 1000000 points"))
    expect(run).to_be_enabled()
    look(page, "stopped")

    if not front_end.keeps_focus:
        run.focus()
    expect(run).to_be_focused()
    page.keyboard.press("Space")
    expect(message).to_contain_text("you predicted 5, which is")
    expect(run).to_be_focused()
    picture = page.locator(".widget-html-content img").first
    expect(picture).to_have_attribute("alt", re.compile("Pinned memory copies .* times faster .*Predicted at 16 MiB: 5 times faster"))
    assert picture.evaluate("image => image.complete && image.naturalWidth > 0")
    look(page, "finished")


def test_the_memory_panel_shows_what_a_cell_did(page, look):
    from playwright.sync_api import expect

    shown = page.locator(".widget-html-content", has_text="used on the device.").last
    expect(shown).to_contain_text("cuda:0: 20 MiB allocated")
    picture = page.locator(".widget-html-content img").last
    expect(picture).to_have_attribute("alt", re.compile("Allocated memory peaks at 80 MiB"))
    picture.scroll_into_view_if_needed()
    look(page, "memory")
