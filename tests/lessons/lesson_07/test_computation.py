"""Test computations that learners type: results, infinity, nan, and text that is refused."""

import math

import pytest

from gpulessons.lesson_07.computation import LONGEST, MOST_TERMS, evaluated, parse


def value(text: str) -> float:
    return evaluated(parse(text), float)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.1 + 0.2", 0.1 + 0.2),
        ("-(2 - 5) * +4 / 8", 1.5),
        ("300**2", 90000.0),
        ("sqrt(abs(-16)) + log(exp(1))", 5.0),
        ("sum(1/4, 10)", 2.5),
        ("2 * pi", math.tau),
        ("1e3 + 0x10 + 1_000", 2016.0),
        ("10**400", math.inf),
        ("(-10)**401", -math.inf),
        ("exp(1000) - 1", math.inf),
        ("-1 / 0", -math.inf),
        ("1 / -0.0", -math.inf),
        ("0**-1", math.inf),
        ("log(0)", -math.inf),
        ("1 / inf", 0.0),
    ],
)
def test_values(text, expected):
    assert value(text) == expected


@pytest.mark.parametrize(
    "text", ["0 / 0", "inf - inf", "sqrt(-1)", "log(-1)", "(-8)**0.5", "inf * 0"]
)
def test_what_is_no_number(text):
    assert math.isnan(value(text))


def test_each_number_and_each_result_is_rounded():
    seen = []
    evaluated(parse("-2 * 3 + sum(4, 2)"), lambda x: seen.append(x) or x)
    assert seen == [2, 3, -6, 4, 4, 8, 2]


@pytest.mark.parametrize(
    "text",
    [
        "foo(3)",
        "x",
        "a.b",
        "1 if 2 else 3",
        "True",
        "1j",
        "'a'",
        "__import__('os')",
        "sqrt(1, 2)",
        "sqrt(x=1)",
        "not 1",
        "1 < 2",
        "2 @ 3",
        "[1]",
    ],
)
def test_what_is_no_arithmetic_is_refused_by_name(text):
    with pytest.raises(
        ValueError, match=r"I cannot compute “.*”: type numbers, .* such as sum\(0.01, 1000\)\."
    ):
        value(text)


@pytest.mark.parametrize("text", ["1 +", "1; 2", "x = 1", "(" * 150, "1 2", "\0"])
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(ValueError, match="is no computation|There is nothing"):
        value(text)


def test_empty_and_endless_text_is_refused():
    for text in ("", "  ", None):
        with pytest.raises(ValueError, match="There is nothing to compute: type numbers"):
            parse(text)
    with pytest.raises(ValueError, match=f"is too long, {LONGEST + 1} characters"):
        parse("1" * (LONGEST + 1))


@pytest.mark.parametrize("times", ["0", "-1", "1.5", str(MOST_TERMS + 1), "x"])
def test_a_sum_has_a_whole_number_of_terms(times):
    with pytest.raises(ValueError, match=f"up to {MOST_TERMS}"):
        value(f"sum(1, {times})")
