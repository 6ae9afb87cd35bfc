"""`labkit.Lab` on functions of a learner: asked, chosen, run, stopped and brought up again."""

import linecache

import pytest
import torch

import labkit
from labkit import contents, progress_file

from ..learner import predict_and_run

QUESTION = "How many times as fast is it?"


@pytest.fixture(autouse=True)
def gpu():
    with labkit.use(gpus=4, like="T4", virtual=True, quiet=True):
        yield


def copy_seconds(count, size):
    """Return made-up seconds, which are proportional to the number of copies."""
    source = torch.ones(size, device="cuda")

    def step():
        for _ in range(count):
            source.clone()

    return labkit.seconds(step)


GRID = {"count": [4, 2, 1], "size": [1 << 22, 1 << 23]}


def lab_of(function=copy_seconds, grid=GRID, **options):
    return labkit.Lab(function, grid, **({"question": QUESTION, "predict": "speed-up"} | options))


def test_predict_choose_and_run():
    before = len(progress_file.tries["copy_seconds"])
    lab = lab_of()
    lab.lists["size"].value = str(1 << 23)
    said = predict_and_run(lab, "4")
    assert "count 1, size 8388608: 3.73 times. You predicted 4. A good prediction!" in said
    assert lab.result.column("size") == [1 << 23] * 3
    assert 'alt="Count 4 → 1: 3.7 times as fast.' in lab.picture.value
    assert "Predicted at count 1: 4 times" in lab.picture.value
    assert "Virtual GPU, modelled on NVIDIA Tesla T4." in lab.picture.value
    assert len(progress_file.tries["copy_seconds"]) == before + 1


def test_a_prediction_that_is_too_high_is_told_so():
    assert "which is 2.8 times too high." in predict_and_run(lab_of(), "10")
    assert "A good prediction!" in predict_and_run(lab_of(within=3), "10")


@pytest.mark.parametrize(
    ("function", "predict", "options", "unit", "typed", "said"),
    [
        (copy_seconds, "copy_seconds", {}, "ms", "1", "ms. You predicted 1"),
        (
            lambda count, size: {"peak_bytes": count << 20},
            "peak_bytes",
            {},
            "MiB",
            "1",
            "1 MiB. You predicted 1",
        ),
        (
            lambda count, size: {"held": 1 << 20},
            "held",
            {"units": {"held": "bytes"}},
            "MiB",
            "2",
            "2.0 times too high",
        ),
        (
            lambda count, size: count - 1,
            "value",
            {},
            "",
            "0",
            "0. You predicted 0. A good prediction!",
        ),
        (lambda count, size: count - 1, "value", {}, "", "3", "0. You predicted 3."),
    ],
)
def test_a_prediction_is_typed_in_a_unit_that_people_use(
    function, predict, options, unit, typed, said
):
    lab = lab_of(function, predict=predict, **options)
    assert lab.unit == unit
    assert said in predict_and_run(lab, typed)


@pytest.mark.parametrize(
    ("typed", "said"), [("fast", "type a number greater than 0"), ("1,5", "type a point, 1.5")]
)
def test_what_is_no_number_is_no_prediction(typed, said):
    lab = lab_of()
    lab.answer.value = typed
    lab.predict_button.click()
    assert said in lab.message.value and lab.run_button.disabled


def test_another_choice_asks_for_another_prediction():
    lab = lab_of()
    lab.answer.value = "4"
    lab.predict_button.click()
    lab.lists["size"].value = str(1 << 23)
    assert lab.prediction is None and lab.run_button.disabled


def test_a_stopped_run_shows_what_there_is():
    stopped = []

    def value(count, size):
        stopped[0].stop_button.click()
        return 1 / count

    stopped.append(lab_of(value, predict="value"))
    said = predict_and_run(stopped[0], "2")
    assert (
        "Stopped after 1 of 3 points. count 1, size 4194304 was not measured, so your prediction "
        "of 2 stays open" in said
    )
    assert "Value at count 4: 0.25" in stopped[0].picture.value


def test_a_combination_that_fails_is_told_and_the_others_are_drawn():
    def value(count, size):
        if count == 2:
            raise RuntimeError("no room")
        return 1 / count

    said = predict_and_run(lab_of(value, predict="value"), "1")
    assert "A good prediction! count 2, size 4194304 failed. RuntimeError: no room" in said


def test_a_function_that_always_fails_is_told_as_an_error():
    def value(count, size):
        raise NameError("no such name")

    assert "The experiment failed. NameError: no such name" in predict_and_run(lab_of(value), "1")


def test_large_numbers_are_written_out():
    lab = lab_of(lambda n: 1234567.5 * n, {"n": [1, 2]}, predict="value")
    lab.answer.value = "2345678"
    lab.predict_button.click()
    assert "You predict: 2345678" in lab.message.value
    assert "n 2: 2469135. You predicted 2345678. A good prediction!" in predict_and_run(
        lab, "2345678"
    )


def test_times_of_zero_give_no_speed_up_and_the_prediction_stays_open():
    def zero_seconds(n):
        return 0.0 if n == 2 else 1.0

    lab = lab_of(zero_seconds, {"n": [1, 2]})
    assert "n 2 has no speed-up, so your prediction of 2 times stays open" in predict_and_run(
        lab, "2"
    )
    assert "Not drawn, because a time is not above 0: n 2." in lab.picture.value


def test_every_kind_of_value_can_be_chosen():
    def nbytes(rows, dtype):
        return torch.zeros(rows, dtype=dtype, device="cuda").nbytes

    lab = lab_of(
        nbytes,
        {"rows": [1 << 20, 1 << 21], "dtype": [torch.float32, torch.float16]},
        predict="nbytes",
    )
    assert lab.lists["dtype"].options == ("float32", "float16")
    lab.lists["dtype"].value = "float16"
    assert "rows 2097152, dtype float16: 4194304. You predicted 4194304. A good" in predict_and_run(
        lab, "4194304"
    )


def test_a_wrong_prediction_column_shows_the_table_and_says_so():
    lab = lab_of(lambda count, size: 2 * count, predict="speedup")
    said = predict_and_run(lab, "4")
    assert (
        "There is no figure of &#x27;speedup&#x27;. value has no column &#x27;speedup&#x27;" in said
    )
    assert "KeyError" not in said and "\\" not in said
    assert "<td" in lab.picture.value and ">8</td>" in lab.picture.value


def test_wrong_units_are_told_in_a_sentence():
    lab = lab_of(lambda count, size: 2 * count, predict="value", units={"peak": "bytes"})
    said = predict_and_run(lab, "4")
    assert "⚠ units has the column &#x27;peak&#x27;. The columns are count, size, value." in said


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("-2", "-2. You predicted -2. A good prediction!"),
        ("-2.5", "-2. You predicted -2.5. A good prediction!"),
        ("-9", "-2. You predicted -9."),
        ("9", "-2. You predicted 9."),
        ("many", "“many” is not a prediction: type a number, such as 1.5, and press Predict."),
        ("", "There is no prediction yet: type a number"),
    ],
)
def test_a_negative_number_can_be_predicted(typed, said):
    assert said in predict_and_run(lab_of(lambda count, size: count - 3, predict="value"), typed)


def test_without_the_first_x_the_prediction_stays_open_and_is_not_drawn():
    def value_seconds(count, size):
        if count == 4:
            raise RuntimeError("no room")
        return count

    lab = lab_of(value_seconds, units={"value_seconds": "seconds"})
    said = predict_and_run(lab, "4")
    assert (
        "count 4, size 4194304 was not measured, so your prediction of 4 times stays open" in said
    )
    assert "Predicted" not in lab.picture.value
    said = predict_and_run(lab_of(value_seconds, predict="value_seconds"), "1000")
    assert "count 1, size 4194304: 1000 ms. You predicted 1000. A good prediction!" in said


CELL = """
def value(n):
    return {}


lab = labkit.Lab(value, {{"n": [1, 2]}}, question="What is it?", predict="value")
"""


def run_cell(source):
    """Run a cell as a notebook does, with a new file name each time, and return its lab."""
    filename = f"<cell {len(linecache.cache)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    names = {"__name__": "__main__", "labkit": labkit}
    exec(compile(source, filename, "exec"), names)
    return names["lab"]


def test_a_cell_that_runs_again_brings_back_prediction_and_result():
    first = run_cell(CELL.format("2 * n"))
    predict_and_run(first, "4")
    again = run_cell(CELL.format("2 * n  # doubled"))
    assert again.prediction == 4 and again.result is first.result
    assert again.picture.value == first.picture.value
    assert run_cell(CELL.format("3 * n")).prediction is None


def test_two_labs_of_one_function_are_two():
    first, second = lab_of(), lab_of(question="What else?")
    predict_and_run(first, "4")
    assert second.prediction is None and lab_of(question="What else?").prediction is None
    assert lab_of().prediction == 4


def test_its_text_in_a_stored_notebook():
    assert repr(lab_of()) == f"Lab: {QUESTION} Run this cell to bring it up."


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"question": " "}, ValueError, "question=' ': give the question"),
        ({"within": 0.5}, ValueError, "within=0.5: give a factor, 1 or more"),
        ({"predict": 3}, TypeError, "predict=3: give a column or a quantity"),
        ({"grid": {"count": 1, "size": 1}}, ValueError, "at least one argument several values"),
        ({"grid": {"count": [], "size": 1}}, ValueError, r"grid\['count'\] is empty"),
        ({"grid": {"rows": [1, 2]}}, TypeError, "The grid gives rows by name"),
        ({"values": None}, TypeError, "values=None: choose True or False"),
    ],
)
def test_wrong_arguments_are_refused(changes, error, said):
    with pytest.raises(error, match=said):
        lab_of(**changes)


def test_the_table_of_lessons_counts_its_predictions(tmp_path):
    import nbformat

    cells = [
        nbformat.v4.new_markdown_cell("# 3 A lesson"),
        nbformat.v4.new_code_cell("labkit.Lab(\n    step_seconds,\n    {})"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "03_lesson.ipynb")
    assert contents.read(tmp_path / "03_lesson.ipynb").labs == ("step_seconds",)
