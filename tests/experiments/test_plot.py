"""The figure of a result: what it shows, what it says, and what it refuses."""

import pytest
from matplotlib.colors import to_hex

from gputrace.figures.figure import BLACK, BLUE, VERMILLION
from labkit.experiments.result import Result

TIMES = {(1, 1024): 8e-3, (2, 1024): 16e-3, (4, 1024): 24e-3, (1, 4096): 1.6, (2, 4096): 1.0, (4, 4096): 0.8}


def result(**changes):
    fields = {
        "name": "step_seconds",
        "parameters": {"gpus": [1, 2, 4], "width": [1024, 4096]},
        "columns": {"gpus": "", "width": "", "step_seconds": "seconds"},
        "rows": [{"gpus": gpus, "width": width, "step_seconds": time} for (gpus, width), time in TIMES.items()],
        "badge": "virtual GPU, modelled on paper",
    }
    return Result(**(fields | changes))


def peaks():
    """A result with two columns that were measured."""
    rows = [{"kind": kind, "peak_bytes": 1024 * n, "loss": 0.5} for n, kind in enumerate(("a", "b", "c"), 1)]
    return Result("peak", {"kind": ["a", "b", "c"]}, {"kind": "", "peak_bytes": "bytes", "loss": ""}, rows, "on paper")


@pytest.fixture
def recording(monkeypatch):
    """What a real GPU gave: times three times as long."""
    rows = [row | {"step_seconds": 3 * row["step_seconds"]} for row in result().rows]
    made = result(rows=rows, badge="recorded on paper")
    monkeypatch.setattr(Result, "recorded", lambda self, gpu=None: made)


def lines(canvas):
    """The lines with points, by colour and style."""
    found = [line for line in canvas.axes[0].lines if line.get_marker() not in ("", "None", None)]
    return {(to_hex(line.get_color()).upper(), line.get_linestyle()): line for line in found}


def texts(canvas):
    return [text.get_text() for text in canvas.axes[0].texts]


def test_a_line_for_each_value_with_its_name_at_the_end(drawn):
    result().plot("gpus", "step_seconds", by="width")
    found = lines(drawn[0])
    assert list(found[BLUE, "-"].get_xdata()) == [1, 2, 4]
    assert list(found[BLUE, "-"].get_ydata()) == [8e-3, 16e-3, 24e-3]
    assert list(found[VERMILLION, "-"].get_ydata()) == [1.6, 1.0, 0.8]
    assert texts(drawn[0]) == ["width 1024", "width 4096"]
    assert drawn[0].axes[0].get_xlabel() == "GPUs"
    assert drawn[0].axes[0].get_yscale() == "log"


def test_the_title_is_the_finding_and_the_words_have_all_numbers():
    figure = result().plot("gpus", "step_seconds", by="width")
    assert figure.title == "Step seconds, GPUs 1 → 4: width 1024 8 ms → 24 ms; width 4096 1.6 s → 800 ms"
    assert "width 4096: 1.6 s at 1 GPU, 1 s at 2 GPUs, 800 ms at 4 GPUs" in figure.alt
    assert figure.alt.endswith("Virtual GPU, modelled on paper.")
    assert result().plot("gpus", "step_seconds", title="A finding").title == "A finding"


def test_a_speed_up_compares_with_the_first_x_of_the_line(drawn):
    figure = result().plot("gpus", "speed-up", by="width")
    assert figure.title == "GPUs 1 → 4: width 1024 3 times slower; width 4096 2 times as fast"
    assert list(lines(drawn[0])[BLUE, "-"].get_ydata()) == [1, 0.5, pytest.approx(1 / 3)]
    assert drawn[0].axes[0].get_ylabel() == "times as fast as with 1 GPU"
    assert drawn[0].axes[0].get_ylim()[0] == 0


def test_the_first_x_is_the_first_of_the_grid_and_the_axis_rises(drawn):
    turned = result(parameters={"gpus": [4, 2, 1], "width": [1024, 4096]}).where(width=1024)
    assert turned.plot("gpus", "speed-up").title == "GPUs 4 → 1: 3 times as fast"
    assert list(lines(drawn[0])[BLUE, "-"].get_xdata()) == [1, 2, 4]


def test_a_speed_up_leaves_a_line_without_the_first_x_out_and_says_so(drawn):
    for argument in ("gpus", "width"):  # whichever varies fastest
        rows = sorted(result().rows[:3] + result().rows[4:], key=lambda row: -row[argument])
        figure = result(rows=rows).plot("gpus", "speed-up", by="width")
        assert figure.title == "GPUs 1 → 4: width 1024 3 times slower"
        assert list(lines(drawn[-1])) == [(BLUE, "-")]
        note = "not drawn, because 1 GPU is missing: width 4096"
        assert drawn[-1].texts[-1].get_text() == f"virtual GPU, modelled on paper  ·  {note}"
        assert "Not drawn, because 1 GPU is missing: width 4096" in figure.alt


def test_a_recording_compares_with_the_same_x(drawn, monkeypatch):
    made = result(rows=result().rows[1:], badge="recorded on paper")
    monkeypatch.setattr(Result, "recorded", lambda self, gpu=None: made)
    result().plot("gpus", "speed-up")
    assert (BLUE, "--") not in lines(drawn[0]) and (VERMILLION, "--") in lines(drawn[0])


def test_a_recording_may_have_points_that_the_result_does_not_have(drawn, recording):
    result(rows=result().rows[1:2]).plot("gpus", "speed-up", by="width")
    dashed = lines(drawn[0])[BLUE, "--"]
    assert list(dashed.get_xdata()) == [1, 2, 4]
    assert list(dashed.get_ydata()) == pytest.approx([2, 1, 2 / 3])
    assert drawn[0].axes[0].get_ylabel() == "times as fast as with 2 GPUs"


def test_the_title_says_where_a_shorter_line_begins_and_ends():
    later = result(rows=result().rows[:3] + result().rows[4:])
    assert later.plot("gpus", "step_seconds").title.endswith("width 4096 1 s → 800 ms (2 → 4)")
    shorter = result(rows=result().rows[:4])
    assert shorter.plot("gpus", "step_seconds").title.endswith("width 4096 1.6 s (only 1)")


def test_a_misspelt_quantity_names_the_one_that_was_meant():
    with pytest.raises(KeyError, match="Did you mean 'speed-up'?"):
        result().plot("gpus", "speedup")


def test_per_gpu_divides_by_the_number_of_gpus(drawn):
    result().where(width=4096).plot("gpus", "per GPU")
    assert list(lines(drawn[0])[BLUE, "-"].get_ydata()) == [1.6, 0.5, 0.2]
    assert texts(drawn[0]) == ["step seconds per GPU"]


def test_a_derived_quantity_of_one_of_several_columns(drawn):
    columns = {"gpus": "", "forward_seconds": "seconds", "backward_seconds": "seconds"}
    rows = [{"gpus": n, "forward_seconds": 1 / n, "backward_seconds": 2.0} for n in (1, 2)]
    both = result(columns=columns, rows=rows, parameters={"gpus": [1, 2]})
    assert both.plot("gpus", "forward_seconds speed-up").title == "GPUs 1 → 2: 2 times as fast"
    with pytest.raises(ValueError, match="Which column. Write one of 'forward_seconds speed-up', 'backward_s"):
        both.plot("gpus", "speed-up")


def test_the_only_other_argument_needs_no_by(drawn):
    result().plot("gpus", "speed-up")
    assert texts(drawn[0]) == ["width 1024", "width 4096"]


def test_a_recording_is_dashed_and_has_its_badge(drawn, recording):
    figure = result().plot("gpus", "step_seconds", by="width")
    dashed = lines(drawn[0])[BLUE, "--"]
    assert list(dashed.get_ydata()) == pytest.approx([24e-3, 48e-3, 72e-3])
    assert "width 1024, recorded" in texts(drawn[0])
    assert drawn[0].texts[-1].get_text() == "virtual GPU, modelled on paper  ·  dashed: recorded on paper"
    assert "Recorded on paper: width 1024: 24 ms at 1 GPU" in figure.alt
    result().plot("gpus", "step_seconds", by="width", recorded=False)
    assert (BLUE, "--") not in lines(drawn[1])


def test_a_prediction_is_a_hollow_marker(drawn):
    figure = result().plot("gpus", "speed-up", by="width", prediction=(4, 3.5))
    [marker] = [line for line in drawn[0].axes[0].lines if line.get_markerfacecolor() == "none"]
    assert (list(marker.get_xdata()), list(marker.get_ydata())) == ([4], [3.5])
    assert marker.get_markeredgecolor() == BLACK
    assert "predicted: 3.5 times" in texts(drawn[0])
    assert "Predicted at 4 GPUs: 3.5 times." in figure.alt
    assert drawn[0].axes[0].get_ylim()[1] > 3.5


def test_words_on_the_x_axis_are_not_joined_by_a_line(drawn):
    figure = peaks().plot("kind", "peak_bytes")
    [points] = [line for line in drawn[0].axes[0].lines if len(line.get_xdata()) == 3]
    assert points.get_linestyle() == "None"
    assert [label.get_text() for label in drawn[0].axes[0].get_xticklabels()] == ["a", "b", "c"]
    assert figure.title == "Peak bytes, kind a → c: 1 KiB → 3 KiB"


def test_one_point_is_a_figure_too():
    assert result().where(gpus=1, width=1024).plot("gpus", "step_seconds").title == "Step seconds at GPUs 1: 8 ms"


def test_bytes_have_binary_units_on_both_axes(drawn):
    rows = [{"size": 2**n, "peak_bytes": 3 * 2**n} for n in range(10, 21)]
    columns = {"size": "bytes", "peak_bytes": "bytes"}
    Result("peak", {"size": [2**n for n in range(10, 21)]}, columns, rows, "on paper").plot("size", "peak_bytes")
    axes = drawn[0].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()][:2] == ["1 KiB", "4 KiB"]
    assert "64 KiB" in [label.get_text() for label in axes.get_yticklabels()]


def test_negative_and_zero_values_are_drawn():
    rows = [{"n": n, "change": change} for n, change in ((1, -2.0), (2, 0.0), (3, 2.0))]
    changes = Result("change", {"n": [1, 2, 3]}, {"n": "", "change": ""}, rows, "on paper")
    assert changes.plot("n", "change").title == "Change, n 1 → 3: -2 → 2"
    zeros = Result("change", {"n": [1]}, {"n": "", "change": ""}, [{"n": 1, "change": 0}], "on paper")
    assert zeros.plot("n", "change").title == "Change at n 1: 0"


@pytest.mark.parametrize(
    ("made", "arguments", "error", "said"),
    [
        (result, ("rows", "step_seconds"), KeyError, "no column 'rows'; it has gpus, width, step_seconds"),
        (result, ("gpus", "loss"), KeyError, "no column 'loss'.*'speed-up' and 'per GPU'"),
        (result, ("gpus", "step_seconds", "rows"), KeyError, "no column 'rows'"),
        (peaks, ("kind", "speed-up"), ValueError, "Which column"),
        (peaks, ("kind", "loss speed-up"), ValueError, "compares seconds, and the column loss has another"),
        (peaks, ("kind", "loss per GPU"), ValueError, "divides by the column gpus"),
    ],
)
def test_what_cannot_be_drawn_is_refused(made, arguments, error, said):
    with pytest.raises(error, match=said):
        made().plot(*arguments)


def test_several_rows_at_one_point_are_refused():
    rows = [row | {"batch": batch} for row in result().rows for batch in (8, 16)]
    columns = {"gpus": "", "width": "", "batch": "", "step_seconds": "seconds"}
    parameters = {"gpus": [1, 2, 4], "width": [1024, 4096], "batch": [8, 16]}
    made = result(rows=rows, columns=columns, parameters=parameters)
    with pytest.raises(ValueError, match=r"batch has the values 8, 16. Draw a line for each with by='batch', or"):
        made.plot("gpus", "step_seconds", by="width")
    assert made.where(batch=8).plot("gpus", "step_seconds", by="width").title.startswith("Step seconds, GPUs")


def test_too_many_lines_and_no_rows_are_refused():
    rows = [{"n": n, "value": n} for n in range(8)]
    many = Result("value", {"n": list(range(8))}, {"n": "", "value": ""}, rows, "on paper")
    with pytest.raises(ValueError, match="n has 8 values, and a figure has at most 7 lines"):
        many.plot("value", "value", by="n")
    with pytest.raises(ValueError, match="value has no rows to draw"):
        Result("value", {}, {"value": ""}, [], "on paper").plot("value", "value")


@pytest.mark.parametrize("prediction", [3, (3, 1.0), (1, "fast"), (1, 2, 3)])
def test_a_prediction_that_is_no_point_is_refused(prediction):
    with pytest.raises(ValueError, match="prediction="):
        result().plot("gpus", "step_seconds", prediction=prediction)
