"""The lab of data parallelism in a notebook, used with mouse and keyboard."""

import pytest
from endless import ENDLESS
from labs import Lab

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=4)",
    ENDLESS,
    "lab = labkit.labs.DataParallelLab()\nendless(lab)\nlab",
)


def test_a_learner_predicts_stops_half_way_and_runs_again(open_cells, look):
    page = open_cells("parallel_lab", CELLS)
    lab = Lab(page)
    for silly in ("four times", "-1", "1e9"):
        lab.refuses(silly, "type a number greater than 0")
    lab.takes("4", "You predict: 4 times")
    lab.stops_half_way("small model on 1 GPU", "so your prediction of 4 stays open")
    look(page, "parallel_stopped", lab.message)

    lab.run.click()
    lab.says("times as fast on 4 GPUs; you predicted 4, which is")
    lab.shows("small model .* times slower, the large model .* times faster.*Predicted.*Recorded")
    look(page, "parallel_finished", lab.picture)
