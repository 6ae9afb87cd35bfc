"""Collecting: which student handed in what, out of a folder, a zip file of a learning platform, or nbgrader's exchange.

Identity and time come only from what the platform wrote (`labcourse.platforms`), never from a file of a student's own.
Nothing is unpacked: a file's content is read within limits, and what is written goes to names made here.
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

COPY = re.compile(r"(-[0-9]+| ?\([0-9]+\))$")  # how platforms and browsers number a second copy of a file


@dataclass(frozen=True)
class Submission:
    """One student's notebook for one lab: where it lies, not what is in it, so that a class of any size fits the memory.

    Attributes:
        digest: SHA-256 of its content.
        origin: its name in the source.
        source: the file, or the zip file that holds it as `member`; None where the content is `held`, on its way to another machine.
        received: when, in ISO 8601, or "" where nobody knows; `known_from` says who does.
        late: whether the platform's name for the file says so.
        file_time: of the file, in ISO 8601; it may be that of the download.
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
        """Read the content. Return nothing if the file no longer holds what was collected."""
        try:
            if self.source is None:
                data = self.held
            elif self.member:
                data = member_bytes(self.source, self.member)
            else:
                data = reading.file_bytes(self.source)
        except (UnreadableError, OSError, zipfile.BadZipFile):
            return b""
        return data if hashlib.sha256(data).hexdigest() == self.digest else b""

    def loaded(self) -> "Submission":
        """The same with its content in hand."""
        return replace(self, source=None, member="", held=self.read())


@dataclass(frozen=True)
class Problem:
    """What was found and cannot be graded as it is, or is not as it should be."""

    student: str
    lab: str
    kind: str
    detail: str


@dataclass(frozen=True)
class _Found:
    """A submission.

    Attributes:
        received: when it came, as exactly as the platform's name says.
        is_sure: whether the notebook itself or its name says which lab it is. Otherwise its folder does.
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
    """Everything in a folder or zip file, in order of lab and student, and what is wrong with it.

    With nbgrader, a student's latest submission counts. Otherwise none of several counts until a
    person decides.

    Args:
        students: those who should have handed in; without them, all who handed in anything.
            A student who is not among them is graded too, and named.
        now: a lab that is not due at this time is not missing. By default, the time of the call.
        report: gets a line of text when a file takes long to read. The line names the file.

    Raises:
        OSError, ValueError: the source is no folder or zip file.
    """
    problems = [] if source.is_file() else _known_problems(source)
    found: dict[tuple[str, str], list[_Found]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        files = sources.in_zip(stack, source) if source.is_file() else sources.in_folder(source)
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
            detail = f"{shown(other.origin)} is left out, because {shown(chosen[0].origin)} is the lab's notebook"
            problems.append(Problem(student, lab, "left out", detail))
        if len(chosen) == 1:
            submissions += chosen
        else:
            names = ", ".join(sorted(shown(candidate.origin) for candidate in chosen))
            detail = f"{len(chosen)} submissions, none is graded: remove all but one of {names}"
            problems.append(Problem(student, lab, "duplicate", detail))
    problems += _unlisted(course, found, set(students))
    problems += _missing(course, set(found), problems, set(students), now or datetime.now(UTC))
    submissions.sort(key=lambda item: (item.lab, item.student))
    return submissions, sorted(set(problems), key=lambda item: (item.lab, item.student, item.kind, item.detail))


def _by_owner(files: Iterable[File]) -> tuple[dict[Named, list[File]], list[Problem]]:
    """The files below each name of a student, and the names that cannot be used."""
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
            detail = f"{shown(str(file.path))!r} names no student in a way that can be used"
            problems.append(Problem(shown(name.student)[:100], "", "name", detail))
            continue
        counts[name.student] += 1
        if counts[name.student] <= sources.MOST:
            owned[name].append(file)
    for student in sorted(student for student, count in counts.items() if count > sources.MOST):
        detail = f"more than {sources.MOST} files, none is looked at. Leave only the notebooks"
        problems.append(Problem(student, "", "refused", detail))
    return {name: own for name, own in owned.items() if counts[name.student] <= sources.MOST}, problems


def _named(file: File) -> Named:
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
    """The submissions of one student under one name. An error in one file does not stop the others."""
    others: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if file.path.suffix != ".ipynb" and not file.trouble:
            others[_lab_by_name(name, file, course)].append(shown(_origin(file)))
            continue
        try:
            yield from list(_identified(name, file, course, process))
        except Exception as error:
            detail = f"{shown(str(file.path))!r} cannot be read: {type(error).__name__}"
            yield Problem(name.student, "", "refused", detail)
    for lab, paths in others.items():
        more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
        yield Problem(name.student, lab, "not a notebook", ", ".join(paths[:3]) + more)


def _identified(
    name: Named,
    file: File,
    course: Course,
    process: LimitedProcess,
) -> Iterator[_Found | Problem]:
    """The submission in a file.

    The lab is the one that the notebook names. Without such a name it is that of the file or of a
    folder, and without these that of the exercises.
    """
    origin, by_name = _origin(file), _lab_by_name(name, file, course)
    try:
        data = file.data()
    except UnreadableError as error:
        yield Problem(name.student, by_name, "refused", f"{shown(origin)}: {error}")
        return
    lab, unreadable = by_name, ""
    stem = COPY.sub("", file.path.stem)
    said, checked = "", []
    try:
        said, checked = process.call(reading.described, data, about=f"reading {shown(origin)}")
        if said in {item.name for item in course.labs}:
            lab = said
        else:
            lab = by_name or next((item.name for item in course.labs if [item.name[:2]] == checked), "")
    except UnreadableError as error:
        unreadable = str(error)
    if not lab and len(course.labs) == 1:
        lab = course.labs[0].name
    if not lab:
        reason = unreadable or "it cannot be told which lab this is"
        yield Problem(name.student, "", "unknown", f"{shown(origin)}: {reason}")
        return
    if unreadable:
        yield Problem(name.student, lab, "unreadable", f"{shown(origin)}: {unreadable}")
    if stem != lab and not stem.endswith(f"_{lab}"):
        yield Problem(name.student, lab, "renamed", f"{shown(origin)} is taken for {lab}")
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
    yield _Found(submission, name.received, is_sure=said == lab or stem == lab or lab[:2] in checked)


def _origin(file: File) -> str:
    return file.known.get("origin") or str(file.path)


def _lab_by_name(name: Named, file: File, course: Course) -> str:
    names = {lab.name for lab in course.labs}
    candidates = (COPY.sub("", file.path.stem), *reversed(file.path.parts[:-1]), name.lab)
    return next((part for part in candidates if part in names), "")


def _received(name: Named, file: File) -> tuple[str, str]:
    """When the submission came, to the second, and who says so."""
    exact = name.received or file.stamp
    if not exact:
        return "", ""
    received = datetime.fromisoformat(exact).replace(microsecond=0).isoformat()
    return received, file.known.get("known_from") or (MANIFEST if file.known else "nbgrader")


def _chosen(candidates: list[_Found]) -> tuple[list[Submission], list[Submission]]:
    """Choose the submission that counts. Return it, or several for a person to decide, and the others."""
    if all(item.submission.known_from == "nbgrader" for item in candidates):
        latest = max(item.received for item in candidates)
        candidates = [item for item in candidates if item.received == latest]
    sure = [item.submission for item in candidates if item.is_sure]
    if len(sure) != 1:
        return [item.submission for item in candidates], []
    return sure, [item.submission for item in candidates if not item.is_sure]


def _unlisted(course: Course, found: Iterable[tuple[str, str]], listed: set[str]) -> list[Problem]:
    """Students who are not in the list, by what they handed in and by their extensions."""
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
    """Students who have handed in nothing for a lab that is due.

    A lab without a date is due once somebody has handed it in.
    """
    known = found | {(problem.student, problem.lab) for problem in problems}
    expected = sorted(listed or {student for student, _ in found})
    missing = []
    for lab in course.labs:
        came = any(name == lab.name for _, name in found)
        for student in expected:
            due = course.due(student, lab)
            is_due = due < now if due else came
            if is_due and (student, lab.name) not in known:
                reason = "nothing that can be graded" if (student, "") in known else "nothing was handed in"
                missing.append(Problem(student, lab.name, "missing", reason))
    return missing


def _is_id(name: str) -> bool:
    """Whether it can be a file's name and a table's cell: letters of any script can, what a spreadsheet would compute cannot."""
    return (
        0 < len(name.encode(errors="replace")) <= 200
        and name.isprintable()
        and name[0] not in ".=+-@"
        and not re.search(r"[/\\\\<>\"|?*:]", name)
    )


def _known_problems(folder: Path) -> list[Problem]:
    """The problems that an earlier `collect` found and that are still there; what was missing then may have come since."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = [Problem(**item) for item in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["problems"]]
        return [item for item in known if item.kind != "missing" and not (folder / item.student / f"{item.lab}.ipynb").exists()]
    return []


def write(submissions: list[Submission], problems: list[Problem], folder: Path) -> None:
    """Write a folder for each student with a notebook for each lab, and a list of all.

    Remove what an earlier `collect` wrote there and this one did not find, such as the first of two
    submissions.
    """
    folder.mkdir(parents=True, exist_ok=True)
    earlier = manifest(folder)
    listed = []
    for item in submissions:
        path = folder / item.student / f"{item.lab}.ipynb"
        path.parent.mkdir(exist_ok=True)
        data = item.read()
        if hashlib.sha256(data).hexdigest() != item.digest:
            problems = [*problems, Problem(item.student, item.lab, "refused", f"{shown(item.origin)} has changed since it was found")]
            continue
        path.write_bytes(data)
        about = {"student": item.student, "lab": item.lab, "file": str(path.relative_to(folder)), "origin": item.origin}
        when = {"received": item.received, "known_from": item.known_from, "late": item.late, "file_time": item.file_time}
        listed.append({**about, **when, "sha256": item.digest})
    for name in set(earlier) - {str(item["file"]) for item in listed}:
        if re.fullmatch(r"[^/]+/[^/]+\.ipynb", name) and ".." not in name.split("/"):
            (folder / name).unlink(missing_ok=True)
    content = {"submissions": listed, "problems": [asdict(problem) for problem in problems]}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
