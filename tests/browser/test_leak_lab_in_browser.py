"""The lab of leaks in a notebook, used with mouse and keyboard."""

import re

import pytest
from endless import ENDLESS

pytestmark = pytest.mark.browser

CELLS = (
    "import gc\n\nimport torch\n\nimport labkit\n\nlabkit.use(gpus=1)\ngc.freeze()",
    ENDLESS,
    "lab = labkit.widgets.LeakLab()\nendless(lab)\nlab",
)


def test_a_learner_switches_predicts_stops_half_way_and_runs_again(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("leak_lab", CELLS)
    answer = page.get_by_label("Your prediction:")
    predict, run, stop = (page.locator(".jupyter-button", has_text=name).first for name in ("Predict", "Run", "Stop"))
    message = page.locator(".widget-html-content p[role]").first
    source = page.locator(".widget-html-content pre").first
    expect(source).to_contain_text("losses.append(loss)")
    for silly in ("", "half", "-1", "1e9"):
        answer.fill(silly)
        predict.click()
        expect(message).to_contain_text("type a number from 0 to 1000")
        expect(run).to_be_disabled()

    answer.fill("3")
    answer.press("Enter")
    expect(message).to_contain_text("You predict: 3 MiB a step")
    page.get_by_label("retain_graph").check()
    expect(source).to_contain_text("loss.backward(retain_graph=True)")
    expect(message).to_contain_text("First predict")  # another loop, another prediction
    expect(run).to_be_disabled()
    answer.press("Enter")
    run.click()
    expect(message).to_contain_text(re.compile(r"Point \d+ of 1000000: .* MiB allocated"))
    stop.click()
    expect(message).to_contain_text(re.compile(r"Stopped after \d+ of 1000000 points.*keeps 3.5 MiB a step"))
    expect(run).to_be_enabled()
    look(page, "leaks_stopped")

    run.click()
    expect(message).to_contain_text("you predicted 3, 0.5 too low. The largest tensor that leaked is held by")
    expect(message).to_contain_text("the autograd graph of global `losses[")
    picture = page.locator(".widget-html-content img").first
    expect(picture).to_have_attribute("alt", re.compile("Memory grows by 3.5 MiB a step.*Predicted: 3 MiB a step"))
    look(page, "leaks_finished", picture)
