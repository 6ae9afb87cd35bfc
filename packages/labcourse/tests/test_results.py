"""The pages and tables of a grading, without a sandbox."""

import csv
import hashlib
import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from labcourse import assignment, collect, examination, feedback, grading, results
from labcourse.examination import Examined
from labcourse.grading import Store

from .handed_in import COURSE, notebook
from .made_up_class import made_up_class

LAB = "00_start_here"
QUESTION = """
late_days = 2
[labs."00"]
due = 2026-11-20
[[labs."00".written]]
id = "00.why"
question = "Why does `copy_` *not* wait?"
points = 2
"""
RIGHT = "def on_gpu(numbers):\n    return torch.tensor(numbers, device='cuda')"
SECRET = "for the instructor alone"


@pytest.fixture(scope="module")
def asking(tmp_path_factory) -> assignment.Course:
    path = tmp_path_factory.mktemp("course") / "course.toml"
    path.write_text(QUESTION.replace("[labs", COURSE.partition("[labs")[0] + "[labs", 1))
    return assignment.read(path)


def record(
    course,
    student,
    *,
    status="graded",
    exercise="right",
    message="Right",
    source=RIGHT,
    answer="",
    beside="",
    **more,
):
    """Return a record in the form that grading writes."""
    lab = course.lab("00")
    examined = Examined()
    if status != "graded":
        examined.note(
            status, f"{SECRET}, {status}" if status not in feedback.ENDINGS else "code cell 3"
        )
    points = 1.0 if exercise == "right" else 0.0
    examined.exercises = [
        examination.outcome(lab.exercises[0], exercise, message) | {"points": points}
    ]
    return {
        "student": student,
        "lab": lab.name,
        "status": examined.status,
        "detail": examined.detail,
        "points": examined.points,
        "out_of": lab.points,
        "exercises": examined.exercises,
        "written": [
            {"id": task.id, "answer": answer, "beside": beside, "out_of": task.points}
            for task in lab.written
        ],
        "sources": {"00.1": source},
        "cell_errors": [],
        "remarks": examined.remarks,
        "figures": [],
        "seed": "",
        "versions": {},
        "sandbox": "bubblewrap",
        "submission": "",
        "received": "",
        "known_from": "",
        "fingerprint": "",
    } | more


def written(course, records, folder, problems=(), received=""):
    """Write the results of these records, and return the folder."""
    store = Store(folder)
    submissions = []
    for item in records:
        store.write_record(item)
        digest = hashlib.sha256(item["student"].encode()).hexdigest()
        known = "nbgrader" if received else ""
        submissions.append(
            collect.Submission(
                item["student"],
                item["lab"],
                digest,
                item["student"],
                None,
                received=received,
                known_from=known,
            )
        )
    results.write(course, submissions, list(problems), store)
    return folder


def page(folder, student):
    return (folder / "feedback" / LAB / f"{student}.html").read_text()


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("status", [kind for kind in examination.KINDS])
def test_students_do_not_see_remarks_for_the_instructor(status, asking, tmp_path):
    exercise = "wrong" if status in examination.FINISHED else status
    told = record(
        asking,
        "ada",
        status=status,
        exercise=exercise,
        message=SECRET if exercise not in feedback.ENDINGS else "code cell 3",
    )
    if exercise == "wrong":
        told["exercises"][0]["message"] = "Not yet: it is on the CPU"
    folder = written(asking, [told], tmp_path)
    given = page(folder, "ada")
    for text in (given, (folder / "canvas.csv").read_text(), (folder / "moodle.csv").read_text()):
        assert SECRET not in text and "tampered" not in text and "altered" not in text
    assert ("code cell 3" in given) == (status in feedback.ENDINGS)
    assert (
        "code cell 3" in (folder / "index.html").read_text()
        or SECRET in (folder / "index.html").read_text()
    )


def test_a_page_says_what_a_student_needs(asking, tmp_path):
    late = record(
        asking, "ada", exercise="wrong", message="Not yet: `x` is on cpu", answer="Because"
    )
    given = page(written(asking, [late], tmp_path, received="2026-11-22T12:00:00+00:00"), "ada")
    assert (
        "2 days late" in given
        and "The first 2 late days cost nothing." in given
        and "Nothing was deducted for lateness." in given
    )
    assert "Not yet: <code>x</code> is on cpu. For what you need" in given
    assert "Why does <code>copy_</code> <em>not</em> wait?" in given
    assert (
        "Write <code>on_gpu(numbers)</code>" in given
        and '<pre class="code" tabindex="0">def on_gpu' in given
    )
    assert "Not marked yet." in given


def test_an_exercise_and_a_notebook_run_out_of_time_in_the_same_words(asking, tmp_path):
    slow = record(
        asking, "ada", status="time", exercise="time", message="your answer took longer than 30 s"
    )
    folder = written(asking, [slow], tmp_path)
    assert "00.1: <span" in page(folder, "ada") and ">ran out of time</span>" in page(folder, "ada")
    assert "ran out of time</td>" in (folder / "index.html").read_text()


def part(index, name):
    """Return one part of the page, from the list of reasons to look at a submission."""
    found = re.search(rf"<h3>{name}</h3>(.*?)(?=<h[23]>)", index, re.DOTALL)
    return found[1] if found else ""


def test_an_id_that_only_an_extension_has_gets_no_row(asking, tmp_path):
    extended = replace(asking, extensions={("adda", LAB): datetime(2026, 12, 1, tzinfo=UTC)})
    problems = [
        collect.Problem("adda", LAB, "unlisted", "the course file has an extension for this id"),
        collect.Problem("bob", LAB, "missing", "nothing was handed in"),
    ]
    folder = written(extended, [record(asking, "ada")], tmp_path, problems)
    for name, column in {"canvas.csv": "SIS User ID", "moodle.csv": "ID number"}.items():
        assert [row[column] for row in rows(folder / name) if row[column]] == ["ada", "bob"]


def test_what_needs_a_look_is_short_and_sorted(asking, tmp_path):
    class_ = [record(asking, f"s{number}", answer=f"Because {number}") for number in range(10)]
    class_ += [
        record(asking, "bob"),
        record(asking, "cyd"),
        record(asking, "dee", beside="It is <queued>"),
    ]
    class_ += [record(asking, "eve", status="tampered", exercise="tampered", message="")]
    problems = [
        collect.Problem("fay", LAB, "duplicate", "2 submissions"),
        collect.Problem("gus", LAB, "renamed", "x is taken for y"),
    ]
    folder = written(asking, class_, tmp_path, problems)
    index = (folder / "index.html").read_text()
    assert "00.why: 11 of 14" in index
    assert index.count("to mark in written.csv") == 0
    assert part(index, "No mark").count("<tr><td>") == 2 and "Duplicate: 2 submissions." in part(
        index, "No mark"
    )
    assert (
        "It is &lt;queued&gt;" in part(index, "For you to decide")
        and part(index, "For you to decide").count("<tr><td>") == 1
    )
    known = part(index, "For you to know")
    assert known.count("<tr><td>") == 2 and "Renamed" in known
    assert (
        re.search(r"bob.*cyd.*00.why is empty, and counts 0 points", known) and ">eve<" not in known
    )


def test_text_beside_an_empty_answer_keeps_the_mark_open_until_it_is_marked(asking, tmp_path):
    told = record(asking, "ada", beside="Because.")
    folder = written(asking, [told], tmp_path)
    assert rows(folder / "canvas.csv")[1][LAB] == ""
    table = (folder / "written.csv").read_text()
    assert "Because." in table
    (folder / "written.csv").write_text(table.replace("00.why,,2,,", "00.why,2,2,Good,"))
    written(asking, [told], tmp_path)
    assert rows(folder / "canvas.csv")[1][LAB] == "3" and "Good" in page(folder, "ada")
    # is to be marked again
    written(asking, [record(asking, "ada", beside="Because, changed.")], tmp_path)
    assert rows(folder / "canvas.csv")[1][LAB] == ""


def test_an_answer_that_is_empty_counts_nothing_and_is_named(asking, tmp_path):
    folder = written(asking, [record(asking, "ada")], tmp_path)
    assert rows(folder / "canvas.csv")[1][LAB] == "1" and "No answer: 0 of 2 points." in page(
        folder, "ada"
    )
    assert "00.why is empty" in (folder / "index.html").read_text()


@pytest.fixture(scope="module")
def alike(asking, tmp_path_factory):
    """The page that compares the answers of a class of 20, in which some students copied."""
    answers, planted = made_up_class(20, [2, 3])
    class_ = [
        record(asking, student, source=source, answer=f"Since {student}")
        for student, source in answers.items()
    ]
    class_ += [
        record(
            asking, f"t{number}", source=RIGHT.replace("numbers", f"n{number}"), answer="As it is."
        )
        for number in range(10)
    ]
    stub = "def on_gpu(numbers):\n    ..."
    class_ += [
        record(asking, f"u{number}", source=stub, exercise="not attempted") for number in range(3)
    ]
    class_ += [
        record(asking, "v", source="(" * 3000, exercise="wrong"),
        record(asking, "w", source="<script>alert(1)", exercise="wrong"),
    ]
    return written(asking, class_, tmp_path_factory.mktemp("alike")), planted


def test_the_page_of_comparisons_shows_copies_and_says_with_numbers_what_is_trivial(alike):
    folder, planted = alike
    shown = (folder / "comparison.html").read_text()
    section = shown.partition("<h3>00.1</h3>")[2].partition("<h3>")[0]
    groups = [set(re.findall(r">(s\d+)</a>", row)) for row in section.split("<tr><td>")[1:]]
    assert sorted(groups, key=sorted) == sorted(planted, key=sorted)
    assert (
        "10 of 32 (31%)" in section
        and "parts, short)" in section
        and "Equal answers say little here" in section
    )
    written_answers = shown.partition("00.why</h3>")[2]
    assert all(f">t{number}</a>" in written_answers for number in range(10))
    pairs = shown.partition("rare answers</h2>")[2].partition("<h2>")[0]
    assert len(re.findall("<tr><td>", pairs)) == 1 + 3 and "<script>" not in shown


def test_students_see_nothing_of_the_comparison(alike):
    folder, planted = alike
    first = min(planted[0])
    others = {student for group in planted for student in group} - {first}
    assert not any(student in page(folder, first) for student in others)
    assert "comparison" not in page(folder, first)


def test_the_same_records_give_the_same_pages(alike, asking, tmp_path):
    folder, _ = alike
    records = [
        Store(folder).record(LAB, path.stem)
        for path in sorted((folder / "records" / LAB).iterdir())
    ]
    again = written(asking, reversed(records), tmp_path)
    assert (again / "comparison.html").read_bytes() == (folder / "comparison.html").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("borrowed_sandbox")
def test_the_copies_in_a_class_of_100_are_found(tmp_path):
    """Collect, grade in sandboxes and compare the submissions of a class."""
    (tmp_path / "course.toml").write_text(COURSE.replace('[labs."01"]\n[labs."06"]\n', ""))
    course = assignment.read(tmp_path / "course.toml")
    answers, planted = made_up_class(100, [2, 2, 3, 4, 6])
    for student, source in answers.items():
        (tmp_path / "in" / student).mkdir(parents=True)
        (tmp_path / "in" / student / f"{LAB}.ipynb").write_bytes(notebook(source))
    submissions, problems = collect.collect(tmp_path / "in", course)
    store = Store(tmp_path / "out")
    grading.grade_all(course, submissions, store, sandbox="bubblewrap")
    results.write(course, submissions, problems, store)
    assert problems == []
    assert {row["points"] for row in rows(tmp_path / "out" / "grades.csv")} == {"1"}
    section = (tmp_path / "out" / "comparison.html").read_text().partition("<h3>00.1</h3>")[2]
    groups = [set(re.findall(r">(s\d+)</a>", row)) for row in section.split("<tr><td>")[1:]]
    assert sorted(groups, key=sorted) == sorted(planted, key=sorted)
