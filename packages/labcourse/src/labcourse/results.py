"""Results of a grading: tables for Canvas, Moodle and other programs, and two pages.

Both pages are for the instructor. One lists what a person should look at, and the other compares
the answers.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from labcourse import backends, comparison, contest, feedback, marks, release, tables
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
CONTEST = "contest.html"
BINS = 10  # bars of the distribution of points
NO_MARK, DECIDE, KNOW = range(3)  # indices of LEVELS
LEVELS = ("No mark", "For you to decide", "For you to know")
# The kinds of problems that leave a submission without a mark.
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
    """Write all tables and pages from the records of the submissions.

    The same records give the same bytes.

    Args:
        people: the instructor's table of students, by their ids.
        dates: when submissions arrived, according to the instructor. The column `corrected` of
            dates.csv has precedence.
        report: gets a line of text when an answer takes long to read.

    Raises:
        ValueError: the instructor's table of marks or of dates holds something else.
    """
    written = marks.read_written(store.folder)
    corrected = {**(dates or {}), **marks.read_dates(store.folder / marks.DATES)}
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
            record |= _arrival(item, corrected)
            record = marks.add_marks(record, course, written)
            store.write_record(record)
            feedback.write_page(course, record, store, pages, questions[item.lab])
        except Exception as error:  # the other students still get their pages
            if "marks" not in (store.record(item.lab, item.student) or {}):
                keys.remove((item.lab, item.student))
            reason = f"{type(error).__name__}: {error}"
            detail = f"its record or page could not be written ({reason}). Grade it again"
            problems = [*problems, Problem(item.student, item.lab, "failed", detail)]
    _remove_others(store, {(item.lab, item.student) for item in submissions})
    store.join_resources()
    write_file(store.folder / marks.WRITTEN, marks.written_table(_records(store, keys)).encode())
    write_file(
        store.folder / marks.DATES, marks.dates_table(_records(store, keys), course).encode()
    )
    grades = [_grade(record) for record in _records(store, keys)]
    grades += [_ungraded(item) for item in problems if (item.lab, item.student) not in set(keys)]
    write_file(store.folder / "grades.csv", tables.written(GRADES, grades).encode())
    people = people or {}
    write_file(
        store.folder / "canvas.csv", _wide(course, store, keys, problems, people, CANVAS).encode()
    )
    write_file(
        store.folder / "moodle.csv", _wide(course, store, keys, problems, people, MOODLE).encode()
    )
    feedback.write_returns(course, submissions, store, people)
    _write_index(course, store, keys, problems, pages)
    _write_comparison(course, store, keys, pages, report)


def _arrival(item: Submission, corrected: marks.Dates) -> dict[str, Any]:
    """Return when a submission arrived, and the source of this time, for its record.

    `corrected` are the times according to the instructor, which have precedence.
    """
    arrival = {
        "received": item.received,
        "known_from": item.known_from,
        "late": item.late,
        "file_time": item.file_time,
    }
    by_instructor = corrected.get((item.student, item.lab))
    by_instructor = by_instructor or corrected.get((item.student, item.lab[:2]))
    if by_instructor:
        arrival |= {"received": by_instructor, "known_from": marks.INSTRUCTOR}
    return arrival


def _write_index(
    course: Course,
    store: Store,
    keys: list[tuple[str, str]],
    problems: list[Problem],
    pages: jinja2.Environment,
) -> None:
    """Write the instructor's page, which lists what a person should look at.

    `keys` are the (lab, student) of all records.
    """
    essences = [_essence(record, course) for record in _records(store, keys)]
    summaries = []
    contests = []
    for lab in course.labs:
        of_lab = [essence for essence in essences if essence["lab"] == lab.name]
        summaries.append(_summary(lab, of_lab))
        if lab.puzzles and of_lab:
            contests.append((lab, contest.tables(course, lab, of_lab)))
    (store.folder / CONTEST).unlink(missing_ok=True)
    if contests:
        scores = pages.get_template(CONTEST).render(course=course, contests=contests)
        write_file(store.folder / CONTEST, scores.encode())
    page = pages.get_template("instructor.html").render(
        course=course,
        labs=[summary for summary in summaries if summary["count"]],
        contests=contests,
        absent=_absent(course, essences, problems),
        returned=(store.folder / "return").exists(),
        looks=_sorted_looks(
            [look for item in essences for look in item["looks"]], problems, essences
        ),
        to_mark=_to_mark(essences),
        students=_by_student(essences),
        unknown=sum(not item["received"] for item in essences),
        sandboxes=sorted({item["sandbox"] for item in essences}),
        weaker=sorted({item["sandbox"] for item in essences} - {backends.STRENGTH[-1]}),
    )
    write_file(store.folder / "index.html", page.encode())


def _absent(
    course: Course, essences: list[dict[str, Any]], problems: list[Problem]
) -> list[tuple[Assignment, list[str]]]:
    """Return each lab that students did not hand in, with these students.

    If nobody handed in a lab, the list of its students is empty.
    """
    handed_in = {item["lab"] for item in essences}
    absent: list[tuple[Assignment, list[str]]] = []
    for lab in course.labs:
        missing = [
            item.student for item in problems if (item.kind, item.lab) == ("missing", lab.name)
        ]
        if lab.name not in handed_in:
            absent.append((lab, []))
        elif missing:
            absent.append((lab, missing))
    return absent


def _moment(time: datetime | str) -> str:
    """Write a time, which may be in ISO 8601, for a page."""
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    return release.moment(time)


def _by_student(essences: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the results of each student by lab, sorted by student."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for item in essences:
        found.setdefault(item["student"], {})[item["lab"]] = item
    return dict(sorted(found.items()))


def _records(store: Store, keys: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the records with these (lab, student) keys one after another.

    So the records of the whole class need not be in memory.
    """
    for lab, student in keys:
        record = store.record(lab, student)
        assert record is not None  # the keys are those of graded submissions
        yield record


def _remove_others(store: Store, keys: set[tuple[str, str]]) -> None:
    """Remove results of an earlier grading whose submissions no longer exist.

    `keys` are the (lab, student) of the submissions that exist.
    """
    for path in (store.folder / "records").glob("*/*.json"):
        if (path.parent.name, path.stem) not in keys:
            store.remove(path.parent.name, path.stem)
            feedback.remove(store, path.parent.name, path.stem)


def _grade(record: dict[str, Any]) -> dict[str, Any]:
    """Return the row of grades.csv for the record of a submission."""
    given = record["marks"]
    from_record = ("student", "lab", "out_of", "detail", "received", "sandbox", "seed")
    from_marks = ("points", "exercises", "late_days", "deduction", "to_mark")
    row = {name: record.get(name) for name in from_record}
    row |= {name: given[name] for name in from_marks}
    row["status"] = KINDS.get(record["status"], record["status"])
    return {key: _cell(value) for key, value in row.items()}


def _ungraded(problem: Problem) -> dict[str, Any]:
    """Return the row of grades.csv for a problem, such as a missing submission."""
    about = {"student": problem.student, "lab": problem.lab}
    return {**about, "status": problem.kind, "detail": problem.detail}


def _cell(value: Any) -> str:
    """Write a value into a cell of a table. None gives an empty cell."""
    if value is None:
        return ""
    if isinstance(value, int | float):
        return f"{value:g}"
    return str(value)


def _wide(
    course: Course,
    store: Store,
    keys: list[tuple[str, str]],
    problems: list[Problem],
    people: People,
    columns: tuple[str, ...],
) -> str:
    """Return a table with a row per student and a column per lab.

    If a mark is missing or incomplete, its cell is empty. Canvas and Moodle leave such marks
    unchanged.
    """
    labs = [lab for lab in course.labs if lab.points]  # a contest without points has no column
    students = {student for _, student in keys} | set(people)
    extended = {student for student, _ in course.extensions}
    for problem in problems:
        # An id that only the course file has belongs to nobody, for example after a typing mistake.
        if problem.student and (problem.kind != "unlisted" or problem.student not in extended):
            students.add(problem.student)
    points = {}
    for item in _records(store, keys):
        if not item["marks"]["to_mark"]:
            points[item["lab"], item["student"]] = item["marks"]["points"]
    rows = []
    if columns is CANVAS:
        worth = {lab.name: f"{lab.points:g}" for lab in labs}
        rows.append({"Student": "    Points Possible", **worth})
    for student in sorted(students):
        known = {
            "Student": student,
            "SIS User ID": student,
            "Identifier": f"Participant {student}",
            "ID number": student,
        }
        known |= {key: value for key, value in people.get(student, {}).items() if value}
        row = {name: known.get(name, "") for name in columns}
        row |= {lab.name: _cell(points.get((lab.name, student))) for lab in labs}
        rows.append(row)
    return tables.written((*columns, *(lab.name for lab in labs)), rows)


def _summary(lab: Assignment, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Summarize a lab: the distribution of points, and how often each exercise is right."""
    given = [record["marks"]["points"] for record in records]
    points = sorted(value for value in given if value is not None)
    bins: Counter[int] = Counter()
    for value in points:
        share = value / lab.points if lab.points else 0.0
        bins[min(BINS - 1, int(BINS * share))] += 1
    width = lab.points / BINS
    distribution = []
    for number in range(BINS):
        interval = f"{number * width:g} to {(number + 1) * width:g}"
        distribution.append((interval, bins[number]))
    marked = [exercise for exercise in lab.exercises if not exercise.is_puzzle]
    exercises = [_tally(exercise.number, records) for exercise in marked]
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
    """Return the parts of a record that the instructor's page needs, without the observations."""
    exercises = []
    for result in record["exercises"]:
        shown = {key: result[key] for key in ("number", "status", "message")}
        exercises.append(shown | {"score": result.get("score")})
    kept = ("student", "lab", "marks", "received", "sandbox", "status", "out_of")
    known = {key: record[key] for key in kept}
    written = []
    for item in record["written"]:
        to_mark = item["points"] is None and bool(item["answer"] or item["beside"])
        written.append({"id": item["id"], "to_mark": to_mark})
    looks = list(_looks(record, course))
    return {**known, "exercises": exercises, "written": written, "looks": looks}


def _tally(number: str, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the verdicts on the exercise `number` in the records of a lab.

    Also find the most frequent message to wrong answers.
    """
    results = []
    for record in records:
        results += [result for result in record["exercises"] if result["number"] == number]
    counts = Counter(result["status"] for result in results)
    messages = Counter(result["message"] for result in results if result["status"] == "wrong")
    known = {
        "right": counts["right"],
        "wrong": counts["wrong"],
        "untried": counts["not attempted"],
    }
    other = len(results) - sum(known.values())
    often = min(messages, key=lambda message: (-messages[message], message), default="")
    return {"number": number, **known, "other": other, "often": often}


def _looks(record: dict[str, Any], course: Course) -> Iterator[dict[str, Any]]:
    """Yield the reasons why a person should look at a submission, one dictionary per reason."""
    about = {"students": [record["student"]], "lab": record["lab"], "text": ""}
    if record["status"] != "graded":
        level = DECIDE
        if not record["out_of"]:  # a contest without points
            level = KNOW
        elif record["marks"]["points"] is None:
            level = NO_MARK
        elif record["status"] in ("altered", "errors"):
            level = KNOW
        yield {**about, "level": level, "why": "; ".join(record["remarks"])}
    remark = marks.date_remark(record, course)
    if remark:
        yield {**about, "level": DECIDE, "why": remark}
    if record["status"] in UNMARKED:
        return
    for item in record["written"]:
        if item["points"] is not None or item["answer"]:
            continue
        if item["beside"]:
            reason = f"{item['id']} is empty, but the notebook has other text"
            why = f"{reason}. Mark it in {marks.WRITTEN}"
            yield {**about, "level": DECIDE, "why": why, "text": item["beside"]}
        else:
            yield {**about, "level": KNOW, "why": f"{item['id']} is empty, and counts 0 points"}


def _sorted_looks(
    looks: list[dict[str, Any]],
    problems: list[Problem],
    essences: list[dict[str, Any]],
) -> list[tuple[str, list[dict[str, Any]]]]:
    """Sort the reasons for a look by urgency. Students with the same reason share a row."""
    unreadable = {
        (item["student"], item["lab"]) for item in essences if item["status"] == "unreadable"
    }
    for item in problems:
        is_known = item.kind == "unreadable" and (item.student, item.lab) in unreadable
        if item.kind != "missing" and not is_known:
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
    """List the written questions that wait for a person's marks.

    Each is (lab, question, number of answers to mark, number of submissions).
    """
    counts: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for essence in essences:
        for item in essence["written"]:
            counts[essence["lab"], item["id"]].append(item["to_mark"])
    listed = [(lab, name, sum(found), len(found)) for (lab, name), found in sorted(counts.items())]
    return [row for row in listed if row[2]]


# The page that compares answers


def _write_comparison(
    course: Course,
    store: Store,
    keys: list[tuple[str, str]],
    pages: jinja2.Environment,
    report: Callable[[str], Any],
) -> None:
    """Write the page that compares the answers of the class.

    `keys` are the (lab, student) of all records. `report` gets a line when an answer takes long.
    """
    labs: list[tuple[Assignment, dict[str, Compared]]] = []
    found: dict[str, Compared] = {}
    # The answer of one student of each group. The keys are (exercise, student).
    sources: dict[tuple[str, str], str] = {}
    with LimitedProcess(report) as process:
        for lab in course.labs:
            own = [key for key in keys if key[0] == lab.name]
            if len(own) > 1:
                compared = _compared(course, lab, _records(store, own), process)
                labs.append((lab, compared))
                found |= compared
                sources |= _examples(store, lab, compared)
    several = [item for item in found.values() if item.answers > 1]
    alike = [item for item in several if 4 * item.most_frequent >= item.answers]
    page = pages.get_template("comparison.html").render(
        course=course,
        labs=labs,
        sources=sources,
        pairs=comparison.pairs(found)[:50],
        solved=_solved(found),
        alike=len(alike),
        count=len(several),
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
    """Compare the answers to each exercise and each question of a lab.

    `records` are those of the lab's submissions. Answers are read in the limited `process`.
    """
    solutions, stubs = release.solutions(course, lab), release.stubs(course, lab)
    names = {item.number: item.name for item in lab.exercises if not item.is_puzzle}
    answers: dict[str, dict[str, Normal]] = {number: {} for number in names}
    answers |= {_question(lab, task.id): {} for task in lab.written}
    for record in records:
        student = record["student"]
        for item in record["exercises"]:
            number = item["number"]
            source = record["sources"].get(number, "")
            if number in names and source and item["status"] != "not attempted":
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
    """Return a name for a written question that is unique in the course, from its lab and name."""
    return f"{lab.name}: {name}"


def _examples(
    store: Store, lab: Assignment, compared: dict[str, Compared]
) -> dict[tuple[str, str], str]:
    """Return, for each group of equal answers, the answer of one of its students.

    The keys are (exercise, student).
    """
    examples = {}
    for number, item in compared.items():
        for group in item.groups:
            student = group.students[0]
            [record] = _records(store, [(lab.name, student)])
            texts = {_question(lab, task["id"]): task["answer"] for task in record["written"]}
            examples[number, student] = {**texts, **record["sources"]}[number]
    return examples


def _normal(process: LimitedProcess, source: str, name: str, about: str) -> Normal:
    """Return the normal form of an answer, computed in a limited process.

    `name` is the answer's function, and `about` says what is read. Code that exceeds the limits is
    compared as text.
    """
    try:
        normal: Normal = process.call(comparison.normalized, source, name, about=about)
        return normal
    except UnreadableError:
        return comparison.as_text(source)


def _solved(found: dict[str, Compared]) -> list[tuple[str, list[str]]]:
    """List the students whose answers are published solutions, those with most answers first.

    Short solutions do not count.
    """
    solved: dict[str, list[str]] = defaultdict(list)
    for number, item in found.items():
        if item.solution_parts >= comparison.SHORT:
            for student in item.solution:
                solved[student].append(number)
    return sorted(solved.items(), key=lambda pair: (-len(pair[1]), pair[0]))
