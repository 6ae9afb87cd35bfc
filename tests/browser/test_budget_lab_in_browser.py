"""The lab of memory budgets in a notebook, used with mouse and keyboard."""

import re

import pytest

from .endless import ENDLESS
from .labs import Lab

pytestmark = pytest.mark.browser

CELLS = (
    "import labkit\nlabkit.use(gpus=1)",
    ENDLESS,
    "from gpulessons.lesson_09.labs import BudgetLab\nfrom gpulessons.networks import MLP",
    "lab = BudgetLab(MLP(width=256, depth=2), batch=512)\nendless(lab)\nlab",
)


def test_a_learner_predicts_stops_half_way_and_asks_for_a_plan(open_cells, look):
    page = open_cells("budget_lab", CELLS)
    lab, batch = Lab(page), page.get_by_label("Batch, rows:")
    for silly in ("", "a lot", "-1"):
        lab.refuses(silly, "type a number greater than 0")
    lab.takes("0.02", "You predict: 0.02 GiB")
    lab.stops_half_way("as chosen")
    lab.run.click()
    lab.says(re.compile(r"^\s*It takes 0.0208 GiB"))  # and no more that it was stopped
    lab.says("Of 14.4 GiB on Tesla T4: It fits.")
    lab.shows(r"As chosen: 21.3.* MiB in the backward pass.*Predicted: 0.02 GiB")

    batch.fill("plenty")
    batch.press("Tab")
    lab.says("First predict, then run.")
    lab.takes("0.02")
    lab.run.click()
    lab.says("“plenty” is no batch: type a whole number of rows")

    batch.fill("8")
    batch.press("Tab")
    page.get_by_label("Network:").select_option("GPT-2 medium")
    page.get_by_label("Each is:").select_option("T4")
    lab.says("First predict, then run.")
    lab.takes("20")
    lab.run.click()
    lab.says("It does not fit. First change: 4 micro-batches.")
    lab.shows(r"4 micro-batches: 10.2.* GiB")
    look(page, "budget_finished", lab.picture)
