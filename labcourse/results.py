"""The results of a grading: tables for Canvas, for Moodle and for everything else, a page a student, and a page for the instructor.

The students' pages go back in zip files that Canvas and Moodle take, or as messages for a mail program.
"""

import base64
import io
import re
import statistics
import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from email.message import EmailMessage
from email.policy import SMTP
from pathlib import Path, PurePosixPath
from typing import Any

import jinja2

from labcourse import backends, collect, marks, release, tables
from labcourse.assignment import Assignment, Course
from labcourse.collect import Problem, Submission
from labcourse.examination import KINDS
from labcourse.grading import Store, write_file
from labkit import checks

__all__ = ["write"]

GRADES = (
    "student",
    "lab",
    "status",
    "points",
    "out_of",
    "exercises",
    "late_days",
    "deduction",
    "to_mark",
    "detail",
    "received",
    "sandbox",
    "seed",
)
CANVAS = ("Student", "ID", "SIS User ID", "SIS Login ID", "Section")
MOODLE = ("Identifier", "Full name", "ID number", "Email address")
BINS = 10
RETURN = "return"  # the folder of what goes back to students
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # so that the same pages make the same bytes
MAIL = ("Email address", "Email", "email", "mail")  # columns of the table of students


People = dict[str, dict[str, str]]  # rows of the instructor's own table by student: what a platform knows them by


def write(
    course: Course,
    submissions: list[Submission],
    problems: list[Problem],
    store: Store,
    people: People | None = None,
    dates: marks.Dates | None = None,
) -> None:
    """All tables and pages, from the records of these submissions and from nothing else: the same bytes each time.

    `dates`: when submissions came, in the instructor's word; beside them count those in the column `corrected` of dates.csv.

    Raises ValueError where one of the tables that people fill in, of marks or of dates, holds something else.
    """
    written, said = marks.read_written(store.folder), {**(dates or {}), **marks.read_dates(store.folder / marks.DATES)}
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    pages.filters |= {"number": lambda value: f"{value:g}", "moment": _moment}
    keys = [(item.lab, item.student) for item in submissions]
    questions = {lab.name: release.questions(course, lab) for lab in course.labs}
    for item in submissions:
        try:
            record = store.record(item.lab, item.student)
            if record is None:
                raise ValueError("there is no record")
            corrected = said.get((item.student, item.lab)) or said.get((item.student, item.lab[:2]))
            record["received"], record["known_from"] = (corrected, marks.INSTRUCTOR) if corrected else (item.received, item.known_from)
            record |= {"late": item.late, "file_time": item.file_time}
            record = marks.add_marks(record, course, written)
            store.write_record(record)
            _write_feedback(course, record, store, pages, questions[item.lab])
        except Exception as error:  # of one student: the others get their pages
            if "marks" not in (store.record(item.lab, item.student) or {}):
                keys.remove((item.lab, item.student))
            why = f"its record or page could not be written ({type(error).__name__}: {error}): grade it again"
            problems = [*problems, Problem(item.student, item.lab, "failed", why)]
    _leave_out_others(store, {(item.lab, item.student) for item in submissions})
    store.join_resources()
    write_file(store.folder / marks.WRITTEN, marks.written_table(_records(store, keys)).encode())
    write_file(store.folder / marks.DATES, marks.dates_table(_records(store, keys), course).encode())
    ungraded = [_ungraded(problem) for problem in problems if (problem.lab, problem.student) not in set(keys)]
    write_file(store.folder / "grades.csv", tables.written(GRADES, [*map(_grade, _records(store, keys)), *ungraded]).encode())
    people = people or {}
    write_file(store.folder / "canvas.csv", _wide(course, store, keys, problems, people, CANVAS).encode())
    write_file(store.folder / "moodle.csv", _wide(course, store, keys, problems, people, MOODLE).encode())
    _write_returns(course, submissions, store, people)
    _write_index(course, store, keys, problems, pages)


def _write_index(course: Course, store: Store, keys: list[tuple[str, str]], problems: list[Problem], pages: jinja2.Environment) -> None:
    """The instructor's page."""
    essences = [_essence(record, course) for record in _records(store, keys)]
    summaries = [_summary(lab, [essence for essence in essences if essence["lab"] == lab.name]) for lab in course.labs]
    looks = [(item["student"], item["lab"], look) for item in essences for look in item["looks"]]
    looks += [(item.student, item.lab, f"{item.kind}: {item.detail}") for item in problems if item.kind != "missing"]
    came = {item["lab"] for item in essences}
    missing = {lab.name: [item.student for item in problems if (item.kind, item.lab) == ("missing", lab.name)] for lab in course.labs}
    page = pages.get_template("instructor.html").render(
        course=course,
        labs=[summary for summary in summaries if summary["count"]],
        absent=[(lab, missing[lab.name] if lab.name in came else []) for lab in course.labs if missing[lab.name] or lab.name not in came],
        returned=(store.folder / "return").exists(),
        looks=looks,
        students=_by_student(essences),
        unknown=sum(not item["received"] for item in essences),
        sandboxes=sorted({item["sandbox"] for item in essences}),
        weaker=sorted({item["sandbox"] for item in essences} - {backends.STRENGTH[-1]}),
    )
    write_file(store.folder / "index.html", page.encode())


def _moment(time: datetime | str) -> str:
    return release.moment(datetime.fromisoformat(time) if isinstance(time, str) else time)


def _by_student(essences: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Each student with what he has in each lab."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for item in essences:
        found.setdefault(item["student"], {})[item["lab"]] = item
    return dict(sorted(found.items()))


def _records(store: Store, keys: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """One after another, so that a class of any size fits the memory."""
    for lab, student in keys:
        record = store.record(lab, student)
        assert record is not None  # each of them was graded
        yield record


def _write_feedback(course: Course, record: dict[str, Any], store: Store, pages: jinja2.Environment, asked: dict[str, str]) -> None:
    lab, student = course.lab(record["lab"]), record["student"]
    figures = [base64.b64encode(path.read_bytes()).decode() for path in store.figures(lab.name, student)]
    questions = {task.id: task.question for task in lab.written}
    sections = {item.number: checks.find(item.number).section for item in lab.exercises}
    told = {"questions": questions, "asked": asked, "sections": sections, "due": course.due(student, lab)}
    page = pages.get_template("feedback.html").render(course=course, lab=lab, record=record, figures=figures, **told)
    write_file(_feedback(store, lab.name, student), page.encode())


def _feedback(store: Store, lab: str, student: str) -> Path:
    return store.folder / "feedback" / lab / f"{student}.html"


def _leave_out_others(store: Store, keys: set[tuple[str, str]]) -> None:
    """Remove the results of an earlier grading for submissions that no longer exist."""
    for path in (store.folder / "records").glob("*/*.json"):
        if (path.parent.name, path.stem) not in keys:
            store.remove(path.parent.name, path.stem)
            _feedback(store, path.parent.name, path.stem).unlink(missing_ok=True)


def _grade(record: dict[str, Any]) -> dict[str, Any]:
    given = record["marks"]
    row = {name: record.get(name) for name in ("student", "lab", "out_of", "detail", "received", "sandbox", "seed")}
    row |= {name: given[name] for name in ("points", "exercises", "late_days", "deduction", "to_mark")}
    return {key: _cell(value) for key, value in {**row, "status": KINDS.get(record["status"], record["status"])}.items()}


def _ungraded(problem: Problem) -> dict[str, Any]:
    return {"student": problem.student, "lab": problem.lab, "status": problem.kind, "detail": problem.detail}


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, int | float) else str(value)


def _wide(
    course: Course,
    store: Store,
    keys: list[tuple[str, str]],
    problems: list[Problem],
    people: People,
    columns: tuple[str, ...],
) -> str:
    """A row a student, a column a lab. A mark that is not there, or not whole, is an empty cell: the platforms leave it as it is."""
    students = sorted({student for _, student in keys} | {problem.student for problem in problems if problem.student} | set(people))
    points = {
        (item["lab"], item["student"]): None if item["marks"]["to_mark"] else item["marks"]["points"] for item in _records(store, keys)
    }
    rows = []
    if columns is CANVAS:
        rows.append({"Student": "    Points Possible", **{lab.name: f"{lab.points:g}" for lab in course.labs}})
    for student in students:
        known = {"Student": student, "SIS User ID": student, "Identifier": f"Participant {student}", "ID number": student}
        known |= {key: value for key, value in people.get(student, {}).items() if value}
        rows.append(
            {name: known.get(name, "") for name in columns} | {lab.name: _cell(points.get((lab.name, student))) for lab in course.labs}
        )
    return tables.written((*columns, *(lab.name for lab in course.labs)), rows)


def _summary(lab: Assignment, records: list[dict[str, Any]]) -> dict[str, Any]:
    points = sorted(record["marks"]["points"] for record in records if record["marks"]["points"] is not None)
    bins = Counter(min(BINS - 1, int(BINS * value / lab.points)) if lab.points else 0 for value in points)
    width = lab.points / BINS
    distribution = [(f"{number * width:g} to {(number + 1) * width:g}", bins[number]) for number in range(BINS)]
    exercises = [_tally(exercise.number, records) for exercise in lab.exercises]
    return {
        "lab": lab,
        "count": len(records),
        "marked": len(points),
        "median": statistics.median(points) if points else None,
        "distribution": distribution,
        "most": max(bins.values(), default=1),
        "exercises": sorted(exercises, key=lambda item: (item["right"], item["number"])),
    }


def _essence(record: dict[str, Any], course: Course) -> dict[str, Any]:
    """What the instructor's page needs of a record: not all that was observed."""
    exercises = [{key: result[key] for key in ("number", "status", "message")} for result in record["exercises"]]
    known = {key: record[key] for key in ("student", "lab", "marks", "received", "sandbox", "status", "out_of")}
    return {**known, "exercises": exercises, "looks": list(_looks(record, course))}


def _tally(number: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    results = [result for record in records for result in record["exercises"] if result["number"] == number]
    counts = Counter(result["status"] for result in results)
    messages = Counter(result["message"] for result in results if result["status"] == "wrong")
    known = {"right": counts["right"], "wrong": counts["wrong"], "untried": counts["not attempted"]}
    often = min(messages, key=lambda message: (-messages[message], message), default="")
    return {"number": number, **known, "other": len(results) - sum(known.values()), "often": often}


def _looks(record: dict[str, Any], course: Course) -> Iterator[str]:
    """Why a person should look at this submission."""
    if record["status"] != "graded":
        yield "; ".join(record["remarks"])
    if remark := marks.date_remark(record, course):
        yield remark
    if count := record["marks"]["to_mark"]:
        yield f"{count} written answer{'s' * (count != 1)} to mark in {marks.WRITTEN}: until then its mark is not in the platforms' tables"


# The way back


def _write_returns(course: Course, submissions: list[Submission], store: Store, people: People) -> None:
    """Of each lab what its submissions' names allow: canvas-LAB.zip, moodle-LAB.zip, and mail-LAB/STUDENT.eml where an address is known."""
    for lab in course.labs:
        packed: dict[str, dict[str, bytes]] = {"canvas": {}, "moodle": {}}
        for item in submissions:
            page = _feedback(store, item.lab, item.student)
            if item.lab != lab.name or not page.exists():
                continue
            top = PurePosixPath(item.origin).parts[0]
            if named := collect.MOODLE.fullmatch(top):
                packed["moodle"][f"{named['owner']}{'' if named['file'] else '/'}feedback.html"] = page.read_bytes()
            elif collect.CANVAS.fullmatch(top):  # the platform knows whose it is by the numbers in its own name
                packed["canvas"][f"{top.removesuffix('.ipynb')}.html"] = page.read_bytes()
            if address := next((people[item.student][name] for name in MAIL if people.get(item.student, {}).get(name)), ""):
                name = store.folder / RETURN / f"mail-{lab.name}" / f"{item.student}.eml"
                write_file(name, _message(course, lab.title, address, page.read_bytes()))
        for platform, pages in packed.items():
            if pages:
                write_file(store.folder / RETURN / f"{platform}-{lab.name}.zip", zipped(pages))


def zipped(files: dict[str, bytes], executable: tuple[str, ...] = ()) -> bytes:
    """A zip file's bytes, the same each time."""
    with io.BytesIO() as target:
        with zipfile.ZipFile(target, "w") as archive:
            for name, data in sorted(files.items()):
                member = zipfile.ZipInfo(name, LONG_AGO)
                member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, (0o755 if name in executable else 0o644) << 16
                archive.writestr(member, data)
        return target.getvalue()


def _message(course: Course, title: str, address: str, page: bytes) -> bytes:
    """A message that a mail program opens as a draft, with the page attached."""
    message = EmailMessage(policy=SMTP)
    message["To"] = re.sub(r"[\r\n]", "", address)
    message["Subject"] = re.sub(r"[\r\n]", " ", f"{course.name}: feedback on {title}")
    message["X-Unsent"] = "1"
    message.set_content(f"Your feedback on {title} is attached; open it in a browser.\n")
    message.add_attachment(page, maintype="text", subtype="html", filename="feedback.html")
    message.set_boundary("feedback-" + "0" * 24)
    return message.as_bytes()
