"""The lab of leaks in a notebook, used with mouse and keyboard."""

import pytest
from endless import ENDLESS
from labs import Lab

pytestmark = pytest.mark.browser

CELLS = (
    "import gc\n\nimport torch\n\nimport labkit\n\nlabkit.use(gpus=1)\ngc.freeze()",
    ENDLESS,
    "lab = labkit.labs.LeakLab()\nendless(lab)\nlab",
)


def test_a_learner_switches_predicts_stops_half_way_and_runs_again(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("leak_lab", CELLS)
    lab = Lab(page)
    source = page.locator(".widget-html-content pre").first
    expect(source).to_contain_text("losses.append(loss)")
    for silly in ("", "half", "-1", "1e9"):
        lab.refuses(silly, "type a number from 0 to 1000")
    lab.takes("3", "You predict: 3 MiB a step")
    page.get_by_label("retain_graph").check()
    expect(source).to_contain_text("loss.backward(retain_graph=True)")
    lab.says("First predict")  # another loop, another prediction
    expect(lab.run).to_be_disabled()
    lab.takes("3")
    lab.stops_half_way(".* MiB allocated", "keeps 3.5 MiB a step")
    look(page, "leaks_stopped", lab.message)

    lab.run.click()
    lab.says("you predicted 3, 0.5 too low. The largest tensor that leaked is held by")
    lab.says("the autograd graph of global `losses[")
    lab.shows("Memory grows by 3.5 MiB a step.*Predicted: 3 MiB a step")
    look(page, "leaks_finished", lab.picture)
