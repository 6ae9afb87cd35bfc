"""The lab of shared models in a notebook, used with mouse and keyboard."""

import re

import pytest
from endless import ENDLESS

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=1)",
    ENDLESS,
    "lab = labkit.widgets.SharingLab()\nendless(lab)\nlab",
)


def test_a_learner_chooses_predicts_stops_half_way_and_runs_again(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("sharing_lab", CELLS)
    answer = page.get_by_label("Your prediction:")
    predict, run, stop = (page.locator(".jupyter-button", has_text=name).first for name in ("Predict", "Run", "Stop"))
    message = page.locator(".widget-html-content p[role]").first
    for silly in ("", "much", "-1", "1e9"):
        answer.fill(silly)
        predict.click()
        expect(message).to_contain_text("type a number greater than 0 and up to 1000")
        expect(run).to_be_disabled()

    answer.fill("2")
    answer.press("Enter")
    expect(message).to_contain_text("You predict: 2 GiB")
    page.get_by_label("processes").select_option("6")
    expect(message).to_contain_text("First predict")  # other processes, another prediction
    expect(run).to_be_disabled()
    answer.press("Enter")
    run.click()
    expect(message).to_contain_text(re.compile(r"Point \d+ of 1000000: worker 1 holds context 126 MiB, weights 512 MiB"))
    stop.click()
    expect(message).to_contain_text(re.compile(r"Stopped after \d+ of 1000000 points"))
    expect(run).to_be_enabled()
    look(page, "sharing_stopped")

    page.get_by_label("processes").select_option("3")
    page.get_by_label("way").select_option("shared weights")
    answer.press("Enter")
    run.click()
    expect(message).to_contain_text("Together they take 1.06 GiB; you predicted 2, 0.943 too high.")
    picture = page.locator(".widget-html-content img").first
    expect(picture).to_have_attribute("alt", re.compile("3 processes, shared weights: 1.057 GiB of the GPU.*Predicted: 2 GiB"))
    look(page, "sharing_finished", picture)
