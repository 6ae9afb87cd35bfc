"""Collecting: which student handed in what, out of a folder, a zip file of a learning platform, or nbgrader's exchange.

Nothing is unpacked: a file's content is read within limits, and what is written goes to names made here.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from labcourse import reading
from labcourse.assignment import Course
from labcourse.reading import LARGEST, UnreadableError

__all__ = ["Problem", "Submission", "collect", "write"]

MANIFEST = "collected.json"
NBGRADERS = ("timestamp.txt", "submission_secret.txt")  # what nbgrader adds to what students hand in
MOST = 50_000  # files that are looked at
DENSEST = 200  # bytes that one byte of a zip file may stand for
# How platforms name what they hand out. Each says who the student is; nbgrader's inbound folder also when it came.
CANVAS = re.compile(r"[^_/]+_(?:LATE_)?(?P<student>\d+)_\d+_(?P<file>[^/]+)")
MOODLE = re.compile(r"(?P<owner>[^/]+_(?P<student>\d+)_assignsubmission_[a-z]+_?)(?P<file>[^/]*)")  # with folders, or without
INBOUND = re.compile(r"(?P<student>[^+/]+)\+(?P<lab>[^+/]+)\+(?P<time>[^+/]+)\+[^+/]+")


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
        """Its content; nothing if that is not what was collected any more, which then is no notebook."""
        try:
            data = (
                self.held if self.source is None else _member(self.source, self.member) if self.member else reading.file_bytes(self.source)
            )
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
class _File:
    path: PurePosixPath
    file_time: str
    data: bytes
    source: Path
    member: str = ""
    trouble: str = ""
    known: dict[str, str] = field(default_factory=dict)  # what an earlier `collect` wrote of it
    stamp: str = ""  # when, by nbgrader's file beside it


def collect(source: Path, course: Course, students: Iterable[str] = ()) -> tuple[list[Submission], list[Problem]]:
    """Everything in a folder or zip file, in order of lab and student, and what is wrong with it.

    Of two submissions of one student to one lab none counts: which one does, a person decides. `students` are those who should have
    handed in; without them, all who handed in anything. Who is not among them is graded all the same, and named.

    Raises:
        OSError, ValueError: the source is no folder or zip file.
    """
    found: dict[tuple[str, str], list[Submission]] = defaultdict(list)
    problems = [] if source.is_file() else _known_problems(source)
    for file in _zipped(source) if source.is_file() else _in_folder(source):
        for item in _safely_identified(file, course):
            if isinstance(item, Problem):
                problems.append(item)
            else:
                found[item.student, item.lab].append(item)
    submissions = []
    for (student, lab), candidates in sorted(found.items()):
        if len(candidates) == 1:
            submissions += candidates
        else:
            names = ", ".join(sorted(candidate.origin for candidate in candidates))
            detail = f"{len(candidates)} submissions, none is graded: remove all but one of {names}"
            problems.append(Problem(student, lab, "duplicate", detail))
    listed = set(students)
    unlisted = [(student, lab) for student, lab in found if listed and student not in listed]
    problems += [Problem(student, lab, "unlisted", "the list of students has no such id") for student, lab in unlisted]
    expected = sorted(listed or {student for student, _ in found})
    broken = {(problem.student, problem.lab) for problem in problems}
    for name in (lab.name for lab in course.labs):
        known = {student for student, lab in (*found, *broken) if lab == name}
        problems += [Problem(student, name, "missing", "nothing was handed in") for student in expected if student not in known]
    submissions.sort(key=lambda item: (item.lab, item.student))
    return submissions, sorted(set(problems), key=lambda item: (item.lab, item.student, item.kind))


def _safely_identified(file: _File, course: Course) -> list[Submission | Problem]:
    """Whatever is in one file, the others are read all the same."""
    try:
        return list(_identified(file, course))
    except Exception as error:
        student = file.path.parts[0][:100].encode(errors="replace").decode() if file.path.parts else "?"
        return [Problem(student, "", "refused", f"{str(file.path)[:200]!r} cannot be read: {type(error).__name__}")]


def _identified(file: _File, course: Course) -> Iterator[Submission | Problem]:
    """The submission in a file. Its lab: what the notebook names, else its own or its folder's name, else that of its exercises."""
    student, received, known_from = _whose(file)
    if not _is_id(student):
        yield Problem(student[:100], "", "name", f"{str(file.path)[:200]!r} names no student in a way that can be used")
        return
    names = {lab.name for lab in course.labs}
    inbound = INBOUND.match(file.path.parts[0])
    candidates = (file.path.stem, *reversed(file.path.parts[:-1]), inbound["lab"] if inbound else "")
    named = next((part for part in candidates if part in names), "")
    origin = file.known.get("origin") or str(file.path)
    late = bool(file.known.get("late")) or "_LATE_" in file.path.parts[0]
    if file.trouble:
        yield Problem(student, named, "refused", f"{origin}: {file.trouble}")
        return
    if file.path.suffix != ".ipynb":
        yield Problem(student, named, "not a notebook", origin)
        return
    try:
        notebook = reading.parse(file.data)
        checked = sorted({number[:2] for number in notebook.checked})
        guessed = next((lab.name for lab in course.labs if [lab.name[:2]] == checked), "")
        name = notebook.lab if notebook.lab in names else named or guessed
    except UnreadableError:
        name = named  # the grader says what is wrong with it
    if not name and len(course.labs) == 1:
        name = course.labs[0].name
    if not name:
        yield Problem(student, "", "unknown", f"{origin}: it cannot be told which lab this is")
        return
    if file.path.stem != name and not file.path.stem.endswith(f"_{name}"):
        yield Problem(student, name, "renamed", f"{origin} is taken for {name}")
    when: dict[str, Any] = {"received": received, "known_from": known_from, "late": late, "file_time": file.file_time}
    yield Submission(student, name, hashlib.sha256(file.data).hexdigest(), origin, file.source, file.member, **when)


def _whose(file: _File) -> tuple[str, str, str]:
    """The student's id, normalized so that one name is one student; when the file was received, and who says so."""
    top = file.path.parts[0]
    if file.known:
        received = file.known.get("received", "")
        return _normal(top), received, file.known.get("known_from") or MANIFEST * bool(received)
    if match := INBOUND.fullmatch(top):
        return _normal(match["student"]), _nbgrader_time(match["time"]), "nbgrader"
    for pattern in (MOODLE, CANVAS):
        if match := pattern.fullmatch(top):
            return match["student"], "", ""
    return _normal(top if len(file.path.parts) > 1 else file.path.stem), file.stamp, "nbgrader" if file.stamp else ""


def _normal(name: str) -> str:
    return unicodedata.normalize("NFC", name).strip()


def _is_id(name: str) -> bool:
    """Whether it can be a file's name and a table's cell: letters of any script can, what a spreadsheet would compute cannot."""
    return (
        0 < len(name.encode(errors="replace")) <= 200
        and name.isprintable()
        and name[0] not in ".=+-@"
        and not re.search(r"[/\\\\<>\"|?*:]", name)
    )


def _nbgrader_time(text: str) -> str:
    try:
        return datetime.strptime(text.removesuffix(" UTC")[:19], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).isoformat()
    except ValueError:
        return ""


def _in_folder(folder: Path) -> Iterator[_File]:
    """The files below a folder, in order; links are named, not followed."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder and no zip file")
    known = _manifest(folder)
    count = 0
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__MACOSX")
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*names, *links]):
            path = Path(parent, name)
            relative = path.relative_to(folder)
            if name.startswith(".") or name in (*NBGRADERS, MANIFEST):
                continue
            count += 1
            if count > MOST:
                raise ValueError(f"{folder} holds more than {MOST} files")
            text = os.fsencode(str(relative)).decode(errors="replace")
            about: dict[str, Any] = {
                "file_time": known.get(str(relative), {}).get("file_time") or _changed(path),
                "source": path,
                "known": known.get(str(relative), {}),
                "stamp": _stamp(path, relative),
            }
            try:
                yield _File(PurePosixPath(text), data=reading.file_bytes(path) if path.suffix == ".ipynb" else b"", **about)
            except UnreadableError as error:
                yield _File(PurePosixPath(text), data=b"", trouble=str(error), **about)


def _stamp(path: Path, relative: Path) -> str:
    """The time in nbgrader's own file beside a notebook, in a folder of a lab in one of a student, as nbgrader has them."""
    with contextlib.suppress(UnreadableError, OSError):
        if len(relative.parts) == 3 and path.with_name(NBGRADERS[0]).exists():
            return _nbgrader_time(reading.file_bytes(path.with_name(NBGRADERS[0]))[:40].decode(errors="replace"))
    return ""


def _changed(path: Path) -> str:
    return datetime.fromtimestamp(int(path.lstat().st_mtime), UTC).isoformat()


def _manifest(folder: Path) -> dict[str, dict[str, str]]:
    """What is known of each file, where an earlier `collect` wrote this folder."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return {item["file"]: item for item in json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["submissions"]}
    return {}


def _known_problems(folder: Path) -> list[Problem]:
    """The problems that an earlier `collect` found and that are still there; what was missing then may have come since."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = [Problem(**item) for item in json.loads((folder / MANIFEST).read_text())["problems"]]
        return [item for item in known if item.kind != "missing" and not (folder / item.student / f"{item.lab}.ipynb").exists()]
    return []


def _zipped(path: Path) -> Iterator[_File]:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no folder and no zip file")
    try:
        opened = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a zip file: {error}") from None
    with opened as archive:
        members = [member for member in archive.infolist() if not member.is_dir()]
        if len(members) > MOST:
            raise ValueError(f"{path} holds more than {MOST} files")
        for member in sorted(members, key=lambda member: member.filename):
            name = PurePosixPath(member.filename.replace("\\", "/"))
            if name.name.startswith(".") or "__MACOSX" in name.parts:
                continue
            received = _zip_time(member.date_time)
            safe = PurePosixPath(*[part for part in name.parts if part not in ("..", "/")]) if name.parts else PurePosixPath("?")
            trouble = _zip_trouble(member, name)
            if trouble or safe.suffix != ".ipynb":
                yield _File(safe, received, b"", path, trouble=trouble)
                continue
            try:
                data = _member(archive, member)
                large = f"it is larger than {LARGEST >> 20} MiB" if len(data) > LARGEST else ""
                yield _File(safe, received, data, path, member.filename, large)
            except Exception as error:  # of many kinds, from a file that somebody made by hand
                yield _File(safe, received, b"", path, trouble=f"it cannot be unpacked ({type(error).__name__})")


def _member(archive: Path | zipfile.ZipFile, member: str | zipfile.ZipInfo) -> bytes:
    """A file in a zip file, whatever its directory says of its size; of one that is too large, a byte more than is allowed."""
    if isinstance(archive, Path):
        with zipfile.ZipFile(archive) as opened:
            return _member(opened, member)
    with archive.open(member) as file:
        return file.read(LARGEST + 1)


def _zip_trouble(member: zipfile.ZipInfo, name: PurePosixPath) -> str:
    if name.is_absolute() or ".." in name.parts or re.match(r"[A-Za-z]:", member.filename):
        return "its name leads out of the folder"
    if stat.S_ISLNK(member.external_attr >> 16):
        return "it is a symbolic link"
    if member.file_size > LARGEST:
        return f"it is larger than {LARGEST >> 20} MiB"
    if member.file_size > (1 << 20) and member.file_size > DENSEST * max(1, member.compress_size):
        return "it is packed so densely that it is no notebook"
    return ""


def _zip_time(parts: tuple[int, int, int, int, int, int]) -> str:
    try:
        return datetime(*parts, tzinfo=UTC).isoformat()
    except ValueError:
        return ""


def write(submissions: list[Submission], problems: list[Problem], folder: Path) -> None:
    """A folder for each student with a notebook for each lab, and a list of all."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for item in submissions:
        path = folder / item.student / f"{item.lab}.ipynb"
        path.parent.mkdir(exist_ok=True)
        data = item.read()
        if hashlib.sha256(data).hexdigest() != item.digest:
            problems = [*problems, Problem(item.student, item.lab, "refused", f"{item.origin} has changed since it was found")]
            continue
        path.write_bytes(data)
        about = {"student": item.student, "lab": item.lab, "file": str(path.relative_to(folder)), "origin": item.origin}
        when = {"received": item.received, "known_from": item.known_from, "late": item.late, "file_time": item.file_time}
        listed.append({**about, **when, "sha256": item.digest})
    content = {"submissions": listed, "problems": [asdict(problem) for problem in problems]}
    (folder / MANIFEST).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
