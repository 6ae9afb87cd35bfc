"""The table that a measurement returns: choosing rows, files, pandas, and recordings."""

import json
import sys
from types import ModuleType

import pytest

import labkit
from labkit import courses
from labkit.experiments.result import Result
from labkit.experiments.result_data import unit_of

ROWS = [
    {"gpus": gpus, "width": width, "step_seconds": seconds, "loss": loss}
    for gpus, width, seconds, loss in (
        (1, 1024, 0.008, 1.5),
        (1, 4096, 1.6, 1.25),
        (2, 1024, 0.016, 1.5),
        (2, 4096, 0.8, 1.25),
    )
]
COLUMNS = {"gpus": "", "width": "", "step_seconds": "seconds", "loss": ""}


def result(**changes):
    fields = {
        "name": "step",
        "parameters": {"gpus": [1, 2], "width": [1024, 4096]},
        "columns": COLUMNS,
        "rows": ROWS,
        "badge": "measured on paper",
        "code": "0123456789abcdef",
    }
    return Result(**(fields | changes))


def test_it_prints_as_a_table_with_units_and_the_badge():
    assert repr(result()).splitlines()[:3] == [
        "measured on paper",
        "gpus  width  step seconds  loss",
        "1     1024   8 ms          1.5",
    ]
    assert (
        "measured on paper" in result()._repr_html_() and ">800 ms</td>" in result()._repr_html_()
    )


def test_a_unit_that_the_kit_does_not_know_is_in_the_name_of_the_column():
    columns = COLUMNS | {"loss": "furlong"}
    assert (
        repr(result(columns=columns)).splitlines()[1] == "gpus  width  step seconds  loss, furlong"
    )
    assert ">loss, furlong</th>" in result(columns=columns)._repr_html_()


def test_a_column_can_be_narrowed_to_some_rows():
    assert result().column("gpus") == [1, 1, 2, 2]
    assert result().column("step_seconds", width=4096, gpus=2) == [0.8]
    assert result().by("gpus", "step_seconds", width=1024) == {1: 0.008, 2: 0.016}


def test_a_column_that_is_not_there_names_those_that_are():
    with pytest.raises(KeyError, match="no column 'speed'. It has gpus, width, step_seconds, loss"):
        result().column("speed")
    with pytest.raises(KeyError, match="no column 'kind'"):
        result().column("gpus", kind="pinned")


def test_a_row_with_other_columns_is_refused():
    with pytest.raises(
        ValueError, match="a row has the columns gpus. Expected gpus, width, step_sec"
    ):
        result(rows=[{"gpus": 1}])


def test_rows_can_be_chosen():
    chosen = result().where(width=4096)
    assert chosen.column("step_seconds") == [1.6, 0.8]
    assert chosen.parameters == {"gpus": [1, 2], "width": [4096]}
    assert len(result().where(gpus=[1, 2], width=[1024])) == 2


def test_a_choice_that_no_row_has_is_refused():
    with pytest.raises(ValueError, match="No row has width 2048. The values are 1024, 4096."):
        result().where(width=2048)
    with pytest.raises(KeyError, match="step has no column 'rows'. It has gpus, width"):
        result().where(rows=1)


def test_failures_are_chosen_with_the_rows():
    failures = [
        {"arguments": {"gpus": 4, "width": width}, "error": "Error"} for width in (1024, 4096)
    ]
    chosen = result(failures=failures).where(width=4096)
    assert chosen.failures == failures[1:]


def test_a_file_gives_the_same_result_back(tmp_path):
    made = result(origin={"machine": "NVIDIA H200"})
    made.save(tmp_path / "step.json")
    assert labkit.Result.load(tmp_path / "step.json") == made


def test_pandas_gets_the_rows_and_the_units(monkeypatch):
    pandas = ModuleType("pandas")

    class DataFrame:
        def __init__(self, rows, columns):
            self.rows, self.columns, self.attrs = rows, columns, {}

    pandas.DataFrame = DataFrame
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    frame = result().to_pandas()
    assert frame.rows == ROWS and frame.columns == list(COLUMNS)
    assert frame.attrs == {"name": "step", "units": COLUMNS, "badge": "measured on paper"}


def test_without_pandas_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="to_pandas needs pandas, which is not installed"):
        result().to_pandas()


@pytest.mark.parametrize(
    ("column", "unit"),
    [
        ("seconds", "seconds"),
        ("step_seconds", "seconds"),
        ("bytes", "bytes"),
        ("peak_bytes", "bytes"),
        ("bytes_per_second", "bytes per second"),
        ("copy_bytes_per_second", "bytes per second"),
        ("milliseconds", ""),
        ("seconds_of_step", ""),
        ("nbytes", ""),
    ],
)
def test_the_name_of_a_column_says_its_unit(column, unit):
    assert unit_of(column) == unit


# Recordings


@pytest.fixture
def recorded_on(tmp_path, monkeypatch):
    """A function that stores a recording of a GPU model."""
    files = []
    monkeypatch.setattr(courses, "files", lambda pattern: sorted(files))

    def record(gpu, **changes):
        file = tmp_path / f"step_{gpu}.json"
        file.write_text(result(badge=f"recorded on {gpu}", **changes).to_json(), encoding="utf-8")
        files.append(file)

    return record


def test_a_recording_of_the_same_code_is_found(recorded_on):
    recorded_on("h100-80gb-hbm3")
    recorded_on("h200")
    assert result().recorded().badge == "recorded on h200"
    assert result().recorded("H100-80GB-HBM3").badge == "recorded on h100-80gb-hbm3"
    assert result().recorded("A100") is None


def test_the_recording_has_only_the_points_that_were_asked_for(recorded_on):
    recorded_on("h200")
    few = result(parameters={"gpus": [2, 8], "width": [1024]}, rows=ROWS[2:3])
    assert few.recorded().rows == ROWS[2:3]
    assert result(parameters={"gpus": [8], "width": [1024]}, rows=[]).recorded() is None


def test_the_recording_has_the_order_that_was_asked_for(recorded_on):
    recorded_on("h200")
    turned = result(parameters={"gpus": [2, 1], "width": [4096]}, rows=[])
    assert turned.recorded().rows == [ROWS[3], ROWS[1]]


def test_a_recording_of_other_code_does_not_count(recorded_on):
    recorded_on("h200", code="of another version")
    assert result().recorded() is None
    assert result(code="").recorded() is None


def test_without_a_fingerprint_there_is_no_recording(recorded_on):
    recorded_on("h200", code="")
    assert result(code="").recorded() is None
    recorded_on("h100", code=None)
    assert result(code="").recorded() is None


def test_a_recording_with_other_columns_does_not_count(recorded_on):
    columns = {"gpus": "", "width": "", "other": ""}
    rows = [{"gpus": 1, "width": 1024, "other": 1}]
    recorded_on("h200", columns=columns, rows=rows)
    assert result().recorded() is None


def test_a_recording_of_other_arguments_does_not_count(recorded_on):
    recorded_on("h200")
    columns = {"gpus": "", "step_seconds": "seconds"}
    rows = [{"gpus": 1, "step_seconds": 1.0}]
    assert result(parameters={"gpus": [1]}, columns=columns, rows=rows).recorded() is None


def test_json_is_plain_data():
    assert json.loads(result().to_json())["columns"] == COLUMNS
