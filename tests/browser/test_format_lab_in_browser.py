"""The lab of number formats in a notebook, used with mouse and keyboard."""

import re

import pytest
from endless import ENDLESS

pytestmark = pytest.mark.browser

CELLS = ("import labkit", ENDLESS, "lab = labkit.widgets.FormatLab()\nendless(lab)\nlab")


def test_a_learner_predicts_stops_half_way_and_types_other_computations(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("format_lab", CELLS)
    computation, answer = page.get_by_label("Computation:"), page.get_by_label("Your prediction:")
    predict, run, stop = (page.locator(".jupyter-button", has_text=name).first for name in ("Predict", "Run", "Stop"))
    message = page.locator(".widget-html-content p[role]").first
    picture = page.locator(".widget-html-content img").first
    for silly in ("", "a third"):
        answer.fill(silly)
        predict.click()
        expect(message).to_contain_text("type a number such as 0.3, or inf, or nan")
        expect(run).to_be_disabled()

    answer.fill("0.3")
    answer.press("Enter")
    expect(message).to_contain_text("You predict: 0.3 in float16")
    run.click()
    expect(message).to_contain_text(re.compile(r"Point \d+ of 1000000: float32"))
    stop.click()
    expect(message).to_contain_text(re.compile(r"Stopped after \d+ of 1000000 points.*so your prediction of 0.3 stays open"))
    run.click()
    expect(message).to_contain_text("float16 makes 0.299804688 of 0.1 + 0.2; you predicted 0.3. A good prediction!")
    expect(picture).to_have_attribute("alt", re.compile(r"Float16: 0.299804688, .* bits 0 01101 0011001100.*Predicted for float16: 0.3"))
    look(page, "formats_finished", picture)

    computation.fill("print(1)")
    computation.press("Tab")
    expect(message).to_contain_text("First predict")
    answer.press("Enter")
    run.click()
    expect(message).to_contain_text("I cannot compute “print(1)”: type numbers")

    computation.fill("300**2")
    computation.press("Tab")
    expect(message).to_contain_text("First predict")
    answer.fill("inf")
    answer.press("Enter")
    run.click()
    expect(message).to_contain_text("float16 makes infinity of 300**2; you predicted inf. A good prediction!")
