"""The lab of layouts in a notebook: one layout after another, side by side in one figure."""

import re

import pytest

from .labs import Lab

pytestmark = pytest.mark.browser

CELLS = ("import labkit", "from gpulessons.lesson_12.labs import LayoutsLab\n\nLayoutsLab(tensor=1, pipeline=1)")


def test_a_learner_compares_layouts(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("layouts_lab", CELLS)
    lab = Lab(page)
    for silly in ("", "fast", "-1", "1e9"):
        lab.refuses(silly, "type a number greater than 0")
    lab.takes("2", "You predict: 2 s")
    lab.run.click()
    lab.says("32 × 1 × 1 runs out of memory. Divide the model further")
    lab.shows("No layout tried fits.*Predicted: 2 s")
    look(page, "layouts_none_fits", lab.picture)

    page.get_by_label("Tensor:").select_option("8")
    lab.says("First predict")  # another layout, another prediction
    expect(lab.run).to_be_disabled()
    lab.takes("2")
    lab.run.click()
    lab.says(re.compile(r"A step takes 0\.\d+ s; you predicted 2, which is .* A rank's peak is .* GiB"))
    lab.shows("4 × 8 × 1 is the fastest layout tried.*32 × 1 × 1 runs out of memory. 4 × 8 × 1 takes .*Predicted: 2 s")
    look(page, "layouts_compared", lab.picture)

    page.get_by_label("Pipeline:").select_option("16")
    lab.takes("2")
    lab.run.click()
    lab.says("tensor 8 × pipeline 16 asks for 128 GPUs: there are 32")
