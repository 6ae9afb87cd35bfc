"""The figures of number formats: findings, words, and that they are drawn from whatever was measured."""

import math

import pytest

import labkit
from labkit import plots
from labkit.experiments import Result, collect, four_ways, number_formats
from labkit.experiments.format_speed import COLUMNS as SPEED_COLUMNS
from labkit.experiments.four_ways import COLUMNS as WAY_COLUMNS


@pytest.mark.parametrize(
    ("computation", "title"),
    [
        ("0.5", "0.5: every format says what float64 says"),
        ("300**2", "300**2 is too large for float16, float8 e5m2 and float8 e4m3"),
        ("1e39", "1e39 is too large for every format"),
        ("1e-8", "1e-8 is too small for float16, float8 e5m2 and float8 e4m3"),
        ("1/3", "1/3: float16 is off by 0.024 %, float8 e5m2 off by 6.2 %"),
        ("1/0", "1/0: float8 e4m3 is not infinite"),
        ("inf - inf", "inf - inf: float8 e4m3 is a number"),
        ("(400**2 - 300**2) / 7e4", "(400**2 - 300**2) / 7e4 is lost on the way in float16 and float8 e5m2"),
    ],
)
def test_the_title_says_what_came_out(computation, title):
    assert plots.number_formats(collect(number_formats(computation))).title == title


def test_a_long_computation_is_cut_in_the_title_and_a_stopped_one_says_so():
    assert plots.number_formats(collect(number_formats("+".join(["0.125"] * 30)))).title.endswith("…")
    run = number_formats("1/3")
    assert plots.number_formats(run.result()).title == "Not computed yet: 1/3"
    next(run)
    assert "float32" in plots.number_formats(run.result()).title


def test_the_words_hold_the_bits_and_the_prediction(drawn):
    alt = plots.number_formats(collect(number_formats("-2")), prediction=math.inf).alt
    assert "Float16: -2, as float64, bits 1 10000 0000000000." in alt
    assert "Predicted for float16: inf." in alt


def speeds(**seconds) -> Result:
    """A result of one size from seconds by format, with additions twice as fast in float16."""
    rows = []
    for operation, flops in (("product", 2 * 64**3), ("addition", 64**2)):
        for name, time in seconds.items():
            moved = 3 * 64**2 * (4 if "32" in name else 2)
            rates = {"flops_per_second": flops / time, "bytes_per_second": moved / time}
            rows.append({"size": 64, "operation": operation, "format": name, "seconds": time, **rates})
    return Result("format_speed", {"sizes": [64]}, SPEED_COLUMNS, rows, "measured on paper")


@pytest.mark.parametrize(
    ("seconds", "title"),
    [
        ({"float32": 8e-6, "float16": 2e-6}, "In float16, products of 64² matrices are 4 times faster, sums 4 times faster"),
        ({"float32": 2e-6, "float16": 4e-6}, "In float16, products of 64² matrices are 2 times slower, sums 2 times slower"),
        ({"float32": 2e-6}, "Not measured yet: products and additions in float32 and float16"),
        ({}, "Not measured yet: products and additions in float32 and float16"),
    ],
)
def test_the_roofline_says_what_is_gained(seconds, title):
    figure = plots.format_speed(speeds(**seconds))
    assert figure.title == title
    if seconds:
        assert f"{2 * 64**3 / seconds['float32'] / 1e9:.3g} GFLOP/s in float32" in figure.alt


def test_a_recording_is_drawn_dashed_and_told():
    alt = plots.format_speed(speeds(float32=8e-6, float16=2e-6), labkit.experiments.Result.from_json(_recorded())).alt
    assert "Recorded on NVIDIA H200, torch 2.11: products of 8192² matrices" in alt


def _recorded() -> str:
    from labkit import recordings

    return recordings.load("format_speed").to_json()


def losses(**ways) -> Result:
    rows = [
        {"way": way.replace("_", " "), "step": step, "loss": loss, "seconds": 1e-3}
        for way, values in ways.items()
        for step, loss in enumerate(values, start=1)
    ]
    return Result("four_ways", {"ways": [], "steps": 2}, WAY_COLUMNS, rows, "measured on paper")


@pytest.mark.parametrize(
    ("alone", "title"),
    [
        ([0.5, math.nan], "float16 alone fails at step 2; the others end at about 0.3"),
        ([0.5, 0.1], "All four ways end at a loss of about 0.3"),
    ],
)
def test_the_curves_say_which_way_fails(alone, title):
    result = losses(float32=[0.5, 0.1], float16_alone=alone, autocast_float16=[0.5, 0.1], autocast_bfloat16=[0.5, 0.1])
    assert plots.four_ways(result, result).title == title


def test_a_training_that_was_stopped_is_drawn_as_far_as_it_came():
    assert plots.four_ways(losses(float32=[0.5, 0.1])).title == "Not measured yet: a training in four ways"
    with labkit.use(gpus=1, virtual=True, quiet=True):
        assert plots.four_ways(four_ways(2).result()).title == "Not measured yet: a training in four ways"
