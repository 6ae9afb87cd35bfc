"""Four labs in a notebook, used with mouse and keyboard: predicted, stopped half way, run again."""

import pytest

from .endless import ENDLESS
from .labs import Lab

pytestmark = pytest.mark.browser

PARALLEL = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=4)",
    ENDLESS,
    "from gpulessons.lesson_03.labs import DataParallelLab\n\nlab = DataParallelLab()\n"
    "endless(lab)\nlab",
)


def test_the_lab_of_data_parallel(open_cells, look):
    page = open_cells("parallel_lab", PARALLEL)
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


FORMATS = (
    "import labkit",
    ENDLESS,
    "from gpulessons.lesson_07.labs import FormatLab\n\nlab = FormatLab()\nendless(lab)\nlab",
)


def test_the_lab_of_formats(open_cells, look):
    page = open_cells("format_lab", FORMATS)
    lab, computation = Lab(page), page.get_by_label("Computation:")
    for silly in ("", "a third"):
        lab.refuses(silly, "type a number such as 0.3, or inf, or nan")
    lab.takes("0.3", "You predict: 0.3 in float16")
    lab.stops_half_way("float32", "so your prediction of 0.3 stays open")
    lab.run.click()
    lab.says("In float16, 0.1 + 0.2 is 0.299804688; you predicted 0.3. A good prediction!")
    lab.shows(r"Float16: 0.299804688, .* bits 0 01101 0011001100.*Predicted for float16: 0.3")
    look(page, "formats_finished", lab.picture)

    for typed, prediction, said in (
        ("print(1)", "0.3", "I cannot compute “print(1)”: type numbers"),
        (
            "300**2",
            "inf",
            "In float16, 300**2 is infinity; you predicted inf. A good prediction!",
        ),
    ):
        computation.fill(typed)
        computation.press("Tab")
        lab.says("First predict")  # another computation, another prediction
        lab.takes(prediction)
        lab.run.click()
        lab.says(said)


SHARING = (
    "import torch\n\nimport labkit\n\nlabkit.use(gpus=1)",
    ENDLESS,
    "from gpulessons.lesson_08.labs import SharingLab\n\nlab = SharingLab()\nendless(lab)\nlab",
)


def test_the_lab_of_sharing(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("sharing_lab", SHARING)
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


LEAKS = (
    "import gc\n\nimport torch\n\nimport labkit\n\nlabkit.use(gpus=1)\ngc.freeze()",
    ENDLESS,
    "from gpulessons.lesson_06.labs import LeakLab\n\nlab = LeakLab()\nendless(lab)\nlab",
)


def test_the_lab_of_leaks(open_cells, look):
    from playwright.sync_api import expect

    page = open_cells("leak_lab", LEAKS)
    lab = Lab(page)
    source = page.locator(".widget-html-content pre").first
    expect(source).to_contain_text("losses.append(loss)")
    for silly in ("", "half", "-1", "1e9"):
        lab.refuses(silly, "type a number from 0 to 1000")
    lab.takes("3", "You predict: 3 MiB per step")
    page.get_by_label("retain_graph").check()
    expect(source).to_contain_text("loss.backward(retain_graph=True)")
    lab.says("First predict")  # another loop, another prediction
    expect(lab.run).to_be_disabled()
    lab.takes("3")
    lab.stops_half_way(".* MiB allocated", "keeps 3.5 MiB per step")
    look(page, "leaks_stopped", lab.message)

    lab.run.click()
    lab.says("you predicted 3, 0.5 too low. The largest tensor that leaked is held by")
    lab.says("the autograd graph of global losses[")
    lab.shows("Memory grows by 3.5 MiB per step.*Predicted: 3 MiB per step")
    look(page, "leaks_finished", lab.picture)
