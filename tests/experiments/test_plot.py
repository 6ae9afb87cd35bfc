"""The figure of a result: what it shows, what it says, and what it refuses."""

from itertools import pairwise

import pytest
from matplotlib.colors import to_hex

from gputrace.figures.figure import BLACK, BLUE, VERMILLION
from labkit.experiments.result import Result

TIMES = {
    (1, 1024): 8e-3,
    (2, 1024): 16e-3,
    (4, 1024): 24e-3,
    (1, 4096): 1.6,
    (2, 4096): 1.0,
    (4, 4096): 0.8,
}


def result(**changes):
    fields = {
        "name": "step_seconds",
        "parameters": {"gpus": [1, 2, 4], "width": [1024, 4096]},
        "columns": {"gpus": "", "width": "", "step_seconds": "seconds"},
        "rows": [
            {"gpus": gpus, "width": width, "step_seconds": time}
            for (gpus, width), time in TIMES.items()
        ],
        "badge": "virtual GPU, modelled on paper",
    }
    return Result(**(fields | changes))


def peaks():
    """A result with two measured columns."""
    rows = [
        {"kind": kind, "peak_bytes": 1024 * n, "loss": 0.5}
        for n, kind in enumerate(("a", "b", "c"), 1)
    ]
    return Result(
        "peak",
        {"kind": ["a", "b", "c"]},
        {"kind": "", "peak_bytes": "bytes", "loss": ""},
        rows,
        "on paper",
    )


@pytest.fixture
def recording(monkeypatch):
    """A recording of a real GPU whose times are three times as long."""
    rows = [row | {"step_seconds": 3 * row["step_seconds"]} for row in result().rows]
    made = result(rows=rows, badge="recorded on paper")
    monkeypatch.setattr(Result, "recorded", lambda self, gpu=None: made)


def lines(canvas):
    """Return the lines with points, by colour and style."""
    found = [line for line in canvas.axes[0].lines if line.get_marker() not in ("", "None", None)]
    return {(to_hex(line.get_color()).upper(), line.get_linestyle()): line for line in found}


def texts(canvas):
    return [text.get_text() for text in canvas.axes[0].texts]


def test_the_word_gpu_is_written_in_capitals(drawn):
    rows = [{"tokens_per_gpu": tokens, "loss": 0.5} for tokens in (1, 2)]
    columns = {"tokens_per_gpu": "", "loss": ""}
    result(parameters={"tokens_per_gpu": [1, 2]}, columns=columns, rows=rows).plot(
        "tokens_per_gpu", "loss"
    )
    assert drawn[0].axes[0].get_xlabel() == "tokens per GPU"


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
    assert (
        figure.title
        == "Step seconds, GPUs 1 → 4: width 1024 8 ms → 24 ms; width 4096 1.6 s → 800 ms"
    )
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
    with pytest.raises(
        ValueError, match="Which column. Write one of 'forward_seconds speed-up', 'backward_s"
    ):
        both.plot("gpus", "speed-up")


def test_the_only_other_argument_needs_no_by(drawn):
    result().plot("gpus", "speed-up")
    assert texts(drawn[0]) == ["width 1024", "width 4096"]


def test_a_recording_is_dashed_and_has_its_badge(drawn, recording):
    figure = result().plot("gpus", "step_seconds", by="width")
    dashed = lines(drawn[0])[BLUE, "--"]
    assert list(dashed.get_ydata()) == pytest.approx([24e-3, 48e-3, 72e-3])
    assert "width 1024, recorded" in texts(drawn[0])
    assert (
        drawn[0].texts[-1].get_text()
        == "virtual GPU, modelled on paper  ·  dashed: recorded on paper"
    )
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
    assert (
        result().where(gpus=1, width=1024).plot("gpus", "step_seconds").title
        == "Step seconds at GPUs 1: 8 ms"
    )


def test_bytes_have_binary_units_on_both_axes(drawn):
    rows = [{"size": 2**n, "peak_bytes": 3 * 2**n} for n in range(10, 21)]
    columns = {"size": "bytes", "peak_bytes": "bytes"}
    Result("peak", {"size": [2**n for n in range(10, 21)]}, columns, rows, "on paper").plot(
        "size", "peak_bytes"
    )
    axes = drawn[0].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()][:2] == ["1 KiB", "4 KiB"]
    assert "64 KiB" in [label.get_text() for label in axes.get_yticklabels()]


def test_negative_and_zero_values_are_drawn():
    rows = [{"n": n, "change": change} for n, change in ((1, -2.0), (2, 0.0), (3, 2.0))]
    changes = Result("change", {"n": [1, 2, 3]}, {"n": "", "change": ""}, rows, "on paper")
    assert changes.plot("n", "change").title == "Change, n 1 → 3: -2 → 2"
    zeros = Result(
        "change", {"n": [1]}, {"n": "", "change": ""}, [{"n": 1, "change": 0}], "on paper"
    )
    assert zeros.plot("n", "change").title == "Change at n 1: 0"


@pytest.mark.parametrize(
    ("made", "arguments", "error", "said"),
    [
        (
            result,
            ("rows", "step_seconds"),
            KeyError,
            "no column 'rows'. It has gpus, width, step_seconds",
        ),
        (result, ("gpus", "loss"), KeyError, "no column 'loss'.*'speed-up' and 'per GPU'"),
        (result, ("gpus", "step_seconds", "rows"), KeyError, "no column 'rows'"),
        (peaks, ("kind", "speed-up"), ValueError, "Which column"),
        (
            peaks,
            ("kind", "loss speed-up"),
            ValueError,
            "compares seconds, and the column loss has another",
        ),
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
    with pytest.raises(
        ValueError, match=r"batch has the values 8, 16. Draw a line for each with by='batch', or"
    ):
        made.plot("gpus", "step_seconds", by="width")
    assert (
        made.where(batch=8)
        .plot("gpus", "step_seconds", by="width")
        .title.startswith("Step seconds, GPUs")
    )


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


# Figures with much or unusual content


def values_of(rows, columns=("n", "value"), unit=""):
    """Return a result of numbers without a unit, or with `unit`."""
    made = [dict(zip(columns, row, strict=True)) for row in rows]
    parameters = {name: list(dict.fromkeys(row[name] for row in made)) for name in columns[:-1]}
    units = dict.fromkeys(columns, "") | {columns[-1]: unit}
    return Result(columns[-1], parameters, units, made, "virtual GPU, modelled on paper")


def check_that_texts_can_be_read(canvas):
    """Check that all texts are inside the figure, and that no two of a kind overlap."""
    canvas.draw_without_rendering()
    axes = canvas.axes[0]
    low, high = axes.get_ylim()
    ticks = [text for text in axes.get_yticklabels() if low <= text.get_position()[1] <= high]
    for kind in (
        axes.texts,
        axes.get_xticklabels(),
        ticks,
        canvas.texts,
        [axes.xaxis.label, axes.yaxis.label],
    ):
        boxes = [(text.get_text(), text.get_window_extent()) for text in kind if text.get_text()]
        for name, box in boxes:
            assert box.x0 >= 0 and box.y0 >= 0, name
            assert box.x1 <= canvas.bbox.x1 and box.y1 <= canvas.bbox.y1, name
    across = [text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()]
    if all(text.get_rotation() == 0 for text in axes.get_xticklabels()):
        assert all(left.x1 <= right.x0 for left, right in pairwise(across))
    heights = sorted((box.y0, box.y1) for box in (text.get_window_extent() for text in axes.texts))
    assert all(low[1] <= high[0] + 1 for low, high in pairwise(heights))


@pytest.mark.parametrize(("height", "count"), [(0.0, 7), (1.0, 2), (100.0, 7)])
def test_the_names_of_lines_that_end_together_stay_in_the_figure(drawn, monkeypatch, height, count):
    rows = [(n, f"way {way}", height + way / 1000) for n in (1, 2) for way in range(count)]
    made = values_of([*rows, (3, "way 0", 100.0)] if height < 100 else rows, ("n", "way", "value"))
    monkeypatch.setattr(Result, "recorded", lambda self, gpu=None: made)
    made.plot("n", "value", by="way")
    assert len(drawn[0].axes[0].texts) == 2 * count
    check_that_texts_can_be_read(drawn[0])


@pytest.mark.parametrize(("count", "length"), [(3, 80), (12, 1), (12, 80), (60, 12)])
def test_names_on_the_x_axis_do_not_overlap(drawn, count, length):
    values_of([(f"{n} {'long ' * (length // 5)}", n) for n in range(count)]).plot("n", "value")
    check_that_texts_can_be_read(drawn[0])
    axes = drawn[0].axes[0]
    ticks = [axes.transData.transform((tick, 0))[0] for tick in axes.get_xticks()]
    lines_of_text = 12 * drawn[0].dpi / 72
    assert all(right - left >= lines_of_text for left, right in pairwise(ticks))
    if count <= 12:
        assert len(axes.get_xticks()) == count


@pytest.mark.parametrize(
    "places", [[1, 2, 3, 100], [1, 2, 3, 4000], [1000000 + n for n in range(8)], [-3, -2, 5]]
)
def test_numbers_on_the_x_axis_do_not_overlap(drawn, places):
    values_of([(n, float(n)) for n in places]).plot("n", "value")
    check_that_texts_can_be_read(drawn[0])
    assert drawn[0].axes[0].get_xticks()[0] == places[0]


@pytest.mark.parametrize("text", ["張量並列", "🚀 rocket", "a$b$c_{", "two\nlines"])
def test_texts_of_all_kinds_are_drawn_and_told(drawn, text):
    made = values_of(
        [(x, line, 1.0 + len(x + line)) for x in (text, "b") for line in (text, "c")],
        ("x", text, text + "s"),
    )
    figure = made.plot("x", text + "s", title=f"On {text}")
    assert figure.title == f"On {text}" and text in figure.alt
    assert figure.png.startswith(b"\x89PNG")  # without a warning of a missing letter
    assert text in made.plot("x", text + "s", prediction=(text, 2.0)).title
    check_that_texts_can_be_read(drawn[0])
    long = values_of([(n, float(n)) for n in (1, 2)], ("n", text * 40))
    assert (text * 40)[1:].replace("_", " ") in long.plot("n", text * 40).alt
    check_that_texts_can_be_read(drawn[-1])


def test_a_prediction_stands_beside_its_point_inside_the_figure(drawn):
    for x in (1, 4):
        result().plot("gpus", "speed-up", prediction=(x, 0.1))
        check_that_texts_can_be_read_without_lines(drawn[-1])


def check_that_texts_can_be_read_without_lines(canvas):
    canvas.draw_without_rendering()
    [told] = [text for text in canvas.axes[0].texts if text.get_text().startswith("predicted")]
    box, axes = told.get_window_extent(), canvas.axes[0].bbox
    assert box.x0 >= axes.x0 and box.x1 <= axes.x1


def test_a_speed_up_leaves_out_points_without_a_time(drawn):
    rows = [row | {"step_seconds": 0.0} if row["gpus"] == 4 else row for row in result().rows]
    figure = result(rows=rows).where(width=1024).plot("gpus", "speed-up")
    assert figure.title == "GPUs 1 → 2: 2 times slower"
    assert list(lines(drawn[0])[BLUE, "-"].get_xdata()) == [1, 2]
    assert "Not drawn, because a time is not above 0: 4 GPUs." in figure.alt
    assert "not drawn, because a time is not above 0: 4 GPUs" in drawn[0].texts[-1].get_text()
    zeros = result(rows=[row | {"step_seconds": 0.0} for row in rows])
    with pytest.raises(
        ValueError, match="No point of speed-up can be drawn, because a time is not above 0"
    ):
        zeros.plot("gpus", "speed-up")


def test_points_that_are_not_finite_are_left_out_and_told(drawn):
    missing = [float("nan"), float("inf"), float("-inf"), None]
    made = values_of([(n, value) for n, value in enumerate([1.0, *missing, 2.0])])
    figure = made.plot("n", "value")
    assert list(lines(drawn[0])[BLUE, "-"].get_xdata()) == [0, 5]
    assert (
        "Not drawn, because the number is missing or not finite: n 1, n 2, n 3, n 4." in figure.alt
    )
    with pytest.raises(ValueError, match="No point of value can be drawn"):
        values_of([(1, None)]).plot("n", "value")
    none = values_of([(None, 1.0), (2, 2.0), (float("inf"), 3.0)])
    assert none.plot("n", "value").title == "Value, n – → inf: 1 → 3"
    zero_gpus = values_of([(0, 1.0), (1, 3.0)], ("gpus", "value")).plot("gpus", "per GPU")
    assert "not finite: 0 GPUs" in zero_gpus.alt
    texts = values_of([("one", 1.0), (1, 3.0)], ("gpus", "value")).plot("gpus", "per GPU")
    assert "not finite: one GPUs" in texts.alt
    predicted = values_of([("a", None), ("b", 3.0)]).plot("n", "value", prediction=("a", 2.0))
    assert "Predicted at n a: 2." in predicted.alt


def test_texts_have_no_place_on_the_y_axis():
    with pytest.raises(
        ValueError, match="The y axis needs numbers, and the column kind has texts, such as 'a'"
    ):
        peaks().plot("loss", "kind")


def test_rows_that_differ_in_no_argument_are_refused_in_plain_words():
    with pytest.raises(ValueError, match="Several rows have the same n. Keep one of them."):
        values_of([(1, 2.0), (1, 3.0)]).plot("n", "value")


def test_a_unit_that_the_kit_does_not_know_is_on_the_axes_and_in_the_words(drawn):
    for change in (1.0, -1.0, 1000.0):
        figure = values_of([(1, 2.0), (2, 2.0 * change)], unit="furlong").plot("n", "value")
        assert drawn[-1].axes[0].get_ylabel() == "value, furlong"
        assert "2 furlong at n 1" in figure.alt
    Result(
        "value", {"n": [1]}, {"n": "laps", "value": ""}, [{"n": 1, "value": 2}], "on paper"
    ).plot("n", "value")
    assert drawn[-1].axes[0].get_xlabel() == "n, laps"


def test_large_and_negative_numbers_have_no_exponents(drawn):
    figure = values_of([(1, 123456.0), (2, 1234567.0)]).plot("n", "value")
    assert figure.title == "Value, n 1 → 2: 123456 → 1234567"
    slow = result(rows=[row | {"step_seconds": row["gpus"] ** 8} for row in result().rows[:3]])
    assert slow.plot("gpus", "speed-up").title == "GPUs 1 → 4: 65536 times slower"
    fallen = values_of([(1, -3 * 2.0**20), (2, 2.0**20)], unit="bytes").plot("n", "value")
    assert "-3 MiB at n 1" in fallen.alt
