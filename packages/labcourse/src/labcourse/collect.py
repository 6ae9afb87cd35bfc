"""Find out which student handed in what.

The submissions are in a folder, in a zip file of a learning platform, or in nbgrader's exchange.
Who handed in and when is taken only from what the platform wrote (`labcourse.platforms`), never
from a student's own file. Nothing is unpacked. Files are read within limits, and written under
names that this module chooses.
"""

import contextlib
import hashlib
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labcourse import platforms, reading, sources
from labcourse.assignment import Course
from labcourse.limited_process import LimitedProcess
from labcourse.platforms import Named
from labcourse.reading import UnreadableError
from labcourse.sources import MANIFEST, STAMP, File, manifest, member_bytes, shown

__all__ = ["Problem", "Submission", "collect", "write"]

# the number that platforms and browsers add to a copy
COPY = re.compile(r"(-[0-9]+| ?\([0-9]+\))$")


@dataclass(frozen=True)
class Submission:
    """One student's notebook for one lab.

    The content stays in its file, so that a class of any size fits into memory.

    Attributes:
        digest: SHA-256 of the content.
        origin: the name of the notebook in the source.
        source: the file, or the zip file that has the notebook as `member`. None if the content is
            in `held`, on its way to another machine.
        received: when the notebook arrived, in ISO 8601, or "" if nobody knows.
        known_from: who says when the notebook arrived.
        late: whether the platform's name for the file says that it is late.
        file_time: when the file was changed, in ISO 8601. It may be the time of the download.
    """

    student: str
    lab: str
    digest: str
    origin: str
    source: Path | None
    member: str = ""
    held: bytes = b""
    received: str = ""
    known_from: str = ""
    late: bool = False
    file_time: str = ""

    def read(self) -> bytes:
        """Return the content, or nothing if the file no longer has the content of `digest`."""
        try:
            if self.source is None:
                data = self.held
            elif self.member:
                data = member_bytes(self.source, self.member)
            else:
                data = reading.file_bytes(self.source)
        except (UnreadableError, OSError, zipfile.BadZipFile):
            return b""
        if hashlib.sha256(data).hexdigest() != self.digest:
            return b""
        return data

    def loaded(self) -> "Submission":
        """Return this submission with its content in `held`, for another machine."""
        return replace(self, source=None, member="", held=self.read())


@dataclass(frozen=True)
class Problem:
    """Something that cannot be graded yet, or that the instructor should know.

    Attributes:
        kind: one or two words, such as "missing", "duplicate" or "not a notebook".
        detail: what is wrong, for a person to read.
    """

    student: str
    lab: str
    kind: str
    detail: str


@dataclass(frozen=True)
class _Found:
    """A submission found in the source, before the one that counts is chosen.

    Attributes:
        received: when it arrived, as exactly as the platform's name says.
        is_sure: whether the notebook or its file name says which lab it is. Otherwise only the name
            of a folder does.
    """

    submission: Submission
    received: str
    is_sure: bool


def collect(
    source: Path,
    course: Course,
    students: Iterable[str] = (),
    now: datetime | None = None,
    report: Callable[[str], Any] = lambda line: None,
) -> tuple[list[Submission], list[Problem]]:
    """Find all submissions in a folder or zip file, and what is wrong with them.

    With nbgrader, a student's latest submission counts. Otherwise, if a student has several
    submissions, none counts until a person chooses one.

    Args:
        students: the ids of those who should have handed in. By default, all who handed in
            anything. A student who is not among them is graded and reported.
        now: a lab that is not due at this time is not missing. By default, the time of the call.
        report: gets a line of text when a file takes long to read. The line names the file.

    Returns:
        The submissions and the problems, both sorted by lab and student.

    Raises:
        OSError, ValueError: the source is not a folder or a zip file.
    """
    problems = []
    if not source.is_file():
        problems += _known_problems(source)
    found: dict[tuple[str, str], list[_Found]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        if source.is_file():
            files = sources.in_zip(stack, source)
        else:
            files = sources.in_folder(source)
        owned, refused = _by_owner(files)
        problems += refused
        process = stack.enter_context(LimitedProcess(report))
        for name, own in owned.items():
            for item in _submissions_of(name, own, course, process):
                if isinstance(item, Problem):
                    problems.append(item)
                else:
                    found[item.submission.student, item.submission.lab].append(item)
    submissions = []
    for (student, lab), candidates in sorted(found.items()):
        chosen, others = _chosen(candidates)
        for other in others:
            names = shown(other.origin), shown(chosen[0].origin)
            detail = f"{names[0]} is ignored, because {names[1]} is the notebook of this lab"
            problems.append(Problem(student, lab, "left out", detail))
        if len(chosen) == 1:
            submissions += chosen
        else:
            origins = ", ".join(sorted(shown(candidate.origin) for candidate in chosen))
            detail = (
                f"{len(chosen)} submissions, and none is graded. Remove all but one of {origins}"
            )
            problems.append(Problem(student, lab, "duplicate", detail))
    problems += _unlisted(course, found, set(students))
    problems += _missing(course, set(found), problems, set(students), now or datetime.now(UTC))
    submissions.sort(key=lambda item: (item.lab, item.student))

    def order(item: Problem) -> tuple[str, ...]:
        return item.lab, item.student, item.kind, item.detail

    return submissions, sorted(set(problems), key=order)


def _by_owner(files: Iterable[File]) -> tuple[dict[Named, list[File]], list[Problem]]:
    """Group files by the name that says whose they are.

    Also return problems with names that cannot be used.
    """
    owned: dict[Named, list[File]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    problems = []
    for file in files:
        try:
            name = _named(file)
        except platforms.AmbiguousNameError as error:
            problems.append(Problem("", "", "name", f"{shown(str(file.path))}: {error}"))
            continue
        if not _is_id(name.student):
            detail = f"the name {shown(str(file.path))!r} has no id of a student that can be used"
            problems.append(Problem(shown(name.student)[:100], "", "name", detail))
            continue
        counts[name.student] += 1
        if counts[name.student] <= sources.MOST:
            owned[name].append(file)
    too_many = sorted(student for student, count in counts.items() if count > sources.MOST)
    for student in too_many:
        detail = f"more than {sources.MOST} files, and none is read. Leave only the notebooks"
        problems.append(Problem(student, "", "refused", detail))
    return {name: own for name, own in owned.items() if name.student not in too_many}, problems


def _named(file: File) -> Named:
    """Return what the name of a file or its folder says about the file's owner."""
    top, *below = file.path.parts or ("?",)
    if platforms.GRADESCOPE.fullmatch(top) and below:
        top, *below = below
    if file.known:
        return Named(platforms.normal(top), received=file.known.get("received", ""))
    return platforms.named(top, is_folder=bool(below))


def _submissions_of(
    name: Named,
    files: list[File],
    course: Course,
    process: LimitedProcess,
) -> Iterator[_Found | Problem]:
    """Yield the submissions of a student under one name.

    An error in one file does not stop the others.
    """
    others: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if file.stem is None and not file.trouble:
            others[_lab_by_name(name, file, course)].append(shown(_origin(file)))
            continue
        try:
            yield from list(_identified(name, file, course, process))
        except Exception as error:
            detail = f"{shown(str(file.path))!r} cannot be read: {type(error).__name__}"
            yield Problem(name.student, "", "refused", detail)
    for lab, paths in others.items():
        listed = ", ".join(paths[:3])
        if len(paths) > 3:
            listed += f" and {len(paths) - 3} more"
        yield Problem(name.student, lab, "not a notebook", listed)


def _identified(
    name: Named,
    file: File,
    course: Course,
    process: LimitedProcess,
) -> Iterator[_Found | Problem]:
    """Yield the submission in a file of a student, and what is wrong with it.

    `name` is what the platform's name says. The lab is the one that the notebook names. If it names
    none, the name of the file or of a folder says which lab it is, and otherwise the exercises do.
    """
    origin, by_name = _origin(file), _lab_by_name(name, file, course)
    try:
        data = file.data()
    except UnreadableError as error:
        yield Problem(name.student, by_name, "refused", f"{shown(origin)}: {error}")
        return
    lab, unreadable = by_name, ""
    stem = COPY.sub("", file.stem or file.path.stem)
    said, checked = "", []
    try:
        said, checked = process.call(reading.described, data, about=f"reading {shown(origin)}")
        if said in {item.name for item in course.labs}:
            lab = said
        elif not lab:
            lab = _lab_by_exercises(checked, course)
    except UnreadableError as error:
        unreadable = str(error)
    if not lab and len(course.labs) == 1:
        lab = course.labs[0].name
    if not lab:
        reason = unreadable or "neither its name nor its content says which lab this is"
        yield Problem(name.student, "", "unknown", f"{shown(origin)}: {reason}")
        return
    if unreadable:
        yield Problem(name.student, lab, "unreadable", f"{shown(origin)}: {unreadable}")
    if stem != lab and not stem.endswith(f"_{lab}"):
        yield Problem(name.student, lab, "renamed", f"{shown(origin)} belongs to {lab}")
    if file.doubted:
        reason = "because the student may have written it"
        detail = f"the file {STAMP} beside {shown(origin)} is ignored, {reason}"
        yield Problem(name.student, lab, "time not known", detail)
    received, known_from = _received(name, file)
    late = name.late or file.known.get("late") == "True"
    submission = Submission(
        name.student,
        lab,
        hashlib.sha256(data).hexdigest(),
        origin,
        file.source,
        file.member,
        received=received,
        known_from=known_from,
        late=late,
        file_time=file.file_time,
    )
    is_sure = said == lab or stem == lab or lab[:2] in checked
    yield _Found(submission, name.received, is_sure)


def _origin(file: File) -> str:
    """Return the file's name in the first source, even if an earlier `collect` has renamed it."""
    return file.known.get("origin") or str(file.path)


def _lab_by_exercises(lessons: list[str], course: Course) -> str:
    """Return the name of the first lab of a lesson, or "".

    `lessons` are the lessons whose exercises a notebook has. If there are several, the lab is
    unclear.
    """
    for lab in course.labs:
        if [lab.name[:2]] == lessons:
            return lab.name
    return ""


def _lab_by_name(name: Named, file: File, course: Course) -> str:
    """Return the lab that the name of the file, its folder or the platform contains, or ""."""
    names = {lab.name for lab in course.labs}
    candidates = (
        COPY.sub("", file.stem or file.path.stem),
        *reversed(file.path.parts[:-1]),
        name.lab,
    )
    return next((part for part in candidates if part in names), "")


def _received(name: Named, file: File) -> tuple[str, str]:
    """Return when a submission arrived, to the second, and the source of this time."""
    exact = name.received or file.stamp
    if not exact:
        return "", ""
    received = datetime.fromisoformat(exact).replace(microsecond=0).isoformat()
    known_from = file.known.get("known_from")
    if not known_from:
        known_from = MANIFEST if file.known else "nbgrader"
    return received, known_from


def _chosen(candidates: list[_Found]) -> tuple[list[Submission], list[Submission]]:
    """Return two lists: the submissions that count, and the other ones.

    If a person has to choose, the first list has several submissions.
    """
    if all(item.submission.known_from == "nbgrader" for item in candidates):
        latest = max(item.received for item in candidates)
        candidates = [item for item in candidates if item.received == latest]
    sure = [item.submission for item in candidates if item.is_sure]
    if len(sure) != 1:
        return [item.submission for item in candidates], []
    return sure, [item.submission for item in candidates if not item.is_sure]


def _unlisted(course: Course, found: Iterable[tuple[str, str]], listed: set[str]) -> list[Problem]:
    """Return problems for students who have handed in or have an extension, but are not listed.

    `found` has the (lab, student) of each submission.
    """
    if not listed:
        return []
    strangers = [key for key in found if key[0] not in listed]
    reason = "the list of students has no such id"
    problems = [Problem(student, lab, "unlisted", reason) for student, lab in strangers]
    handed_in = {student for student, _ in found}
    for student, lab in course.extensions:
        if student not in listed | handed_in:
            detail = f"the course file has an extension for this id, and {reason}"
            problems.append(Problem(student, lab, "unlisted", detail))
    return problems


def _missing(
    course: Course,
    found: set[tuple[str, str]],
    problems: list[Problem],
    listed: set[str],
    now: datetime,
) -> list[Problem]:
    """Return problems for students who have handed in nothing for a lab that is due at `now`.

    A lab without a date is due as soon as somebody has handed it in. `found` has the (lab, student)
    of each submission, and `listed` the students.
    """
    known = found | {(problem.student, problem.lab) for problem in problems}
    expected = sorted(listed or {student for student, _ in found})
    missing = []
    for lab in course.labs:
        handed_in = any(name == lab.name for _, name in found)
        for student in expected:
            due = course.due(student, lab)
            is_due = handed_in if due is None else due < now
            if is_due and (student, lab.name) not in known:
                reason = "nothing was handed in"
                if (student, "") in known:
                    reason = "nothing that can be graded was handed in"
                missing.append(Problem(student, lab.name, "missing", reason))
    return missing


def _is_id(name: str) -> bool:
    """Return whether a name is safe as a file name and as a cell of a table.

    Letters of any script are safe. A formula, which a spreadsheet program would compute, is not.
    """
    return (
        0 < len(name.encode(errors="replace")) <= 200
        and name.isprintable()
        and name[0] not in ".=+-@"
        and not re.search(r"[/\\\\<>\"|?*:]", name)
    )


def _known_problems(folder: Path) -> list[Problem]:
    """Return the problems that an earlier `collect` found and that remain.

    Missing submissions may have arrived since, so they are left out.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        remaining = []
        for item in [Problem(**entry) for entry in content["problems"]]:
            notebook = folder / item.student / f"{item.lab}.ipynb"
            if item.kind != "missing" and not notebook.exists():
                remaining.append(item)
        return remaining
    return []


def write(submissions: list[Submission], problems: list[Problem], folder: Path) -> None:
    """Write a folder per student with a notebook per lab, and a list of all submissions.

    Notebooks that an earlier `collect` wrote there and this one did not find are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = manifest(folder)
    listed = []
    for item in submissions:
        path = folder / item.student / f"{item.lab}.ipynb"
        path.parent.mkdir(exist_ok=True)
        data = item.read()
        if hashlib.sha256(data).hexdigest() != item.digest:
            detail = f"{shown(item.origin)} has changed since it was found"
            problems = [*problems, Problem(item.student, item.lab, "refused", detail)]
            continue
        path.write_bytes(data)
        listed.append(
            {
                "student": item.student,
                "lab": item.lab,
                "file": str(path.relative_to(folder)),
                "origin": item.origin,
                "received": item.received,
                "known_from": item.known_from,
                "late": item.late,
                "file_time": item.file_time,
                "sha256": item.digest,
            }
        )
    for name in set(earlier) - {str(item["file"]) for item in listed}:
        if re.fullmatch(r"[^/]+/[^/]+\.ipynb", name) and ".." not in name.split("/"):
            (folder / name).unlink(missing_ok=True)
    content = {"submissions": listed, "problems": [asdict(problem) for problem in problems]}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")
