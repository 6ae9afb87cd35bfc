"""The lab of memory budgets in a notebook, used with mouse and keyboard."""

import re

import pytest
from endless import ENDLESS

pytestmark = pytest.mark.browser

CELLS = (
    "import labkit\nlabkit.use(gpus=1)",
    ENDLESS,
    "lab = labkit.widgets.BudgetLab(labkit.experiments.MLP(width=256, depth=2), batch=512)\nendless(lab)\nlab",
)


def test_a_learner_predicts_stops_half_way_and_asks_for_a_plan(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("budget_lab", CELLS)
    batch, answer = page.get_by_label("Batch, rows:"), page.get_by_label("Your prediction:")
    predict, run, stop = (page.locator(".jupyter-button", has_text=name).first for name in ("Predict", "Run", "Stop"))
    message = page.locator(".widget-html-content p[role]").first
    picture = page.locator(".widget-html-content img").first
    for silly in ("", "a lot", "-1"):
        answer.fill(silly)
        predict.click()
        expect(message).to_contain_text("type a number greater than 0")
        expect(run).to_be_disabled()

    answer.fill("0.02")
    answer.press("Enter")
    expect(message).to_contain_text("You predict: 0.02 GiB")
    run.click()
    expect(message).to_contain_text(re.compile(r"Point \d+ of 1000000: as chosen"))
    expect(batch).to_be_disabled()
    stop.click()
    expect(message).to_contain_text(re.compile(r"Stopped after \d+ of 1000000 points"))
    run.click()
    expect(message).to_contain_text("The formula says 0.0208 GiB")
    expect(message).to_contain_text("Measured: 0.0208 GiB. Of 14.4 GiB on Tesla T4: It fits.")
    expect(picture).to_have_attribute("alt", re.compile(r"As chosen: 21.3.* MiB at backward of ReLU 2.*Predicted: 0.02 GiB"))

    batch.fill("plenty")
    batch.press("Tab")
    expect(message).to_contain_text("First predict, then run.")
    answer.press("Enter")
    run.click()
    expect(message).to_contain_text("“plenty” is no batch: type a whole number of rows")

    batch.fill("8")
    batch.press("Tab")
    page.get_by_label("Network:").select_option("GPT-2 medium")
    page.get_by_label("Each is:").select_option("T4")
    expect(message).to_contain_text("First predict, then run.")
    answer.fill("20")
    answer.press("Enter")
    run.click()
    expect(message).to_contain_text("It does not fit. First change: 4 micro-batches.")
    expect(picture).to_have_attribute("alt", re.compile(r"4 micro-batches: 10.2.* GiB"))
    look(page, "budget_finished", picture)
