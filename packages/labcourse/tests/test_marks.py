"""What lateness costs."""

from datetime import UTC, datetime, timedelta

import pytest

from labcourse.assignment import Assignment, Course
from labcourse.marks import add_marks

DUE = datetime(2026, 11, 20, 12, tzinfo=UTC)
LAB = Assignment("00_start_here", "Start here", (), due=DUE)
COURSE = Course(
    "GPUs",
    3,
    (LAB,),
    late_days=1,
    late_penalty=0.25,
    extensions={("eve", LAB.name): DUE + timedelta(days=5)},
)


def marks(student: str, late: timedelta) -> dict:
    record = {
        "student": student,
        "lab": LAB.name,
        "points": 4.0,
        "written": [],
        "received": (DUE + late).isoformat(),
    }
    return add_marks(record, COURSE, {})["marks"]


@pytest.mark.parametrize(
    ("late", "days", "points"),
    [
        (timedelta(hours=-1), 0, 4.0),
        (timedelta(0), 0, 4.0),
        (timedelta(seconds=1), 1, 4.0),  # one day is free
        (timedelta(days=1), 1, 4.0),
        (timedelta(days=1, seconds=1), 2, 3.0),
        (timedelta(days=9), 9, 0.0),  # never below nothing
    ],
)
def test_each_day_begun_after_the_free_ones_costs_its_share(late, days, points):
    found = marks("ada", late)
    assert (found["late_days"], found["points"], found["deduction"]) == (days, points, 4.0 - points)


def test_an_extension_is_the_students_own_due_date():
    assert marks("eve", timedelta(days=5))["points"] == 4.0
    assert marks("eve", timedelta(days=7))["points"] == 3.0
