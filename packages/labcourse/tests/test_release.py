"""Released notebooks are complete, have no solutions, and are the same bytes each time.

Solutions that are put back earn all points.
"""

import json
import re
from dataclasses import replace

import nbformat
import pytest

from labcourse import assignment, examination, feedback, release
from labcourse.sandbox import Sandbox

from .handed_in import NOTEBOOKS

LESSONS = sorted(path.stem for path in NOTEBOOKS.glob("[0-9]*.ipynb"))
SOLVED = re.compile(r"```python\n(.*?)```", re.DOTALL)

WITH_QUESTION = f"""
course = "GPUs"
notebooks = "{NOTEBOOKS}"
[labs."03"]
points = {{ "03.2" = 2.5 }}
[[labs."03".written]]
id = "03.why"
question = "Why is the first GPU the fullest?"
points = 3
"""


@pytest.fixture(scope="module")
def whole_course(tmp_path_factory) -> assignment.Course:
    """A course with every lesson as a lab."""
    path = tmp_path_factory.mktemp("all") / "course.toml"
    labs = "".join(f'[labs."{lesson}"]\n' for lesson in LESSONS)
    path.write_text(f'notebooks = "{NOTEBOOKS}"\n{labs}')
    return assignment.read(path)


def solved(course, lab):
    """Return the students' notebook with the instructor's solutions in it."""
    notebook = release.student_copy(course, lab)
    solutions = [
        SOLVED.search(cell.source)[1]
        for cell in release.instructor_copy(course, lab).cells
        if "solution" in cell.metadata.get("tags", [])
    ]
    tasks = [cell for cell in notebook.cells if "exercise" in cell.metadata.get("tags", [])]
    for task, solution in zip(tasks, solutions, strict=True):
        task.source = solution
    return json.dumps(notebook).encode()


def test_students_get_no_solution_and_no_output(whole_course):
    for lab in whole_course.labs:
        notebook = release.student_copy(whole_course, lab)
        text = json.dumps(notebook)
        assert "<details>" not in text and "Solution of" not in text
        assert all(
            not cell.outputs and cell.execution_count is None
            for cell in notebook.cells
            if cell.cell_type == "code"
        )
        tasks = [cell for cell in notebook.cells if "exercise" in cell.metadata.get("tags", [])]
        assert [task.metadata["labkit"]["exercise"] for task in tasks] == [
            exercise.number for exercise in lab.exercises
        ]


def test_a_lab_imports_each_name_once_and_as_its_exercises_mean_it(whole_course):
    for lab in whole_course.labs:
        [source] = (
            cell.source
            for cell in release.student_copy(whole_course, lab).cells
            if cell.get("id") == "labkit-set-up"
        )
        names = re.findall(r"import (?:\S+ as )?(\w+)$", source, re.MULTILINE)
        assert sorted(names) == sorted(set(names)), lab.name
        if lab.name.startswith("11"):
            assert "from torch.distributed import checkpoint" in source
        if lab.name.startswith("12"):
            assert "import time" not in source  # only the text of a task has this word


def test_a_task_needs_no_cell_that_only_the_lesson_has(whole_course):
    """A student of an exam has only the exercises, and no other cells of the lesson."""
    for lab in whole_course.labs:
        handed_out = release.student_copy(whole_course, lab).cells
        lesson = nbformat.read(NOTEBOOKS / f"{lab.name}.ipynb", 4).cells
        source = "".join(cell.source for cell in handed_out if cell.cell_type == "code")
        known = set(re.findall(r"\w+", source))
        defined = set()
        for cell in lesson:
            if cell.cell_type == "code":
                defined |= set(re.findall(r"^(?:def|class) (\w+)", cell.source, re.MULTILINE))
                defined |= set(re.findall(r"^(\w+) = ", cell.source, re.MULTILINE))
        for number, task in release.questions(whole_course, lab).items():
            code = "\n".join(re.findall(r"`([^`]+)`", task))
            named = set(re.findall(r'(?<![.\w"])([A-Za-z_]\w*)', code)) & defined
            said = set(re.findall(r"lesson's `(\w+)`", task))
            parameters = set(re.findall(r"\w+", " ".join(re.findall(r"\((.*?)\)", code))))
            assert not named - known - said - parameters, number
            elsewhere = re.search(r"\b(above|below|last section|the cell|of the lesson)\b", task)
            assert not elsewhere, number


def test_a_lab_says_what_lateness_costs(tmp_path):
    path = tmp_path / "course.toml"
    lab = '[labs."00"]\ndue = 2027-02-01\n'
    cases = {
        "": "A late day costs all points.",
        "late_penalty = 0\n": "Nothing is deducted for lateness.",
        "late_penalty = 0.125\n": "Each late day costs 12.5% of your points.",
        "late_days = 1\n": "The first late day costs nothing. A further day costs all points.",
        "late_days = 2\nlate_penalty = 0.2\n": (
            "The first 2 late days cost nothing. Each further day costs 20% of your points."
        ),
    }
    for setting, expected in cases.items():
        path.write_text(setting + lab)
        course = assignment.read(path)
        text = release.student_copy(course, course.labs[0]).cells[1].source
        assert text.startswith(f"Due 1 February 2027, 23:59 (UTC). {expected} 1 point in total")


def test_feedback_asks_the_questions_without_marks(whole_course):
    for lab in whole_course.labs:
        asked = release.questions(whole_course, lab)
        assert len(asked) == len(lab.exercises)
        for question in asked.values():
            without_code = re.sub(
                "<(code|pre).*?</(code|pre)>", "", feedback.rich(question), flags=re.DOTALL
            )
            assert "*" not in without_code and "`" not in without_code, question


def test_marks_of_code_and_emphasis_become_html_and_nothing_else_does():
    assert (
        feedback.rich("`a*b*` **is** *not* <b> `c`")
        == "<code>a*b*</code> <strong>is</strong> <em>not</em> &lt;b&gt; <code>c</code>"
    )
    assert feedback.rich("2 * 3 * 4") == "2 * 3 * 4"


def test_solutions_and_stubs_are_found_for_each_exercise(whole_course):
    for lab in whole_course.labs:
        numbers = [exercise.number for exercise in lab.exercises]
        assert (
            list(release.solutions(whole_course, lab))
            == list(release.stubs(whole_course, lab))
            == numbers
        )
        assert all(release.solutions(whole_course, lab).values())


def test_the_instructor_gets_each_solution(whole_course):
    for lab in whole_course.labs:
        cells = release.instructor_copy(whole_course, lab).cells
        assert sum("solution" in cell.metadata.get("tags", []) for cell in cells) == len(
            lab.exercises
        )


@pytest.fixture(scope="module")
def box(whole_course, bubblewrap):
    # a busy machine is no failure
    unhurried = replace(whole_course.limits, cell_seconds=200, trial_seconds=200, seconds=1000)
    with Sandbox(bubblewrap, unhurried) as sandbox:
        yield sandbox


@pytest.mark.slow
@pytest.mark.sample(5)
@pytest.mark.parametrize("lesson", LESSONS)
def test_every_lab_stands_alone_and_its_solutions_earn_all_points(whole_course, box, lesson):
    """The controls must also find nothing in an honest notebook."""
    [lab] = (lab for lab in whole_course.labs if lab.name == lesson)
    given = release.handed_out(whole_course, lab)
    examined = examination.examine(solved(whole_course, lab), "ada", lab, whole_course, given, box)
    assert (examined.status, examined.points, examined.remarks, examined.cell_errors) == (
        "graded",
        lab.points,
        [],
        [],
    )


def test_a_release_is_the_same_bytes_each_time_and_drift_is_found(whole_course, tmp_path):
    labs = list(whole_course.labs[:2])
    files = release.files(whole_course, labs, "labkit")
    assert files == release.files(whole_course, labs, "labkit")
    release.write(files, tmp_path)
    assert release.drifted(files, tmp_path) == []
    changed = tmp_path / "student" / f"{labs[0].name}.ipynb"
    changed.write_text(changed.read_text().replace("def on_gpu", "def on_cpu"))
    (tmp_path / "instructor" / f"{labs[1].name}.ipynb").unlink()
    assert [line.split(" ", 1) for line in release.drifted(files, tmp_path)] == [
        [
            f"student/{labs[0].name}.ipynb",
            "differs from what its lesson and the course file give now",
        ],
        [f"instructor/{labs[1].name}.ipynb", "is missing"],
    ]


def test_exercises_are_taken_out_of_the_sections_of_a_lesson(tmp_path):
    """A lab has only the task, the stub and the check of an exercise in a section."""
    cells = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4).cells
    [stub] = [
        index for index, cell in enumerate(cells) if "exercise" in cell.metadata.get("tags", [])
    ]
    task = nbformat.v4.new_markdown_cell("What happened. **00.1** Write `on_gpu(numbers)`.")
    before = [nbformat.v4.new_markdown_cell("## A section"), nbformat.v4.new_code_cell("shown = 1")]
    after = [
        nbformat.v4.new_markdown_cell("## Another section"),
        nbformat.v4.new_code_cell("shown = 2"),
    ]
    lesson = nbformat.v4.new_notebook(cells=[*before, task, *cells[stub : stub + 3], *after])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "00_mine.ipynb").write_text(json.dumps(lesson))
    path = tmp_path / "course.toml"
    path.write_text('notebooks = "mine"\n[labs."00"]\n')
    course = assignment.read(path)
    [lab] = course.labs
    given = [cell.source for cell in release.student_copy(course, lab).cells]
    assert given[-3:] == [
        "**00.1** Write `on_gpu(numbers)`.",
        cells[stub].source,
        cells[stub + 1].source,
    ]
    assert not any("section" in source or "shown" in source for source in given)
    path.write_text('contents = "lesson"\nnotebooks = "mine"\n[labs."00"]\n')
    whole = assignment.read(path)
    given = [cell.source for cell in release.student_copy(whole, lab).cells]
    assert [given[0], given[1], given[3]] == ["## A section", "shown = 1", task.source]
    assert given[-2:] == ["## Another section", "shown = 2"]


def test_settings_of_nbgrader_are_not_written_over(whole_course, tmp_path):
    files = release.files(whole_course, [whole_course.lab("00")], "nbgrader")
    own, settings = "c.Exchange.root = '/srv'\n", tmp_path / release.CONFIG
    settings.write_text(own)
    with pytest.raises(ValueError, match="Add these lines to it") as raised:
        release.write(files, tmp_path)
    assert list(tmp_path.iterdir()) == [settings]
    settings.write_text(own + files[release.CONFIG])
    assert all(line in str(raised.value) for line in files[release.CONFIG].splitlines())
    release.write(files, tmp_path)
    assert settings.read_text().startswith(own) and release.drifted(files, tmp_path) == []


def test_points_and_written_questions_come_from_the_course_file(tmp_path):
    path = tmp_path / "course.toml"
    path.write_text(WITH_QUESTION)
    course = assignment.read(path)
    lab = course.lab("03")
    assert lab.points == 1 + 2.5 + 3 + 3
    cells = release.student_copy(course, lab).cells
    assert "Why is the first GPU the fullest?" in cells[-2].source
    assert cells[-1].metadata["labkit"] == {"written": "03.why"}
    whole = assignment.read(_with(path, 'contents = "lesson"\n' + WITH_QUESTION))
    assert len(release.student_copy(whole, lab).cells) > len(cells)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[labs."99"]', "no such lesson"),
        ("", "no labs"),
        (
            '[labs."03"]\npoint = 3',
            "unknown key 'point'. Expected one of due, points, variant, written",
        ),
        ('[labs."03"]\npoints = { "04.1" = 2 }', "no exercise 04.1"),
        ('tries = "two"\n[labs."03"]', "tries = 'two': expected int"),
        ('late_penalty = 2\n[labs."03"]', "late_penalty from 0 to 1"),
        ('[labs."03"]\ndue = "Monday"', "expected a date"),
        ('[labs."03"]\n[limits]\nmemory = "lots"', "lots"),
        (
            '[labs."03"]\n[extensions]\nada = { "04" = 2027-01-01 }',
            "there is no lab '04'. Choose one of 03_data_parallel",
        ),
    ],
)
def test_mistakes_in_the_course_file_are_named(text, said, tmp_path):
    path = _with(tmp_path / "course.toml", f'notebooks = "{NOTEBOOKS}"\n{text}')
    with pytest.raises(ValueError, match=re.escape(said)):
        assignment.read(path)


def _with(path, text):
    path.write_text(text)
    return path


def written_course(folder, text):
    path = folder / "course.toml"
    path.write_text(f'notebooks = "{NOTEBOOKS}"\n{text}')
    return assignment.read(path)


def test_a_variant_takes_the_place_of_its_exercise_and_has_its_points(tmp_path):
    text = '[labs."01"]\nvariant = true\npoints = { "01.1" = 3 }'
    course = written_course(tmp_path, text)
    [lab] = course.labs
    assert [(item.number, item.points) for item in lab.exercises[:2]] == [
        ("01.101", 3.0),
        ("01.2", 1.0),
    ]
    for contents in ("exercises", "lesson"):
        course = replace(course, contents=contents)
        copy = release.student_copy(course, lab)
        text = json.dumps(copy)
        assert "padding_mask" not in text and "phrase_mask" in text
        assert "01.101" in release.questions(course, lab)
        assert "padding_mask" not in json.dumps(release.instructor_copy(course, lab))
    assert "01.101" not in release.solutions(course, lab)
    assert "def on_device" in release.solutions(course, lab)["01.2"][0]
    with pytest.raises(ValueError, match="variants have no solution"):
        release.files(course, [lab], "nbgrader")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[labs."01"]\nvariant = 1', "expected true or false"),
        ('[labs."08"]\nvariant = true', "no exercise of this lesson has a variant"),
    ],
)
def test_a_wrong_variant_is_refused(tmp_path, text, said):
    with pytest.raises(ValueError, match=said):
        written_course(tmp_path, text)


@pytest.mark.parametrize("contents", ["exercises", "lesson"])
def test_a_notebook_says_how_to_install_the_kit(tmp_path, contents):
    text = f'install = "git+https://example.org/kit"\ncontents = "{contents}"\n[labs."01"]'
    course = written_course(tmp_path, text)
    said = "\n".join(cell.source for cell in release.student_copy(course, course.labs[0]).cells)
    assert "run `%pip install -q git+https://example.org/kit` in a new cell" in said
