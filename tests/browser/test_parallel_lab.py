"""The lab of data parallelism in a notebook, used with mouse and keyboard."""

import re

import pytest
from endless import ENDLESS

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=4)",
    ENDLESS,
    "lab = labkit.widgets.DataParallelLab()\nendless(lab)\nlab",
)


def test_a_learner_predicts_stops_half_way_and_runs_again(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("parallel_lab", CELLS)
    answer = page.get_by_label("Your prediction:")
    predict, run, stop = (page.locator(".jupyter-button", has_text=name).first for name in ("Predict", "Run", "Stop"))
    message = page.locator(".widget-html-content p[role]").first
    for silly in ("four times", "-1", "1e9"):
        answer.fill(silly)
        predict.click()
        expect(message).to_contain_text("type a number greater than 0")
        expect(run).to_be_disabled()

    answer.fill("4")
    answer.press("Enter")
    expect(message).to_contain_text("You predict: 4 times")
    run.click()
    expect(message).to_contain_text(re.compile(r"Point \d+ of 1000000: small model on 1 GPU"))
    stop.click()
    expect(message).to_contain_text(re.compile(r"Stopped after \d+ of 1000000 points.*so your prediction of 4 stays open"))
    expect(run).to_be_enabled()
    look(page, "stopped")

    run.click()
    expect(message).to_contain_text("times as fast on 4 GPUs; you predicted 4, which is")
    picture = page.locator(".widget-html-content img").first
    expect(picture).to_have_attribute(
        "alt", re.compile("small model .* times slower, the large model .* times faster.*Predicted.*Recorded")
    )
    look(page, "finished")
