"""One sentence says what is wrong in a course file or in an instructor's notebook."""

import json
import math
from datetime import UTC, date, datetime, time, timedelta, timezone
from functools import cache

import nbformat
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labcourse import assignment, release

from .handed_in import NOTEBOOKS

COURSE = f'notebooks = "{NOTEBOOKS}"\n'
SEED = "0123456789abcdef0123456789abcdef"


def read(folder, text):
    path = folder / "course.toml"
    path.write_text(text, encoding="utf-8")
    return assignment.read(path)


def refusal(folder, text) -> str:
    with pytest.raises(ValueError) as raised:
        read(folder, text)
    said = str(raised.value)
    assert said.startswith("course.toml: ") and "\n" not in said
    return said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[labs]\nx = 3", "labs.x = 3: expected a table"),
        ("labs = { x = 3 }", "labs.x = 3: expected a table"),
        ("[[labs]]\nname = 3", "labs = [{'name': 3}]: expected a table"),
        ('[labs."*"]', "labs.*: there is no such lesson"),
        ('[labs."/00_start_here"]', "there is no such lesson"),
        ('[labs."../00_start_here"]', "there is no such lesson"),
        ('[labs."00"]\n[labs."00_start_here"]', "labs: 00_start_here is described twice"),
        ('[labs."00"]\n[labs."00"]', "Cannot declare"),
        (
            '[labs."00"]\ndue = 23:59:00',
            "labs.00.due = 23:59:00: expected a date",
        ),
        (
            '[labs."00"]\npoints = { "00.1" = -0.5 }',
            "labs.00.points.00.1 = -0.5: expected points from 0",
        ),
        (
            '[labs."00"]\n[extensions]\nada = { "77" = 2026-12-05 }',
            "extensions.ada: there is no lab '77'",
        ),
        (
            '[labs."00"]\n[extensions]\nada = { "" = 2026-12-05 }',
            "extensions.ada: there is no lab ''",
        ),
        (
            '[labs."00"]\n[extensions]\n" " = { "00" = 2026-12-05 }',
            "the id of a student is empty",
        ),
        (
            '[labs."00"]\n[extensions]\nada = { "00" = 2026-12-05, "0" = 2026-12-06 }',
            "extensions.ada: 00_start_here has two dates",
        ),
        (
            '[labs."00"]\n[extensions]\nada = 2026-12-05',
            "expected a date for each lab, such as ada = {",
        ),
        ('[labs."00"]\n[extensions]\nada = ["00", 2026-12-05]', "expected a date for each lab"),
        (
            '[labs."00"]\n[extensions]\nada = { "00" = 2026-12-05, "00_start_here" = 2026-12-06 }',
            "has two dates",
        ),
        ('[labs."00"]\n[extensions]\nada = { "00" = 5 }', "extensions.ada.00 = 5: expected a date"),
        ('extensions = "no"\n[labs."00"]', "extensions = 'no': expected a table"),
        ('[labs."00"]\npoints = [1, 2]', "labs.00.points = [1, 2]: expected a table"),
        ('[labs."00"]\npoints = 2', "labs.00.points = 2: expected a table"),
        ('[labs."00"]\npoints = { "00.1" = -1 }', "labs.00.points.00.1 = -1: expected"),
        ('[labs."00"]\npoints = { "00.1" = "2" }', "labs.00.points.00.1 = '2': expected a number"),
        ('[labs."00"]\npoints = { "00.1" = nan }', "labs.00.points.00.1 = nan"),
        ('[labs."00"]\npoints = { "00.1" = true }', "expected a number"),
        ('[labs."00"]\npoints = { 00.1 = 2 }', "put the number of the exercise in quotes"),
        ('[labs."00"]\ndue = 07:32:00', "expected a date"),
        ('[labs."00"]\ndue = 0026-12-01', "expected a date"),
        ('[labs."00"]\nwritten = "Why?"', "labs.00.written = 'Why?': expected a list of tables"),
        ('[labs."00"]\nwritten = ["Why?"]', "has the item 'Why?': expected"),
        (
            '[labs."00"]\n[labs."00".written]\nid = "a"\nquestion = "?"',
            "Begin each with [[labs.00.written]]",
        ),
        (
            '[labs."00"]\n[[labs."00".written]]\nid = 3\nquestion = "?"',
            "labs.00.written.id = 3: expected str",
        ),
        (
            '[labs."00"]\n[[labs."00".written]]\nid = "a b"\nquestion = "?"',
            "each question needs an id",
        ),
        ('[labs."00"]\n[[labs."00".written]]\nid = "a"', "and a question"),
        (
            '[labs."00"]\n[[labs."00".written]]\nid = "a"\nquestion = "?"\npoints = -2',
            "labs.00.written.points = -2",
        ),
        ('[labs."00"]\n[[labs."00".written]]\nid = "00.1"\nquestion = "?"', "the id 00.1 is taken"),
        (
            'labs."00".written = [{ id = "a.b", question = "?" }, { id = "a-b", question = "?" }]',
            "the id a-b is taken",
        ),
        (
            '[labs."00"]\nlate_days = 2',
            "unknown key 'late_days'. Write `late_days` at the top of the file",
        ),
        ('variant = true\n[labs."00"]', "Write `variant` below the line of a lab"),
        ('[labs."00"]\ndue = 01.12.2026', "The line is: due = 01.12.2026. A text needs quotes"),
        ('[labs."00"]\n[extensions]\ns1 = { "01" = 2026-12-01 }', "extensions.s1: there is no"),
        ('[labs."00"]\n[extensions]\ns1 = 2026-12-01', "extensions.s1 = 2026-12-01: expected"),
        ('[labs."00"]\npoints = { "00.1" = -1 }', "points.00.1 = -1: expected points from 0"),
        ('[labs."00"]\npoints = { "00.2" = 1 }', "has no exercise 00.2. It has '00.1'"),
        (
            '[labs."00"]\nvariant = true\npoints = { "00.1" = 1, "00.101" = 2 }',
            "00.101 takes the place of 00.1. Keep the points of one",
        ),
        ('tries = true\n[labs."00"]', "tries = true: expected int"),
        ('tries = 0\n[labs."00"]', "tries = 0: expected tries from 1 to 100"),
        ('late_days = -1\n[labs."00"]', "late_days = -1"),
        ('late_days = 1.5\n[labs."00"]', "late_days = 1.5: expected int"),
        ('late_penalty = nan\n[labs."00"]', "late_penalty = nan"),
        ('contents = "all"\n[labs."00"]', "expected one of exercises, lesson"),
        ('course = 3\n[labs."00"]', "course = 3: expected str"),
        ('course = "a\\nb"\n[labs."00"]', "without control characters"),
        ('course = ""\n[labs."00"]', "the name is empty"),
        ('seed = "short"\n[labs."00"]', "can be guessed"),
        ('[labs."00"]\n[limits]\nmemory = true', "limits.memory = true: expected a size"),
        ('[labs."00"]\n[limits]\nmemory = 4', "limits.memory = 4: expected memory from 1,048,576"),
        ('[labs."00"]\n[limits]\nmemory = "' + "9" * 400 + 'GiB"', "expected a size"),
        ('[labs."00"]\n[limits]\nprocesses = 1.5', "limits.processes = 1.5: expected int"),
        ('[labs."00"]\n[limits]\nseconds = inf', "limits.seconds = inf"),
        ('[labs."00"]\n[limits]\nseconds = nan', "limits.seconds = nan"),
        ('[labs."00"]\n[limits]\ncolour = 3', "limits: unknown key 'colour'"),
    ],
)
def test_each_mistake_is_one_sentence(text, said, tmp_path):
    assert said in refusal(tmp_path, COURSE + text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('notebooks = 3\n[labs."00"]', "notebooks = 3: expected str"),
        ('notebooks = "nowhere"\n[labs."00"]', "there is no folder"),
        ('notebooks = "a\\u0000b"\n[labs."00"]', "without control characters"),
        ("labs = 3", "labs = 3: expected a table"),
        ("a = " + "[" * 9000, "nested too deeply"),
    ],
)
def test_mistakes_before_any_lab_are_one_sentence(text, said, tmp_path):
    assert said in refusal(tmp_path, text)


def test_a_course_file_that_is_no_text(tmp_path):
    (tmp_path / "course.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="expected a text file in UTF-8"):
        assignment.read(tmp_path / "course.toml")


def test_a_course_file_with_the_mark_of_windows_editors(tmp_path):
    assert read(tmp_path, "\ufeff" + COURSE + '[labs."00"]').labs


def test_a_seed_that_cannot_be_read(tmp_path):
    (tmp_path / "course.seed").write_text("nonsense")
    assert "course.seed beside the course file holds no seed" in refusal(
        tmp_path, COURSE + '[labs."00"]'
    )
    (tmp_path / "course.seed").unlink()
    (tmp_path / "course.seed").mkdir()
    assert "Make it writable, or set `seed`" in refusal(tmp_path, COURSE + '[labs."00"]')


def mine(folder, change):
    """Return a course with one notebook of the instructor's own, a changed copy of lesson 0."""
    (folder / "mine").mkdir()
    notebook = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4)
    change(notebook.cells)
    (folder / "mine" / "00_mine.ipynb").write_text(json.dumps(notebook))
    return 'notebooks = "mine"\n[labs."00"]'


def check_of(cells):
    return next(
        cell for cell in cells if cell.cell_type == "code" and "labkit.check(" in cell.source
    )


def with_magic(cells):
    check_of(cells).source = "%time " + check_of(cells).source


def without_answer(cells):
    check_of(cells).source = 'labkit.check("00.1")'


def without_check(cells):
    cells.remove(check_of(cells))


def without_tag(cells):
    cells[cells.index(check_of(cells)) - 1].metadata = {}


def with_two_checks(cells):
    at = cells.index(check_of(cells))
    cells[at + 1 : at + 1] = cells[at - 1 : at + 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_magic, "without a magic such as %time"),
        (without_answer, 'Write labkit.check("00.1", NAME_OF_THE_FUNCTION)'),
        (
            without_check,
            "no cell with labkit.check follows the exercise that begins with 'def on_gpu",
        ),
        (without_tag, "the cell above the check of 00.1 has no tag `exercise`. Add the tag"),
        (with_two_checks, "two cells check 00.1"),
    ],
)
def test_a_notebook_of_ones_own_that_gives_no_exercises(change, said, tmp_path):
    assert said in refusal(tmp_path, mine(tmp_path, change))


@pytest.mark.parametrize(
    "content",
    [b"", b"{broken", b"[]", b'{"cells": 3}', b'{"nbformat": 4, "cells": [{}]}', b"\xff\xfe"],
)
def test_a_notebook_of_ones_own_that_is_none(content, tmp_path):
    text = mine(tmp_path, lambda cells: None)
    (tmp_path / "mine" / "00_mine.ipynb").write_bytes(content)
    assert "00_mine.ipynb cannot be read as a notebook" in refusal(tmp_path, text)


def test_a_notebook_of_ones_own_needs_no_solutions(tmp_path):
    def without_solutions(cells):
        cells[:] = [cell for cell in cells if "solution" not in cell.metadata.get("tags", [])]

    course = read(tmp_path, mine(tmp_path, without_solutions))
    for kind in release.FORMATS[:2]:
        files = release.files(course, list(course.labs), kind)
        notebooks = [text for name, text in files.items() if name.endswith(".ipynb")]
        assert notebooks and all("labkit.check" in text for text in notebooks)


def test_an_exercise_that_the_kit_does_not_check(tmp_path):
    def renumbered(cells):
        check_of(cells).source = check_of(cells).source.replace("00.1", "77.1")

    course = read(tmp_path, mine(tmp_path, renumbered))
    with pytest.raises(ValueError, match="00_mine.ipynb: there is no check for exercise 77.1"):
        release.files(course, list(course.labs), "labkit")


# Course files at random: right ones in which some values are replaced

zones = st.none() | st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(
    lambda offset: timezone(timedelta(minutes=offset // timedelta(minutes=1)))
)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = (
    st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.integers(-1, 5)
    | st.floats()
    | texts
    | st.dates()
    | st.datetimes(timezones=zones)
    | st.times()
    | st.sampled_from(["00", "01", "00_start_here", "00.1", "01.1", "4GiB", SEED, "Why?"])
)
keys = texts | st.sampled_from(
    [
        "00",
        "01",
        "ada",
        "00.1",
        "01.2",
        "id",
        "question",
        "points",
        "due",
        "written",
        "memory",
        "seconds",
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


def sometimes(right):
    """Return the right value, or now and then a random wrong value."""
    return st.integers(0, 9).flatmap(lambda chance: values if chance == 0 else right)


questions = st.fixed_dictionaries(
    {
        "id": sometimes(st.sampled_from(["why", "how.1", "how-1", "00.1"])),
        "question": sometimes(st.just("Why?")),
    },
    optional={"points": sometimes(st.integers(0, 5))},
)
dates = st.dates(date(2026, 1, 1), date(2027, 1, 1)) | st.datetimes(
    datetime(2026, 1, 1), datetime(2027, 1, 1), timezones=zones
)
labs = st.fixed_dictionaries(
    {},
    optional={
        "due": sometimes(dates),
        "points": sometimes(
            st.dictionaries(
                st.sampled_from(["00.1", "01.1", "01.2"]), sometimes(st.floats(0, 9)), max_size=2
            )
        ),
        "written": sometimes(st.lists(sometimes(questions), max_size=2)),
    },
)
courses = st.fixed_dictionaries(
    {
        "labs": sometimes(
            st.dictionaries(
                st.sampled_from(["00", "01", "00_start_here"]) | texts,
                sometimes(labs),
                min_size=1,
                max_size=2,
            )
        )
    },
    optional={
        "course": sometimes(texts),
        "seed": sometimes(st.just(SEED)),
        "tries": sometimes(st.integers(1, 3)),
        "contents": sometimes(st.sampled_from(["exercises", "lesson"])),
        "late_days": sometimes(st.integers(0, 3)),
        "late_penalty": sometimes(st.floats(0, 1)),
        "limits": sometimes(
            st.dictionaries(
                st.sampled_from(["seconds", "memory", "processes", "grace"]), values, max_size=2
            )
        ),
        "extensions": sometimes(
            st.dictionaries(
                texts, sometimes(st.dictionaries(st.sampled_from(["00", "01"]), dates)), max_size=2
            )
        ),
        "surprise": values,
    },
)


def as_toml(value):
    """Return a value in the syntax of TOML, on one line."""
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{as_toml(key)} = {as_toml(item)}" for key, item in value.items())
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return repr(value)


@cache
def notebooks_of_two_lessons(folder):
    """Copy only the first two lessons to a folder, which can be read quickly."""
    path = folder / "two"
    path.mkdir(exist_ok=True)
    for lesson in sorted(NOTEBOOKS.glob("0[01]_*.ipynb")):
        (path / lesson.name).write_bytes(lesson.read_bytes())
    return path


@settings(
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
    ]
)
@given(content=courses)
def test_no_course_file_ends_in_a_traceback(content, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    content = {"notebooks": str(notebooks_of_two_lessons(folder)), **content}
    text = "\n".join(f"{as_toml(key)} = {as_toml(value)}" for key, value in content.items())
    try:
        course = read(folder, text)
    except ValueError as error:
        assert str(error).startswith("course.toml: ") and "\n" not in str(error), str(error)
        return
    for kind in release.FORMATS[:2]:
        assert release.files(course, list(course.labs), kind)
    assert all(
        course.due("ada", lab) is None or course.due("ada", lab) > datetime(1999, 1, 1, tzinfo=UTC)
        for lab in course.labs
    )


def test_a_lesson_is_found_by_its_number_with_or_without_zero(tmp_path):
    assert read(tmp_path, COURSE + '[labs."1"]').labs == read(tmp_path, COURSE + '[labs."01"]').labs
