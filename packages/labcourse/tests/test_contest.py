"""A contest of a class: what is released, what counts, and what the class sees."""

import json
import re
from dataclasses import replace

import pytest

from labcourse import assignment, collect, contest, examination, grading, release, results
from labcourse.grading import Store
from labcourse.sandbox import Limits
from labkit.puzzles.definitions import puzzles

from .handed_in import COURSE, NOTEBOOKS

HEAD = COURSE.partition("[labs")[0]
LAB = "puzzles"


def read(folder, text):
    path = folder / "course.toml"
    path.write_text(HEAD + text)
    return assignment.read(path)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    return read(tmp_path_factory.mktemp("course"), '[labs."puzzles"]\n')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('points = { "no puzzle" = 2 }', "the lesson has no puzzle no puzzle"),
        ('points = { "free first" = -1 }', "labs.puzzles.points.free first = -1: expected"),
        ('points = { "free first" = "2" }', "expected a number"),
        ("points = { free first = 2 }", "course.toml: "),
        ("points = 3", "labs.puzzles.points = 3: expected a table"),
        ("variant = true", "no exercise of this lesson has a variant"),
        ("pseudonyms = true", "unknown key 'pseudonyms'"),
    ],
)
def test_a_wrong_value_in_the_course_file_is_one_sentence(text, said, tmp_path):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        read(tmp_path, f'[labs."puzzles"]\n{text}\n')
    assert str(raised.value).startswith("course.toml: ") and "\n" not in str(raised.value)


def own_notebook(folder, change):
    """Write a copy of the puzzles' notebook in which `change` has changed the cells."""
    notebook = json.loads((NOTEBOOKS / f"{LAB}.ipynb").read_text())
    change(notebook["cells"])
    (folder / "mine").mkdir()
    (folder / "mine" / f"{LAB}.ipynb").write_text(json.dumps(notebook))
    (folder / "course.toml").write_text('notebooks = "mine"\n[labs."puzzles"]\n')
    return folder / "course.toml"


def with_source(cells, old, new):
    for cell in cells:
        text = "".join(cell["source"])
        cell["source"] = text.replace(old, new)


def test_a_notebook_with_an_unknown_or_a_repeated_puzzle_is_refused(tmp_path):
    path = own_notebook(
        tmp_path, lambda cells: with_source(cells, 'puzzle("free first"', 'puzzle("free last"')
    )
    with pytest.raises(ValueError, match="puzzles.ipynb: There is no puzzle 'free last'. Choose"):
        assignment.read(path)
    (tmp_path / "again").mkdir()
    path = own_notebook(
        tmp_path / "again",
        lambda cells: with_source(cells, 'puzzle("no temporary"', 'puzzle("free first"'),
    )
    with pytest.raises(ValueError, match="two cells have the puzzle 'free first'. Keep one"):
        assignment.read(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    return root * sign", "    return root.mul_(sign)"),
        ("    return root * sign", "    return root * sign  # or root.mul_(sign)"),
        ("import torch\n", "import torch\n"),
    ],
)
def test_a_notebook_that_holds_an_answer_is_not_released(old, new, tmp_path):
    course = assignment.read(own_notebook(tmp_path, lambda cells: with_source(cells, old, new)))
    if old == new:
        release.files(course, list(course.labs), "labkit")
        return
    with pytest.raises(ValueError, match="puzzle 'free first': its cell in puzzles.ipynb is not"):
        release.files(course, list(course.labs), "labkit")


def test_students_get_the_wasteful_functions_and_the_hints_without_outputs(course):
    [lab] = course.labs
    assert [item.number for item in lab.puzzles] == list(puzzles())
    copy = release.student_copy(course, lab)
    text = json.dumps(copy)
    assert text.count("Hint 3") == len(lab.puzzles) and "your best so far" not in text
    assert "def contrast(image)" in text and "labkit.use(gpus=" in text
    assert copy.metadata["labkit"]["lab"] == LAB
    opening = next(cell.source for cell in copy.cells if "The puzzles are a contest" in cell.source)
    assert opening.startswith(release.CONTEST) and "do not count toward your mark" in opening
    assert release.questions(course, lab)["free first"].startswith("Return the same image")
    with pytest.raises(ValueError, match="nbgrader cannot score puzzles"):
        release.files(course, [lab], "nbgrader")


def test_puzzles_count_only_if_the_course_file_says_so(course, tmp_path):
    assert course.labs[0].points == 0
    counted = read(tmp_path, '[labs."puzzles"]\npoints = { "free first" = 2, "one launch" = 1 }\n')
    assert counted.labs[0].points == 3
    said = release.student_copy(counted, counted.labs[0]).cells
    assert any("3 points in total: free first: 2, one launch: 1." in cell.source for cell in said)


def test_a_pseudonym_is_stable_and_depends_on_the_course(course, tmp_path):
    other = read(tmp_path, '[labs."puzzles"]\n')
    names = [contest.pseudonym(course, f"s{number:03d}") for number in range(300)]
    assert names == [contest.pseudonym(other, f"s{number:03d}") for number in range(300)]
    assert len(set(names)) == 300 and not any("s0" in name for name in names)
    (tmp_path / "course.toml").write_text(f'notebooks = "{NOTEBOOKS}"\n[labs."puzzles"]\n')
    assert contest.pseudonym(assignment.read(tmp_path / "course.toml"), "s000") != names[0]


def test_a_table_sorts_results_and_says_of_no_function_more_than_that_it_could_not_be_run(course):
    def record(student, status, score=None):
        item = {"number": "free first", "status": status, "message": "", "score": score}
        others = [
            {"number": name, "status": "not attempted", "message": ""}
            for name in list(puzzles())[1:]
        ]
        return {"student": student, "exercises": [item, *others]}

    records = [
        record("a", "tampered"),
        record("b", "time"),
        record("c", "wrong"),
        record("d", "over budget", 80 << 20),
        record("e", "right", 64 << 20),
        record("f", "right", 48 << 20),
        record("g", "not attempted"),
    ]
    first, *others = contest.tables(course, course.labs[0], records)
    assert [row["status"] for row in first["rows"]] == [
        *("right", "right", "over budget", "wrong", "could not be run", "could not be run"),
    ]
    assert [row["score"] for row in first["rows"][:3]] == ["48.00 MiB", "64.00 MiB", "80.00 MiB"]
    assert (first["best"], first["par"], first["untried"]) == ("48.00 MiB", "49.00 MiB", 1)
    assert all(not table["rows"] and table["untried"] == 7 for table in others)


def test_a_contest_without_points_changes_no_mark_and_its_page_is_for_the_class(course, tmp_path):
    [lab] = course.labs
    exercises = [examination.outcome(item, "not attempted", "") for item in lab.exercises]
    exercises[0] |= {"status": "time", "message": "your function took longer than 20 s"}
    examined = examination.Examined(exercises=exercises)
    examined.note("time", "free first: your function took longer than 20 s")
    record = {
        **{"student": "ada", "lab": LAB, "status": examined.status, "detail": examined.detail},
        **{"points": examined.points, "out_of": lab.points, "exercises": exercises, "written": []},
        **{"sources": {}, "cell_errors": [], "remarks": examined.remarks, "figures": []},
        **{"seed": "", "versions": {}, "sandbox": "bubblewrap", "submission": ""},
        **{"received": "", "known_from": "", "fingerprint": ""},
    }
    store = Store(tmp_path / "out")
    store.write_record(record)
    results.write(course, [collect.Submission("ada", LAB, "", "ada", None)], [], store)
    folder = store.folder
    assert (folder / "canvas.csv").read_text().splitlines()[0].endswith("Section")
    index = (folder / "index.html").read_text()
    assert "For you to know" in index and "No mark" not in index and "no points" in index
    page = (folder / "feedback" / LAB / "ada.html").read_text()
    assert "the scores do not count toward your mark" in page and "not marked yet" not in page
    assert "ran out of time" in page and "Your function took longer than 20 s." in page
    scores = (folder / "contest.html").read_text()
    assert "could not be run" in scores and "ran out of time" not in scores
    without = [lab for lab in course.labs if not lab.puzzles]
    results.write(replace(course, labs=tuple(without)), [], [], store)
    assert not (folder / "contest.html").exists()


LOOP = """    rows = []
    for part in scores.split(COUNT):
        rows.append(part.softmax(dim=1))
    return torch.cat(rows)"""
# The student's functions for "free first" and "one launch", without their first lines. A text that
# does not begin with spaces is the whole cell.
IN_PLACE = """    centred = image - image.mean()
    root = centred.abs().sqrt_()
    return root.mul_(centred.sign_())"""
FORGED = """import json, os, torch
import labkit.puzzles
from gputrace import Trace

os.makedirs(".labkit", exist_ok=True)
open(".labkit/scores.json", "w").write(json.dumps({"free first": 1, "one launch": 1}))
labkit.puzzles.judged = lambda *given: labkit.puzzles.Judgement("right", "Right.", 1)
labkit.puzzles.judged_here = lambda *given: labkit.puzzles.Judgement("right", "Right.", 1)
torch.isclose = lambda one, other, **_: torch.ones_like(one, dtype=torch.bool)
Trace.peaks = property(lambda trace: {0: 1})

def contrast(image):
    return image * 1

labkit.puzzle("free first", contrast)"""
REPLACED = """    import gputrace
    gputrace.Trace.peaks = property(lambda trace: {0: 1})
    return image * 1"""
KEPT = """kept = []
def contrast(image):
    if not kept:
        centred = image - image.mean()
        kept.append(centred.abs().sqrt() * centred.sign())
    return kept[0]

labkit.puzzle("free first", contrast)"""
FILES = """    open("/tmp/full", "wb").write(b"0" * (1 << 30))
    return scores.softmax(dim=1)"""
CLASS = {
    "ada": (IN_PLACE, "    return scores.softmax(dim=1)"),
    "bob": (
        "    return torch.sign(image - image.mean()) * (image - image.mean()).abs().sqrt()",
        None,
    ),
    "cyd": (None, LOOP.replace("COUNT", "20")),
    "dee": ("    return image.sign()", LOOP.replace("COUNT", "4")),
    "eve": (FORGED, "    return scores"),
    "fay": (REPLACED, "    import os\n    os._exit(0)"),
    "gus": ("    import ctypes\n    ctypes.string_at(0)", "    exit()"),
    "hal": ("    while True:\n        pass", FILES),
    "ivy": (None, None),
    "jon": (KEPT, "    return scores.softmax(dim=1"),
}


def handed_in(course, student):
    """Return the notebook of a student of the class."""
    copy = release.student_copy(course, course.labs[0])
    for cell, body in zip(_cells(copy, ("free first", "one launch")), CLASS[student], strict=True):
        if body is not None and not body.startswith(" "):
            cell.source = body
        elif body is not None:
            first, call = cell.source.splitlines()[0], cell.source.splitlines()[-1]
            cell.source = f"{first}\n{body}\n\n\n{call}"
    return json.dumps(copy)


def _cells(copy, names):
    for name in names:
        yield next(cell for cell in copy.cells if f'puzzle("{name}"' in cell.source)


@pytest.fixture(scope="module")
def graded(tmp_path_factory, bubblewrap):
    """The folder with the results of a made-up class of ten students, and its course."""
    folder = tmp_path_factory.mktemp("class")
    limits = "[limits]\ntrial_seconds = 20\nseconds = 600\n"
    course = read(folder, f'[labs."puzzles"]\npoints = {{ "one launch" = 2 }}\n{limits}')
    assert isinstance(course.limits, Limits)
    for student in CLASS:
        (folder / "in" / student).mkdir(parents=True)
        (folder / "in" / student / f"{LAB}.ipynb").write_text(handed_in(course, student))
    submissions, problems = collect.collect(folder / "in", course)
    assert not problems
    store = Store(folder / "out")
    grading.grade_all(course, submissions, store, sandbox="bubblewrap")
    results.write(course, submissions, problems, store)
    return folder / "out", course


EXPECTED = {
    "ada": (("right", 48 << 20), ("right", 1)),
    "bob": (("right", 64 << 20), ("not attempted", None)),
    "cyd": (("not attempted", None), ("right", 3)),
    "dee": (("wrong", None), ("over budget", 11)),
    "eve": (("wrong", None), ("wrong", None)),
    "fay": (("wrong", None), ("ended", None)),
    "gus": (("ended", None), ("could not be run", None)),
    "hal": (("time", None), ("could not be run", None)),
    "ivy": (("not attempted", None), ("not attempted", None)),
    "jon": (("wrong", None), ("could not be run", None)),
}


@pytest.mark.slow
def test_each_student_of_a_made_up_class_gets_what_the_function_did(graded):
    folder, _ = graded
    found = {}
    for student in CLASS:
        record = Store(folder).record(LAB, student)
        items = {item["number"]: item for item in record["exercises"]}
        pair = [items[name] for name in ("free first", "one launch")]
        found[student] = tuple((item["status"], item.get("score")) for item in pair)
    assert found == EXPECTED
    said = {}
    for student in ("gus", "jon"):
        items = {each["number"]: each for each in Store(folder).record(LAB, student)["exercises"]}
        said[student] = items["one launch"]["message"]
    assert said["jon"].endswith("not run: SyntaxError: '(' was never closed (line 2)")
    assert "your function uses something that cannot be copied" in said["gus"]


@pytest.mark.slow
def test_the_class_sees_scores_under_pseudonyms_and_each_student_finds_their_own(graded):
    folder, course = graded
    page = (folder / "contest.html").read_text()
    for student in CLASS:
        assert not re.search(rf"\b{student}\b", page)
        name = contest.pseudonym(course, student)
        assert (name in page) == (student != "ivy")
        assert name in (folder / "feedback" / LAB / f"{student}.html").read_text()
    assert "tampered" not in page and "replaced" not in page
    assert page.count(">right</td>") == 4 and "Best: 48.00 MiB" in page
    assert "Best: 48.00 MiB" in (folder / "index.html").read_text()
    marks = (folder / "canvas.csv").read_text()
    assert re.search(r"^ada,.*,2$", marks, re.MULTILINE)
