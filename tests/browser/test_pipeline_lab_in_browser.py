"""The lab of pipelines in a notebook, used with mouse and keyboard."""

import re

import pytest

from .endless import ENDLESS
from .labs import Lab

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=2)",
    ENDLESS,
    "from gpulessons.lesson_04.labs import PipelineLab\n\nlab = PipelineLab(micro_batches=4)\n"
    "endless(lab)\nlab",
)


def test_a_learner_predicts_stops_half_way_and_runs_another_pipeline(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("pipeline_lab", CELLS)
    lab = Lab(page)
    for silly, said in (
        ("a lot", "type a number from 0"),
        ("-1", "type a number from 0"),
        ("100", "predict less than 100%"),
    ):
        lab.refuses(silly, said)
    lab.takes("20", "You predict: 20 %")
    lab.stops_half_way(
        "GPipe, forward of micro-batch 1 on cuda:0", "so your prediction of 20% stays open"
    )
    look(page, "pipeline_stopped", lab.picture)

    lab.run.click()
    lab.says("With 1F1B the GPUs wait")
    lab.shows(r"The GPUs wait: \d+% with GPipe, \d+% with 1F1B.*Predicted for 1F1B")
    look(page, "pipeline_finished", lab.picture)

    for name in ("GPipe", "1F1B"):
        page.get_by_label(name).uncheck()
    expect(lab.run).to_be_disabled()
    lab.takes("50")
    lab.run.click()
    lab.says("Switch at least one schedule on.")

    page.get_by_label("one batch").check()
    page.get_by_label("Link:").select_option("16 times slower")
    lab.takes("50")
    lab.run.click()
    lab.says(
        re.compile(r"With one batch the GPUs wait \d+% of the step; you predicted 50%, \d+ too low")
    )
    look(page, "pipeline_slow_link", lab.picture)
