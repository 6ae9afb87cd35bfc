"""The figure of one model for several processes: its finding, words, bars and prediction."""

from dataclasses import replace

from matplotlib.patches import Rectangle

from labkit import plots
from labkit.experiments.result import Result
from labkit.experiments.shared_model import COLUMNS, PARTS

MIB = 1 << 20


def measured(*ways, context=100, weights=512, cache=64, processes=3):
    rows = []
    for way in ways:
        first, other = PARTS[way]
        for number in range(processes):
            part = other if number else first
            sizes = (0, 0, 0) if part == "client" else (context, 0 if part == "borrower" else weights, cache)
            named = zip(("context", "weights", "cache"), (size * MIB for size in sizes), strict=True)
            rows.append({"way": way, "process": f"{part} {number}", **dict(named)})
    return Result("shared_model", {"ways": list(ways), "processes": processes}, COLUMNS, rows, "measured on paper")


def bars(canvas):
    return [patch for patch in canvas.axes[0].patches if isinstance(patch, Rectangle) and patch.get_width()]


def test_the_thriftiest_and_the_greediest_are_the_finding():
    figure = plots.shared_model(measured(*PARTS))
    assert figure.title == "For 3 processes, one server takes 676 MiB, a copy each 1.98 GiB"
    assert "A copy each 1.98 GiB (context 300 MiB, weights 1.5 GiB, cache 192 MiB); shared weights 1004 MiB" in figure.alt
    assert figure.alt.endswith("Measured on paper.")


def test_a_bar_has_a_piece_for_each_process_and_kind_and_a_number_at_its_end(drawn):
    plots.shared_model(measured("shared weights"))
    pieces = bars(drawn[0])
    assert sorted(round(piece.get_width() / MIB) for piece in pieces) == [64, 64, 64, 100, 100, 100, 164, 164, 512, 676]
    assert max(piece.get_x() + piece.get_width() for piece in pieces) == 1004 * MIB
    assert "1004 MiB" in [text.get_text() for text in drawn[0].axes[0].texts]


def test_one_way_says_how_many_processes_were_started():
    whole = measured("one server")
    assert plots.shared_model(whole).title == "3 processes, one server: 676 MiB of the GPU"
    assert plots.shared_model(replace(whole, rows=whole.rows[:1])).title == "1 process, one server: 676 MiB of the GPU"
    assert plots.shared_model(replace(whole, rows=[]), prediction=1).title == "Not measured yet: not even one process"


def test_a_recording_is_a_dashed_bar_below(drawn):
    recorded = replace(measured(*PARTS, context=527), badge="recorded on an H200", origin={"machine": "H200"})
    figure = plots.shared_model(measured(*PARTS), recorded)
    assert "Recorded on an H200: a copy each 3.231 GiB" in figure.alt
    assert sum(piece.get_linestyle() == "--" for piece in bars(drawn[0])) == 3


def test_the_prediction_is_hollow_and_its_text_stays_within_the_figure(drawn):
    for prediction in (0.5, 1.5, 40):
        figure = plots.shared_model(measured("a copy each"), prediction=prediction)
        assert f"Predicted: {prediction:g} GiB." in figure.alt
        hollow = next(line for line in drawn[-1].axes[0].lines if line.get_markerfacecolor() == "none")
        assert list(hollow.get_xdata()) == [prediction * 1024 * MIB]
        edges = [text.get_window_extent() for text in drawn[-1].axes[0].texts]
        page = drawn[-1].get_window_extent()
        assert all(page.x0 < box.x0 and box.x1 < page.x1 for box in edges)
