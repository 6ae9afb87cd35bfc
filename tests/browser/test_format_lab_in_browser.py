"""The lab of number formats in a notebook, used with mouse and keyboard."""

import pytest
from endless import ENDLESS
from labs import Lab

pytestmark = pytest.mark.browser

CELLS = ("import labkit", ENDLESS, "lab = labkit.labs.FormatLab()\nendless(lab)\nlab")


def test_a_learner_predicts_stops_half_way_and_types_other_computations(open_cells, look):
    page = open_cells("format_lab", CELLS)
    lab, computation = Lab(page), page.get_by_label("Computation:")
    for silly in ("", "a third"):
        lab.refuses(silly, "type a number such as 0.3, or inf, or nan")
    lab.takes("0.3", "You predict: 0.3 in float16")
    lab.stops_half_way("float32", "so your prediction of 0.3 stays open")
    lab.run.click()
    lab.says("float16 makes 0.299804688 of 0.1 + 0.2; you predicted 0.3. A good prediction!")
    lab.shows(r"Float16: 0.299804688, .* bits 0 01101 0011001100.*Predicted for float16: 0.3")
    look(page, "formats_finished", lab.picture)

    for typed, prediction, said in (
        ("print(1)", "0.3", "I cannot compute “print(1)”: type numbers"),
        ("300**2", "inf", "float16 makes infinity of 300**2; you predicted inf. A good prediction!"),
    ):
        computation.fill(typed)
        computation.press("Tab")
        lab.says("First predict")  # another computation, another prediction
        lab.takes(prediction)
        lab.run.click()
        lab.says(said)
