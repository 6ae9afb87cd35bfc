"""The lab of pipelines in a notebook, used with mouse and keyboard."""

import re

import pytest
from endless import ENDLESS

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=2)",
    ENDLESS,
    "lab = labkit.widgets.PipelineLab(micro_batches=4)\nendless(lab)\nlab",
)


def test_a_learner_predicts_stops_half_way_and_runs_another_pipeline(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("pipeline_lab", CELLS)
    answer = page.get_by_label("Your prediction:")
    predict, run, stop = (page.locator(".jupyter-button", has_text=name).first for name in ("Predict", "Run", "Stop"))
    message = page.locator(".widget-html-content p[role]").first
    picture = page.locator(".widget-html-content img").first
    for silly, said in (("a lot", "type a number from 0"), ("-1", "type a number from 0"), ("100", "predict less than 100%")):
        answer.fill(silly)
        predict.click()
        expect(message).to_contain_text(said)
        expect(run).to_be_disabled()

    answer.fill("20")
    answer.press("Enter")
    expect(message).to_contain_text("You predict: 20 %")
    run.click()
    expect(message).to_contain_text(re.compile(r"Point \d+ of 1000000: GPipe, forward of micro-batch 1 on cuda:0"))
    expect(page.get_by_label("Link:")).to_be_disabled()
    stop.click()
    expect(message).to_contain_text(re.compile(r"Stopped after \d+ of 1000000 points.*so your prediction of 20% stays open"))
    look(page, "pipeline_stopped", picture)

    run.click()
    expect(message).to_contain_text("With 1F1B the GPUs wait")
    expect(picture).to_have_attribute("alt", re.compile(r"The GPUs wait: \d+% with GPipe, \d+% with 1F1B.*Predicted for 1F1B"))
    look(page, "pipeline_finished", picture)

    for name in ("GPipe", "1F1B"):
        page.get_by_label(name).uncheck()
    expect(run).to_be_disabled()
    answer.fill("50")
    answer.press("Enter")
    run.click()
    expect(message).to_contain_text("Switch at least one schedule on.")

    page.get_by_label("one batch").check()
    page.get_by_label("Link:").select_option("16 times slower")
    answer.fill("50")
    answer.press("Enter")
    run.click()
    expect(message).to_contain_text(re.compile(r"With one batch the GPUs wait \d+% of the step; you predicted 50%, \d+ too low"))
    look(page, "pipeline_slow_link", picture)
