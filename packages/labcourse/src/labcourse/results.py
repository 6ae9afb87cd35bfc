"""The results of a grading: tables for Canvas, for Moodle and for everything else, and two pages.

The pages are for the instructor. One says what needs a look, the other compares the answers.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from labcourse import backends, comparison, feedback, marks, release, tables
from labcourse.assignment import Assignment, Course
from labcourse.collect import Problem, Submission
from labcourse.comparison import Compared, Normal
from labcourse.examination import KINDS, UNMARKED
from labcourse.feedback import People
from labcourse.grading import Store, write_file
from labcourse.limited_process import LimitedProcess
from labcourse.reading import UnreadableError

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
NO_MARK, DECIDE, KNOW = range(3)  # the parts of the list of what needs a look
LEVELS = ("No mark", "For you to decide", "For you to know")
# Kinds of problems that leave no mark
UNGRADED = ("duplicate", "refused", "unknown", "name", "failed")


def write(
    course: Course,
    submissions: list[Submission],
    problems: list[Problem],
    store: Store,
    people: People | None = None,
    dates: marks.Dates | None = None,
    report: Callable[[str], Any] = lambda line: None,
) -> None:
    """All tables and pages, from the records of these submissions and from nothing else: the same bytes each time.

    `dates`: when submissions came, in the instructor's word; beside them count those in the column `corrected` of dates.csv.
    `report` gets a line of text when an answer takes long to read.

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
    pages.filters |= {"rich": feedback.rich, "sentence": feedback.sentence}
    pages.filters["status"] = lambda kind: KINDS.get(kind, kind)
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
            feedback.write_page(course, record, store, pages, questions[item.lab])
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
    feedback.write_returns(course, submissions, store, people)
    _write_index(course, store, keys, problems, pages)
    _write_comparison(course, store, keys, pages, report)


def _write_index(course: Course, store: Store, keys: list[tuple[str, str]], problems: list[Problem], pages: jinja2.Environment) -> None:
    """The instructor's page."""
    essences = [_essence(record, course) for record in _records(store, keys)]
    summaries = [_summary(lab, [essence for essence in essences if essence["lab"] == lab.name]) for lab in course.labs]
    came = {item["lab"] for item in essences}
    missing = {lab.name: [item.student for item in problems if (item.kind, item.lab) == ("missing", lab.name)] for lab in course.labs}
    page = pages.get_template("instructor.html").render(
        course=course,
        labs=[summary for summary in summaries if summary["count"]],
        absent=[(lab, missing[lab.name] if lab.name in came else []) for lab in course.labs if missing[lab.name] or lab.name not in came],
        returned=(store.folder / "return").exists(),
        looks=_sorted_looks([look for item in essences for look in item["looks"]], problems, essences),
        to_mark=_to_mark(essences),
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


def _leave_out_others(store: Store, keys: set[tuple[str, str]]) -> None:
    """Remove the results of an earlier grading for submissions that no longer exist."""
    for path in (store.folder / "records").glob("*/*.json"):
        if (path.parent.name, path.stem) not in keys:
            store.remove(path.parent.name, path.stem)
            feedback.remove(store, path.parent.name, path.stem)


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
    written = []
    for item in record["written"]:
        to_mark = item["points"] is None and bool(item["answer"] or item["beside"])
        written.append({"id": item["id"], "to_mark": to_mark})
    return {**known, "exercises": exercises, "written": written, "looks": list(_looks(record, course))}


def _tally(number: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    results = [result for record in records for result in record["exercises"] if result["number"] == number]
    counts = Counter(result["status"] for result in results)
    messages = Counter(result["message"] for result in results if result["status"] == "wrong")
    known = {"right": counts["right"], "wrong": counts["wrong"], "untried": counts["not attempted"]}
    often = min(messages, key=lambda message: (-messages[message], message), default="")
    return {"number": number, **known, "other": len(results) - sum(known.values()), "often": often}


def _looks(record: dict[str, Any], course: Course) -> Iterator[dict[str, Any]]:
    """Why a person should look at this submission."""
    about = {"students": [record["student"]], "lab": record["lab"], "text": ""}
    if record["status"] != "graded":
        level = DECIDE
        if record["marks"]["points"] is None:
            level = NO_MARK
        elif record["status"] in ("altered", "errors"):
            level = KNOW
        yield {**about, "level": level, "why": "; ".join(record["remarks"])}
    if remark := marks.date_remark(record, course):
        yield {**about, "level": DECIDE, "why": remark}
    if record["status"] in UNMARKED:
        return
    for item in record["written"]:
        if item["points"] is not None or item["answer"]:
            continue
        if item["beside"]:
            why = f"{item['id']} is empty, and the notebook holds other text. Mark it in {marks.WRITTEN}"
            yield {**about, "level": DECIDE, "why": why, "text": item["beside"]}
        else:
            yield {**about, "level": KNOW, "why": f"{item['id']} is empty, and counts 0 points"}


def _sorted_looks(
    looks: list[dict[str, Any]],
    problems: list[Problem],
    essences: list[dict[str, Any]],
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Sort what needs a look, the most urgent first. Students with the same reason share a row."""
    graded = [("unreadable", item["student"], item["lab"]) for item in essences if item["status"] == "unreadable"]
    for item in problems:
        if item.kind != "missing" and (item.kind, item.student, item.lab) not in graded:
            why = f"{item.kind}: {item.detail}"
            level = NO_MARK if item.kind in UNGRADED else KNOW
            about = {"students": [item.student], "lab": item.lab, "text": ""}
            looks.append({**about, "level": level, "why": why})
    joined: dict[tuple[int, str, str, str], dict[str, Any]] = {}
    for look in looks:
        key = (look["level"], look["lab"], look["why"], look["text"])
        joined.setdefault(key, {**look, "students": []})["students"] += look["students"]
    rows = sorted(joined.values(), key=lambda look: (look["lab"], look["students"], look["why"]))
    parts = []
    for level, name in enumerate(LEVELS):
        found = [look for look in rows if look["level"] == level]
        if found:
            parts.append((name, found))
    return parts


def _to_mark(essences: list[dict[str, Any]]) -> list[tuple[str, str, int, int]]:
    """The questions with answers to mark: (lab, question, answers to mark, submissions)."""
    counts: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for essence in essences:
        for item in essence["written"]:
            counts[essence["lab"], item["id"]].append(item["to_mark"])
    listed = [(lab, name, sum(found), len(found)) for (lab, name), found in sorted(counts.items())]
    return [row for row in listed if row[2]]


# Answers beside each other


def _write_comparison(
    course: Course,
    store: Store,
    keys: list[tuple[str, str]],
    pages: jinja2.Environment,
    report: Callable[[str], Any],
) -> None:
    """Write the page that compares the answers of the class."""
    labs: list[tuple[Assignment, dict[str, Compared]]] = []
    found: dict[str, Compared] = {}
    sources: dict[tuple[str, str], str] = {}  # one text of each group, by exercise and student
    with LimitedProcess(report) as process:
        for lab in course.labs:
            own = [key for key in keys if key[0] == lab.name]
            if len(own) > 1:
                compared = _compared(course, lab, _records(store, own), process)
                labs.append((lab, compared))
                found |= compared
                sources |= _examples(store, lab, compared)
    page = pages.get_template("comparison.html").render(
        course=course,
        labs=labs,
        sources=sources,
        pairs=comparison.pairs(found)[:50],
        solved=_solved(found),
        alike=sum(4 * item.most_frequent >= item.answers for item in found.values() if item.answers > 1),
        count=sum(item.answers > 1 for item in found.values()),
        short=comparison.SHORT,
        few=comparison.FEW,
    )
    write_file(store.folder / "comparison.html", page.encode())


def _compared(
    course: Course,
    lab: Assignment,
    records: Iterator[dict[str, Any]],
    process: LimitedProcess,
) -> dict[str, Compared]:
    """Compare the answers to each exercise and each question of a lab."""
    solutions, stubs = release.solutions(course, lab), release.stubs(course, lab)
    names = {exercise.number: exercise.name for exercise in lab.exercises}
    answers: dict[str, dict[str, Normal]] = {number: {} for number in names}
    answers |= {_question(lab, task.id): {} for task in lab.written}
    for record in records:
        student = record["student"]
        for item in record["exercises"]:
            number = item["number"]
            source = record["sources"].get(number, "")
            if source and item["status"] != "not attempted":
                about = f"comparing {number} of {student}"
                answers[number][student] = _normal(process, source, names[number], about)
        for item in record["written"]:
            if item["answer"]:
                answers[_question(lab, item["id"])][student] = comparison.as_text(item["answer"])
    found = {}
    for number, normals in answers.items():
        name = names.get(number, "")
        published = [comparison.normalized(text, name) for text in solutions.get(number, [])]
        stub = comparison.normalized(stubs.get(number, ""), name)
        found[number] = comparison.compared(normals, published, [stub])
    return found


def _question(lab: Assignment, name: str) -> str:
    return f"{lab.name}: {name}"


def _examples(store: Store, lab: Assignment, compared: dict[str, Compared]) -> dict[tuple[str, str], str]:
    """The answer of one student of each group."""
    examples = {}
    for number, item in compared.items():
        for group in item.groups:
            student = group.students[0]
            [record] = _records(store, [(lab.name, student)])
            texts = {_question(lab, task["id"]): task["answer"] for task in record["written"]}
            examples[number, student] = {**texts, **record["sources"]}[number]
    return examples


def _normal(process: LimitedProcess, source: str, name: str, about: str) -> Normal:
    try:
        normal: Normal = process.call(comparison.normalized, source, name, about=about)
        return normal
    except UnreadableError:
        return comparison.as_text(source)


def _solved(found: dict[str, Compared]) -> list[tuple[str, list[str]]]:
    """The students with published solutions that are not short, those with most of them first."""
    solved: dict[str, list[str]] = defaultdict(list)
    for number, item in found.items():
        if item.solution_parts >= comparison.SHORT:
            for student in item.solution:
                solved[student].append(number)
    return sorted(solved.items(), key=lambda pair: (-len(pair[1]), pair[0]))
