"""The lab of shared models in a notebook, used with mouse and keyboard."""

import pytest
from endless import ENDLESS
from labs import Lab

pytestmark = pytest.mark.browser

CELLS = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=1)",
    ENDLESS,
    "lab = labkit.labs.SharingLab()\nendless(lab)\nlab",
)


def test_a_learner_chooses_predicts_stops_half_way_and_runs_again(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("sharing_lab", CELLS)
    lab = Lab(page)
    for silly in ("", "much", "-1", "1e9"):
        lab.refuses(silly, "type a number greater than 0 and up to 1000")
    lab.takes("2", "You predict: 2 GiB")
    page.get_by_label("processes").select_option("6")
    lab.says("First predict")  # other processes, another prediction
    expect(lab.run).to_be_disabled()
    lab.takes("2")
    lab.stops_half_way("worker 1 holds context 126 MiB, weights 512 MiB")
    look(page, "sharing_stopped", lab.message)

    page.get_by_label("processes").select_option("3")
    page.get_by_label("way").select_option("shared weights")
    lab.takes("2")
    lab.run.click()
    lab.says("Together they take 1.06 GiB; you predicted 2, 0.943 too high.")
    lab.shows("3 processes, shared weights: 1.057 GiB of the GPU.*Predicted: 2 GiB")
    look(page, "sharing_finished", lab.picture)
